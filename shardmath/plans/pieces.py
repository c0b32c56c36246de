"""Pieces: the boxes of a unit, the places where it may be cut, and its pieces as both sides see them.

1. The boxes of a unit are the products of the rows of its pairs, row-major.
2. A unit is cut at boxes, or at rows of a box larger than `SMALL` bytes.
3. A piece is one box, or whole rows of one box, as its source and its destination see it. A transfer
   is a piece of one tensor between two ranks.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.errors import PlanError
from shardmath.base.memo import memo
from shardmath.base.public import public
from shardmath.layouts.algebra.box import row_size
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.overlay import Overlay
from shardmath.layouts.algebra.partition import Partition
from shardmath.plans.template import Template

__all__ = [
    "SMALL",
    "BoxPiece",
    "Transfer",
    "expand",
    "is_legal_cut",
    "snap",
    "stripe_unit",
    "unit_boxes",
    "unit_grains",
    "unit_rows",
]

MOST_BOXES = 1 << 22
"""Most boxes of a unit that are listed in memory: a gigabyte."""

SMALL = 1 << 16
"""Bytes of the largest boxes that are not divided among senders."""

Rows: TypeAlias = tuple[int, ...]
"""One row of an overlay per dimension, by number."""

Sizes: TypeAlias = tuple[int, ...]
"""The length of a box in each dimension."""


def unit_rows(t: Template) -> Ints:
    """Return the length of a row of each unit (elements with equal holders and receivers) that is a single box.

    It is 0 if the box is never cut, and -1 if the unit has several boxes.
    """
    largest = _find_largest(t)
    nbytes = t.unit_size * t.src.itemsize
    of_one_box = np.where(nbytes <= SMALL, 0, largest.row)
    return np.where(largest.boxes > 1, -1, of_one_box)


def unit_grains(t: Template) -> Ints:
    """Return the largest number of bytes of each unit (elements with equal holders and receivers) that are never cut.

    They are a small box, or a row of a large one.
    """
    largest = _find_largest(t)
    itemsize = t.src.itemsize
    small = largest.size * itemsize <= SMALL
    elements = np.where(small, largest.size, largest.row)
    return elements * itemsize


class _Largest(NamedTuple):
    """By unit: the number of its boxes, and the elements of the largest box and of a row of that box."""

    boxes: Ints
    size: Ints
    row: Ints


@memo()
def _find_largest(t: Template) -> _Largest:
    """The largest box of each unit."""
    boxes = np.ones(len(t.unit_size), np.int64)
    size = boxes.copy()
    # The rows of a box lie along the first dimension that is longer than 1: their number is its length.
    rows = boxes.copy()
    for over, pair in zip(t.overlays, t.unit_pairs.T, strict=True):
        count, longest = _measure_pairs(over)
        boxes *= count[pair]
        length = longest[pair]
        rows = np.where(rows == 1, length, rows)
        size *= length
    row = size // np.maximum(rows, 1)
    return _Largest(boxes, size, row)


@memo()
def _measure_pairs(over: Overlay) -> tuple[Ints, Ints]:
    """By pair: the number of its rows, and the size of the largest row."""
    begin = over.first[:-1]
    end = over.first[1:]
    count = end - begin
    if not len(count):
        return count, count
    largest = np.maximum.reduceat(over.size, begin)
    return count, largest


class _Listed(NamedTuple):
    """The columns of an overlay as lists, from which single items are read faster."""

    first: list[int]
    start: list[int]
    size: list[int]
    src: list[list[int]]
    dst: list[list[int]]


@memo()
def _list_columns(over: Overlay) -> _Listed:
    """The overlay's columns as lists."""
    return _Listed(
        first=over.first.tolist(),
        start=over.start.tolist(),
        size=over.size.tolist(),
        src=over.src.tolist(),
        dst=over.dst.tolist(),
    )


@memo(8192)
def unit_boxes(t: Template, unit: int) -> tuple[list[Rows], list[Sizes], list[int]]:
    """Return, for each box of the unit, its row in each dimension, its sizes, and the elements up to its end.

    Boxes are row-major.
    """
    rows = []
    sizes = []
    for over, pair in zip(t.overlays, t.unit_pairs[unit].tolist(), strict=True):
        listed = _list_columns(over)
        first, end = listed.first[pair : pair + 2]
        rows.append(range(first, end))
        sizes.append(listed.size[first:end])
    count = math.prod(map(len, rows))
    if count > MOST_BOXES:
        raise PlanError(
            f"{t.src} to {t.dst}: one rank would send another {count} boxes of one tensor, "
            f"more than {MOST_BOXES}; divide the tensor into larger blocks, "
            f"or write it with more dimensions"
        )
    boxes = list(itertools.product(*rows))
    shapes = list(itertools.product(*sizes))
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    return boxes, shapes, ends


def snap(t: Template, unit: int, at: int) -> int:
    """Return the last element, not after `at`, at which the unit may be cut: where a box, or a row of one, begins."""
    _, sizes, ends = unit_boxes(t, unit)
    box = bisect.bisect_right(ends, at)
    begin = ends[box - 1] if box else 0
    if at == begin or box == len(ends):
        return begin
    nbytes = (ends[box] - begin) * t.src.itemsize
    if nbytes <= SMALL:
        return begin
    inside = at - begin
    return at - inside % row_size(sizes[box])


