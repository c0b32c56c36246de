"""Workers: one per transformed local tensor of a rank, at one end of a move.

1. A worker has wire buffers, allocated by the first move, at the same addresses from move to move until they are let
   go. Tensors that an end does not transform have no worker.
2. At a source it makes wire tensors from the local one, at a destination the local one from them.
3. A transform with `make_worker` makes custom workers, if it is not applied block by block.
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
    """The interface of an object that transforms one local tensor, at the source before sending or at the destination
    after receiving. A quantized tensor is transformed together with its scales.

    `holds` says that it has the tensor itself, and is passed none; `opaque` that it accepts any kind of tensor.
    """

    @property
    def job(self) -> WireJob:
        """The tensor to transform, and the tensors that are sent for it (wire tensors)."""

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The wire tensors (sent or received instead of this rank's tensor), by their names in `job.wires`."""

    @property
    def holds(self) -> bool:
        """Whether the worker keeps the tensor in its own memory, so that callers of the move pass no tensor for it."""

    @property
    def opaque(self) -> bool:
        """Whether the worker accepts any kind of tensor, such as a quantized one. Movers do not check the tensors for
        such a worker.
        """

    def run(self, *tensors: Tensor) -> None:
        """At the source, fill the buffers from the given tensors; at the destination, the tensors from the buffers."""

    def let_go(self) -> None:
        """Free the worker's buffers, which are allocated again when next needed.

        The worker of a Megatron hook (a transform that makes its own workers) keeps them.
        """


@runtime_checkable
class HasWorkers(Protocol):
    """The interface of a transform, such as a Megatron hook, that makes a Worker for each local tensor. The Worker
    transforms this tensor before sending or after receiving.
    """

    def make_worker(self, job: WireJob, rank: int, end: End, device: torch.device) -> Worker:
        """Return the worker that transforms the local tensor of `job` on `rank`, at this `end` ("source" or
        "destination") of a move.
        """


def make_worker(job: WireJob, rank: int, end: End, device: torch.device) -> Worker | None:
    """Return the worker that transforms the tensor of `job` at this `end` of a move; None if nothing does so there."""
    if job.wired is None:
        return None
    as_held = job.wired.as_held
    is_as_held = as_held.source if end == "source" else as_held.destination
    if is_as_held:
        return None
    transform = job.wired.transform
    if isinstance(transform, HasWorkers):
        return transform.make_worker(job, rank, end, device)
    make = _Preparing if end == "source" else _Finalizing
    return make(job, job.wired, rank, device)


def make_buffers(job: WireJob, rank: int, device: torch.device) -> dict[str, Tensor]:
    """Return new wire tensors (sent instead of a local tensor), not yet filled, by their names in `job.wires`."""
    return {
        key: torch.empty(layout.local_shape(rank), dtype=dtype_of(layout.dtype), device=device)
        for key, layout in job.wires
    }


def count_bytes(job: WireJob, rank: int) -> int:
    """Return the bytes of the wire tensors that `rank` sends or receives instead of the local tensor of `job`."""
    counts = []
    for _, layout in job.wires:
        cells = math.prod(layout.local_shape(rank))
        counts.append(cells * dtype_of(layout.dtype).itemsize)
    return sum(counts)


class _Packed:
    """The base of both ends' workers, which apply a transform block by block to packed tensors."""

    holds = False
    opaque = False

    def __init__(self, job: WireJob, wired: Wired, rank: int, device: torch.device) -> None:
        self.job = job
        self._buffers: dict[str, Tensor] = {}
        self._where = rank, device
        self._wired = wired
        self._packings = [Packing(layout, rank, device) for _, layout in job.held]

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The wire tensors (sent or received instead of this rank's tensor), by name in `job.wires`; made if needed."""
        if not self._buffers:
            # Not as inference tensors: they are written outside inference mode, too.
            with torch.inference_mode(False):
                self._buffers = make_buffers(self.job, *self._where)
        return self._buffers

    def let_go(self) -> None:
        """Free the wire tensors, which are sent or received for the local tensor."""
        self._buffers = {}

    def _read(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The rank's positions of each tensor, packed."""
        pairs = zip(self._packings, tensors, strict=True)
        return tuple(packing.read(tensor) for packing, tensor in pairs)


class _Preparing(_Packed):
    """The worker at the source."""

    def run(self, *tensors: Tensor) -> None:
        """Compute the tensors to send (wire tensors) from the local tensors, if there is anything to send."""
        wired = self._wired
        packed = self._read(tensors)
        out = tuple(self.buffers.values())
        # Even an empty tensor may have a component with elements, such as one scale for all of it.
        if any(wire.numel() for wire in out):
            prepare(wired.transform, wired.src, wired.dst, packed, out)


class _Finalizing(_Packed):
    """The worker at the destination."""

    def run(self, *tensors: Tensor) -> None:
        """Compute the local tensors from the tensors that were received for them (wire tensors), unless the rank holds
        no elements.
        """
        if all(0 in packing.shape for packing in self._packings):
            return
        wired = self._wired
        values = tuple(self.buffers.values())
        packed = self._read(tensors)
        # Views, or copies that only serve as memory of the right shape and are written back below.
        finalize(wired.transform, wired.src, wired.dst, values, packed)
        for packing, tensor, computed in zip(self._packings, tensors, packed, strict=True):
            if not packing.is_view:
                packing.write(tensor, computed)
