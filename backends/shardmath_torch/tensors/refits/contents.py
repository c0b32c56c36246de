"""Contents: what lies in the memory of a tensor without data, as elements of a logical tensor.

1. A logical tensor is in its own memory, row by row. A copy of a view of it is in new memory, with the strides that
   the view had; so is what an operation made of it element by element, which then bears the operation's name.
2. What is read from there into other memory is strides on both sides: pieces.
3. A cast that loses numbers is followed, once, as what is stored may be of fewer bits. It computes whatever has another
   type in the end; one of complex numbers to real ones computes in any case.

>>> import torch
>>> logical = Content("q", (2, 4), (4, 1), 0, torch.float32)
>>> view = torch.empty(2, 4, device="meta")[:, 2:]
>>> logical.read(view, into=torch.empty(4, 4, device="meta")[2:, :2])
[Piece('q', 8, 2, ((2, 4, 4), (2, 1, 1)))]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from shardmath.base.errors import StoreError
from shardmath.models.recordings.boxes import Box, align
from shardmath.models.recordings.pieces import Block, Piece
from shardmath_torch.tensors.probes.patterns import holds

__all__ = ["BLANK", "Content", "is_dense"]

_Shape: TypeAlias = tuple[int, ...]

ALL = 1 << 62
"""More cells than any memory has."""


@dataclass(frozen=True, slots=True)
class Content:
    """Memory of this shape, row by row: steps of its dimensions are strides in the logical tensor.

    It has the numbers of `dtype`: the logical tensor's, or the type that lost some (`lossy`). `made` names the
    operations that computed it of the logical tensor.
    """

    tensor: str
    shape: _Shape
    strides: _Shape
    start: int
    dtype: torch.dtype
    made: tuple[str, ...] = ()
    lossy: bool = False

    def read(self, view: Tensor, into: Tensor) -> list[Piece]:
        """The pieces that a copy of the view brings into the memory of another of its shape, counted there.

        Raises StoreError where that takes very many.
        """
        if not into.numel():
            return []
        source = view.expand(into.shape)
        # What is broadcast does not move in its own memory.
        still: list[Block] = []
        moving: list[Block] = []
        for block in zip(into.shape, into.stride(), source.stride(), strict=True):
            (moving if block[2] else still).append(block)
        start = int(into.storage_offset()), int(source.storage_offset())
        piece = Piece(self.tensor, *start, tuple(moving))
        # Cells are taken as one dimension, along which any stride is.
        boxes = align(piece, (ALL,), self.shape)
        return [self._translate(box, still) for box in boxes]

    def _translate(self, box: Box, still: Sequence[Block]) -> Piece:
        """The box of cells of this memory as elements of the logical tensor."""
        element = self.start
        for at, stride in zip(box.element, self.strides, strict=True):
            element += at * stride
        blocks = list(still)
        for atom in box.atoms:
            blocks.append((atom.number, atom.step, atom.stride * self.strides[atom.of]))
        return Piece(self.tensor, box.cell[0], element, tuple(blocks))

    def copied(self, view: Tensor, copy: Tensor, made: str = "") -> Content | None:
        """What a copy of the view has in its own memory; None where that is no one set of strides."""
        if not is_dense(copy):
            return None
        try:
            pieces = self.read(view, copy)
        except StoreError:
            return None
        if len(pieces) != 1:
            return None
        (piece,) = pieces
        shape = tuple(count for count, _, _ in piece.blocks)
        strides = tuple(stride for _, _, stride in piece.blocks)
        if made:
            operations = *self._list_made(), made
            own = replace(self, dtype=copy.dtype, lossy=False, made=operations)
        else:
            # What is seen as bits is copied in the type in which it is seen.
            own = self if view.dtype == copy.dtype else self._cast(copy.dtype)
        return replace(own, shape=shape, strides=strides, start=piece.element)

    def explain(self, dtype: torch.dtype) -> tuple[str, ...]:
        """The operations that computed what a target of this type has."""
        own = self._cast(dtype)
        return own.made if own.dtype == dtype else own._list_made()

    def _cast(self, dtype: torch.dtype) -> Content:
        """The same in another type."""
        if holds(dtype, self.dtype):
            return self
        if self.dtype.is_complex and not dtype.is_complex:
            # A part of a number is no number rounded, whatever is stored.
            return replace(self, dtype=dtype, lossy=False, made=(*self._list_made(), _name(dtype)))
        return replace(self, dtype=dtype, lossy=True, made=self._list_made())

    def _list_made(self) -> tuple[str, ...]:
        """The operations, and the cast that lost numbers."""
        if not self.lossy:
            return self.made
        return *self.made, _name(self.dtype)


def _name(dtype: torch.dtype) -> str:
    """A cast to that type, for people."""
    return f"a cast to {dtype}".replace("torch.", "")


BLANK = Content("", (), (), 0, torch.uint8)
"""Memory that was filled with a constant: nothing of a logical tensor."""


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is all of its memory."""
    cells = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.storage_offset() == 0 and cells == tensor.numel()
