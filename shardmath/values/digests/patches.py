"""Patches: one tensor of a side as disjoint products of ranges, and the ranks that hold each.

1. Windows that share elements are divided together, others separately.
2. Each dimension is cut wherever the parts that hold it change (`overlay`). Ranges that the same parts hold form one
   set; a patch is a product of sets, one per dimension, that some rank holds whole.
3. So ranks that hold the same elements hold the same patches, and overlapping holdings have patches in common.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.layouts.holdings import windows_of
>>> from shardmath.layouts.layout import Layout
>>> layout = Layout((4,), Mesh(dp=2, tp=2), "(tp n)")
>>> for patch in list_patches(windows_of(layout, "w", ValueError)):
...     print(patch.ranges, [holder.rank for holder in patch.holders])
(((0, 2),),) [0, 2]
(((2, 4),),) [1, 3]
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardmath.base.memo import memo
from shardmath.layouts.algebra.box import Box
from shardmath.layouts.algebra.gaps import Ranges
from shardmath.layouts.algebra.overlay import Overlay, overlay
from shardmath.layouts.algebra.partition import Partition, partition
from shardmath.layouts.algebra.runs import Runs, compose, restrict
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.uncovered import list_sharing

__all__ = [
    "Patch",
    "Holder",
    "Portion",
    "hull",
    "list_patches",
    "list_held",
    "list_portions",
    "narrow",
]


class Holder(NamedTuple):
    """A `rank` that holds a patch of a tensor (elements that the same ranks hold). A tensor can have several layouts,
    each for some of its elements; `window` is the index of the layout under which the rank holds the patch."""

    window: int
    rank: int


class Patch(NamedTuple):
    """Elements of a tensor (a product of ranges) that are all held by the same ranks, and these holders."""

    ranges: tuple[Ranges, ...]
    holders: tuple[Holder, ...]


class Portion(NamedTuple):
    """A patch (elements that the same ranks hold) as one rank holds it: the patch's number, and its positions in a
    local array of the rank. A tensor can have several layouts; `window` is the index of the local array's layout."""

    patch: int
    window: int
    runs: tuple[Runs, ...]


@memo(512)
def list_patches(windows: Windows) -> tuple[Patch, ...]:
    """Return the patches (sets of elements that the same ranks hold) of a tensor, in an order that all ranks share.
    `windows` has the tensor's layouts: one, or several that each hold some of its elements."""
    patches: list[Patch] = []
    for group in _group_sharing(windows):
        patches += _divide_group(windows, group)
    # The order must not depend on how layouts are spelled: ranks may spell them differently.
    return tuple(sorted(patches))


def _group_sharing(windows: Windows) -> list[list[int]]:
    """The numbers of windows, in groups that are connected by shared elements."""
    group_of = {window: [window] for window in range(len(windows))}
    for i, j in list_sharing(windows):
        group = group_of[i]
        other = group_of[j]
        if group is not other:
            group += other
            group_of |= dict.fromkeys(other, group)
    distinct = {id(group): sorted(group) for group in group_of.values()}
    return sorted(distinct.values())


class _Sets(NamedTuple):
    """The sets of a dimension: the ranges of each, and the numbers of each part's sets, by window and part."""

    ranges: tuple[Ranges, ...]
    of_part: list[list[list[int]]]


def _divide_group(windows: Windows, group: Sequence[int]) -> list[Patch]:
    """The patches of the windows of a group: each is the product of one set of each dimension."""
    dims = [_divide_dimension(windows, group, d) for d in range(windows[0].ndim)]
    holders: dict[tuple[int, ...], list[Holder]] = {}  # by the numbers of the sets
    for i, window in enumerate(group):
        layout = windows[window]
        sets_by_rank = _list_sets(layout, [dim.of_part[i] for dim in dims])
        for rank, sets_by_dim in zip(layout.mesh.ranks, sets_by_rank, strict=True):
            for set_numbers in itertools.product(*sets_by_dim):
                holders.setdefault(set_numbers, []).append(Holder(window, rank))
    return [_make_patch(dims, *patch) for patch in holders.items()]


def _make_patch(dims: Sequence[_Sets], numbers: Sequence[int], holders: Sequence[Holder]) -> Patch:
    """The product of one set of each dimension, given by number."""
    ranges = tuple(dim.ranges[number] for dim, number in zip(dims, numbers, strict=True))
    return Patch(ranges, tuple(sorted(holders)))


