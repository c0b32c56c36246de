"""Gaps: the first element of a tensor that is in none of many products of ranges.

The products that hold a position change only at borders, so a cell between borders stands for all of
its elements, and its first element is the one sought.

>>> upper, lower = (((0, 2),), ((0, 3),)), (((2, 4),), ((0, 1), (2, 3)))
>>> find_gap((4, 3), (upper, lower))
(2, 1)
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Bools, Ints

__all__ = ["GRID", "Product", "Ranges", "find_gap"]

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges (start, stop) that are held of one dimension, ascending and apart."""

Product: TypeAlias = tuple[Ranges, ...]
"""Ranges of each dimension."""

GRID = 1 << 24
"""The most numbers, of 4 bytes each, in a grid of cells."""


def find_gap(shape: tuple[int, ...], products: tuple[Product, ...]) -> tuple[int, ...] | None:
    """Find the first element, in row-major order, that no product in `products` contains, and return its index in a
    tensor of shape `shape`; None if there is no such element. A product lists ranges per dimension, and contains all
    their combinations.

    No dimension is empty. A grid of all cells is one product of matrices; if it would be too large,
    the first dimension is taken border by border.
    """
    if not products:
        return (0,) * len(shape)
    if not shape:
        return None
    if len(shape) == 1:
        return _find_on_line(shape[0], products)
    tables = []
    borders = []
    for d, size in enumerate(shape):
        table = _list_ranges(products, d)
        tables.append(table)
        borders.append(_find_borders(size, table))
    if _count_numbers(borders, len(products)) <= GRID:
        return _find_in_grid(borders, tables, len(products))
    return _find_in_slabs(shape, products, borders[0], tables[0])


def _count_numbers(borders: list[Ints], products: int) -> int:
    """How many numbers a grid of the cells takes: the factors of the matrix product, and the product."""
    first, *others = map(len, borders)
    rest = math.prod(others)
    # Marks (products, cells) of every dimension, marks (products, rest) of all but the first, and (first, rest) counts.
    marks = products * (first + sum(others))
    return (products + first) * rest + marks


class _RangeTable(NamedTuple):
    """The ranges of one dimension of all products, and the number of each range's product: arrays (ranges)."""

    lo: Ints
    hi: Ints
    owner: Ints

    def holds(self, position: int) -> Bools:
        """Return a bool array: for each range of the table, whether it contains `position`. Range i is from `lo[i]` to
        before `hi[i]`."""
        has_begun = self.lo <= position
        return has_begun & (position < self.hi)


def _list_ranges(products: tuple[Product, ...], dimension: int) -> _RangeTable:
    """The ranges of one dimension of all products."""
    rows = []
    for owner, product in enumerate(products):
        for lo, hi in product[dimension]:
            rows.append((lo, hi, owner))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return _RangeTable(*table.T)


def _find_borders(size: int, table: _RangeTable) -> Ints:
    """The positions where cells begin, ascending, 0 first."""
    ends = np.concatenate(([0], table.lo, table.hi))
    borders = np.unique(ends)
    return borders[borders < size]


def _find_on_line(size: int, products: tuple[Product, ...]) -> tuple[int] | None:
    """The gap of one dimension: the first position up to which ranges reach and at which none begins."""
    table = _list_ranges(products, 0)
    order = np.argsort(table.lo)
    stops = np.append(0, table.hi[order])
    reach = np.maximum.accumulate(stops)
    begin = np.append(table.lo[order], size)
    gaps = reach[begin > reach]
    if not len(gaps):
        return None
    return (int(gaps[0]),)


def _find_in_grid(
    borders: list[Ints], tables: list[_RangeTable], count: int
) -> tuple[int, ...] | None:
    """The gap, by the number of products that hold each cell: float32 is exact for integers up to 2^24."""
    marks = []
    for dim_borders, table in zip(borders, tables, strict=True):
        marks.append(_mark(dim_borders, table, count))
    # Cells of all dimensions but the first as one, so that one matrix product counts them all.
    first_marks, *other_marks = marks
    rest_marks = _mark_cells(other_marks, count)
    counts = first_marks.T @ rest_marks
    bare = counts == 0
    first_bare = int(bare.argmax())
    if not bare.flat[first_bare]:
        return None
    sizes = list(map(len, borders))
    cell = np.unravel_index(first_bare, sizes)
    element = []
    for dim_borders, i in zip(borders, cell, strict=True):
        element.append(int(dim_borders[i]))
    return tuple(element)


def _mark_cells(marks: list[NDArray[np.float32]], count: int) -> NDArray[np.float32]:
    """A matrix (products, cells), cells row-major: 1 if the product holds the cell of all these dimensions."""
    held = np.ones((count, 1), np.float32)
    for other in marks:
        cells = held[:, :, None] * other[:, None, :]
        held = cells.reshape(count, -1)
    return held


def _mark(borders: Ints, table: _RangeTable, count: int) -> NDArray[np.float32]:
    """A matrix (products, cells): 1 if the product holds the cell of the dimension."""
    # A range is a step up where it begins and a step down where it ends.
    shape = count, len(borders) + 1
    steps = np.zeros(shape, np.float32)
    begin = borders.searchsorted(table.lo)
    end = borders.searchsorted(table.hi)
    up = table.owner, begin
    down = table.owner, end
    np.add.at(steps, up, 1)
    np.add.at(steps, down, -1)
    inside = steps[:, :-1]
    return inside.cumsum(axis=1, dtype=np.float32)


def _find_in_slabs(
    shape: tuple[int, ...], products: tuple[Product, ...], borders: Ints, table: _RangeTable
) -> tuple[int, ...] | None:
    """The gap, by the products that hold each border of the first dimension; equal sets are looked at once."""
    # Products that are equal in all dimensions but the first have one number.
    number_of: dict[Product, int] = {}
    rest_numbers = [number_of.setdefault(product[1:], len(number_of)) for product in products]
    rest_of_product = np.array(rest_numbers, np.int64)
    rest_of_range = rest_of_product[table.owner]
    distinct = tuple(number_of)
    without_gap: set[bytes] = set()
    for start in borders.tolist():
        is_held = table.holds(start)
        is_present = np.zeros(len(distinct), bool)
        is_present[rest_of_range[is_held]] = True
        key = np.packbits(is_present).tobytes()
        if key in without_gap:
            continue
        chosen = np.flatnonzero(is_present).tolist()
        present = tuple(distinct[i] for i in chosen)
        gap = find_gap(shape[1:], present)
        if gap is not None:
            return (start, *gap)
        without_gap.add(key)
    return None
