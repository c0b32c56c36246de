"""Partition: the distinct parts of one dimension, and the part that each coordinate holds.

1. A part is the Runs that some coordinate of the dividing axes holds; equal Runs are one part.
2. Parts of a dividing placement do not overlap. Parts of a Table may: a position that several parts
   hold can be sent from each of them.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> halves = partition(Layout((4,), Mesh(dp=2, tp=2), "(tp n)").dims[0])
>>> [str(part) for part in halves.parts], halves.by_rank(Mesh(dp=2, tp=2)).tolist()
(['[0:2]', '[2:4]'], [0, 1, 0, 1])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.memo import memo
from shardmath.layouts.algebra.dimension import Dimension, cells
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs

__all__ = ["Partition", "list_spans", "overlapping", "partition"]


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """How a dimension is divided among ranks: `parts` are the distinct sets of positions that ranks hold. `cell` is an
    array of indices into `parts`, one per combination of mesh coordinates on `axes`, in row-major order."""

    axes: tuple[str, ...]
    parts: tuple[Runs, ...]
    cell: Ints

    def by_rank(self, mesh: Mesh) -> Ints:
        """Return an array with an index into `parts` for each rank of `mesh`: the part that the rank holds. Ranks are
        in the order of the mesh."""
        return self.cell[mesh.coordinate(self.axes)]


@memo()
def partition(dimension: Dimension) -> Partition:
    """Return the Partition of `dimension`: the distinct sets of positions that ranks hold, and the index of such a set
    for each combination of coordinates on the mesh axes that divide the dimension."""
    number_by_part: dict[Runs, int] = {}
    cell = []
    for runs in cells(dimension):
        number = number_by_part.setdefault(runs, len(number_by_part))
        cell.append(number)
    return Partition(tuple(dimension.axes), tuple(number_by_part), np.array(cell, np.int64))


def overlapping(dimension: Dimension) -> bool:
    """Return whether any position along `dimension` is on ranks at two different coordinates of the mesh axes that
    divide `dimension`."""
    start, stop, _, _ = list_spans(cells(dimension))
    # By start: if any two ranges overlap, so do two neighbors.
    meets_next = stop[:-1] > start[1:]
    return bool(meets_next.any())


def list_spans(parts: Sequence[Runs]) -> tuple[Ints, Ints, Ints, Ints]:
    """List the ranges of consecutive global positions in all `parts`, sorted by start. The result is four arrays: each
    range's start, its stop, its offset in the part that contains it, and that part's index in `parts`."""
    rows = []
    for part, runs in enumerate(parts):
        for local, start, size in runs.segments:
            stop = start + size
            rows.append((start, stop, local, part))
    table = np.array(rows, np.int64).reshape(-1, 4)
    order = np.argsort(table[:, 0], kind="stable")
    starts, stops, local_starts, numbers = table[order].T
    return starts, stops, local_starts, numbers
