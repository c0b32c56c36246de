"""Cover: checks that the source holds, once, what the destination needs, and that a side holds whole tensors.

1. Windows of one source tensor hold different elements: otherwise an element would be sent twice.
2. Every position of the destination gets as many elements of every addend as it has cells (elements of the
   tensor that it holds). Units of one template are disjoint (`overlay`), so counting is enough.
3. An axis divides one dimension at most, so the elements that all ranks of a layout hold together are
   a product of positions per dimension. Disjoint windows hold all of a tensor if and only if they
   have its volume.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from shardmath.base.arrays import Bools, Ints
from shardmath.base.errors import PlanError
from shardmath.base.memo import memo
from shardmath.layouts.algebra.box import Box, first_gap
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.overlay import Overlay
from shardmath.layouts.algebra.partition import list_spans, partition
from shardmath.layouts.holdings import label
from shardmath.layouts.layout import Layout
from shardmath.plans.boxes import list_global_boxes
from shardmath.plans.demands import Batch
from shardmath.plans.template import Template

if TYPE_CHECKING:
    from shardmath.layouts.algebra.gaps import Product

__all__ = [
    "check_covered",
    "check_disjoint",
    "count_cells",
    "find_meeting",
    "find_not_whole",
    "first_unheld",
    "holds_all",
    "list_sharing",
]


def check_disjoint(name: str, windows: tuple[Layout, ...]) -> None:
    """Raise PlanError if two source windows of the tensor `name` hold the same element, which would be sent twice."""
    meeting_hulls = np.argwhere(_meet_earlier(windows))
    for j, i in meeting_hulls.tolist():
        element = _find_common(windows[i], windows[j])
        if element is not None:
            raise PlanError(
                f"{label(name)}: source windows {i} and {j} both hold element {element}; "
                f"cut one of them with shardmath.window"
            )


def list_sharing(windows: tuple[Layout, ...]) -> list[tuple[int, int]]:
    """List the pairs (i, j), i < j, of windows that hold an element in common."""
    pairs = []
    # The only windows that can share an element are those whose hulls meet.
    hulls_meet = _meet_earlier(windows)
    for j, i in np.argwhere(hulls_meet).tolist():
        if _find_common(windows[i], windows[j]) is not None:
            pairs.append((i, j))
    return pairs


def _find_common(a: Layout, b: Layout) -> tuple[int, ...] | None:
    """The first element, by dimension, that some rank holds under both layouts, or None."""
    element = []
    for dim, other in zip(a.dims, b.dims, strict=True):
        position = _find_common_position(dim, other)
        if position is None:
            return None
        element.append(position)
    return tuple(element)


def _find_common_position(a: Dimension, b: Dimension) -> int | None:
    """The first position that some rank holds under both, or None."""
    lo, hi = _union(a)
    other_lo, other_hi = _union(b)
    # For each range of `a`, the first range of `b` that does not end before it.
    at = np.searchsorted(other_hi, lo, "right")
    inside = at < len(other_lo)
    at = at[inside]
    begin = np.maximum(lo[inside], other_lo[at])
    end = np.minimum(hi[inside], other_hi[at])
    meet = begin[begin < end]
    return int(meet[0]) if len(meet) else None


@memo()
def _union(dimension: Dimension) -> tuple[Ints, Ints]:
    """Starts and stops of the disjoint ranges that ranks hold together, ascending."""
    divided = partition(dimension)
    start, stop, _, _ = list_spans(divided.parts)
    # A range begins where no earlier one reaches, and the range before it ends there.
    reach = np.maximum.accumulate(stop)
    is_first = np.ones(len(start), bool)
    is_first[1:] = start[1:] > reach[:-1]
    is_last = np.ones(len(start), bool)
    is_last[:-1] = is_first[1:]
    return start[is_first], reach[is_last]


def find_meeting(src: tuple[Layout, ...], dst: tuple[Layout, ...]) -> list[tuple[int, int]]:
    """List the pairs (i, j) for which the bounding boxes of `src[i]` and `dst[j]` overlap. If `dst[j]` overlaps no
    source layout, (0, j) is listed all the same, so that each j is in a pair."""
    if len(src) == len(dst) == 1:
        return [(0, 0)]
    meet = _hulls_meet(src, dst)
    meets_none = ~meet.any(axis=0)
    meet[0] |= meets_none
    return [(i, j) for i, j in np.argwhere(meet).tolist()]


def _hulls_meet(windows: tuple[Layout, ...], others: tuple[Layout, ...]) -> Bools:
    """Whether the hulls (bounding boxes) of two windows overlap: an array (windows, others)."""
    lo, hi = _hulls(windows)
    other_lo, other_hi = _hulls(others)
    after = lo[:, None] >= other_hi
    before = hi[:, None] <= other_lo
    meet: Bools = ~np.any(after | before, axis=2)
    return meet


def _meet_earlier(windows: tuple[Layout, ...]) -> Bools:
    """Whether the hull of a window (row) meets that of an earlier one (column)."""
    return np.tril(_hulls_meet(windows, windows), -1)


@memo()
def _hulls(windows: tuple[Layout, ...]) -> tuple[Ints, Ints]:
    """The least position that any rank holds, and the largest plus one: two arrays (windows, dimensions)."""
    shape = len(windows), windows[0].ndim
    # A window without elements keeps these borders, which overlap no other window.
    lo = np.full(shape, 1 << 62, np.int64)
    hi = np.zeros(shape, np.int64)
    for i, layout in enumerate(windows):
        for d, dim in enumerate(layout.dims):
            start, stop = _union(dim)
            if len(start):
                lo[i, d] = start[0]
                hi[i, d] = stop[-1]
    return lo, hi


@memo()
def holds_all(windows: tuple[Layout, ...]) -> bool:
    """Return whether the windows together hold every element of the tensor."""
    if any(all(map(_is_all_held, layout.dims)) for layout in windows):
        return True
    missing = math.prod(windows[0].shape) - sum(map(_count_held, windows))
    if missing > 0:
        return False
    if missing == 0 and not _meet_earlier(windows).any():
        return True
    # Of windows that hold the same elements one is enough; the rest may be disjoint.
    by_unions = {_multiply_unions(layout): layout for layout in windows}
    distinct = tuple(by_unions.values())
    if len(distinct) < len(windows):
        return holds_all(distinct)
    return first_unheld(windows) is None


def find_not_whole(side: Mapping[str, tuple[Layout, ...]]) -> tuple[str, ...]:
    """Return the names, ascending, of the tensors in `side` that have an element which no rank holds. `side` maps
    tensor names to layouts, and is a plan's source or destination."""
    distinct = {id(windows): windows for windows in side.values()}
    incomplete = {key for key, windows in distinct.items() if not holds_all(windows)}
    if not incomplete:
        return ()
    names = [name for name, windows in side.items() if id(windows) in incomplete]
    return tuple(sorted(names))


