"""Slabs: a tensor divided into boxes that fit a cache, each of whole blocks or of one partial block.

1. A slab is processed completely while it is in the cache: memory is read once, and written once.
2. In each dimension a slab has several whole blocks, or one, or a part of one. So a view splits it into blocks, and
   values per block are broadcast.
3. A block is cut only if it is larger than a slab.

>>> from shardmath.values.formats.fp8 import FP8Blocks
>>> for slab in cut_slabs(FP8Blocks((2, 4)).blocks, (2, 10), 16): print(*slab.spans)
BlockSpan(start=0, first=0, count=1, size=2) BlockSpan(start=0, first=0, count=2, size=4)
BlockSpan(start=0, first=0, count=1, size=2) BlockSpan(start=8, first=2, count=1, size=2)
>>> list(cut_slabs(FP8Blocks((2, 4)).blocks, (2, 10), 16))[0].take(torch.zeros(2, 10)).shape
torch.Size([2, 2, 4])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmath.values.formats.blocks import Blocks
from shardmath_torch.tensors.formats.casting import may_have_nan

__all__ = ["MOST", "Slab", "choose_most", "cut_slabs", "fits"]

MOST = 1 << 18
"""Positions of a slab on a CPU: a megabyte of float32. With smaller slabs, torch's overhead per operation matters."""
MOST_ELSEWHERE = 1 << 24
"""Positions of a slab on a GPU, where each operation has to fill the device: 64 MB of float32."""


def choose_most(device: torch.device) -> int:
    """Return the largest number of elements to quantize or dequantize at once on `device`: 2**18 on a CPU, 2**24 on
    other devices, where larger operations are faster."""
    return MOST if device.type == "cpu" else MOST_ELSEWHERE


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """A range of positions in one dimension of a tensor: `count` whole quantization blocks of `size` positions each. If
    `count` is 1, the range is `size` positions of one block: all or a part of it.

    It begins at position `start` of the dimension, which is in block number `first`.
    """

    start: int
    first: int
    count: int
    size: int

    @property
    def is_split(self) -> bool:
        """Whether the range has several blocks, each of several positions; only then does `Slab.split` split its
        dimension.
        """
        return self.count > 1 and self.size > 1


