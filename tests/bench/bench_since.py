"""What this checkout costs beside an earlier commit, measured in turns in one run.

    python tests/bench/bench_since.py COMMIT [rounds] [--page docs/benchmarks.md]

Both trees run the same calls, each in processes of its own, one after the other, `rounds` times;
shown are the least seconds of all rounds, which neighbors on the machine disturb least. Where ranks
wait for each other that is not enough on a busy machine: the processor time of a rank stands beside
it. Only calls that both have are compared; what is new stands beside the same call without it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]

Seconds = dict[str, float]
SMALL, LARGE = (64, 64), (4096, 4096)


def least(act: Callable[[], Any], times: int) -> float:
    """The least seconds of so many calls."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        act()
        found.append(time.perf_counter() - start)
    return min(found)


def of_core() -> Seconds:
    """Layouts, plans and proofs, with empty caches."""
    import shardmath as sm
    from tests.bench import models
    from tests.bench.test_bench_core import cold

    small, large = models.tp4_to_tp8(64), models.deepseek_v3()
    mesh = sm.Mesh(dp=4, tp=2)

    def layouts() -> None:
        cold()
        for n in range(1000, 2000):
            sm.Layout((n, 64), mesh, "(tp dp n) h")

    def listed() -> None:
        cold()
        p = sm.plan(*small)
        list(p.transfers(dst=p.dst_ranks[3]))

    def planned() -> None:
        cold()
        sm.plan(*large).received_bytes()

    def proved() -> None:
        cold()
        sm.verify(p)

    p = sm.plan(*large)
    return {
        "1,000 layouts": least(layouts, 5),
        "64 + 64 ranks, 400 tensors: plan and one list": least(listed, 9),
        "DeepSeek-V3, 256 + 256 ranks: plan and loads": least(planned, 5),
        "DeepSeek-V3, 256 + 256 ranks: verify": least(proved, 3),
    }


def of_ranks(rank: int, folder: str) -> Seconds:
    """Moves and checkpoints among 4 ranks, from warm caches."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    import shardmath as sm
    import shardmath_torch as smt

    mesh = sm.Mesh(tp=4)

    def pair(shape: tuple[int, int]) -> tuple[sm.Layout, sm.Layout]:
        return sm.Layout(shape, mesh, "(tp n) h"), sm.Layout(shape, mesh, "n (tp h)")

    out: Seconds = {}

    def steady(name: str, act: Callable[[], Any], times: int) -> None:
        act()
        dist.barrier()
        start = time.process_time()
        out[name] = least(act, times)
        out[f"{name}: processor time of a rank"] = (time.process_time() - start) / times

    def mover(shape: tuple[int, int], **how: Any) -> Callable[[], Any]:
        a, b = pair(shape)
        move = smt.compile(sm.plan(a, b), timeout=60.0)
        src, out = torch.rand(a.local_shape(rank)), torch.empty(b.local_shape(rank))
        return lambda: move(src, out=out, **how)

    a, _ = pair(LARGE)
    held, layouts = {"w": torch.rand(a.local_shape(rank))}, {"w": a}
    sharded = distribute_tensor(torch.rand(SMALL), init_device_mesh("cpu", (4,)), [Shard(0)])
    path, plan = f"{folder}/checkpoint", sm.plan(*pair(SMALL))
    steady("compile of a small plan", lambda: smt.compile(plan, timeout=60.0), 50)
    steady("move of 16 kB", mover(SMALL), 200)
    steady("move of 64 MB", mover(LARGE), 10)
    steady("redistribute of 16 kB", lambda: smt.redistribute(sharded, [Replicate()]), 100)
    steady("save of 64 MB, in memory", lambda: smt.save(path, held, layouts), 5)
    steady("load of 64 MB, in memory", lambda: smt.load(path, layouts), 5)
    with suppress(TypeError):  # the earlier commit has none
        steady("move of 16 kB, acknowledged", mover(SMALL, acknowledge=True), 200)
    return out


def measured() -> Seconds:
    """All figures of the tree that this process imports; of ranks, the slowest's."""
    from tests.distributed.pool import Pool

    found, workers = of_core(), Pool(4)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        try:
            ranks = workers.run(of_ranks, folder, timeout=300.0)
        finally:
            workers.close()
    return found | {name: max(each[name] for each in ranks) for name in ranks[0]}


def ask(tree: Path) -> Seconds:
    """The figures of a tree, from a process of its own."""
    paths = os.pathsep.join((str(tree), str(tree / "backends")))
    told = subprocess.run(
        [sys.executable, __file__, "--child"],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tree,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: Seconds = json.loads(told.stdout.splitlines()[-1])
    return found


def compare(commit: str, rounds: int, page: Path | None) -> None:
    """Runs both trees in turns, and shows the table."""
    from tests.bench.section import show

    with tempfile.TemporaryDirectory() as folder:
        then = Path(folder) / "then"
        subprocess.run(
            ["git", "worktree", "add", "-q", "--detach", then, commit], cwd=HERE, check=True
        )
        try:
            told = [(ask(then), ask(HERE)) for _ in range(rounds)]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", then], cwd=HERE, check=True)
    rows = [_row(name, told) for name in told[0][1]]
    about = (
        f"Each of {rounds} rounds measures both versions, one after the other. Figures are the least milliseconds. "
        "Calls in which ranks take part run on 4 processes."
    )
    show(page, f"Since {commit}", about, ["call", commit, "now", "now / then"], rows)


def _row(name: str, told: list[tuple[Seconds, Seconds]]) -> list[str]:
    now = min(each[name] for _, each in told)
    then = [each[name] for each, _ in told if name in each]
    if not then:
        return [name, "", f"{now * 1e3:.3g}", ""]
    return [name, f"{min(then) * 1e3:.3g}", f"{now * 1e3:.3g}", f"{now / min(then):.2f}"]


def main() -> None:
    """Asks, or answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--page", type=Path, help="write the section to this page")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measured()))
        return
    sys.path.insert(0, str(HERE))
    compare(given.commit, given.rounds, given.page)


if __name__ == "__main__":
    main()
