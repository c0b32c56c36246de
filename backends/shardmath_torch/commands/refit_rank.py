"""What one rank of `refit` does: load its slices, plan, compile, move, check.

1. A source rank reads its own slices and no more; a destination rank starts with empty tensors.
2. Every rank plans for itself, and holds its plan against the digest of the one that was proved.
3. Before each move the destination's bytes are spoilt, so that what is right afterwards has been moved.
4. Beside each move the same bytes go between the same pairs by hand-written `batch_isend_irecv` on contiguous buffers:
   what the network alone costs.
5. At the end every byte that arrived is compared with the file.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist

import shardmath as sm
from shardmath.families.rules import Side
from shardmath_torch.commands.processes import Say
from shardmath_torch.commands.refit_out import leave
from shardmath_torch.dtypes import flat
from shardmath_torch.exchange.compile import compile
from shardmath_torch.files.weights import Progress, Weights, check, load, zeros

__all__ = ["Job", "Outcome", "refit_rank"]

T = TypeVar("T")
Layouts: TypeAlias = Mapping[str, sm.Layout]
Tensors: TypeAlias = Mapping[str, torch.Tensor]
Seconds: TypeAlias = tuple[float, ...]
Step: TypeAlias = Callable[[], object]
End: TypeAlias = Callable[..., dist.Work | None]
SPOILT = 0xA5


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank is told; `timeout` in seconds, `out` a folder for what arrives, `digest` the plan's."""

    weights: Weights
    src: Side
    dst: Side
    steps: int
    timeout: float
    max_inflight_bytes: int
    out: Path | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one rank measured: seconds of each phase and step, bytes loaded and compared."""

    load_s: float
    plan_s: float
    compile_s: float
    move_s: tuple[float, ...]
    peer_s: tuple[float, ...]
    loaded: int
    checked: int


def refit_rank(job: Job, rank: int, say: Say) -> Outcome:
    """The task of `rank`. Raises ShardError, among others for a byte that differs from the file."""
    src, dst = (side.layouts(job.weights.shapes) for side in (job.src, job.dst))
    ours, load_s = _timed(lambda: _load(job, src, rank, say))
    arriving = (
        {name: zeros(layout, rank) for name, layout in dst.items()}
        if rank in job.dst.mesh
        else None
    )
    say("plan", 0, 1)
    plan, plan_s = _timed(lambda: sm.plan(src, dst))
    if plan.digest != job.digest:
        raise sm.PlanError(
            f"rank {rank} plans {plan.digest}, proved was {job.digest}; run one version of everything"
        )
    say("compile", 0, 1)
    limit = job.max_inflight_bytes
    mover, compile_s = _timed(lambda: compile(plan, timeout=job.timeout, max_inflight_bytes=limit))
    seconds = _race(job, lambda: mover(ours, out=arriving), _peer(plan, rank), arriving, say)
    checked = _check(job, dst, rank, arriving, say) if arriving else 0
    loaded = sum(tensor.nbytes for tensor in (ours or {}).values())
    return Outcome(load_s, plan_s, compile_s, *seconds, loaded, checked)


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _load(job: Job, layouts: Layouts, rank: int, say: Say) -> dict[str, torch.Tensor] | None:
    if rank not in job.src.mesh:
        return None
    return load(job.weights, layouts, rank, progress=_bytes(say, "load", layouts, rank))


def _bytes(say: Say, phase: str, layouts: Layouts, rank: int) -> Progress:
    """Says how many of the rank's bytes are done."""
    done, total = (
        0,
        sum(math.prod(layout.local_shape(rank)) * layout.itemsize for layout in layouts.values()),
    )
    say(phase, 0, total)

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        say(phase, done, total)

    return add


def _race(
    job: Job, move: Step, peer: Step, arriving: Tensors | None, say: Say
) -> tuple[Seconds, Seconds]:
    """Seconds of every move, and of the hand-written exchange that follows it on the same state of the machine."""
    seconds = []
    for step in range(job.steps):
        say("move", step, job.steps)
        for tensor in (arriving or {}).values():
            flat(tensor).view(torch.uint8).fill_(SPOILT)
        seconds.append((_together(move), _together(peer)))
    say("move", job.steps, job.steps)
    ours, theirs = zip(*seconds, strict=True)
    return ours, theirs


def _together(step: Step) -> float:
    """Seconds of one step that all ranks begin at once."""
    dist.barrier()
    return _timed(step)[1]


def _peer(plan: sm.Plan, rank: int) -> Step:
    """The bytes of the plan between the same pairs, one contiguous buffer each way, and nothing else."""
    outgoing, incoming = Counter[int](), Counter[int]()
    for t in plan.transfers(src=rank):
        outgoing[t.dst_rank] += t.nbytes
    for t in plan.transfers(dst=rank):
        incoming[t.src_rank] += t.nbytes
    ends = [(dist.irecv, incoming), (dist.isend, outgoing)]
    buffers = [
        (end, torch.zeros(nbytes, dtype=torch.uint8), peer)
        for end, sizes in ends
        for peer, nbytes in sorted(sizes.items())
        if peer != rank and nbytes
    ]
    return lambda: _exchange(buffers)


def _exchange(buffers: list[tuple[End, torch.Tensor, int]]) -> None:
    for work in (
        dist.batch_isend_irecv([dist.P2POp(*buffer) for buffer in buffers]) if buffers else ()
    ):
        work.wait()


def _check(
    job: Job, layouts: Layouts, rank: int, arriving: dict[str, torch.Tensor], say: Say
) -> int:
    """Bytes compared with the file; then what arrived is written out where that is asked."""
    checked = check(
        job.weights, layouts, rank, arriving, progress=_bytes(say, "check", layouts, rank)
    )
    if job.out:
        leave(job.out, rank, arriving)
    return checked
