"""Proof: a plan's tables do what its layouts ask for. The tables are read without expanding them.

The proof reads what `transfers` expands: names, units, rows, sets of ranks, blocks, lines and cuts.
Once these have the right types (`shapes`) and are well formed (`templates`, `tables`):

1. **Tensors**: each is in one group of batches, as `batches` checks.
2. **Ends**: all holders of a line hold the units of its rows, all receivers of a block want them.
3. **Once**: no receiver gets an element from two rows; if any one addend may receive, all
   replicas choose the same one.
4. **Counting**: as many elements arrive everywhere as there are cells, so every cell is reached.

The cost grows with the tables: rows, batches and distinct sets of ranks, not pairs of ranks.

>>> from dataclasses import replace
>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> p = plan(Layout((4,), Mesh(tp=2), "(tp n)"), Layout((4,), Mesh(ranks=[2]), "n"))
>>> prove(p)
>>> prove(replace(p, lines=replace(p.lines, cuts=p.lines.cuts * 0)))
Traceback (most recent call last):
shardmath.PlanError: line 0, of ranks (0,), is not cut from its first byte to its last; make the plan again
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, begins, distinct, pick
from shardmath.base.errors import PlanError
from shardmath.base.memo import memo
from shardmath.layouts.algebra.box import Box, first_gap
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.holdings import label
from shardmath.plans.boxes import list_global_boxes
from shardmath.plans.demands import Batch, Demands
from shardmath.plans.plan import Plan
from shardmath.plans.template import Template
from shardmath.plans.uncovered import count_cells
from shardmath.plans.units import unit_boxes
from shardmath.proofs.batches import check_batches
from shardmath.proofs.shapes import check_plan_shapes, require
from shardmath.proofs.tables import Places, check_lines
from shardmath.proofs.templates import check_template, find_end

__all__ = ["prove"]


def prove(plan: Plan) -> None:
    """Raise PlanError unless the byte ranges that `plan` lists in `plan.lines`, with their senders and receivers, are
    those that its layouts ask for. An adjoint plan, which is a Transposed, cannot be passed."""
    check_plan_shapes(plan)
    groups = check_batches(plan)
    proved: set[int] = set()
    templates = {id(batch.template): batch.template for batch in plan.batches}
    for t in templates.values():
        check_template(t, proved)
    check_lines(plan.lines, plan.batches)
    places = Places(plan.lines.sets)
    _check_ends(plan, places)
    _check_once(plan, places)
    _check_complete(plan, groups, places)


# Ends


def _list_sets_of_rows(demands: Demands) -> tuple[Ints, Ints]:
    """By row, the numbers of the sets of its holders and of its receivers."""
    holders = demands.blocks.spread(demands.holders)
    return demands.rows.spread(holders), demands.rows.spread(demands.receivers)


def _check_ends(plan: Plan, places: Places) -> None:
    """Check that every holder of a row's line has the row's unit, and that every receiver wants it."""
    holders, receivers = _list_sets_of_rows(plan.lines)
    for rows in _list_distinct_rows(plan, holders, source=True):
        _check_end(plan, places, rows, holders[rows], source=True)
    for rows in _list_distinct_rows(plan, receivers, source=False):
        _check_end(plan, places, rows, receivers[rows], source=False)


def _list_distinct_rows(plan: Plan, sets: Ints, *, source: bool) -> list[Ints]:
    """Rows without repetitions: of the rows that need the same check, the first.

    Rows need the same check if the same set of ranks of the same mesh must have the same parts. Each array
    holds the rows of one template and mesh.
    """
    # An end is the source's or the destination's mesh, with a template; ends are numbered as they are found.
    number_of_end: dict[tuple[Template, Mesh], int] = {}
    numbers = []
    for batch in plan.batches:
        mesh = batch.src if source else batch.dst
        key = batch.template, mesh
        numbers.append(number_of_end.setdefault(key, len(number_of_end)))
    end_of_batch = np.array(numbers, np.int64)
    end = end_of_batch[plan.lines.batch]
    # Units of a template that are the same parts at this end have one code.
    codes = [find_end(t, source).code for t, _ in number_of_end]
    code = pick(codes, end, plan.lines.unit)
    # In this order, rows that need the same check are adjacent; the first of each is taken.
    order = np.lexsort((sets, code, end))
    is_new = _find_new(sets[order], code[order], end[order])
    rows = order[is_new]
    if not len(rows):
        return []
    first = begins(end[rows])
    return np.split(rows, first[1:])


def _find_new(*columns: Ints) -> Bools:
    """Whether each row differs in some column from the row before it; True for the first, since no number is -1."""
    is_new = np.zeros(len(columns[0]), bool)
    for column in columns:
        is_new |= np.diff(column, prepend=-1) != 0
    return is_new


def _check_end(plan: Plan, places: Places, rows: Ints, sets: Ints, *, source: bool) -> None:
    """Check that the sets of ranks have the units of their rows; all rows are of one template and mesh."""
    first = int(rows[0])
    batch = _batch_of(plan, first)
    mesh = batch.src if source else batch.dst
    positions, owner = places.within(mesh).of(sets)
    end = find_end(batch.template, source)
    units = plan.lines.unit[rows[owner]]
    has = end.has(units, positions)
    if has.all():
        return
    stranger = int(np.argmin(has))
    _raise_stranger(plan, rows, sets, owner, stranger, source)


def _raise_stranger(
    plan: Plan, rows: Ints, sets: Ints, owner: Ints, member: int, source: bool
) -> NoReturn:
    """Raise PlanError for a member, numbered through all sets end to end, which lacks the unit of its row."""
    i = int(owner[member])
    ranks = plan.lines.sets[int(sets[i])]
    # Members stand set by set, so the index in the set counts from the set's first member.
    rank = ranks[member - int(np.searchsorted(owner, i))]
    row = int(rows[i])
    name = _batch_of(plan, row).names[0]
    does, where = ("send", "source") if source else ("receive", "destination")
    what = f"{label(name)}: rank {rank} has to {does} element {_element_of(plan, row)}"
    raise PlanError(f"{what}, which it does not hold at the {where}; make the plan again")


def _batch_of(plan: Plan, row: int) -> Batch:
    """The batch of a row."""
    return plan.batches[int(plan.lines.batch[row])]


def _element_of(plan: Plan, row: int) -> tuple[int, ...]:
    """The first element of a row."""
    t = _batch_of(plan, row).template
    unit = int(plan.lines.unit[row])
    at = int(plan.lines.lo[row])
    boxes, sizes, ends = unit_boxes(t, unit)
    box = bisect.bisect_right(ends, at)
    overlay_rows = boxes[box]  # one per dimension, where the box begins
    shape = sizes[box]
    box_begin = ends[box - 1] if box else 0
    # A unit without dimensions has one element, and unravel_index refuses an empty shape.
    inside = np.unravel_index(at - box_begin, shape) if shape else ()
    element = []
    for over, r, i in zip(t.overlays, overlay_rows, inside, strict=True):
        start = int(over.start[r])
        element.append(start + int(i))
    return tuple(element[t.hidden :])


# Once


def _check_once(plan: Plan, places: Places) -> None:
    """Check that no receiver gets an element from two rows, and that all its receivers have one addend."""
    demands = plan.lines
    _, receiver_sets = _list_sets_of_rows(demands)
    # In this order, the rows of one unit are adjacent and ascend by their elements.
    order = np.lexsort((receiver_sets, demands.lo, demands.unit, demands.batch))
    first = _find_groups(plan, order)
    for rows in _group_rows(plan, order, first, receiver_sets):
        _check_apart(plan, places, rows, receiver_sets[rows].tolist())


def _find_groups(plan: Plan, order: Ints) -> Ints:
    """The places in `order` where rows of other elements begin. `order` has the rows by batch, unit and first element.

    Raises PlanError if two adjacent rows share some elements but not all. Each row is elements lo..hi-1 of a unit.
    """
    # The table of lines, which also has their rows.
    demands = plan.lines
    lo = demands.lo[order]
    hi = demands.hi[order]
    batch = demands.batch[order]
    unit = demands.unit[order]
    is_new = _find_new(batch, unit)
    is_same = ~_find_new(batch, unit, lo, hi)
    meets = ~is_new
    meets[1:] &= lo[1:] < hi[:-1]
    # Raises at the first of these rows, if there are any.
    for row in order[meets & ~is_same].tolist():
        what = f"{label(_batch_of(plan, row).names[0])}: element {_element_of(plan, row)}"
        require(False, f"{what} is in two rows with different elements")
    return np.flatnonzero(~is_same)


def _group_rows(plan: Plan, order: Ints, first: Ints, receivers: Ints) -> Iterator[Ints]:
    """Groups of rows with the same elements; of the groups that the same sets ask for, one.

    The groups are adjacent in `order` and begin at `first`; row r is for set number `receivers[r]`. A group of
    one row is left out if the destination chooses no addend: nothing can be wrong in it.
    """
    choice = _number_choices(plan)[plan.lines.batch]
    ends = np.append(first, len(order))
    count = Offsets(ends).counts()
    for k in np.unique(count).tolist():
        # The groups of k rows as the rows of a table, so that numpy can compare them.
        begin = first[count == k]
        places = begin[:, None] + np.arange(k)
        groups = order[places]
        chooses = choice[groups[:, 0]] > 0
        groups = groups[chooses | (k > 1)]
        heads = groups[:, :1]
        # By group: the choice, and the sets that ask for its rows.
        keys = np.hstack((choice[heads], receivers[groups]))
        _, distinct_groups = np.unique(keys, axis=0, return_index=True)
        yield from groups[distinct_groups]


def _number_choices(plan: Plan) -> Ints:
    """By batch, the number of its template and mesh, from 1, if the destination chooses an addend; else 0."""
    number: dict[tuple[Template, Mesh], int] = {}
    out = np.zeros(len(plan.batches), np.int64)
    for i, batch in enumerate(plan.batches):
        if batch.template.reduction.chosen:
            key = batch.template, batch.dst
            out[i] = number.setdefault(key, len(number) + 1)
    return out


def _check_apart(plan: Plan, places: Places, rows: Ints, sets: list[int]) -> None:
    """Check that sets that receive the same elements are disjoint, and have one addend if one is chosen."""
    row = int(rows[0])
    batch = _batch_of(plan, row)
    element = _element_of(plan, row)
    what = f"{label(batch.names[0])}:"
    times: Counter[int] = Counter()
    for number in sets:
        times.update(plan.lines.sets[number])
    for rank, count in times.items():
        if count > 1:
            twice = f"{what} rank {rank} receives element {element} twice"
            raise PlanError(f"{twice} instead of once; make the plan again")
    t = batch.template
    # If none is chosen, all positions have addend 0.
    addend_of = t.dst.mesh.coordinate(t.reduction.chosen)
    # All receivers are in the mesh, as `_check_ends` has shown: no position is -1.
    positions, _ = places.within(batch.dst).of(np.array(sets, np.int64))
    addends = set(addend_of[positions].tolist())
    if len(addends) > 1:
        a, b, *_ = sorted(addends)
        where = f"addend {a} of some replicas and to addend {b} of others"
        raise PlanError(f"{what} element {element} goes to {where}; make the plan again")


# Counting


def _check_complete(plan: Plan, groups: Sequence[Sequence[Batch]], places: Places) -> None:
    """Check that as many elements arrive at every position, of every tensor and addend, as it has cells."""
    ids = map(id, plan.batches)
    arrivals = dict(zip(ids, _count_arrivals(plan, places), strict=True))
    for group in groups:
        windows: dict[int, list[Batch]] = {}
        for batch in group:
            windows.setdefault(batch.target, []).append(batch)
        for batches in windows.values():
            _check_ranks(batches)
            total = np.zeros(batches[0].dst.size, np.int64)
            for batch in batches:
                total += arrivals[id(batch)]
            _check_count(plan, batches, total)


def _check_ranks(batches: Sequence[Batch]) -> None:
    """Check that the batches of one window go to the same ranks in the same order."""
    first = batches[0]
    same = all(batch.dst.ranks == first.dst.ranks for batch in batches)
    name = first.names[0]
    require(same, f"{label(name)} arrives in one window in several orders of ranks")


def _count_arrivals(plan: Plan, places: Places) -> Iterator[Ints]:
    """By batch, how many elements each position of its destination receives."""
    _, receivers = _list_sets_of_rows(plan.lines)
    elements = plan.lines.hi - plan.lines.lo
    # Tensors of one kind are many batches that receive the same.
    known: dict[object, Ints] = {}
    for batch, rows in zip(plan.batches, _list_rows(plan), strict=True):
        sets = receivers[rows]
        sizes = elements[rows]
        key = batch.dst, sets.tobytes(), sizes.tobytes()
        if key not in known:
            known[key] = _sum_by_position(batch.dst, places, sets, sizes)
        yield known[key]


def _list_rows(plan: Plan) -> Iterator[Ints]:
    """The rows of each batch, batch by batch."""
    batch_of_row = plan.lines.batch
    order = np.argsort(batch_of_row, kind="stable")
    numbers = np.arange(len(plan.batches) + 1)
    bounds = np.searchsorted(batch_of_row[order], numbers)
    for begin, end in itertools.pairwise(bounds.tolist()):
        yield order[begin:end]


def _sum_by_position(mesh: Mesh, places: Places, sets: Ints, sizes: Ints) -> Ints:
    """By position of the mesh, the total size of the rows that go to sets that contain it."""
    numbers, which = distinct(sets)
    of_set = np.zeros(len(numbers), np.int64)
    np.add.at(of_set, which, sizes)
    # All receivers are in the mesh, as `_check_ends` has shown: no position is -1.
    positions, owner = places.within(mesh).of(numbers)
    total = np.zeros(mesh.size, np.int64)
    np.add.at(total, positions, of_set[owner])
    return total


@memo()
def _count_needed(t: Template) -> tuple[Ints, Ints]:
    """By position of the destination: its group, of which one member receives, and the elements that it needs."""
    mesh = t.dst.mesh
    others = [axis for axis in mesh.shape if axis not in t.reduction.chosen]
    group = mesh.coordinate(others)
    needed = count_cells(t.dst) * t.reduction.addends
    return group, needed


def _check_count(plan: Plan, batches: Sequence[Batch], arriving: Ints) -> None:
    """Check that as many elements arrive at each position as it needs; if the destination's addends are chosen, at all
    positions of its group together."""
    t = batches[0].template
    group, needed = _count_needed(t)
    if t.reduction.chosen:
        by_group = np.zeros_like(arriving)
        np.add.at(by_group, group, arriving)
        arriving = by_group[group]
    for position in np.flatnonzero(arriving != needed).tolist():
        members = np.flatnonzero(group == group[position])
        _raise_missing(plan, batches, set(members.tolist()), position)


def _raise_missing(
    plan: Plan, batches: Sequence[Batch], group: set[int], position: int
) -> NoReturn:
    """Raise PlanError for the first element that no position of the group receives."""
    first = batches[0]
    t = first.template
    boxes = _list_boxes(plan, batches, group)
    held = []
    for runs in t.dst.runs(position):
        held.append([(g, g + n) for _, g, n in runs.segments])
    addends = t.reduction.addends
    for addend in range(addends):
        gap = first_gap(held, boxes.get(addend, []))
        if gap is not None:
            break
    what = f"{label(first.names[0])}: rank {first.dst.ranks[position]}"
    if addends > 1:
        what += f", addend {addend}"
    raise PlanError(f"{what} never receives element {gap}; make the plan again")


def _list_boxes(plan: Plan, batches: Sequence[Batch], group: set[int]) -> dict[int, list[Box]]:
    """By addend, the global boxes of everything that these batches bring to positions of a group."""
    demands = plan.lines
    batch_ids = set(map(id, batches))
    holders, receivers = _list_sets_of_rows(demands)
    boxes: dict[int, list[Box]] = {}
    for row in range(len(demands.batch)):
        batch = _batch_of(plan, row)
        if id(batch) not in batch_ids:
            continue
        unit = int(demands.unit[row])
        lo = int(demands.lo[row])
        hi = int(demands.hi[row])
        holder_ranks = demands.sets[holders[row]]
        receiver_ranks = demands.sets[receivers[row]]
        # All holders have the same elements, so that any of them gives the boxes.
        sender = batch.src.position(holder_ranks[0])
        receiver_positions = map(batch.dst.position, receiver_ranks)
        for receiver in group.intersection(receiver_positions):
            row_and_ends = (np.array([i]) for i in (unit, sender, receiver, lo, hi))
            for addend, box in list_global_boxes(batch.template, *row_and_ends):
                of_addend = boxes.setdefault(addend, [])
                of_addend.append(box)
    return boxes
