"""Broadcast: the reference engine, which broadcasts every source tensor whole; each rank slices out its pieces.

It is slow and takes much memory, but is so plain that it is obviously right. Tests compare the
exchange with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardmath.plans.programs.messages import Round
from shardmath.plans.programs.part import layouts_on
from shardmath.plans.transfers import Transfer
from shardmath_gloo.wire import GlooWire
from shardmath_torch.groups import dtypes
from shardmath_torch.moves.exchange.task import Task
from shardmath_torch.moves.exchange.views import divide, fill
from shardmath_torch.moves.observing.laps import ARRIVED
from shardmath_torch.moves.observing.stopwatch import Stopwatch

__all__ = ["Broadcast"]


class _Source(NamedTuple):
    """One broadcast tensor. All of addend 0 sort before those of addend 1, so folds happen in order."""

    addend: int
    rank: int
    key: str


class Broadcast:
    """The engine "broadcast", which broadcasts to all ranks each source tensor that the plan sends; each rank keeps
    the elements of its destination."""

    def __init__(self, task: Task) -> None:
        assert isinstance(task.wire, GlooWire), "an engine of gloo's"
        self._wire = task.wire
        self._part = task.part
        self._received: dict[_Source, list[Transfer]] = {}
        # Of all ranks, even if this rank takes nothing from a tensor: a broadcast is collective.
        sources: set[_Source] = set()
        for transfer in self._part.plan.transfers():
            if transfer.nbytes:
                source = _Source(transfer.addend, transfer.src_rank, transfer.src_tensor)
                sources.add(source)
                if transfer.dst_rank == self._part.rank:
                    self._received.setdefault(source, []).append(transfer)
        self._sources = sorted(sources)
        # How many steps of the latest move this rank has begun; None if unknown.
        self.begun: int | None = 0

    @property
    def staging_bytes(self) -> int:
        """Always 0: no staging memory is kept between moves."""
        return 0

    def prepare(
        self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], held: bool = False
    ) -> None:
        """Do nothing, and ignore all arguments: unlike other engines, this one allocates no staging memory before a
        move."""

    def let_go(self) -> None:
        """Do nothing: this engine holds no tensor between moves."""

    @property
    def posted(self) -> tuple[Round, ...]:
        """The messages that the plan has for this rank, needed only for reports: this engine broadcasts whole tensors
        instead of sending them. They are grouped into rounds (messages posted together, and completed before the next
        round)."""
        return self._part.rounds

    def keep(self, task: Task, gone: Collection[int]) -> Broadcast:
        """Return a new engine for `task`, which is this engine's task (one rank's work in a plan) without sends to the
        ranks in `gone`. Nothing of this engine is reused."""
        return Broadcast(task)

    def move(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], watch: Stopwatch) -> None:
        """Copy elements of all ranks' `src` into this rank's `dst`, in place, as the plan says; both are dicts of local
        tensors by name. `watch` records the time when `dst` is complete. Raises PeerFailure if a message fails or is
        late."""
        # The number of begun steps, unknown during the move: tensors arrive in another order than in the part's steps.
        self.begun = None
        # Only in inference mode may inference tensors be written.
        with torch.inference_mode():
            for work in self._part.fills:
                fill(work, dst)
            for source in self._sources:
                whole = self._broadcast(source, src)
                for transfer in self._received.get(source, ()):
                    destination = dst[transfer.dst_tensor].detach()
                    _apply(transfer, whole, destination)
            for work in self._part.divisions:
                divide(work, dst)
        # More than there are: all are done.
        self.begun = self._part.steps + 1
        watch.lap(ARRIVED)

    def _broadcast(self, source: _Source, src: Mapping[str, Tensor]) -> Tensor:
        """Broadcast the source tensor from its rank, and return a copy of it."""
        if source.rank == self._part.rank:
            local = src[source.key].detach()
            whole = local.clone(memory_format=torch.contiguous_format)
        else:
            layout = layouts_on(self._part.plan.src, source.rank)[source.key]
            shape = layout.local_shape(source.rank)
            whole = torch.empty(shape, dtype=dtypes.dtype_of(layout.dtype), device="cpu")
        memory = dtypes.words(whole).view(-1).view(torch.uint8)
        self._wire.broadcast(memory, source.rank)
        return whole


def _apply(transfer: Transfer, whole: Tensor, destination: Tensor) -> None:
    """Copy or fold the transfer's piece of the whole source into its place in the destination."""
    piece = whole[transfer.src_slices]
    into = destination[transfer.dst_slices]
    if transfer.op == "copy":
        # As integers of the elements' size, so that bits are copied unchanged.
        dtypes.words(into).copy_(dtypes.words(piece))
    else:
        dtypes.fold(transfer.op, into, piece)
