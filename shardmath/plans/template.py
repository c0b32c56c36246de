"""Template: everything that moving a tensor from one layout to another depends on, but for the ranks' names.

1. A template belongs to two **forms** (layouts whose ranks are their positions in the mesh) and what their Partial axes
   ask for. Tensors, and groups of ranks, that differ in nothing else share it.
2. A **unit** is one (key, goal) pair a dimension; its boxes are the products of their rows. All positions that hold a
   unit hold all of it, all that ask for it ask for all of it, and units are disjoint: a template is the Kronecker
   product of its dimensions, and no loop is over pairs of ranks.
3. Units of one **class** have the same holders, units of one **cell** the same receivers.
4. Addends are dimensions too: a pass-through axis is a dimension divided alike on both sides; folded axes are one
   that the source divides and the destination holds whole.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.algebra.mesh import Mesh
>>> t = template(Layout((6,), Mesh(tp=2), "(tp n)"), Layout((6,), Mesh(dp=2, tp=3), "(tp n)"), Reduction())
>>> t.unit_size.tolist(), [h.tolist() for h in t.holders], [r.tolist() for r in t.receivers]
([2, 1, 1, 2], [[0], [1]], [[0, 3], [1, 4], [2, 5]])
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.algebra.box import row_size
from shardmath.algebra.mesh import Mesh, strides
from shardmath.algebra.partition import Partition
from shardmath.algebra.runs import Runs, identity
from shardmath.base.arrays import Ints, distinct, ranges
from shardmath.base.errors import PlanError
from shardmath.base.memo import memo
from shardmath.layouts.layout import Layout
from shardmath.plans.overlay import Overlay, Parts, overlaid, overlay
from shardmath.plans.reduction import Reduction

__all__ = [
    "SMALL",
    "Members",
    "Piece",
    "Template",
    "expand",
    "hidden_pairs",
    "legal",
    "snap",
    "template",
    "unit_addends",
    "unit_boxes",
    "unit_grains",
    "unit_rows",
]

MOST_BOXES = 1 << 22
"""That go from one rank to another, listed in memory: a gigabyte."""

SMALL = 1 << 16
"""Bytes: boxes up to this size are not divided among senders."""


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Sets of positions of a mesh: set i is `position[first[i]:first[i + 1]]`, ascending."""

    first: Ints
    position: Ints

    def __len__(self) -> int:
        return len(self.first) - 1

    def __iter__(self) -> Iterator[Ints]:
        return (self.position[a:b] for a, b in itertools.pairwise(self.first.tolist()))


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """All units that move tensors of form `src` to form `dst`.

    Unit u is `unit_size[u]` elements of pair `unit_pairs[u, d]` in dimension d (of `overlays`, the `hidden` first
    ones being addends and not the tensor's); it is held by `holders[unit_class[u]]` and wanted by
    `receivers[unit_cell[u]]`. `unit_order[u]` is its place in an order that is the same for every spelling of a layout.
    """

    src: Layout
    dst: Layout
    reduction: Reduction
    overlays: tuple[Overlay, ...]
    unit_size: Ints
    unit_pairs: Ints
    unit_order: Ints
    unit_class: Ints
    holders: Members
    unit_cell: Ints
    receivers: Members

    @property
    def hidden(self) -> int:
        """How many leading dimensions are addends and not the tensor's."""
        return len(self.overlays) - self.src.ndim


def template(src: Layout, dst: Layout, rule: Reduction) -> Template:
    """The template of two layouts of one shape."""
    return _template(src.form, dst.form, rule)


@memo()
def _template(src: Layout, dst: Layout, rule: Reduction) -> Template:
    hidden = (overlay(a, b) for a, b in hidden_pairs(src, rule))
    overlays = (*hidden, *map(overlaid, src.dims, dst.dims))
    keys, goals, size, pairs = _units(overlays)
    classes, unit_class = distinct(keys)
    cells, unit_cell = distinct(goals)
    holders = _members(_dividing(overlays, source=True), True, src.mesh, classes.tobytes())
    receivers = _members(_dividing(overlays, source=False), False, dst.mesh, cells.tobytes())
    order = _order(overlays, size, pairs)
    return Template(
        src, dst, rule, overlays, size, pairs, order, unit_class, holders, unit_cell, receivers
    )


