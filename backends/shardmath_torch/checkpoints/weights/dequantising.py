"""Dequantising: what a rank has of a tensor, from its data and the scales of the blocks of which it has some.

1. A rank's part is boxes of the tensor. What of a box lies before the first cut between blocks, in each dimension, is a
   box of its own; then each begins with a block, or lies inside one, and is dequantised as if it were a whole tensor.
2. Scales lie packed: in each dimension those of the blocks that the rank has some of, in ascending order.
3. Numbers are those of the whole tensor, dequantised in float32 and rounded once, to the module's type. Holes are zero.

>>> list(_begin_with_blocks([slice(0, 7)], [slice(5, 12)], (4,)))
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
from shardmath_torch.checkpoints.weights.quantised import E8M0, QuantisedRead
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.formats import quantising

__all__ = ["dequantise"]


def dequantise(one: QuantisedRead, data: Tensor, scales: Tensor, rank: int) -> Tensor:
    """The rank's local tensor, of the module's type, from what it has read."""
    out = make_zeros(one.layout, rank)
    factors = _read_scales(scales, one.format.parts[1].dtype)
    shape = one.layout.shape
    blocks = one.format.blocks.positions(shape)
    held = one.scales.indices(rank)
    for box, positions in list_boxes(one.layout, rank):
        for local, where in _begin_with_blocks(box, positions, blocks):
            cover = one.format.cover(where, shape)
            own = tuple(map(_find_scales, held, cover))
            parts = data[local], factors[own]
            out[local] = quantising.dequantise(one.format, parts, torch.float32)
    return out


def _begin_with_blocks(
    local: Sequence[slice], where: Sequence[slice], blocks: Sequence[int]
) -> Iterator[tuple[Slices, Slices]]:
    """The parts of a box that begin with a block or lie inside one: in the local tensor, and in the whole one."""
    pieces = [_cut_once(*of_one) for of_one in zip(local, where, blocks, strict=True)]
    for part in itertools.product(*pieces):
        inside, outside = zip(*part, strict=True)
        yield inside, outside


def _cut_once(local: slice, where: slice, block: int) -> list[tuple[slice, slice]]:
    """The positions before the first cut between blocks, and those behind it."""
    first = min(where.stop, where.start + -where.start % block)
    cut = local.start + first - where.start
    before = slice(local.start, cut), slice(where.start, first)
    behind = slice(cut, local.stop), slice(first, where.stop)
    return [(inside, outside) for inside, outside in (before, behind) if inside.start < inside.stop]


def _find_scales(index: Ints, blocks: slice) -> slice:
    """Where consecutive blocks are among those of which there are scales, which ascend."""
    first = int(np.searchsorted(index, blocks.start))
    return slice(first, first + blocks.stop - blocks.start)


def _read_scales(scales: Tensor, dtype: str) -> Tensor:
    """Scales of the type that the format has, from what they are stored as."""
    if dtype == "uint8" or scales.dtype == torch.float32:
        return scales
    # Bytes of powers of two, which files also call uint8.
    if scales.dtype == torch.uint8:
        scales = scales.view(dtype_of(E8M0))
    return scales.to(torch.float32)