@memo()
def _is_all_held(dimension: Dimension) -> bool:
    """Whether every position is held by some rank."""
    if dimension.size == 0:
        return True
    start, stop = _union(dimension)
    return len(start) == 1 and int(stop[0] - start[0]) == dimension.size


def _multiply_unions(layout: Layout) -> Product:
    """The elements that all ranks hold together, as ranges per dimension."""
    unions = []
    for start, stop in map(_union, layout.dims):
        ranges = zip(start.tolist(), stop.tolist(), strict=True)
        unions.append(tuple(ranges))
    return tuple(unions)


def _count_held(layout: Layout) -> int:
    """The number of elements that all ranks hold together."""
    count = 1
    for start, stop in map(_union, layout.dims):
        sizes = stop - start
        count *= int(sizes.sum())
    return count


def first_unheld(windows: tuple[Layout, ...]) -> tuple[int, ...] | None:
    """Return the first element, row-major, of the tensor that no rank holds in any window; None if all are held."""
    shape = windows[0].shape
    if 0 in shape:
        return None
    # Imported here, since cheaper tests decide for most plans.
    from shardmath.layouts.algebra.gaps import find_gap

    distinct = dict.fromkeys(map(_multiply_unions, windows))
    return find_gap(shape, tuple(distinct))


def check_covered(batches: Sequence[Batch]) -> None:
    """Raise PlanError unless each destination rank receives as many elements as its own layouts say that it holds. If
    partial values are reduced, the rank must receive this number from each of them."""
    windows: dict[tuple[str, int], list[Batch]] = {}
    for batch in batches:
        key = batch.names[0], batch.target
        windows.setdefault(key, []).append(batch)
    for parts in windows.values():
        t = parts[0].template
        if len(parts) == 1 and _is_covered(t):
            continue
        given = sum(_count_given(batch.template) for batch in parts)
        needed = _count_needed(t)
        uncovered = np.flatnonzero(given != needed)
        if len(uncovered):
            _raise_uncovered(parts, int(uncovered[0]))


