"""Overlay: two partitions of one dimension -> atoms -> rows.

1. The parts of each side are cut into **atoms**, global ranges held by one set of parts: a **key**
   at the source, a **goal** at the destination. Where parts do not overlap, a key or goal is one part.
2. Overlaid, each (key, goal) pair gets rows (source start, destination start, global start, size).
   Because Runs are canonical every row is as long as it can be: there is no merge pass.
3. Every global position is in at most one row, so pairs are disjoint sets of positions.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.algebra.mesh import Mesh
>>> halves, thirds = (Layout((6,), Mesh(tp=k), "(tp n)").dims[0] for k in (2, 3))
>>> over = overlaid(halves, thirds)
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

from shardmath.algebra.dimension import Dimension
from shardmath.algebra.partition import Partition, partition, spans
from shardmath.base.arrays import Ints, Offsets, begins, ranges
from shardmath.base.memo import memo

__all__ = ["Overlay", "Parts", "overlaid", "overlap_table", "overlay"]

Parts = tuple[tuple[int, ...], ...]
"""Sets of parts, by number."""


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """Rows of one dimension, grouped by pair of source key and destination goal.

    `keys[k]` are the source parts that hold every position of key k, `goals[g]` the destination
    parts of goal g. Pair p is (`pair_key[p]`, `pair_goal[p]`) with `pair_size[p]` positions in the
    rows `first[p]..first[p+1]-1`; a row has a global `start`, a `size`, and for the m-th part of
    its key or goal a local start `src[:, m]` or `dst[:, m]`.
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
def overlaid(source: Dimension, target: Dimension) -> Overlay:
    """The overlay of two layouts of one dimension."""
    return overlay(partition(source), partition(target))


def overlay(source: Partition, target: Partition) -> Overlay:
    """What of each source key each destination goal has."""
    here = _cut_atoms(source)
    there = _cut_atoms(target)

    # Atoms of a side are disjoint and ascend: those that meet an atom of the other lie together.
    begin = here.stop.searchsorted(there.start, "right")
    end = here.start.searchsorted(there.stop, "left")
    a, b = ranges(begin, end)
    start = np.maximum(here.start[a], there.start[b])
    size = np.minimum(here.stop[a], there.stop[b]) - start
    src = here.local[a] + (start - here.start[a])[:, None]
    dst = there.local[b] + (start - there.start[b])[:, None]

    # A pair is one number; within a pair, rows stand as the destination holds them.
    radix = len(there.sets) + 1
    pair = here.number[a] * radix + there.number[b]
    order = np.lexsort((dst[:, 0], pair))
    pair = pair[order]
    size = size[order]
    first = begins(pair)
    pair_key, pair_goal = np.divmod(pair[first], radix)
    return Overlay(
        source=source,
        target=target,
        keys=here.sets,
        goals=there.sets,
        pair_key=pair_key,
        pair_goal=pair_goal,
        pair_size=np.add.reduceat(size, first) if len(first) else size,
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


def _cut_atoms(held: Partition) -> _Atoms:
    """The atoms of a side."""
    start, stop, local, part = spans(held.parts)
    apart = stop[:-1] <= start[1:]
    if apart.all():
        numbers = range(len(held.parts))
        alone = tuple((number,) for number in numbers)
        return _Atoms(alone, start, stop, part, local[:, None])
    cuts = np.unique(np.concatenate((start, stop)))
    first = cuts.searchsorted(start)
    last = cuts.searchsorted(stop)
    atom, span = ranges(first, last)
    part = part[span]
    local = local[span] + cuts[atom] - start[span]
    order = np.lexsort((part, atom))
    return _group_atoms(cuts, atom[order], part[order], local[order])


def _group_atoms(cuts: Ints, atom: Ints, part: Ints, local: Ints) -> _Atoms:
    """Number the sets of parts that hold each atom; `atom` is sorted, and `part` within it."""
    first = begins(atom)
    number: dict[tuple[int, ...], int] = {}
    numbers = []
    for parts in np.split(part, first[1:]):
        held = tuple(parts.tolist())
        numbers.append(number.setdefault(held, len(number)))

    # One row an atom, as wide as the largest set; places that a smaller set does not need are -1.
    widest = max(map(len, number))
    starts = np.full((len(first), widest), -1, np.int64)
    entries = Offsets(np.append(first, len(atom)))
    row = entries.owners()
    column = np.arange(len(atom)) - first[row]
    starts[row, column] = local
    own = atom[first]
    return _Atoms(tuple(number), cuts[own], cuts[own + 1], np.array(numbers, np.int64), starts)


def overlap_table(source: Partition, target: Partition) -> Ints:
    """How many positions each source part and each destination part share: int64 (source parts,
    destination parts)."""
    if len(source.parts) == 1 and source.parts == target.parts:
        return np.array([[source.parts[0].size]], np.int64)
    start, stop, _, source_part = spans(source.parts)
    begin, end, _, target_part = spans(target.parts)

    # Cut by both sides' borders, every span is a range of atoms.
    cuts = np.unique(np.concatenate((start, stop, begin, end)))
    atom, span = ranges(cuts.searchsorted(start), cuts.searchsorted(stop))
    other, its = ranges(cuts.searchsorted(begin), cuts.searchsorted(end))

    # Of each atom of the target, the source's entries of the same atom lie together.
    order = np.argsort(atom, kind="stable")
    atom = atom[order]
    span = span[order]
    first = atom.searchsorted(other, "left")
    last = atom.searchsorted(other, "right")
    at, of = ranges(first, last)
    rows = source_part[span[at]]
    columns = target_part[its[of]]
    size = np.diff(cuts)[atom[at]]

    shape = len(source.parts), len(target.parts)
    table = np.zeros(shape, np.int64)
    np.add.at(table, (rows, columns), size)
    return table
