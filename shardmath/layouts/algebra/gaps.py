"""Gaps: the first element of a tensor that none of many products of ranges has.

What holds a position changes at borders alone, so a cell between borders stands for all of its
elements, and its first element is the one sought.

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
"""(start, stop) of what is held of one dimension, ascending and apart."""

Product: TypeAlias = tuple[Ranges, ...]
"""Ranges of each dimension."""

GRID = 1 << 24
"""Numbers that a grid of cells may take at a time, of 4 bytes."""


def find_gap(shape: tuple[int, ...], products: tuple[Product, ...]) -> tuple[int, ...] | None:
    """The first element of a tensor, row-major, that is in none of the products; None if all are in
    some. No dimension is empty.

    A grid of all cells is one product of matrices; where it would be too large, the first dimension
    is taken border by border.
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
    """How many numbers a grid of the cells takes: the factors of the product of matrices, and it."""
    first, *others = map(len, borders)
    rest = math.prod(others)
    marks = products * (first + sum(others))
    return (products + first) * rest + marks


class _Table(NamedTuple):
    """The ranges of one dimension of all products, and whose they are: arrays (ranges)."""

    lo: Ints
    hi: Ints
    owner: Ints

    def holds(self, position: int) -> Bools:
        """Of each range whether it has the position."""
        has_begun = self.lo <= position
        return has_begun & (position < self.hi)


def _list_ranges(products: tuple[Product, ...], dimension: int) -> _Table:
    """The ranges of one dimension of all products."""
    rows = []
    for owner, product in enumerate(products):
        for lo, hi in product[dimension]:
            rows.append((lo, hi, owner))
    table = np.array(rows, np.int64).reshape(-1, 3)
    return _Table(*table.T)


def _find_borders(size: int, table: _Table) -> Ints:
    """Where cells begin, ascending, 0 first."""
    ends = np.concatenate(([0], table.lo, table.hi))
    found = np.unique(ends)
    return found[found < size]


def _find_on_line(size: int, products: tuple[Product, ...]) -> tuple[int] | None:
    """In one dimension: the first place up to which ranges reach, and where none begins."""
    table = _list_ranges(products, 0)
    order = np.argsort(table.lo)
    stops = np.append(0, table.hi[order])
    reach = np.maximum.accumulate(stops)
    begin = np.append(table.lo[order], size)
    gaps = reach[begin > reach]
    if not len(gaps):
        return None
    return (int(gaps[0]),)


def _find_in_grid(borders: list[Ints], tables: list[_Table], count: int) -> tuple[int, ...] | None:
    """By how many products hold each cell: exact in float32, as integers up to 2^24 are."""
    marks = []
    for own, table in zip(borders, tables, strict=True):
        marks.append(_mark(own, table, count))
    # Cells of all dimensions but the first as one, so that one matrix product counts them all.
    first, *others = marks
    rest = _mark_cells(others, count)
    counts = first.T @ rest
    bare = counts == 0
    at = int(bare.argmax())
    if not bare.flat[at]:
        return None
    sizes = list(map(len, borders))
    where = np.unravel_index(at, sizes)
    found = []
    for own, i in zip(borders, where, strict=True):
        found.append(int(own[i]))
    return tuple(found)


def _mark_cells(marks: list[NDArray[np.float32]], count: int) -> NDArray[np.float32]:
    """1 where a product holds a cell of all these dimensions: (products, cells), row-major."""
    held = np.ones((count, 1), np.float32)
    for other in marks:
        cells = held[:, :, None] * other[:, None, :]
        held = cells.reshape(count, -1)
    return held


def _mark(borders: Ints, table: _Table, count: int) -> NDArray[np.float32]:
    """1 where a product holds a cell of the dimension: (products, cells)."""
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
    shape: tuple[int, ...], products: tuple[Product, ...], borders: Ints, table: _Table
) -> tuple[int, ...] | None:
    """By the products that hold each border of the first dimension; equal ones are looked at once."""
    number: dict[Product, int] = {}
    numbers = [number.setdefault(product[1:], len(number)) for product in products]
    rest = np.array(numbers, np.int64)
    rest_of_range = rest[table.owner]
    distinct = tuple(number)
    full: set[bytes] = set()
    for start in borders.tolist():
        is_held = table.holds(start)
        having = np.zeros(len(distinct), bool)
        having[rest_of_range[is_held]] = True
        key = np.packbits(having).tobytes()
        if key in full:
            continue
        chosen = np.flatnonzero(having).tolist()
        some = tuple(distinct[i] for i in chosen)
        gap = find_gap(shape[1:], some)
        if gap is not None:
            return (start, *gap)
        full.add(key)
    return None
