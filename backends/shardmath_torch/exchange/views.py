"""Views: one move's tensors and staging as copies from views to views.

1. Copies move words; folds compute in the elements' own type.
2. Views of tensors that stay where they are (`held`) are made once: the next move copies between the same ones, and
   touches no tensor in Python.

>>> tensors = Typed({"w": torch.tensor([1.0, 2.0])})
>>> second = StridedView("w", (1,), (1,), 1)
>>> tensors.words(second).dtype, tensors.elements(second)
(torch.int32, tensor([2.]))
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardmath.algebra.mesh import strides as row_major
from shardmath.plans.plan import Transfer
from shardmath.programs.messages import Message
from shardmath.programs.part import CellWork
from shardmath_torch import dtypes
from shardmath_torch.exchange.endpoints import Endpoint, StridedView, select

__all__ = ["Fold", "Typed", "Views", "divide", "fill"]

Tensors: TypeAlias = Mapping[str, Tensor]


class Fold(NamedTuple):
    """A piece that has come, and what it is to be folded into."""

    addend: int
    op: str
    into: Tensor
    piece: Tensor


class Typed:
    """Tensors as words and as elements, each made when it is first asked for."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._words: dict[str, Tensor] = {}
        self._elements: dict[str, Tensor] = {}

    def words(self, view: StridedView) -> Tensor:
        """What the view has, as words, which every element type is copied as; without a copy."""
        if view.key not in self._words:
            self._words[view.key] = dtypes.words(self._tensors[view.key])
        return select(self._words, view)

    def elements(self, view: StridedView) -> Tensor:
        """What the view has, in its own type; without a copy."""
        if view.key not in self._elements:
            self._elements[view.key] = self._tensors[view.key].detach()
        return select(self._elements, view)


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


class Views:
    """One move's tensors and staging."""

    def __init__(self, src: Tensors, dst: Tensors, block: Tensor, held: bool = False) -> None:
        self._src = Typed(src)
        self._dst = Typed(dst)
        self.block = block
        self._held = held
        self._typed_blocks: dict[torch.dtype, Tensor] = {}
        self._copies: dict[tuple[str, int], _Copies] = {}
        self._bytes: dict[int, Tensor] = {}

    def over(self, block: Tensor) -> Views:
        """The same tensors, and this memory as staging."""
        apart = copy.copy(self)
        apart.block = block
        apart._held = False
        apart._typed_blocks = {}
        return apart

    def find_bytes(self, endpoint: Endpoint, arriving: bool) -> Tensor:
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
            return tensors.words(endpoint.contiguous).view(torch.uint8)
        return self.block[endpoint.start : endpoint.start + endpoint.message.nbytes]

    def _read_from(self, message: Message) -> Typed:
        """The tensors from which the message is sent."""
        return self._dst if message.relayed else self._src

    def pack(self, endpoint: Endpoint) -> None:
        """Copy the pieces into staging, unless they are sent in place."""
        if not endpoint.contiguous:
            self._find_copies("pack", endpoint).run()

    def unpack(self, endpoint: Endpoint) -> list[Fold]:
        """Copy the pieces out of staging, unless they came in place; give what is to be folded."""
        if endpoint.contiguous:
            return []
        return self._find_copies("unpack", endpoint).run()

    def keep(self, source: Endpoint, target: Endpoint) -> list[Fold]:
        """Copy the rank's own pieces; give what is to be folded."""
        return self._find_copies("keep", source, target).run()

    def _find_copies(
        self, kind: str, endpoint: Endpoint, target: Endpoint | None = None
    ) -> _Copies:
        """The copies of an endpoint, made once where tensors are held."""
        # Endpoints live as long as what is bound here, so that their identities stay theirs.
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
        copies = _Copies([], [], [])
        tensors = self._read_from(endpoint.message)
        for view, piece, start in _list_staged(endpoint):
            words = tensors.words(view)
            copies.into.append(self._find_staged(words.dtype, piece, start))
            copies.out_of.append(words)
        return copies

    def _list_unpacked(self, endpoint: Endpoint) -> _Copies:
        copies = _Copies([], [], [])
        for view, piece, start in _list_staged(endpoint):
            if piece.op == "copy":
                words = self._dst.words(view)
                copies.into.append(words)
                copies.out_of.append(self._find_staged(words.dtype, piece, start))
            else:
                into = self._dst.elements(view)
                arrived = self._find_staged(into.dtype, piece, start)
                copies.folds.append(Fold(piece.addend, piece.op, into, arrived))
        return copies

    def _list_kept(self, source: Endpoint, target: Endpoint) -> _Copies:
        copies = _Copies([], [], [])
        ends = zip(source.views, target.views, source.message.pieces, strict=True)
        for here, there, piece in ends:
            if piece.op == "copy":
                copies.into.append(self._dst.words(there))
                copies.out_of.append(self._src.words(here))
            else:
                into = self._dst.elements(there)
                kept = self._src.elements(here)
                copies.folds.append(Fold(piece.addend, piece.op, into, kept))
        return copies

    def _find_staged(self, dtype: torch.dtype, piece: Transfer, start: int) -> Tensor:
        """The piece inside staging, from byte `start` on."""
        size = dtype.itemsize
        block = self._typed_blocks.get(dtype)
        if block is None:
            # Only full elements are viewed as another type: bytes beyond the last are left out.
            fitting = self.block.nbytes - self.block.nbytes % size
            block = self.block[:fitting].view(dtype)
            self._typed_blocks[dtype] = block
        return torch.as_strided(block, piece.shape, row_major(piece.shape), start // size)


def _list_staged(endpoint: Endpoint) -> Iterator[tuple[StridedView, Transfer, int]]:
    """Each piece's view, itself, and the byte of staging where it begins."""
    message = endpoint.message
    starts = (endpoint.start + start for start in message.starts)
    return zip(endpoint.views, message.pieces, starts, strict=True)


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
