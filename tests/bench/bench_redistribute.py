"""`shardmath_torch.redistribute` beside DTensor.redistribute, on gloo, in one run.

    python tests/bench/bench_redistribute.py [megabytes] [repeats]

Times are milliseconds, the slowest rank of the median repeat, of the whole call: ours finds out what the DTensor holds,
allocates what it returns, and agrees with all ranks before each move. "received" is what the fullest rank receives of
ours, "bound" what the neediest does not hold already, counted element by element.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import shardmath as sm
import shardmath_torch as smt
from tests.bench.bench_exchange import timed
from tests.bench.section import arguments, show, slowest
from tests.distributed.pool import Pool
from tests.distributed.tasks import dtensors

CASES = [
    ((2,), "S0", "S1"),
    ((4,), "S0", "S1"),
    ((8,), "S0", "S1"),
    ((2,), "S0", "R"),
    ((4,), "S0", "R"),
    ((8,), "S0", "R"),
    ((2,), "R", "S0"),
    ((4,), "R", "S0"),
    ((8,), "R", "S0"),
    ((2, 2), "S0 S1", "S1 S0"),
    ((2, 4), "S0 S1", "S1 S0"),
    ((2, 2), "S0 S0", "S0 S1"),
    ((2, 4), "S0 S0", "S0 S1"),
    ((2, 2), "S0 R", "R S0"),
    ((2, 4), "S0 R", "R S0"),
    ((2, 2), "SS0,2 S0", "S0 S0"),
    ((2, 4), "SS0,4 S0", "S0 S0"),
]
"""Mesh, placements before, placements after."""


HEAD = ["mesh, relayout", "shardmath", "DTensor", "DTensor / ours", "received", "bound"]


def bench(
    rank: int, mesh: tuple[int, ...], src: str, dst: str, rows: int, repeats: int
) -> tuple[list[float], ...]:
    """Seconds of each repeat, ours and theirs."""
    ranks = range(math.prod(mesh))
    devices = dtensors.device_mesh(ranks, mesh)
    held = dtensors.layout(ranks, mesh, src, (rows, rows))
    local = torch.zeros(held.local_shape(rank) if rank in ranks else (0,))
    before, after = dtensors.placements_of(src), dtensors.placements_of(dst)
    given = dtensors.DTensor.from_local(
        local, devices, before, shape=torch.Size((rows, rows)), stride=(rows, 1)
    )
    with torch.no_grad():
        ours = timed(lambda: smt.redistribute(given, after), repeats)
        theirs = timed(
            lambda: rank in ranks and given.redistribute(devices, after).to_local(), repeats
        )
    return ours, theirs


def bound(src: sm.Layout, dst: sm.Layout) -> int:
    """Bytes that the neediest rank does not hold already: the least that it can receive."""
    most = 0
    for rank in dst.mesh.ranks:
        needed = [set(index.tolist()) for index in dst.indices(rank)]
        held = [set(index.tolist()) for index in src.indices(rank)]
        kept = math.prod(len(a & b) for a, b in zip(needed, held, strict=True))
        most = max(most, (math.prod(map(len, needed)) - kept) * dst.itemsize)
    return most


def main(megabytes: int = 256, repeats: int = 5, page: Path | None = None) -> None:
    """Runs all cases and shows the table."""
    rows = int((megabytes * 2**20 / 4) ** 0.5) // 8 * 8
    workers, found = Pool(8), []
    for mesh, src, dst in CASES:
        ranks: list[Any] = workers.run(bench, mesh, src, dst, rows, repeats, timeout=300)
        ours, theirs = (slowest(way) for way in zip(*ranks, strict=True))
        ends = [dtensors.layout(range(math.prod(mesh)), mesh, x, (rows, rows)) for x in (src, dst)]
        bytes_of = max(sm.plan(*ends).received_bytes().values()), bound(*ends)
        shown = [
            f"{ours * 1e3:.0f}",
            f"{theirs * 1e3:.0f}",
            f"{theirs / ours:.1f}x",
            *(f"{b / 2**20:g}" for b in bytes_of),
        ]
        found.append([f"{mesh} `{src} -> {dst}`", *shown])
    workers.close()
    about = (
        f"Each call redistributes a tensor of {rows} x {rows} float32 over gloo. Times are milliseconds of the slowest "
        f"rank, the median of {repeats} runs. `received` is the MiB that arrive at the rank that receives the most. "
        "`bound` is the least that this rank must receive."
    )
    show(page, "Redistribute", about, HEAD, found)


if __name__ == "__main__":
    given = arguments(__doc__ or "", megabytes=256, repeats=5)
    main(given.megabytes, given.repeats, given.page)
