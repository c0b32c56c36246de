"""Overlay: two partitions of one dimension -> atoms -> rows.

1. The parts of each side are cut into **atoms**, global ranges held by one set of parts: a **key**
   at the source, a **goal** at the destination. If parts do not overlap, a key or goal is one part.
2. Overlaid, each (key, goal) pair gets rows (source start, destination start, global start, size).
   Because Runs are canonical every row is as long as it can be: there is no merge pass.
3. Every global position is in at most one row, so pairs are disjoint sets of positions.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> halves, thirds = (Layout((6,), Mesh(tp=k), "(tp n)").dims[0] for k in (2, 3))
>>> over = overlay_dimensions(halves, thirds)
>>> for row in zip(over.start, over.size, over.src[:, 0], over.dst[:, 0]):
...     print(*row)
0 2 0 0
2 1 2 0
3 1 0 1
4 2 1 0
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets, begins, ranges
from shardmath.base.memo import memo
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.partition import Partition, list_spans, partition

__all__ = ["Overlay", "Parts", "overlap_table", "overlay", "overlay_dimensions"]

Parts = tuple[tuple[int, ...], ...]
"""Sets of parts, by number."""


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """The positions that each part of a source has in common with each part of a destination. Source and destination
    are two divisions of one dimension; a part is the set of positions that one or more ranks hold.

    `keys[k]` are the source parts that hold every position of key k, `goals[g]` the destination parts of goal g. Pair p
    is (`pair_key[p]`, `pair_goal[p]`) with `pair_size[p]` positions in the rows `first[p]..first[p+1]-1`; a row has a
    global `start`, a `size`, and for the m-th part of its key or goal a local start `src[:, m]` or `dst[:, m]`.
    """

    source: Partition
    target: Partition
    keys: Parts
    goals: Parts
    pair_key: Ints
    pair_goal: Ints
    pair_size: Ints
    first: Ints
    start: Ints
    size: Ints
    src: Ints
    dst: Ints


@memo()
def overlay_dimensions(source: Dimension, target: Dimension) -> Overlay:
    """Return, as an Overlay, the positions that each part of `source` has in common with each part of `target`. Both
    describe the same dimension; a part is the set of positions that one or more ranks hold."""
    return overlay(partition(source), partition(target))


def overlay(source: Partition, target: Partition) -> Overlay:
    """Return, as an Overlay, the positions that each part of `source` has in common with each part of `target`. Both
    divide the same dimension; a part is the set of positions that one or more ranks hold."""
    here = _cut_atoms(source)
    there = _cut_atoms(target)
    a, b = _pair_meeting(here, there)
    start = np.maximum(here.start[a], there.start[b])
    stop = np.minimum(here.stop[a], there.stop[b])
    size = stop - start
    src = _locate(here, a, start)
    dst = _locate(there, b, start)

    # A pair is one number: any radix above the numbers of goals would do. Within a pair, rows stand as the destination
    # holds them.
    radix = len(there.sets) + 1
    pair = here.number[a] * radix + there.number[b]
    order = np.lexsort((dst[:, 0], pair))
    pair = pair[order]
    size = size[order]
    first = begins(pair)
    pair_key, pair_goal = np.divmod(pair[first], radix)
    pair_size = np.add.reduceat(size, first) if len(first) else size
    return Overlay(
        source=source,
        target=target,
        keys=here.sets,
        goals=there.sets,
        pair_key=pair_key,
        pair_goal=pair_goal,
        pair_size=pair_size,
        first=np.append(first, len(pair)),
        start=start[order],
        size=size,
        src=src[order],
        dst=dst[order],
    )


class _Atoms(NamedTuple):
    """Sets of parts; and by atom, in global order: start, stop, the number of its set, and its
    local start in each part of the set."""

    sets: Parts
    start: Ints
    stop: Ints
    number: Ints
    local: Ints


def _pair_meeting(here: _Atoms, there: _Atoms) -> tuple[Ints, Ints]:
    """The numbers of all pairs of atoms, one of each side, that share a position."""
    # Atoms of a side are disjoint and ascend: atom b of `there` overlaps atoms begin[b]..end[b]-1 of `here`.
    begin = here.stop.searchsorted(there.start, "right")
    end = here.start.searchsorted(there.stop, "left")
    return ranges(begin, end)


def _locate(atoms: _Atoms, number: Ints, start: Ints) -> Ints:
    """The local position of each given global one, in every part that holds its atom."""
    inside = start - atoms.start[number]
    return atoms.local[number] + inside[:, None]


def _cut_atoms(held: Partition) -> _Atoms:
    """The atoms of a side."""
    start, stop, local, part = list_spans(held.parts)
    apart = stop[:-1] <= start[1:]
    # If no two spans overlap, each is an atom, which one part holds.
    if apart.all():
        numbers = range(len(held.parts))
        alone = tuple((number,) for number in numbers)
        return _Atoms(alone, start, stop, part, local[:, None])
    return _cut_at_borders(start, stop, local, part)


def _cut_at_borders(start: Ints, stop: Ints, local: Ints, part: Ints) -> _Atoms:
    """The atoms of spans that overlap."""
    borders = np.concatenate((start, stop))
    cuts = np.unique(borders)
    atom, span = _list_atoms(cuts, start, stop)
    inside = cuts[atom] - start[span]
    local = local[span] + inside
    part = part[span]
    # Atom by atom, so that the parts of each are one slice.
    order = np.lexsort((part, atom))
    return _group_atoms(cuts, atom[order], part[order], local[order])


def _list_atoms(cuts: Ints, start: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """All pairs of a span and an atom inside it, as two arrays of numbers; the cuts have all borders of spans."""
    first = cuts.searchsorted(start)
    last = cuts.searchsorted(stop)
    return ranges(first, last)


def _group_atoms(cuts: Ints, atom: Ints, part: Ints, local: Ints) -> _Atoms:
    """Number the sets of parts that hold each atom; `atom` is sorted, and `part` within it."""
    first = begins(atom)
    number_of_set: dict[tuple[int, ...], int] = {}
    set_numbers = []
    for parts in np.split(part, first[1:]):
        key = tuple(parts.tolist())
        set_numbers.append(number_of_set.setdefault(key, len(number_of_set)))
    sets = tuple(number_of_set)
    widest = max(map(len, sets))
    starts = _tabulate_starts(first, local, widest)
    held_atoms = atom[first]
    set_of_atom = np.array(set_numbers, np.int64)
    # Atom i lies between the cuts i and i + 1.
    return _Atoms(sets, cuts[held_atoms], cuts[held_atoms + 1], set_of_atom, starts)


def _tabulate_starts(first: Ints, local: Ints, widest: int) -> Ints:
    """One row per atom, as wide as the largest set; columns that a smaller set does not need are -1. Atom i has the
    starts local[first[i]:first[i + 1]]."""
    shape = len(first), widest
    starts = np.full(shape, -1, np.int64)
    count = len(local)
    entries = Offsets(np.append(first, count))
    row = entries.owners()
    column = np.arange(count) - first[row]
    starts[row, column] = local
    return starts


def overlap_table(source: Partition, target: Partition) -> Ints:
    """Return a matrix: the number of positions that each part of `source` (row) and of `target` (column) share."""
    # Most dimensions are divided on neither side.
    if len(source.parts) == 1 and source.parts == target.parts:
        return np.array([[source.parts[0].size]], np.int64)
    start, stop, _, source_part = list_spans(source.parts)
    begin, end, _, target_part = list_spans(target.parts)

    # Cut by both sides' borders, every span is a range of atoms.
    borders = np.concatenate((start, stop, begin, end))
    cuts = np.unique(borders)
    source_atom, source_span = _list_atoms(cuts, start, stop)
    target_atom, target_span = _list_atoms(cuts, begin, end)
    source_index, target_index = _pair_equal(source_atom, target_atom)
    rows = source_part[source_span[source_index]]
    columns = target_part[target_span[target_index]]
    sizes = np.diff(cuts)
    shared = sizes[source_atom[source_index]]

    shape = len(source.parts), len(target.parts)
    table = np.zeros(shape, np.int64)
    np.add.at(table, (rows, columns), shared)
    return table


def _pair_equal(values: Ints, others: Ints) -> tuple[Ints, Ints]:
    """The indices, into both, of all pairs of equal values."""
    # In order, the values that equal another lie together.
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = ordered.searchsorted(others, "left")
    last = ordered.searchsorted(others, "right")
    place_in_order, other_index = ranges(first, last)
    return order[place_in_order], other_index
