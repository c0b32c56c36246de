"""Declared: what a rank stores by rows, as the recording that its loader would have given.

1. A logical tensor lies in one stored tensor, at positions of each dimension: every combination of their stretches is a
   piece.
2. Nothing is read or run, so that real models' sizes take no memory.

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
    """What the rank stores of tensors of these shapes and dtypes, to which its side was bound.

    A stored tensor has the dtype of the first that lies in it.
    """
    natives: dict[tuple[int, str], Native] = {}
    for name, slot, stored in bound.visit(rank):
        dtype = shapes[name][1]
        key = slot.chunk, slot.native
        native = natives.get(key)
        if native is None:
            native = _make_native(slot, stored, dtype)
        layout = bound.layouts[name]
        frame = _measure_slot(stored, slot)
        own = _list_pieces(name, layout, rank, frame)
        pieces = *native.pieces, *own
        natives[key] = native._replace(pieces=pieces)
    tensors = []
    for name, (shape, dtype) in shapes.items():
        tensors.append((name, tuple(shape), dtype))
    return Recorded(tuple(tensors), tuple(natives.values()))


def _make_native(slot: Slot, stored: _Shape, dtype: str) -> Native:
    """A stored tensor, without what lies in it."""
    return Native(
        slot.native,
        stored,
        dtype,
        pieces=(),
        way="rows",
        function=slot.function,
        chunk=slot.chunk,
    )


class _Frame(NamedTuple):
    """A slot's first cell, and how far apart its cells are along each logical dimension."""

    first: int
    across: _Shape


def _list_pieces(name: str, layout: Layout, rank: int, frame: _Frame) -> Iterator[Piece]:
    """What the rank has of a logical tensor, in the cells of a frame."""
    along = _list_strides(layout.shape)
    runs = layout.runs(rank)
    stretches = [own.segments for own in runs]
    for chosen in itertools.product(*stretches):
        cell = frame.first
        element = 0
        blocks = []
        for dim, (here, there, count) in enumerate(chosen):
            step = frame.across[dim]
            stride = along[dim]
            cell += here * step
            element += there * stride
            blocks.append((count, step, stride))
        yield Piece(name, cell, element, tuple(blocks))


def _measure_slot(stored: _Shape, slot: Slot) -> _Frame:
    """The cells of a slot of a stored tensor of this shape."""
    strides = _list_strides(stored)
    first = 0
    steps = []
    # Of dimensions behind its cut the slot has all.
    rest = len(stored) - len(slot.cut)
    cuts = slot.cut + (slice(None),) * rest
    for dim, cut in enumerate(cuts):
        stride = strides[dim]
        if isinstance(cut, int):
            first += cut * stride
            continue
        begin = cut.start or 0
        step = cut.step or 1
        first += begin * stride
        steps.append(step * stride)
    # Dimension i of the cut is the logical tensor's dimension order[i].
    across = dict(zip(slot.order, steps, strict=True))
    ordered = [across[dim] for dim in sorted(across)]
    return _Frame(first, tuple(ordered))


def _list_strides(shape: _Shape) -> _Shape:
    """Row-major."""
    strides = []
    for dim in range(len(shape)):
        inner = shape[dim + 1 :]
        strides.append(math.prod(inner))
    return tuple(strides)
