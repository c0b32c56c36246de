"""Spans: sets of positions as ranges, and boxes of them.

1. **Spans** are disjoint ranges (start, stop), ascending, no two of which touch: equal sets are
   equal values.
2. A **holding** is a box, one set of positions per dimension. A box without elements is `NOTHING`.

>>> merge([(4, 6), (0, 2), (2, 3)])
((0, 3), (4, 6))
>>> print(merge([(0, 2), (1, 3)]))
None
>>> left, right = (((0, 2),), ((0, 1),)), (((0, 2),), ((1, 4),))
>>> tile([left, right])
(((0, 2),), ((0, 4),))
>>> find_divided([left, right], tile([left, right]))
{1}
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from operator import itemgetter
from typing import TypeAlias

from shardmath.layouts.algebra.runs import Runs

__all__ = ["NOTHING", "Holding", "Spans", "find_divided", "is_inside", "merge", "spans_of", "tile"]

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""A set of positions: disjoint ranges (start, stop), ascending, no two of which touch."""
Holding: TypeAlias = tuple[Spans, ...]
"""A box: a set of positions per dimension."""
NOTHING: Holding = ((),)
"""The box without elements, whatever its dimensions."""


def spans_of(runs: Runs) -> Spans:
    """Return the indices that a rank holds in one dimension of the whole tensor, as ascending ranges (start, stop); ()
    if an index occurs twice. `runs` maps the rank's local indices to indices in the whole tensor."""
    return merge((g, g + n) for _, g, n in runs.segments) or ()


def merge(ranges: Iterable[tuple[int, int]]) -> Spans | None:
    """Return the union of `ranges` as ascending ranges; None if two of them share a position."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if out and start < out[-1][1]:
            return None
        if out and start == out[-1][1]:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def is_inside(box: Holding, other: Holding) -> bool:
    """Return whether all elements of `box` are in the box `other`."""
    if box in (NOTHING, other):
        return True
    return other != NOTHING and all(map(_is_subset, box, other))


def _is_subset(spans: Spans, others: Spans) -> bool:
    """Whether each range lies within a range of the other set."""
    for start, stop in spans:
        # Only the last range that does not begin after this one may contain it.
        i = bisect.bisect_right(others, start, key=itemgetter(0)) - 1
        if i < 0 or stop > others[i][1]:
            return False
    return True


def tile(boxes: list[Holding]) -> Holding | None:
    """Return the box that `boxes` fill as a grid, without overlap; None if they do not form a grid."""
    nonempty = [box for box in boxes if box != NOTHING]
    if not nonempty:
        return NOTHING
    if len(set(nonempty)) < len(nonempty):
        return None
    whole = []
    for column in zip(*nonempty, strict=True):
        distinct = set(column)
        spans = merge(span for part in distinct for span in part)
        if spans is None:
            return None
        whole.append(spans)
    # Distinct cells of a grid are disjoint; they are all of its cells if they have its volume.
    volume = sum(map(_measure, nonempty))
    return tuple(whole) if volume == _measure(tuple(whole)) else None


def _measure(box: Holding) -> int:
    """The number of elements of a box."""
    return math.prod(sum(stop - start for start, stop in spans) for spans in box)


def find_divided(boxes: list[Holding], whole: Holding) -> set[int]:
    """Return the dimensions, by number, in which some nonempty box in `boxes` differs from the box `whole`."""
    dims: set[int] = set()
    for box in boxes:
        if box != NOTHING:
            dims.update(d for d, spans in enumerate(whole) if box[d] != spans)
    return dims
