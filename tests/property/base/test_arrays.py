"""Arrays against lists."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath.base.arrays import Offsets, begins, distinct, join, ranges

NUMBERS = st.lists(st.integers(-3, 9), max_size=12)
SIZES = st.lists(st.lists(st.integers(0, 1 << 40), max_size=4), max_size=6)


def ints(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int64)


@given(st.lists(st.tuples(st.integers(-3, 9), st.integers(-3, 9)), max_size=6))
def test_ranges_are_ranges(given_ranges: list[tuple[int, int]]) -> None:
    starts = ints([start for start, _ in given_ranges])
    stops = ints([stop for _, stop in given_ranges])
    found, owner = ranges(starts, stops)
    assert found.tolist() == [i for start, stop in given_ranges for i in range(start, stop)]
    assert owner.tolist() == [
        number for number, (start, stop) in enumerate(given_ranges) for _ in range(start, stop)
    ]


@given(st.lists(NUMBERS))
def test_joined_lists_are_one(values: list[list[int]]) -> None:
    found = join(map(tuple, values))
    assert found.dtype == np.int64 and found.tolist() == list(itertools.chain(*values))


@given(NUMBERS)
def test_distinct_is_numpy_unique(numbers: list[int]) -> None:
    found, which = distinct(ints(numbers))
    expected, inverse = np.unique(ints(numbers), return_inverse=True)
    assert found.tolist() == expected.tolist() and which.tolist() == inverse.tolist()


@given(NUMBERS.map(sorted))
def test_runs_of_equal_numbers(numbers: list[int]) -> None:
    runs = [list(run) for _, run in itertools.groupby(numbers)]
    offsets = Offsets.of_sorted(ints(numbers))
    assert begins(ints(numbers)).tolist() == offsets.first[:-1].tolist()
    assert offsets.counts().tolist() == [len(run) for run in runs] and len(offsets) == len(runs)


@given(SIZES)
def test_offsets_are_lists_of_lists(owned: list[list[int]]) -> None:
    """Every method, on sizes that stand in a list for each owner; owners may have none, last ones too."""
    offsets = Offsets.of_counts(ints([len(sizes) for sizes in owned]))
    sizes = ints([size for sizes in owned for size in sizes])
    assert len(offsets) == len(owned)
    assert offsets.counts().tolist() == [len(sizes) for sizes in owned]
    assert offsets.owners().tolist() == [i for i, own in enumerate(owned) for _ in own]
    assert offsets.spread(ints([7 * i for i in range(len(owned))])).tolist() == [
        7 * i for i, own in enumerate(owned) for _ in own
    ]
    assert offsets.sums(sizes).tolist() == [sum(own) for own in owned]
    assert offsets.begin(sizes).tolist() == [sum(own[:i]) for own in owned for i in range(len(own))]


@pytest.mark.parametrize("make", [Offsets.of_sorted, Offsets.of_counts])
def test_no_owners(make) -> None:
    none = make(ints([]))
    assert len(none) == 0 and none.first.tolist() == [0]
    for found in (none.counts(), none.owners(), none.sums(ints([])), none.begin(ints([]))):
        assert found.tolist() == [] and found.dtype == np.int64
