"""The reference: every source tensor is broadcast whole, and each rank slices out what the plan gives it.

Slow, with all the memory it takes, and so plain that it is right at sight. Tests compare the
exchange with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardmath.plans.plan import Transfer
from shardmath.programs.part import stored_on
from shardmath_torch import dtypes
from shardmath_torch.exchange import cells
from shardmath_torch.exchange.task import Task

__all__ = ["Broadcast"]


class _Turn(NamedTuple):
    """One broadcast: all addends of number 0 go before those of number 1, so folds come in order."""

    addend: int
    rank: int
    key: str


class Broadcast:
    """The engine "broadcast"."""

    def __init__(self, task: Task) -> None:
        self._task, self._part = task, task.part
        self._mine: dict[_Turn, list[Transfer]] = {}
        turns: set[_Turn] = set()
        for transfer in self._part.plan.transfers():
            if not transfer.nbytes:
                continue
            turn = _Turn(transfer.addend, transfer.src_rank, transfer.src_tensor)
            turns.add(turn)
            if transfer.dst_rank == self._part.rank:
                self._mine.setdefault(turn, []).append(transfer)
        self._turns = sorted(turns)

    @property
    def staging_bytes(self) -> int:
        """None is kept."""
        return 0

    def prepare(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
        """Nothing to prepare."""

    def move(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
        """Moves. Raises PeerFailure."""
        with torch.inference_mode():  # where inference tensors, too, may be written
            for work in self._part.fills:
                cells.fill(work, dst)
            for turn in self._turns:
                whole = self._broadcast(turn, src)
                for transfer in self._mine.get(turn, ()):
                    into = dst[transfer.dst_tensor].detach()
                    _apply(transfer, whole, into)
            for work in self._part.divisions:
                cells.divide(work, dst)

    def _broadcast(self, turn: _Turn, src: Mapping[str, Tensor]) -> Tensor:
        """The whole source tensor of that rank."""
        if turn.rank == self._part.rank:
            whole = src[turn.key].detach().clone(memory_format=torch.contiguous_format)
        else:
            layout = stored_on(self._part.plan.src, turn.rank)[turn.key].layout
            shape = layout.local_shape(turn.rank)
            whole = torch.empty(shape, dtype=dtypes.dtype_of(layout.dtype))
        memory = dtypes.words(whole).view(-1).view(torch.uint8)
        self._task.wire.broadcast(memory, turn.rank)
        return whole


def _apply(transfer: Transfer, whole: Tensor, into: Tensor) -> None:
    """Copy or fold the transfer's piece of the source tensor into its place in the destination's."""
    piece = whole[transfer.src_slices]
    place = into[transfer.dst_slices]
    if transfer.op == "copy":
        dtypes.words(place).copy_(dtypes.words(piece))
    else:
        dtypes.fold(transfer.op, place, piece)
