"""Boxes: products of ranges in n dimensions, and row-major flat ranges as boxes.

1. A box is a tuple of (start, stop), one pair per dimension; a box of no dimensions is one element,
   a scalar.
2. Elements are listed row-major, the last dimension fastest.
3. `flat_boxes` turns a flat range of a whole tensor into at most 2 d - 1 boxes, in order.

>>> flat_boxes((4, 5), 3, 12)
(((0, 1), (3, 5)), ((1, 2), (0, 5)), ((2, 3), (0, 2)))
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Ints
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
    "full",
]

Box: TypeAlias = tuple[tuple[int, int], ...]
"""One (start, stop) per dimension."""

Ranges: TypeAlias = Sequence[Sequence[tuple[int, int]]]
"""Ranges (start, stop) of each dimension; their product is a set of elements."""


def full(dims: Sequence[int]) -> Box:
    """Return the box, one (start, stop) per dimension, that covers a whole tensor of shape `dims`."""
    return tuple((0, n) for n in dims)


def shape(box: Box) -> tuple[int, ...]:
    """Return the number of elements of `box` along each dimension."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Return the number of elements in `box`."""
    return math.prod(shape(box))


def from_slices(index: Sequence[slice]) -> Box:
    """Return the box, one (start, stop) per dimension, of an `index` of slices that all have a start and a stop."""
    return tuple((span.start, span.stop) for span in index)


def row_size(dims: Sequence[int]) -> int:
    """Return the number of elements in a row of a tensor of shape `dims`: the elements at one index of the first
    dimension longer than 1. If all sizes are 1, this number is 1."""
    for d, n in enumerate(dims):
        if n > 1:
            return math.prod(dims[d + 1 :])
    return 1


def flat_boxes(dims: Sequence[int], lo: int, hi: int) -> tuple[Box, ...]:
    """Return boxes that contain, in order, the elements lo..hi-1, counted row-major, of a tensor of shape `dims`.

    A box is one (start, stop) per dimension. There are at most 2 d - 1 of them. Raises PlanError if [lo, hi) is not a
    range of the tensor.
    """
    total = math.prod(dims)
    if not 0 <= lo <= hi <= total:
        what = f"elements {lo}:{hi}, counted row-major, are not a range of shape {tuple(dims)}"
        raise PlanError(f"{what}, which has {total}; give 0 <= start <= stop <= {total}")
    if lo == hi:
        return ()
    return tuple(_cut_flat(tuple(dims), lo, hi))


def _cut_flat(dims: tuple[int, ...], lo: int, hi: int) -> list[Box]:
    """The elements lo..hi-1, one or more, as boxes: a part of a row, whole rows, a part of a row."""
    if lo == 0 and hi == math.prod(dims):
        return [full(dims)]
    row = math.prod(dims[1:])
    first = lo // row
    last = (hi - 1) // row
    start = lo - first * row
    end = hi - last * row
    if first == last:
        return _cut_row(first, dims, start, end)
    head: list[Box] = []
    tail: list[Box] = []
    if start > 0:
        head = _cut_row(first, dims, start, row)
        first += 1
    if end < row:
        tail = _cut_row(last, dims, 0, end)
        last -= 1
    if first <= last:
        rows = first, last + 1
        inner = full(dims[1:])
        head.append((rows, *inner))
    return head + tail


def _cut_row(row: int, dims: tuple[int, ...], lo: int, hi: int) -> list[Box]:
    """The elements lo..hi-1 of the given row of the outermost dimension, as boxes."""
    return [((row, row + 1), *box) for box in _cut_flat(dims[1:], lo, hi)]


def first_overlap(
    boxes: Sequence[Box], labels: Sequence[int] | None = None
) -> tuple[int, int] | None:
    """Return the indices of two `boxes` that have an element in common, or None if no boxes overlap. `labels`, if
    given, has one number per box: overlaps between boxes with equal numbers are ignored.

    All boxes have the same number of dimensions, and none is empty.

    >>> first_overlap([((0, 2), (0, 2)), ((2, 3), (0, 2)), ((1, 3), (1, 2))])
    (0, 2)
    >>> first_overlap([((0, 2),), ((1, 3),)], labels=[7, 7])
    """
    if len(boxes) < 2:
        return None
    table = np.array(boxes, np.int64).reshape(len(boxes), -1, 2)
    label = np.arange(len(boxes)) if labels is None else np.array(labels)
    ndim = table.shape[1]
    if ndim == 0:
        return _first_other_label(label)
    return _sweep(table, label)


