"""Parts: what a rank holds of a tensor, and the blocks that it touches.

1. A part is all combinations of some **stretches** of each dimension, whatever lies where in the local tensor. So are
   shares of fused tensors, and of tensors dealt out in turn.
2. It **touches** a block of which it has a position, and **cuts** it where it has not all of them. What stands for all
   of a dimension is touched by every part, one of no position too.
3. Its boxes begin where a block does, or end in the block in which they begin. So each has the blocks
   of a tensor of its own, and whoever quantises it need not know where it lies.

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
"""Ascending (start, stop) of one dimension; (0, 0) where there are none."""


class PartStretches(NamedTuple):
    """The stretches of each dimension."""

    dims: tuple[Stretches, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has no positions."""
        ends = [spans[-1][1] for spans in self.dims]
        return 0 in ends

    def boxes(self, sizes: Sizes) -> Iterator[tuple[Box, Box]]:
        """Each box in the tensor, for blocks of these sizes, and where it is among the part's own positions."""
        placed = map(_place_stretches, self.dims, sizes)
        for box in itertools.product(*placed):
            there, here = zip(*box, strict=True)
            yield there, here


def read_part(held: Sequence[Runs]) -> PartStretches:
    """The part that these hold, one for each dimension."""
    dims: list[Stretches] = []
    for runs in held:
        spans = tuple(list_stretches(runs))
        dims.append(spans or ((0, 0),))
    return PartStretches(tuple(dims))


def _place_stretches(spans: Stretches, size: int | None) -> list[tuple[slice, slice]]:
    """Each stretch, cut behind a block of which it has the end alone; and where it is when they are one by one."""
    at = 0
    placed = []
    for start, stop in _cut_first(spans, size):
        behind = at + stop - start
        there = slice(start, stop)
        here = slice(at, behind)
        placed.append((there, here))
        at = behind
    return placed


def _cut_first(spans: Stretches, size: int | None) -> Iterator[tuple[int, int]]:
    """The stretches, those apart that come before the first beginning of a block."""
    for start, stop in spans:
        border = start + -start % (size or 1)
        if start < border < stop:
            yield start, border
            start = border
        yield start, stop


class TouchedBlocks(NamedTuple):
    """The blocks that a part touches: in each dimension their numbers, ascending, and whether it has all of each."""

    numbers: tuple[Ints, ...]
    has_all: tuple[Bools, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """How many there are in each dimension."""
        return tuple(map(len, self.numbers))

    @property
    def cut(self) -> Bools:
        """Of each block, whether the part cuts it."""
        inside = np.ones(self.shape, np.bool_)
        for has_all in _spread(self.has_all):
            inside &= has_all
        return ~inside

    def flat(self, count: tuple[int, ...]) -> Ints:
        """The number of each block among all, row by row; `count` are all blocks in each dimension."""
        found: Ints = np.ravel_multi_index(_spread(self.numbers), count)
        return found

    def locate(self, cover: Box) -> Box:
        """Where consecutive blocks of the tensor are among these."""
        found = []
        for numbers, span in zip(self.numbers, cover, strict=True):
            first = int(np.searchsorted(numbers, span.start))
            behind = first + span.stop - span.start
            found.append(slice(first, behind))
        return tuple(found)


def _spread(rows: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], ...]:
    """One row per dimension, so that together they broadcast."""
    # Not np.ix_, which takes positions of what is True.
    return tuple(np.meshgrid(*rows, indexing="ij", sparse=True))


def touch(part: PartStretches, blocks: Blocks, shape: tuple[int, ...]) -> TouchedBlocks:
    """The blocks of a tensor of that shape that the part touches."""
    sizes = blocks.per_dimension(len(shape))
    numbers = []
    has_all = []
    for spans, size, n in zip(part.dims, sizes, shape, strict=True):
        found = _count_blocks(spans, size)
        is_whole = _find_whole(found, spans, size or n, n)
        numbers.append(found)
        has_all.append(is_whole)
    return TouchedBlocks(tuple(numbers), tuple(has_all))


def _count_blocks(spans: Stretches, size: int | None) -> Ints:
    """The numbers of the blocks of a dimension of which there are positions."""
    if size is None:
        return np.zeros(1, np.int64)
    ranges = []
    for start, stop in spans:
        first = start // size
        behind = -(-stop // size)
        ranges.append(np.arange(first, behind))
    # Two stretches may have parts of one block.
    together = np.concatenate(ranges)
    return np.unique(together)


def _find_whole(numbers: Ints, spans: Stretches, size: int, n: int) -> Bools:
    """Of these blocks of a dimension of n, whether all of each is in the stretches."""
    first = numbers * size
    # The last block may be shorter, and ends with the dimension.
    behind = np.minimum(first + size, n)
    is_whole = np.zeros(len(numbers), np.bool_)
    # Stretches do not meet, so a block that is there is in one of them.
    for start, stop in spans:
        is_whole |= (start <= first) & (behind <= stop)
    return is_whole
