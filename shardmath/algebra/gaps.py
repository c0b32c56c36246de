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

from shardmath.base.arrays import Ints

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
    return (int(gaps[0]),) if len(gaps) else None


def _find_in_grid(borders: list[Ints], tables: list[_Table], count: int) -> tuple[int, ...] | None:
    """By how many products hold each cell: exact in float32, of which whole numbers up to 2^24
    are."""
    marks = [_mark(*each, count) for each in zip(borders, tables, strict=True)]
    # Cells of all dimensions but the first, row-major, so that one matrix product counts them all.
    rest = np.ones((count, 1), np.float32)
    for other in marks[1:]:
        cells = rest[:, :, None] * other[:, None, :]
        rest = cells.reshape(count, -1)
    bare = marks[0].T @ rest == 0
    at = int(bare.argmax())
    if not bare.flat[at]:
        return None
    where = np.unravel_index(at, [len(each) for each in borders])
    found = []
    for each, i in zip(borders, where, strict=True):
        found.append(int(each[i]))
    return tuple(found)


def _mark(borders: Ints, table: _Table, count: int) -> NDArray[np.float32]:
    """1 where a product holds a cell of the dimension: (products, cells)."""
    # A range is a step up where it begins and a step down where it ends.
    steps = np.zeros((count, len(borders) + 1), np.float32)
    up = borders.searchsorted(table.lo)
    down = borders.searchsorted(table.hi)
    np.add.at(steps, (table.owner, up), 1)
    np.add.at(steps, (table.owner, down), -1)
    inside = steps[:, :-1]
    return inside.cumsum(axis=1, dtype=np.float32)


def _find_in_slabs(
    shape: tuple[int, ...], products: tuple[Product, ...], borders: Ints, table: _Table
) -> tuple[int, ...] | None:
    """By the products that hold each border of the first dimension; the same ones are looked at
    once."""
    number: dict[Product, int] = {}
    numbers = [number.setdefault(product[1:], len(number)) for product in products]
    rest = np.array(numbers, np.int64)
    distinct = tuple(number)
    full: set[bytes] = set()
    for start in borders.tolist():
        having = np.zeros(len(distinct), bool)
        here = (table.lo <= start) & (start < table.hi)
        having[rest[table.owner[here]]] = True
        key = np.packbits(having).tobytes()
        if key in full:
            continue
        some = tuple(distinct[i] for i in np.flatnonzero(having).tolist())
        gap = find_gap(shape[1:], some)
        if gap is not None:
            return (start, *gap)
        full.add(key)
    return None
