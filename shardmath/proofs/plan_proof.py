"""Proof: that a plan's tables do what its layouts ask for, without expanding them.

What is read is what `transfers` expands: names, units, rows, sets of ranks, blocks, lines and cuts.
Once these are tables at all (`shapes`) and well formed (`tables`):

1. **Tensors** are in one group of batches each, as `batches` says.
2. **Ends**: all holders of a line hold the units of its rows, all receivers of a block want them.
3. **Once**: no receiver has an element from two rows, and where any one addend may receive, all
   replicas agree on it.
4. **Counting**: as many elements arrive everywhere as there are cells, so every cell is reached.

The cost is that of the tables: rows, batches and distinct sets of ranks, not pairs of ranks.

>>> from dataclasses import replace
>>> from shardmath.layouts.layout import Layout
>>> from shardmath.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> p = plan(Layout((4,), Mesh(tp=2), "(tp n)"), Layout((4,), Mesh(ranks=[2]), "n"))
>>> prove(p)
>>> prove(replace(p, lines=replace(p.lines, cuts=p.lines.cuts * 0)))
Traceback (most recent call last):
shardmath.PlanError: line 0, of ranks (0,), is not cut from its first byte to its last; make the plan anew
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from shardmath.algebra.box import Box, first_gap, from_slices
from shardmath.algebra.mesh import Mesh
from shardmath.algebra.overlay import Parts
from shardmath.base.arrays import Bools, Ints
from shardmath.base.errors import PlanError
from shardmath.base.memo import memo
from shardmath.plans.cover import cells_held
from shardmath.plans.demands import Batch, Demands, Ranks
from shardmath.plans.pieces import expand, unit_boxes
from shardmath.plans.plan import Plan
from shardmath.plans.template import Template
from shardmath.proofs.batches import check_batches
from shardmath.proofs.shapes import check_plan_shapes, require
from shardmath.proofs.tables import check_lines, check_template

__all__ = ["prove"]


def prove(p: Plan) -> None:
    """Raise PlanError unless the tables of a plan (not an adjoint) do what its layouts ask for."""
    check_plan_shapes(p)
    groups = check_batches(p)
    proved: set[int] = set()
    templates = {id(batch.template): batch.template for batch in p.batches}
    for t in templates.values():
        check_template(t, proved)
    check_lines(p.lines, p.batches)
    places = _Places(p.lines.sets)
    _check_ends(p, places)
    _check_once(p, places)
    _check_complete(p, groups, places)


# Ends


class _Places:
    """The positions of sets of ranks in meshes, each found once; -1 for strangers."""

    def __init__(self, sets: Sequence[Ranks]) -> None:
        self._sets = sets
        self._known: dict[tuple[Mesh, int], Ints] = {}

    def of(self, mesh: Mesh, number: int) -> Ints:
        """The positions of a set's ranks in the mesh."""
        key = mesh, number
        if key not in self._known:
            ranks = self._sets[number]
            at = [mesh.position(rank) if rank in mesh else -1 for rank in ranks]
            self._known[key] = np.array(at, np.int64)
        return self._known[key]


class _End(NamedTuple):
    """One end of a template, dimension by dimension.

    `sets[d]` are sets of parts, `held[d]` the part that each position holds, `number[:, d]` the set
    of each unit. Units of one `code` have the same sets.
    """

    sets: list[Parts]
    held: list[Ints]
    number: Ints
    code: Ints

    def has(self, unit: int, at: Ints) -> Bools:
        """Whether positions have the unit's part in every dimension."""
        out = at >= 0
        for sets, held, n in zip(self.sets, self.held, self.number[unit].tolist(), strict=True):
            parts = sets[n]
            # Most sets are of one part, and comparing is far quicker than isin.
            out &= held[at] == parts[0] if len(parts) == 1 else np.isin(held[at], parts)
        return out


