"""Bounds: the smallest box that contains every difference, found by comparing many smaller boxes.

1. The search looks for the first and the last position that differ, in all dimensions at once. Each round divides the
   remaining span of each position into WAYS slabs.
2. So the number of rounds is the number of digits of a length to the base WAYS.

>>> def differ(boxes):
...     return [any(lo <= position < hi for position in (70, 300)) for ((lo, hi),) in boxes]
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
"""Slabs per span and round."""

Differ: TypeAlias = Callable[[list[Box]], list[bool]]
"""Returns, for each box, whether something differs in it."""

_Span: TypeAlias = tuple[int, int]


def find_bounds(box: Box, differ: Differ) -> Box:
    """Find the smallest box that contains all positions of `box` at which two versions of a tensor differ; there must
    be at least one. `differ` takes a list of boxes, and returns a list of flags: True if the versions differ anywhere
    in that box.

    If answers contradict each other, because memory is written meanwhile, the box is larger.
    """
    first = list(box)
    last = list(box)
    while True:
        bounds = _span_between(first, last)
        slabs = _divide_ends(first, last)
        differing = _filter_slabs(bounds, slabs, differ)
        # A span without a differing slab contradicts an earlier answer. Or no span is left to divide.
        if not all(differing.values()) or not differing:
            return bounds
        _narrow(first, differing, 0)
        _narrow(last, differing, -1)


_Slabs: TypeAlias = dict[tuple[int, _Span], list[_Span]]
"""Slabs of a span, by dimension and span."""


def _divide_ends(first: list[_Span], last: list[_Span]) -> _Slabs:
    """The slabs of all spans with more than one position. By dimension, `first` has the span of the first position that
    differs, and `last` the span of the last."""
    slabs: _Slabs = {}
    for spans in (first, last):
        for d, span in enumerate(spans):
            if span[1] - span[0] > 1:
                slabs[d, span] = _divide_span(span)
    return slabs


def _filter_slabs(known: Box, slabs: _Slabs, differ: Differ) -> _Slabs:
    """The slabs in which something differs; in other dimensions than the slab's, anywhere in the known box."""
    boxes = []
    for (d, _), parts in slabs.items():
        boxes += [(*known[:d], slab, *known[d + 1 :]) for slab in parts]
    answers = iter(differ(boxes) if boxes else ())
    differing: _Slabs = {}
    for key, parts in slabs.items():
        differing[key] = [slab for slab in parts if next(answers)]
    return differing


def _narrow(spans: list[_Span], differing: _Slabs, which: int) -> None:
    """Replace each divided span by its first (0) or last (-1) differing slab."""
    for d, span in enumerate(spans):
        if (d, span) in differing:
            spans[d] = differing[d, span][which]


def _span_between(first: list[_Span], last: list[_Span]) -> Box:
    """The box from the starts of the first spans to the ends of the last spans."""
    return tuple((lo, hi) for (lo, _), (_, hi) in zip(first, last, strict=True))


def _divide_span(span: _Span) -> list[_Span]:
    """The span in WAYS slabs, or in slabs of one position if it is shorter."""
    lo, hi = span
    ways = min(WAYS, hi - lo)
    cuts = [lo + (hi - lo) * i // ways for i in range(ways + 1)]
    return list(itertools.pairwise(cuts))