def _sweep(table: Ints, label: Ints) -> tuple[int, int] | None:
    """`first_overlap` of boxes given as a table of shape (boxes, dimensions, 2), and of all their labels."""
    sweep_dim = _find_sweep_dimension(table)
    order = np.argsort(table[:, sweep_dim, 0], kind="stable")
    label = label[order]
    lo = table[order, :, 0]
    hi = table[order, :, 1]
    # A box shares no element with one that begins at its end or later.
    reach = np.searchsorted(lo[:, sweep_dim], hi[:, sweep_dim], "left")
    next_box = np.arange(1, len(table) + 1)
    for i in np.flatnonzero(reach > next_box).tolist():
        stop = int(reach[i])
        j = _find_overlapping(lo, hi, label, i, stop)
        if j is not None:
            first, second = sorted(order[[i, j]].tolist())
            return first, second
    return None


def _find_overlapping(lo: Ints, hi: Ints, label: Ints, i: int, stop: int) -> int | None:
    """The first box after box i, and before `stop`, of another label that shares an element with box i."""
    later = slice(i + 1, stop)
    begin_before = lo[later] < hi[i]
    end_after = hi[later] > lo[i]
    shared = begin_before & end_after
    unlike = label[later] != label[i]
    overlaps = shared.all(axis=1) & unlike
    if not overlaps.any():
        return None
    return i + 1 + int(overlaps.argmax())


def _find_sweep_dimension(table: Ints) -> int:
    """The dimension with the most distinct starts: along it a box overlaps few others."""
    starts = table[:, :, 0]
    distinct_starts = [len(np.unique(column)) for column in starts.T]
    return distinct_starts.index(max(distinct_starts))


def _first_other_label(label: Ints) -> tuple[int, int] | None:
    """The numbers of the first box and of one with another label: all boxes without dimensions are one element."""
    other = np.flatnonzero(label != label[0])
    if not len(other):
        return None
    return 0, int(other[0])


def first_gap(held: Ranges, boxes: Sequence[Box]) -> tuple[int, ...] | None:
    """Return the first index, row-major, that is in `held` (ranges per dimension) but in none of `boxes`; or None.

    >>> first_gap([[(0, 2)], [(0, 3)]], [((0, 1), (0, 3)), ((1, 2), (0, 2))])
    (1, 2)
    """
    if not held:
        return None if boxes else ()
    inner_held = held[1:]
    outer_ranges = [box[0] for box in boxes]
    begin, end = _borders(outer_ranges)
    enter, leave = _borders(held[0])
    active: dict[int, Box] = {}
    inside = 0
    # A slab is the positions of the first dimension from one border to the next: all are in the same ranges and boxes.
    was_full = False  # whether the slab before was held and had no gap
    for border in sorted({*begin, *end, *enter, *leave}):
        ending = end.get(border, ())
        beginning = begin.get(border, ())
        ended = [active.pop(i) for i in ending]
        new = {i: boxes[i][1:] for i in beginning}
        active |= new
        inside += len(enter.get(border, ()))
        inside -= len(leave.get(border, ()))
        if inside:
            # None: nothing is known of the slab before, so all boxes of this one are searched.
            ended_boxes = ended if was_full else None
            new_boxes = list(new.values())
            gap = _find_in_slab(inner_held, active, ended_boxes, new_boxes)
            if gap is not None:
                return (border, *gap)
        was_full = inside > 0
    return None


def _find_in_slab(
    rest: Ranges, active: dict[int, Box], ended: list[Box] | None, new: list[Box]
) -> tuple[int, ...] | None:
    """`first_gap` of one slab, in the dimensions `rest` after the first; `active` has the slab's boxes by number.

    If `ended` is given, the slab before had no gap, and its boxes had `ended` instead of `new`.
    """
    if ended is not None and _is_replaced(rest, ended, new, len(active)):
        return None
    # Without further dimensions any box fills the slab, and a list of all would take time.
    if active and not rest:
        return None
    return first_gap(rest, list(active.values()))