@memo()
def _find_end(t: Template, source: bool) -> _End:
    """The source end of a template, or its destination end."""
    mesh = t.src.mesh if source else t.dst.mesh
    number = np.zeros_like(t.unit_pairs)
    code = np.zeros(len(t.unit_pairs), np.int64)
    end = _End([], [], number, code)
    for d, over in enumerate(t.overlays):
        sets, partition, of_pair = over.goals, over.target, over.pair_goal
        if source:
            sets, partition, of_pair = over.keys, over.source, over.pair_key
        end.sets.append(sets)
        end.held.append(partition.by_rank(mesh))
        number[:, d] = of_pair[t.unit_pairs[:, d]]
        # Numbers of all dimensions as digits of one number.
        code *= len(sets)
        code += number[:, d]
    return end


def _list_sets_of_rows(on: Demands) -> tuple[Ints, Ints]:
    """By row, the numbers of the sets of its holders and of its receivers."""
    block = np.repeat(np.arange(len(on.receivers)), np.diff(on.row_first))
    holders = np.repeat(on.holders, np.diff(on.first))
    return holders[block], on.receivers[block]


def _check_ends(p: Plan, places: _Places) -> None:
    """Every holder of a row's line has its unit, and every receiver wants it."""
    holders, receivers = _list_sets_of_rows(p.lines)
    for source, sets in ((True, holders), (False, receivers)):
        for row in _list_distinct_rows(p, sets, source):
            _check_end(p, places, row, int(sets[row]), source)


def _list_distinct_rows(p: Plan, sets: Ints, source: bool) -> list[int]:
    """One row of all that ask the same: whether a set of ranks of a mesh has a unit's parts."""
    number: dict[tuple[Template, Mesh], int] = {}
    of_batch = []
    for batch in p.batches:
        key = batch.template, batch.src if source else batch.dst
        of_batch.append(number.setdefault(key, len(number)))
    end = np.array(of_batch, np.int64)[p.lines.batch]
    # All codes end to end: those of end i begin at first[i].
    codes = [_find_end(t, source).code for t, _ in number]
    first = np.cumsum([0, *map(len, codes)])
    joined = np.concatenate([np.zeros(0, np.int64), *codes])
    code = joined[first[end] + p.lines.unit]
    # Rows that ask the same stand together in this order; the first of each are taken.
    order = np.lexsort((sets, code, end))
    is_new = np.zeros(len(order), bool)
    for column in (sets, code, end):
        is_new |= np.diff(column[order], prepend=-1) != 0
    rows: list[int] = order[is_new].tolist()
    return rows


def _check_end(p: Plan, places: _Places, row: int, number: int, source: bool) -> None:
    """A set of ranks has the unit of a row."""
    batch, unit = _batch_of(p, row), int(p.lines.unit[row])
    mesh = batch.src if source else batch.dst
    has = _find_end(batch.template, source).has(unit, places.of(mesh, number))
    if has.all():
        return
    rank = p.lines.sets[number][int(np.argmin(has))]
    does, where = ("send", "source") if source else ("receive", "destination")
    what = f"tensor {batch.names[0]!r}: rank {rank} is to {does} element {_element_of(p, row)}"
    require(False, f"{what}, which it does not hold at the {where}")


def _batch_of(p: Plan, row: int) -> Batch:
    """The batch of a row."""
    return p.batches[int(p.lines.batch[row])]


def _element_of(p: Plan, row: int) -> tuple[int, ...]:
    """The first element of a row."""
    t, unit, at = _batch_of(p, row).template, int(p.lines.unit[row]), int(p.lines.lo[row])
    boxes, sizes, ends = unit_boxes(t, unit)
    b = bisect.bisect_right(ends, at)
    before = ends[b - 1] if b else 0
    # A unit without dimensions has one element, and unravel_index refuses an empty shape.
    inside = np.unravel_index(at - before, sizes[b]) if sizes[b] else ()
    element = []
    for over, r, i in zip(t.overlays, boxes[b], inside, strict=True):
        element.append(int(over.start[r]) + int(i))
    return tuple(element)[t.hidden :]