@memo()
def _is_covered(t: Template) -> bool:
    """Whether every position gets as many elements as it has cells."""
    if all(map(_is_full, t.overlays)):
        return True
    return np.array_equal(_count_given(t), _count_needed(t))


def _count_needed(t: Template) -> Ints:
    """By position of the destination, the number of its cells, times addends."""
    return count_cells(t.dst) * t.reduction.addends


@memo()
def _is_full(over: Overlay) -> bool:
    """Whether every part of the destination is covered in this dimension."""
    return _count_covered(over) == [runs.size for runs in over.target.parts]


def _count_covered(over: Overlay) -> list[int]:
    """By part of the destination, the number of its positions that some part of the source has."""
    covered = [0] * len(over.target.parts)
    pairs = zip(over.pair_goal.tolist(), over.pair_size.tolist(), strict=True)
    for goal, size in pairs:
        holding_parts = over.goals[goal]
        for part in holding_parts:
            covered[part] += size
    return covered


def _count_given(t: Template) -> Ints:
    """By position of the destination, the number of elements, of all addends, that it gets."""
    mesh = t.dst.mesh
    given = np.ones(mesh.size, np.int64)
    for over in t.overlays:
        covered_of_part = np.array(_count_covered(over), np.int64)
        if len(covered_of_part) == 1:
            given *= covered_of_part[0]
        else:
            given *= covered_of_part[over.target.by_rank(mesh)]
    return given


def count_cells(layout: Layout) -> Ints:
    """Return an array with the number of elements that the rank at each position of the layout's mesh holds."""
    held = np.ones(layout.mesh.size, np.int64)
    for dim in layout.dims:
        divided = partition(dim)
        part_sizes = np.array([runs.size for runs in divided.parts], np.int64)
        if len(part_sizes) == 1:
            held *= part_sizes[0]
        else:
            part_by_position = divided.by_rank(layout.mesh)
            held *= part_sizes[part_by_position]
    return held


def _raise_uncovered(batches: Sequence[Batch], position: int) -> NoReturn:
    """Raise PlanError for the first element that this position of the destination needs and no rank holds. `batches`
    bring the same window of the destination from different windows of the source."""
    batch = batches[0]
    form = batch.template.dst
    held = []
    for runs in form.runs(position):
        held.append([(start, start + n) for _, start, n in runs.segments])
    boxes: list[Box] = []
    for other in batches:
        boxes += _list_boxes(other.template, position)
    element = first_gap(held, boxes)
    raise PlanError(
        f"{label(batch.names[0])}: rank {batch.dst.ranks[position]} needs element {element} under "
        f"{form}, but no source rank holds it under {batch.template.src}; give it to a source rank"
    )


def _list_boxes(t: Template, position: int) -> list[Box]:
    """The global boxes of all units that a position of the destination gets."""
    receivers = [position in positions.tolist() for positions in t.receivers]
    units = np.flatnonzero(np.array(receivers, bool)[t.unit_cell])
    # All holders have a unit at the same global place: any one serves.
    senders = t.holders.position[t.holders.first[t.unit_class[units]]]
    zero = np.zeros_like(units)
    return [
        box
        for _, box in list_global_boxes(
            t, units, senders, zero + position, zero, t.unit_size[units]
        )
    ]
