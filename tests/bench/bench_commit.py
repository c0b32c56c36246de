"""Moving 256 MB between 8 gloo processes, directly and with commit="all", turn by turn in one run.

    python tests/bench/bench_commit.py [megabytes] [repeats]

Times are seconds, the slowest rank of the median repeat; CPU time is that of all ranks together. The target: at most
1.3 times direct.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.text import show_bytes
from tests.bench.bench_exchange import CASES, MESH, Spec
from tests.bench.section import arguments, show, slowest
from tests.distributed.pool import Pool

HEADS = ["relayout", "direct", "all", "all / direct", "CPU direct", "CPU all", "CPU ratio"]
HEADS += ["shadows of a rank"]


def bench(
    rank: int, a: Spec, b: Spec, rows: int, repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds, and seconds of CPU, of each repeat; both ways take turns, since machines have spells."""
    plan = sm.plan(sm.Layout((rows, rows), MESH, a), sm.Layout((rows, rows), MESH, b))
    src = torch.arange(rows * rows // 8, dtype=torch.float32).view(
        plan.src[""][0].local_shape(rank)
    )
    dst = torch.zeros(plan.dst[""][0].local_shape(rank))
    found = {}
    for commit in ("direct", "all"):
        move = smt.compile(plan, commit=commit)
        found[commit] = move, [], []  # type: ignore[var-annotated]
    for _ in range(repeats + 1):
        for move, seconds, cpu in found.values():
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            move(src, out=dst)
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
    assert move.shadow_bytes == plan.shadow_bytes()[rank]
    return {commit: (seconds[1:], cpu[1:]) for commit, (_, seconds, cpu) in found.items()}


def main(megabytes: int = 256, repeats: int = 9, page: Path | None = None) -> None:
    """Runs all cases and shows the table."""
    rows = int((megabytes * 2**20 / 4) ** 0.5) // 8 * 8
    workers, found = Pool(8), []
    for name, (a, b) in CASES.items():
        ranks = workers.run(bench, a, b, rows, repeats, timeout=300)
        times, cpus = [], []
        for commit in ("direct", "all"):
            times.append(slowest([rank[commit][0] for rank in ranks]))
            per_repeat = zip(*(rank[commit][1] for rank in ranks), strict=True)
            cpus.append(statistics.median(map(sum, per_repeat)))
        figures = [*times, times[1] / times[0], *cpus, cpus[1] / cpus[0]]
        shadows = show_bytes(rows * rows * 4 // 8)
        found.append([f"`{name}`", *(f"{figure:.3f}" for figure in figures), shadows])
    workers.close()
    about = (
        f"8 gloo processes (dp=2 tp=4) move a tensor of {rows} x {rows} float32. Figures are seconds of the slowest "
        f'process, the median of {repeats} runs, with `commit="direct"` and `commit="all"`. CPU columns are '
        f"processor seconds of all processes together."
    )
    show(page, "Commit", about, HEADS, found)


if __name__ == "__main__":
    given = arguments(__doc__ or "", megabytes=256, repeats=9)
    main(given.megabytes, given.repeats, given.page)