@dataclass(frozen=True, slots=True)
class Slab:
    """A rectangular slice of a tensor: whole quantization blocks (the elements of a block share a scale), or a part of
    one block. `spans` has the slice's range in each dimension.
    """

    spans: tuple[BlockSpan, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The length of the box in each dimension, in positions rather than in blocks."""
        return tuple(span.count * span.size for span in self.spans)

    def take(self, tensor: Tensor, per: int = 1) -> Tensor:
        """Return a view of the slice of `tensor` that this slab covers (`spans`, a range of each dimension). A
        dimension with several blocks of several positions is split in two: block, and position in it. `per` is how many
        positions of the last dimension one element holds, such as 2 if packed.
        """
        steps = [1] * (len(self.spans) - 1) + [per]
        for d, (span, step) in enumerate(zip(self.spans, steps, strict=True)):
            tensor = tensor.narrow(d, span.start // step, span.count * span.size // step)
        return self.split(tensor)

    def split(self, box: Tensor) -> Tensor:
        """Return a view of `box`, a tensor that holds this slab's slice of a larger tensor. Each dimension with several
        quantization blocks, of several positions each, is split in two: block, and position in it.
        """
        # From the last dimension backwards, so that earlier dimensions keep their numbers.
        for d in reversed(range(len(self.spans))):
            span = self.spans[d]
            if span.is_split:
                box = box.unflatten(d, (span.count, -1))
        return box

    def take_shared(self, shared: Tensor) -> Tensor:
        """Return the box's part of a tensor with one element per block, shaped for broadcasting to `take`'s result."""
        for d, span in enumerate(self.spans):
            shared = shared.narrow(d, span.first, span.count)
        # After each block dimension, a dimension of 1 for the positions in a block, as `split` makes it.
        for d in reversed(range(len(self.spans))):
            if self.spans[d].is_split:
                shared = shared.unsqueeze(d + 1)
        return shared

    def amax(self, magnitudes: Tensor, nan: float) -> Tensor:
        """Return the largest value of each quantization block in `magnitudes`, a tensor in the shape that `take`
        returns; NaN counts as `nan`. The result has size 1 in dimensions of positions within a block.
        """
        largest = self._reduce(magnitudes)
        if may_have_nan(largest):
            # Rare, and so found out by a look at the blocks instead of all numbers.
            largest = self._reduce(magnitudes.nan_to_num(nan=nan, posinf=math.inf))
        return largest

    def _reduce(self, magnitudes: Tensor) -> Tensor:
        # The last dimension last: over others whole rows are compared, which is fastest and leaves little.
        d = 0
        for span in self.spans:
            # A split dimension is two, of which the first, of blocks, stays.
            d += span.is_split
            if span.size > 1:
                magnitudes = torch.amax(magnitudes, d, keepdim=True)
            d += 1
        return magnitudes


def fits(blocks: Blocks, shape: tuple[int, ...], most: int) -> bool:
    """Whether no block of a tensor of `shape` has more than `most` elements, so that `cut_slabs` cuts no block apart.
    `blocks` has the block sizes.
    """
    block_shape = blocks.positions(shape)
    sizes = map(min, block_shape, shape)
    return math.prod(sizes) <= most


def cut_slabs(blocks: Blocks, shape: tuple[int, ...], most: int) -> Iterator[Slab]:
    """Yield Slabs (boxes of at most `most` elements, of whole blocks or a part of one) that together cover a tensor of
    `shape`. `blocks` has the block sizes.
    """
    block_sizes = blocks.positions(shape)
    slab_shape = _choose_slab_shape(block_sizes, shape, most)
    spans_by_dim = map(_cut_dimension, block_sizes, shape, slab_shape)
    return map(Slab, itertools.product(*spans_by_dim))


def _choose_slab_shape(
    block_sizes: tuple[int, ...], shape: tuple[int, ...], most: int
) -> list[int]:
    """The shape of a slab: as much of the last dimensions as fits, and one block of earlier dimensions."""
    block_shape = list(map(min, block_sizes, shape))
    is_cut = math.prod(block_shape) > most
    slab_shape: list[int] = []  # from the last dimension on
    for d in reversed(range(len(shape))):
        # Leaves room for one block of the earlier dimensions, unless even one block is cut.
        before = 1 if is_cut else math.prod(block_shape[:d])
        room = most // max(1, before * math.prod(slab_shape))
        step = min(shape[d], room)
        # Whole blocks, if one fits.
        if step >= block_sizes[d]:
            step -= step % block_sizes[d]
        slab_shape.insert(0, max(1, step))
    return slab_shape


def _cut_dimension(block: int, n: int, step: int) -> list[BlockSpan]:
    """Spans of `step` positions, of whole blocks or a part of one; a shorter last block is separate."""
    whole = n - n % block
    spans = []
    # A block that is longer than a step is cut apart by `_cut_span`.
    stride = max(step, block)
    for start in range(0, whole, stride):
        stop = min(start + stride, whole)
        spans += _cut_span(start, stop, block, step)
    if whole < n:
        spans += _cut_span(whole, n, block, step)
    return spans


def _cut_span(start: int, stop: int, block: int, step: int) -> list[BlockSpan]:
    """One span for whole blocks; several spans for a block that is larger than a step, or shorter than others."""
    count, rest = divmod(stop - start, block)
    if count and not rest and step >= block:
        return [BlockSpan(start, start // block, count, block)]
    # The positions are all of one block.
    first = start // block
    cuts = range(start, stop, step)
    return [BlockSpan(cut, first, count=1, size=min(step, stop - cut)) for cut in cuts]
