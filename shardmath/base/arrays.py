"""Arrays: one-dimensional integers in numpy, and what is done with sorted ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "Ints", "Offsets", "begins", "distinct", "ranges"]

Bools: TypeAlias = NDArray[np.bool_]
Ints: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Offsets:
    """Items of owners, owner by owner: owner i has the items first[i] .. first[i + 1] - 1."""

    first: Ints

    @classmethod
    def of_sorted(cls, keys: Ints) -> Offsets:
        """One owner for each run of equal keys."""
        return cls(np.append(begins(keys), len(keys)))

    def spread(self, values: Ints) -> Ints:
        """The value of each item's owner."""
        return np.repeat(values, np.diff(self.first))

    def sums(self, sizes: Ints) -> Ints:
        """The total of each owner's items."""
        ends = _running(sizes)
        totals: Ints = ends[self.first[1:]] - ends[self.first[:-1]]
        return totals

    def begin(self, sizes: Ints) -> Ints:
        """Where each item begins when an owner's items are laid end to end."""
        ends = _running(sizes)
        begin: Ints = ends[:-1] - self.spread(ends[self.first[:-1]])
        return begin


def _running(sizes: Ints) -> Ints:
    """The totals of the first 0, 1, 2, ... sizes."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))


def ranges(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """All integers of the ranges one after the other, and which range each is of."""
    counts = np.maximum(stops - starts, 0)
    owner = np.arange(len(counts)).repeat(counts)
    return np.arange(len(owner)) - (counts.cumsum() - counts - starts)[owner], owner


def begins(sorted_: Ints) -> Ints:
    """Where each run of equal numbers begins."""
    return _new(sorted_).nonzero()[0]


def _new(sorted_: Ints) -> Bools:
    """Of each number whether it is unlike the one before."""
    new = np.ones(len(sorted_), bool)
    np.not_equal(sorted_[1:], sorted_[:-1], out=new[1:])
    return new


def distinct(numbers: Ints) -> tuple[Ints, Ints]:
    """The distinct numbers, ascending, and which of them each is: `numpy.unique`, quicker where there are few."""
    order = numbers.argsort(kind="stable")
    new = _new(numbers[order])
    which = np.empty_like(order)
    which[order] = new.cumsum() - 1
    return numbers[order[new]], which
