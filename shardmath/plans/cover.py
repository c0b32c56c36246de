"""Cover: whether the source holds what the destination needs, and nothing twice; and whether a side holds all there is.

1. Windows of one source tensor hold different elements, or a destination would be sent one twice.
2. Every position of the destination gets as many elements of every addend as it has cells. Units of one template never
   meet, so counting is enough.
3. An axis divides one dimension at most, so what all ranks of a layout hold together is a product of what they hold of
   each dimension. Windows that are apart hold all of a tensor if and only if they have its volume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.algebra.box import Box, first_gap, from_slices
from shardmath.algebra.dimension import Dimension
from shardmath.algebra.overlay import Overlay
from shardmath.algebra.partition import partition, spans
from shardmath.base.arrays import Ints
from shardmath.base.errors import PlanError
from shardmath.base.memo import memo
from shardmath.layouts.layout import Layout
from shardmath.plans.demands import Batch
from shardmath.plans.pieces import expand
from shardmath.plans.template import Template

__all__ = [
    "cells_held",
    "check_covered",
    "check_disjoint",
    "first_unheld",
    "holds_all",
    "meeting",
    "not_whole",
]


def check_disjoint(name: str, windows: tuple[Layout, ...]) -> None:
    """Source windows hold different elements, or a destination would be sent one twice."""
    lo, hi = _hulls(windows)
    near = np.logical_and(lo[:, None] < hi[None], hi[:, None] > lo[None]).all(axis=2)
    for j, i in np.argwhere(np.tril(near, -1)).tolist():
        both = [_common(x, y) for x, y in zip(windows[i].dims, windows[j].dims, strict=True)]
        if None not in both:
            raise PlanError(
                f"tensor {name!r}: source windows {i} and {j} both hold element {tuple(both)}; "
                f"use shardmath.window to keep them apart"
            )


def _common(a: Dimension, b: Dimension) -> int | None:
    """The first position that some rank holds under both, or None."""
    (lo, hi), (other_lo, other_hi) = _union(a), _union(b)
    at = np.searchsorted(other_hi, lo, "right")
    inside = at < len(other_lo)
    start = np.maximum(lo[inside], other_lo[at[inside]])
    meet = start[start < np.minimum(hi[inside], other_hi[at[inside]])]
    return int(meet[0]) if len(meet) else None


@memo()
def _union(dimension: Dimension) -> tuple[Ints, Ints]:
    """Starts and stops of the disjoint ranges that anybody holds, ascending."""
    start, stop, _, _ = spans(partition(dimension).parts)
    reach = np.maximum.accumulate(stop)
    first = np.append(True, start[1:] > reach[:-1])[: len(start)]
    last = np.append(first[1:], True)[: len(start)]
    return start[first], reach[last]


def meeting(src: tuple[Layout, ...], dst: tuple[Layout, ...]) -> list[tuple[int, int]]:
    """The pairs (source window, destination window) whose hulls meet; at least one for each destination window."""
    if len(src) == len(dst) == 1:
        return [(0, 0)]
    (lo, hi), (begin, end) = _hulls(src), _hulls(dst)
    both = np.logical_and(lo[:, None] < end[None], hi[:, None] > begin[None]).min(
        axis=2, initial=True
    )
    both[0] |= ~both.any(axis=0)
    return [(int(i), int(j)) for i, j in np.argwhere(both)]


@memo()
def _hulls(windows: tuple[Layout, ...]) -> tuple[Ints, Ints]:
    """The least and, plus one, the largest position that anybody holds: two arrays (windows, dimensions)."""
    spans = [[_union(dim) for dim in layout.dims] for layout in windows]
    shape = len(windows), windows[0].ndim
    lo = [[int(start.min(initial=1 << 62)) for start, _ in dims] for dims in spans]
    hi = [[int(stop.max(initial=0)) for _, stop in dims] for dims in spans]
    return np.array(lo, np.int64).reshape(shape), np.array(hi, np.int64).reshape(shape)


@memo()
def holds_all(windows: tuple[Layout, ...]) -> bool:
    """Whether the ranks of a side hold every element of the tensor between them."""
    if any(all(map(_all_held, layout.dims)) for layout in windows):
        return True
    missing = math.prod(windows[0].shape) - sum(map(_volume, windows))
    if missing > 0:
        return False
    if missing == 0 and _apart(windows):
        return True
    distinct = tuple({_together(layout): layout for layout in windows}.values())
    return holds_all(distinct) if len(distinct) < len(windows) else first_unheld(windows) is None


def not_whole(side: Mapping[str, tuple[Layout, ...]]) -> tuple[str, ...]:
    """The tensors, ascending, of which no rank of a side holds some element."""
    short = {
        at
        for at, windows in {id(one): one for one in side.values()}.items()
        if not holds_all(windows)
    }
    return (
        tuple(sorted(name for name, windows in side.items() if id(windows) in short))
        if short
        else ()
    )


@memo()
def _all_held(dimension: Dimension) -> bool:
    start, stop = _union(dimension)
    return dimension.size == 0 or (len(start) == 1 and int(stop[0] - start[0]) == dimension.size)


_Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) of what is held of one dimension, ascending and apart."""


