"""The exchange: rounds of messages over any wire.

A rank walks its rounds. In each it posts all receives, packs and posts all sends, copies what it
keeps while the wire works, unpacks messages as they arrive, and at last folds what is reduced, in
order of addend: so results do not depend on what arrives first, and are those of
`shardmath.simulate` bit for bit. All of this is done before the next round packs, so what arrived
in one may be relayed in the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardmath.algebra.mesh import strides as row_major
from shardmath.plans.plan import Transfer
from shardmath.programs.messages import Message
from shardmath_torch import dtypes
from shardmath_torch.agreement.wire import PeerFailure, Pending
from shardmath_torch.exchange import cells
from shardmath_torch.exchange.endpoints import (
    BoundRound,
    Endpoint,
    StridedView,
    bind,
    count_staging_bytes,
    select,
)
from shardmath_torch.exchange.staging import Fence, staging_of
from shardmath_torch.exchange.task import Task

__all__ = ["Exchange"]

Tensors: TypeAlias = Mapping[str, Tensor]

_OnItsWay: TypeAlias = tuple[Endpoint, Pending]


class Exchange:
    """The engine of both transports. `fence` says how a move waits for the one that had its staging before."""

    def __init__(self, task: Task, fence: Fence | None = None) -> None:
        self._task = task
        self._fence = fence or Fence()
        self._bound_to: object = None
        self._rounds: tuple[BoundRound, ...] = ()
        self._staging = staging_of(task.group, torch.device("cpu"))
        self._needed = 0

    @property
    def staging_bytes(self) -> int:
        """Bytes of the group's staging that a move takes."""
        return self._needed

    def prepare(self, src: Tensors, dst: Tensors) -> None:
        """Find where all messages lie in these tensors, and make staging for those that need it."""
        src_strides = {key: tensor.stride() for key, tensor in src.items()}
        dst_strides = {key: tensor.stride() for key, tensor in dst.items()}
        device = _find_device(src, dst)
        wanted = src_strides, dst_strides, device
        if wanted != self._bound_to:
            # Bound to nothing until all is found: an interrupt in between leaves half of it.
            self._bound_to = None
            self._rounds = bind(self._task.part.rounds, src_strides, dst_strides)
            self._staging = staging_of(self._task.group, device)
            self._needed = count_staging_bytes(self._rounds)
            self._bound_to = wanted
        self._staging.reserve(self._needed)

    def move(self, src: Tensors, dst: Tensors) -> None:
        """Move the tensors. Raises PeerFailure."""
        part = self._task.part
        # In inference mode inference tensors, too, may be written.
        with torch.inference_mode(), self._staging.lend(self._needed, self._fence) as block:
            buffers = _Buffers(src, dst, block)
            for work in part.fills:
                cells.fill(work, dst)
            for one in self._rounds:
                self._run_round(one, buffers)
            for work in part.divisions:
                cells.divide(work, dst)

    def _run_round(self, one: BoundRound, buffers: _Buffers) -> None:
        """Move the messages of one round, all of them before the next round begins."""
        # All is posted before anything is waited for: a rank that waited first could wait for ever.
        arriving = [self._receive(endpoint, buffers) for endpoint in one.receives]
        leaving = [self._send(endpoint, buffers) for endpoint in one.sends]
        self._task.wire.start()
        folds: list[_Fold] = []
        for source, target in one.keeps:
            folds += buffers.keep(source, target)
        for endpoint, pending in arriving:
            _wait(pending, endpoint.message)
            folds += buffers.unpack(endpoint)
        # What has not left must not change: a relayed message may be sent from a destination.
        for endpoint, pending in leaving:
            _wait(pending, endpoint.message)
        # In order of addend, not of arrival: rounding depends on the order.
        for fold in sorted(folds, key=lambda fold: fold.addend):
            dtypes.fold(fold.op, fold.into, fold.piece)

    def _receive(self, endpoint: Endpoint, buffers: _Buffers) -> _OnItsWay:
        """Post the receive of the message."""
        message = endpoint.message
        memory = buffers.find_bytes(endpoint, buffers.dst)
        with _Blame(message):
            pending = self._task.wire.receive(memory, message.src_rank)
        return endpoint, pending

    def _send(self, endpoint: Endpoint, buffers: _Buffers) -> _OnItsWay:
        """Pack the message, and post the send of it."""
        message = endpoint.message
        tensors = buffers.read_from(message)
        buffers.pack(endpoint, tensors)
        memory = buffers.find_bytes(endpoint, tensors)
        with _Blame(message):
            pending = self._task.wire.send(memory, message.dst_rank)
        return endpoint, pending


