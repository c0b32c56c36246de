"""Gaps against sets of elements."""

from __future__ import annotations

import itertools
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from shardmath.layouts.algebra import gaps
from shardmath.layouts.algebra.gaps import Product, Ranges, find_gap


def ranges_of(positions: frozenset[int]) -> Ranges:
    """Maximal ranges, ascending."""
    starts = sorted(x for x in positions if x - 1 not in positions)
    stops = sorted(x + 1 for x in positions if x + 1 not in positions)
    return tuple(zip(starts, stops, strict=True))


@st.composite
def products(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Product, ...]]:
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    held = st.tuples(*(st.frozensets(st.integers(0, n - 1)).map(ranges_of) for n in shape))
    return shape, tuple(draw(st.lists(held, max_size=6)))


@given(products(), st.sampled_from([0, 30, gaps.GRID]))
def test_the_first_gap(case: tuple[tuple[int, ...], tuple[Product, ...]], grid: int) -> None:
    """Whatever room there is for a grid."""
    shape, held = case
    had = {
        element
        for product in held
        for element in itertools.product(*([x for r in d for x in range(*r)] for d in product))
    }
    missing = set(itertools.product(*map(range, shape))) - had
    with mock.patch.object(gaps, "GRID", grid):
        assert find_gap(shape, held) == min(missing, default=None)
