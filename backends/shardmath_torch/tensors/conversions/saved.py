"""Saved: the tensors that transformers saves for a module, under other names or in parts.

1. Some models of transformers hold other tensors than it saves, such as stacked experts. transformers' own conversion
   is run once on tensors without data, and recorded.
2. If a saved tensor is a box of a module's tensor, in the same order, it is a `SavedPart`: converting moves no data.

>>> recorded = Recorded(
...     (("experts", (3, 2), "int64"),),
...     (Native("experts.1.weight", (2,), "int64", (Piece("experts", 0, 2, ((2, 1, 1),)),), "views", ""),),
... )
>>> find_parts(recorded)
[SavedPart(name='experts.1.weight', shape=(2,), tensor='experts', box=((1, 2), (0, 2)), kept=(1,))]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from shardmath.base.errors import StoreError
from shardmath.layouts.algebra.box import Box
from shardmath.models.recordings.pieces import Piece
from shardmath.models.recordings.recorded import Native, Recorded
from shardmath.models.storage.stored import Shapes
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.conversions.unwrapped import Unwrapped, unwrap
from shardmath_torch.tensors.refits.recording import record

__all__ = ["SavedPart", "find_parts", "record_conversion"]

_Shape: TypeAlias = tuple[int, ...]


class SavedPart(NamedTuple):
    """A saved tensor, `name`, that equals a slice of the module's tensor `tensor`. `box` is the slice of each
    dimension, and `kept` the dimensions that the saved tensor keeps; the dropped ones have size 1 in the box.
    """

    name: str
    shape: _Shape
    tensor: str
    box: Box
    kept: tuple[int, ...]


def record_conversion(module: nn.Module, shapes: Shapes) -> Recorded | None:
    """Return a Recorded, which tells for each element that the transformers library saves for `module` which element of
    the module's tensors it is; None if they are saved unchanged. `shapes` has shape and dtype of the module's tensors,
    by name.

    Raises StoreError if transformers computes with them.
    """
    revert = _find_converter(module)
    if revert is None:
        return None
    blank = {}
    for name, (shape, dtype) in shapes.items():
        blank[name] = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
    saved = revert(blank)
    # A tensor of the same name may be another, such as one that is saved transposed.
    if saved.keys() == blank.keys() and all(saved[name] is blank[name] for name in blank):
        return None
    into = {name: torch.empty_like(tensor) for name, tensor in saved.items()}

    def load(tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in revert(dict(tensors)).items():
            into[name].copy_(tensor)

    return record(load, shapes, into)


def _find_converter(module: nn.Module) -> Any:
    """transformers' conversion of a module's tensors to saved ones; None if the module is not one of its models."""
    kinds = type(unwrap(module)).__mro__
    if not any(kind.__module__.startswith("transformers.") for kind in kinds):
        return None
    from transformers.core_model_loading import revert_weight_conversion

    # Conversions of a model inside another are for names that begin with its own, which tensors have without wrappers.
    model: Any = Unwrapped(module)

    def revert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        saved: dict[str, Tensor] = revert_weight_conversion(model, tensors)
        return saved

    return revert


def find_parts(recorded: Recorded) -> list[SavedPart]:
    """Return each saved tensor as a SavedPart, which equals a box (a slice of each dimension) of one of the module's
    tensors. Raises StoreError if a saved tensor does not equal such a box.
    """
    shapes = {name: shape for name, shape, _ in recorded.tensors}
    return [_find_part(native, shapes) for native in recorded.natives]


def _find_part(native: Native, shapes: Mapping[str, _Shape]) -> SavedPart:
    """A recorded saved tensor as a slice of a module's tensor. Raises StoreError if it is none."""
    if len(native.pieces) == 1 and not native.unwritten:
        (piece,) = native.pieces
        whole = shapes[piece.tensor]
        # The record has no dimensions of the module's tensor: try which of them the saved tensor may have kept.
        for kept in itertools.combinations(range(len(whole)), len(native.shape)):
            box = _find_box(piece, native.shape, kept, whole)
            if _lies_in(piece, box, whole):
                return SavedPart(native.name, native.shape, piece.tensor, box, kept)
    tensors = ", ".join(dict.fromkeys(piece.tensor for piece in native.pieces))
    what = f"transformers saves {native.name!r} from {tensors or 'no tensor'}, but not as one slice of one tensor"
    raise StoreError(f"{what}; pass the tensors under the names that the checkpoint has")


def _find_box(piece: Piece, shape: _Shape, kept: tuple[int, ...], whole: _Shape) -> Box:
    """The box that begins where the piece does, with the shape's sizes along `kept` dimensions, and 1 along others. It
    may reach outside of the tensor, and need not be the piece: see `_lies_in`."""
    sizes = dict(zip(kept, shape, strict=True))
    box = []
    element = piece.element
    for d, stride in enumerate(_list_strides(whole)):
        start, element = divmod(element, stride)
        box.append((start, start + sizes.get(d, 1)))
    return tuple(box)


def _lies_in(piece: Piece, box: Box, whole: _Shape) -> bool:
    """Whether the box is inside the tensor, and the piece is exactly the box, in row-major order."""
    sizes = [stop - start for start, stop in box]
    steps = zip(sizes, _list_strides(sizes), _list_strides(whole), strict=True)
    is_inside = all(stop <= n for (_, stop), n in zip(box, whole, strict=True))
    box_piece = Piece(piece.tensor, 0, piece.element, tuple(steps))
    return is_inside and box_piece == piece


def _list_strides(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor of that shape, in elements."""
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]
