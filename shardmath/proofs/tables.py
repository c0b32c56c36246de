"""Tables: whether a plan's tables are well formed, so that both ends of a pair expand the same transfers from them.

1. **Rows** of a dimension lie inside what every part of their key and goal holds, at the place they say, and no two
   have a position in common. So boxes, which are products of rows, are right on both sides and disjoint.
2. **Units** are distinct products of pairs of rows, so disjoint too.
3. **Lines** are blocks laid end to end, blocks are rows laid end to end, and lines are cut from the first byte to the
   last, where pieces may be cut.

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

from shardmath.algebra.partition import Partition, partition
from shardmath.base.arrays import Bools, Ints
from shardmath.base.errors import PlanError
from shardmath.plans.demands import Batch, Lines
from shardmath.plans.overlay import Overlay, Parts
from shardmath.plans.template import Template, hidden_pairs, legal, unit_addends
from shardmath.programs.streams import Legs

__all__ = ["check_lines", "check_template", "misfit_of_bands", "require"]


def require(holds: object, what: str) -> None:
    """Raise PlanError, which says `what` is wrong, unless it holds."""
    if not holds:
        raise PlanError(f"{what}; make the plan anew")


def _check_integers(table: Overlay | Template | Lines) -> None:
    """Tables are of 64-bit integers: no float decides anything, and no sum is cut off."""
    for field in fields(table):
        column = getattr(table, field.name)
        whole = not isinstance(column, np.ndarray) or column.dtype == (
            bool if field.name == "near" else np.int64
        )
        require(whole, f"{type(table).__name__}.{field.name} is not of 64-bit integers")


# rows and units


def check_template(t: Template, known: set[int]) -> None:
    """Raise PlanError unless rows and units are right; `known` holds the ids of overlays proved already."""
    _check_integers(t)
    what = f"{t.src} to {t.dst}"
    dims = [(partition(a), partition(b)) for a, b in zip(t.src.dims, t.dst.dims, strict=True)]
    expected = [*hidden_pairs(t.src, t.reduction), *dims]
    require(
        len(t.overlays) == len(expected),
        f"{what} has {len(t.overlays)} dimensions, not {len(expected)}",
    )
    for d, (over, (source, target)) in enumerate(zip(t.overlays, expected, strict=True)):
        where = f"{what}: dimension {d - t.hidden}"
        require(
            _same(over.source, source) and _same(over.target, target),
            f"{where} is divided in another way",
        )
        if id(over) not in known:
            known.add(id(over))
            _check_pairs(over, where)
            _check_rows(over, where)
    _check_units(t, what)


def _same(a: Partition, b: Partition) -> bool:
    return a is b or (a.axes == b.axes and a.parts == b.parts and np.array_equal(a.cell, b.cell))


def _check_pairs(over: Overlay, what: str) -> None:
    """Pairs are of known keys and goals, and rows follow each other in them."""
    _check_integers(over)
    pairs, rows = len(over.pair_key), len(over.start)
    fits = {x.shape for x in (over.pair_key, over.pair_goal, over.pair_size)} == {(pairs,)}
    fits &= {x.shape for x in (over.start, over.size, over.src[:, 0], over.dst[:, 0])} == {(rows,)}
    fits &= over.first.shape == (pairs + 1,) and (over.first[0], over.first[-1]) == (0, rows)
    require(
        fits and (np.diff(over.first) > 0).all() and (over.size > 0).all(),
        f"{what} has empty pairs or rows",
    )
    sizes = np.add.reduceat(over.size, over.first[:-1]) if pairs else over.pair_size
    require(
        np.array_equal(sizes, over.pair_size), f"{what} has pairs of other sizes than their rows"
    )
    for sets, number in ((over.keys, over.pair_key), (over.goals, over.pair_goal)):
        require(
            ((number >= 0) & (number < len(sets))).all(),
            f"{what} has pairs of unknown keys or goals",
        )


def _check_rows(over: Overlay, what: str) -> None:
    """Rows are where they say on both sides, and disjoint."""
    pair = np.repeat(np.arange(len(over.pair_key)), np.diff(over.first))
    for sets, number, held, at in (
        (over.keys, over.pair_key, over.source, over.src),
        (over.goals, over.pair_goal, over.target, over.dst),
    ):
        for row in np.flatnonzero(_misplaced(sets, number[pair], held, at, over)).tolist():
            raise PlanError(
                f"{what}: position {over.start[row]} is not where row {row} says; make the plan anew"
            )
    order = np.argsort(over.start)
    ends = (over.start + over.size)[order]
    require((ends[:-1] <= over.start[order][1:]).all(), f"{what} has rows with positions in common")


def _misplaced(sets: Parts, number: Ints, held: Partition, at: Ints, over: Overlay) -> Bools:
    """Whether some part of its set does not hold a row at the local start given; a set is given by number."""
    members = np.full((len(sets), max(map(len, sets), default=0)), -1, np.int64)
    for k, parts in enumerate(sets):
        members[k, : len(parts)] = parts
    segments = [(p, lo, g, n) for p, runs in enumerate(held.parts) for lo, g, n in runs.segments]
    table = np.array(segments, np.int64).reshape(-1, 4)
    wrong = np.zeros(len(number), bool)
    for m in range(members.shape[1]):
        mine = members[number, m]
        some = np.flatnonzero(mine >= 0)
        wrong[some] |= ~_inside(table, mine[some], at[some, m], over.start[some], over.size[some])
    return wrong


def _inside(segments: Ints, part: Ints, local: Ints, start: Ints, size: Ints) -> Bools:
    """Whether positions `local` on of a part are `start` on, within one segment (part, local start, start, size)."""
    owner, lo, g, n = segments.T
    values = np.unique(np.concatenate((lo, local)))
    code = owner * len(values) + np.searchsorted(values, lo)
    found = np.searchsorted(code, part * len(values) + np.searchsorted(values, local), "right") - 1
    offset = local - lo[found]
    fits = (found >= 0) & (owner[found] == part) & (offset + size <= n[found])
    out: Bools = fits & (g[found] + offset == start)
    return out


def _check_units(t: Template, what: str) -> None:
    """Units are distinct products of pairs."""
    size, code = np.ones(len(t.unit_size), np.int64), np.zeros(len(t.unit_size), np.int64)
    require(
        t.unit_pairs.shape == (len(size), len(t.overlays)), f"{what} has units of other dimensions"
    )
    for at, over in zip(t.unit_pairs.T, t.overlays, strict=True):
        require(((at >= 0) & (at < len(over.pair_size))).all(), f"{what} has units of unknown rows")
        size, code = size * over.pair_size[at], code * len(over.pair_size) + at
    require(np.array_equal(size, t.unit_size), f"{what} has units of other sizes than their rows")
    require(len(np.unique(code)) == len(code), f"{what} has one unit twice")


# lines


def check_lines(on: Lines, batches: Sequence[Batch]) -> None:
    """Raise PlanError unless rows make blocks, blocks lines, and lines are cut from end to end."""
    _check_integers(on)
    _check_tables(on)
    _check_numbers(on, batches)
    each, names = _of_rows(on, batches)
    _require_rows(on, batches, each == on.each, "is not of the bytes of its elements")
    at, nbytes = _laid(each * names, on.row_first)
    _require_rows(on, batches, at == on.at, "does not follow the one before it")
    _require_blocks(on, batches, nbytes == on.nbytes, "is not of the bytes of its rows")
    of_block = np.repeat(on.addend, np.diff(on.row_first))
    _require_rows(
        on,
        batches,
        of_block == _of_units(on, list(map(_addends, batches))),
        "is not of its block's addend",
    )
    _require_blocks(on, batches, _asking(on) == on.count, "counts other receivers")
    start, length = _laid(nbytes * on.count, on.first)
    _require_blocks(on, batches, start == on.start, "does not follow the one before it")
    _check_cuts(on, length)
    for row, place in (*_stripes(on, batches), *_inner_cuts(on, length)):
        _check_place(on, batches, row, place)


def _require_rows(on: Lines, batches: Sequence[Batch], holds: Bools, what: str) -> None:
    """Raise PlanError, which says `what` is wrong with a row of which tensor, unless all hold."""
    for row in np.flatnonzero(~holds).tolist():
        require(False, f"tensor {batches[int(on.batch[row])].names[0]!r}: row {row} {what}")


def _require_blocks(on: Lines, batches: Sequence[Batch], holds: Bools, what: str) -> None:
    for block in np.flatnonzero(~holds).tolist():
        name = batches[int(on.batch[on.row_first[block]])].names[0]
        require(
            False,
            f"tensor {name!r}: block {block}, for ranks {on.sets[on.receivers[block]][:8]}, {what}",
        )


def _require_lines(on: Lines, holds: Bools, what: str) -> None:
    for line in np.flatnonzero(~holds).tolist():
        require(False, f"line {line}, of ranks {on.sets[on.holders[line]][:8]}, {what}")


def _check_tables(on: Lines) -> None:
    """The tables fit each other: lines have blocks, blocks have rows, and a line has cuts."""
    rows = on.batch, on.unit, on.lo, on.hi, on.at, on.each
    blocks = on.receivers, on.addend, on.count, on.nbytes, on.start
    require(len(on.near) == len(on.holders), "tables of lines are not of one length")
    for owners, first, owned in (
        (on.holders, on.first, blocks),
        (on.receivers, on.row_first, rows),
        (on.holders, on.cut_first, (on.cuts,)),
    ):
        fits = first.shape == (len(owners) + 1,) and first[0] == 0 and (np.diff(first) > 0).all()
        require(
            fits and {x.shape for x in owned} == {(first[-1],)},
            "tables of lines are not of one length",
        )


def _check_numbers(on: Lines, batches: Sequence[Batch]) -> None:
    """Sets are of ascending ranks, and every number is one of something."""
    for ranks in on.sets:
        require(
            ranks and all(map(operator.lt, ranks, ranks[1:])),
            f"ranks {ranks[:8]} are not ascending",
        )
    for column, most in (
        (on.holders, len(on.sets)),
        (on.receivers, len(on.sets)),
        (on.batch, len(batches)),
    ):
        require(((column >= 0) & (column < most)).all(), "lines are of unknown ranks or tensors")
    units = np.array([len(batch.template.unit_size) for batch in batches], np.int64)[on.batch]
    _require_rows(on, batches, (on.unit >= 0) & (on.unit < units), "is of an unknown unit")
    inside = (on.lo >= 0) & (on.lo < on.hi) & (on.hi <= _sizes(on, batches))
    _require_rows(on, batches, inside, "is not inside its unit")


def _of_units(on: Lines, columns: Sequence[Ints]) -> Ints:
    """By row, what the column of its batch says of its unit."""
    first = np.cumsum([0, *map(len, columns)])
    out: Ints = np.concatenate([np.zeros(0, np.int64), *columns])[first[on.batch] + on.unit]
    return out


def _sizes(on: Lines, batches: Sequence[Batch]) -> Ints:
    return _of_units(on, [batch.template.unit_size for batch in batches])


def _addends(batch: Batch) -> Ints:
    """Of which addend each unit is; 0 where nothing is folded."""
    t = batch.template
    return unit_addends(t) if t.reduction.folded else np.zeros_like(t.unit_size)


def _of_rows(on: Lines, batches: Sequence[Batch]) -> tuple[Ints, Ints]:
    """By row: bytes of a tensor, and how many tensors."""
    item = np.array([batch.template.src.itemsize for batch in batches], np.int64)
    names = np.array([len(batch.names) for batch in batches], np.int64)
    return (on.hi - on.lo) * item[on.batch], names[on.batch]


def _laid(sizes: Ints, first: Ints) -> tuple[Ints, Ints]:
    """Where each begins when those of one owner are laid end to end, and the length of each owner."""
    ends = np.append(0, np.cumsum(sizes))
    begin = ends[first[:-1]]
    return ends[:-1] - np.repeat(begin, np.diff(first)), ends[first[1:]] - begin


def _asking(on: Lines) -> Ints:
    """How many receivers of each block are not holders of its line."""
    sets = list(map(frozenset, on.sets))
    holders = np.repeat(on.holders, np.diff(on.first))
    pairs = zip(holders.tolist(), on.receivers.tolist(), strict=True)
    return np.array([len(sets[r]) - len(sets[r] & sets[h]) for h, r in pairs], np.int64)


def _check_cuts(on: Lines, length: Ints) -> None:
    """Every holder has a share, and the shares are the line."""
    held = np.array([len(on.sets[i]) + 1 for i in on.holders.tolist()], np.int64)
    _require_lines(on, held == np.diff(on.cut_first), "is not cut among them")
    begin, end = on.cut_first[:-1], on.cut_first[1:] - 1
    whole = (on.cuts[begin] == 0) & (on.cuts[end] == length)
    _require_lines(on, whole, "is not cut from its first byte to its last")
    line = np.repeat(np.arange(len(held)), held)
    back = (np.diff(on.cuts) < 0) & (np.diff(line) == 0)
    _require_lines(on, ~np.isin(np.arange(len(held)), line[1:][back]), "has cuts that go back")


def _stripes(on: Lines, batches: Sequence[Batch]) -> Iterable[tuple[int, int]]:
    """(row, byte of the unit) of all rows that begin inside their units; where others end, these begin."""
    some = np.flatnonzero(on.lo).tolist()
    return [
        (row, int(on.lo[row]) * batches[int(on.batch[row])].template.src.itemsize) for row in some
    ]


def _inner_cuts(on: Lines, length: Ints) -> Iterable[tuple[int, int]]:
    """(row, byte of the unit) of all cuts inside lines."""
    line = np.repeat(np.arange(len(length)), np.diff(on.cut_first))
    some = np.flatnonzero((on.cuts > 0) & (on.cuts < length[line]))
    block, inside = _found(on.start, on.first, length, line[some], on.cuts[some])
    row, inside = _found(on.at, on.row_first, on.nbytes, block, inside % on.nbytes[block])
    item = (on.each // (on.hi - on.lo))[row]
    places = zip(row.tolist(), (on.lo[row] * item + inside % on.each[row]).tolist(), strict=True)
    return dict.fromkeys(places)


def _found(start: Ints, first: Ints, length: Ints, owner: Ints, at: Ints) -> tuple[Ints, Ints]:
    """Which of the things laid on owners of these lengths has byte `at` of its owner, and which byte of it that is."""
    begin = np.append(0, np.cumsum(length))[:-1]
    found = (
        np.searchsorted(np.repeat(begin, np.diff(first)) + start, begin[owner] + at, "right") - 1
    )
    return found, at - start[found]


def _check_place(on: Lines, batches: Sequence[Batch], row: int, place: int) -> None:
    """Byte `place` of a row's unit is at the border of a box, or of a row of one."""
    batch, unit = batches[int(on.batch[row])], int(on.unit[row])
    element, odd = divmod(place, batch.template.src.itemsize)
    whole = not odd and legal(batch.template, unit, element)
    require(whole, f"tensor {batch.names[0]!r}: byte {place} of unit {unit} is a cut inside a row")


