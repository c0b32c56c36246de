"""Template: everything on which a move from one layout to another depends, except the ranks' names.

1. A template belongs to two **forms** (layouts whose ranks are their positions in the mesh) and
   their reduction. Tensors, and groups of ranks, that have the same three share it.
2. A **unit** is one (key, goal) pair per dimension; its boxes are the products of their rows. All
   positions that hold a unit hold all of it, all that ask for it ask for all of it, and units are
   disjoint: a template is the Kronecker product of its dimensions, and no loop is over pairs of
   ranks.
3. Units of one **class** have the same holders, units of one **cell** the same receivers.
4. Addends are dimensions too: a pass-through axis is a dimension that both sides divide in the same way;
   folded axes are one that the source divides and the destination holds whole.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> src = Layout((6,), Mesh(tp=2), "(tp n)")
>>> dst = Layout((6,), Mesh(dp=2, tp=3), "(tp n)")
>>> t = make_template(src, dst, Reduction())
>>> t.unit_size.tolist(), [h.tolist() for h in t.holders], [r.tolist() for r in t.receivers]
([2, 1, 1, 2], [[0], [1]], [[0, 3], [1, 4], [2, 5]])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arrays import Ints, distinct, lengths, ranges
from shardmath.base.memo import memo
from shardmath.layouts.algebra.mesh import Mesh, strides
from shardmath.layouts.algebra.overlay import Overlay, Parts, overlay, overlay_dimensions
from shardmath.layouts.algebra.partition import Partition
from shardmath.layouts.algebra.runs import Runs, identity
from shardmath.layouts.layout import Layout
from shardmath.plans.reduction import Reduction

__all__ = [
    "Batch",
    "Members",
    "Ranks",
    "Sets",
    "Template",
    "hidden_pairs",
    "make_template",
    "unit_addends",
]


Ranks: TypeAlias = tuple[int, ...]
"""Distinct ranks, ascending."""


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """Sets of mesh positions: set i is position[first[i]:first[i+1]], ascending."""

    first: Ints
    position: Ints

    def __len__(self) -> int:
        return len(self.first) - 1

    def __iter__(self) -> Iterator[Ints]:
        bounds = self.first.tolist()
        for begin, end in itertools.pairwise(bounds):
            yield self.position[begin:end]

    def name(self, mesh: Mesh) -> Iterator[Ranks]:
        """Yield, for each of these sets of mesh positions, the ranks of `mesh` at its positions, ascending."""
        of_position = np.array(mesh.ranks, np.int64)
        ranks = of_position[self.position].tolist()
        bounds = self.first.tolist()
        for begin, end in itertools.pairwise(bounds):
            yield tuple(sorted(ranks[begin:end]))


class Sets:
    """Distinct sets of ranks, numbered in the order in which they are added."""

    def __init__(self) -> None:
        self.number: dict[Ranks, int] = {}
        self._cached_numbers: dict[tuple[int, int], Ints] = {}

    def add(self, ranks: Ranks) -> int:
        """Add the set `ranks` unless it is there already; return its number."""
        return self.number.setdefault(ranks, len(self.number))

    def add_all(self, mesh: Mesh, members: Members) -> Ints:
        """Add the ranks of `mesh` at each set of positions in `members`; return an array of the sets' numbers."""
        # The batches keep both alive, so that no id is reused.
        key = id(mesh), id(members)
        if key not in self._cached_numbers:
            numbers = list(map(self.add, members.name(mesh)))
            self._cached_numbers[key] = np.array(numbers, np.int64)
        return self._cached_numbers[key]

    def in_order(self) -> tuple[tuple[Ranks, ...], Ints]:
        """Return all sets in ascending order, and for each set's number its index in this order."""
        listed = sorted(self.number)
        numbers = [self.number[ranks] for ranks in listed]
        place = np.empty(len(listed), np.int64)
        place[numbers] = np.arange(len(listed))
        return tuple(listed), place


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A description, for reuse, of moves from layout `src` to `dst`, by position in the meshes instead of by rank.

    Unit u has `unit_size[u]` elements, and is pair `unit_pairs[u, d]` of `overlays[d]` in dimension d (the
    first `hidden` dimensions are addends and not the tensor's); it is held by `holders[unit_class[u]]`
    and wanted by `receivers[unit_cell[u]]`. `unit_order[u]` is its place in an order that is the
    same for every spelling of a layout.
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
        """The number of items at the beginning of `overlays` that are about partial values and the ranks that hold
        each. The other items are about the tensor's dimensions, one item for each."""
        return len(self.overlays) - self.src.ndim


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tensors that move in the same way, by one template, from the ranks of mesh `src` to the ranks of mesh `dst`.

    `source` and `target` are the numbers of the tensors' windows on either side.
    """

    template: Template
    names: tuple[str, ...]
    src: Mesh
    dst: Mesh
    source: int = 0
    target: int = 0


def make_template(src: Layout, dst: Layout, rule: Reduction) -> Template:
    """Make the Template of moves from `src` to `dst`, two layouts of one shape, with the reduction `rule`."""
    return _make_template(src.form, dst.form, rule)


@memo()
def _make_template(src: Layout, dst: Layout, rule: Reduction) -> Template:
    """The template of two forms, once for each pair."""
    hidden = itertools.starmap(overlay, hidden_pairs(src, rule))
    overlays = (*hidden, *map(overlay_dimensions, src.dims, dst.dims))
    units = _multiply(overlays)
    classes, unit_class = distinct(units.keys)
    cells, unit_cell = distinct(units.goals)
    return Template(
        src=src,
        dst=dst,
        reduction=rule,
        overlays=overlays,
        unit_size=units.size,
        unit_pairs=units.pairs,
        unit_order=_order_units(overlays, units),
        unit_class=unit_class,
        holders=_list_members(overlays, True, src.mesh, classes),
        unit_cell=unit_cell,
        receivers=_list_members(overlays, False, dst.mesh, cells),
    )


def hidden_pairs(src: Layout, rule: Reduction) -> Iterable[tuple[Partition, Partition]]:
    """Yield pairs (source, destination) of Partitions, which say which ranks hold which partial values: first one pair
    for the values that `rule` reduces, if any. Then there is a pair for each item of `rule.matched`, the mesh axes
    along which values stay partial."""
    if rule.folded:
        one_each = _divide_addends(rule.folded, rule.addends)
        # No axis divides the destination: all its ranks have part 0, which is all addends.
        cell = np.zeros(1, np.int64)
        all_together = Partition((), (identity(rule.addends),), cell)
        yield one_each, all_together
    for src_axes, dst_axes in rule.matched:
        count = math.prod(map(src.mesh.axis_size, src_axes))
        yield _divide_addends(src_axes, count), _divide_addends(dst_axes, count)


def _divide_addends(axes: tuple[str, ...], count: int) -> Partition:
    """The partition with one addend per coordinate of the axes."""
    parts = []
    for addend in range(count):
        # (local start, global start, size): the coordinate's rank holds this addend and no other.
        segment = 0, addend, 1
        parts.append(Runs((segment,)))
    cell = np.arange(count)
    return Partition(axes, tuple(parts), cell)


class _Units(NamedTuple):
    """By unit: the code of its keys, the code of its goals, its elements, and its pair in each dimension.

    A code is a number of mixed radix with one digit for each dimension.
    """

    keys: Ints
    goals: Ints
    size: Ints
    pairs: Ints


def _multiply(overlays: Sequence[Overlay]) -> _Units:
    """The units: all products of one pair per dimension, the last dimension fastest."""
    keys = np.zeros(1, np.int64)
    goals = np.zeros(1, np.int64)
    size = np.ones(1, np.int64)
    for over in overlays:
        keys = _append_digit(keys, len(over.keys), over.pair_key)
        goals = _append_digit(goals, len(over.goals), over.pair_goal)
        sizes = np.multiply.outer(size, over.pair_size)
        size = sizes.ravel()
    pairs = _list_pairs(overlays, len(size))
    return _Units(keys, goals, size, pairs)


def _list_pairs(overlays: Sequence[Overlay], units: int) -> Ints:
    """The pair of each unit (row) in each dimension (column): the digits of the unit's number in mixed radix."""
    counts = lengths(over.pair_key for over in overlays)
    sizes = counts.tolist()
    steps = np.array(strides(sizes), np.int64)
    unit = np.arange(units)
    return unit[:, None] // steps % counts


def _append_digit(codes: Ints, radix: int, digits: Ints) -> Ints:
    """Every code followed by every digit."""
    return np.add.outer(codes * radix, digits).ravel()


class _OverlaySide(NamedTuple):
    """One side of an overlay: the partition that ranks hold, and the sets of parts that its pairs name."""

    held: Partition
    sets: Parts

    @property
    def is_divided(self) -> bool:
        """Whether ranks hold different parts of this dimension, rather than all the same part. The ranks are those of a
        move's source or its destination, whichever this object describes."""
        return len(self.held.parts) > 1 or len(self.sets) > 1


def _side_of(over: Overlay, source: bool) -> _OverlaySide:
    """The source side of an overlay, or its destination side."""
    if source:
        return _OverlaySide(over.source, over.keys)
    return _OverlaySide(over.target, over.goals)


def _list_members(overlays: Sequence[Overlay], source: bool, mesh: Mesh, wanted: Ints) -> Members:
    """The mesh positions, at the source or at the destination, that hold each of the wanted (sorted) codes of units."""
    # A dimension that all ranks hold whole has the digit 0 in every code. Such dimensions are left out: templates that
    # differ only in them share one result.
    divided = tuple(over for over in overlays if _side_of(over, source).is_divided)
    return _find_members(divided, source, mesh, wanted.tobytes())


@memo()
def _find_members(
    overlays: tuple[Overlay, ...], source: bool, mesh: Mesh, wanted: bytes
) -> Members:
    """The positions that hold each wanted code. A code has a digit per overlay, the number of a set of parts: a
    position that holds one of these parts in every dimension holds the code."""
    position = np.arange(mesh.size)
    code = np.zeros(mesh.size, np.int64)
    for over in overlays:
        held, sets = _side_of(over, source)
        part_of = held.by_rank(mesh)
        part = part_of[position]
        # A position whose part is in several sets gets a row for each of them.
        if max(map(len, sets), default=1) > 1:
            owner, digit = _spread_parts(sets, part)
            position = position[owner]
            code = code[owner]
        else:
            # Parts are disjoint, and set i is part i alone.
            digit = part
        code = code * len(sets) + digit
    return _group_by_code(np.frombuffer(wanted, np.int64), code, position)


def _spread_parts(sets: Parts, part: Ints) -> tuple[Ints, Ints]:
    """Two arrays, for all sets that contain each part: the index of the part in `part`, and the set's number."""
    sorted_parts, set_numbers = _list_sets(sets)
    begin = sorted_parts.searchsorted(part, "left")
    end = sorted_parts.searchsorted(part, "right")
    row, owner = ranges(begin, end)
    return owner, set_numbers[row]


def _group_by_code(wanted: Ints, code: Ints, position: Ints) -> Members:
    """The positions of each wanted code, ascending; other codes are left out."""
    group = wanted.searchsorted(code)
    is_wanted = group < len(wanted)
    # A code above all wanted ones has no group to compare it with.
    is_wanted[is_wanted] = wanted[group[is_wanted]] == code[is_wanted]
    group = group[is_wanted]
    position = position[is_wanted]
    order = np.lexsort((position, group))
    group = group[order]
    position = position[order]
    numbers = np.arange(len(wanted) + 1)
    first = np.searchsorted(group, numbers)
    return _intern(first.tobytes(), position.tobytes())


@memo()
def _intern(first: bytes, position: bytes) -> Members:
    """The Members with these columns; equal ones are one object."""
    return Members(np.frombuffer(first, np.int64), np.frombuffer(position, np.int64))


def _list_sets(sets: Parts) -> tuple[Ints, Ints]:
    """Two arrays, sorted together: every part of every set, and the number of that set."""
    pairs = []
    for number, parts in enumerate(sets):
        pairs += [(part, number) for part in parts]
    pairs.sort()
    table = np.array(pairs, np.int64)
    part, number_of = table.reshape(-1, 2).T
    return part, number_of


def _order_units(overlays: Sequence[Overlay], units: _Units) -> Ints:
    """The number of each unit, counted in the order in which units are sent: by where they start in the tensor, then in
    the destination's array. Units that share both starts go by their size."""
    sources = []
    targets = []
    for over, pair in zip(overlays, units.pairs.T, strict=True):
        first_row = over.first[pair]
        sources.append(over.start[first_row])
        # Column 0: the start in the first destination part that has these positions.
        targets.append(over.dst[first_row, 0])
    # lexsort's last key counts most: the first dimension's start in the tensor, only then the rest.
    keys = [*sources, *targets, units.size]
    keys.reverse()
    order = np.lexsort(keys)
    return np.argsort(order)


def unit_addends(t: Template) -> Ints:
    """Return an array with the number of the partial value to which each unit (elements that move together) belongs.
    All numbers are 0 if the move does not reduce."""
    if not t.reduction.folded:
        return np.zeros_like(t.unit_size)
    # The first overlay is the one of the folded addends: its positions are their numbers.
    over = t.overlays[0]
    pair = t.unit_pairs[:, 0]
    row = over.first[pair]
    return over.start[row]
