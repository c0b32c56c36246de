"""The field of 2^61 - 1 elements, and a random weight in it for each position of each dimension.

1. Numbers are int64 in 0 .. PRIME - 1. Arithmetic uses only operators, so that arrays may be numpy's or another
   library's.
2. Each bit of an index has a random factor, drawn from the seed and the number of the dimension. The weight of a
   position is the product of the factors of its set bits. So a dimension of 10^9 positions needs 30 random numbers,
   and the weights of an aligned block of 2^k positions are one weight times a table.
3. No factor is 0, so no weight is 0: the field has no divisors of zero.

>>> array = np.array([PRIME - 1, 5], np.int64)
>>> multiply(array, array).tolist(), add_up(array).item()
([1, 25], 4)
>>> weights = weigh_positions(0, 2, np.arange(4))
>>> int(weights[3]) == int(weights[1]) * int(weights[2]) % PRIME
True
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.memo import memo

__all__ = [
    "HALF",
    "PRIME",
    "Numbers",
    "add_up",
    "double",
    "multiply",
    "table",
    "weigh_positions",
]

PRIME = (1 << 61) - 1
"""The largest Mersenne prime for which products of two numbers can be reduced in int64."""

HALF = 31
"""Bits of the lower half of a number that is split in two."""

LOW_HALF = (1 << HALF) - 1
LOW_QUARTER = (1 << (HALF - 1)) - 1

TABLE_BITS = 12
"""Bits of an index that one lookup of weights covers."""

INDEX_BITS = 63
"""Of an index in int64."""

Numbers: TypeAlias = Any
"""An int64 array of numpy, or of a library with the same operators."""


def multiply(a: Numbers, b: Numbers) -> Numbers:
    """Multiply the integer arrays `a` and `b` modulo 2^61 - 1, element by element."""
    # All partial sums are below 2^63: the largest is (2^31 - 1)^2 + 2^61 + 2^61.
    a_high = a >> HALF
    a_low = a & LOW_HALF
    b_high = b >> HALF
    b_low = b & LOW_HALF
    middle = a_low * b_high + a_high * b_low
    # In the field 2^61 is 1 and 2^62 is 2: bits of the middle that are shifted beyond bit 61 reenter at bit 0.
    high = a_high * b_high * 2 + (middle >> (HALF - 1))
    low = a_low * b_low + ((middle & LOW_QUARTER) << HALF)
    return (high + low) % PRIME


def double(a: Numbers, times: int) -> Numbers:
    """Return the numbers `a` times 2^`times` modulo 2^61 - 1, for 0 <= times < 61."""
    # In the field 2^61 is 1: bits that are shifted beyond bit 61 reenter at bit 0.
    low_bits = 61 - times
    low = a & ((1 << low_bits) - 1)
    return ((low << times) + (a >> low_bits)) % PRIME


def add_up(a: Numbers) -> Numbers:
    """Sum `a` over its last axis, which has at most 2^31 numbers, modulo 2^61 - 1."""
    low = (a & LOW_HALF).sum(-1)
    high = (a >> HALF).sum(-1) % PRIME
    return (double(high, HALF) + low % PRIME) % PRIME


@memo(512)
def _draw_factors(seed: int, dimension: int) -> tuple[int, ...]:
    """The factor of each bit of an index of the dimension, 1 .. PRIME - 1."""
    from hashlib import shake_256  # OpenSSL takes 5 ms to load, and `import shardmath` should not

    text = f"shardmath digest {seed} {dimension}"
    drawn = shake_256(text.encode()).digest(16 * INDEX_BITS)
    factors = []
    for start in range(0, len(drawn), 16):
        number = int.from_bytes(drawn[start : start + 16], "little")
        factors.append(number % (PRIME - 1) + 1)
    return tuple(factors)


@memo(512)
def table(seed: int, dimension: int, first_bit: int, bits: int) -> Ints:
    """Return an array of 2^`bits` random weights: item i is the weight of position i * 2^`first_bit` along dimension
    number `dimension`. A digest multiplies each element by the weights of its position; `seed` draws the weights."""
    weights = np.ones(1, np.int64)
    factors = _draw_factors(seed, dimension)
    for factor in factors[first_bit : first_bit + bits]:
        with_bit = multiply(weights, np.int64(factor))
        weights = np.concatenate((weights, with_bit))
    weights.flags.writeable = False
    return weights


def weigh_positions(seed: int, dimension: int, index: Ints, shift: int = 0) -> Ints:
    """Return the random weights, drawn by `seed`, of the positions `index` * 2^`shift` of a dimension; a digest
    multiplies elements by the weights of their positions. `dimension` is the dimension's index.

    With a `shift`, `index` numbers ranges of 2^`shift` positions; the weights are of their first positions.
    """
    weights: Ints | None = None
    most = int(index.max(initial=0))
    # A weight is the product of the factors of a position's bits: some bits at a time are looked up in a table.
    for bit in range(0, max(1, most.bit_length()), TABLE_BITS):
        bits = min(TABLE_BITS, INDEX_BITS - shift - bit)
        products = table(seed, dimension, shift + bit, bits)
        factors = products[(index >> bit) & (len(products) - 1)]
        weights = factors if weights is None else multiply(weights, factors)
    assert weights is not None, "the range has one bit at least"
    return weights
