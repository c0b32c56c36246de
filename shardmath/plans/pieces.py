"""Pieces: the boxes of units, as their source and their destination see them.

1. A piece is one box of a unit, or whole rows of one box.
2. `expand` lists the pieces of some elements of a unit between two ranks. `expand_all` gives the same for many, in
   arrays: most units are one box.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arrays import Bools, Ints
from shardmath.base.memo import memo
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.partition import Partition
from shardmath.plans.template import Template
from shardmath.plans.units import Listed, Rows, Sizes, list_columns, unit_boxes

__all__ = ["BoxPiece", "UnitRange", "expand", "expand_all"]

MANY = 32
"""The number of places from which on arrays are faster."""


class BoxPiece(NamedTuple):
    """One box of elements as slices of the source's array, of the destination's array and of the global tensor."""

    src: tuple[slice, ...]
    dst: tuple[slice, ...]
    global_slices: tuple[slice, ...]
    shape: tuple[int, ...]
    nbytes: int
    addend: int


Columns: TypeAlias = tuple[int, ...]
"""By dimension, the index in the source's key, or in the destination's goal, of the part that an end holds."""


def expand(
    t: Template, unit: int, sender: int, receiver: int, lo: int, hi: int, *, relayed: bool = False
) -> list[BoxPiece]:
    """List, as BoxPieces, the boxes of elements lo..hi-1 of `unit` (elements that move together) that `sender` sends to
    `receiver`, both positions in meshes. With `relayed`, the sender is a destination rank that forwards what it
    received.

    lo and hi are at boxes, or at rows of a box, as `snap` gives them.
    """
    # A relay sends from its destination tensor.
    at_source = not relayed
    sending = _find_columns(t, unit, sender, at_source)
    receiving = _find_columns(t, unit, receiver, False)
    return _expand(t, unit, sending, receiving, lo, hi, relayed)


@memo(1 << 15)
def _find_columns(t: Template, unit: int, position: int, at_source: bool) -> Columns:
    """By dimension, the index of the part that a position holds: in the unit's key `at_source`, else in its goal (the
    parts that get the unit)."""
    columns = []
    pairs = t.unit_pairs[unit].tolist()
    for over, pair in zip(t.overlays, pairs, strict=True):
        if at_source:
            parts, held, mesh = over.keys[over.pair_key[pair]], over.source, t.src.mesh
        else:
            parts, held, mesh = over.goals[over.pair_goal[pair]], over.target, t.dst.mesh
        columns.append(_find_column(parts, held, position, mesh))
    return tuple(columns)


def _find_column(parts: tuple[int, ...], held: Partition, position: int, mesh: Mesh) -> int:
    """The index in `parts`, a key or a goal, of the part that the rank at this position of the mesh holds."""
    if len(parts) == 1:
        return 0
    part_of_position = held.by_rank(mesh)
    return parts.index(int(part_of_position[position]))


@memo(1 << 14)
def _expand(
    t: Template, unit: int, sending: Columns, receiving: Columns, lo: int, hi: int, relayed: bool
) -> list[BoxPiece]:
    """The pieces between any two positions with these columns."""
    boxes, sizes, ends = unit_boxes(t, unit)
    listed = [list_columns(over) for over in t.overlays]
    first = bisect.bisect_right(ends, lo)
    last = bisect.bisect_left(ends, hi)
    out = []
    for box in range(first, last + 1):
        begin = ends[box - 1] if box else 0
        end = min(hi, ends[box])
        starts = _find_starts(listed, boxes[box], sending, receiving, relayed)
        shape = _cut_box(starts, sizes[box], max(lo - begin, 0), end - begin)
        piece = _make_piece(t, starts, shape)
        out.append(piece)
    return out


class _Starts(NamedTuple):
    """The first position of a box at the source, at the destination, and in the tensor; hidden dimensions first."""

    src: list[int]
    dst: list[int]
    tensor: list[int]


def _find_starts(
    listed: list[Listed], rows: Rows, sending: Columns, receiving: Columns, relayed: bool
) -> _Starts:
    """The starts of the box of these rows."""
    starts = _Starts([], [], [])
    for overlay, row, src, dst in zip(listed, rows, sending, receiving, strict=True):
        # A relay sends from its destination tensor.
        source = overlay.dst if relayed else overlay.src
        starts.src.append(source[row][src])
        starts.dst.append(overlay.dst[row][dst])
        starts.tensor.append(overlay.start[row])
    return starts


def _cut_box(starts: _Starts, sizes: Sizes, lo: int, hi: int) -> Sizes:
    """The sizes of elements lo..hi-1 of a box, which are whole rows; moves `starts` to the first of them."""
    if hi - lo == math.prod(sizes):
        return sizes
    # The rows of a box are its slices along the first dimension that is longer than 1.
    d = next(i for i, n in enumerate(sizes) if n > 1)
    inner = sizes[d + 1 :]
    row = math.prod(inner)
    for start in starts:
        start[d] += lo // row
    rows = (hi - lo) // row
    return (*sizes[:d], rows, *inner)


def _make_piece(t: Template, starts: _Starts, sizes: Sizes) -> BoxPiece:
    """The piece of this box, whose first `t.hidden` dimensions are addends and not the tensor's."""
    hidden = t.hidden
    shape = sizes[hidden:]
    src, dst, in_tensor = [_slice(start[hidden:], shape) for start in starts]
    nbytes = math.prod(shape) * t.src.itemsize
    # The first hidden dimension is that of the folded addends.
    addend = starts.tensor[0] if t.reduction.folded else 0
    return BoxPiece(src, dst, in_tensor, shape, nbytes, addend)


