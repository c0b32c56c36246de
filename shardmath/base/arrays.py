"""Arrays: one-dimensional integers in numpy, and what is done with sorted ones."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bools", "Ints", "begins", "distinct", "ranges"]

Bools: TypeAlias = NDArray[np.bool_]
Ints: TypeAlias = NDArray[np.int64]


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
