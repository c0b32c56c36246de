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

from shardmath.layouts.algebra.box import Box

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
        slabs = _cut_ends(first, last)
        found = _ask(known, slabs, differ)
        if not all(found.values()) or not found:
            return known
        _narrow(first, found, 0)
        _narrow(last, found, -1)


_Slabs: TypeAlias = dict[tuple[int, _Span], list[_Span]]
"""Parts of a span, by dimension and span."""


def _cut_ends(first: list[_Span], last: list[_Span]) -> _Slabs:
    """The parts of all spans that have more than one position."""
    slabs: _Slabs = {}
    for spans in (first, last):
        for d, span in enumerate(spans):
            if span[1] - span[0] > 1:
                slabs[d, span] = _cut(span)
    return slabs


def _ask(known: Box, slabs: _Slabs, differ: Differ) -> _Slabs:
    """The parts in which something differs."""
    boxes = []
    for (d, _), cut in slabs.items():
        boxes += [(*known[:d], slab, *known[d + 1 :]) for slab in cut]
    answers = iter(differ(boxes) if boxes else ())
    found: _Slabs = {}
    for key, cut in slabs.items():
        found[key] = [slab for slab in cut if next(answers)]
    return found


def _narrow(spans: list[_Span], found: _Slabs, which: int) -> None:
    """Go on with the first or the last part of each span that was asked about."""
    for d, span in enumerate(spans):
        if (d, span) in found:
            spans[d] = found[d, span][which]


def _join(first: list[_Span], last: list[_Span]) -> Box:
    """From the first of the first spans to the last of the last ones."""
    return tuple((lo, hi) for (lo, _), (_, hi) in zip(first, last, strict=True))


def _cut(span: _Span) -> list[_Span]:
    """The span in WAYS parts, or in as many as it has positions."""
    lo, hi = span
    ways = min(WAYS, hi - lo)
    cuts = [lo + (hi - lo) * i // ways for i in range(ways + 1)]
    return list(itertools.pairwise(cuts))
