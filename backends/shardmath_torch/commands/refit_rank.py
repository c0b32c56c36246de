"""The task of one rank of `refit`: load its slices, plan, compile, move, check.

1. A source rank reads only its own slices; a destination rank starts with empty tensors.
2. Every rank plans for itself, and compares its plan's digest with the proved plan's.
3. Before each move the destination's bytes are poisoned, so that bytes that are right afterwards have
   been moved.
4. After each move the same bytes are sent between the same pairs by a hand-written
   `batch_isend_irecv` on contiguous buffers, to measure the cost of the network.
5. At the end every byte that arrived is compared with the file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist

import shardmath as sm
from shardmath.models.systems.rules import Side
from shardmath_torch.checkpoints.safetensors.slices import check, load, make_zeros
from shardmath_torch.checkpoints.safetensors.weights import Weights
from shardmath_torch.commands.processes import Report
from shardmath_torch.commands.refit_out import write_draft
from shardmath_torch.groups.dtypes import flat
from shardmath_torch.moves.movers.compile import compile

__all__ = ["Job", "Outcome", "refit_rank"]

T = TypeVar("T")
Layouts: TypeAlias = Mapping[str, sm.Layout]
Tensors: TypeAlias = Mapping[str, torch.Tensor]
Seconds: TypeAlias = tuple[float, ...]
Step: TypeAlias = Callable[[], object]
End: TypeAlias = Callable[..., dist.Work | None]
_Buffer: TypeAlias = tuple[End, torch.Tensor, int]

POISON = 0xA5
"""The value of every byte of the destination before a move."""


@dataclass(frozen=True, slots=True)
class Job:
    """The work of all ranks in a refit (a move of a model's weights from trainers to an inference engine): the weights,
    the mesh and layouts of the source and of the destination, and the number of timed moves.

    `timeout` is in seconds, `out` a folder for the arrived tensors, `digest` the digest of the proved plan.
    """

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
    """One rank's measurements in a refit: the seconds of loading, planning, compiling, each move, and each hand-written
    isend/irecv exchange of the same bytes, for comparison; and the bytes loaded and compared."""

    load_s: float
    plan_s: float
    compile_s: float
    move_s: tuple[float, ...]
    peer_s: tuple[float, ...]
    loaded: int
    checked: int


def refit_rank(job: Job, rank: int, report: Report) -> Outcome:
    """Load the weights that `rank` has in the refit `job` (move of a model's weights), move them, check what arrived,
    and return the rank's measurements. Calls `report` with the phase, the amount done and the total amount. Raises
    ShardError, for example if an arrived byte differs from the model's file."""
    shapes = job.weights.shapes
    src = job.src.layouts(shapes)
    dst = job.dst.layouts(shapes)
    source, load_s = _time(lambda: _load(job, src, rank, report))
    arriving = _make_destination(job, dst, rank)
    report("plan", 0, 1)
    plan, plan_s = _time(lambda: sm.plan(src, dst))
    _check_proved(plan, job, rank)
    report("compile", 0, 1)
    limit = job.max_inflight_bytes
    mover, compile_s = _time(lambda: compile(plan, timeout=job.timeout, max_inflight_bytes=limit))
    move = partial(mover, source, out=arriving)
    peer = _prepare_peer(plan, rank)
    move_s, peer_s = _time_steps(job, move, peer, arriving, report)
    checked = _check(job, dst, rank, arriving, report) if arriving else 0
    loaded = sum(tensor.nbytes for tensor in (source or {}).values())
    return Outcome(load_s, plan_s, compile_s, move_s, peer_s, loaded, checked)


def _make_destination(job: Job, layouts: Layouts, rank: int) -> dict[str, torch.Tensor] | None:
    """Tensors for what arrives at the rank; None if it is not on the destination side."""
    if rank not in job.dst.mesh:
        return None
    return {name: make_zeros(layout, rank) for name, layout in layouts.items()}


def _check_proved(plan: sm.Plan, job: Job, rank: int) -> None:
    """Raise PlanError unless this rank's plan is the one that was proved before ranks were started."""
    if plan.digest != job.digest:
        what = f"rank {rank} made the plan {plan.digest}, and the command proved {job.digest}"
        raise sm.PlanError(f"{what}; run the same version of shardmath on all ranks")


def _time(work: Callable[[], T]) -> tuple[T, float]:
    """The result of the work, and its seconds."""
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


def _load(job: Job, layouts: Layouts, rank: int, report: Report) -> dict[str, torch.Tensor] | None:
    """The rank's part of the source; None if it is not on the source side."""
    if rank not in job.src.mesh:
        return None
    return load(job.weights, layouts, rank, progress=partial(report, "load"))


def _time_steps(
    job: Job, move: Step, peer: Step, arriving: Tensors | None, report: Report
) -> tuple[Seconds, Seconds]:
    """Seconds of every move, and of the hand-written exchange right after it, under the same load of the machine."""
    move_s = []
    peer_s = []
    for step in range(job.steps):
        report("move", step, job.steps)
        for tensor in (arriving or {}).values():
            # So that the check finds bytes that no move wrote. Not every dtype can be filled with a number.
            flat(tensor).view(torch.uint8).fill_(POISON)
        move_s.append(_time_together(move))
        peer_s.append(_time_together(peer))
    report("move", job.steps, job.steps)
    return tuple(move_s), tuple(peer_s)


def _time_together(step: Step) -> float:
    """Seconds of one step, after a barrier."""
    dist.barrier()
    _, seconds = _time(step)
    return seconds


def _prepare_peer(plan: sm.Plan, rank: int) -> Step:
    """A hand-written exchange of the plan's bytes between the same pairs, one contiguous buffer each way."""
    outgoing = Counter[int]()
    incoming = Counter[int]()
    for transfer in plan.transfers(src=rank):
        outgoing[transfer.dst_rank] += transfer.nbytes
    for transfer in plan.transfers(dst=rank):
        incoming[transfer.src_rank] += transfer.nbytes
    buffers = _make_buffers(dist.irecv, incoming, rank) + _make_buffers(dist.isend, outgoing, rank)
    return lambda: _exchange(buffers)


def _make_buffers(end: End, sizes: Mapping[int, int], rank: int) -> list[_Buffer]:
    """(`end`, buffer, peer), the arguments of a P2POp, for each peer with which the rank exchanges bytes."""
    buffers: list[_Buffer] = []
    for peer, nbytes in sorted(sizes.items()):
        if peer != rank and nbytes:
            buffers.append((end, torch.zeros(nbytes, dtype=torch.uint8), peer))
    return buffers


def _exchange(buffers: list[_Buffer]) -> None:
    """Start all sends and receives at once, and wait for them."""
    if not buffers:
        return
    operations = [dist.P2POp(*buffer) for buffer in buffers]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _check(
    job: Job, layouts: Layouts, rank: int, arriving: dict[str, torch.Tensor], report: Report
) -> int:
    """Compare what arrived with the file, and write it out if requested. Returns the number of bytes compared."""
    checked = check(job.weights, layouts, rank, arriving, progress=partial(report, "check"))
    if job.out:
        write_draft(job.out, rank, arriving)
    return checked
