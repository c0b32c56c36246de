"""Rounding: float32 as FP8 and FP4 codes and back, bit for bit as `shardmath.values.formats.floats` does.

1. torch's casts to float8 round correctly, subnormals too. But some numbers that are too large become infinite, so
   numbers are clamped before; and a NaN keeps its sign, so NaN are overwritten.
2. torch has no cast to E2M1. Adding a power of two whose last bit is worth one step rounds to whole steps.
3. Casts from float8 take six times as long as a table of all codes. The table of E2M1 is of bytes, two numbers each.

>>> codes = torch.empty(4, dtype=torch.uint8)
>>> round_into(E4M3, torch.tensor([1, -0.5, 1000, 5]), codes)
>>> codes
tensor([ 56, 176, 126,  74], dtype=torch.uint8)
>>> numbers = torch.empty(4)
>>> read_into(make_table(E4M3, codes.device), codes, numbers)
>>> numbers
tensor([  1.0000,  -0.5000, 448.0000,   5.0000])
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from shardmath.values.formats.floats import E2M1, E4M3, Float, decode, unpack_pairs
from shardmath_torch.groups.dtypes import dtype_of, flat
from shardmath_torch.tensors.formats.casting import may_have_nan

__all__ = ["make_table", "read_e4m3", "read_e8m0", "read_into", "round_into"]

FRACTION = 23
"""The number of bits of a float32's fraction."""
FIELD = 0x7F80_0000
"""The mask of a float32's exponent."""


def round_into(element: Float, values: Tensor, out: Tensor) -> None:
    """Write float32 `values` as codes of type `element` to `out`, two per byte for E2M1. `values` are overwritten."""
    if element is E2M1:
        codes = _round_e2m1(values).to(torch.uint8)
        out.copy_(_pack(codes))
        return
    values.clamp_(-element.most, element.most)
    out.view(dtype_of(element.dtype)).copy_(values)
    if may_have_nan(values):
        out.masked_fill_(values.isnan(), element.nan)


def _round_e2m1(values: Tensor) -> Tensor:
    """The E2M1 codes, as int32."""
    # NaN has no code, and becomes the largest number, positive.
    values.nan_to_num_(nan=E2M1.most)
    # From bit 31 of a float32 to bit 3 of a code.
    signs = values.view(torch.int32) >> 28 & 8
    magnitude = values.abs_().clamp_(max=E2M1.most)
    # Steps are of 1/2 below 2, and twice as large from each power of two on.
    power = magnitude.clamp(min=1).view(torch.int32) & FIELD
    # In an exponent's field, 127 stands for 0.
    binades = power - (127 << FRACTION) >> FRACTION
    # The last bit of 2^22 times the power of two is worth half the power, one step.
    adder = power.add_(22 << FRACTION)
    rounded = magnitude.add_(adder.view(torch.float32))
    steps = rounded.view(torch.int32) - adder
    # Every binade begins after two of its own steps, and with a code two higher than the last one.
    return steps.add_(binades, alpha=2).bitwise_or_(signs)


def _pack(codes: Tensor) -> Tensor:
    """Two codes in each byte, the first in the low bits."""
    if sys.byteorder == "big":
        return codes[..., ::2] | codes[..., 1::2] << 4
    # Two bytes as one word: the second code is shifted next to the first, and the word's low byte has both.
    pairs = codes.view(torch.int16)
    return (pairs | pairs >> 4).to(torch.uint8)


def make_table(element: Float, device: torch.device) -> Tensor:
    """Return a lookup table of 256 entries, one for each byte: the number, as float32, that the byte encodes in the
    format `element`. A byte of E2M1 encodes two numbers, and its entry is a float64 with the bits of both.
    """
    codes = np.arange(256, dtype=np.uint8)
    if element is not E2M1:
        return torch.from_numpy(decode(element, codes)).to(device)
    pairs = decode(element, unpack_pairs(codes[:, None]))
    return torch.from_numpy(pairs).to(device).view(torch.float64)[:, 0]


def read_into(table: Tensor, codes: Tensor, out: Tensor) -> None:
    """Look up each byte of `codes` in `table`, and write the numbers into `out`, a contiguous float32 tensor. Each byte
    gives one number, or two if the format is E2M1.
    """
    indices = flat(codes.to(torch.int32, memory_format=torch.contiguous_format))
    # A byte of two numbers is looked up as one element of twice the size.
    torch.index_select(table, 0, indices, out=flat(out).view(table.dtype))


def read_e4m3(codes: Tensor) -> Tensor:
    """Decode bytes of E4M3 numbers to float32, by a cast, which suits small tensors such as scales."""
    return codes.contiguous().view(dtype_of(E4M3.dtype)).float()


def read_e8m0(codes: Tensor) -> Tensor:
    """Decode bytes of E8M0 scales to float32: 2^(b - 127) for each byte b, exactly, and NaN for 255."""
    bits = codes.to(torch.int32) << FRACTION
    # Byte 0, 2^-127, is a subnormal float32; the exponent 255 with a zero fraction would be infinity instead of NaN.
    bits.masked_fill_(bits == 0, 1 << (FRACTION - 1))
    bits.masked_fill_(bits == FIELD, 0x7FC0_0000)
    return bits.view(torch.float32)
