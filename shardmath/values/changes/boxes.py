"""Boxes: a search for the boxes of a tensor that contain given cells, for many cells at once.

1. Cells are numbered row by row. The borders of all boxes cut each dimension into intervals, and a grid of the
   intervals lists the boxes that cover each of its fields. Boxes may overlap: a cell is found in each that covers it.
2. A dimension that every box covers whole is merged with the dimension before: boxes of whole rows become intervals.
3. If a grid would have many more fields than boxes, each half of the boxes gets a separate grid. So memory and time
   depend on the number of boxes and cells, and never on the tensor's size.

>>> halves = index_boxes((4, 6), np.array([[0, 0], [0, 3]]), np.array([[4, 3], [4, 3]]))
>>> found = halves.find(np.array([1, 10, 23]))
>>> found.cell.tolist(), found.box.tolist(), found.place.tolist()
([0, 1, 2], [0, 1, 1], [1, 4, 11])
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, ranges

__all__ = ["Boxes", "Found", "index_boxes", "unravel"]

Shape: TypeAlias = tuple[int, ...]

FIELDS_PER_BOX = 8
"""Fields that a grid may have for each of its boxes before it is divided."""

FEW = 16
"""Up to this many borders are compared with each coordinate, rather than searched."""


class Found(NamedTuple):
    """Pairs of an element and a box that contains it, as arrays: the element's index among those searched for, the
    box's index, and the element's row-major number in the box."""

    cell: Ints
    box: Ints
    place: Ints


class _Grid(NamedTuple):
    """The borders of intervals in each dimension, and the boxes that cover each field, row by row.

    `is_simple` if one box covers each field, as when receivers divide a tensor among them.
    """

    borders: tuple[Ints, ...]
    covering: Offsets
    boxes: Ints
    is_simple: bool


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """A search index of boxes in a tensor: `find` returns the boxes that contain given elements. `shape` is the
    tensor's shape, `low` has the position where each box begins, and `size` has each box's shape.

    In all three, a dimension that every box covers whole has been merged into the dimension before it.
    """

    shape: Shape
    low: Ints
    size: Ints
    grids: tuple[_Grid, ...]

    def find(self, cells: Ints) -> Found:
        """Find the boxes that contain the elements `cells`, given as row-major numbers in the tensor. Return a Found,
        which lists every pair of an element and a box that contains it."""
        coordinates = unravel(cells, self.shape)
        matches = [self._find_in(grid, coordinates) for grid in self.grids]
        cell, box, place = zip(*matches, strict=True)
        return Found(_concatenate(cell), _concatenate(box), _concatenate(place))

    def _find_in(self, grid: _Grid, along: Sequence[Ints]) -> Found:
        """Find the boxes of one grid that cover cells with these coordinates."""
        # The cells inside the grid, by their index, and the number of the grid's field that each is in.
        cell, along, field = _find_fields(grid, along)
        if grid.is_simple:
            # Field i is covered by box i of the list alone.
            box = grid.boxes[field]
            return Found(cell, box, self._find_places(along, box))
        begin = grid.covering.first[:-1]
        end = grid.covering.first[1:]
        # A cell is repeated for each box that covers its field.
        covering, owner = ranges(begin[field], end[field])
        box = grid.boxes[covering]
        along = [coordinate[owner] for coordinate in along]
        return Found(cell[owner], box, self._find_places(along, box))

    def _find_places(self, along: Sequence[Ints], box: Ints) -> Ints:
        """The number of each cell in its box, row by row, given its coordinates in the tensor."""
        place = np.zeros(len(box), np.int64)
        for k, coordinate in enumerate(along):
            if k:
                sizes = self.size[:, k]
                place *= sizes[box]
            lows = self.low[:, k]
            place += coordinate
            place -= lows[box]
        return place


def index_boxes(shape: Shape, low: Ints, size: Ints) -> Boxes:
    """Make a search index of boxes in a tensor of this `shape`: box i begins at the position `low[i]`, and has the
    shape `size[i]`."""
    shape, low, size = _join_dimensions(shape, low, size)
    numbers = np.arange(len(low))
    grids = _make_grids(numbers, low, low + size)
    return Boxes(shape, low, size, tuple(grids))


def unravel(cells: Ints, shape: Shape) -> list[Ints]:
    """Return the coordinates, one array per dimension, of the elements with row-major numbers `cells` in `shape`."""
    along = []
    rest = cells
    for n in reversed(shape[1:]):
        # Not divmod: numpy vectorizes a division by one number, but not the remainder.
        quotient = rest // n
        along.append(rest - quotient * n)
        rest = quotient
    return [rest, *reversed(along)]


def _concatenate(columns: Sequence[Ints]) -> Ints:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _join_dimensions(shape: Shape, low: Ints, size: Ints) -> tuple[Shape, Ints, Ints]:
    """The same boxes in the fewest dimensions that describe them, at least one."""
    if not shape:
        # A scalar is a row of one cell.
        one = np.ones((len(low), 1), np.int64)
        return (1,), one - 1, one
    lengths = list(shape)
    lows = list(low.T)
    sizes = list(size.T)
    # Start from the last dimension: a dimension can only be merged into the one before it.
    for k in range(len(shape) - 1, 0, -1):
        n = lengths[k]
        is_whole = sizes[k] == n
        if is_whole.all():
            lengths[k - 1] *= n
            lows[k - 1] = lows[k - 1] * n
            sizes[k - 1] = sizes[k - 1] * n
            del lengths[k], lows[k], sizes[k]
    return tuple(lengths), np.stack(lows, 1), np.stack(sizes, 1)


def _make_grids(numbers: Ints, low: Ints, high: Ints) -> Iterator[_Grid]:
    """One grid of these boxes if it is small enough, else grids of halves of them."""
    borders = []
    for begin, end in zip(low.T, high.T, strict=True):
        ends = np.concatenate([begin, end])
        # Without boxes a dimension has one border, and no interval.
        borders.append(np.unique(ends) if len(ends) else np.zeros(1, np.int64))
    fields = math.prod(len(ends) - 1 for ends in borders)
    most = FIELDS_PER_BOX * len(numbers)
    if fields <= most or not len(numbers):
        yield _make_grid(numbers, low, high, borders)
        return
    first = _choose_half(low, borders)
    for half in (first, ~first):
        yield from _make_grids(numbers[half], low[half], high[half])


def _choose_half(low: Ints, borders: Sequence[Ints]) -> Bools:
    """Flags of the half of the boxes that begin first along the dimension with the most borders."""
    counts = [len(ends) for ends in borders]
    dimension = counts.index(max(counts))
    order = low[:, dimension].argsort(kind="stable")
    middle = len(order) // 2
    half = np.zeros(len(order), bool)
    half[order[:middle]] = True
    return half


def _make_grid(numbers: Ints, low: Ints, high: Ints, borders: Sequence[Ints]) -> _Grid:
    """The grid with these borders."""
    # (field, owner) pairs: box `owner` covers `field`. Each dimension multiplies the fields that a box covers.
    field = np.zeros(len(numbers), np.int64)
    owner = np.arange(len(numbers))
    fields = 1
    for k, ends in enumerate(borders):
        intervals = len(ends) - 1
        first = ends.searchsorted(low[owner, k])
        past = ends.searchsorted(high[owner, k])
        interval, which = ranges(first, past)
        field = field[which] * intervals + interval
        owner = owner[which]
        fields *= intervals
    order = field.argsort(kind="stable")
    boxes = numbers[owner[order]]
    counts = np.bincount(field, minlength=fields)
    covering = Offsets.of_counts(counts)
    is_simple = bool((counts == 1).all())
    return _Grid(tuple(borders), covering, boxes, is_simple)


def _find_fields(grid: _Grid, along: Sequence[Ints]) -> tuple[Ints, Sequence[Ints], Ints]:
    """The indices of the cells inside the grid, their coordinates, and the field of each."""
    inside = np.arange(len(along[0]))
    field = np.zeros(len(inside), np.int64)
    for k, ends in enumerate(grid.borders):
        intervals = len(ends) - 1
        interval = _count_borders(ends, along[k])
        interval -= 1
        has_interval = interval >= 0
        has_interval &= interval < intervals
        if not has_interval.all():
            inside = inside[has_interval]
            field = field[has_interval]
            interval = interval[has_interval]
            along = [coordinate[has_interval] for coordinate in along]
        field = field * intervals + interval
    return inside, along, field


def _count_borders(ends: Ints, along: Ints) -> Ints:
    """The number of these ascending borders that each coordinate has reached."""
    if len(ends) > FEW:
        return ends.searchsorted(along, "right")
    # A binary search mispredicts half of its branches; counting compares whole vectors.
    count = np.zeros(len(along), np.int8)
    for end in ends:
        reached = along >= end
        count += reached.view(np.int8)
    return count.astype(np.int64)
