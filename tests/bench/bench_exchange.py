"""Moving 256 MB between 8 gloo processes: ours, the same bytes by hand, and DTensor.redistribute, in one run.

    python tests/bench/bench_exchange.py [megabytes] [repeats]

Times are seconds, the slowest rank of the median repeat. "by hand" is one batch_isend_irecv a rank, of buffers that are
packed already, with the sizes that the plan moves: the least that any exchange over gloo costs. "by hand, packed" also
packs and unpacks. "program" is shardmath with the plan scheduled, without fan-out: the same bytes in rounds of its own.
The targets: at most 1.5 times by hand; 8 times faster than DTensor.

The second table is of moves that have nothing to move, beside dist.barrier: of ranks that agree every time, or once.
The target: below 1 ms where they agree once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from tests.bench.section import arguments, show, slowest
from tests.distributed.pool import Pool

MESH = sm.Mesh(dp=2, tp=4)
HEADS = ["relayout", "shardmath", "program", "by hand", "packed", "DTensor"]
HEADS += ["ours / by hand", "ours / packed", "DTensor / ours", "program / ours"]
Spec = tuple[Any, ...]
CASES: dict[str, tuple[Spec, Spec]] = {
    "S0,S1 -> S1,S0": ((sm.Shard(0), sm.Shard(1)), (sm.Shard(1), sm.Shard(0))),
    "StridedShard,S0 -> S0,S0": (
        (sm.StridedShard(0, split_factor=4), sm.Shard(0)),
        (sm.Shard(0), sm.Shard(0)),
    ),
    "S0,S0 -> S0,S1": ((sm.Shard(0), sm.Shard(0)), (sm.Shard(0), sm.Shard(1))),
    "S0,S0 -> S1,S1": ((sm.Shard(0), sm.Shard(0)), (sm.Shard(1), sm.Shard(1))),
}


def timed(act: Callable[[], object], repeats: int) -> list[float]:
    """Seconds of each repeat on this rank, all ranks starting together; the first, not counted, warms up."""
    out = []
    for _ in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        act()
        out.append(time.perf_counter() - start)
    return out[1:]


def by_hand(rank: int, plan: sm.Plan, src: Tensor, dst: Tensor, pack: bool) -> Callable[[], None]:
    """One message a peer, over batch_isend_irecv."""
    sends: dict[int, list[Any]] = {}
    gets: dict[int, list[Any]] = {}
    for t in plan.transfers(src=rank):
        sends.setdefault(t.dst_rank, []).append(t)
    for t in plan.transfers(dst=rank):
        gets.setdefault(t.src_rank, []).append(t)
    kept, _ = sends.pop(rank, []), gets.pop(rank, None)
    outgoing = {q: torch.empty(sum(t.nbytes for t in ts) // 4) for q, ts in sends.items()}
    incoming = {q: torch.empty(sum(t.nbytes for t in ts) // 4) for q, ts in gets.items()}

    def split(buffer: Tensor, ts: list[Any]) -> list[Tensor]:
        parts = buffer.split([t.nbytes // 4 for t in ts])
        return [part.view(t.shape) for part, t in zip(parts, ts, strict=True)]

    def act() -> None:
        if pack:
            for q, ts in sends.items():
                for t, part in zip(ts, split(outgoing[q], ts), strict=True):
                    part.copy_(src[t.src_slices])
        ops = [dist.P2POp(dist.irecv, buffer, q) for q, buffer in incoming.items()]
        ops += [dist.P2POp(dist.isend, buffer, q) for q, buffer in outgoing.items()]
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()
        if pack:
            for t in kept:
                dst[t.dst_slices].copy_(src[t.src_slices])
            for q, ts in gets.items():
                for t, part in zip(ts, split(incoming[q], ts), strict=True):
                    dst[t.dst_slices].copy_(part)

    return act


def dtensor(rank: int, a: Spec, b: Spec, src: Tensor, rows: int) -> Callable[[], object]:
    """DTensor's own way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    def placements(spec: Spec) -> list[Any]:
        return [
            _StridedShard(p.dim, split_factor=p.split_factor)
            if isinstance(p, sm.StridedShard)
            else Shard(p.dim)
            for p in spec
        ]

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    held = DTensor.from_local(
        src, mesh, placements(a), shape=torch.Size((rows, rows)), stride=(rows, 1)
    )
    return lambda: held.redistribute(mesh, placements(b))


