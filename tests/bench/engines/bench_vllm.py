"""An engine's weights replaced while it runs, beside vLLM's own path, in one run.

    .venv-vllm/bin/python tests/bench/engines/bench_vllm.py [layers of the larger model] [updates by each way]

A model like Llama, of wide layers, is trained by 4 processes under FSDP2, and served by vLLM with tensor parallelism of
2. The peer is vLLM's own way (`peer`): tensors are gathered whole on every rank of the trainer, sent whole to every
worker, and taken by `load_weights`. vLLM repacks weights for the processor as they arrive, which costs both the same.
Its share of the processors' seconds is counted in updates by shardmath, where it can be told apart. "Repacking alone"
(`repacking`) is that of weights that the workers have already: no update takes less.

Seconds are those of `send_weights` on rank 0, the median; those of processors are of all processes together, the mean.
Memory is how far a process rose in an update, the most of all. What a worker has to receive is what its own loader
stores. The goals: no byte more, a quarter of the time, and a worker's memory of at most one layer and
`max_inflight_bytes`.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "backends"))
sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.bench.engines.jobs import (
    ENVIRONMENT,
    FLOOR,
    OURS,
    PEER,
    Case,
    Update,
    count_parameters,
)
from tests.bench.engines.running import Found, run
from tests.bench.section import arguments, show

TITLE = "Weights into a running vLLM"
NAMES = {OURS: "shardmath", PEER: "gathered whole", FLOOR: FLOOR}
FEW = 4
INFLIGHT = 16 << 20
HEADS = [
    "weights",
    "way",
    "seconds",
    "fastest to slowest",
    "peer / ours",
    "processor seconds",
    "of these, vLLM's processing",
    "a worker receives",
    "a worker must receive",
    "a worker's memory grows by",
    "its limit: one layer, and bytes in flight",
    "a trainer's memory grows by",
]


def describe(layers: int, updates: int) -> Case:
    """The model of so many layers, of 121 MB each, and its updates: the first is not counted."""
    return Case(
        layers=layers,
        hidden=2048,
        inner=8192,
        vocab=1024,
        trainers=4,
        tp=2,
        seeds=tuple(1 + number % 2 for number in range(updates + 1)),
        max_inflight_bytes=INFLIGHT,
        has_floor=True,
    )


def main(layers: int, updates: int, page: Path | None = None) -> None:
    """Runs both models, and shows the table."""
    # As vLLM is imported, by what processes are forked from.
    os.environ.update(ENVIRONMENT)
    rows = []
    for number in (FEW, layers):
        case = describe(number, updates)
        rows += list_rows(case, run(case))
    about = (
        f"A trainer with 4 processes under FSDP2 sends bfloat16 weights over gloo to vLLM 0.32.0 on this processor. "
        f'vLLM has tensor parallelism of 2. The peer, "gathered whole", gathers each tensor and sends the whole tensor '
        f"to every worker, as vLLM's backend `nccl` does. Updates by shardmath and by the peer alternate. Seconds are "
        f"the median of {updates} updates. Memory is the largest growth of any process in any update. Processor "
        f'seconds are the sum over all processes. In rows of "{FLOOR}", vLLM repacks weights that the workers have '
        f"already, and nothing moves."
    )
    show(page, TITLE, about, HEADS, rows)


def list_rows(case: Case, found: Found) -> list[list[str]]:
    """A row of each way. Raises RuntimeError where both end at other tokens."""
    _check([update for update in found.updates if update.way != FLOOR])
    weights = _show(2 * count_parameters(case))
    seconds = {way: _list_seconds(found.updates, way) for way in (*case.ways, FLOOR)}
    took = {way: statistics.median(each) for way, each in seconds.items()}
    stored = [one for update in found.updates for one in update.stored]
    whole, layer = map(max, zip(*stored, strict=True))
    rows = []
    for way in seconds:
        mine = [update for update in found.updates if update.way == way]
        workers = [cost for update in mine for cost in update.costs]
        busy = sum(cost.busy for cost in [*workers, *found.trainers[way]])
        row = [
            weights,
            NAMES[way],
            f"{took[way]:.2f}",
            f"{min(seconds[way]):.2f} to {max(seconds[way]):.2f}",
            f"{took[PEER] / took[way]:.1f}x",
            f"{busy / len(mine):.2f}",
        ]
        if way == FLOOR:
            rows.append([*row, *[""] * (len(HEADS) - len(row))])
            continue
        processed = sum(one for update in mine for one in update.processed)
        rows.append(
            [
                *row,
                f"{processed / len(mine):.2f}" if processed else "",
                _show(max(one for update in mine for one in update.received)),
                _show(whole),
                _show(max(cost.rise for cost in workers)),
                _show(layer + case.max_inflight_bytes),
                _show(max(cost.rise for cost in found.trainers[way])),
            ]
        )
    return rows


def _check(updates: Sequence[Update]) -> None:
    """Raise RuntimeError where the same weights gave other tokens, or others the same."""
    tokens = {(update.seed, update.tokens) for update in updates}
    seeds = {update.seed for update in updates}
    if len(tokens) != len(seeds) or len({one for _, one in tokens}) != len(seeds):
        raise RuntimeError(f"tokens by weights are {sorted(tokens)}; one each was expected")


def _list_seconds(updates: Sequence[Update], way: str) -> list[float]:
    """Seconds of each, but for the first update."""
    return [update.seconds for update in updates if update.way == way][1:]


def _show(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


if __name__ == "__main__":
    given = arguments(__doc__ or "", layers=12, updates=10)
    main(given.layers, given.updates, given.page)
