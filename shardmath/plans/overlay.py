"""Overlay: two partitions of one dimension -> atoms -> rows.

1. The parts of each side are cut into **atoms**, global ranges held by one set of parts: a **key** at the source, a
   **goal** at the destination. Where parts do not overlap, a key or goal is one part.
2. Overlaid, each (key, goal) pair gets rows (source start, destination start, global start, size). Because Runs are
   canonical every row is as long as it can be: there is no merge pass.
3. Every global position is in at most one row, so pairs are disjoint sets of positions.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.algebra.mesh import Mesh
>>> halves, thirds = (Layout((6,), Mesh(tp=k), "(tp n)").dims[0] for k in (2, 3))
>>> over = overlaid(halves, thirds)
>>> list(zip(over.start.tolist(), over.size.tolist(), over.src[:, 0].tolist(), over.dst[:, 0].tolist()))
[(0, 2, 0, 0), (2, 1, 2, 0), (3, 1, 0, 1), (4, 2, 1, 0)]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmath.algebra.dimension import Dimension
from shardmath.algebra.partition import Partition, partition, spans
from shardmath.base.arrays import Ints, begins, ranges
from shardmath.base.memo import memo

__all__ = ["Overlay", "Parts", "overlaid", "overlay"]

Parts = tuple[tuple[int, ...], ...]
"""Sets of parts, by number."""


@dataclass(frozen=True, slots=True, eq=False)
class Overlay:
    """Rows of one dimension, grouped by pair of source key and destination goal.

    `keys[k]` are the source parts that hold every position of key k, `goals[g]` the destination parts of goal g. Pair
    p is (`pair_key[p]`, `pair_goal[p]`) with `pair_size[p]` positions in the rows `first[p]..first[p+1]-1`; a row has
    a global `start`, a `size`, and for the m-th part of its key or goal a local start `src[:, m]` or `dst[:, m]`.
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
    keys, start, stop, key, here = _atoms(source)
    goals, begin, end, goal, there = _atoms(target)
    a, b = ranges(stop.searchsorted(begin, "right"), start.searchsorted(end, "left"))
    left = np.maximum(start[a], begin[b])
    size = np.minimum(stop[a], end[b]) - left
    src = here[a] + (left - start[a])[:, None]
    dst = there[b] + (left - begin[b])[:, None]
    pair = key[a] * (len(goals) + 1) + goal[b]
    order = np.lexsort((dst[:, 0], pair))
    pair, left, size, src, dst = pair[order], left[order], size[order], src[order], dst[order]
    first = begins(pair)
    pair_key, pair_goal = np.divmod(pair[first], len(goals) + 1)
    sizes = np.add.reduceat(size, first) if len(first) else size
    rows = np.append(first, len(pair))
    return Overlay(
        source, target, keys, goals, pair_key, pair_goal, sizes, rows, left, size, src, dst
    )


def _atoms(held: Partition) -> tuple[Parts, Ints, Ints, Ints, Ints]:
    """Sets of parts; and by atom, in global order: start, stop, set, local start in each part of the set."""
    g, stop, lo, part = spans(held.parts)
    if (stop[:-1] <= g[1:]).all():
        return tuple((p,) for p in range(len(held.parts))), g, stop, part, lo[:, None]
    cuts = np.unique(np.concatenate((g, stop)))
    atom, span = ranges(np.searchsorted(cuts, g), np.searchsorted(cuts, stop))
    order = np.lexsort((part[span], atom))
    return _group_atoms(
        cuts, atom[order], part[span][order], (lo[span] + cuts[atom] - g[span])[order]
    )


def _group_atoms(
    cuts: Ints, atom: Ints, part: Ints, local: Ints
) -> tuple[Parts, Ints, Ints, Ints, Ints]:
    """Number the sets of parts that hold each atom; `atom` is sorted, and `part` within it."""
    first = begins(atom)
    count = np.diff(np.append(first, len(atom)))
    held = [tuple(x.tolist()) for x in np.split(part, first[1:])]
    number = {parts: k for k, parts in enumerate(dict.fromkeys(held))}
    starts = np.full((len(first), max(map(len, number))), -1, np.int64)
    starts[
        np.repeat(np.arange(len(first)), count), np.arange(len(atom)) - np.repeat(first, count)
    ] = local
    key = np.array([number[x] for x in held], np.int64)
    return tuple(number), cuts[atom[first]], cuts[atom[first] + 1], key, starts
