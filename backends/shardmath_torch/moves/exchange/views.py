"""Views: one move's tensors and staging as copies from views to views.

1. Copies move bits: elements as they are where torch copies every bit of them, and words otherwise. Folds compute in
   the elements' own type.
2. Of many small tensors making views takes longer than copying them. So a tensor that goes whole is copied as it is,
   and the other end of the copy, in staging, is found once.
3. All of this is done in inference mode, so that nothing is recorded.
4. Views of tensors that stay where they are (`held`) are made once: the next move copies between the same ones, and
   touches no tensor in Python.

>>> tensors = Typed({"w": torch.tensor([1.0, 2.0])})
>>> second = StridedView("w", (1,), (1,), 1)
>>> tensors.bits(second).dtype, tensors.elements(second)
(torch.float32, tensor([2.]))
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardmath.layouts.algebra.mesh import strides as row_major
from shardmath.plans.programs.messages import Message
from shardmath.plans.programs.part import CellWork
from shardmath_torch.groups import dtypes
from shardmath_torch.moves.exchange.endpoints import Endpoint, StridedView, select
from shardmath_torch.moves.exchange.rounds import Fold, Keep, Receive, Send, Unpacking

__all__ = ["Staged", "Typed", "MoveViews", "divide", "fill"]

Tensors: TypeAlias = Mapping[str, Tensor]

MOST_PIECES = 1 << 17
"""Views of staging that are kept, at about half a kilobyte each."""


class Typed:
    """Tensors as bits and as elements, each made when it is first asked for."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._bits: dict[str, Tensor] = {}
        self._elements: dict[str, Tensor] = {}

    def bits(self, piece: StridedView) -> Tensor:
        """What the piece has, of a type that torch copies bit by bit; without a copy."""
        tensor = self._find_bits(piece.key)
        # A piece has the tensor's own strides, so one of its shape is the tensor.
        return tensor if tensor.shape == piece.shape else select(tensor, piece)

    def bytes(self, view: StridedView) -> Tensor:
        """What the contiguous view has; without a copy."""
        return select(self._find_bits(view.key), view).view(torch.uint8)

    def _find_bits(self, key: str) -> Tensor:
        tensor = self._bits.get(key)
        if tensor is None:
            tensor = self._tensors[key]
            if tensor.dtype not in dtypes.COPIED:
                tensor = dtypes.words(tensor)
            self._bits[key] = tensor
        return tensor

    def take(self, keys: Iterable[str]) -> list[Tensor]:
        """The tensors themselves."""
        return [self._tensors[key] for key in keys]

    def elements(self, view: StridedView) -> Tensor:
        """What the view has, in its own type; without a copy."""
        if view.key not in self._elements:
            self._elements[view.key] = self._tensors[view.key].detach()
        return select(self._elements[view.key], view)


class _Copies(NamedTuple):
    """Copies of an endpoint, view by view, and what is folded after them."""

    into: list[Tensor]
    out_of: list[Tensor]
    folds: list[Fold]

    def run(self) -> list[Fold]:
        """Copy all; give what is to be folded."""
        if self.into:
            torch._foreach_copy_(self.into, self.out_of)
        return self.folds


