"""Casting: conversion of numbers between dtypes, in numpy; the oracle for the casts of backends.

1. Floats are rounded to nearest, ties to even; numbers that are too large become infinite.
2. float64 and integers are cast to 16-bit types by way of float32, and so rounded twice, as torch does.
3. Every NaN becomes the quiet NaN without a sign. In torch, NaNs in the middle of a tensor differ from those at its
   end: 0xFFFF and 0x7FC0 of bfloat16, on AVX.
4. Integers that do not fit keep their low bits. Floats are never cast to integers: the results for NaN and large
   numbers differ from machine to machine.
5. float8 and smaller types need scales, and complex numbers have two parts, so they are not cast.

>>> cast_array(np.array([1.00390625, 1.01171875, np.inf], np.float32), "float32", "bfloat16")
array([16256, 16258, 32640], dtype=uint16)
"""

from __future__ import annotations

import numpy as np

from shardmath.base.dtypes import ITEMSIZE, is_bool, is_integer
from shardmath.values.formats.elements import Array, numpy_type

__all__ = ["NAN", "SHORT", "cast_array", "is_float", "refuse_cast"]

EXACT_BITS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}
"""Bits up to which every integer is a number of the dtype."""

NAN = {
    "bfloat16": 0x7FC0,
    "float16": 0x7E00,
    "float32": 0x7FC0_0000,
    "float64": 0x7FF8_0000_0000_0000,
}
"""The bits of NaN."""

SHORT = ("bfloat16", "float16")


def is_float(dtype: str) -> bool:
    """Return whether `dtype` is a float dtype that can be cast: bfloat16, float16, float32 or float64."""
    return dtype in EXACT_BITS


def refuse_cast(src: str, dst: str, lossy: bool) -> str:
    """Return why the dtype `src` cannot be cast to `dst`, as the end of an error message; "" if it can. Casts that
    could lose values need `lossy`."""
    if src == dst:
        return ""
    for dtype in (src, dst):
        if not _is_number(dtype):
            return f"{dtype} has no cast; use transforms.Custom, with scales if it needs them"
    if is_float(src) and is_integer(dst):
        return (
            "the results for NaN and large numbers differ between machines; use transforms.Custom"
        )
    if lossy or _fits(src, dst):
        return ""
    return "values could be lost; pass lossy=True if that is meant"


def _is_number(dtype: str) -> bool:
    """Whether each element is one number that needs no scale."""
    return is_float(dtype) or is_integer(dtype) or is_bool(dtype)


def _fits(src: str, dst: str) -> bool:
    """Whether a cast keeps the numbers; rounding of floats does not count as a loss."""
    if is_bool(src) or (is_float(src) and is_float(dst)):
        return True
    if is_bool(dst) or is_float(src):
        return False
    if is_float(dst):
        return _value_bits(src) <= EXACT_BITS[dst]
    is_signed = not src.startswith("u")
    if is_signed and dst.startswith("u"):
        return False
    return _value_bits(src) <= _value_bits(dst)


def _value_bits(dtype: str) -> int:
    """Bits of an integer without its sign."""
    return 8 * ITEMSIZE[dtype] - (not dtype.startswith("u"))


def cast_array(array: Array, src: str, dst: str) -> Array:
    """Cast `array`, with elements of dtype `src`, to the dtype `dst`; return `array` itself if the two are equal."""
    if src == dst:
        return array
    values = _widen(array) if src == "bfloat16" else array
    with np.errstate(all="ignore"):
        if dst in SHORT:
            # numpy would round float64 to float16 once, torch rounds it twice.
            values = values.astype(np.float32)
        out = _round_to_bfloat16(values) if dst == "bfloat16" else values.astype(numpy_type(dst))
    if not is_float(src) or not is_float(dst):
        return out
    words = out.view(f"uint{8 * ITEMSIZE[dst]}")
    quiet = np.array(NAN[dst], words.dtype)
    return np.where(np.isnan(values), quiet, words).view(numpy_type(dst))


def _widen(words: Array) -> Array:
    """bfloat16 as float32, of which it is the upper half."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def _round_to_bfloat16(values: Array) -> Array:
    """float32 as bfloat16: the upper half, rounded to nearest by the lower half, ties to even. Callers replace NaN."""
    bits = values.view(np.uint32)
    # Adding just less than half rounds down a tie; `odd` makes it half, which rounds up a tie to the next even number.
    # A carry out of the fraction correctly increments the exponent, up to infinity.
    odd = (bits >> 16) & 1
    rounded = (bits + odd + 0x7FFF) >> 16
    return rounded.astype(np.uint16)
