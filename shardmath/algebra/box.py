"""Boxes: products of ranges in n dimensions, and row-major flat ranges as boxes.

1. A box is a tuple of (start, stop), one pair a dimension; a box of no dimensions is one element, a scalar.
2. Elements are listed row-major, the last dimension fastest.
3. `rows` cuts a box where a flat range of its elements begins and ends; `flat_boxes` turns a flat range
   of a whole tensor into at most 2 d - 1 boxes, in order.

>>> flat_boxes((4, 5), 3, 12)
(((0, 1), (3, 5)), ((1, 2), (0, 5)), ((2, 3), (0, 2)))
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.errors import PlanError

__all__ = [
    "Box",
    "first_gap",
    "first_overlap",
    "flat_boxes",
    "row_size",
    "shape",
    "from_slices",
    "tiles",
    "volume",
    "whole",
]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""One (start, stop) a dimension."""


def whole(dims: Sequence[int]) -> Box:
    """All of a tensor of shape `dims`."""
    return tuple((0, n) for n in dims)


def shape(box: Box) -> tuple[int, ...]:
    """Elements a dimension."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Elements in the box."""
    return math.prod(shape(box))


def from_slices(index: Sequence[slice]) -> Box:
    """The box of an index: slices with a start and a stop, one a dimension."""
    return tuple((s.start, s.stop) for s in index)


def row_size(dims: Sequence[int]) -> int:
    """Elements of one row: all that lies inside one step of the outermost dimension longer than 1."""
    for d, n in enumerate(dims):
        if n > 1:
            return math.prod(dims[d + 1 :])
    return 1


def flat_boxes(dims: Sequence[int], lo: int, hi: int) -> tuple[Box, ...]:
    """The elements lo..hi-1 of a row-major tensor of shape `dims` as boxes, in order: at most 2 d - 1 of them.

    Raises PlanError if [lo, hi) is not a range of the tensor.
    """
    if not 0 <= lo <= hi <= math.prod(dims):
        raise PlanError(
            f"flat range [{lo}, {hi}) is not inside {tuple(dims)} of {math.prod(dims)} elements; cut it to fit"
        )
    return tuple(_flat(tuple(dims), lo, hi)) if lo < hi else ()


def _flat(dims: tuple[int, ...], lo: int, hi: int) -> list[Box]:
    if lo == 0 and hi == math.prod(dims):
        return [whole(dims)]
    row = math.prod(dims[1:])
    first, last = lo // row, (hi - 1) // row
    if first == last:
        return _within(first, dims, lo - first * row, hi - first * row)
    head = _within(first, dims, lo - first * row, row) if lo % row else []
    tail = _within(last, dims, 0, hi - last * row) if hi % row else []
    full = (first + bool(head), last + (not tail))
    middle: list[Box] = [(full, *whole(dims[1:]))] if full[0] < full[1] else []
    return head + middle + tail


def _within(row: int, dims: tuple[int, ...], lo: int, hi: int) -> list[Box]:
    """The flat range [lo, hi) of the given row of the outermost dimension."""
    return [((row, row + 1), *box) for box in _flat(dims[1:], lo, hi)]


def first_overlap(
    boxes: Sequence[Box], labels: Sequence[int] | None = None
) -> tuple[int, int] | None:
    """The numbers of two boxes that share an element, or None; boxes of one label may.

    All boxes have as many dimensions, and none is empty.

    >>> first_overlap([((0, 2), (0, 2)), ((2, 3), (0, 2)), ((1, 3), (1, 2))])
    (0, 2)
    >>> first_overlap([((0, 2),), ((1, 3),)], labels=[7, 7])
    """
    if len(boxes) < 2:
        return None
    table = np.array(boxes, np.int64).reshape(len(boxes), -1, 2)
    label = np.arange(len(boxes)) if labels is None else np.array(labels)
    if not table.shape[1]:
        other = np.flatnonzero(label != label[0])
        return (0, int(other[0])) if len(other) else None
    sweep = max(range(table.shape[1]), key=lambda d: len(np.unique(table[:, d, 0])))
    order = np.argsort(table[:, sweep, 0], kind="stable")
    lo, hi, label = table[order, :, 0], table[order, :, 1], label[order]
    reach = np.searchsorted(lo[:, sweep], hi[:, sweep], "left")
    for i in np.flatnonzero(reach > np.arange(len(boxes)) + 1).tolist():
        later = slice(i + 1, int(reach[i]))
        meet = ((lo[later] < hi[i]) & (hi[later] > lo[i])).all(axis=1) & (label[later] != label[i])
        if meet.any():
            a, b = int(order[i]), int(order[i + 1 + int(meet.argmax())])
            return min(a, b), max(a, b)
    return None


