"""`shardmath_torch.redistribute` beside DTensor.redistribute, on gloo, in one run.

    python tests/bench/bench_redistribute.py [megabytes] [repeats]

Times are milliseconds, the slowest rank of the median repeat, of the whole call: ours finds out what the DTensor holds,
allocates what it returns, and agrees with all ranks before each move. "received" is what the fullest rank receives of
ours, which is the least that it can.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import shardmath as sm
import shardmath_torch as smt
from tests.bench.bench_exchange import timed
from tests.distributed import dtensors
from tests.distributed.pool import Pool

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


def bench(rank: int, mesh: tuple[int, ...], src: str, dst: str, rows: int, repeats: int) -> tuple[list[float], ...]:
    """Seconds of each repeat, ours and theirs."""
    ranks = range(math.prod(mesh))
    devices = dtensors.device_mesh(ranks, mesh)
    held = dtensors.layout(ranks, mesh, src, (rows, rows))
    local = torch.zeros(held.local_shape(rank) if rank in ranks else (0,))
    before, after = dtensors.placements_of(src), dtensors.placements_of(dst)
    given = dtensors.DTensor.from_local(local, devices, before, shape=torch.Size((rows, rows)), stride=(rows, 1))
    with torch.no_grad():
        ours = timed(lambda: smt.redistribute(given, after), repeats)
        theirs = timed(lambda: rank in ranks and given.redistribute(devices, after).to_local(), repeats)
    return ours, theirs


def main(megabytes: int = 256, repeats: int = 5) -> None:
    """Runs all cases and prints the table."""
    rows = int((megabytes * 2**20 / 4) ** 0.5) // 8 * 8
    workers = Pool(8)
    print(f"{rows} x {rows} float32, gloo, median of {repeats}, slowest rank, ms; MB received by the fullest rank")
    print(f"{'mesh':8}{'from':12}{'to':10}{'shardmath':>11}{'DTensor':>11}{'ratio':>8}{'received':>10}")
    for mesh, src, dst in CASES:
        ranks: list[Any] = workers.run(bench, mesh, src, dst, rows, repeats, timeout=300)
        ours, theirs = (statistics.median(map(max, zip(*way, strict=True))) * 1e3 for way in zip(*ranks, strict=True))
        ends = (dtensors.layout(range(math.prod(mesh)), mesh, x, (rows, rows)) for x in (src, dst))
        most = max(sm.plan(*ends).received_bytes().values()) / 2**20
        row = f"{mesh!s:8}{src:12}{dst:10}{ours:11.1f}{theirs:11.1f}{theirs / ours:7.1f}x{most:10.1f}"
        print(row, flush=True)
    workers.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
