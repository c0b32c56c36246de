"""Contents: what lies in the memory of a tensor without data, as elements of a logical tensor.

1. A logical tensor is in its own memory, row by row. A copy of a view of it is in new memory, with the strides that
   the view had; so is what an operation made of it element by element, which then bears the operation's name.
2. What is read from there into other memory is strides on both sides: pieces.

>>> import torch
>>> logical = Content("q", (2, 4), (4, 1), 0)
>>> view = torch.empty(2, 4, device="meta")[:, 2:]
>>> logical.read(view, into=torch.empty(4, 4, device="meta")[2:, :2])
[Piece('q', 8, 2, ((2, 4, 4), (2, 1, 1)))]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from shardmath.base.errors import StoreError
from shardmath.recordings.boxes import Box, align
from shardmath.recordings.pieces import Block, Piece

__all__ = ["BLANK", "Content", "is_dense"]

_Shape: TypeAlias = tuple[int, ...]

ALL = 1 << 62
"""More cells than any memory has."""


@dataclass(frozen=True, slots=True)
class Content:
    """Memory of this shape, row by row: steps of its dimensions are strides in the logical tensor.

    `made` names the operations that computed it of the logical tensor.
    """

    tensor: str
    shape: _Shape
    strides: _Shape
    start: int
    made: tuple[str, ...] = ()

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
        operations = (*self.made, made) if made else self.made
        return Content(self.tensor, shape, strides, piece.element, operations)


BLANK = Content("", (), (), 0)
"""Memory that was filled with a constant: nothing of a logical tensor."""


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is all of its memory."""
    cells = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.storage_offset() == 0 and cells == tensor.numel()
