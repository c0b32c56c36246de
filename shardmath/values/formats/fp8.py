"""FP8: numbers of 8 bits with float32 scales, per tile, per channel or per tensor.

1. Data are multiplied by their scale (`weight_scale_inv` in DeepSeek's checkpoints, `weight_scale` in vLLM's), which is
   amax / 448 in float32. Data are x / scale in float32, rounded to nearest, ties to even, saturated.
2. `power_of_two` (TransformerEngine's default for tiles): 448 / amax is rounded down to a power of two, and the scale
   is 1 over it. With either kind of scale, quantizing dequantized numbers again changes nothing.
3. **Zero blocks**, and blocks with an **Inf**, have scale 1, as in TransformerEngine. Other scales are 2^-126 or more,
   so **tiny blocks** (amax below 448 times that) keep multiples of 2^-135, and no divisor is subnormal.
4. **NaN** does not count for the amax and becomes NaN; Inf becomes the largest number.
5. A block may be a whole channel or tensor. Its scale is on every rank, however the tensor is cut, and belongs to every
   slice; but quantizing a part needs the amax of the whole block.

>>> import numpy as np
>>> data, scales = FP8Blocks((1, 128)).quantize(np.full((1, 256), 896, np.float32))
>>> data[0, 0].item(), scales
(126, array([[2., 2.]], dtype=float32))
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmath.base.errors import FormatError
from shardmath.base.text import shown
from shardmath.values.formats.blocks import Blocks
from shardmath.values.formats.floats import Float, Floats
from shardmath.values.formats.format import Array, Format, Part, read_choice, read_flag
from shardmath.values.formats.mxfp8 import ELEMENTS
from shardmath.values.formats.windows import Window

__all__ = ["FP8", "FP8Blocks", "divide_amax", "read_amax"]

LEAST = np.float32(2**-126)
"""The smallest scale: the smallest normal float32."""
GREATEST = np.float32(2**126)
"""1 / LEAST."""

GRANULARITIES = {"tensor": Blocks((), others=None), "channel": Blocks((None,))}


class _Scaled(Format):
    """A format whose scales are float32."""

    __slots__ = ()

    data: str
    power_of_two: bool

    @property
    def element(self) -> Float:
        """The float type of the data: E4M3 or E5M2."""
        return ELEMENTS[self.data]

    @property
    def parts(self) -> tuple[Part, ...]:
        """Descriptions of the arrays of a quantized tensor: data as uint8, and float32 scales."""
        return (
            Part("data", self.element.dtype, "uint8", Blocks(())),
            Part("scales", "float32", "float32", self.blocks),
        )

    def _make_scales(self, amax: Floats) -> Floats:
        divide = _divide_roundly if self.power_of_two else divide_amax
        most = np.float32(self.element.most)
        scales: Floats = divide(amax, most)
        # By rule 3: neither 0 nor infinity can be scaled to the largest number.
        scales[amax == 0] = 1
        scales[np.isinf(amax)] = 1
        return scales

    def _scale_down(self, values: Floats, scales: Array) -> Floats:
        quotients = np.empty_like(values)
        np.divide(values, scales, out=quotients)
        return quotients

    def _read_scales(self, scales: Array) -> Floats:
        return scales

    def _check(self) -> None:
        """Normalize the fields. Raises FormatError for invalid ones."""
        read_choice(self, "data", tuple(ELEMENTS))
        read_flag(self, "power_of_two")


def divide_amax(amax: Floats, most: np.float32) -> Floats:
    """Return the scales `amax` / `most`, but at least 2^-126; `most` is the largest number of the format."""
    scales: Floats = np.maximum(amax / most, LEAST)
    return scales


def _divide_roundly(amax: Floats, most: np.float32) -> Floats:
    """The scales `amax` / `most`, but at least 2^-126, and with 1 / scale rounded down to a power of two."""
    inverse: Floats = np.minimum(most / amax, GREATEST)
    # Clearing the fraction rounds down; the exponent field of 1 / 2^k is 254 minus the field of 2^k.
    power = inverse.view(np.uint32) & 0x7F80_0000
    bits = np.uint32(254 << 23) - power
    scales: Floats = bits.view(np.float32)
    return scales


@dataclass(frozen=True, slots=True)
class FP8Blocks(_Scaled):
    """A format of FP8 numbers with a float32 scale per tile (`block`) of the last dimensions, such as (128, 128) for
    weights and (1, 128) for activations.

    The last tile of a dimension may be shorter. Raises FormatError for an empty tile, sizes below 1, and other values.
    """

    block: tuple[int, ...] = (128, 128)
    power_of_two: bool = False
    data: str = "e4m3"

    def __post_init__(self) -> None:
        self._check()
        sizes = Blocks(self.block).sizes
        if not sizes or None in sizes:
            raise FormatError(
                f"FP8Blocks({shown(self.block)}) has a tile without a size; give sizes such as (128, 128)"
            )
        object.__setattr__(self, "block", sizes)

    @property
    def name(self) -> str:
        """The format's name for people, which states the element type, the block size, and whether scales are powers of
        two, such as "FP8 e4m3 per 128 x 128"."""
        kind = " powers of two" if self.power_of_two else ""
        return f"FP8 {self.data} per {self.blocks}{kind}"

    @property
    def blocks(self) -> Blocks:
        """The size of the tiles whose positions share a scale."""
        return Blocks(self.block)


@dataclass(frozen=True, slots=True)
class FP8(_Scaled):
    """A format of FP8 numbers with float32 scales. If `per` is "tensor", one scale is for the whole tensor; if `per` is
    "channel", each row along the last dimension has a scale.

    `tensor_amax` is the whole tensor's largest magnitude if all ranks know it, as for calibrated activations; then
    every part can be quantized separately. Raises FormatError for other values, and for a tensor_amax per channel.
    """

    per: str = "tensor"
    power_of_two: bool = False
    data: str = "e4m3"
    tensor_amax: float | None = None

    def __post_init__(self) -> None:
        self._check()
        read_choice(self, "per", tuple(GRANULARITIES))
        object.__setattr__(self, "tensor_amax", read_amax(self.tensor_amax))
        if self.per == "channel" and self.tensor_amax is not None:
            what = f"FP8(per='channel', tensor_amax={self.tensor_amax})"
            raise FormatError(f"{what}: each channel has its own amax; leave tensor_amax out")

    @property
    def name(self) -> str:
        """The format's name for people, such as "FP8 e4m3 per channel". It states the element type, what shares a
        scale, whether scales are powers of two, and the tensor's largest magnitude if the format was created with
        it."""
        kind = " powers of two" if self.power_of_two else ""
        known = "" if self.tensor_amax is None else f" of {self.tensor_amax:g}"
        return f"FP8 {self.data} per {self.per}{kind}{known}"

    @property
    def blocks(self) -> Blocks:
        """The positions that share a scale: the whole tensor, or a row along the last dimension."""
        return GRANULARITIES[self.per]

    def _find_amax(self, values: Floats, window: Window) -> Floats:
        if self.tensor_amax is not None:
            return np.full(window.count, self.tensor_amax, np.float32)
        # Not super(): dataclass(slots=True) makes a new class, which breaks super() without arguments.
        return Format._find_amax(self, values, window)


def read_amax(given: object) -> float | None:
    """Round `given`, a largest magnitude, to float32; None stays None. Raises FormatError unless it is finite and >=
    0."""
    if given is None:
        return None
    try:
        with np.errstate(over="ignore"):
            number = float(np.float32(given))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number < np.inf or isinstance(given, str | bool):
        what = f"tensor_amax={shown(given)} is not a magnitude in float32"
        raise FormatError(f"{what}; give a finite number >= 0")
    return number
