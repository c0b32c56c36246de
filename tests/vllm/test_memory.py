"""What an update of real vLLM takes: bytes at the bound, and of a worker's memory a layer beside its model.

Beside it runs vLLM's own way (`tests.bench.engines.peer`), which has to end at the same tokens.
"""

from __future__ import annotations

from tests.bench.engines.jobs import OURS, PEER, Case
from tests.bench.engines.running import run

INFLIGHT = 8 << 20
# A layer of 35 MB on each worker, so that what processes take besides is little beside it.
CASE = Case(
    layers=4,
    hidden=1536,
    inner=6144,
    vocab=512,
    trainers=2,
    tp=2,
    seeds=(1, 2, 1),
    max_inflight_bytes=INFLIGHT,
)
SLACK = 8 << 20
"""What Python and allocators take."""


def test_an_update_takes_a_layer_beside_the_model() -> None:
    found = run(CASE)
    ours = [update for update in found.updates if update.way == OURS]
    peers = [update for update in found.updates if update.way == PEER]
    tokens = {update.seed: update.tokens for update in peers}
    assert len(set(tokens.values())) == 2
    assert [update.seed for update in ours] == list(CASE.seeds)
    for update in ours:
        assert update.tokens == tokens[update.seed]
        each = zip(update.received, update.costs, update.stored, strict=True)
        for received, cost, (whole, layer) in each:
            print(
                f"{received} of {whole} bytes, {layer} in a layer, {cost}, {update.seconds:.2f} s"
            )
            assert received == whole
            assert cost.rise <= layer + INFLIGHT + SLACK
    # Nothing whole anywhere in a trainer.
    (_, layer) = ours[0].stored[0]
    assert max(cost.rise for cost in found.trainers[OURS]) <= layer
