"""The exchange: rounds of messages over any wire.

A rank walks its rounds. In each it posts all receives, packs and posts all sends, copies what it keeps while the wire
works, unpacks messages as they arrive, and at last folds what is reduced, in order of addend: so results do not depend
on what arrives first, and are those of `shardmath.simulate` bit for bit. All of this is done before the next round
packs, so what arrived in one may be relayed in the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardmath.algebra.mesh import strides as row_major
from shardmath.plans.plan import Transfer
from shardmath.programs.messages import Message
from shardmath_torch import dtypes
from shardmath_torch.agreement.wire import PeerFailure, Pending
from shardmath_torch.exchange import cells
from shardmath_torch.exchange.pack import LaidRound, Place, Site, lay, staging_needed, view
from shardmath_torch.exchange.staging import Fence, staging_of
from shardmath_torch.exchange.task import Task

__all__ = ["Exchange"]

Tensors = Mapping[str, Tensor]


class Exchange:
    """The engine of both transports. `fence` says how a move waits for the one that had its staging before."""

    def __init__(self, task: Task, fence: Fence | None = None) -> None:
        self._task, self._fence = task, fence or Fence()
        self._lying: object = None
        self._rounds: tuple[LaidRound, ...] = ()
        self._staging = staging_of(task.group, torch.device("cpu"))
        self._needed = 0

    @property
    def staging_bytes(self) -> int:
        """Bytes of the group's staging that a move takes."""
        return self._needed

    def prepare(self, src: Tensors, dst: Tensors) -> None:
        """Finds where all messages lie in these tensors, and makes staging for those that need it."""
        lying = tuple({key: t.stride() for key, t in side.items()} for side in (src, dst))
        device = next((t.device for t in (*src.values(), *dst.values())), torch.device("cpu"))
        if (lying, device) != self._lying:
            self._lying = None
            self._rounds = lay(self._task.part.rounds, *lying)
            self._staging = staging_of(self._task.group, device)
            self._needed = staging_needed(self._rounds)
            self._lying = lying, device
        self._staging.reserve(self._needed)

    def move(self, src: Tensors, dst: Tensors) -> None:
        """Moves. Raises PeerFailure."""
        lent = self._staging.lent(self._needed, self._fence)
        with (
            torch.inference_mode(),
            lent as block,
        ):  # in that mode inference tensors, too, may be written
            ends = _Ends(src, dst, block)
            for work in self._task.part.fills:
                cells.fill(work, dst)
            for one in self._rounds:
                self._round(one, ends)
            for work in self._task.part.divisions:
                cells.divide(work, dst)

    def _round(self, one: LaidRound, ends: _Ends) -> None:
        arriving = [self._receive(place, ends) for place in one.receives]
        leaving = [self._send(place, ends) for place in one.sends]
        self._task.wire.start()
        folds = [fold for source, target in one.keeps for fold in ends.keep(source, target)]
        for place, pending in arriving:
            _wait(pending, place.message)
            folds += ends.unpack(place)
        for place, pending in leaving:
            _wait(pending, place.message)
        for fold in sorted(folds, key=lambda fold: fold.addend):
            dtypes.fold(fold.op, fold.into, fold.piece)

    def _receive(self, place: Place, ends: _Ends) -> tuple[Place, Pending]:
        with _Naming(place.message):
            return place, self._task.wire.receive(
                ends.memory(place, ends.dst), place.message.src_rank
            )

    def _send(self, place: Place, ends: _Ends) -> tuple[Place, Pending]:
        ends.pack(place)
        with _Naming(place.message):
            return place, self._task.wire.send(
                ends.memory(place, ends.read(place)), place.message.dst_rank
            )


def _wait(pending: Pending, message: Message) -> None:
    with _Naming(message):
        pending.wait()


class _Naming:
    """A failure inside is one of this message's first tensor."""

    def __init__(self, message: Message) -> None:
        self._message = message

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, failure: object, trace: object) -> None:
        if isinstance(failure, PeerFailure):
            failure.tensor = self._message.pieces[0].tensor


class _Fold(NamedTuple):
    addend: int
    op: str
    into: Tensor
    piece: Tensor


class _Ends:
    """One move's tensors and staging, as they are and as words."""

    def __init__(self, src: Tensors, dst: Tensors, block: Tensor) -> None:
        self._typed_src = {key: t.detach() for key, t in src.items()}
        self._typed_dst = {key: t.detach() for key, t in dst.items()}
        self.src = {key: dtypes.words(t) for key, t in src.items()}
        self.dst = {key: dtypes.words(t) for key, t in dst.items()}
        self._block = block
        self._blocks: dict[torch.dtype, Tensor] = {}

    def read(self, place: Place) -> Tensors:
        """The tensors from which the message is sent."""
        return self.dst if place.message.relayed else self.src

    def memory(self, place: Place, words: Tensors) -> Tensor:
        """The message's bytes: in the tensor where they are a stretch of it, otherwise in staging."""
        if place.stretch:
            return view(words, place.stretch).view(torch.uint8)
        return self._block[place.start : place.start + place.message.nbytes]

    def pack(self, place: Place) -> None:
        """Copies the pieces into staging, unless they are a stretch."""
        if not place.stretch:
            tensors = self.read(place)
            for site, piece, start in _each(place):
                self._staged(tensors[site.key].dtype, piece, start).copy_(view(tensors, site))

    def unpack(self, place: Place) -> Iterator[_Fold]:
        """Copies the pieces out of staging, unless they came in place; what is to be folded is left for later."""
        if not place.stretch:
            for site, piece, start in _each(place):
                if piece.op == "copy":
                    view(self.dst, site).copy_(self._staged(self.dst[site.key].dtype, piece, start))
                else:
                    into = view(self._typed_dst, site)
                    yield _Fold(
                        piece.addend, piece.op, into, self._staged(into.dtype, piece, start)
                    )

    def keep(self, source: Place, target: Place) -> Iterator[_Fold]:
        """Copies the rank's own pieces; what is to be folded is left for later."""
        for here, there, piece in zip(
            source.sites, target.sites, source.message.pieces, strict=True
        ):
            if piece.op == "copy":
                view(self.dst, there).copy_(view(self.src, here))
            else:
                yield _Fold(
                    piece.addend,
                    piece.op,
                    view(self._typed_dst, there),
                    view(self._typed_src, here),
                )

    def _staged(self, dtype: torch.dtype, piece: Transfer, start: int) -> Tensor:
        """The piece inside staging, from byte `start` on."""
        if dtype not in self._blocks:
            size = dtype.itemsize
            self._blocks[dtype] = self._block[: self._block.nbytes // size * size].view(dtype)
        return torch.as_strided(
            self._blocks[dtype], piece.shape, row_major(piece.shape), start // dtype.itemsize
        )


def _each(place: Place) -> Iterator[tuple[Site, Transfer, int]]:
    """Each piece's site, itself, and the byte of staging where it begins."""
    starts = (place.start + start for start in place.message.starts)
    return zip(place.sites, place.message.pieces, starts, strict=True)
