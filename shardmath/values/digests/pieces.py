"""A local array as pieces, in each of which the weight of a cell is a product over axes.

1. Dimensions are taken in order of distance between their elements in memory, the closest first, until a row of ROW
   words is full. Dimensions outside of the row are taken whole, and weighed position by position.
2. Inside the row, long aligned ranges of positions become two axes, whose inner one has the same weights everywhere
   (`field`). The rest, short ranges and ends of ranges, becomes separate pieces with a weight for each position.
3. Holes have weight 0, so their content does not matter.
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
"""Words from which on a range is long."""

MOST = 256 * ROW
"""Words, roughly, of a part made of short ranges, whose weights are written out one by one."""


class DimensionPart(NamedTuple):
    """The local positions `start` to `stop` - 1 of one dimension of a rank's array, and the global positions to which
    they belong. `segments` has one tuple (local start, global start, size) for each range of consecutive global
    positions.

    If `inner` is not 0, the part is one range, whose global start and length are multiples of 2^`inner`.
    """

    start: int
    stop: int
    segments: tuple[Segment, ...]
    inner: int = 0

    @property
    def size(self) -> int:
        """The number of local positions in the part, including holes (positions without an element of the global
        tensor)."""
        return self.stop - self.start


Piece: TypeAlias = tuple[DimensionPart, ...]
"""A part of each dimension; the piece is their product."""


def list_pieces(runs: Sequence[Runs], order: Sequence[int], words: int) -> Iterator[Piece]:
    """Divide a local array into boxes whose digests can be computed fast and then summed; yield each as one range of
    local positions per dimension. `runs` maps local to global positions; `order` (dimensions by ascending stride) and
    `words` (integers per element) tell how the array lies in memory.

    Pieces are cut near the ends of long ranges in `runs`.
    """
    if all(dim_runs.segments for dim_runs in runs):
        parts: list[DimensionPart | None] = [None] * len(runs)
        yield from _extend(runs, order, words, parts)


def _extend(
    runs: Sequence[Runs], order: Sequence[int], words: int, parts: list[DimensionPart | None]
) -> Iterator[Piece]:
    """The pieces that extend `parts`, already chosen for the dimensions before `order`, which have `words` words."""
    if not order:
        yield tuple(part for part in parts if part is not None)
        return
    dimension, *rest = order
    for part in _divide_runs(runs[dimension], words):
        parts[dimension] = part
        yield from _extend(runs, rest, words * part.size, parts)


@memo()
def _divide_runs(runs: Runs, words: int) -> tuple[DimensionPart, ...]:
    """The parts of a dimension whose positions have `words` words each."""
    whole = _span_segments(runs.segments)
    longest = max(size for _, _, size in runs.segments)
    is_small = words * whole.size <= MOST
    # A position that fills a row needs no parts, nor do short ranges that are few: their weights are written out.
    if words >= ROW or (is_small and words * longest < LONG):
        return (whole,)
    # The least power of two that fills a row.
    bits = (-(-ROW // words) - 1).bit_length()
    parts: list[DimensionPart] = []
    short: list[Segment] = []
    for segment in runs.segments:
        _, _, size = segment
        if words * size < LONG:
            short.append(segment)
            continue
        head, body, tail = _align(segment, 1 << bits)
        parts += _list_short([*short, *head], words)
        parts.append(_span_segments([body])._replace(inner=bits))
        short = tail
    return (*parts, *_list_short(short, words))


def _align(segment: Segment, block: int) -> tuple[list[Segment], Segment, list[Segment]]:
    """The segments before, of, and after the whole blocks of global positions in a segment."""
    local, start, size = segment
    before = -start % block
    inside = (size - before) // block * block
    after = size - before - inside
    head = (local, start, before)
    body = (local + before, start + before, inside)
    tail = (local + size - after, start + size - after, after)
    return [head] if before else [], body, [tail] if after else []


def _list_short(segments: Sequence[Segment], words: int) -> list[DimensionPart]:
    """The segments in parts of as many segments as fit into MOST words, at least one; positions have `words` words."""
    parts = []
    most = max(1, MOST // words)
    waiting: list[Segment] = []
    for segment in segments:
        local, _, size = segment
        if waiting and local + size - waiting[0][0] > most:
            parts.append(_span_segments(waiting))
            waiting = []
        waiting.append(segment)
    if waiting:
        parts.append(_span_segments(waiting))
    return parts


def _span_segments(segments: Sequence[Segment]) -> DimensionPart:
    """The part from the first of the segments to the last."""
    start = segments[0][0]
    local, _, size = segments[-1]
    return DimensionPart(start, local + size, tuple(segments))


@memo(256)
def weigh_part(seed: int, dimension: int, part: DimensionPart) -> tuple[Ints, ...]:
    """Return the random weights with which a digest multiplies elements, one for each local position of `part`. They
    are in one array or, for a long range (`part.inner` above 0), in two arrays whose outer product has the weights."""
    if part.inner:
        ((_, start, size),) = part.segments
        block = np.arange(start >> part.inner, (start + size) >> part.inner)
        outer = weigh_positions(seed, dimension, block, part.inner)
        return outer, table(seed, dimension, 0, part.inner)
    return (_weigh_segments(seed, dimension, part),)


def _weigh_segments(seed: int, dimension: int, part: DimensionPart) -> Ints:
    """The weights of the part's local positions; zeros in holes."""
    segments = np.array(part.segments, np.int64)
    local, start, size = segments.T
    local_positions, _ = ranges(local - part.start, local - part.start + size)
    global_positions, _ = ranges(start, start + size)
    weights = np.zeros(part.size, np.int64)
    weights[local_positions] = weigh_positions(seed, dimension, global_positions)
    return weights
