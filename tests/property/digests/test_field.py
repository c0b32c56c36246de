"""Arithmetic modulo 2^61 - 1 in int64 is that of Python's integers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shardmath.values.digests.field import PRIME, add_up, double, multiply, table, weigh_positions

numbers = st.one_of(
    st.integers(0, PRIME - 1),
    st.sampled_from([0, 1, PRIME - 1, PRIME // 2, (1 << 31) - 1, 1 << 31, (1 << 60) - 1]),
)


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=20), st.integers(0, 60))
def test_operations(pairs: list[tuple[int, int]], times: int) -> None:
    a, b = np.array(pairs, np.int64).T
    assert multiply(a, b).tolist() == [x * y % PRIME for x, y in pairs]
    assert double(a, times).tolist() == [(x << times) % PRIME for x, _ in pairs]
    assert int(add_up(a)) == sum(x for x, _ in pairs) % PRIME


def test_the_largest_numbers() -> None:
    """Nothing leaves int64: numpy would wrap around, and say nothing."""
    most = np.full(1 << 12, PRIME - 1, np.int64)
    assert set(multiply(most, most).tolist()) == {1}
    assert int(add_up(most)) == (PRIME - 1) * (1 << 12) % PRIME


@given(st.integers(0, (1 << 40) - 1), st.integers(0, 20))
def test_weights_are_products_of_bits(index: int, shift: int) -> None:
    weight = 1
    for bit in range(index.bit_length()):
        if index >> bit & 1:
            weight = weight * int(table(3, 1, bit + shift, 1)[1]) % PRIME
    assert weigh_positions(3, 1, np.array([index]), shift).tolist() == [weight]


def test_no_weight_is_zero_and_all_differ() -> None:
    weights = weigh_positions(0, 0, np.arange(1 << 16))
    assert weights.min() > 0 and len(np.unique(weights)) == 1 << 16
    assert not np.array_equal(weights, weigh_positions(0, 1, np.arange(1 << 16)))
    assert not np.array_equal(weights, weigh_positions(1, 0, np.arange(1 << 16)))
