"""Windows: a box of a tensor whose cells are numbered separately, in any order of dimensions.

1. A tensor's cells are numbered row by row. A window's cells are numbered likewise, but in its own order of
   dimensions: the order in which they lie in memory, if its memory is read end to end.
2. Dimensions that lie together are merged: a window of whole rows is an interval, and numbers differ by a constant.

>>> columns = make_window((2, 3), (slice(0, 2), slice(1, 3)), order=(1, 0))
>>> columns.number(np.array([0, 1, 2, 3])).tolist()
[1, 4, 2, 5]
>>> which, places = columns.find(np.array([0, 1, 2]))
>>> which.tolist(), places.tolist()
([1, 2], [0, 2])
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.values.changes.boxes import unravel

__all__ = ["ChangedWindow", "join_steps", "make_window"]

Steps: TypeAlias = tuple[tuple[int, int], ...]
"""(size, step) of each dimension; a step is the distance between one cell's number and the next one's."""


@dataclass(frozen=True, slots=True, eq=False)
class ChangedWindow:
    """The elements of a box of a tensor, numbered from 0, with dimension `order[0]` outermost and `order[-1]`
    innermost. `number` converts these box numbers to flat (row-major) indices in the whole tensor; `find` converts flat
    indices to box numbers."""

    shape: tuple[int, ...]
    box: tuple[slice, ...]
    order: tuple[int, ...]
    first: int
    steps: Steps

    @property
    def count(self) -> int:
        """The number of elements in the window."""
        return math.prod(size for size, _ in self.steps)

    @property
    def _is_interval(self) -> bool:
        (_, step), *others = self.steps
        return step == 1 and not others

    def number(self, places: Ints) -> Ints:
        """Convert `places`, numbers of elements in the window, into their row-major numbers in the whole tensor."""
        if self._is_interval:
            return places + self.first
        cells = np.full(len(places), self.first)
        sizes = tuple(size for size, _ in self.steps)
        coordinates = unravel(places, sizes)
        for coordinate, (_, step) in zip(coordinates, self.steps, strict=True):
            cells += coordinate * step
        return cells

    def find(self, cells: Ints) -> tuple[Ints, Ints]:
        """Find which of `cells` (row-major numbers) are in the window; return their indices in `cells`, and their
        numbers in the window. `cells` are cells of the tensor."""
        if self._is_interval and self.count == math.prod(self.shape):
            return np.arange(len(cells)), cells
        if self._is_interval:
            return _select(cells - self.first, self.count)
        along = unravel(cells, self.shape)
        within = np.ones(len(cells), bool)
        for coordinate, span in zip(along, self.box, strict=True):
            within &= coordinate >= span.start
            within &= coordinate < span.stop
        which = np.flatnonzero(within)
        places = np.zeros(len(which), np.int64)
        for k in self.order:
            span = self.box[k]
            coordinate = along[k]
            places *= span.stop - span.start
            places += coordinate[which]
            places -= span.start
        return which, places


def _select(places: Ints, count: int) -> tuple[Ints, Ints]:
    """The indices of places in [0, count), and those places."""
    is_inside = places >= 0
    is_inside &= places < count
    if is_inside.all():
        return np.arange(len(places)), places
    indices = np.flatnonzero(is_inside)
    return indices, places[indices]


def make_window(shape: Sequence[int], box: Sequence[slice], order: Sequence[int]) -> ChangedWindow:
    """Make the window on `box` (slices) of a tensor of this `shape`, whose elements are numbered row by row with the
    dimensions in this `order`, the outermost first."""
    steps = []
    first = 0
    for k in order:
        span = box[k]
        step = math.prod(shape[k + 1 :])
        first += span.start * step
        steps.append((span.stop - span.start, step))
    return ChangedWindow(tuple(shape), tuple(box), tuple(order), first, join_steps(steps))


def join_steps(steps: Iterable[tuple[int, int]]) -> Steps:
    """Simplify `steps`, the (size, stride) of an array's dimensions from outermost to innermost, to fewer dimensions
    that visit the same offsets in the same order. Dimensions of size 1 are dropped, and contiguous neighbors merged; at
    least one dimension remains."""
    joined: list[tuple[int, int]] = []
    for size, step in steps:
        if size == 1:
            continue
        # The outer dimension continues where this one ends.
        if joined and joined[-1][1] == size * step:
            rows, _ = joined.pop()
            size *= rows
        joined.append((size, step))
    return tuple(joined) or ((1, 1),)