class Staged:
    """Where the pieces of endpoints lie in a block of staging, found once for each, up to MOST_PIECES.

    Endpoints live as long as what is bound here, so that their identities stay theirs. Of the callers' tensors nothing
    is kept but names: `wholes` has those of endpoints whose pieces are whole tensors, which are copied as they are.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.wholes: dict[int, list[str]] = {}
        self._typed: dict[torch.dtype, Tensor] = {}
        self._pieces: dict[int, list[Tensor]] = {}
        self._kept = 0

    def find(self, endpoint: Endpoint, like: Iterable[Tensor]) -> list[Tensor]:
        """The pieces of the endpoint, in the types of these."""
        found = self._pieces.get(id(endpoint))
        if found is None:
            message = endpoint.message
            pieces = zip(message.pieces, message.starts, like, strict=True)
            found = [
                self._view(tensor.dtype, piece.shape, endpoint.start + start)
                for piece, start, tensor in pieces
            ]
            self._kept += len(found)
            if self._kept <= MOST_PIECES:
                self._pieces[id(endpoint)] = found
        return found

    def _view(self, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
        """Elements from byte `start` on."""
        typed = self._typed.get(dtype)
        if typed is None:
            # Only full elements are viewed as another type: bytes beyond the last are left out.
            fitting = self.memory.nbytes - self.memory.nbytes % dtype.itemsize
            typed = self._typed[dtype] = self.memory[:fitting].view(dtype)
        return typed.as_strided(shape, row_major(shape), start // dtype.itemsize)


class MoveViews:
    """One move's tensors and staging."""

    def __init__(self, src: Tensors, dst: Tensors, staged: Staged, held: bool = False) -> None:
        self._src = Typed(src)
        self._dst = Typed(dst)
        self.staged = staged
        self._held = held
        self._copies: dict[tuple[str, int], _Copies] = {}
        self._bytes: dict[int, Tensor] = {}

    def over(self, memory: Tensor) -> MoveViews:
        """The same tensors, and this memory as staging."""
        apart = copy.copy(self)
        apart.staged = Staged(memory)
        apart._held = False
        return apart

    def _find_bytes(self, endpoint: Endpoint, arriving: bool) -> Tensor:
        """The message's bytes: in the tensor where they are contiguous there, otherwise in staging."""
        known = self._bytes.get(id(endpoint)) if self._held else None
        if known is None:
            known = self._locate_bytes(endpoint, arriving)
            if self._held:
                self._bytes[id(endpoint)] = known
        return known

    def _locate_bytes(self, endpoint: Endpoint, arriving: bool) -> Tensor:
        if endpoint.contiguous:
            tensors = self._dst if arriving else self._read_from(endpoint.message)
            return tensors.bytes(endpoint.contiguous)
        return self.staged.memory[endpoint.start : endpoint.start + endpoint.message.nbytes]

    def _read_from(self, message: Message) -> Typed:
        """The tensors from which the message is sent."""
        return self._dst if message.relayed else self._src

    def receive(self, endpoint: Endpoint) -> Receive:
        """The message, into its destination or into staging."""
        memory = self._find_bytes(endpoint, arriving=True)
        find = None if endpoint.contiguous else partial(self.find_unpacking, endpoint)
        return Receive(endpoint.message, memory, find)

    def send(self, endpoint: Endpoint) -> Send:
        """The message, out of its source or out of staging."""
        memory = self._find_bytes(endpoint, arriving=False)
        pack = None if endpoint.contiguous else partial(self.pack, endpoint)
        return Send(endpoint.message, memory, pack)

    def keep(self, source: Endpoint, target: Endpoint) -> Keep:
        """The message, from its source to its destination."""
        return Keep(source.message, self._find_copies("keep", source, target).run)

    def pack(self, endpoint: Endpoint) -> None:
        """Copy the pieces into staging."""
        self._find_copies("pack", endpoint).run()

    def find_unpacking(self, endpoint: Endpoint) -> Unpacking:
        """What copies the pieces out of staging, and gives what is to be folded."""
        return self._find_copies("unpack", endpoint).run

    def _find_copies(
        self, kind: str, endpoint: Endpoint, target: Endpoint | None = None
    ) -> _Copies:
        """The copies of an endpoint, made once where tensors are held."""
        key = kind, id(endpoint)
        copies = self._copies.get(key)
        if copies is None:
            copies = self._make_copies(kind, endpoint, target)
            if self._held:
                self._copies[key] = copies
        return copies

    def _make_copies(self, kind: str, endpoint: Endpoint, target: Endpoint | None) -> _Copies:
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
        """The tensors' own pieces, in the order of the message."""
        keys = self.staged.wholes.get(id(endpoint))
        if keys is not None:
            return tensors.take(keys)
        bits = [tensors.bits(view) for view in endpoint.views]
        keys = [view.key for view in endpoint.views]
        if all(map(operator.is_, bits, tensors.take(keys))):
            self.staged.wholes[id(endpoint)] = keys
        return bits

    def _list_folded(self, endpoint: Endpoint) -> _Copies:
        """What is copied, and what is folded."""
        copies = _Copies([], [], [])
        pieces = endpoint.message.pieces
        into = [
            self._dst.bits(view) if piece.op == "copy" else self._dst.elements(view)
            for view, piece in zip(endpoint.views, pieces, strict=True)
        ]
        arrived = self.staged.find(endpoint, into)
        for piece, here, there in zip(pieces, into, arrived, strict=True):
            if piece.op == "copy":
                copies.into.append(here)
                copies.out_of.append(there)
            else:
                copies.folds.append(Fold(piece.addend, piece.op, here, there))
        return copies

    def _list_kept(self, source: Endpoint, target: Endpoint) -> _Copies:
        copies = _Copies([], [], [])
        ends = zip(source.views, target.views, source.message.pieces, strict=True)
        for here, there, piece in ends:
            if piece.op == "copy":
                copies.into.append(self._dst.bits(there))
                copies.out_of.append(self._src.bits(here))
            else:
                into = self._dst.elements(there)
                kept = self._src.elements(here)
                copies.folds.append(Fold(piece.addend, piece.op, into, kept))
        return copies


# Cells before and after pieces arrive


def fill(work: CellWork, tensors: Tensors) -> None:
    """Give the cells the work's value."""
    tensor = tensors[work.key].detach()
    for box in work.boxes:
        dtypes.fill(tensor[box], work.value)


def divide(work: CellWork, tensors: Tensors) -> None:
    """Divide the cells by the work's value."""
    tensor = tensors[work.key].detach()
    # Values of all work are complex, and divisors are counts of addends.
    divisor = int(work.value.real)
    for box in work.boxes:
        dtypes.divide(tensor[box], divisor)
