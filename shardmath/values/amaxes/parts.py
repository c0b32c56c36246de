"""Parts: the positions of a tensor that a rank holds, and the blocks that they touch.

1. A part is the product of some **stretches** of each dimension, wherever these lie in the local tensor. Shares of
   fused tensors, and of tensors dealt out in turn, are such products too.
2. A part **touches** a block if it has some of its positions, and **cuts** it if it lacks others. Even an empty part
   touches a block that is a whole dimension.
3. Each of its boxes begins where a block begins, or ends in the block in which it begins. So a box has the same
   blocks as a separate tensor would, and can be quantized without knowing where it lies.

>>> part = PartStretches((((0, 2), (3, 8)),))
>>> touched = touch(part, Blocks((2,)), (8,))
>>> touched.numbers[0], touched.cut
(array([0, 1, 2, 3]), array([False,  True, False, False]))
>>> [(there[0].start, there[0].stop, here[0].start) for there, here in part.boxes((2,))]
[(0, 2, 0), (3, 4, 2), (4, 8, 3)]
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Ints
from shardmath.layouts.algebra.runs import Runs
from shardmath.values.formats.blocks import Blocks, Sizes
from shardmath.values.formats.scales import list_stretches

__all__ = ["Bools", "Box", "PartStretches", "TouchedBlocks", "read_part", "touch"]

Bools: TypeAlias = NDArray[np.bool_]
Box: TypeAlias = tuple[slice, ...]
Stretches: TypeAlias = tuple[tuple[int, int], ...]
"""Ascending (start, stop) of one dimension; only (0, 0) if the part is empty."""


class PartStretches(NamedTuple):
    """The positions of a tensor that a rank holds, as ascending ranges in each dimension."""

    dims: tuple[Stretches, ...]

    @property
    def is_empty(self) -> bool:
        """Whether the part holds no positions."""
        ends = [spans[-1][1] for spans in self.dims]
        return 0 in ends

    def boxes(self, sizes: Sizes) -> Iterator[tuple[Box, Box]]:
        """Divide the rank's positions into boxes that can each be quantized separately; yield each box as its slices in
        the tensor, and in an array of only the rank's positions. `sizes` is the shape of a block, whose numbers share
        one scale (None: the whole dimension).

        In each dimension, a box begins where a block begins, or ends in the block in which it begins.

        A range that crosses a border between blocks of `sizes` is cut once, at the first: one piece lies inside a
        block, and the other begins with a block.
        """
        placed = map(_place_stretches, self.dims, sizes)
        for box in itertools.product(*placed):
            in_tensor, in_part = zip(*box, strict=True)
            yield in_tensor, in_part


def read_part(held: Sequence[Runs]) -> PartStretches:
    """Return, as a PartStretches, the ascending ranges of global positions that a rank holds in each dimension. `held`
    has one Runs (map from local to global positions) per dimension."""
    dims: list[Stretches] = []
    for runs in held:
        spans = tuple(list_stretches(runs))
        # No positions are an empty stretch at 0, for which `is_empty` looks.
        dims.append(spans or ((0, 0),))
    return PartStretches(tuple(dims))


def _place_stretches(spans: Stretches, size: int | None) -> list[tuple[slice, slice]]:
    """Each stretch, cut at its first block border; and the same positions when stretches are packed end to end."""
    begin = 0
    placed = []
    for start, stop in _cut_at_border(spans, size):
        end = begin + stop - start
        placed.append((slice(start, stop), slice(begin, end)))
        begin = end
    return placed


def _cut_at_border(spans: Stretches, size: int | None) -> Iterator[tuple[int, int]]:
    """The stretches, each in two if a block begins inside: before the first such border, and after it."""
    for start, stop in spans:
        border = start + -start % (size or 1)
        if start < border < stop:
            yield start, border
            start = border
        yield start, stop


class TouchedBlocks(NamedTuple):
    """Blocks of a tensor, each with positions that a rank holds. For each dimension, `numbers` has the blocks' indices
    along that dimension, and `has_all` has flags: True if the rank holds all of the block's positions along that
    dimension."""

    numbers: tuple[Ints, ...]
    has_all: tuple[Bools, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of blocks in each dimension, counting only blocks with positions that the rank holds."""
        return tuple(map(len, self.numbers))

    @property
    def cut(self) -> Bools:
        """Flags, one for each block with positions that the rank holds: True if the rank lacks some of the block's
        positions."""
        inside = np.ones(self.shape, np.bool_)
        for has_all in _spread(self.has_all):
            inside &= has_all
        return ~inside

    def flat(self, count: tuple[int, ...]) -> Ints:
        """Return an array with the row-major number, among all blocks of a tensor, of each block with positions that
        the rank holds. `count` has the tensor's number of blocks in each dimension."""
        numbers: Ints = np.ravel_multi_index(_spread(self.numbers), count)
        return numbers

    def locate(self, cover: Box) -> Box:
        """Convert `cover`, ranges of block indices in the whole tensor, to ranges of indices in an array that has items
        only for blocks with elements that the rank holds. Both have one slice per dimension, and select the same
        blocks."""
        located = []
        for numbers, span in zip(self.numbers, cover, strict=True):
            first = int(np.searchsorted(numbers, span.start))
            located.append(slice(first, first + span.stop - span.start))
        return tuple(located)


def _spread(rows: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], ...]:
    """The rows reshaped, one per dimension, so that they broadcast against each other."""
    # Not np.ix_, which turns booleans into the positions that are True.
    return tuple(np.meshgrid(*rows, indexing="ij", sparse=True))


def touch(part: PartStretches, blocks: Blocks, shape: tuple[int, ...]) -> TouchedBlocks:
    """Find the blocks in which `part` (a rank's positions) has a position, in a tensor of this `shape` divided into
    `blocks`. The TouchedBlocks has, for each dimension, the indices of these blocks.

    A block that spans a whole dimension counts even if `part` is empty: its scale is also on ranks with an empty part.
    """
    sizes = blocks.per_dimension(len(shape))
    numbers = []
    has_all = []
    for spans, size, n in zip(part.dims, sizes, shape, strict=True):
        touched = _list_touched(spans, size)
        numbers.append(touched)
        block_size = n if size is None else size
        has_all.append(_find_whole(touched, spans, block_size, n))
    return TouchedBlocks(tuple(numbers), tuple(has_all))


def _list_touched(spans: Stretches, size: int | None) -> Ints:
    """The numbers of the blocks that the stretches touch, ascending, in a dimension cut into blocks of this size
    (None: one block)."""
    if size is None:
        return np.zeros(1, np.int64)
    ranges = []
    for start, stop in spans:
        ranges.append(np.arange(start // size, -(-stop // size)))
    # Two stretches may touch the same block.
    return np.unique(np.concatenate(ranges))


def _find_whole(numbers: Ints, spans: Stretches, size: int, n: int) -> Bools:
    """Whether the stretches have all of each of these blocks, in a dimension of n positions."""
    first = numbers * size
    # The last block may be shorter, and ends with the dimension.
    end = np.minimum(first + size, n)
    is_whole = np.zeros(len(numbers), np.bool_)
    # Stretches never touch each other, so a whole block lies in one of them.
    for start, stop in spans:
        is_whole |= (start <= first) & (end <= stop)
    return is_whole
