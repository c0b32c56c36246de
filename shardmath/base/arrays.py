"""Arrays: one-dimensional arrays of integers, sorted or grouped by owner.

>>> import numpy as np
>>> rows = Offsets.of_counts(np.array([2, 0, 3]))
>>> rows.first.tolist(), rows.owners().tolist()
([0, 2, 2, 5], [0, 0, 2, 2, 2])
>>> rows.sums(np.array([1, 2, 3, 4, 5])).tolist()
[3, 0, 12]
>>> columns = [np.array([5, 6]), np.array([7])]
>>> pick(columns, np.array([1, 0]), np.array([0, 1])).tolist()
[7, 6]
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Bools",
    "Ints",
    "Offsets",
    "addresses",
    "begins",
    "distinct",
    "join",
    "lengths",
    "number_alike",
    "pick",
    "ranges",
]

Bools: TypeAlias = NDArray[np.bool_]
Ints: TypeAlias = NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


def ranges(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """Return two arrays: all integers of the ranges [starts[i], stops[i]), end to end, and for each integer its range's
    index i."""
    counts = np.maximum(stops - starts, 0)
    owner = np.arange(len(counts)).repeat(counts)
    # The i-th integer is the start of its range plus the number of integers of that range before it.
    shift = counts.cumsum() - counts - starts
    integers = np.arange(len(owner))
    integers -= shift[owner]
    return integers, owner


def begins(*sorted_: Ints) -> Ints:
    """Return an array of the indices at which the runs of equal numbers begin in the sorted array `sorted_`; of several
    arrays of one length, those at which a run begins in any of them."""
    differ = _differ(sorted_[0])
    for keys in sorted_[1:]:
        differ |= _differ(keys)
    return differ.nonzero()[0]


def _differ(sorted_: Ints) -> Bools:
    """For each number whether it differs from the one before; True for the first."""
    new = np.ones(len(sorted_), bool)
    np.not_equal(sorted_[1:], sorted_[:-1], out=new[1:])
    return new


def distinct(numbers: Ints) -> tuple[Ints, Ints]:
    """Return two arrays: the distinct values in `numbers`, ascending; and, for each element of `numbers`, the index of
    its value in the first array.

    `numpy.unique` with `return_inverse`, faster for few numbers.
    """
    order = numbers.argsort(kind="stable")
    is_first = _differ(numbers[order])
    which = np.empty_like(order)
    which[order] = is_first.cumsum() - 1
    return numbers[order[is_first]], which


def number_alike(keys: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Number the distinct tuples among (keys[0][i], keys[1][i], ...) from 0, in sorted order. Return two arrays: the
    first has, for each distinct tuple, the lowest i at which it occurs; the second has, for each i, the number of the
    tuple there.

    >>> number_alike([np.array([1, 0, 1, 1]), np.array([5, 9, 5, 4])])
    (array([1, 3, 0]), array([2, 0, 2, 1]))
    """
    # lexsort sorts by its last key first.
    order = np.lexsort(keys[::-1])
    is_new = np.zeros(len(order), bool)
    for key in keys:
        is_new |= _differ(key[order])
    kind = np.empty_like(order)
    kind[order] = np.cumsum(is_new) - 1
    return order[is_new], kind


def addresses(values: Collection[object]) -> Ints:
    """An int64 array with what `id` returns for each of `values`, in a quarter of the time."""
    # An array of objects is an array of their addresses.
    objects = np.fromiter(values, object, len(values))
    return np.frombuffer(objects.tobytes(), np.intp).astype(np.int64, copy=False)


def lengths(values: Iterable[Sized]) -> Ints:
    """An int64 array with the length of each of `values`."""
    return np.fromiter(map(len, values), np.int64)


def join(values: Iterable[Iterable[int]]) -> Ints:
    """The integers of all `values`, one after the other, as one int64 array."""
    integers = list(itertools.chain.from_iterable(values))
    return np.array(integers, np.int64)


def pick(columns: Sequence[Ints], which: Ints, place: Ints) -> Ints:
    """An array whose item i is columns[which[i]][place[i]]."""
    # All columns are laid end to end: column k begins at first[k].
    first = _ends(lengths(columns))
    joined = np.concatenate([np.zeros(0, np.int64), *columns])
    out: Ints = joined[first[which] + place]
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Offsets:
    """A division of items, numbered from 0, among owners: owner i has the items first[i] to first[i + 1] - 1. The array
    `first` has the number of each owner's first item and, at the end, the number of all items.

    `first` has one number more than there are owners: it begins with 0 and ends with the number of
    items. An owner may have no items.
    """

    first: Ints

    @classmethod
    def of_sorted(cls, keys: Ints) -> Offsets:
        """Offsets with one owner per run of equal numbers in `keys`, which has one key per item."""
        return cls(np.append(begins(keys), len(keys)))

    @classmethod
    def of_counts(cls, counts: Ints) -> Offsets:
        """Offsets in which owner i has `counts[i]` items."""
        return cls(_ends(counts))

    def __len__(self) -> int:
        """The number of owners."""
        return len(self.first) - 1

    def counts(self) -> Ints:
        """The number of items of each owner, as an array."""
        return np.diff(self.first)

    def owners(self) -> Ints:
        """The index of the owner of each item, as an array."""
        return np.arange(len(self)).repeat(self.counts())

    def owners_of(self, items: Ints) -> Ints:
        """The index of the owner of each of the given items, as an array."""
        owners: Ints = self.first.searchsorted(items, "right") - 1
        return owners

    def spread(self, values: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """For each item, the entry of its owner in `values`, which has one entry per owner."""
        return values.repeat(self.counts())

    def sums(self, sizes: Ints) -> Ints:
        """For each owner, the sum of its items' `sizes`; `sizes` has one number per item."""
        return np.diff(_ends(sizes)[self.first])

    def begin(self, sizes: Ints) -> Ints:
        """Return an exclusive prefix sum of `sizes` that starts again at 0 for each owner. `sizes` has one number per
        item; this object says which items each owner has."""
        ends = _ends(sizes)
        return ends[:-1] - self.spread(ends[self.first[:-1]])


def _ends(sizes: Ints) -> Ints:
    """0, and the sums of the sizes up to and including each one."""
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    return ends
