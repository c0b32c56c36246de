"""Views: the copies of a move between tensors and staging.

1. Copies move bits: elements in their own type if torch copies every bit of it, words otherwise. Folds compute in the
   elements' own type.
2. For many small tensors, making views takes longer than copying. So a tensor that is moved whole is copied without a
   view, and its view in staging is made once.
3. Callers are in inference mode, so that autograd records nothing.
4. Views of tensors that keep their addresses (`held`) are made once: later moves copy between the same views.

>>> tensors = Typed({"w": torch.tensor([1.0, 2.0])})
>>> second = StridedView("w", (1,), (1,), 1)
>>> tensors.bits(second).dtype, tensors.elements(second)
(torch.float32, tensor([2.]))
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardmath.layouts.algebra.mesh import strides as row_major
from shardmath.plans.programs.messages import Message
from shardmath.plans.programs.part import CellWork
from shardmath_torch.groups import compat, dtypes
from shardmath_torch.moves.exchange.endpoints import Endpoint, StridedView, select
from shardmath_torch.moves.exchange.rounds import Fold, Keep, Receive, Send, Unpacking

__all__ = ["Staged", "Typed", "MoveViews", "divide", "fill"]

Tensors: TypeAlias = Mapping[str, Tensor]

_Kind: TypeAlias = Literal["pack", "unpack", "keep"]
"""Copies of an endpoint's pieces: from tensors into staging, out of staging, or from tensor to tensor on this rank."""

MOST_PIECES = 1 << 17
"""Most views of staging that are kept, at about half a kilobyte each."""


class Typed:
    """Tensors by name, with two views of each, made at first use. One has a dtype that torch copies bit by bit, for
    copies; the other has the tensor's own dtype, for arithmetic."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._elements: dict[str, Tensor] = {}

    def bits(self, piece: StridedView) -> Tensor:
        """Return the part of the tensor `piece.key` that `piece` describes by offset, shape and strides, as a view in a
        dtype that torch copies bit by bit."""
        tensor = self._bits[piece.key]
        # A piece has the tensor's strides, so a piece of the tensor's shape is the whole tensor.
        return tensor if tensor.shape == piece.shape else select(tensor, piece)

    def list_bits(self, pieces: Iterable[StridedView]) -> list[Tensor]:
        """Return `bits` of each piece, in that order."""
        # Without a call per piece, since many pieces are small.
        found = self._bits
        views = []
        for key, shape, strides, offset in pieces:
            tensor = found[key]
            if tensor.shape != shape:
                tensor = tensor.as_strided(shape, strides, tensor.storage_offset() + offset)
            views.append(tensor)
        return views

    def bytes(self, view: StridedView) -> Tensor:
        """Return the bytes of a contiguous view as a tensor of uint8, without a copy."""
        return select(self._bits[view.key], view).view(torch.uint8)

    @functools.cached_property
    def _bits(self) -> dict[str, Tensor]:
        """Each tensor in a dtype that torch copies bit by bit."""
        return {
            key: tensor if tensor.dtype in dtypes.COPIED else dtypes.words(tensor)
            for key, tensor in self._tensors.items()
        }

    def take(self, keys: Iterable[str]) -> list[Tensor]:
        """Return the tensors named in `keys`, in that order."""
        return [self._tensors[key] for key in keys]

    def elements(self, view: StridedView) -> Tensor:
        """Return the part of the tensor `view.key` that `view` describes by offset, shape and strides, in the tensor's
        own dtype, without a copy."""
        if view.key not in self._elements:
            self._elements[view.key] = self._tensors[view.key].detach()
        return select(self._elements[view.key], view)


class _Copies(NamedTuple):
    """An endpoint's copies, view by view, and the folds that follow them."""

    into: list[Tensor]
    out_of: list[Tensor]
    folds: list[Fold]

    def run(self) -> list[Fold]:
        """Make the copies of one message: copy each tensor in `out_of` to the tensor at the same index in `into`.
        Return the reductions, such as sums, that the caller does afterwards."""
        if self.into:
            compat.copy_each(self.into, self.out_of)
        return self.folds


