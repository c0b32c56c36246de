"""Moving 256 MB between 8 gloo processes, directly and with commit="all", turn by turn in one run.

    python tests/bench/bench_commit.py [megabytes] [repeats]

Times are seconds, the slowest rank of the median repeat; CPU time is that of all ranks together. The target: at most
1.25 times direct.

"By hand" is the least that a program does for "all": a barrier, an exchange of packed messages into other memory, a
second barrier, and a copy of what has arrived into the destination.
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
from tests.bench.bench_exchange import CASES, MESH, Spec, by_hand
from tests.bench.section import arguments, show, slowest
from tests.distributed.pool import Pool

HEADS = ["relayout", "direct", "all", "all / direct", "CPU direct", "CPU all", "CPU ratio"]
HEADS += ["all by hand", "CPU by hand", "CPU all / by hand", "shadows of a rank"]
WAYS = ("direct", "all", "by hand")


def bench(
    rank: int, a: Spec, b: Spec, rows: int, repeats: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds, and seconds of CPU, of each repeat; both ways take turns, since machines have spells."""
    plan = sm.plan(sm.Layout((rows, rows), MESH, a), sm.Layout((rows, rows), MESH, b))
    src = torch.arange(rows * rows // 8, dtype=torch.float32).view(
        plan.src[""][0].local_shape(rank)
    )
    dst = torch.zeros(plan.dst[""][0].local_shape(rank))
    direct, both = smt.compile(plan), smt.compile(plan, commit="all")
    shadow = torch.zeros_like(dst)
    exchange = by_hand(rank, plan, src, shadow, pack=True)

    def commit_by_hand() -> None:
        dist.barrier()
        exchange()
        dist.barrier()
        dst.copy_(shadow)

    acts = (lambda: direct(src, out=dst), lambda: both(src, out=dst), commit_by_hand)
    found: dict[str, tuple[list[float], list[float]]] = {way: ([], []) for way in WAYS}
    for _ in range(repeats + 1):
        for act, (seconds, cpu) in zip(acts, found.values(), strict=True):
            dist.barrier()
            start, used = time.perf_counter(), time.process_time()
            act()
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - used)
    assert both.shadow_bytes == plan.shadow_bytes()[rank]
    return {way: (seconds[1:], cpu[1:]) for way, (seconds, cpu) in found.items()}


def main(megabytes: int = 256, repeats: int = 9, page: Path | None = None) -> None:
    """Runs all cases and shows the table."""
    rows = int((megabytes * 2**20 / 4) ** 0.5) // 8 * 8
    workers, found = Pool(8), []
    for name, (a, b) in CASES.items():
        ranks = workers.run(bench, a, b, rows, repeats, timeout=300)
        times, cpus = [], []
        for way in WAYS:
            times.append(slowest([rank[way][0] for rank in ranks]))
            per_repeat = zip(*(rank[way][1] for rank in ranks), strict=True)
            cpus.append(statistics.median(map(sum, per_repeat)))
        figures = [*times[:2], times[1] / times[0], *cpus[:2], cpus[1] / cpus[0]]
        figures += [times[2], cpus[2], cpus[1] / cpus[2]]
        shadows = show_bytes(rows * rows * 4 // 8)
        found.append([f"`{name}`", *(f"{figure:.3f}" for figure in figures), shadows])
    workers.close()
    about = (
        f'8 gloo processes (dp=2 tp=4) move a tensor of {rows} x {rows} float32, with `commit="direct"` and with '
        f'`commit="all"`. Figures are seconds of the slowest process, in the median of {repeats} runs. CPU columns are '
        f"processor seconds of all processes together. In the columns "
        f'"by hand", a program without shardmath exchanges packed messages between two barriers, and then copies '
        "what has arrived into the destination. [Shadows](failures.md#how-ranks-commit) take memory."
    )
    show(page, "Commit", about, HEADS, found)


if __name__ == "__main__":
    given = arguments(__doc__ or "", megabytes=256, repeats=9)
    main(given.megabytes, given.repeats, given.page)