def hidden_pairs(src: Layout, rule: Reduction) -> Iterable[tuple[Partition, Partition]]:
    """The dimensions whose coordinate is an addend: folded ones first, then those that pass through."""
    if rule.folded:
        whole = Partition((), (identity(rule.addends),), np.zeros(1, np.int64))
        yield _addends(rule.folded, rule.addends), whole
    for a, b in rule.matched:
        n = math.prod(map(src.mesh.axis_size, a))
        yield _addends(a, n), _addends(b, n)


def _addends(axes: tuple[str, ...], count: int) -> Partition:
    """One addend a coordinate."""
    return Partition(axes, tuple(Runs(((0, i, 1),)) for i in range(count)), np.arange(count))


def _units(overlays: Sequence[Overlay]) -> tuple[Ints, Ints, Ints, Ints]:
    """Code of the keys, code of the goals, elements and pair of each dimension, by unit."""
    keys = goals = np.zeros(1, np.int64)
    size = np.ones(1, np.int64)
    for over in overlays:
        keys = (keys[:, None] * len(over.keys) + over.pair_key).ravel()
        goals = (goals[:, None] * len(over.goals) + over.pair_goal).ravel()
        size = (size[:, None] * over.pair_size).ravel()
    counts = [len(over.pair_key) for over in overlays]
    pairs = (
        np.arange(len(size))[:, None]
        // np.array(strides(counts), np.int64)
        % np.array(counts, np.int64)
    )
    return keys, goals, size, pairs


def _dividing(overlays: Sequence[Overlay], *, source: bool) -> tuple[Overlay, ...]:
    """The overlays whose source, or target, is not one part that everybody holds."""
    sides = (
        (over, over.source, over.keys) if source else (over, over.target, over.goals)
        for over in overlays
    )
    return tuple(over for over, held, sets in sides if len(held.parts) > 1 or len(sets) > 1)


@memo()
def _members(overlays: tuple[Overlay, ...], source: bool, mesh: Mesh, wanted: bytes) -> Members:
    """The positions that hold each of the wanted (sorted) codes: one set of parts a dimension."""
    codes = np.frombuffer(wanted, np.int64)
    position = np.arange(mesh.size)
    code = np.zeros(mesh.size, np.int64)
    for over in overlays:
        held, sets = (over.source, over.keys) if source else (over.target, over.goals)
        own = held.by_rank(mesh)[position]
        if max(map(len, sets), default=1) > 1:
            part, number = _part_sets(sets)
            row, owner = ranges(part.searchsorted(own, "left"), part.searchsorted(own, "right"))
            position, code, own = position[owner], code[owner], number[row]
        code = code * len(sets) + own
    at = codes.searchsorted(code)
    used = at < len(codes)
    used[used] = codes[at[used]] == code[used]
    order = np.lexsort((position[used], at[used]))
    first = np.searchsorted(at[used][order], np.arange(len(codes) + 1))
    return _alike(first.tobytes(), position[used][order].tobytes())


@memo()
def _alike(first: bytes, position: bytes) -> Members:
    """Equal members are one object."""
    return Members(np.frombuffer(first, np.int64), np.frombuffer(position, np.int64))


def _part_sets(sets: Parts) -> tuple[Ints, Ints]:
    """(part, set) of all sets that a part is in, sorted."""
    pairs = sorted((p, k) for k, parts in enumerate(sets) for p in parts)
    part, number = np.array(pairs, np.int64).reshape(-1, 2).T
    return part, number


