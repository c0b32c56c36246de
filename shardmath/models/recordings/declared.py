"""Declared: a rank's storage by rows, as the recording of its loader would have it.

1. A logical tensor lies in one stored tensor, at positions of each dimension: every combination of segments of the
   dimensions is a piece.
2. No tensor is read and no loader run, so that the sizes of real models take no memory.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.models.storage.binding import bind
>>> from shardmath.models.storage.rows import parse
>>> from shardmath.models.storage.stored import Stored
>>> side = Stored(parse("qk.* = [q k].* : (tp (q + k))"), (Mesh(tp=2),))
>>> shapes = {"q.bias": ((4,), "int64"), "k.bias": ((2,), "int64")}
>>> print(record_declared(bind(side, shapes), shapes, rank=1))
qk.bias int64[3] by rows: q.bias, k.bias
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from shardmath.layouts.layout import Layout
from shardmath.models.recordings.pieces import Piece
from shardmath.models.recordings.recorded import Native, Recorded
from shardmath.models.storage.stored import KnownSide, Shapes, Slot

__all__ = ["record_declared"]

_Shape: TypeAlias = tuple[int, ...]


def record_declared(bound: KnownSide, shapes: Shapes, rank: int) -> Recorded:
    """Return a Recorded: which element of which logical (checkpoint) tensor is at each position of the stored tensors
    on `rank`. No weights are loaded: `bound` has the layouts that a trainer or engine declares, and `shapes` maps
    logical names to shape and dtype.

    A stored tensor has the dtype of the first logical tensor in it.
    """
    natives: dict[tuple[int, str], Native] = {}
    for name, slot, stored in bound.visit(rank):
        dtype = shapes[name][1]
        key = slot.chunk, slot.native
        native = natives.get(key)
        if native is None:
            native = _make_native(slot, stored, dtype)
        layout = bound.layouts[name]
        strides = _measure_slot(stored, slot)
        pieces = *native.pieces, *_list_pieces(name, layout, rank, strides)
        natives[key] = native._replace(pieces=pieces)
    tensors = tuple((name, tuple(shape), dtype) for name, (shape, dtype) in shapes.items())
    return Recorded(tensors, tuple(natives.values()))


def _make_native(slot: Slot, stored: _Shape, dtype: str) -> Native:
    """A stored tensor, without any pieces."""
    return Native(
        slot.native,
        stored,
        dtype,
        pieces=(),
        way="rows",
        function=slot.function,
        chunk=slot.chunk,
    )


class _SlotStrides(NamedTuple):
    """The first cell of a slot, and its stride in cells along each logical dimension."""

    first: int
    across: _Shape


def _list_pieces(name: str, layout: Layout, rank: int, slot: _SlotStrides) -> Iterator[Piece]:
    """The pieces of a logical tensor that the rank has, in the cells of the slot."""
    along = _list_strides(layout.shape)
    segments = [runs.segments for runs in layout.runs(rank)]
    for chosen in itertools.product(*segments):
        cell = slot.first
        element = 0
        blocks = []
        for dim, (local, position, count) in enumerate(chosen):
            step = slot.across[dim]
            stride = along[dim]
            cell += local * step
            element += position * stride
            blocks.append((count, step, stride))
        yield Piece(name, cell, element, tuple(blocks))


def _measure_slot(stored: _Shape, slot: Slot) -> _SlotStrides:
    """The first cell and strides of a slot in a stored tensor of this shape."""
    strides = _list_strides(stored)
    first = 0
    steps = []
    # The slot has dimensions behind its cut whole.
    missing = len(stored) - len(slot.cut)
    cuts = slot.cut + (slice(None),) * missing
    for dim, cut in enumerate(cuts):
        stride = strides[dim]
        if isinstance(cut, int):
            first += cut * stride
            continue
        first += (cut.start or 0) * stride
        steps.append((cut.step or 1) * stride)
    # Dimension i of the cut is the logical tensor's dimension order[i].
    across = dict(zip(slot.order, steps, strict=True))
    return _SlotStrides(first, tuple(across[dim] for dim in sorted(across)))


def _list_strides(shape: _Shape) -> _Shape:
    """The row-major strides of a shape."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
