"""Templates: checks that the rows and units that a plan's tensors share are well formed.

1. **Rows** of a dimension lie inside what every part of their key and goal holds, at the place they
   give, and no two share a position. So boxes, which are products of rows, are right on
   both sides and disjoint.
2. **Units** are distinct products of pairs of rows, so they are disjoint too.
3. At either **end** a position has a unit if it holds the unit's part in every dimension.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.plans.reduction import Reduction
>>> from shardmath.plans.template import make_template
>>> t = make_template(Layout((4,), Mesh(), "n"), Layout((4,), Mesh(), "n"), Reduction())
>>> from dataclasses import replace
>>> check_template(replace(t, unit_size=t.unit_size + 1), set())
Traceback (most recent call last):
shardmath.PlanError: float32[4] n on one rank to float32[4] n on one rank has units of other sizes than their \
rows; make the plan again
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, lengths
from shardmath.base.memo import memo
from shardmath.base.text import plural
from shardmath.layouts.algebra.overlay import Overlay, Parts
from shardmath.layouts.algebra.partition import Partition, partition
from shardmath.plans.template import Template, hidden_pairs
from shardmath.proofs.shapes import check_integers, require

__all__ = ["End", "check_template", "find_end"]


def check_template(t: Template, known: set[int]) -> None:
    """Raise PlanError unless the tables in `t`, which say what moves between which mesh positions, fit its layouts.
    `known` has the ids of Overlays that need no further proof; those proved here are added to it."""
    check_integers(t)
    what = f"{t.src} to {t.dst}"
    expected = _list_partitions(t)
    count = len(t.overlays)
    complete = count == len(expected)
    require(complete, f"{what} has {plural(count, 'dimension')}, not {len(expected)}")
    for d, over in enumerate(t.overlays):
        # Hidden dimensions, of addends, come first, and have negative numbers.
        where = f"{what}: dimension {d - t.hidden}"
        source, target = expected[d]
        same = _is_same(over.source, source) and _is_same(over.target, target)
        require(same, f"{where} is divided in another way")
        if id(over) not in known:
            known.add(id(over))
            _check_pairs(over, where)
            _check_rows(over, where)
    _check_units(t, what)


def _list_partitions(t: Template) -> list[tuple[Partition, Partition]]:
    """By dimension, hidden ones first, how the layouts divide it at the source and at the destination."""
    pairs = list(hidden_pairs(t.src, t.reduction))
    for a, b in zip(t.src.dims, t.dst.dims, strict=True):
        source = partition(a)
        target = partition(b)
        pairs.append((source, target))
    return pairs


def _is_same(a: Partition, b: Partition) -> bool:
    """Whether two partitions are equal."""
    if a is b:
        return True
    return a.axes == b.axes and a.parts == b.parts and np.array_equal(a.cell, b.cell)


def _check_pairs(over: Overlay, what: str) -> None:
    """Check that pairs have known keys and goals, and the sizes of their rows."""
    check_integers(over)
    require(_are_filled(over), f"{what} has empty pairs or rows")
    sizes = Offsets(over.first).sums(over.size)
    same = np.array_equal(sizes, over.pair_size)
    require(same, f"{what} has pairs of other sizes than their rows")
    known_keys = _are_known(over.pair_key, len(over.keys))
    known_goals = _are_known(over.pair_goal, len(over.goals))
    known = known_keys and known_goals
    require(known, f"{what} has pairs of unknown keys or goals")


def _are_known(numbers: Ints, count: int) -> bool:
    """Whether all numbers are from 0 to count - 1."""
    known = (numbers >= 0) & (numbers < count)
    return bool(known.all())


def _are_filled(over: Overlay) -> bool:
    """Whether the columns of pairs and of rows have one length each, and no pair or row is empty."""
    pairs = len(over.pair_key)
    rows = len(over.start)
    of_pairs = over.pair_goal, over.pair_size
    of_rows = over.size, over.src, over.dst
    if any(len(column) != pairs for column in of_pairs):
        return False
    if any(len(column) != rows for column in of_rows):
        return False
    if len(over.first) != pairs + 1:
        return False
    if over.first[0] != 0 or over.first[-1] != rows:
        return False
    counts = np.diff(over.first)
    no_pair_is_empty = (counts > 0).all()
    no_row_is_empty = (over.size > 0).all()
    return bool(no_pair_is_empty and no_row_is_empty)


def _check_rows(over: Overlay, what: str) -> None:
    """Check that each row is at its local place in every part of its key and its goal, and that rows are disjoint."""
    pairs = Offsets(over.first)
    key_of_row = pairs.spread(over.pair_key)
    goal_of_row = pairs.spread(over.pair_goal)
    _check_side(over, over.keys, key_of_row, over.source, over.src, what)
    _check_side(over, over.goals, goal_of_row, over.target, over.dst, what)
    order = np.argsort(over.start)
    start = over.start[order]
    size = over.size[order]
    end = start + size
    later = start[1:]
    is_apart = end[:-1] <= later
    require(is_apart.all(), f"{what} has rows with positions in common")


def _check_side(
    over: Overlay, sets: Parts, set_numbers: Ints, held: Partition, local_places: Ints, what: str
) -> None:
    """Check that every part of each row's set holds the row, from the local place that the row gives.

    `set_numbers` has the set of each row, `local_places[row, m]` the row's place in member m of the set.
    """
    widest = max(map(len, sets), default=0)
    fits = widest <= local_places.shape[1]
    require(fits, f"{what} has keys or goals of more parts than its rows")
    members = _tabulate(sets, widest)
    segments = _list_segments(held)
    for m in range(widest):
        part = members[set_numbers, m]
        rows = np.flatnonzero(part >= 0)  # those whose set has a member m
        start = over.start[rows]
        size = over.size[rows]
        local = local_places[rows, m]
        inside = _are_inside(segments, part[rows], local, start, size)
        outside = rows[~inside]
        for row in outside.tolist():
            require(False, f"{what}: position {over.start[row]} is not where row {row} says")


def _tabulate(sets: Parts, widest: int) -> Ints:
    """Sets as the rows of a table, filled with -1 behind their last part."""
    shape = len(sets), widest
    members = np.full(shape, -1, np.int64)
    for k, parts in enumerate(sets):
        count = len(parts)
        members[k, :count] = parts
    return members


def _list_segments(held: Partition) -> Ints:
    """(part, local start, start, size) of all segments that parts hold, by part and local start."""
    segments = []
    for part, runs in enumerate(held.parts):
        segments += [(part, *segment) for segment in runs.segments]
    table = np.array(segments, np.int64)
    return table.reshape(-1, 4)


def _are_inside(segments: Ints, part: Ints, local: Ints, start: Ints, size: Ints) -> Bools:
    """For each i, whether part `part[i]` holds, from its local position `local[i]` on and in one segment, the `size[i]`
    positions from `start[i]` on."""
    if not len(segments):
        return np.zeros(len(part), bool)
    owner, lo, segment_start, n = segments.T
    # Each local position by its place among all of them, so that (part, place) is one small number
    # to search for.
    values = np.unique(np.concatenate((lo, local)))
    count = len(values)
    code = owner * count + np.searchsorted(values, lo)
    wanted = part * count + np.searchsorted(values, local)
    segment = np.searchsorted(code, wanted, "right") - 1
    is_known = (segment >= 0) & (owner[segment] == part)
    offset = local - lo[segment]
    fits = offset + size <= n[segment]
    same = segment_start[segment] + offset == start
    out: Bools = is_known & fits & same
    return out


def _check_units(t: Template, what: str) -> None:
    """Check that units are distinct products of pairs."""
    count = len(t.unit_size)
    fits = t.unit_pairs.shape == (count, len(t.overlays))
    require(fits, f"{what} has units of other dimensions")
    size = np.ones(count, np.int64)
    # The pairs of a unit as digits of one number, which tells units apart.
    code = np.zeros(count, np.int64)
    for pair, over in zip(t.unit_pairs.T, t.overlays, strict=True):
        pairs = len(over.pair_size)
        known = _are_known(pair, pairs)
        require(known, f"{what} has units of unknown rows")
        size = size * over.pair_size[pair]
        code = code * pairs + pair
    same = np.array_equal(size, t.unit_size)
    require(same, f"{what} has units of other sizes than their rows")
    distinct = np.unique(code)
    once = len(distinct) == count
    require(once, f"{what} has one unit twice")


# Ends


class End(NamedTuple):
    """Tables that say which mesh positions hold which units (elements that move together), at the source or at the
    destination. Position p holds unit u if, in each dimension d, `held[d][p]` is in set number `set_numbers[u, d]` of
    `sets[d]`.

    `held[d][p]` is the number of a part, and `sets[d]` are sets of such numbers. Units with the same `code` have
    the same sets in every dimension.
    """

    sets: list[Parts]
    held: list[Ints]
    set_numbers: Ints
    code: Ints

    def has(self, units: Ints, at: Ints) -> Bools:
        """Return, for each i, whether mesh position `at[i]` holds unit `units[i]` (elements that move together); False
        if `at[i]` is -1."""
        out: Bools = at >= 0
        for d, (sets, held) in enumerate(zip(self.sets, self.held, strict=True)):
            set_numbers = self.set_numbers[units, d]
            # For -1 this is the last position's part; `out` is False there already.
            part = held[at]
            out &= _are_members(sets, set_numbers, part)
        return out


def _are_members(sets: Parts, set_numbers: Ints, part: Ints) -> Bools:
    """Whether each part is in the set with its number."""
    every = itertools.chain.from_iterable(sets)
    members = np.fromiter(every, np.int64)
    # Most sets are of one part, and comparing is far quicker than isin.
    if all(len(parts) == 1 for parts in sets):
        only = members[set_numbers]
        return np.equal(part, only)
    by_set = Offsets.of_counts(lengths(sets))
    owners = by_set.owners()
    # (set, part) as one number. Members above all parts asked for are left out: their numbers would
    # run into the next set's.
    count = 1 + part.max(initial=-1)
    is_asked = (members >= 0) & (members < count)
    code = owners[is_asked] * count
    code += members[is_asked]
    wanted = set_numbers * count + part
    return (part >= 0) & np.isin(wanted, code)


@memo()
def find_end(t: Template, source: bool) -> End:
    """Return the source end of the template `t` if `source`, otherwise its destination end."""
    mesh = t.src.mesh if source else t.dst.mesh
    set_numbers = np.zeros_like(t.unit_pairs)
    # The numbers of all dimensions as digits of one number.
    code = np.zeros(len(t.unit_pairs), np.int64)
    all_sets = []
    held = []
    for d, over in enumerate(t.overlays):
        divided = over.source if source else over.target
        sets = over.keys if source else over.goals
        of_pair = over.pair_key if source else over.pair_goal
        all_sets.append(sets)
        held.append(divided.by_rank(mesh))
        pair = t.unit_pairs[:, d]
        digit = of_pair[pair]
        set_numbers[:, d] = digit
        code = code * len(sets) + digit
    return End(all_sets, held, set_numbers, code)