# Once


def _check_once(p: Plan, places: _Places) -> None:
    """No receiver has elements from two rows, and all receivers of an element are of one addend."""
    on = p.lines
    _, asking = _list_sets_of_rows(on)
    # Rows of one unit stand together, by their elements. Two that follow each other have the same
    # elements, or none in common, or are refused.
    order = np.lexsort((asking, on.lo, on.unit, on.batch))
    batch, unit, lo, hi = (column[order] for column in (on.batch, on.unit, on.lo, on.hi))
    is_new_unit = (np.diff(batch, prepend=-1) != 0) | (np.diff(unit, prepend=-1) != 0)
    is_apart, is_same = np.ones(len(lo), bool), np.zeros(len(lo), bool)
    is_apart[1:] = lo[1:] >= hi[:-1]
    is_same[1:] = (lo[1:] == lo[:-1]) & (hi[1:] == hi[:-1])
    for row in order[~(is_new_unit | is_apart | is_same)].tolist():
        what = f"tensor {_batch_of(p, row).names[0]!r}: element {_element_of(p, row)}"
        require(False, f"{what} is in two rows that are not alike")
    first = np.flatnonzero(is_new_unit | ~is_same)
    for rows in _group_rows(p, order, first, asking):
        _check_apart(p, places, rows, asking[rows].tolist())


def _group_rows(p: Plan, order: Ints, first: Ints, asking: Ints) -> Iterator[Ints]:
    """The rows of the same elements, one group of all that are asked for by the same sets.

    Groups follow each other in `order` and begin at `first`. Left out are those in which nothing
    can be wrong: of one row, where the destination chooses no addend.
    """
    rules: list[object] = []
    for b in p.batches:
        rules.append((b.template, b.dst) if b.template.reduction.chosen else None)
    number = {key: n for n, key in enumerate(dict.fromkeys([None, *rules]))}
    rule = np.array([number[key] for key in rules], np.int64)[p.lines.batch]
    count = np.diff(np.append(first, len(order)))
    for k in np.unique(count).tolist():
        # Groups of k rows each as a table, whose rows numpy can tell apart.
        groups = order[first[count == k][:, None] + np.arange(k)]
        groups = groups[(rule[groups[:, 0]] > 0) | (k > 1)]
        asked = np.hstack((rule[groups[:, :1]], asking[groups]))
        _, some = np.unique(asked, axis=0, return_index=True)
        yield from groups[some]


def _check_apart(p: Plan, places: _Places, rows: Ints, sets: list[int]) -> None:
    """Sets that receive the same elements are disjoint.

    Where any one addend may receive, they are of one.
    """
    batch, at = _batch_of(p, int(rows[0])), _element_of(p, int(rows[0]))
    what = f"tensor {batch.names[0]!r}:"
    times = Counter(rank for n in sets for rank in p.lines.sets[n])
    for rank, n in times.items():
        if n > 1:
            twice = f"{what} rank {rank} receives element {at} twice"
            raise PlanError(f"{twice}; it is to be received exactly once")
    t = batch.template
    addend = t.dst.mesh.coordinate(t.reduction.chosen)
    found: set[int] = set()
    for n in sets:
        found.update(addend[places.of(batch.dst, n)].tolist())
    if len(found) > 1:
        a, b, *_ = sorted(found)
        where = f"addend {a} of some replicas and to addend {b} of others"
        raise PlanError(f"{what} element {at} goes to {where}; replicas have to stay equal")


# Counting


def _check_complete(p: Plan, groups: Sequence[Sequence[Batch]], places: _Places) -> None:
    """As many elements arrive everywhere, of every tensor and addend, as there are cells."""
    arrive = dict(zip(map(id, p.batches), _count_arrivals(p, places), strict=True))
    for group in groups:
        windows: dict[int, list[Batch]] = {}
        for batch in group:
            windows.setdefault(batch.target, []).append(batch)
        for batches in windows.values():
            first = batches[0]
            alike = all(batch.dst.ranks == first.dst.ranks for batch in batches)
            what = f"tensor {first.names[0]!r} arrives in one window in several orders of ranks"
            require(alike, what)
            total = np.zeros(first.dst.size, np.int64)
            for batch in batches:
                total += arrive[id(batch)]
            _check_count(p, batches, total)