def _list_sets(layout: Layout, of_part: Sequence[list[list[int]]]) -> list[list[list[int]]]:
    """By rank in mesh order and by dimension, the numbers of the rank's sets. `of_part` has the numbers of each part's
    sets, by dimension."""
    by_rank: list[list[list[int]]] = [[] for _ in layout.mesh.ranks]
    for dim, sets in zip(layout.dims, of_part, strict=True):
        parts = partition(dim).by_rank(layout.mesh)
        for rank_sets, part in zip(by_rank, parts.tolist(), strict=True):
            rank_sets.append(sets[part])
    return by_rank


def _divide_dimension(windows: Windows, group: Sequence[int], dimension: int) -> _Sets:
    """One dimension of these windows, cut wherever the parts that hold it change."""
    partitions = [partition(windows[i].dims[dimension]) for i in group]
    parts: list[Runs] = []
    for one_window in partitions:
        parts += one_window.parts
    joint = Partition((), tuple(parts), np.arange(len(parts)))
    # The keys of an overlay are the sets of parts that hold the same positions.
    over = overlay(joint, joint)
    of_part: list[list[int]] = [[] for _ in parts]
    for number, members in enumerate(over.keys):
        for part in members:
            of_part[part].append(number)
    # `of_part` has the parts of all windows end to end.
    rest = iter(of_part)
    by_window = [[next(rest) for _ in one_window.parts] for one_window in partitions]
    return _Sets(_list_ranges(over), by_window)


def _list_ranges(over: Overlay) -> tuple[Ranges, ...]:
    """The ranges of each set, from the overlay of a dimension with itself."""
    # A set overlaps only itself, so each set has one pair in the overlay.
    ranges: list[Ranges] = [()] * len(over.keys)
    borders = itertools.pairwise(over.first.tolist())
    for number, (begin, end) in zip(over.pair_key.tolist(), borders, strict=True):
        starts = over.start[begin:end]
        stops = starts + over.size[begin:end]
        spans = zip(starts.tolist(), stops.tolist(), strict=True)
        ranges[number] = tuple(sorted(spans))
    return tuple(ranges)


@memo(512)
def list_held(windows: Windows) -> dict[int, tuple[tuple[int, int], ...]]:
    """Return a dict from each rank to the patches (sets of elements that the same ranks hold) that it has. A value is
    an ascending tuple of pairs: a patch's number, and the index in `windows` of the layout under which the rank holds
    the patch.

    Ranks without a patch are left out.
    """
    held: dict[int, list[tuple[int, int]]] = {}
    for number, patch in enumerate(list_patches(windows)):
        for window, rank in patch.holders:
            held.setdefault(rank, []).append((number, window))
    return {rank: tuple(pairs) for rank, pairs in held.items()}


@memo(512)
def list_portions(windows: Windows, rank: int) -> tuple[Portion, ...]:
    """Return a Portion (number, window and local positions) for each patch (elements held by the same ranks) that
    `rank` holds, in the order of patch numbers."""
    patches = list_patches(windows)
    portions = []
    for number, window in list_held(windows).get(rank, ()):
        runs = windows[window].runs(rank)
        kept = _punch_holes(runs, patches[number].ranges)
        portions.append(Portion(number, window, kept))
    return tuple(portions)


def _punch_holes(runs: Sequence[Runs], ranges: Sequence[Ranges]) -> tuple[Runs, ...]:
    """The Runs of all dimensions, with holes for positions outside the ranges."""
    kept = []
    for dim_runs, inside in zip(runs, ranges, strict=True):
        # The Runs have all of the ranges: with as many positions, they have no others.
        if dim_runs.size == sum(hi - lo for lo, hi in inside):
            kept.append(dim_runs)
            continue
        segments = tuple((lo, lo, hi - lo) for lo, hi in inside)
        # Positions beyond the last range become holes, too.
        mask = Runs(segments, max(dim_runs.extent, inside[-1][1]))
        kept.append(compose(dim_runs, mask))
    return tuple(kept)


def narrow(portion: Portion, box: Box) -> Portion:
    """Return `portion` (the elements that one rank holds) without the elements outside `box`, which has a range of
    global positions per dimension. In the local array, the positions of removed elements become holes (positions
    without an element)."""
    pairs = zip(portion.runs, box, strict=True)
    return portion._replace(runs=tuple(restrict(runs, lo, hi) for runs, (lo, hi) in pairs))


def hull(patch: Patch) -> Box:
    """Return the smallest box that contains `patch` (elements held by the same ranks)."""
    return tuple((ranges[0][0], ranges[-1][1]) for ranges in patch.ranges)