def stripe_unit(t: Template, unit: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield `count` ranges of elements (start, stop) that divide the unit about evenly, cut where it may be cut."""
    size = int(t.unit_size[unit])
    places = []
    for i in range(count):
        even = size * i // count
        places.append(snap(t, unit, even))
    return itertools.pairwise([*places, size])


def is_legal_cut(t: Template, unit: int, at: int) -> bool:
    """Return whether the unit may be cut at element `at`: at the start of a box, or of a row of a box."""
    _, sizes, ends = unit_boxes(t, unit)
    box = bisect.bisect_right(ends, at)
    begin = ends[box - 1] if box else 0
    if at == begin:
        return True
    if box == len(ends):
        return False
    inside = at - begin
    return inside % row_size(sizes[box]) == 0


class BoxPiece(NamedTuple):
    """One box of elements as slices of the source's tensor, the destination's tensor and the global tensor."""

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
    """Return the boxes with elements lo..hi-1 of the unit, on the way from mesh position `sender` to `receiver`.

    lo and hi are at boxes, or at rows of a box, as `snap` gives them. If `relayed`, the sender is
    a position of the destination too, and sends what it has received.
    """
    find_sending = _find_columns if relayed else _find_source_columns
    sending = find_sending(t, unit, sender)
    receiving = _find_columns(t, unit, receiver)
    return _expand(t, unit, sending, receiving, lo, hi, relayed)


@memo(1 << 14)
def _find_source_columns(t: Template, unit: int, position: int) -> Columns:
    """The column of a source position in each of the unit's keys."""
    columns = []
    pairs = t.unit_pairs[unit].tolist()
    for over, pair in zip(t.overlays, pairs, strict=True):
        key = over.keys[over.pair_key[pair]]
        columns.append(_find_column(key, over.source, position, t.src.mesh))
    return tuple(columns)


@memo(1 << 14)
def _find_columns(t: Template, unit: int, position: int) -> Columns:
    """The column of a destination position in each of the unit's goals."""
    columns = []
    pairs = t.unit_pairs[unit].tolist()
    for over, pair in zip(t.overlays, pairs, strict=True):
        goal = over.goals[over.pair_goal[pair]]
        columns.append(_find_column(goal, over.target, position, t.dst.mesh))
    return tuple(columns)


def _find_column(parts: tuple[int, ...], held: Partition, position: int, mesh: Mesh) -> int:
    """The index in a key or goal of the part that the position holds."""
    if len(parts) == 1:
        return 0
    part_of = held.by_rank(mesh)
    return parts.index(int(part_of[position]))


@memo(1 << 14)
def _expand(
    t: Template, unit: int, sending: Columns, receiving: Columns, lo: int, hi: int, relayed: bool
) -> list[BoxPiece]:
    """The pieces between any two positions with these columns."""
    boxes, sizes, ends = unit_boxes(t, unit)
    listed = [_list_columns(over) for over in t.overlays]
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
    listed: list[_Listed], rows: Rows, sending: Columns, receiving: Columns, relayed: bool
) -> _Starts:
    """The starts of the box of these rows."""
    starts = _Starts([], [], [])
    for over, row, src, dst in zip(listed, rows, sending, receiving, strict=True):
        source = over.dst if relayed else over.src
        starts.src.append(source[row][src])
        starts.dst.append(over.dst[row][dst])
        starts.tensor.append(over.start[row])
    return starts


def _cut_box(starts: _Starts, sizes: Sizes, lo: int, hi: int) -> Sizes:
    """The sizes of elements lo..hi-1 of a box, which are whole rows; moves `starts` to the first of them."""
    if hi - lo == math.prod(sizes):
        return sizes
    # Rows lie along the first dimension that is longer than 1.
    d = next(i for i, n in enumerate(sizes) if n > 1)
    inner = sizes[d + 1 :]
    row = math.prod(inner)
    for start in starts:
        start[d] += lo // row
    rows = (hi - lo) // row
    return (*sizes[:d], rows, *inner)


def _make_piece(t: Template, starts: _Starts, sizes: Sizes) -> BoxPiece:
    """The piece of this box."""
    hidden = t.hidden
    shape = sizes[hidden:]
    src, dst, in_tensor = [_slice(start[hidden:], shape) for start in starts]
    nbytes = math.prod(shape) * t.src.itemsize
    addend = starts.tensor[0] if t.reduction.folded else 0
    return BoxPiece(src, dst, in_tensor, shape, nbytes, addend)


def _slice(start: list[int], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The box of this shape that begins at `start`."""
    return tuple([slice(a, a + n) for a, n in zip(start, shape, strict=True)])


@public
class Transfer(NamedTuple):
    """One box of one tensor that a rank sends to another rank, or keeps if both ranks are the same.

    It prints as `sender -> receiver op [global box] of [box in the sender's tensor] to [box in the
    receiver's], bytes`. Both sides list `shape` elements row-major. `op` is "copy", or the operation
    that combines the piece with the value that is there; pieces of one element enter in order of `addend`.
    """

    tensor: str
    src_rank: int
    dst_rank: int
    op: str
    src_tensor: str
    src_slices: tuple[slice, ...]
    dst_tensor: str
    dst_slices: tuple[slice, ...]
    shape: tuple[int, ...]
    nbytes: int
    global_slices: tuple[slice, ...]
    addend: int = 0

    def __str__(self) -> str:
        name = f"{self.tensor}: " if self.tensor else ""
        box = _show_box(self.global_slices)
        src = _show_box(self.src_slices)
        dst = _show_box(self.dst_slices)
        ends = f"{self.src_rank} -> {self.dst_rank}"
        return f"{name}{ends} {self.op} {box} of {src} to {dst}, {self.nbytes} B"


def _show_box(slices: tuple[slice, ...]) -> str:
    ranges = ", ".join(f"{s.start}:{s.stop}" for s in slices)
    return f"[{ranges}]"
