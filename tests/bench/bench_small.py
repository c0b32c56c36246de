"""Many small tensors between gloo processes, beside a send for each; and what agreeing costs where nothing moves.

    python tests/bench/bench_small.py [tensors] [repeats]

Half of the processes hold parts of 4 KiB of each tensor, and the others receive them. Times are milliseconds, the
slowest rank of the median repeat; all ways take turns in each repeat, since machines have spells. Beside them is the
processor time of a rank, which neighbors on the machine disturb less. "dist.send per tensor" has dist.recv at the
other end; "dist.isend per tensor" posts all of dist.isend and dist.irecv before any is waited for;
"batch_isend_irecv" is one call. smt.Refit looks at its tensors' modules as well. The target: 20 times as fast
as a send each.

Of an empty plan a move is a vote and nothing else; dist.barrier and dist.all_gather of 1 KiB stand beside it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath.storage import Stored, parse
from tests.bench.section import arguments, show
from tests.distributed.pool import Pool

Acts = dict[str, Callable[[], object]]


class Times(NamedTuple):
    """Seconds of each repeat on a rank: on the clock, and of its processor."""

    clock: list[float]
    processor: list[float]


OURS = "shardmath"
PEERS = ("dist.send per tensor", "dist.isend per tensor", "batch_isend_irecv")
CALLS = 100
"""Of what moves nothing, in each repeat."""


def stored(ranks: range) -> Stored:
    """Rows divided over these ranks."""
    rows = "layers.{l}.w = layers.{l}.w : (tp n) h"
    return Stored(parse(rows), (sm.Mesh(tp=len(ranks), ranks=ranks),))


def send_by_hand(held: Mapping[str, Tensor], rank: int, half: int) -> Acts:
    """The peers' ways, between the ranks that hold the same rows."""
    peer = (rank + half) % (2 * half)
    post = dist.isend if rank < half else dist.irecv
    wait = dist.send if rank < half else dist.recv

    def each() -> None:
        for tensor in held.values():
            wait(tensor, peer)

    def posted() -> None:
        for work in [post(tensor, peer) for tensor in held.values()]:
            work.wait()

    def batch() -> None:
        for work in dist.batch_isend_irecv([dist.P2POp(post, t, peer) for t in held.values()]):
            work.wait()

    return dict(zip(PEERS, (each, posted, batch), strict=True))


def measure(
    acts: Acts, repeats: int, before: Callable[[], None], calls: int = 1
) -> dict[str, Times]:
    """So many calls of each way in turn, all ranks starting together; the first turn warms up."""
    found = {name: Times([], []) for name in acts}
    for turn in range(repeats + 1):
        for name, act in acts.items():
            before()
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            for _ in range(calls):
                act()
            clock, processor = time.perf_counter() - start, time.process_time() - used
            if turn:
                found[name].clock.append(clock / calls)
                found[name].processor.append(processor / calls)
    return found


def move_small(rank: int, count: int, repeats: int) -> dict[str, Times]:
    """Of one rank, by way."""
    half = dist.get_world_size() // 2
    shapes = {f"layers.{n}.w": ((32 * half, 32), "float32") for n in range(count)}
    planned = sm.refit(stored(range(half)), stored(range(half, 2 * half)), shapes)
    held = {name: torch.full((32, 32), float(rank < half)) for name in shapes}
    sides = {"src" if rank < half else "dst": held}
    refit = smt.Refit(planned)
    refit.prepare(**sides)
    move = smt.compile(planned.plan)
    src, out = sides.get("src"), sides.get("dst")
    acts: Acts = {OURS: lambda: move(src, out=out), "smt.Refit": refit}
    acts |= send_by_hand(held, rank, half)

    def empty() -> None:
        if rank >= half:
            torch._foreach_zero_(list(held.values()))

    found = measure(acts, repeats, empty)
    for name, act in acts.items():
        empty()
        act()
        assert all(bool(tensor.eq(1).all()) for tensor in held.values()), name
    return found


def agree(rank: int, repeats: int) -> dict[str, Times]:
    """What moves nothing, on one rank."""
    nothing: dict[str, sm.Layout] = {}
    every, once = (smt.compile(sm.plan(nothing, nothing), agree=how) for how in ("every", "once"))
    record = torch.zeros(1024, dtype=torch.uint8)
    records = [torch.zeros_like(record) for _ in range(dist.get_world_size())]
    acts: Acts = {
        "move": lambda: every({}, out={}),
        "move, acknowledge=True": lambda: every({}, out={}, acknowledge=True),
        'move, agree="once"': lambda: once({}, out={}),
        "dist.barrier": dist.barrier,
        "dist.all_gather of 1 KiB": lambda: dist.all_gather(records, record),
    }
    return measure(acts, repeats, lambda: None, CALLS)


def run(size: int, task: Callable[..., dict[str, Times]], *args: int) -> dict[str, Times]:
    """By way: the slowest rank of each repeat, and processor time of a rank on average."""
    workers = Pool(size)
    ranks = workers.run(task, *args, timeout=900)
    workers.close()
    found = {}
    for name in ranks[0]:
        clock = [max(each) for each in zip(*(r[name].clock for r in ranks), strict=True)]
        processor = [
            statistics.mean(each) for each in zip(*(r[name].processor for r in ranks), strict=True)
        ]
        found[name] = Times(clock, processor)
    return found


def tabulate(found: dict[str, Times], beside: str, scale: float) -> list[list[str]]:
    """A row per way: its medians, and how many times those of one way they are."""
    base = [statistics.median(each) for each in found[beside]]
    rows = []
    for name, times in found.items():
        each = [statistics.median(one) for one in times]
        ratios = [f"{one / other:.2f}" for one, other in zip(each, base, strict=True)]
        rows.append([name, *(_show_number(one * scale) for one in each), *ratios])
    return rows


def _show_number(value: float) -> str:
    """Four digits, without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def show_small(count: int, repeats: int, page: Path | None) -> None:
    """Of 2 and of 8 processes."""
    rows = []
    for size in (2, 8):
        found = run(size, move_small, count, repeats)
        rows += [[str(size), *row] for row in tabulate(found, OURS, 1e3)]
    about = (
        f"Half of the gloo processes hold {count:,} tensors, and the other half receive them. Each rank has 4 KiB of "
        f"each tensor. `ms` is the time of the slowest rank in the median of {repeats} runs. `processor ms` is a "
        f"rank's processor time. With `dist.isend`, ranks wait only after the last tensor. "
        f"`tests/bench/bench_small.py` measures this."
    )
    heads = ["processes", "way", "ms", "processor ms", "/ shardmath", "processor / shardmath"]
    show(page, "Many small tensors", about, heads, rows)


def show_agreement(repeats: int, page: Path | None) -> None:
    """Of 8 processes."""
    rows = tabulate(run(8, agree, repeats), "dist.barrier", 1e6)
    about = (
        f"A move of an empty plan consists only of the vote. The table compares it with torch's collectives on 8 gloo "
        f"processes. `us` is the slowest rank's time per call, in the median of {repeats} runs of {CALLS} calls. "
        f"`processor us` is a rank's processor time per call. `tests/bench/bench_small.py` measures this."
    )
    heads = ["call", "us", "processor us", "/ barrier", "processor / barrier"]
    show(page, "Agreement and collectives", about, heads, rows)


if __name__ == "__main__":
    given = arguments(__doc__ or "", tensors=10_000, repeats=7)
    show_small(given.tensors, given.repeats, given.page)
    show_agreement(given.repeats, given.page)
