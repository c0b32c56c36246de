"""Dequantizing: a rank's values, from its data and the scales of all blocks that its data touch.

1. A rank's part consists of boxes. Each box is split, in each dimension, at the first boundary of blocks; then each
   piece begins with a block, or lies inside one, and is dequantized like a whole tensor.
2. Scales are packed: in each dimension, only the scales of blocks that the rank's data touch, in ascending order.
3. Values equal the whole tensor's values, dequantized in float32 and rounded once, to the module's dtype. Holes are
   zero.

>>> list(_split_at_blocks([slice(0, 7)], [slice(5, 12)], (4,)))
[((slice(0, 3, None),), (slice(5, 8, None),)), ((slice(3, 7, None),), (slice(8, 12, None),))]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from shardmath.base.arrays import Ints
from shardmath_torch.checkpoints.safetensors.slices import Slices, list_boxes, make_zeros
from shardmath_torch.checkpoints.weights.quantized import E8M0, QuantizedRead
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.formats import quantizing

__all__ = ["dequantize"]


def dequantize(one: QuantizedRead, data: Tensor, scales: Tensor, rank: int) -> Tensor:
    """Return the local tensor of `rank` for the quantized tensor that `one` describes, dequantized to the module's
    dtype. `data` has the same elements, still quantized, and `scales` has a factor for each block (tile of elements)
    that they overlap."""
    out = make_zeros(one.layout, rank)
    scale_part = one.format.parts[1]
    factors = _convert_scales(scales, scale_part.dtype)
    shape = one.layout.shape
    blocks = one.format.blocks.positions(shape)
    # Of each dimension, the blocks whose scales the rank has, in ascending order.
    block_indices = one.scales.indices(rank)
    for box, positions in list_boxes(one.layout, rank):
        for local, where in _split_at_blocks(box, positions, blocks):
            cover = one.format.cover(where, shape)
            touched = tuple(map(_slice_of_blocks, block_indices, cover))
            parts = data[local], factors[touched]
            out[local] = quantizing.dequantize(one.format, parts, torch.float32)
    return out


def _split_at_blocks(
    local: Sequence[slice], where: Sequence[slice], blocks: Sequence[int]
) -> Iterator[tuple[Slices, Slices]]:
    """Split a box into pieces that begin with a block or lie inside one: slices of the local and the whole tensor."""
    pieces = [_split_once(*each) for each in zip(local, where, blocks, strict=True)]
    for part in itertools.product(*pieces):
        inside, outside = zip(*part, strict=True)
        yield inside, outside


def _split_once(local: slice, where: slice, block: int) -> list[tuple[slice, slice]]:
    """The positions before the first boundary of blocks, and those behind it, without empty slices."""
    first = min(where.stop, where.start + -where.start % block)  # start, rounded up to a block
    cut = local.start + first - where.start
    before = slice(local.start, cut), slice(where.start, first)
    behind = slice(cut, local.stop), slice(first, where.stop)
    return [(inside, outside) for inside, outside in (before, behind) if inside.start < inside.stop]


def _slice_of_blocks(index: Ints, blocks: slice) -> slice:
    """The slice of the packed scales, whose blocks `index` lists in ascending order, for consecutive blocks."""
    first = int(np.searchsorted(index, blocks.start))
    return slice(first, first + blocks.stop - blocks.start)


def _convert_scales(scales: Tensor, dtype: str) -> Tensor:
    """Scales in the format's dtype, from the stored ones."""
    if dtype == "uint8" or scales.dtype == torch.float32:
        return scales
    # Powers of two in a byte, whose dtype files also call uint8.
    if scales.dtype == torch.uint8:
        scales = scales.view(dtype_of(E8M0))
    return scales.to(torch.float32)
