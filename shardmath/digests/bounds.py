"""Bounds: the smallest box with all that differs, found by asking in which of many boxes something does.

1. Along every dimension the first and the last position are sought, all of them at once: each round
   cuts what is left of each into WAYS slabs.
2. So the rounds are as many as a length has digits to the base WAYS, and of what is asked in all rounds
   but the first a slab is a part of a slab.

>>> def differ(boxes):
...     return [any(lo <= at < hi for at in (70, 300)) for ((lo, hi),) in boxes]
>>> find_bounds(((0, 1000),), differ)
((70, 301),)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeAlias

from shardmath.algebra.box import Box

__all__ = ["WAYS", "Differ", "find_bounds"]

WAYS = 16
"""Slabs of a round."""

Differ: TypeAlias = Callable[[list[Box]], list[bool]]
"""Of each box, whether something differs in it."""

_Span: TypeAlias = tuple[int, int]


def find_bounds(box: Box, differ: Differ) -> Box:
    """The smallest box with all that differs inside of `box`, where something does.

    Where answers contradict each other, as of memory that is written meanwhile, it is a larger one.
    """
    first = list(box)
    last = list(box)
    while True:
        known = _join(first, last)
        asked = [(d, span) for d in range(len(box)) for span in dict.fromkeys((first[d], last[d]))]
        slabs = {key: _cut(key[1]) for key in asked if key[1][1] - key[1][0] > 1}
        boxes = [_replace(known, d, slab) for (d, _), cut in slabs.items() for slab in cut]
        if not boxes:
            return known
        answers = iter(differ(boxes))
        found = {key: [slab for slab in cut if next(answers)] for key, cut in slabs.items()}
        if not all(found.values()):
            return known
        for d in range(len(box)):
            # A span of one position was not asked about.
            first[d] = found.get((d, first[d]), [first[d]])[0]
            last[d] = found.get((d, last[d]), [last[d]])[-1]


def _join(first: list[_Span], last: list[_Span]) -> Box:
    """From the first of the first spans to the last of the last ones."""
    return tuple((lo, hi) for (lo, _), (_, hi) in zip(first, last, strict=True))


def _cut(span: _Span) -> list[_Span]:
    """The span in WAYS parts, or in as many as it has positions."""
    lo, hi = span
    ways = min(WAYS, hi - lo)
    cuts = [lo + (hi - lo) * i // ways for i in range(ways + 1)]
    return list(itertools.pairwise(cuts))


def _replace(box: Box, dimension: int, span: _Span) -> Box:
    """The box with another span in one dimension."""
    return (*box[:dimension], span, *box[dimension + 1 :])