def _together(layout: Layout) -> tuple[_Ranges, ...]:
    """What all ranks hold together is the product of these."""
    unions = map(_union, layout.dims)
    return tuple(tuple(zip(start.tolist(), stop.tolist(), strict=True)) for start, stop in unions)


def _volume(layout: Layout) -> int:
    """How many elements all ranks hold together."""
    return math.prod(int((stop - start).sum()) for start, stop in map(_union, layout.dims))


def _apart(windows: tuple[Layout, ...]) -> bool:
    """Whether it takes no more than hulls to see that no two windows meet."""
    lo, hi = _hulls(windows)
    near = np.logical_and(lo[:, None] < hi[None], hi[:, None] > lo[None]).all(axis=2)
    return not np.tril(near, -1).any()


def first_unheld(windows: tuple[Layout, ...]) -> tuple[int, ...] | None:
    """The first element of the tensor, row-major, that no rank of a side holds; None where all are held."""
    if 0 in windows[0].shape:
        return None
    return _first_gap(windows[0].shape, tuple(dict.fromkeys(map(_together, windows))))


_Products: TypeAlias = tuple[tuple[_Ranges, ...], ...]
"""One (ranges of each dimension) a window."""
GRID = 1 << 24
"""Numbers that a grid of cells may take at a time, of 4 bytes."""


def _first_gap(shape: tuple[int, ...], products: _Products) -> tuple[int, ...] | None:
    """The first element of a tensor that is in none of the products; no dimension of it is empty.

    What holds a position changes at borders alone, so a cell between borders stands for all of its elements, and its
    first element is the one sought. A grid of all cells is one product of matrices; where it would be too large, the
    first dimension is taken border by border.
    """
    if not products:
        return (0,) * len(shape)
    if not shape:
        return None
    if len(shape) == 1:
        return _line_gap(shape[0], products)
    tables = [_ranges(products, d) for d in range(len(shape))]
    borders = [_borders(size, table) for size, table in zip(shape, tables, strict=True)]
    cells = [len(each) for each in borders]
    if (len(products) + cells[0]) * math.prod(cells[1:]) + len(products) * sum(cells) <= GRID:
        return _grid_gap(borders, tables, len(products))
    return _slab_gap(shape, products, borders[0], tables[0])


class _Table(NamedTuple):
    """The ranges of one dimension of all products, and whose they are: arrays (ranges)."""

    lo: Ints
    hi: Ints
    owner: Ints


def _ranges(products: _Products, dimension: int) -> _Table:
    each = [product[dimension] for product in products]
    table = np.array([ends for ranges in each for ends in ranges], np.int64).reshape(-1, 2)
    return _Table(
        table[:, 0], table[:, 1], np.repeat(np.arange(len(each)), [len(ranges) for ranges in each])
    )


def _borders(size: int, table: _Table) -> Ints:
    """Where cells begin, ascending, 0 first."""
    found = np.unique(np.concatenate(([0], table.lo, table.hi)))
    return found[found < size]


def _line_gap(size: int, products: _Products) -> tuple[int] | None:
    """In one dimension: the first place up to which ranges reach, and where none begins."""
    lo, hi, _ = _ranges(products, 0)
    order = np.argsort(lo)
    reach = np.maximum.accumulate(np.append(0, hi[order]))
    gaps = np.flatnonzero(np.append(lo[order], size) > reach)
    return (int(reach[gaps[0]]),) if len(gaps) else None


def _grid_gap(borders: list[Ints], tables: list[_Table], count: int) -> tuple[int, ...] | None:
    """By how many products hold each cell: exact in float32, of which whole numbers up to 2^24 are."""
    first, *others = (_marks(*each, count) for each in zip(borders, tables, strict=True))
    rest = np.ones((count, 1), np.float32)
    for marks in others:
        rest = (rest[:, :, None] * marks[:, None, :]).reshape(count, -1)
    bare = first.T @ rest == 0
    at = int(bare.argmax())
    if not bare.flat[at]:
        return None
    where = np.unravel_index(at, [len(each) for each in borders])
    return tuple(int(each[i]) for each, i in zip(borders, where, strict=True))


