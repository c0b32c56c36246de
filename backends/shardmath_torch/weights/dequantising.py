"""Dequantising: what a rank has of a tensor, from its data and the scales of the blocks of which it has some.

1. A rank's part is boxes of the tensor, and each box is dequantised by itself, so that ends of boxes may lie inside
   blocks. Holes are zero.
2. Scales lie packed: in each dimension those of the blocks that the rank has some of, in ascending order.
3. Numbers are those of the whole tensor, dequantised in float32 and rounded once, to the module's type.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardmath_torch.dtypes import dtype_of
from shardmath_torch.safetensors.slices import Slices, list_boxes, make_zeros
from shardmath_torch.weights.quantised import E8M0, Quantised

__all__ = ["dequantise"]


def dequantise(one: Quantised, data: Tensor, scales: Tensor, rank: int) -> Tensor:
    """The rank's local tensor, of the module's type, from what it has read."""
    out = make_zeros(one.layout, rank)
    factors = _read_scales(scales, one.format.parts[1].dtype)
    held = one.scales.indices(rank)
    for local, where in list_boxes(one.layout, rank):
        cover = one.format.cover(where, one.layout.shape)
        firsts = [
            np.searchsorted(index, part.start) for index, part in zip(held, cover, strict=True)
        ]
        spans = zip(firsts, cover, strict=True)
        own = tuple(slice(at, at + part.stop - part.start) for at, part in spans)
        out[local] = _dequantise_box(one, data[local], factors[own], where)
    return out


def _dequantise_box(one: Quantised, data: Tensor, scales: Tensor, where: Slices) -> Tensor:
    """The float32 numbers of a box of the tensor."""
    shape = one.layout.shape
    values = one.format.dequantise(data.numpy(), scales.numpy(), where=where, shape=shape)
    return torch.from_numpy(values)


def _read_scales(scales: Tensor, dtype: str) -> Tensor:
    """Scales of the type that the format has, from what they are stored as."""
    if dtype == "uint8" or scales.dtype == torch.float32:
        return scales
    # Bytes of powers of two, which files also call uint8.
    if scales.dtype == torch.uint8:
        scales = scales.view(dtype_of(E8M0))
    return scales.to(torch.float32)