def _slice(start: list[int], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The box of this shape that begins at `start`."""
    return tuple([slice(a, a + n) for a, n in zip(start, shape, strict=True)])


class UnitRange(NamedTuple):
    """Elements lo..hi-1 of a unit, which go from a position of one mesh to a position of another."""

    unit: int
    sender: int
    receiver: int
    lo: int
    hi: int


def expand_all(t: Template, places: Sequence[UnitRange]) -> list[list[BoxPiece]]:
    """List the BoxPieces of each of these places, as `expand` does."""
    # A key or a goal has one part unless shards overlap: then no position has to look for its own.
    is_plain = all(over.src.shape[1] == over.dst.shape[1] == 1 for over in t.overlays)
    if len(places) < MANY or not is_plain:
        return [expand(t, *place) for place in places]
    unit, _, _, lo, hi = np.array(places, np.int64).T
    boxes = _find_boxes(t, unit)
    _cut_boxes(boxes, lo, hi)
    pieces = [[piece] for piece in _make_pieces(t, boxes)]
    for i in np.flatnonzero(~boxes.is_single).tolist():
        pieces[i] = expand(t, *places[i])
    return pieces


class _Boxes(NamedTuple):
    """By place, the first box of its unit: for each dimension the first position at the source, at the destination and
    in the tensor, and the size; and whether there is no other box."""

    src: Ints
    dst: Ints
    tensor: Ints
    size: Ints
    is_single: Bools


def _find_boxes(t: Template, unit: Ints) -> _Boxes:
    """The boxes of these units, in a row for each."""
    shape = len(unit), len(t.overlays)
    src, dst, tensor, size = (np.empty(shape, np.int64) for _ in range(4))
    is_single = np.ones(len(unit), bool)
    for d, over in enumerate(t.overlays):
        pair = t.unit_pairs[unit, d]
        row = over.first[pair]
        is_single &= over.first[pair + 1] - row == 1
        src[:, d] = over.src[row, 0]
        dst[:, d] = over.dst[row, 0]
        tensor[:, d] = over.start[row]
        size[:, d] = over.size[row]
    return _Boxes(src, dst, tensor, size, is_single)


def _cut_boxes(boxes: _Boxes, lo: Ints, hi: Ints) -> None:
    """Reduce each box to its elements lo..hi-1, which are whole rows, as `_cut_box` does."""
    some = np.flatnonzero(boxes.is_single & (hi - lo != boxes.size.prod(axis=1)))
    if not len(some):
        return
    size = boxes.size[some]
    # The rows of a box are its slices along the first dimension that is longer than 1.
    d = np.argmax(size > 1, axis=1)
    row = size.prod(axis=1) // size[np.arange(len(some)), d]
    for start in (boxes.src, boxes.dst, boxes.tensor):
        start[some, d] += lo[some] // row
    boxes.size[some, d] = (hi[some] - lo[some]) // row


def _make_pieces(t: Template, boxes: _Boxes) -> list[BoxPiece]:
    """The pieces of these boxes, as `_make_piece` makes them."""
    hidden = t.hidden
    size = boxes.size[:, hidden:]
    nbytes = size.prod(axis=1) * t.src.itemsize
    addend = boxes.tensor[:, 0] if t.reduction.folded else np.zeros_like(nbytes)
    columns = (
        _make_slices(boxes.src[:, hidden:], size),
        _make_slices(boxes.dst[:, hidden:], size),
        _make_slices(boxes.tensor[:, hidden:], size),
        list(map(tuple, size.tolist())),
        nbytes.tolist(),
        addend.tolist(),
    )
    make = partial(tuple.__new__, BoxPiece)
    return list(map(make, zip(*columns, strict=True)))


def _make_slices(start: Ints, size: Ints) -> list[tuple[slice, ...]]:
    """The slices of boxes, which begin at these positions."""
    count, ndim = size.shape
    if not ndim:
        return [()] * count
    first = start.T.tolist()
    stop = (start + size).T.tolist()
    return list(zip(*map(map, [slice] * ndim, first, stop), strict=True))
