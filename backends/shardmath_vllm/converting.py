"""Converting: a trainer's tensors by the names, and in the shapes, that checkpoints of it have.

1. transformers keeps some models in another form than it saves them, such as experts in a stack; vLLM's loaders expect
   the saved form. The conversion is recorded (`shardmath_torch.tensors.conversions.saved`).
2. For a model that rows describe, such as Megatron-Core's, rows also describe the saved form.
3. Both are values. Workers use them to turn a trainer's tensors into the tensors that their loader takes. No data is
   converted this way: workers run the conversion to record their loaders.

>>> import torch
>>> from shardmath.models.recordings.pieces import Piece
>>> from shardmath.models.recordings.recorded import Native
>>> second = Native("experts.1.weight", (2,), "int64", (Piece("experts", 0, 2, ((2, 1, 1),)),), "views", "")
>>> recorded = sm.storage.Recorded((("experts", (3, 2), "int64"), ("norm", (1,), "int64")), (second,))
>>> given = {"experts": torch.arange(6).reshape(3, 2)}
>>> list(convert(recorded, given.items()))
[('experts.1.weight', tensor([2, 3]))]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

import shardmath as sm
from shardmath.models.recordings.declared import record_declared
from shardmath.models.recordings.pieces import Piece
from shardmath.models.recordings.recorded import Native
from shardmath.models.storage.binding import bind
from shardmath.models.storage.stored import Shapes
from shardmath.models.systems.hugging_face import hugging_face

__all__ = ["convert", "declare_conversion"]


def declare_conversion(config: object, shapes: Shapes) -> sm.storage.Recorded | None:
    """Return a Recorded, which says where checkpoints with this Hugging Face `config` store the elements of the
    trainer's tensors. `shapes` has shape and dtype of these tensors by name. None if checkpoints store tensors with the
    same names and shapes.
    """
    stored = hugging_face(config)
    (rank,) = stored.meshes[0].ranks
    recorded = record_declared(bind(stored, shapes), shapes, rank)
    saved = {native.name: native.shape for native in recorded.natives}
    whole = {name: shape for name, (shape, _) in shapes.items()}
    return None if saved == whole else recorded


def convert(
    recorded: sm.storage.Recorded, pairs: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Convert the trainer's tensors in `pairs` to checkpoint tensors: yield (name, tensor) of each one as soon as
    `pairs` has given all tensors that it is made of. `recorded` says which elements of the trainer's tensors make up
    each checkpoint tensor.
    """
    # By the name of a trainer's tensor: each checkpoint tensor with elements of it, and the names of those that have
    # not arrived, in one set for all names.
    waiting: dict[str, list[tuple[Native, set[str]]]] = {}
    for native in recorded.natives:
        missing_parts = {piece.tensor for piece in native.pieces}
        for name in missing_parts:
            waiting.setdefault(name, []).append((native, missing_parts))
    # What only a later tensor completes is kept until then; mostly that is nothing.
    arrived: dict[str, Tensor] = {}
    for name, tensor in pairs:
        arrived[name] = tensor
        for native, missing in waiting.get(name, ()):
            missing.remove(name)
            if not missing:
                yield native.name, _make(native, arrived)
        if not any(missing for _, missing in waiting.get(name, ())):
            del arrived[name]


def _make(native: Native, arrived: Mapping[str, Tensor]) -> Tensor:
    """The checkpoint's tensor, assembled from its pieces of `arrived` tensors."""
    first, *others = native.pieces
    if not others and _is_whole(first, native):
        # A view (of a copy, if the tensor is not contiguous): recording follows it, and it needs no memory.
        return _take(first, arrived).reshape(native.shape)
    first_source = arrived[first.tensor]
    joined = torch.empty(native.shape, dtype=first_source.dtype, device=first_source.device)
    for piece in native.pieces:
        counts = [count for count, _, _ in piece.blocks]
        cell_strides = [stride for _, stride, _ in piece.blocks]
        joined.as_strided(counts, cell_strides, piece.cell).copy_(_take(piece, arrived))
    return joined


def _take(piece: Piece, arrived: Mapping[str, Tensor]) -> Tensor:
    """The elements of a piece, as a view of its arrived tensor, or of a contiguous copy."""
    # Pieces count elements in row-major order.
    source = arrived[piece.tensor].contiguous()
    counts = [count for count, _, _ in piece.blocks]
    element_strides = [stride for _, _, stride in piece.blocks]
    return source.as_strided(counts, element_strides, piece.element)


def _is_whole(piece: Piece, native: Native) -> bool:
    """Whether the piece is all of the tensor, in the order of its cells."""
    dense_stride = 1
    for count, cell_stride, _ in reversed(piece.blocks):
        if cell_stride != dense_stride:
            return False
        dense_stride *= count
    return piece.cell == 0 and dense_stride == math.prod(native.shape)