def bench(rank: int, a: Spec, b: Spec, rows: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat, by way."""
    plan = sm.plan(sm.Layout((rows, rows), MESH, a), sm.Layout((rows, rows), MESH, b))
    src = torch.arange(rows * rows // 8, dtype=torch.float32).view(
        plan.src[""][0].local_shape(rank)
    )
    dst = torch.zeros(plan.dst[""][0].local_shape(rank))
    move, program = smt.compile(plan), smt.compile(sm.schedule(plan, fanout="none"))
    ways = {
        "shardmath": lambda: move(src, out=dst),
        "program": lambda: program(src, out=dst),
        "by hand": by_hand(rank, plan, src, dst, pack=False),
        "by hand, packed": by_hand(rank, plan, src, torch.zeros_like(dst), pack=True),
    }
    out = {name: timed(act, repeats) for name, act in ways.items()}
    out["DTensor"] = timed(dtensor(rank, a, b, src, rows), 3)
    return out


CALLS = 50
"""In a row, so that what ranks wait for each other is in the time, and what starting them together takes is not."""


def agree(rank: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat, by way, of calls that move nothing."""
    nothing = sm.Layout((0, 8), MESH, "(dp n) (tp h)")
    plan = sm.plan(nothing, nothing)
    held = torch.empty(plan.src[""][0].local_shape(rank))
    out = torch.empty_like(held)
    every, once = smt.compile(plan), smt.compile(plan, agree="once")
    both = smt.compile(plan, agree="once", commit="all")
    ways: dict[str, Callable[[], object]] = {
        "barrier": dist.barrier,
        "every": lambda: every(held, out=out),
        "once": lambda: once(held, out=out),
        "once, committed": lambda: both(held, out=out),
    }

    def repeat(act: Callable[[], object]) -> None:
        for _ in range(CALLS):
            act()

    return {
        way: timed(lambda act=act: repeat(act), repeats)  # type: ignore[misc]
        for way, act in ways.items()
    }


def show_agreement(workers: Pool, repeats: int, page: Path | None) -> None:
    """Milliseconds of a call that moves nothing."""
    ranks = workers.run(agree, repeats, timeout=300)
    found = [slowest([r[way] for r in ranks]) / CALLS * 1e3 for way in ranks[0]]
    about = (
        "Each call moves no data, so it takes only the time in which ranks agree. Figures are milliseconds of the "
        f'slowest of 8 gloo processes, in the median of {repeats} runs. "barrier" is `dist.barrier`. "once, committed" '
        'is a move with `agree="once"` and `commit="all"`.'
    )
    heads = ["barrier", "agree every time", "agree once", "once, committed"]
    show(page, "Agreement", about, heads, [[f"{x:.3f}" for x in found]])


def main(megabytes: int = 256, repeats: int = 7, page: Path | None = None) -> None:
    """Runs all cases and shows the table."""
    rows = int((megabytes * 2**20 / 4) ** 0.5) // 8 * 8
    workers, found = Pool(8), []
    for name, (a, b) in CASES.items():
        ranks = workers.run(bench, a, b, rows, repeats, timeout=300)
        ours, program, hand, packed, theirs = seconds = [
            slowest([r[way] for r in ranks]) for way in ranks[0]
        ]
        ratios = (ours / hand, ours / packed, theirs / ours, program / ours)
        found.append([f"`{name}`", *(f"{x:.3f}" for x in seconds), *(f"{x:.2f}" for x in ratios)])
    about = (
        f"8 gloo processes (dp=2 tp=4) move a tensor of {rows} x {rows} float32. Figures are seconds of the slowest "
        f'process, in the median of {repeats} runs. "program" is a program that `sm.schedule` made. '
        '[Exchange](numbers.md#exchange) explains "by hand" and "packed".'
    )
    show(page, "Exchange", about, HEADS, found)
    show_agreement(workers, repeats, page)
    workers.close()


if __name__ == "__main__":
    given = arguments(__doc__ or "", megabytes=256, repeats=7)
    main(given.megabytes, given.repeats, given.page)
