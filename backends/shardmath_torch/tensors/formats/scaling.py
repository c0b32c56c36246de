"""Scaling: the scales of blocks from their largest magnitudes, and numbers divided by them and multiplied with them.

1. What is computed, in which order and in float32, is what `shardmath.formats` says; here it is on tensors.
2. Numbers are changed in place, with scales that are broadcast to them.
3. Divisors are tensors of the device: by a number torch divides otherwise on a GPU, as a product with its inverse.

>>> from shardmath import formats
>>> amax = torch.tensor([448, 450, 0])
>>> find_rule(formats.MXFP8()).make_scales(amax.float())
tensor([127, 128,   0], dtype=torch.uint8)
>>> find_rule(formats.FP8Blocks()).make_scales(amax.float())
tensor([1.0000, 1.0045, 1.0000])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shardmath.base.errors import FormatError
from shardmath.base.text import shown
from shardmath.values.formats.floats import E2M1, E4M3, Float
from shardmath.values.formats.format import Format
from shardmath.values.formats.fp8 import FP8, FP8Blocks
from shardmath.values.formats.mxfp8 import MXFP8
from shardmath.values.formats.nvfp4 import NVFP4
from shardmath_torch.tensors.formats.rounding import (
    FIELD,
    FRACTION,
    read_e4m3,
    read_e8m0,
    round_into,
)

__all__ = ["ScaleRule", "find_rule", "make_global_scale"]

LEAST = 2.0**-126
"""The smallest float32 scale."""
SUBNORMAL = 0x40_0000
"""The bits of 2^-127."""
MOST_BYTE = 254
"""The largest byte of E8M0 that is a number."""
NAN_BYTE = 255
"""The other one, and the exponent of infinities."""


class ScaleRule(ABC):
    """What a format does with scales."""

    @abstractmethod
    def make_scales(self, amax: Tensor) -> Tensor:
        """The scales of blocks of these largest magnitudes, as they are stored."""

    @abstractmethod
    def scale_down(self, values: Tensor, scales: Tensor) -> Tensor:
        """The numbers as they are rounded; in place, unless that is impossible."""

    @abstractmethod
    def scale_up(self, values: Tensor, scales: Tensor) -> Tensor:
        """The numbers that were rounded, multiplied in place."""


@dataclass(frozen=True, slots=True)
class _PowersOfTwo(ScaleRule):
    """MXFP8."""

    element: Float
    is_up: bool

    def make_scales(self, amax: Tensor) -> Tensor:
        fields = self._round_up(amax) if self.is_up else self._round_down(amax)
        return fields.to(torch.uint8)

    def _round_up(self, amax: Tensor) -> Tensor:
        """Exponents of amax / most, one more where the fraction is not zero."""
        inverse = np.float32(1) / np.float32(self.element.most)
        bits = (amax * float(inverse)).view(torch.int32)
        # Up to 2^-127 the byte is 0; the other subnormal numbers are below 2^-126, which is 1.
        bits.masked_fill_(bits <= SUBNORMAL, 0)
        bits.add_((1 << FRACTION) - 1).bitwise_right_shift_(FRACTION)
        return bits.clamp_(max=MOST_BYTE)

    def _round_down(self, amax: Tensor) -> Tensor:
        """Exponents of amax, less that of the largest number; of infinities the byte that is NaN."""
        fields = amax.contiguous().view(torch.int32) >> FRACTION
        is_infinite = fields == NAN_BYTE
        return fields.sub_(self.element.exponent).clamp_(min=0).masked_fill_(is_infinite, NAN_BYTE)

    def scale_down(self, values: Tensor, scales: Tensor) -> Tensor:
        # 2^(127 - b) is the number of byte 254 - b, and a product with it is exact.
        return values.mul_(read_e8m0(MOST_BYTE - scales))

    def scale_up(self, values: Tensor, scales: Tensor) -> Tensor:
        return values.mul_(read_e8m0(scales))


@dataclass(frozen=True, slots=True)
class _Float32(ScaleRule):
    """FP8 with float32 scales."""

    element: Float
    power_of_two: bool

    def make_scales(self, amax: Tensor) -> Tensor:
        divide = _divide_roundly if self.power_of_two else _divide
        scales = divide(amax, self.element.most)
        return _fill_ones(scales, amax)

    def scale_down(self, values: Tensor, scales: Tensor) -> Tensor:
        return values.div_(scales)

    def scale_up(self, values: Tensor, scales: Tensor) -> Tensor:
        return values.mul_(scales)


def _divide(amax: Tensor, most: float) -> Tensor:
    """The scales by which the largest magnitudes become the largest number."""
    return amax.div(amax.new_full((), most)).clamp_(min=LEAST)


def _divide_roundly(amax: Tensor, most: float) -> Tensor:
    """The same, where 1 over the scale is rounded down to a power of two."""
    inverse = amax.new_full((), most).div(amax).clamp_(max=1 / LEAST)
    power = inverse.view(torch.int32) & FIELD
    # 1 over 2^k has the exponent's field 254 - field.
    return power.neg_().add_(MOST_BYTE << FRACTION).view(torch.float32)


def _fill_ones(scales: Tensor, amax: Tensor) -> Tensor:
    """1 where nothing but zeros is, and where something is infinite."""
    return scales.masked_fill_((amax == 0) | amax.isinf(), 1)


@dataclass(frozen=True, slots=True)
class _Global(ScaleRule):
    """NVFP4, with the scale of all as float32 without dimensions."""

    g: Tensor

    def make_scales(self, amax: Tensor) -> Tensor:
        quotients = amax / (self.g * E2M1.most)
        scales = torch.empty(amax.shape, dtype=torch.uint8, device=amax.device)
        round_into(E4M3, quotients, scales)
        return scales

    def scale_down(self, values: Tensor, scales: Tensor) -> Tensor:
        factors = read_e4m3(scales)
        quotients = values / (factors * self.g)
        # Nothing is divided by zero: such a block has zeros with their signs.
        is_zero = factors == 0
        if is_zero.device.type == "cpu" and not is_zero.any():
            return quotients
        return torch.where(is_zero, torch.zeros_like(values).copysign_(values), quotients)

    def scale_up(self, values: Tensor, scales: Tensor) -> Tensor:
        # The first product is exact, so that there is one rounding.
        return values.mul_(read_e4m3(scales)).mul_(self.g)


def find_rule(format: Format, g: Tensor | None = None) -> ScaleRule:
    """The rule of a format; of NVFP4 with the scale of all. Raises FormatError for a format that is not known here."""
    match format:
        case MXFP8():
            return _PowersOfTwo(format.element, format.rounding == "rceil")
        case FP8Blocks() | FP8():
            return _Float32(format.element, format.power_of_two)
        case NVFP4() if g is not None:
            return _Global(g)
    fix = "give MXFP8, FP8Blocks, FP8 or NVFP4 of shardmath.formats"
    raise FormatError(f"{shown(format)} is no format that tensors are quantised to; {fix}")


def make_global_scale(format: NVFP4, amax: Tensor) -> Tensor:
    """The scale of all, without dimensions, from the amaxes of all blocks."""
    if format.tensor_amax is not None:
        largest = amax.new_full((), format.tensor_amax)
    elif amax.numel():
        largest = amax.amax()
    else:
        largest = amax.new_zeros(())
    g = _divide(largest, E2M1.most * E4M3.most)
    return _fill_ones(g, largest)
