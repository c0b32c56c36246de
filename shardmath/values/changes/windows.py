"""Windows: a box of a tensor whose cells have numbers of their own, in any order of dimensions.

1. A tensor's cells are numbered row by row, and so are a window's, in its own order of dimensions: as they lie in
   memory, where its memory is read end to end.
2. Dimensions that lie together are one: a window of whole rows is an interval, and numbers differ by a constant.

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
"""Of each dimension its size, and what lies between one cell and the next."""


@dataclass(frozen=True, slots=True, eq=False)
class ChangedWindow:
    """A box of a tensor of this shape; `steps` are between the tensor's numbers, from `first` on."""

    shape: tuple[int, ...]
    box: tuple[slice, ...]
    order: tuple[int, ...]
    first: int
    steps: Steps

    @property
    def count(self) -> int:
        """How many cells there are."""
        return math.prod(size for size, _ in self.steps)

    @property
    def _is_interval(self) -> bool:
        (_, step), *others = self.steps
        return step == 1 and not others

    def number(self, places: Ints) -> Ints:
        """The tensor's numbers of cells that have these numbers here."""
        if self._is_interval:
            return places + self.first
        cells = np.full(len(places), self.first)
        sizes = tuple(size for size, _ in self.steps)
        along = unravel(places, sizes)
        for coordinate, (_, step) in zip(along, self.steps, strict=True):
            cells += coordinate * step
        return cells

    def find(self, cells: Ints) -> tuple[Ints, Ints]:
        """Which of the tensor's cells are here, and the numbers that those have."""
        if self._is_interval:
            return _select(cells - self.first, self.count)
        along = unravel(cells, self.shape)
        within = np.ones(len(cells), bool)
        for coordinate, one in zip(along, self.box, strict=True):
            within &= coordinate >= one.start
            within &= coordinate < one.stop
        which = np.flatnonzero(within)
        places = np.zeros(len(which), np.int64)
        for k in self.order:
            one = self.box[k]
            coordinate = along[k]
            places *= one.stop - one.start
            places += coordinate[which]
            places -= one.start
        return which, places


def _select(places: Ints, count: int) -> tuple[Ints, Ints]:
    """Which of these are from 0 up to `count`, and those."""
    within = places >= 0
    within &= places < count
    if within.all():
        return np.arange(len(places)), places
    which = np.flatnonzero(within)
    return which, places[which]


def make_window(shape: Sequence[int], box: Sequence[slice], order: Sequence[int]) -> ChangedWindow:
    """The box of a tensor of this shape, its cells numbered in that order of dimensions."""
    steps = []
    first = 0
    for k in order:
        one = box[k]
        size = one.stop - one.start
        inside = shape[k + 1 :]
        step = math.prod(inside)
        first += one.start * step
        steps.append((size, step))
    joined = join_steps(steps)
    return ChangedWindow(tuple(shape), tuple(box), tuple(order), first, joined)


def join_steps(steps: Iterable[tuple[int, int]]) -> Steps:
    """The same cells in as few dimensions as do, at least one."""
    joined: list[tuple[int, int]] = []
    for size, step in steps:
        if size == 1:
            continue
        _, before = joined[-1] if joined else (0, 0)
        if before == size * step:
            # The dimension before goes on where this one ends.
            rows, _ = joined.pop()
            size *= rows
        joined.append((size, step))
    return tuple(joined) or ((1, 1),)
