"""Units: the boxes of a unit, and the places where it may be cut.

1. The boxes of a unit are the products of the rows of its pairs, row-major.
2. A unit is cut at boxes, or at rows of a box larger than `SMALL` bytes.
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
from shardmath.layouts.algebra.box import row_size
from shardmath.layouts.algebra.overlay import Overlay
from shardmath.plans.template import Template

__all__ = [
    "SMALL",
    "Rows",
    "Sizes",
    "check_count",
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
    """Return an array: for each unit (elements that move together), the number of elements in a row of its box. A row
    is the slice box[k], leading dimensions of length 1 left out; messages can be cut between rows.

    The number is 0 if the box is never cut, and -1 if the unit has several boxes.
    """
    largest = _find_largest(t)
    nbytes = t.unit_size * t.src.itemsize
    row_or_zero = np.where(nbytes <= SMALL, 0, largest.row)
    return np.where(largest.boxes > 1, -1, row_or_zero)


def unit_grains(t: Template) -> Ints:
    """Return an array: for each unit (elements that move together), the size in bytes of its largest piece that is
    never divided between messages. A box of up to 64 KiB is such a piece; a larger box is divided between its rows
    (slices of its first dimension longer than 1)."""
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
    # The rows of a box are its slices along the first dimension that is longer than 1: their number is its length.
    rows = boxes.copy()
    for over, pair_of_unit in zip(t.overlays, t.unit_pairs.T, strict=True):
        count, longest = _measure_pairs(over)
        boxes *= count[pair_of_unit]
        length = longest[pair_of_unit]
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
        return count, count  # there are no pairs to measure
    largest = np.maximum.reduceat(over.size, begin)
    return count, largest


@memo(8192)
def unit_boxes(t: Template, unit: int) -> tuple[list[Rows], list[Sizes], list[int]]:
    """Return three lists with an item for each box of `unit` (elements that move together): its position, its shape,
    and how many of the unit's elements come before its end. Item d of a position is an index i: the box begins at index
    `t.overlays[d].start[i]` of dimension d.

    Boxes are row-major.
    """
    rows = []
    sizes = []
    for over, pair in zip(t.overlays, t.unit_pairs[unit].tolist(), strict=True):
        first, end = over.first[pair : pair + 2].tolist()
        rows.append(range(first, end))
        sizes.append(over.size[first:end].tolist())
    check_count(t, math.prod(map(len, rows)))
    boxes = list(itertools.product(*rows))
    shapes = list(itertools.product(*sizes))
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    return boxes, shapes, ends


def check_count(t: Template, count: int) -> None:
    """Raise PlanError if a unit of `t` (elements that move together) has too many boxes, `count`, to list them all."""
    if count > MOST_BOXES:
        raise PlanError(
            f"{t.src} to {t.dst}: one rank would send another {count} boxes of one tensor, "
            f"more than {MOST_BOXES}; divide the tensor into larger blocks, "
            f"or write it with more dimensions"
        )


def snap(t: Template, unit: int, at: int) -> int:
    """Return the nearest position at or before element `at` of `unit` (elements that move together) where messages can
    be cut. They can be cut where a box of the unit starts, and where a row starts in a box of more than 64 KiB."""
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
    """Yield `count` ranges (start, stop) of elements that divide `unit` (elements that move together) about evenly.
    Borders are moved back to where messages can be cut: to the start of a box of the unit, or of a row in a box of more
    than 64 KiB."""
    size = int(t.unit_size[unit])
    places = []
    for i in range(count):
        even_start = size * i // count
        places.append(snap(t, unit, even_start))
    return itertools.pairwise([*places, size])


def is_legal_cut(t: Template, unit: int, at: int) -> bool:
    """Return whether `unit` (elements that move together) may be cut at element `at`: at the start of a box, or of a
    row of a box."""
    _, sizes, ends = unit_boxes(t, unit)
    box = bisect.bisect_right(ends, at)
    begin = ends[box - 1] if box else 0
    if at == begin:
        return True
    if box == len(ends):
        return False
    inside = at - begin
    return inside % row_size(sizes[box]) == 0