class Staged:
    """A maker of views of staging memory, one view for each slice of a tensor in a message. Up to MOST_PIECES views are
    kept for later moves.

    Endpoints are keys by their `id`, since they live at least as long as these views. No tensor of a caller is kept:
    `wholes` has only the names of whole tensors, for endpoints that consist of such.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.wholes: dict[int, list[str]] = {}
        # All of the memory, by element type; and the views of pieces, by endpoint.
        self._typed: dict[torch.dtype, Tensor] = {}
        self._strides: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._pieces: dict[int, list[Tensor]] = {}
        self._view_count = 0

    def find(self, endpoint: Endpoint, like: Iterable[Tensor]) -> list[Tensor]:
        """Return a list of views of staging memory, one for each piece (slice of a tensor) of the message that
        `endpoint` describes. `like` has a tensor of each piece's dtype, in the same order."""
        views = self._pieces.get(id(endpoint))
        if views is None:
            message = endpoint.message
            pieces = zip(message.pieces, message.starts, like, strict=True)
            views = [
                self._view(tensor.dtype, piece.shape, endpoint.start + start)
                for piece, start, tensor in pieces
            ]
            self._view_count += len(views)
            if self._view_count <= MOST_PIECES:
                self._pieces[id(endpoint)] = views
        return views

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
        """A contiguous view of elements from byte `start` on."""
        typed = self._typed.get(dtype)
        if typed is None:
            # The block's size need not be a multiple of the element's: the last bytes are left out.
            fitting = self.memory.nbytes - self.memory.nbytes % dtype.itemsize
            typed = self._typed[dtype] = self.memory[:fitting].view(dtype)
        # Many pieces have few shapes.
        strides = self._strides.get(shape)
        if strides is None:
            strides = self._strides[shape] = row_major(shape)
        # Without a remainder: pieces are aligned to their elements.
        return typed.as_strided(shape, strides, start // dtype.itemsize)


class MoveViews:
    """The views of one move's tensors and staging; with `held`, later moves of the same tensors reuse them."""

    def __init__(self, src: Tensors, dst: Tensors, staged: Staged, held: bool = False) -> None:
        self._src = Typed(src)
        self._dst = Typed(dst)
        self.staged = staged
        self._held = held
        self._copies: dict[tuple[_Kind, int], _Copies] = {}
        self._bytes: dict[int, Tensor] = {}

    def over(self, memory: Tensor) -> MoveViews:
        """Return views of the same tensors, with `memory` as staging."""
        views = copy.copy(self)
        views.staged = Staged(memory)
        views._held = False
        return views

    def _find_bytes(self, endpoint: Endpoint, arriving: bool) -> Tensor:
        """The message's bytes: in the tensor if they are contiguous there, otherwise in staging."""
        memory = self._bytes.get(id(endpoint)) if self._held else None
        if memory is None:
            memory = self._locate_bytes(endpoint, arriving)
            if self._held:
                self._bytes[id(endpoint)] = memory
        return memory

    def _locate_bytes(self, endpoint: Endpoint, arriving: bool) -> Tensor:
        if endpoint.contiguous:
            tensors = self._dst if arriving else self._read_from(endpoint.message)
            return tensors.bytes(endpoint.contiguous)
        return self.staged.memory[endpoint.start : endpoint.start + endpoint.message.nbytes]

    def _read_from(self, message: Message) -> Typed:
        """The tensors from which the message is sent."""
        return self._dst if message.relayed else self._src

    def receive(self, endpoint: Endpoint) -> Receive:
        """Return a Receive: the message that `endpoint` describes, and the memory to receive the message into. If that
        is staging memory, the Receive also has a function that returns the copies to do from there into destination
        tensors."""
        memory = self._find_bytes(endpoint, arriving=True)
        is_unpacked = endpoint.views and not endpoint.contiguous
        find = partial(self.find_unpacking, endpoint) if is_unpacked else None
        return Receive(endpoint.message, memory, find)

    def send(self, endpoint: Endpoint) -> Send:
        """Return a Send for the message at `endpoint`, with the memory to send from: a slice of the tensor, or staging
        memory. With staging memory, the Send also has a function that copies the message's slices there."""
        memory = self._find_bytes(endpoint, arriving=False)
        is_packed = endpoint.views and not endpoint.contiguous
        pack = partial(self.pack, endpoint) if is_packed else None
        return Send(endpoint.message, memory, pack)

    def keep(self, source: Endpoint, target: Endpoint) -> Keep:
        """Return a Keep for a message that stays on this rank: its `unpack` copies the pieces from `source` to
        `target`."""
        return Keep(source.message, self._find_copies("keep", source, target).run)

    def pack(self, endpoint: Endpoint) -> None:
        """Copy the pieces of the message at `endpoint` from tensors into staging."""
        self._find_copies("pack", endpoint).run()

    def find_unpacking(self, endpoint: Endpoint) -> Unpacking:
        """Return a function that copies the pieces of the message at `endpoint` out of staging, then returns the
        reductions (folds) still to be done."""
        return self._find_copies("unpack", endpoint).run

    def _find_copies(
        self, kind: _Kind, endpoint: Endpoint, target: Endpoint | None = None
    ) -> _Copies:
        """The copies of an endpoint, made once if tensors are held: "pack" and "unpack" copy into and out of staging,
        "keep" to the endpoint `target`."""
        # Without the target, as an endpoint from which a message is kept has only one.
        key = kind, id(endpoint)
        copies = self._copies.get(key)
        if copies is None:
            copies = self._make_copies(kind, endpoint, target)
            if self._held:
                self._copies[key] = copies
        return copies

    def _make_copies(self, kind: _Kind, endpoint: Endpoint, target: Endpoint | None) -> _Copies:
        if target is not None:
            return self._list_kept(endpoint, target)
        return self._list_packed(endpoint) if kind == "pack" else self._list_unpacked(endpoint)

    def _list_packed(self, endpoint: Endpoint) -> _Copies:
        bits = self._list_bits(endpoint, self._read_from(endpoint.message))
        return _Copies(self.staged.find(endpoint, bits), bits, [])

    def _list_unpacked(self, endpoint: Endpoint) -> _Copies:
        if endpoint.folds:
            return self._list_folded(endpoint)
        bits = self._list_bits(endpoint, self._dst)
        return _Copies(bits, self.staged.find(endpoint, bits), [])

    def _list_bits(self, endpoint: Endpoint, tensors: Typed) -> list[Tensor]:
        """The message's pieces in the tensors, in the order of the message."""
        keys = self.staged.wholes.get(id(endpoint))
        if keys is not None:
            return tensors.take(keys)
        bits = tensors.list_bits(endpoint.views)
        keys = [view.key for view in endpoint.views]
        # If every piece is a whole tensor, later moves need no views.
        if all(map(operator.is_, bits, tensors.take(keys))):
            self.staged.wholes[id(endpoint)] = keys
        return bits

    def _list_folded(self, endpoint: Endpoint) -> _Copies:
        """The copies and folds out of staging, for an endpoint with folds."""
        copies = _Copies([], [], [])
        pieces = endpoint.message.pieces
        destinations = [
            self._dst.bits(view) if piece.op == "copy" else self._dst.elements(view)
            for view, piece in zip(endpoint.views, pieces, strict=True)
        ]
        staged_views = self.staged.find(endpoint, destinations)
        for piece, into, out_of in zip(pieces, destinations, staged_views, strict=True):
            if piece.op == "copy":
                copies.into.append(into)
                copies.out_of.append(out_of)
            else:
                copies.folds.append(Fold(piece.addend, piece.op, into, out_of))
        return copies

    def _list_kept(self, source: Endpoint, target: Endpoint) -> _Copies:
        """The copies and folds of a message that stays on this rank, from tensor to tensor without staging."""
        copies = _Copies([], [], [])
        ends = zip(source.views, target.views, source.message.pieces, strict=True)
        for src_view, dst_view, piece in ends:
            if piece.op == "copy":
                copies.into.append(self._dst.bits(dst_view))
                copies.out_of.append(self._src.bits(src_view))
            else:
                into = self._dst.elements(dst_view)
                source_elements = self._src.elements(src_view)
                copies.folds.append(Fold(piece.addend, piece.op, into, source_elements))
        return copies


# Cells before and after pieces arrive


def fill(work: CellWork, tensors: Tensors) -> None:
    """Set elements of the tensor `work.key` to `work.value`, the initial value of a reduction. `work.boxes` are the
    index ranges of these elements."""
    tensor = tensors[work.key].detach()
    for box in work.boxes:
        dtypes.fill(tensor[box], work.value)


def divide(work: CellWork, tensors: Tensors) -> None:
    """Divide the elements of the tensor `work.key` in the boxes of `work` by `work.value`, as for an average."""
    tensor = tensors[work.key].detach()
    # The value is complex by its type, but a divisor is a count of addends.
    divisor = int(work.value.real)
    for box in work.boxes:
        dtypes.divide(tensor[box], divisor)