def _marks(borders: Ints, table: _Table, count: int) -> NDArray[np.float32]:
    """1 where a product holds a cell of the dimension: (products, cells)."""
    steps = np.zeros((count, len(borders) + 1), np.float32)
    np.add.at(steps, (table.owner, np.searchsorted(borders, table.lo)), 1)
    np.add.at(steps, (table.owner, np.searchsorted(borders, table.hi)), -1)
    return steps[:, :-1].cumsum(axis=1, dtype=np.float32)


def _slab_gap(
    shape: tuple[int, ...], products: _Products, borders: Ints, table: _Table
) -> tuple[int, ...] | None:
    """By the products that hold each border of the first dimension; the same ones are looked at once."""
    number: dict[tuple[_Ranges, ...], int] = {}
    rest = np.array([number.setdefault(product[1:], len(number)) for product in products], np.int64)
    distinct, whole = tuple(number), set[bytes]()
    for x in borders.tolist():
        having = np.zeros(len(distinct), bool)
        having[rest[table.owner[(table.lo <= x) & (x < table.hi)]]] = True
        key = np.packbits(having).tobytes()
        if key in whole:
            continue
        gap = _first_gap(shape[1:], tuple(distinct[i] for i in np.flatnonzero(having).tolist()))
        if gap is not None:
            return (x, *gap)
        whole.add(key)
    return None


def check_covered(batches: Sequence[Batch]) -> None:
    """Raise PlanError unless every destination gets as many elements, of every addend, as it has cells."""
    windows: dict[tuple[str, int], list[Batch]] = {}
    for batch in batches:
        windows.setdefault((batch.names[0], batch.target), []).append(batch)
    for parts in windows.values():
        if len(parts) == 1 and _covered(parts[0].template):
            continue
        t = parts[0].template
        have = sum(_given(batch.template) for batch in parts)
        short = np.flatnonzero(have != cells_held(t.dst) * t.reduction.addends)
        if len(short):
            _missing(parts, int(short[0]))


@memo()
def _covered(t: Template) -> bool:
    """Whether every position gets all that it has cells for."""
    if all(map(_whole, t.overlays)):
        return True
    return bool((_given(t) == cells_held(t.dst) * t.reduction.addends).all())


@memo()
def _whole(over: Overlay) -> bool:
    """Whether every part of the destination is covered in this dimension."""
    return _got(over) == [runs.size for runs in over.target.parts]


def _got(over: Overlay) -> list[int]:
    """How many positions of each part of the destination are in rows."""
    got = [0] * len(over.target.parts)
    for goal, size in zip(over.pair_goal.tolist(), over.pair_size.tolist(), strict=True):
        for part in over.goals[goal]:
            got[part] += size
    return got


def _given(t: Template) -> Ints:
    """How many elements of all addends each position of the destination gets."""
    out = np.ones(t.dst.mesh.size, np.int64)
    for over in t.overlays:
        got = np.array(_got(over), np.int64)
        out *= got[over.target.by_rank(t.dst.mesh)] if len(got) > 1 else got[0]
    return out


def cells_held(layout: Layout) -> Ints:
    """How many of its local cells are the tensor's, by position in the mesh."""
    out = np.ones(layout.mesh.size, np.int64)
    for dim in layout.dims:
        parts = partition(dim)
        size = np.array([runs.size for runs in parts.parts], np.int64)
        out *= size[parts.by_rank(layout.mesh)] if len(size) > 1 else size[0]
    return out


def _missing(batches: Sequence[Batch], position: int) -> NoReturn:
    """Raise PlanError for the first element that this position of the destination needs and nobody holds."""
    batch = batches[0]
    form, rank = batch.template.dst, batch.dst.ranks[position]
    held = [[(g, g + n) for _, g, n in runs.segments] for runs in form.runs(position)]
    at = first_gap(held, [box for b in batches for box in _boxes(b.template, position)])
    what = f"tensor {batch.names[0]!r}: rank {rank} needs element {at} under {form}"
    raise PlanError(f"{what}, no rank holds it under {batch.template.src}; cover it at the source")


def _boxes(t: Template, position: int) -> list[Box]:
    """The global boxes of all units that a position of the destination is to get."""
    holders, receivers = list(t.holders), [set(r.tolist()) for r in t.receivers]
    pieces = [
        expand(t, unit, int(holders[klass][0]), position, 0, int(t.unit_size[unit]))
        for unit, (klass, cell) in enumerate(
            zip(t.unit_class.tolist(), t.unit_cell.tolist(), strict=True)
        )
        if position in receivers[cell]
    ]
    return [from_slices(piece.whole) for unit in pieces for piece in unit]