def _find_device(src: Tensors, dst: Tensors) -> torch.device:
    """Where the rank's tensors are, all of them on one device; the CPU where it has none."""
    for tensor in (*src.values(), *dst.values()):
        return tensor.device
    return torch.device("cpu")


def _wait(pending: Pending, message: Message) -> None:
    """Wait until the message has come or left."""
    with _Blame(message):
        pending.wait()


class _Blame:
    """A failure inside is one of this message's first tensor.

    A class and no generator, since every message enters it twice.
    """

    def __init__(self, message: Message) -> None:
        self._message = message

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, failure: object, trace: object) -> None:
        if isinstance(failure, PeerFailure):
            failure.tensor = self._message.pieces[0].tensor


class _Fold(NamedTuple):
    """A piece that has come, and what it is to be folded into."""

    addend: int
    op: str
    into: Tensor
    piece: Tensor


class _Buffers:
    """One move's tensors and staging, as they are and as words."""

    def __init__(self, src: Tensors, dst: Tensors, block: Tensor) -> None:
        # Folds compute in the elements' own type; all else moves words.
        self._typed_src = {key: tensor.detach() for key, tensor in src.items()}
        self._typed_dst = {key: tensor.detach() for key, tensor in dst.items()}
        self.src = {key: dtypes.words(tensor) for key, tensor in src.items()}
        self.dst = {key: dtypes.words(tensor) for key, tensor in dst.items()}
        self._block = block
        self._typed_blocks: dict[torch.dtype, Tensor] = {}

    def read_from(self, message: Message) -> Tensors:
        """The tensors from which the message is sent."""
        return self.dst if message.relayed else self.src

    def find_bytes(self, endpoint: Endpoint, tensors: Tensors) -> Tensor:
        """The message's bytes: in the tensor where they are contiguous there, otherwise in staging."""
        if endpoint.contiguous:
            return select(tensors, endpoint.contiguous).view(torch.uint8)
        end = endpoint.start + endpoint.message.nbytes
        return self._block[endpoint.start : end]

    def pack(self, endpoint: Endpoint, tensors: Tensors) -> None:
        """Copy the pieces into staging, unless they are sent in place."""
        if endpoint.contiguous:
            return
        for view, piece, start in _list_staged(endpoint):
            words = select(tensors, view)
            self._find_staged(words.dtype, piece, start).copy_(words)

    def unpack(self, endpoint: Endpoint) -> list[_Fold]:
        """Copy the pieces out of staging, unless they came in place; give what is to be folded."""
        folds: list[_Fold] = []
        if endpoint.contiguous:
            return folds
        for view, piece, start in _list_staged(endpoint):
            if piece.op == "copy":
                words = select(self.dst, view)
                words.copy_(self._find_staged(words.dtype, piece, start))
            else:
                into = select(self._typed_dst, view)
                arrived = self._find_staged(into.dtype, piece, start)
                folds.append(_Fold(piece.addend, piece.op, into, arrived))
        return folds

    def keep(self, source: Endpoint, target: Endpoint) -> list[_Fold]:
        """Copy the rank's own pieces; give what is to be folded."""
        folds = []
        ends = zip(source.views, target.views, source.message.pieces, strict=True)
        for here, there, piece in ends:
            if piece.op == "copy":
                select(self.dst, there).copy_(select(self.src, here))
            else:
                into = select(self._typed_dst, there)
                kept = select(self._typed_src, here)
                folds.append(_Fold(piece.addend, piece.op, into, kept))
        return folds

    def _find_staged(self, dtype: torch.dtype, piece: Transfer, start: int) -> Tensor:
        """The piece inside staging, from byte `start` on."""
        size = dtype.itemsize
        block = self._typed_blocks.get(dtype)
        if block is None:
            # Only full elements are viewed as another type: bytes beyond the last are left out.
            fitting = self._block.nbytes - self._block.nbytes % size
            block = self._block[:fitting].view(dtype)
            self._typed_blocks[dtype] = block
        return torch.as_strided(block, piece.shape, row_major(piece.shape), start // size)


def _list_staged(endpoint: Endpoint) -> Iterator[tuple[StridedView, Transfer, int]]:
    """Each piece's view, itself, and the byte of staging where it begins."""
    message = endpoint.message
    starts = (endpoint.start + start for start in message.starts)
    return zip(endpoint.views, message.pieces, starts, strict=True)
