"""Scaling: the scales of blocks from their largest magnitudes, and numbers divided and multiplied by them.

1. Operations, their order, and float32 arithmetic are as `shardmath.formats` defines, here on tensors.
2. Numbers are changed in place, with scales that are broadcast to them.
3. Divisors are tensors on the device: on a GPU, torch divides by a Python number as a product with its inverse.

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
"""The byte of E8M0 that is NaN, and the exponent of a float32 infinity."""


class ScaleRule(ABC):
    """The interface of a format's arithmetic: how it computes scales, and divides and multiplies numbers by them."""

    @abstractmethod
    def make_scales(self, amax: Tensor) -> Tensor:
        """Return the scales, in their stored dtype, of blocks whose largest magnitudes are `amax`."""

    @abstractmethod
    def scale_down(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return `values` divided by their `scales`, ready to be rounded; in place if possible."""

    @abstractmethod
    def scale_up(self, values: Tensor, scales: Tensor) -> Tensor:
        """Return the rounded `values` multiplied by their `scales`, in place."""


@dataclass(frozen=True, slots=True)
class _PowersOfTwo(ScaleRule):
    """The rule of MXFP8: scales are powers of two in E8M0."""

    element: Float
    is_up: bool

    def make_scales(self, amax: Tensor) -> Tensor:
        fields = self._round_up(amax) if self.is_up else self._round_down(amax)
        return fields.to(torch.uint8)

    def _round_up(self, amax: Tensor) -> Tensor:
        """Exponents of amax / most, rounded up."""
        inverse = np.float32(1) / np.float32(self.element.most)
        bits = (amax * float(inverse)).view(torch.int32)
        # Numbers up to 2^-127 have byte 0; larger subnormals round up to 2^-126, which has byte 1.
        bits.masked_fill_(bits <= SUBNORMAL, 0)
        # Any fraction but 0 carries into the exponent.
        bits.add_((1 << FRACTION) - 1).bitwise_right_shift_(FRACTION)
        return bits.clamp_(max=MOST_BYTE)

    def _round_down(self, amax: Tensor) -> Tensor:
        """Exponents of amax, minus the exponent of the largest number; for infinities, the byte of NaN."""
        fields = amax.contiguous().view(torch.int32) >> FRACTION
        is_infinite = fields == NAN_BYTE
        return fields.sub_(self.element.exponent).clamp_(min=0).masked_fill_(is_infinite, NAN_BYTE)

    def scale_down(self, values: Tensor, scales: Tensor) -> Tensor:
        # Byte 254 - b stands for 2^(127 - b), the inverse of byte b, and the product is exact. NaN, 255, gives 255.
        return values.mul_(read_e8m0(MOST_BYTE - scales))

    def scale_up(self, values: Tensor, scales: Tensor) -> Tensor:
        return values.mul_(read_e8m0(scales))


@dataclass(frozen=True, slots=True)
class _Float32(ScaleRule):
    """The rule of FP8 with float32 scales."""

    element: Float
    power_of_two: bool

    def make_scales(self, amax: Tensor) -> Tensor:
        divide = _make_power_of_two_scales if self.power_of_two else _make_exact_scales
        scales = divide(amax, self.element.most)
        return _fill_ones(scales, amax)

    def scale_down(self, values: Tensor, scales: Tensor) -> Tensor:
        return values.div_(scales)

    def scale_up(self, values: Tensor, scales: Tensor) -> Tensor:
        return values.mul_(scales)


def _make_exact_scales(amax: Tensor, most: float) -> Tensor:
    """The scales that map the largest magnitudes to the format's largest number."""
    return amax.div(amax.new_full((), most)).clamp_(min=LEAST)


def _make_power_of_two_scales(amax: Tensor, most: float) -> Tensor:
    """The scales that are powers of two: the inverse of the exact scale is rounded down to a power of two."""
    inverse = amax.new_full((), most).div(amax).clamp_(max=1 / LEAST)
    power = inverse.view(torch.int32) & FIELD
    # The inverse of a power of two with exponent field f has the field 254 - f.
    return power.neg_().add_(MOST_BYTE << FRACTION).view(torch.float32)


def _fill_ones(scales: Tensor, amax: Tensor) -> Tensor:
    """Set the scales of blocks of zeros, and of blocks with an infinity, to 1."""
    return scales.masked_fill_((amax == 0) | amax.isinf(), 1)


@dataclass(frozen=True, slots=True)
class _Global(ScaleRule):
    """The rule of NVFP4, with the global scale as a float32 scalar."""

    g: Tensor

    def make_scales(self, amax: Tensor) -> Tensor:
        quotients = amax / (self.g * E2M1.most)
        scales = torch.empty(amax.shape, dtype=torch.uint8, device=amax.device)
        round_into(E4M3, quotients, scales)
        return scales

    def scale_down(self, values: Tensor, scales: Tensor) -> Tensor:
        factors = read_e4m3(scales)
        quotients = values / (factors * self.g)
        # A block with scale zero becomes signed zeros instead of quotients by zero.
        is_zero = factors == 0
        if is_zero.device.type == "cpu" and not is_zero.any():
            return quotients
        return torch.where(is_zero, torch.zeros_like(values).copysign_(values), quotients)

    def scale_up(self, values: Tensor, scales: Tensor) -> Tensor:
        # The first product is exact, so that there is one rounding.
        return values.mul_(read_e4m3(scales)).mul_(self.g)


def find_rule(format: Format, g: Tensor | None = None) -> ScaleRule:
    """Return the ScaleRule (scale arithmetic) of `format`; for NVFP4, `g` is the global scale. Raises FormatError if
    the format has no rule.
    """
    match format:
        case MXFP8():
            return _PowersOfTwo(format.element, format.rounding == "rceil")
        case FP8Blocks() | FP8():
            return _Float32(format.element, format.power_of_two)
        case NVFP4() if g is not None:
            return _Global(g)
    fix = "pass MXFP8, FP8Blocks, FP8 or NVFP4 of sm.formats"
    raise FormatError(f"tensors cannot be quantized to {shown(format)}; {fix}")


def make_global_scale(format: NVFP4, amax: Tensor) -> Tensor:
    """Return NVFP4's global scale, a scalar, computed from `format.tensor_amax` or, if None, from the blocks' largest
    magnitudes `amax`.
    """
    if format.tensor_amax is not None:
        largest = amax.new_full((), format.tensor_amax)
    elif amax.numel():
        largest = amax.amax()
    else:
        largest = amax.new_zeros(())
    # The largest magnitude is this scale, times the largest scale of a block, times the largest number of the data.
    g = _make_exact_scales(largest, E2M1.most * E4M3.most)
    return _fill_ones(g, largest)