def _count_arrivals(p: Plan, places: _Places) -> Iterator[Ints]:
    """By batch, how many elements each position of its destination gets."""
    on = p.lines
    order = np.argsort(on.batch, kind="stable")
    _, receivers = _list_sets_of_rows(on)
    asking, elements = receivers[order], (on.hi - on.lo)[order]
    bounds = np.searchsorted(on.batch[order], np.arange(len(p.batches) + 1)).tolist()
    # Tensors of one kind are many batches that ask the same.
    known: dict[object, Ints] = {}
    for batch, (a, b) in zip(p.batches, itertools.pairwise(bounds), strict=True):
        sets, sizes = asking[a:b], elements[a:b]
        key = batch.dst, sets.tobytes(), sizes.tobytes()
        if key not in known:
            arrive = np.zeros(batch.dst.size, np.int64)
            for n, size in zip(sets.tolist(), sizes.tolist(), strict=True):
                arrive[places.of(batch.dst, n)] += size
            known[key] = arrive
        yield known[key]


@memo()
def _ask(t: Template) -> tuple[Ints, Ints]:
    """By position of the destination: its group, of which one receives for all, and the elements it
    asks for."""
    mesh = t.dst.mesh
    group = mesh.coordinate(axis for axis in mesh.shape if axis not in t.reduction.chosen)
    return group, cells_held(t.dst) * t.reduction.addends


def _check_count(p: Plan, batches: Sequence[Batch], arrive: Ints) -> None:
    """As many elements arrive at each position as it asks for."""
    t = batches[0].template
    group, asked = _ask(t)
    if t.reduction.chosen:
        together = np.zeros_like(arrive)
        np.add.at(together, group, arrive)
        arrive = together[group]
    for position in np.flatnonzero(arrive != asked).tolist():
        members = np.flatnonzero(group == group[position])
        _raise_missing(p, batches, set(members.tolist()), position)


def _raise_missing(p: Plan, batches: Sequence[Batch], group: set[int], position: int) -> NoReturn:
    """Raise PlanError for the first element that does not arrive at a position, or at any of its
    group."""
    first = batches[0]
    t = first.template
    boxes = _list_boxes(p, batches, group)
    held = [[(g, g + n) for _, g, n in runs.segments] for runs in t.dst.runs(position)]
    addends = t.reduction.addends
    for addend in range(addends):
        gap = first_gap(held, [box for at, box in boxes if at == addend])
        if gap is not None:
            break
    what = f"tensor {first.names[0]!r}: rank {first.dst.ranks[position]}"
    if addends > 1:
        what += f", addend {addend}"
    raise PlanError(f"{what} never receives element {gap}; it is to be received exactly once")


def _list_boxes(p: Plan, batches: Sequence[Batch], group: set[int]) -> list[tuple[int, Box]]:
    """(addend, global box) of all that arrives at positions of a group."""
    on = p.lines
    mine = set(map(id, batches))
    holders, receivers = _list_sets_of_rows(on)
    boxes: list[tuple[int, Box]] = []
    for row in range(len(on.batch)):
        batch = _batch_of(p, row)
        if id(batch) not in mine:
            continue
        there = [batch.dst.position(rank) for rank in on.sets[receivers[row]]]
        sender = batch.src.position(on.sets[holders[row]][0])
        unit, lo, hi = int(on.unit[row]), int(on.lo[row]), int(on.hi[row])
        for at in group.intersection(there):
            for piece in expand(batch.template, unit, sender, at, lo, hi):
                boxes.append((piece.addend, from_slices(piece.whole)))
    return boxes