def first_gap(
    held: Sequence[Sequence[tuple[int, int]]], boxes: Sequence[Box]
) -> tuple[int, ...] | None:
    """The first element of the product of `held`, ranges (start, stop) a dimension, that no box has; None if all are.

    >>> first_gap([[(0, 2)], [(0, 3)]], [((0, 1), (0, 3)), ((1, 2), (0, 2))])
    (1, 2)
    """
    if not held:
        return None if boxes else ()
    rest, active = held[1:], dict[int, Box]()
    begin, end = _borders([box[0] for box in boxes])
    enter, leave = _borders(held[0])
    inside, known = 0, False
    for x in sorted({*begin, *end, *enter, *leave}):
        gone = [active.pop(i) for i in end.get(x, ())]
        new = {i: boxes[i][1:] for i in begin.get(x, ())}
        active |= new
        inside += len(enter.get(x, ())) - len(leave.get(x, ()))
        if inside and not (known and _replaced(rest, gone, list(new.values()), len(active))):
            gap = None if active and not rest else first_gap(rest, list(active.values()))
            if gap is not None:
                return (x, *gap)
        known = inside > 0
    return None


def _borders(
    ranges: Iterable[tuple[int, int]],
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Which ranges begin, and which end, at each position; by their numbers, empty ones left out."""
    begin: dict[int, list[int]] = {}
    end: dict[int, list[int]] = {}
    for i, (lo, hi) in enumerate(ranges):
        if lo < hi:
            begin.setdefault(lo, []).append(i)
            end.setdefault(hi, []).append(i)
    return begin, end


def _replaced(
    held: Sequence[Sequence[tuple[int, int]]], gone: list[Box], new: list[Box], most: int
) -> bool:
    """Whether the new boxes have all that those that are gone had of the product.

    False where it takes more than `most` steps to find out: to look at all boxes takes no longer then. So disjoint
    boxes that tile take n^1.5 steps in all, where to look at every box of every slab takes n^2.
    """
    fresh = set(new)
    lost = [box for box in gone if box not in fresh]
    if len(lost) * len(new) > most:
        return False
    return all(first_gap(_clipped(held, box), new) is None for box in lost)


def _clipped(held: Sequence[Sequence[tuple[int, int]]], box: Box) -> list[list[tuple[int, int]]]:
    """What of the product is in the box."""
    return [
        [(max(lo, start), min(hi, stop)) for lo, hi in ranges if lo < stop and start < hi]
        for ranges, (start, stop) in zip(held, box, strict=True)
    ]


PRIME = (1 << 31) - 1


def tiles(held: Sequence[Sequence[tuple[int, int]]], boxes: Sequence[Box]) -> bool:
    """Whether boxes have every element of the product of `held` once and no other; ranges (start, stop) a dimension.

    Positions get random weights, twice: the weights of all boxes then add up to the weight of the whole. A wrong list
    passes with probability (dimensions / 2^31)^2 at most (Schwartz 1980, Zippel 1979), a right one always.

    >>> tiles([[(0, 2)], [(0, 3)]], [((0, 1), (0, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3))])
    True
    >>> tiles([[(0, 2)], [(0, 3)]], [((0, 1), (0, 3)), ((0, 1), (0, 3))])
    False
    """
    if not held or not boxes:
        return len(boxes) == math.prod(sum(hi - lo for lo, hi in ranges) for ranges in held)
    table = np.array(boxes, np.int64).reshape(len(boxes), len(held), 2)
    return _weighed(held, table) and _weighed(held, table)


def _weighed(held: Sequence[Sequence[tuple[int, int]]], table: NDArray[np.int64]) -> bool:
    """Whether the boxes weigh as much as the product of the ranges, for one choice of weights."""
    boxes, whole = np.ones(len(table), np.uint64), 1
    for d, ranges in enumerate(held):
        own = np.array(ranges, np.int64).reshape(-1, 2)
        marks = np.unique(np.concatenate((table[:, d].ravel(), own.ravel())))
        weight = np.frombuffer(os.urandom(8 * len(marks)), np.uint64) % PRIME
        before = (np.cumsum(weight) - weight) % PRIME
        sizes = [
            (
                before[np.searchsorted(marks, x[:, 1])]
                + PRIME
                - before[np.searchsorted(marks, x[:, 0])]
            )
            % PRIME
            for x in (table[:, d], own)
        ]
        boxes = boxes * sizes[0] % PRIME
        whole = whole * int(sizes[1].sum()) % PRIME
    return int(boxes.sum()) % PRIME == whole
