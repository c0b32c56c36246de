"""A local array as pieces, in each of which the weight of a cell is a product over axes.

1. The dimensions are taken from the one whose elements lie closest in memory to the one whose lie
   farthest apart, until a block of ROW words is full; those outside of it are taken whole, and weighed
   position by position.
2. Inside the block, long aligned ranges of positions become two axes, of which the inner one has the
   same weights everywhere (`field`). What is left over, at the ends of ranges and where ranges are
   short, is a piece of its own with a weight for each position.
3. Holes have weight 0, so what lies in them does not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arrays import Ints, ranges
from shardmath.base.memo import memo
from shardmath.layouts.algebra.runs import Runs, Segment
from shardmath.values.digests.field import table, weigh_positions

__all__ = ["ROW", "DimensionPart", "Piece", "list_pieces", "weigh_part"]

ROW = 256
"""Words that are added up at a time: as many as a float64 is exact for (see `weighing`)."""

LONG = 4 * ROW
"""Words of a range from which on it is long."""

MOST = 256 * ROW
"""Words, or not many more, for which weights are written out one by one where ranges are short."""


class DimensionPart(NamedTuple):
    """The local positions start .. stop - 1 of a dimension, and which global ones lie there.

    Where `inner` is not 0, the part is one range, whose global start and length are multiples of
    2^`inner`.
    """

    start: int
    stop: int
    segments: tuple[Segment, ...]
    inner: int = 0

    @property
    def size(self) -> int:
        """Local positions, holes included."""
        return self.stop - self.start


Piece: TypeAlias = tuple[DimensionPart, ...]
"""A part of each dimension; the piece is their product."""


def list_pieces(runs: Sequence[Runs], order: Sequence[int], words: int) -> Iterator[Piece]:
    """The pieces of a local array; `order` are its dimensions, the closest in memory first, and an
    element has so many words."""
    if all(own.segments for own in runs):
        parts: list[DimensionPart | None] = [None] * len(runs)
        yield from _extend(runs, order, words, parts)


def _extend(
    runs: Sequence[Runs], order: Sequence[int], inner: int, parts: list[DimensionPart | None]
) -> Iterator[Piece]:
    """The pieces whose parts of the dimensions before these are chosen already; those are `inner`
    words together."""
    if not order:
        yield tuple(part for part in parts if part is not None)
        return
    dimension, *rest = order
    for part in _cut(runs[dimension], inner):
        parts[dimension] = part
        yield from _extend(runs, rest, inner * part.size, parts)


@memo()
def _cut(runs: Runs, inner: int) -> tuple[DimensionPart, ...]:
    """The parts of a dimension of which each position is `inner` words."""
    whole = _join(runs.segments)
    longest = max(size for _, _, size in runs.segments)
    few = inner * whole.size <= MOST
    if inner >= ROW or (few and inner * longest < LONG):
        return (whole,)
    # The least power of two that fills a row.
    bits = (-(-ROW // inner) - 1).bit_length()
    parts: list[DimensionPart] = []
    short: list[Segment] = []
    for segment in runs.segments:
        if inner * segment[2] < LONG:
            short.append(segment)
            continue
        head, body, tail = _align(segment, 1 << bits)
        parts += _list_short([*short, *head], inner)
        parts.append(_join([body])._replace(inner=bits))
        short = tail
    return (*parts, *_list_short(short, inner))


def _align(segment: Segment, block: int) -> tuple[list[Segment], Segment, list[Segment]]:
    """The segment's whole blocks of global positions, and what is before and after them."""
    local, start, size = segment
    before = -start % block
    inside = (size - before) // block * block
    after = size - before - inside
    head = (local, start, before)
    body = (local + before, start + before, inside)
    tail = (local + size - after, start + size - after, after)
    return [head] if before else [], body, [tail] if after else []


def _list_short(segments: Sequence[Segment], inner: int) -> list[DimensionPart]:
    """The segments as parts of at most MOST words or so, each of as many as fit."""
    parts = []
    most = max(1, MOST // inner)
    some: list[Segment] = []
    for segment in segments:
        if some and segment[0] + segment[2] - some[0][0] > most:
            parts.append(_join(some))
            some = []
        some.append(segment)
    if some:
        parts.append(_join(some))
    return parts


def _join(segments: Sequence[Segment]) -> DimensionPart:
    """The part from the first of the segments to the last."""
    start = segments[0][0]
    local, _, size = segments[-1]
    return DimensionPart(start, local + size, tuple(segments))


@memo(256)
def weigh_part(seed: int, dimension: int, part: DimensionPart) -> tuple[Ints, ...]:
    """The weights along the part's axis, or along its outer and its inner one."""
    if part.inner:
        ((_, start, size),) = part.segments
        block = np.arange(start >> part.inner, (start + size) >> part.inner)
        outer = weigh_positions(seed, dimension, block, part.inner)
        return outer, table(seed, dimension, 0, part.inner)
    return (_weigh_segments(seed, dimension, part),)


def _weigh_segments(seed: int, dimension: int, part: DimensionPart) -> Ints:
    """The weights of the part's positions, where they lie; zeros elsewhere."""
    segments = np.array(part.segments, np.int64)
    local, start, size = segments.T
    here, _ = ranges(local - part.start, local - part.start + size)
    there, _ = ranges(start, start + size)
    weights = np.zeros(part.size, np.int64)
    weights[here] = weigh_positions(seed, dimension, there)
    return weights