def _borders(
    ranges: Iterable[tuple[int, int]],
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The numbers of the ranges that begin, and that end, at each position; empty ranges are left out."""
    begin: dict[int, list[int]] = {}
    end: dict[int, list[int]] = {}
    for i, (lo, hi) in enumerate(ranges):
        if lo < hi:
            begin.setdefault(lo, []).append(i)
            end.setdefault(hi, []).append(i)
    return begin, end


def _is_replaced(held: Ranges, gone: list[Box], new: list[Box], most: int) -> bool:
    """Whether the new boxes hold all that the boxes `gone` held of the product.

    False also if finding out takes more than `most` steps: then looking at all boxes takes no longer. So disjoint
    boxes that tile take n^1.5 steps in all, while looking at every box of every slab would take n^2.
    """
    fresh = set(new)
    lost = [box for box in gone if box not in fresh]
    if len(lost) * len(new) > most:
        return False
    return all(first_gap(_clip(held, box), new) is None for box in lost)


def _clip(held: Ranges, box: Box) -> list[list[tuple[int, int]]]:
    """The part of the product that is in the box."""
    product = []
    for ranges, (start, stop) in zip(held, box, strict=True):
        inside = []
        for lo, hi in ranges:
            if lo < stop and start < hi:
                inside.append((max(lo, start), min(hi, stop)))
        product.append(inside)
    return product


PRIME = (1 << 31) - 1


def tiles(held: Ranges, boxes: Sequence[Box]) -> bool:
    """Return whether `boxes` cover exactly the elements in `held` (ranges per dimension), each element in one box. The
    check uses random weights: a wrong True is possible, but extremely rare.

    Positions get random weights, twice: the weights of all boxes then add up to the weight of the
    product. A wrong list passes with probability (dimensions / 2^31)^2 at most (Schwartz 1980,
    Zippel 1979), a right one always. Weights are drawn from a digest of the arguments, so that the
    answer is always the same; there is no guard against lists made to deceive the digest.

    >>> tiles([[(0, 2)], [(0, 3)]], [((0, 1), (0, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3))])
    True
    >>> tiles([[(0, 2)], [(0, 3)]], [((0, 1), (0, 3)), ((0, 1), (0, 3))])
    False
    """
    if not held or not boxes:
        return len(boxes) == _count_elements(held)
    table = np.array(boxes, np.int64).reshape(len(boxes), len(held), 2)
    digest = _digest_arguments(held, table)
    return all(_weights_agree(held, table, digest + number) for number in (b"0", b"1"))


def _count_elements(held: Ranges) -> int:
    """The number of elements of the product."""
    count = 1
    for ranges in held:
        count *= sum(hi - lo for lo, hi in ranges)
    return count


def _digest_arguments(held: Ranges, table: Ints) -> bytes:
    """A digest of the ranges and of the boxes."""
    from hashlib import sha256  # OpenSSL takes 5 ms to load, and `import shardmath` should not

    state = sha256(repr(held).encode())
    state.update(table.tobytes())
    return state.digest()


def _weights_agree(held: Ranges, table: Ints, seed: bytes) -> bool:
    """Whether the boxes weigh as much as the product of the ranges, for the weights of the seed."""
    box_weights = np.ones(len(table), np.uint64)
    product_weight = 1
    for d, ranges in enumerate(held):
        box_ranges = table[:, d]
        held_ranges = np.array(ranges, np.int64).reshape(-1, 2)
        # No range begins or ends between two marks, so all positions there share one weight.
        ends = np.concatenate((box_ranges, held_ranges))
        marks = np.unique(ends)
        dim_seed = seed + d.to_bytes(8, "little")
        weight = _draw_weights(len(marks), dim_seed)
        up_to = np.cumsum(weight)
        before = (up_to - weight) % PRIME
        box_weights *= _weigh(box_ranges, marks, before)
        box_weights %= PRIME
        held_weights = _weigh(held_ranges, marks, before)
        product_weight *= int(held_weights.sum())
        product_weight %= PRIME
    total = int(box_weights.sum()) % PRIME
    return total == product_weight


def _draw_weights(count: int, seed: bytes) -> NDArray[np.uint64]:
    """Pseudorandom numbers below PRIME, the same for one seed on every machine."""
    from hashlib import shake_256

    return np.frombuffer(shake_256(seed).digest(8 * count), "<u8") % PRIME


def _weigh(ranges: Ints, marks: Ints, before: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The weight of each range, whose ends are marks; `before` has the weight before each mark."""
    ends = before[np.searchsorted(marks, ranges)]
    starts = ends[:, 0]
    stops = ends[:, 1]
    return (stops + PRIME - starts) % PRIME  # unsigned: + PRIME keeps the difference above 0
