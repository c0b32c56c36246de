"""The reference: all of every source tensor is broadcast, and each rank slices out what the plan gives it.

Slow, with all the memory it takes, and so plain that it is right at sight. Tests compare the
exchange with it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardmath.plans.plan import Transfer
from shardmath.plans.programs.messages import Round
from shardmath.plans.programs.part import stored_on
from shardmath_gloo.wire import GlooWire
from shardmath_torch.groups import dtypes
from shardmath_torch.moves.exchange.task import Task
from shardmath_torch.moves.exchange.views import divide, fill
from shardmath_torch.moves.observing.laps import ARRIVED
from shardmath_torch.moves.observing.stopwatch import Stopwatch

__all__ = ["Broadcast"]


class _Turn(NamedTuple):
    """One broadcast: all addends of number 0 go before those of number 1, so folds come in order."""

    addend: int
    rank: int
    key: str


class Broadcast:
    """The engine "broadcast"."""

    def __init__(self, task: Task) -> None:
        assert isinstance(task.wire, GlooWire), "an engine of gloo's"
        self._wire = task.wire
        self._part = task.part
        self._mine: dict[_Turn, list[Transfer]] = {}
        # Those of all ranks, also where this one takes nothing: a broadcast is made by all.
        turns: set[_Turn] = set()
        for transfer in self._part.plan.transfers():
            if transfer.nbytes:
                turn = _Turn(transfer.addend, transfer.src_rank, transfer.src_tensor)
                turns.add(turn)
                if transfer.dst_rank == self._part.rank:
                    self._mine.setdefault(turn, []).append(transfer)
        self._turns = sorted(turns)
        self.begun: int | None = 0

    @property
    def staging_bytes(self) -> int:
        """None is kept."""
        return 0

    def prepare(
        self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], held: bool = False
    ) -> None:
        """Nothing to prepare."""

    def let_go(self) -> None:
        """Nothing is kept."""

    @property
    def posted(self) -> tuple[Round, ...]:
        """Those of the part, though all is broadcast: what the plan asks for is what is counted."""
        return self._part.rounds

    def keep(self, task: Task, gone: Collection[int]) -> Broadcast:
        """One for the task."""
        return Broadcast(task)

    def move(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], watch: Stopwatch) -> None:
        """Moves. Raises PeerFailure."""
        # Tensors come in another order than in rounds.
        self.begun = None
        # In inference mode inference tensors, too, may be written.
        with torch.inference_mode():
            for work in self._part.fills:
                fill(work, dst)
            for turn in self._turns:
                source = self._broadcast(turn, src)
                for transfer in self._mine.get(turn, ()):
                    destination = dst[transfer.dst_tensor].detach()
                    _apply(transfer, source, destination)
            for work in self._part.divisions:
                divide(work, dst)
        self.begun = self._part.steps + 1
        watch.lap(ARRIVED)

    def _broadcast(self, turn: _Turn, src: Mapping[str, Tensor]) -> Tensor:
        """All of that rank's source tensor."""
        if turn.rank == self._part.rank:
            held = src[turn.key].detach()
            source = held.clone(memory_format=torch.contiguous_format)
        else:
            stored = stored_on(self._part.plan.src, turn.rank)
            layout = stored[turn.key].layout
            shape = layout.local_shape(turn.rank)
            source = torch.empty(shape, dtype=dtypes.dtype_of(layout.dtype), device="cpu")
        words = dtypes.words(source)
        memory = words.view(-1).view(torch.uint8)
        self._wire.broadcast(memory, turn.rank)
        return source


def _apply(transfer: Transfer, source: Tensor, destination: Tensor) -> None:
    """Copy or fold the transfer's piece of the source into its place in the destination."""
    piece = source[transfer.src_slices]
    into = destination[transfer.dst_slices]
    if transfer.op == "copy":
        dtypes.words(into).copy_(dtypes.words(piece))
    else:
        dtypes.fold(transfer.op, into, piece)
