"""Boxes: which boxes of a tensor cells lie in, and where in them, for many cells at once.

1. Cells are numbered row by row. The borders of all boxes cut each dimension into intervals, and a grid of the
   intervals says which boxes cover each of its fields. Boxes may overlap: a cell is found in each that covers it.
2. Dimensions that every box covers whole are one with the dimension before: boxes of whole rows are intervals.
3. Where borders of unlike boxes would make a grid much larger than there are boxes, half of the boxes have a grid of
   their own. So memory and time depend on how many boxes and cells there are, and never on the tensor's size.

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
"""How many fields a grid may have for each of its boxes before it is divided."""


FEW = 16
"""Borders that are all compared with each coordinate, rather than searched among."""


class Found(NamedTuple):
    """Which of the cells that were asked for, which box it is in, and its number there, row by row."""

    cell: Ints
    box: Ints
    place: Ints


class _Grid(NamedTuple):
    """Intervals of each dimension, by their borders; the boxes that cover each field, row by row.

    `is_simple` where one box covers each field, as where receivers divide a tensor among them.
    """

    borders: tuple[Ints, ...]
    covering: Offsets
    boxes: Ints
    is_simple: bool


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """Boxes of a tensor of this shape: rows of `low` and `size` are boxes, columns dimensions."""

    shape: Shape
    low: Ints
    size: Ints
    grids: tuple[_Grid, ...]

    def find(self, cells: Ints) -> Found:
        """The boxes that cover these cells."""
        along = unravel(cells, self.shape)
        found = [self._find_in(grid, along) for grid in self.grids]
        cell, box, place = zip(*found, strict=True)
        return Found(_join(cell), _join(box), _join(place))

    def _find_in(self, grid: _Grid, along: Sequence[Ints]) -> Found:
        """The boxes of one grid that cover cells with these coordinates."""
        cell, along, field = _find_fields(grid, along)
        if grid.is_simple:
            box = grid.boxes[field]
            return Found(cell, box, self._find_places(along, box))
        begin = grid.covering.first[:-1]
        end = grid.covering.first[1:]
        covering, owner = ranges(begin[field], end[field])
        box = grid.boxes[covering]
        along = [coordinate[owner] for coordinate in along]
        return Found(cell[owner], box, self._find_places(along, box))

    def _find_places(self, along: Sequence[Ints], box: Ints) -> Ints:
        """The number of each cell in its own box, row by row, from its coordinates in the tensor."""
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
    """The boxes [low, low + size) of a tensor, made ready to be asked."""
    shape, low, size = _join_dimensions(shape, low, size)
    numbers = np.arange(len(low))
    grids = _make_grids(numbers, low, low + size)
    return Boxes(shape, low, size, tuple(grids))


def unravel(cells: Ints, shape: Shape) -> list[Ints]:
    """The coordinates of cells, by dimension."""
    along = []
    rest = cells
    for n in reversed(shape[1:]):
        # Not divmod: numpy divides by one number in vectors, and takes remainders one by one.
        quotient = rest // n
        along.append(rest - quotient * n)
        rest = quotient
    return [rest, *reversed(along)]


def _join(columns: Sequence[Ints]) -> Ints:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _join_dimensions(shape: Shape, low: Ints, size: Ints) -> tuple[Shape, Ints, Ints]:
    """The same boxes with as few dimensions as do, at least one."""
    if not shape:
        # A scalar is a row of one cell.
        one = np.ones((len(low), 1), np.int64)
        return (1,), one - 1, one
    lengths = list(shape)
    lows = list(low.T)
    sizes = list(size.T)
    # From the last dimension on, since what is joined lies together in memory.
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
    """Grids of these boxes, one where it is small enough."""
    ends = []
    for begin, end in zip(low.T, high.T, strict=True):
        both = np.concatenate([begin, end])
        # Without boxes a dimension has one border, and no interval.
        if not len(both):
            both = np.zeros(1, np.int64)
        ends.append(np.unique(both))
    fields = math.prod(len(each) - 1 for each in ends)
    most = FIELDS_PER_BOX * len(numbers)
    if fields <= most or not len(numbers):
        yield _make_grid(numbers, low, high, ends)
        return
    first = _choose_half(low, ends)
    for half in (first, ~first):
        yield from _make_grids(numbers[half], low[half], high[half])


def _choose_half(low: Ints, ends: Sequence[Ints]) -> Bools:
    """The half of the boxes that begin first along the dimension with the most borders."""
    counts = [len(each) for each in ends]
    most = counts.index(max(counts))
    order = low[:, most].argsort(kind="stable")
    middle = len(order) // 2
    half = np.zeros(len(order), bool)
    half[order[:middle]] = True
    return half


def _make_grid(numbers: Ints, low: Ints, high: Ints, borders: Sequence[Ints]) -> _Grid:
    """The grid of these borders."""
    field = np.zeros(len(numbers), np.int64)
    owner = np.arange(len(numbers))
    fields = 1
    # Dimension by dimension, each box is in more fields.
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
    """Which cells are in the grid, their coordinates, and in which of its fields each is."""
    inside = np.arange(len(along[0]))
    field = np.zeros(len(inside), np.int64)
    for k, ends in enumerate(grid.borders):
        intervals = len(ends) - 1
        interval = _count_borders(ends, along[k])
        interval -= 1
        within = interval >= 0
        within &= interval < intervals
        if not within.all():
            inside = inside[within]
            field = field[within]
            interval = interval[within]
            along = [coordinate[within] for coordinate in along]
        field = field * intervals + interval
    return inside, along, field


def _count_borders(ends: Ints, along: Ints) -> Ints:
    """How many of these ascending borders each coordinate has reached."""
    if len(ends) > FEW:
        return ends.searchsorted(along, "right")
    # A search guesses which half is next, and half of the guesses are wrong; to count is to compare in vectors.
    count = np.zeros(len(along), np.int8)
    for end in ends:
        reached = along >= end
        count += reached.view(np.int8)
    return count.astype(np.int64)
