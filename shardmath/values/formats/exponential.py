"""Exponential: exp in float64 by sums and products only, which numpy and torch round identically on every machine.

The last bits of numpy's and torch's own exp differ, and depend on the processor. This one is accurate to 2^-51 if the
result is in the range of float32, so that rounding it to float32 gives the nearest number except once in millions.

>>> float(np.float32(exp(np.array(1.0), power_of_two)))
2.7182817459106445
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVar

import numpy as np

from shardmath.values.formats.elements import Array

__all__ = ["exp", "power_of_two"]

LIMIT = 200.0
"""Beyond this the result is 0 or infinite in float32."""

LOG2_E = 1 / math.log(2)
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10
"""ln 2 as the sum of a number with many zeros, so that its multiples are exact, and the rest (fdlibm)."""

TERMS = 13
"""Of the series; the rest is below 2^-57 of the sum."""


class _Numbers(Protocol):
    """The operations that numpy arrays and torch tensors have in common."""

    def clip(self: _N, least: float, most: float, /) -> _N: ...
    def round(self: _N) -> _N: ...
    def __mul__(self: _N, other: float | _N, /) -> _N: ...
    def __add__(self: _N, other: float, /) -> _N: ...
    def __sub__(self: _N, other: _N, /) -> _N: ...


_N = TypeVar("_N", bound=_Numbers)


def exp(x: _N, power: Callable[[_N], _N]) -> _N:
    """Compute e^`x` in float64, with the same bits on every machine, by means of `power`, a function that returns 2^k
    in float64 for integers k. Numbers below -200 count as -200, and those above 200 as 200."""
    clipped = x.clip(-LIMIT, LIMIT)
    # e^x = 2^k e^rest, where rest is so small that the series ends soon.
    k = (clipped * LOG2_E).round()
    # In two steps, of which the first has an exact product, so that rest keeps its low bits.
    rest = clipped - k * LN2_HIGH - k * LN2_LOW
    # rest * 0.0 makes a constant of the same shape and device, and keeps NaN.
    total = rest * 0.0 + 1 / math.factorial(TERMS)
    for n in reversed(range(TERMS)):
        total = total * rest + 1 / math.factorial(n)
    return total * power(k)


def power_of_two(k: Array) -> Array:
    """Compute 2^`k` in float64, by setting its bits, for an array `k` of whole numbers from -1022 to 1023."""
    with np.errstate(invalid="ignore"):  # NaN gives NaN in the end, whatever its power is
        exponents = k.astype(np.int64) + 1023
    return np.asarray(exponents << 52).view(np.float64)
