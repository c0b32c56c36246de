"""Pieces: the boxes of units, as their source and their destination see them.

1. A piece is one box of a unit, or whole rows of one box.
2. `expand` lists the pieces of some elements of a unit between two ranks. `shardmath.plans.boxes` lists those of many,
   in arrays.
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple, TypeAlias

from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.overlay import Overlay
from shardmath.layouts.algebra.partition import Partition
from shardmath.plans.template import Template
from shardmath.plans.units import Rows, Sizes, unit_boxes

__all__ = ["BoxPiece", "expand"]


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


def _expand(
    t: Template, unit: int, sending: Columns, receiving: Columns, lo: int, hi: int, relayed: bool
) -> list[BoxPiece]:
    """The pieces between any two positions with these columns."""
    boxes, sizes, ends = unit_boxes(t, unit)
    first = bisect.bisect_right(ends, lo)
    last = bisect.bisect_left(ends, hi)
    out = []
    for box in range(first, last + 1):
        begin = ends[box - 1] if box else 0
        end = min(hi, ends[box])
        starts = _find_starts(t.overlays, boxes[box], sending, receiving, relayed)
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
    overlays: tuple[Overlay, ...], rows: Rows, sending: Columns, receiving: Columns, relayed: bool
) -> _Starts:
    """The starts of the box of these rows."""
    starts = _Starts([], [], [])
    for overlay, row, src, dst in zip(overlays, rows, sending, receiving, strict=True):
        # A relay sends from its destination tensor.
        source = overlay.dst if relayed else overlay.src
        starts.src.append(int(source[row, src]))
        starts.dst.append(int(overlay.dst[row, dst]))
        starts.tensor.append(int(overlay.start[row]))
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
