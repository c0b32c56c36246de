"""Workers: what one rank does for one of its tensors, at one end.

1. A worker has wire buffers, made with the first move, which stay where they are from move to move until they are let
   go. Only tensors for which something is done have any.
2. At a source it makes the wire tensors of the local one, at a destination the local one of them.
3. A transform that has `make_worker` makes its own: one that is called otherwise than block by block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from shardmath.values.transforms.components import End
from shardmath.values.transforms.local import WireJob
from shardmath.values.transforms.wires import Wired
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.transforms.functions import finalize, prepare
from shardmath_torch.tensors.transforms.packing import Packing

__all__ = ["HasWorkers", "Worker", "count_bytes", "make_buffers", "make_worker"]


class Worker(Protocol):
    """What is done for a local tensor and its companions.

    `holds` says that it has the tensor itself, and is given none; `opaque` that the tensor given may be of any kind.
    """

    @property
    def job(self) -> WireJob:
        """The tensor, and what stands for it."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The wire tensors by local name."""

    @property
    def holds(self) -> bool:
        """Whether callers pass no tensor."""

    @property
    def opaque(self) -> bool:
        """Whether it is not looked at what kind of tensor callers pass, such as a quantised one."""

    def run(self, *tensors: Tensor) -> None:
        """Between the tensor, with its companions, and the buffers."""

    def let_go(self) -> None:
        """Give back the memory of buffers that are the worker's own, until they are asked for again."""


@runtime_checkable
class HasWorkers(Protocol):
    """A transform that is called in a way of its own."""

    def make_worker(self, job: WireJob, rank: int, end: End, device: torch.device) -> Worker:
        """The worker of one tensor of the rank."""


def make_worker(job: WireJob, rank: int, end: End, device: torch.device) -> Worker | None:
    """The worker of a local tensor; None where nothing is done for it."""
    if job.wired is None:
        return None
    as_held = job.wired.as_held
    if as_held.source if end == "source" else as_held.destination:
        return None
    transform = job.wired.transform
    if isinstance(transform, HasWorkers):
        return transform.make_worker(job, rank, end, device)
    make = _Preparing if end == "source" else _Finalizing
    return make(job, job.wired, rank, device)


def make_buffers(job: WireJob, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Memory for the wire tensors of a local tensor."""
    return {
        key: torch.empty(layout.local_shape(rank), dtype=dtype_of(layout.dtype), device=device)
        for key, layout in job.wires
    }


def count_bytes(job: WireJob, rank: int) -> int:
    """Bytes of the wire tensors of a local tensor."""
    counts = []
    for _, layout in job.wires:
        cells = math.prod(layout.local_shape(rank))
        counts.append(cells * dtype_of(layout.dtype).itemsize)
    return sum(counts)


class _Packed:
    """What both ends have."""

    holds = False
    opaque = False

    def __init__(self, job: WireJob, wired: Wired, rank: int, device: torch.device) -> None:
        self.job = job
        self._made: dict[str, Tensor] = {}
        self._where = rank, device
        self._wired = wired
        self._packings = [Packing(layout, rank, device) for _, layout in job.held]

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The wire tensors, which are made where there are none."""
        if not self._made:
            # They may be asked for in inference mode, and are written outside of it, too.
            with torch.inference_mode(False):
                self._made = make_buffers(self.job, *self._where)
        return self._made

    def let_go(self) -> None:
        """Give their memory back."""
        self._made = {}

    def _read(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the rank has of each."""
        pairs = zip(self._packings, tensors, strict=True)
        return tuple(packing.read(tensor) for packing, tensor in pairs)


class _Preparing(_Packed):
    """At the source."""

    def run(self, *tensors: Tensor) -> None:
        """The wire tensors of the local ones."""
        wired = self._wired
        packed = self._read(tensors)
        out = tuple(self.buffers.values())
        # Of nothing too there may be something, such as the scale of all of a tensor.
        if any(one.numel() for one in out):
            prepare(wired.transform, wired.src, wired.dst, packed, out)


class _Finalizing(_Packed):
    """At the destination."""

    def run(self, *tensors: Tensor) -> None:
        """The local tensors of the wire ones."""
        if all(0 in packing.shape for packing in self._packings):
            return
        wired = self._wired
        values = tuple(self.buffers.values())
        packed = self._read(tensors)
        # Copies, where they are no views: memory of the right shape, whatever is in it.
        finalize(wired.transform, wired.src, wired.dst, values, packed)
        for packing, tensor, made in zip(self._packings, tensors, packed, strict=True):
            if not packing.is_view:
                packing.write(tensor, made)
