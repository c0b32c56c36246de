"""NVFP4: blocks of 16 numbers of 4 bits with E4M3 scales, and one float32 scale for the whole tensor.

1. The global scale g is amax of the tensor / (6 times 448). A block's scale s is its amax / (6 g), rounded to E4M3.
   Data are x / (s g), rounded to E2M1. All are computed in float32, and rounded to nearest, ties to even. (NVIDIA's
   Model Optimizer does the same; TransformerEngine stores the tensor's amax instead of g.)
2. Two numbers share a byte, along the last dimension, the first in its low bits.
3. A block whose scale is **zero**, or is rounded to zero, has data 0 with the signs of x.
4. E2M1 has neither **NaN** nor **Inf**: Inf becomes 6 or -6 times the block's scale, whose s is then 448, and a tensor
   with an Inf has g = 1. NaN does not count for amaxes and becomes +6 times the block's scale. An all-zero tensor has
   g = 1. Otherwise g is 2^-126 or more.
5. Quantizing dequantized numbers again changes nothing in blocks with a normal s; in blocks with a subnormal s, which
   has few bits, numbers may change.

>>> import numpy as np
>>> data, scales, g = NVFP4().quantize(np.arange(16, dtype=np.float32).reshape(1, 16) * 179.2)
>>> decode(E2M1, unpack_pairs(data))[0, :6], scales.item(), g.item()
(array([0. , 0.5, 1. , 1. , 1.5, 2. ], dtype=float32), 126, 1.0)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmath.base.errors import FormatError
from shardmath.values.formats.blocks import Blocks
from shardmath.values.formats.floats import (
    E2M1,
    E4M3,
    Codes,
    Float,
    Floats,
    decode,
    encode,
    pack_pairs,
    unpack_pairs,
)
from shardmath.values.formats.format import Array, Format, Part, read_flag
from shardmath.values.formats.fp8 import divide_amax, read_amax
from shardmath.values.formats.windows import Window

__all__ = ["NVFP4"]

BLOCK = 16
MOST = np.float32(E2M1.most)
MOST_OF_ALL = np.float32(E2M1.most * E4M3.most)


@dataclass(frozen=True, slots=True)
class NVFP4(Format):
    """The format NVFP4: two 4-bit numbers per byte, an FP8 scale per 16 numbers of a row (per 16 x 16 if `two_d`), and
    one float32 scale for the tensor.

    `tensor_amax` is the whole tensor's largest magnitude if all ranks know it; without it, a part of a tensor cannot be
    quantized separately. Raises FormatError for other values.
    """

    two_d: bool = False
    tensor_amax: float | None = None

    def __post_init__(self) -> None:
        read_flag(self, "two_d")
        object.__setattr__(self, "tensor_amax", read_amax(self.tensor_amax))

    @property
    def name(self) -> str:
        """The format's name for people: "NVFP4 1-D", or "NVFP4 2-D" for blocks of 16 x 16. If `tensor_amax`, the
        tensor's largest magnitude, is given, the name has it at the end: "NVFP4 1-D of 6.5"."""
        amax = "" if self.tensor_amax is None else f" of {self.tensor_amax:g}"
        return f"NVFP4 {'2-D' if self.two_d else '1-D'}{amax}"

    @property
    def element(self) -> Float:
        """The float type of the data: E2M1."""
        return E2M1

    @property
    def blocks(self) -> Blocks:
        """The elements that share a scale, as Blocks: a square of 16 x 16 in the last two dimensions if `two_d`, else
        16 neighbors along the last dimension."""
        return Blocks((BLOCK, BLOCK) if self.two_d else (BLOCK,))

    @property
    def parts(self) -> tuple[Part, ...]:
        """Descriptions of the arrays of a quantized tensor: data (two numbers per byte), scales as uint8, a float32
        global scale."""
        return (
            Part("data", E2M1.dtype, "uint8", Blocks((2,))),
            Part("scales", E4M3.dtype, "uint8", self.blocks),
            Part("global_scale", "float32", "float32", Blocks((), others=None)),
        )

    @property
    def padding(self) -> tuple[int, int]:
        """The multiples to which TransformerEngine pads the last two dimensions of the scales."""
        return 128, 4

    def _make_scales(self, amax: Floats) -> Floats:
        """The global scale, from the amaxes of all blocks."""
        largest = np.max(amax, initial=0, keepdims=True)
        if self.tensor_amax is not None:
            largest = np.full_like(largest, self.tensor_amax)
        g = divide_amax(largest, MOST_OF_ALL)
        g[largest == 0] = 1
        g[np.isinf(largest)] = 1
        return g

    def _quantize(self, values: Floats, window: Window, amax: Floats) -> tuple[Array, ...]:
        _check_pairs(window)
        self._check_known(window)
        global_scale = self._make_scales(amax)
        scales = encode(E4M3, amax / (MOST * global_scale))
        factors = window.spread(decode(E4M3, scales) * global_scale)
        codes = encode(E2M1, self._scale_down(values, factors))
        return pack_pairs(codes), scales, global_scale

    def _check_known(self, window: Window) -> None:
        """Raise FormatError for a part of a tensor whose amax is not known."""
        if self.tensor_amax is None and window.sizes != window.shape:
            what = f"the part {window.spans} of a tensor of shape {window.shape}"
            fix = (
                "give NVFP4 tensor_amax=, the maximum over ranks of what the method `amax` returns"
            )
            raise FormatError(f"{what} does not have the amax of the whole tensor; {fix}")

    def _scale_down(self, values: Floats, scales: Array) -> Floats:
        zeros = np.copysign(np.float32(0), values)
        return np.divide(values, scales, out=zeros, where=scales > 0)

    def _read_scales(self, scales: Array) -> Floats:
        return decode(E4M3, scales)

    def _dequantize(self, window: Window, data: Codes, scales: Array, *others: Array) -> Floats:
        (g,) = others
        if g.size != 1:
            raise FormatError(f"global_scale has shape {g.shape}; give an array of one number")
        codes = unpack_pairs(data)
        factors = window.spread(self._read_scales(scales))
        # The first product is exact, so only the second one rounds.
        products: Floats = decode(E2M1, codes) * factors
        products *= g.item()
        return products

    def _shape_of(self, data: Codes) -> tuple[int, ...]:
        *outer, count = data.shape
        return (*outer, 2 * count)


def _check_pairs(window: Window) -> None:
    """Raise FormatError if a byte would have a number inside the box and one outside."""
    # A box without dimensions has no pairs: the odd start 1 stands for that.
    first = window.starts[-1:] or (1,)
    if first[0] % 2 or window.sizes[-1] % 2:
        what = f"the part {window.spans} of a tensor of shape {window.shape}"
        raise FormatError(
            f"{what} splits a byte of two numbers; cut the last dimension at even positions"
        )
