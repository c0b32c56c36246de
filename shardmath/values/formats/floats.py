"""Floats of 8 and 4 bits, exact to the bit: rounded to nearest, ties to even, and saturated.

1. Larger numbers than the largest finite one, and infinities, become the largest finite one, as in the casts of GPUs
   (`cvt.rn.satfinite`). The casts of torch and ml_dtypes differ from these, and from each other.
2. NaN becomes the NaN without a sign. E2M1 has no NaN; NaN becomes 6, as in PTX.
3. Everything is computed with integers, so that no processor setting (flushed subnormals) changes a bit.
4. E8M0 is a power of two: byte b is 2^(b - 127), and 255 is NaN. It has no zero and no sign.

>>> encode(E4M3, np.array([1, -0.5, 1000, 0.3], np.float32))
array([ 56, 176, 126,  42], dtype=uint8)
>>> decode(E4M3, np.array([56, 176, 126, 42], np.uint8))
array([ 1.000e+00, -5.000e-01,  4.480e+02,  3.125e-01], dtype=float32)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.memo import memo

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "Codes",
    "Float",
    "Floats",
    "decode",
    "decode_e8m0",
    "encode",
    "pack_pairs",
    "unpack_pairs",
]

Floats: TypeAlias = NDArray[np.float32]
Codes: TypeAlias = NDArray[np.uint8]
"""Numbers of 8 or fewer bits, one per byte."""
_Bits: TypeAlias = NDArray[np.uint32]

FRACTION = 23
"""Bits of a float32's fraction."""
BIAS = 127
"""Of a float32's exponent, and of E8M0."""
NAN_BITS = 0x7FC0_0000


@dataclass(frozen=True, slots=True)
class Float:
    """A float type of few bits, such as E4M3: how many bits it has in all and in its fraction, the exponent bias, and
    the code (bit pattern) of its largest finite number.

    `dtype` is its name in torch; an element of `float4_e2m1fn_x2` is a byte of two numbers. Codes above the largest are
    NaN, except the first of them if the type has an infinity.
    """

    name: str
    dtype: str
    bits: int
    fraction: int
    bias: int
    largest: int
    has_infinity: bool = False

    @property
    def nan(self) -> int:
        """The code (bit pattern) of NaN without a sign, or of the largest number if the type has no NaN."""
        return (1 << (self.bits - 1)) - 1

    @property
    def most(self) -> float:
        """The largest finite number of the type."""
        return float(_decode_all(self)[self.largest])

    @property
    def exponent(self) -> int:
        """The exponent e of the type's largest finite number, which lies between 2^e and 2^(e + 1): 8 for E4M3, whose
        largest number is 448."""
        return (self.largest >> self.fraction) - self.bias


E4M3 = Float("e4m3", "float8_e4m3fn", 8, 3, 7, 0x7E)
E5M2 = Float("e5m2", "float8_e5m2", 8, 2, 15, 0x7B, has_infinity=True)
E2M1 = Float("e2m1", "float4_e2m1fn_x2", 4, 1, 1, 0x7)


def encode(kind: Float, values: Floats) -> Codes:
    """Round float32 `values` to the float type `kind`, too large ones to its largest number; return their codes (bit
    patterns) in an array of equal shape."""
    bits: _Bits = values.view(np.uint32)
    magnitude: _Bits = bits & np.uint32(0x7FFF_FFFF)
    codes = _round_magnitude(kind, magnitude)
    codes = np.minimum(codes, kind.largest)
    signs = bits >> 31
    codes |= signs << (kind.bits - 1)
    is_nan = magnitude > 0x7F80_0000
    codes[is_nan] = kind.nan
    return codes.astype(np.uint8)


def _round_magnitude(kind: Float, magnitude: _Bits) -> _Bits:
    """The codes of numbers without a sign, as if the type had unlimited exponents."""
    field = magnitude >> FRACTION
    hidden = (field > 0).astype(np.uint32)
    significand = magnitude & 0x7F_FFFF
    significand |= hidden << FRACTION
    exponent = np.maximum(field, 1).astype(np.int32) - BIAS
    least = 1 - kind.bias
    # Below the least exponent the spacing of numbers stays the same, so more bits are dropped.
    dropped = FRACTION - kind.fraction + np.maximum(least - exponent, 0)
    # Dropping 25 bits or more leaves 0, and shifts by more than 31 are undefined.
    dropped = np.minimum(dropped, FRACTION + 2).astype(np.uint32)
    odd = (significand >> dropped) & 1
    half = np.uint32(1) << (dropped - 1)
    steps = (significand + half - 1 + odd) >> dropped
    # The hidden bit in `steps` adds 1 to the exponent field, and so does a carry out of the fraction.
    binades = np.maximum(exponent - least, 0).astype(np.uint32)
    codes: _Bits = (binades << kind.fraction) + steps
    return codes


def decode(kind: Float, codes: Codes) -> Floats:
    """Return the float32 numbers that `codes` stand for in the float type `kind`."""
    return _decode_all(kind)[codes]


@memo()
def _decode_all(kind: Float) -> Floats:
    """The number of each code of the type."""
    hidden = 1 << kind.fraction
    codes = np.arange(1 << kind.bits)
    # `nan` has all bits but the sign.
    unsigned = codes & kind.nan
    field, steps = np.divmod(unsigned, hidden)
    steps[field > 0] += hidden
    exponent = np.maximum(field, 1)
    exponent -= kind.bias + kind.fraction
    values: Floats = np.ldexp(steps, exponent).astype(np.float32)
    values[unsigned > kind.largest] = np.nan
    if kind.has_infinity:
        values[unsigned == kind.largest + 1] = np.inf
    # NaN keeps its sign, too.
    np.negative(values, out=values, where=codes > unsigned)
    values.flags.writeable = False
    return values


def decode_e8m0(codes: Codes) -> Floats:
    """Return the float32 numbers 2^(b - 127) for each byte b of `codes`, exactly; NaN for 255."""
    bits = codes.astype(np.uint32)
    bits <<= FRACTION
    # 2^-127 is a subnormal float32; exponent 255 without a fraction would be an infinity.
    bits[codes == 0] = 1 << (FRACTION - 1)
    bits[codes == 255] = NAN_BITS
    values: Floats = bits.view(np.float32)
    return values


def pack_pairs(codes: Codes) -> Codes:
    """Pack 4-bit `codes` two per byte along the last dimension, the first in the low bits."""
    low = codes[..., ::2]
    high = codes[..., 1::2] << 4
    packed: Codes = np.bitwise_or(low, high)
    return packed


def unpack_pairs(packed: Codes) -> Codes:
    """Return the 4-bit codes that `pack_pairs` packed two per byte."""
    pairs = np.stack((packed & 0xF, packed >> 4), axis=-1)
    *outer, count, _ = pairs.shape
    return pairs.reshape(*outer, 2 * count)
