"""MXFP8: blocks of 32 numbers of 8 bits that share a power of two.

1. `rceil` is TransformerEngine's rule: the scale is amax / 448, computed in float32 and rounded up to a power of two,
   so that nothing saturates. `floor` is OCP's (MX 1.0, 6.3): 2^(floor(log2 amax) - 8), which saturates numbers in the
   last eighth of a binade. For E5M2, read 57344 for 448 and 15 for 8.
2. **Zero and tiny blocks** (amax up to 2^-127 times 448) have byte 0, which means 2^-127 rather than zero; their data
   are exact multiples of it. Zeros keep their signs.
3. With `rceil`, **NaN** does not count for the amax and becomes NaN; a block of NaN only has byte 0. **Inf** becomes
   the largest number, and its block has byte 254, with which finite numbers become 0; the product is infinite again.
   With `floor`, a block with NaN or Inf has byte 255, which is NaN, and so are all its data (torchao main 050515e8).
4. Data are x times 2^(127 - b), which is exact, rounded to nearest, ties to even, saturated.
5. With `axis=-2` blocks are 32 rows of one column (TransformerEngine's columnwise copy, which is not transposed).

>>> import numpy as np
>>> data, scales = MXFP8().quantize(np.full((1, 32), 450, np.float32))
>>> data[0, :2], scales
(array([118, 118], dtype=uint8), array([[128]], dtype=uint8))
>>> MXFP8(rounding="floor").quantize(np.full((1, 32), 450, np.float32))[1]
array([[127]], dtype=uint8)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmath.base.arguments import as_integer
from shardmath.base.errors import FormatError
from shardmath.values.formats.blocks import Blocks
from shardmath.values.formats.floats import E4M3, E5M2, Codes, Float, Floats, decode_e8m0
from shardmath.values.formats.format import Array, Format, Part, read_choice

__all__ = ["MXFP8", "round_down", "round_up"]

BLOCK = 32
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}
MOST = 254
"""The largest byte that is a number."""
NAN = 255
"""The byte that means NaN; also the exponent field of float32 infinities."""
SUBNORMAL = 0x40_0000
"""The fraction bits of 2^-127 in float32."""


@dataclass(frozen=True, slots=True)
class MXFP8(Format):
    """The format MXFP8: 8-bit floats of the type `data`, and one power-of-two scale for every 32 numbers along `axis`.
    `rounding` chooses how a scale is rounded to a power of two.

    Raises FormatError for anything else.
    """

    data: str = "e4m3"
    rounding: str = "rceil"
    axis: int = -1

    def __post_init__(self) -> None:
        read_choice(self, "data", tuple(ELEMENTS))
        read_choice(self, "rounding", ("rceil", "floor"))
        axis = as_integer(self.axis, "the axis of MXFP8", FormatError)
        if axis not in (-1, -2):
            fix = "give -1 for blocks along the last dimension, or -2 for the last but one"
            raise FormatError(f"MXFP8 has axis {axis}; {fix}")
        object.__setattr__(self, "axis", axis)

    @property
    def name(self) -> str:
        """The format's name for people, such as "MXFP8 e4m3 rceil rowwise". It states the element type, the rounding of
        scales, and the direction of the blocks."""
        along = "rowwise" if self.axis == -1 else "columnwise"
        return f"MXFP8 {self.data} {self.rounding} {along}"

    @property
    def element(self) -> Float:
        """The float type of the data: E4M3 or E5M2."""
        return ELEMENTS[self.data]

    @property
    def blocks(self) -> Blocks:
        """The elements that share a scale, as Blocks: 32 neighbors along the last dimension if `axis` is -1, and along
        the second-to-last dimension if `axis` is -2."""
        if self.axis == -1:
            return Blocks((BLOCK,))
        return Blocks((BLOCK, 1))

    @property
    def parts(self) -> tuple[Part, ...]:
        """Descriptions of the arrays of a quantized tensor: data and scales, both uint8."""
        return (
            Part("data", self.element.dtype, "uint8", Blocks(())),
            Part("scales", "float8_e8m0fnu", "uint8", self.blocks),
        )

    @property
    def nan_magnitude(self) -> float:
        """The magnitude that a NaN counts as when a block's largest magnitude is found: infinity if `rounding` is
        "floor", else 0. Infinity makes the scale NaN, and so all numbers of the block."""
        return 0 if self.rounding == "rceil" else np.inf

    @property
    def padding(self) -> tuple[int, int]:
        """The multiples to which TransformerEngine pads the last two dimensions of the scales."""
        return (128, 4) if self.axis == -1 else (4, 128)

    def _make_scales(self, amax: Floats) -> Codes:
        rule = round_up if self.rounding == "rceil" else round_down
        return rule(self.element, amax)

    def _scale_down(self, values: Floats, scales: Array) -> Floats:
        # 2^(127 - b) is the number of byte 254 - b. Byte 255 is NaN, and 254 - 255 is 255 again.
        return values * decode_e8m0(MOST - scales)

    def _read_scales(self, scales: Array) -> Floats:
        return decode_e8m0(scales)


def round_up(element: Float, amax: Floats) -> Codes:
    """Return scales for `amax` as E8M0 bytes, by TransformerEngine's rule: `amax` / largest number of `element`,
    rounded up to a power of two."""
    inverse = np.float32(1) / np.float32(element.most)
    bits = (amax * inverse).view(np.uint32)
    field = bits >> 23
    fraction = bits & 0x7F_FFFF
    # 2^-127 is the only subnormal power of two that a byte can express; everything below is rounded up to it.
    is_above = np.where(field == 0, fraction > SUBNORMAL, fraction > 0)
    codes: Codes = np.minimum(field + is_above, MOST).astype(np.uint8)
    return codes


def round_down(element: Float, amax: Floats) -> Codes:
    """Return scales for `amax` as E8M0 bytes, by OCP's rule: the exponent of `amax` minus the exponent of the largest
    number of `element`.

    The byte of infinities is 255.
    """
    bits = amax.view(np.uint32)
    field = (bits >> 23).astype(np.int32)
    codes = np.maximum(field - element.exponent, 0)
    codes[field == NAN] = NAN
    return codes.astype(np.uint8)
