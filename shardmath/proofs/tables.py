"""Tables: whether a plan's tables are well formed, so that both ends of a pair expand the same
transfers from them.

1. **Rows** of a dimension lie inside what every part of their key and goal holds, at the place they
   say, and no two have a position in common. So boxes, which are products of rows, are right on
   both sides and disjoint.
2. **Units** are distinct products of pairs of rows, so disjoint too.
3. **Lines** are blocks laid end to end, blocks are rows laid end to end, and lines are cut from the
   first byte to the last, where pieces may be cut.

What they say of tensors and ranks is for `proof`.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.algebra.mesh import Mesh
>>> from shardmath.plans.reduction import Reduction
>>> from shardmath.plans.template import template
>>> t = template(Layout((4,), Mesh(), "n"), Layout((4,), Mesh(), "n"), Reduction())
>>> from dataclasses import replace
>>> check_template(replace(t, unit_size=t.unit_size + 1), set())
Traceback (most recent call last):
shardmath.PlanError: float32[4] n on one rank to float32[4] n on one rank has units of other sizes than their \
rows; make the plan anew
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

import numpy as np

from shardmath.algebra.overlay import Overlay, Parts
from shardmath.algebra.partition import Partition, partition
from shardmath.base.arrays import Bools, Ints
from shardmath.plans.demands import Batch, Demands
from shardmath.plans.pieces import legal
from shardmath.plans.template import Template, hidden_pairs, unit_addends
from shardmath.programs.streams import Legs
from shardmath.proofs.shapes import require

__all__ = ["check_lines", "check_numbers_of_sets", "check_template", "find_misfit_of_bands"]


def _check_integers(table: Overlay | Template | Demands) -> None:
    """Tables are of 64-bit integers: no float decides anything, and no sum is cut off."""
    for field in fields(table):
        column = getattr(table, field.name)
        if not isinstance(column, np.ndarray):
            continue
        expected = bool if field.name == "near" else np.int64
        name = f"{type(table).__name__}.{field.name}"
        require(column.dtype == expected, f"{name} is not of 64-bit integers")


# rows and units


def check_template(t: Template, known: set[int]) -> None:
    """Raise PlanError unless rows and units are right; `known` holds the ids of overlays proved
    already."""
    _check_integers(t)
    what = f"{t.src} to {t.dst}"
    expected = list(hidden_pairs(t.src, t.reduction))
    for a, b in zip(t.src.dims, t.dst.dims, strict=True):
        expected.append((partition(a), partition(b)))
    count = len(t.overlays)
    require(count == len(expected), f"{what} has {count} dimensions, not {len(expected)}")
    for d, (over, (source, target)) in enumerate(zip(t.overlays, expected, strict=True)):
        where = f"{what}: dimension {d - t.hidden}"
        same = _is_same(over.source, source) and _is_same(over.target, target)
        require(same, f"{where} is divided in another way")
        if id(over) not in known:
            known.add(id(over))
            _check_pairs(over, where)
            _check_rows(over, where)
    _check_units(t, what)


def _is_same(a: Partition, b: Partition) -> bool:
    """Whether two partitions are equal."""
    if a is b:
        return True
    return a.axes == b.axes and a.parts == b.parts and np.array_equal(a.cell, b.cell)


def _check_pairs(over: Overlay, what: str) -> None:
    """Pairs are of known keys and goals, and rows follow each other in them."""
    _check_integers(over)
    fits = _fits(over) and (np.diff(over.first) > 0).all() and (over.size > 0).all()
    require(fits, f"{what} has empty pairs or rows")
    sizes = over.pair_size
    if len(over.pair_key):  # reduceat refuses an empty list of groups
        sizes = np.add.reduceat(over.size, over.first[:-1])
    same = np.array_equal(sizes, over.pair_size)
    require(same, f"{what} has pairs of other sizes than their rows")
    for sets, number in ((over.keys, over.pair_key), (over.goals, over.pair_goal)):
        known = (number >= 0) & (number < len(sets))
        require(known.all(), f"{what} has pairs of unknown keys or goals")


def _fits(over: Overlay) -> bool:
    """Whether the columns of pairs, and those of rows, are of one length each."""
    pairs, rows = len(over.pair_key), len(over.start)
    if (len(over.pair_goal), len(over.pair_size)) != (pairs, pairs):
        return False
    if (len(over.size), len(over.src), len(over.dst)) != (rows, rows, rows):
        return False
    return len(over.first) == pairs + 1 and (over.first[0], over.first[-1]) == (0, rows)


def _check_rows(over: Overlay, what: str) -> None:
    """Rows are where they say on both sides, and disjoint."""
    pair = np.repeat(np.arange(len(over.pair_key)), np.diff(over.first))
    for sets, number, held, at in (
        (over.keys, over.pair_key, over.source, over.src),
        (over.goals, over.pair_goal, over.target, over.dst),
    ):
        widest = max(map(len, sets), default=0)
        require(widest <= at.shape[1], f"{what} has keys or goals of more parts than its rows")
        wrong = _are_misplaced(sets, number[pair], held, at, over)
        for row in np.flatnonzero(wrong).tolist():
            require(False, f"{what}: position {over.start[row]} is not where row {row} says")
    order = np.argsort(over.start)
    start = over.start[order]
    end = start + over.size[order]
    require((end[:-1] <= start[1:]).all(), f"{what} has rows with positions in common")


def _are_misplaced(sets: Parts, number: Ints, held: Partition, at: Ints, over: Overlay) -> Bools:
    """Whether some part of a row's set does not hold the row at the local start given.

    A set is given by its number.
    """
    # Sets as a table, -1 where a set has no further part.
    widest = max(map(len, sets), default=0)
    members = np.full((len(sets), widest), -1, np.int64)
    for k, parts in enumerate(sets):
        members[k, : len(parts)] = parts
    segments = [(p, lo, g, n) for p, runs in enumerate(held.parts) for lo, g, n in runs.segments]
    table = np.array(segments, np.int64).reshape(-1, 4)
    wrong = np.zeros(len(number), bool)
    for m in range(widest):
        part = members[number, m]
        some = np.flatnonzero(part >= 0)
        local, start, size = at[some, m], over.start[some], over.size[some]
        wrong[some] |= ~_are_inside(table, part[some], local, start, size)
    return wrong


def _are_inside(segments: Ints, part: Ints, local: Ints, start: Ints, size: Ints) -> Bools:
    """Whether positions `local` on of a part are `start` on, within one segment.

    A segment is (part, local start, start, size); segments stand in order of part and local start.
    """
    if not len(segments):
        return np.zeros(len(part), bool)
    owner, lo, g, n = segments.T
    # Places in the order of all values, so that (part, place) is one small number to search for.
    values = np.unique(np.concatenate((lo, local)))
    code = owner * len(values) + np.searchsorted(values, lo)
    wanted = part * len(values) + np.searchsorted(values, local)
    found = np.searchsorted(code, wanted, "right") - 1
    offset = local - lo[found]
    is_inside = (found >= 0) & (owner[found] == part) & (offset + size <= n[found])
    out: Bools = is_inside & (g[found] + offset == start)
    return out


def _check_units(t: Template, what: str) -> None:
    """Units are distinct products of pairs."""
    count = len(t.unit_size)
    size, code = np.ones(count, np.int64), np.zeros(count, np.int64)
    fits = t.unit_pairs.shape == (count, len(t.overlays))
    require(fits, f"{what} has units of other dimensions")
    for pair, over in zip(t.unit_pairs.T, t.overlays, strict=True):
        pairs = len(over.pair_size)
        known = (pair >= 0) & (pair < pairs)
        require(known.all(), f"{what} has units of unknown rows")
        size = size * over.pair_size[pair]
        code = code * pairs + pair
    same = np.array_equal(size, t.unit_size)
    require(same, f"{what} has units of other sizes than their rows")
    require(len(np.unique(code)) == count, f"{what} has one unit twice")


# lines


def check_lines(on: Demands, batches: Sequence[Batch]) -> None:
    """Raise PlanError unless rows make blocks, blocks lines, and lines are cut from end to end."""
    _check_integers(on)
    _check_tables(on)
    _check_numbers(on, batches)
    each, names = _measure_rows(on, batches)
    _require_rows(on, batches, each == on.each, "is not of the bytes of its elements")
    at, nbytes = _lay(each * names, on.row_first)
    _require_rows(on, batches, at == on.at, "does not follow the one before it")
    _require_blocks(on, batches, nbytes == on.nbytes, "is not of the bytes of its rows")
    of_block = np.repeat(on.addend, np.diff(on.row_first))
    of_unit = _pick_by_unit(on, list(map(_list_addends, batches)))
    _require_rows(on, batches, of_block == of_unit, "is not of its block's addend")
    _require_blocks(on, batches, _count_asking(on) == on.count, "counts other receivers")
    start, length = _lay(nbytes * on.count, on.first)
    _require_blocks(on, batches, start == on.start, "does not follow the one before it")
    _check_cuts(on, length)
    for row, place in (*_list_stripes(on, batches), *_list_inner_cuts(on, length)):
        _check_place(on, batches, row, place)


def _require_rows(on: Demands, batches: Sequence[Batch], holds: Bools, what: str) -> None:
    """Raise PlanError, which says `what` is wrong with a row of which tensor, unless all hold."""
    for row in np.flatnonzero(~holds).tolist():
        require(False, f"tensor {batches[int(on.batch[row])].names[0]!r}: row {row} {what}")


def _require_blocks(on: Demands, batches: Sequence[Batch], holds: Bools, what: str) -> None:
    """Raise PlanError, which says `what` is wrong with a block for which ranks, unless all hold."""
    for block in np.flatnonzero(~holds).tolist():
        name = batches[int(on.batch[on.row_first[block]])].names[0]
        ranks = on.sets[on.receivers[block]][:8]
        require(False, f"tensor {name!r}: block {block}, for ranks {ranks}, {what}")


def _require_lines(on: Demands, holds: Bools, what: str) -> None:
    """Raise PlanError, which says `what` is wrong with a line of which ranks, unless all hold."""
    for line in np.flatnonzero(~holds).tolist():
        ranks = on.sets[on.holders[line]][:8]
        require(False, f"line {line}, of ranks {ranks}, {what}")


def _check_tables(on: Demands) -> None:
    """The tables fit each other: lines have blocks, blocks have rows, and a line has cuts."""
    rows = on.batch, on.unit, on.lo, on.hi, on.at, on.each
    blocks = on.receivers, on.addend, on.count, on.nbytes, on.start
    what = "tables of lines are not of one length"
    require(len(on.near) == len(on.holders), what)
    require(_are_owned(on.holders, on.first, blocks), what)
    require(_are_owned(on.receivers, on.row_first, rows), what)
    require(_are_owned(on.holders, on.cut_first, (on.cuts,)), what)


def _are_owned(owners: Ints, first: Ints, owned: Iterable[Ints]) -> bool:
    """Whether each owner i has some of what is owned: items `first[i]..first[i+1]-1` of all
    columns."""
    if len(first) != len(owners) + 1 or first[0] != 0 or (np.diff(first) <= 0).any():
        return False
    return {len(column) for column in owned} == {int(first[-1])}


def check_numbers_of_sets(on: Demands) -> None:
    """Holders and receivers are sets that there are."""
    for column in (on.holders, on.receivers):
        _check_known(column, len(on.sets))


def _check_known(column: Ints, count: int) -> None:
    """Numbers are of `count` sets or batches."""
    known = (column >= 0) & (column < count)
    require(known.all(), "lines are of unknown ranks or tensors")


def _check_numbers(on: Demands, batches: Sequence[Batch]) -> None:
    """Sets are of ascending ranks, and every number is one of something."""
    for ranks in on.sets:
        ascending = ranks and all(map(operator.lt, ranks, ranks[1:]))
        require(ascending, f"ranks {ranks[:8]} are not ascending")
    check_numbers_of_sets(on)
    _check_known(on.batch, len(batches))
    units = [len(batch.template.unit_size) for batch in batches]
    known = (on.unit >= 0) & (on.unit < np.array(units, np.int64)[on.batch])
    _require_rows(on, batches, known, "is of an unknown unit")
    sizes = _pick_by_unit(on, [batch.template.unit_size for batch in batches])
    inside = (on.lo >= 0) & (on.lo < on.hi) & (on.hi <= sizes)
    _require_rows(on, batches, inside, "is not inside its unit")


def _pick_by_unit(on: Demands, columns: Sequence[Ints]) -> Ints:
    """By row, what the column of its batch says of its unit."""
    # All columns end to end: those of batch b begin at first[b].
    first = np.cumsum([0, *map(len, columns)])
    joined = np.concatenate([np.zeros(0, np.int64), *columns])
    out: Ints = joined[first[on.batch] + on.unit]
    return out


def _list_addends(batch: Batch) -> Ints:
    """Of which addend each unit is; 0 where nothing is folded."""
    t = batch.template
    return unit_addends(t) if t.reduction.folded else np.zeros_like(t.unit_size)


def _measure_rows(on: Demands, batches: Sequence[Batch]) -> tuple[Ints, Ints]:
    """By row: bytes of a tensor, and how many tensors."""
    itemsize = np.array([batch.template.src.itemsize for batch in batches], np.int64)
    names = np.array([len(batch.names) for batch in batches], np.int64)
    return (on.hi - on.lo) * itemsize[on.batch], names[on.batch]


def _lay(sizes: Ints, first: Ints) -> tuple[Ints, Ints]:
    """Where each begins when those of one owner are laid end to end, and the length of each
    owner."""
    ends = np.append(0, np.cumsum(sizes))
    begin = ends[first[:-1]]
    return ends[:-1] - np.repeat(begin, np.diff(first)), ends[first[1:]] - begin


def _count_asking(on: Demands) -> Ints:
    """How many receivers of each block are not holders of its line."""
    sets = list(map(frozenset, on.sets))
    holders = np.repeat(on.holders, np.diff(on.first))
    counts = []
    for holding, receiving in zip(holders.tolist(), on.receivers.tolist(), strict=True):
        own = sets[receiving] & sets[holding]
        counts.append(len(sets[receiving]) - len(own))
    return np.array(counts, np.int64)


def _check_cuts(on: Demands, length: Ints) -> None:
    """Every holder has a share, and the shares are the line."""
    count = np.array([len(on.sets[i]) + 1 for i in on.holders.tolist()], np.int64)
    _require_lines(on, count == np.diff(on.cut_first), "is not cut among them")
    begin, end = on.cut_first[:-1], on.cut_first[1:] - 1
    is_whole = (on.cuts[begin] == 0) & (on.cuts[end] == length)
    _require_lines(on, is_whole, "is not cut from its first byte to its last")
    line = np.repeat(np.arange(len(count)), count)
    # A cut that is less than the one before it, of the same line.
    goes_back = (np.diff(on.cuts) < 0) & (np.diff(line) == 0)
    wrong = np.isin(np.arange(len(count)), line[1:][goes_back])
    _require_lines(on, ~wrong, "has cuts that go back")


def _list_stripes(on: Demands, batches: Sequence[Batch]) -> Iterable[tuple[int, int]]:
    """(row, byte of the unit) of all rows that begin inside their units; where others end, these
    begin."""
    places = []
    for row in np.flatnonzero(on.lo).tolist():
        batch = batches[int(on.batch[row])]
        places.append((row, int(on.lo[row]) * batch.template.src.itemsize))
    return places


def _list_inner_cuts(on: Demands, length: Ints) -> Iterable[tuple[int, int]]:
    """(row, byte of the unit) of all cuts inside lines, each once."""
    line = np.repeat(np.arange(len(length)), np.diff(on.cut_first))
    some = np.flatnonzero((on.cuts > 0) & (on.cuts < length[line]))
    # A cut lies in a block, there in one of its copies, and in that in a row, and in one of its
    # tensors.
    block, inside = _find(on.start, on.first, length, line[some], on.cuts[some])
    row, inside = _find(on.at, on.row_first, on.nbytes, block, inside % on.nbytes[block])
    itemsize = (on.each // (on.hi - on.lo))[row]
    place = on.lo[row] * itemsize + inside % on.each[row]
    return dict.fromkeys(zip(row.tolist(), place.tolist(), strict=True))


def _find(start: Ints, first: Ints, length: Ints, owner: Ints, at: Ints) -> tuple[Ints, Ints]:
    """Which of the things laid on owners has byte `at` of its owner, and which byte of it that is.

    Things begin at byte `start` of their owner, owner i has those from `first[i]` on and
    `length[i]` bytes.
    """
    # All owners end to end, so that one search serves all.
    begin = np.append(0, np.cumsum(length))[:-1]
    starts = np.repeat(begin, np.diff(first)) + start
    found = np.searchsorted(starts, begin[owner] + at, "right") - 1
    return found, at - start[found]


def _check_place(on: Demands, batches: Sequence[Batch], row: int, place: int) -> None:
    """Byte `place` of a row's unit is at the border of a box, or of a row of one."""
    batch, unit = batches[int(on.batch[row])], int(on.unit[row])
    element, odd = divmod(place, batch.template.src.itemsize)
    whole = not odd and legal(batch.template, unit, element)
    require(whole, f"tensor {batch.names[0]!r}: byte {place} of unit {unit} is a cut inside a row")


# bands


def find_misfit_of_bands(legs: Legs) -> str:
    """What is wrong with how a program's bands fit its lines, "" if nothing, before anything is
    laid out by them.

    So what a proof takes is in proportion to the tables' lengths, whatever stands in them. Raises
    PlanError where lines and cuts do not fit each other.
    """
    on, bands = legs.lines, legs.bands
    _check_tables(replace(on, cut_first=bands.cut_first, cuts=bands.cuts))
    columns = bands.at, bands.begin, bands.count, bands.place, bands.span
    fits = _are_owned(on.receivers, bands.first, columns)
    if not fits or {len(bands.classes), len(bands.start)} != {len(on.receivers)}:
        return "tables of bands are not of one length"
    classes = np.repeat(bands.classes, np.diff(bands.first))
    begins = (bands.begin >= 0) & (bands.begin < classes)
    counts = (bands.count > 0) & (bands.count <= classes)
    places = (bands.place >= 0) & (bands.place < bands.span)
    if (begins & counts & places).all():
        return ""
    return "bands are of unknown classes of nodes, or have entries outside them"