def _order(overlays: Sequence[Overlay], size: Ints, pairs: Ints) -> Ints:
    """The place of each unit by its first elements on both sides."""
    columns = [over.start[over.first[pairs[:, d]]] for d, over in enumerate(overlays)]
    targets = [over.dst[over.first[pairs[:, d]], 0] for d, over in enumerate(overlays)]
    return np.argsort(np.lexsort((size, *reversed(targets), *reversed(columns))))


def unit_addends(t: Template) -> Ints:
    """Of which addend each unit is, where addends are folded."""
    over = t.overlays[0]
    return over.start[over.first[t.unit_pairs[:, 0]]]


Rows: TypeAlias = tuple[int, ...]


def unit_rows(t: Template) -> Ints:
    """Of each unit: elements of a row of its one box, 0 where it stays whole, -1 where there are several boxes."""
    boxes, _, row = _largest_box(t)
    rows = np.where(boxes > 1, -1, row)
    return np.where((rows > 0) & (t.unit_size * t.src.itemsize <= SMALL), 0, rows)


def unit_grains(t: Template) -> Ints:
    """Of each unit, the bytes of its largest box that are never cut: all of a small one, a row of a large one."""
    _, size, row = _largest_box(t)
    return np.where(size * t.src.itemsize <= SMALL, size, row) * t.src.itemsize


@memo()
def _largest_box(t: Template) -> tuple[Ints, Ints, Ints]:
    """Of each unit: how many boxes it has, the elements of the largest, and those of a row of it."""
    boxes = np.ones(len(t.unit_size), np.int64)
    lead, size = boxes.copy(), boxes.copy()
    for over, pair in zip(t.overlays, t.unit_pairs.T, strict=True):
        count, largest = (column[pair] for column in _rows_of_pairs(over))
        boxes *= count
        lead = np.where(lead == 1, largest, lead)
        size *= largest
    return boxes, size, size // np.maximum(lead, 1)


@memo()
def _rows_of_pairs(over: Overlay) -> tuple[Ints, Ints]:
    """Of each pair: how many rows it has, and the size of the largest."""
    count = over.first[1:] - over.first[:-1]
    return count, np.maximum.reduceat(over.size, over.first[:-1]) if len(count) else count


class _Listed(NamedTuple):
    """The numbers of an overlay as lists, which are quicker to look at one by one."""

    first: list[int]
    start: list[int]
    size: list[int]
    src: list[list[int]]
    dst: list[list[int]]


@memo()
def _listed(over: Overlay) -> _Listed:
    columns = (over.first, over.start, over.size, over.src, over.dst)
    return _Listed(*(column.tolist() for column in columns))


@memo(8192)
def unit_boxes(t: Template, unit: int) -> tuple[list[Rows], list[Rows], list[int]]:
    """Box by box and row-major: its row in each dimension, its size in each, and the elements up to its end."""
    listed = [_listed(over) for over in t.overlays]
    pairs = t.unit_pairs[unit].tolist()
    count = math.prod(x.first[p + 1] - x.first[p] for x, p in zip(listed, pairs, strict=True))
    if count > MOST_BOXES:
        what = f"{t.src} to {t.dst}: between two ranks go {count} boxes of one tensor, more than {MOST_BOXES}"
        raise PlanError(f"{what}; divide it into larger blocks, or write it with more dimensions")
    rows = list(
        itertools.product(
            *[range(x.first[p], x.first[p + 1]) for x, p in zip(listed, pairs, strict=True)]
        )
    )
    sizes = [tuple([x.size[r] for x, r in zip(listed, box, strict=True)]) for box in rows]
    return rows, sizes, list(itertools.accumulate(map(math.prod, sizes)))


def snap(t: Template, unit: int, at: int) -> int:
    """The last place not after element `at` of the unit where it may be cut: a box, or a row of a large one."""
    _, sizes, ends = unit_boxes(t, unit)
    box = bisect.bisect_right(ends, at)
    begin = ends[box - 1] if box else 0
    if at == begin or box == len(ends) or (ends[box] - begin) * t.src.itemsize <= SMALL:
        return begin
    row = row_size(sizes[box])
    return begin + (at - begin) // row * row


