"""What an update of real vLLM takes: bytes at the bound, and how much memory, which is printed.

Beside it runs vLLM's own way (`tests.bench.engines.peer`), which has to end at the same tokens.
"""

from __future__ import annotations

import pytest

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


@pytest.mark.slow
def test_every_byte_comes_once_and_tokens_are_those_of_vllm_s_own_path() -> None:
    """How far memory rises is printed: what allocators keep of a process differs from run to run."""
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
    print(max(cost.rise for cost in found.trainers[OURS]), "on a trainer")
