"""Contents: the elements of a logical tensor in the memory of a tensor without data.

1. A logical tensor is in its own memory, in row-major order. A copy of a view of it is new memory with the view's
   strides. The result of an element-wise operation is new memory, too, and adds the operation's name.
2. A copy from there into other memory has strides on both sides: pieces.
3. One cast that loses numbers is followed, since the stored type may have fewer bits. A target of another type is then
   computed; a cast of complex numbers to real ones is always a computation.

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
"""A length beyond that of any memory."""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of some memory, read as a contiguous array of `shape`: index `i` holds element
    `start + sum(i * strides)` of the flattened checkpoint tensor `tensor`.

    Its numbers have `dtype`: the logical tensor's type, or the type that lost some of them (`lossy`). `made` names the
    operations that computed it from the logical tensor.
    """

    tensor: str
    shape: _Shape
    strides: _Shape
    start: int
    dtype: torch.dtype
    made: tuple[str, ...] = ()
    lossy: bool = False

    def read(self, view: Tensor, into: Tensor) -> list[Piece]:
        """List which checkpoint elements a copy of `view` to `into` would write, and to which positions in the memory
        of `into`. `view` is a view of a tensor (without data) whose memory this Content describes.

        Raises StoreError if very many pieces are needed.
        """
        if not into.numel():
            return []
        source = view.expand(into.shape)
        # Broadcast dimensions have stride 0 in the source.
        broadcast: list[Block] = []
        strided: list[Block] = []
        for block in zip(into.shape, into.stride(), source.stride(), strict=True):
            _, _, source_stride = block
            (strided if source_stride else broadcast).append(block)
        start = int(into.storage_offset()), int(source.storage_offset())
        piece = Piece(self.tensor, *start, tuple(strided))
        # Cells (positions in the memory of `into`) count as one unlimited dimension, so that any stride is along it.
        boxes = align(piece, (ALL,), self.shape)
        return [self._translate(box, broadcast) for box in boxes]

    def _translate(self, box: Box, broadcast: Sequence[Block]) -> Piece:
        """The piece that a box describes. The box counts elements in this memory, the piece in the logical tensor."""
        element = self.start
        for coordinate, stride in zip(box.element, self.strides, strict=True):
            element += coordinate * stride
        blocks = list(broadcast)
        for atom in box.atoms:
            blocks.append((atom.number, atom.step, atom.stride * self.strides[atom.of]))
        # Cells count as one dimension, see `read`.
        (cell,) = box.cell
        return Piece(self.tensor, cell, element, tuple(blocks))

    def copied(self, view: Tensor, copy: Tensor, made: str = "") -> Content | None:
        """Return the Content of `copy`, computed from `view`, a view of memory that this Content describes; None unless
        constant strides describe all memory of `copy`. `made` names the operation ("" for a plain copy).
        """
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
            content = replace(self, dtype=copy.dtype, lossy=False, made=operations)
        else:
            # A view of bits as another type is copied without a cast.
            content = self if view.dtype == copy.dtype else self._cast(copy.dtype)
        return replace(content, shape=shape, strides=strides, start=piece.element)

    def explain(self, dtype: torch.dtype) -> tuple[str, ...]:
        """Return the names of the operations that compute the values of a loaded tensor of `dtype` from the checkpoint
        tensor.
        """
        content = self._cast(dtype)
        # The cast to the stored type is not listed; an earlier cast to another type, which lost numbers, is.
        return content.made if content.dtype == dtype else content._list_made()

    def _cast(self, dtype: torch.dtype) -> Content:
        """The content after a cast to another type."""
        if holds(dtype, self.dtype):
            return self
        if self.dtype.is_complex and not dtype.is_complex:
            # The real part of a number is not a rounded number, whatever type is stored.
            return replace(self, dtype=dtype, lossy=False, made=(*self._list_made(), _name(dtype)))
        # An earlier cast that lost numbers, if any, becomes one of the operations.
        return replace(self, dtype=dtype, lossy=True, made=self._list_made())

    def _list_made(self) -> tuple[str, ...]:
        """The operations, with the cast that lost numbers if there was one."""
        if not self.lossy:
            return self.made
        return *self.made, _name(self.dtype)


def _name(dtype: torch.dtype) -> str:
    """A cast to the type, for messages."""
    return f"a cast to {dtype}".replace("torch.", "")


BLANK = Content("", (), (), 0, torch.uint8)
"""Memory that was filled with a constant, without elements of a logical tensor."""


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor views all of its storage's memory."""
    cells = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.storage_offset() == 0 and cells == tensor.numel()