def legal(t: Template, unit: int, at: int) -> bool:
    """Whether the unit may be cut at an element: at a box, or at a row of one."""
    _, sizes, ends = unit_boxes(t, unit)
    box = bisect.bisect_right(ends, at)
    begin = ends[box - 1] if box else 0
    return at == begin or (box < len(ends) and (at - begin) % row_size(sizes[box]) == 0)


class Piece(NamedTuple):
    """One box of a unit as its source and its destination see it; `addend` is its place in the fold."""

    src: tuple[slice, ...]
    dst: tuple[slice, ...]
    whole: tuple[slice, ...]
    shape: tuple[int, ...]
    nbytes: int
    addend: int


def expand(
    t: Template, unit: int, sender: int, receiver: int, lo: int, hi: int, *, relayed: bool = False
) -> list[Piece]:
    """The pieces of elements lo..hi-1 of the unit from one position of the source to one of the destination.

    lo and hi are at boxes, or at rows of one, as `snap` gives them. Where `relayed`, the sender is a position of the
    destination too, and sends what it has received.
    """
    columns = []
    for over, p in zip(t.overlays, t.unit_pairs[unit].tolist(), strict=True):
        key, goal = over.keys[over.pair_key[p]], over.goals[over.pair_goal[p]]
        there = _column(goal, over.target, receiver, t.dst.mesh)
        if relayed:
            columns.append((_column(goal, over.target, sender, t.dst.mesh), there))
        else:
            columns.append((_column(key, over.source, sender, t.src.mesh), there))
    return _expand(t, unit, tuple(columns), lo, hi, relayed)


def _column(parts: tuple[int, ...], held: Partition, position: int, mesh: Mesh) -> int:
    """Which part of a key or goal the position holds."""
    return 0 if len(parts) == 1 else parts.index(int(held.by_rank(mesh)[position]))


Columns: TypeAlias = tuple[tuple[int, int], ...]


@memo(1 << 14)
def _expand(
    t: Template, unit: int, columns: Columns, lo: int, hi: int, relayed: bool
) -> list[Piece]:
    rows, sizes, ends = unit_boxes(t, unit)
    listed = [_listed(over) for over in t.overlays]
    out = []
    for b in range(bisect.bisect_right(ends, lo), bisect.bisect_left(ends, hi) + 1):
        begin = ends[b - 1] if b else 0
        at = list(zip(listed, rows[b], columns, strict=True))
        src = [(x.dst if relayed else x.src)[r][i] for x, r, (i, _) in at]
        dst = [x.dst[r][j] for x, r, (_, j) in at]
        whole = [x.start[r] for x, r, _ in at]
        out.append(
            _piece(t, (src, dst, whole), sizes[b], max(lo - begin, 0), min(hi, ends[b]) - begin)
        )
    return out


def _piece(
    t: Template,
    starts: tuple[list[int], list[int], list[int]],
    sizes: tuple[int, ...],
    lo: int,
    hi: int,
) -> Piece:
    """Elements lo..hi-1 of the box that begins at `starts` (source, destination, global), whole rows of it."""
    if hi - lo < math.prod(sizes):
        d = next(i for i, n in enumerate(sizes) if n > 1)
        row = math.prod(sizes[d + 1 :])
        sizes = (*sizes[:d], (hi - lo) // row, *sizes[d + 1 :])
        for side in starts:
            side[d] += lo // row
    k, shape = t.hidden, sizes[t.hidden :]
    src, dst, whole = [
        tuple([slice(x, x + n) for x, n in zip(side[k:], shape, strict=True)]) for side in starts
    ]
    addend = starts[2][0] if t.reduction.folded else 0
    return Piece(src, dst, whole, shape, math.prod(shape) * t.src.itemsize, addend)