# bands


def misfit_of_bands(legs: Legs) -> str:
    """What is wrong with how a program's bands fit its lines, "" if nothing, before anything is laid out by them.

    So what a proof takes is in proportion to the tables' lengths, whatever stands in them. Raises PlanError where lines
    and cuts do not fit each other.
    """
    on, bands = legs.lines, legs.bands
    _check_tables(replace(on, cut_first=bands.cut_first, cuts=bands.cuts))
    blocks = len(on.receivers)
    count = int(bands.first[-1]) if bands.first.shape == (blocks + 1,) else -1
    rows = bands.at, bands.begin, bands.count, bands.place, bands.span
    fits = count == len(bands.at) and {x.shape for x in rows} == {(count,)}
    fits = fits and {bands.classes.shape, bands.start.shape} == {(blocks,)}
    if not fits or bands.first[0] != 0 or (np.diff(bands.first) <= 0).any():
        return "tables of bands are not of one length"
    classes = np.repeat(bands.classes, np.diff(bands.first))
    among = (
        (bands.begin >= 0) & (bands.begin < classes) & (bands.count > 0) & (bands.count <= classes)
    )
    inside = (bands.place >= 0) & (bands.place < bands.span)
    return (
        ""
        if (among & inside).all()
        else "bands are of unknown classes of nodes, or have entries outside them"
    )
