"""Patches: what the ranks of a side hold of one tensor, as disjoint products of ranges, and who holds each.

1. Windows that share no element are looked at one by one; those that do, together.
2. Each dimension is cut wherever what holds it changes (`overlay`). Ranges that the same parts hold are
   one set; a patch is a product of sets, one of each dimension, that some rank holds whole.
3. So ranks that hold the same hold the same patches, and where holdings overlap they have patches in common.

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
    """A rank, and the window by which it holds a patch."""

    window: int
    rank: int


class Patch(NamedTuple):
    """The elements of a product of ranges, and all who hold it."""

    ranges: tuple[Ranges, ...]
    holders: tuple[Holder, ...]


class Portion(NamedTuple):
    """A patch as one holder has it: the patch's number, the window, and where its elements lie there."""

    patch: int
    window: int
    runs: tuple[Runs, ...]


@memo(512)
def list_patches(windows: Windows) -> tuple[Patch, ...]:
    """All patches of a tensor's windows; they share no element, and none is empty."""
    patches: list[Patch] = []
    for together in _group_sharing(windows):
        patches += _cut(windows, together)
    # In an order that does not depend on how layouts are spelled: ranks may spell them otherwise.
    return tuple(sorted(patches))


def _group_sharing(windows: Windows) -> list[list[int]]:
    """The numbers of windows, those in one list that share elements, or share them with others there."""
    group_of = {window: [window] for window in range(len(windows))}
    for i, j in list_sharing(windows):
        here = group_of[i]
        there = group_of[j]
        if here is not there:
            here += there
            group_of |= dict.fromkeys(there, here)
    distinct = {id(group): sorted(group) for group in group_of.values()}
    return sorted(distinct.values())


class _Sets(NamedTuple):
    """The sets of a dimension: their ranges, and by window and part the sets that the part has."""

    ranges: tuple[Ranges, ...]
    of_part: list[list[list[int]]]


def _cut(windows: Windows, together: Sequence[int]) -> list[Patch]:
    """The patches of these windows."""
    dims = [_cut_dimension(windows, together, d) for d in range(windows[0].ndim)]
    holders: dict[tuple[int, ...], list[Holder]] = {}
    for i, window in enumerate(together):
        layout = windows[window]
        of_rank = _list_sets(layout, [own.of_part[i] for own in dims])
        for rank, sets in zip(layout.mesh.ranks, of_rank, strict=True):
            for numbers in itertools.product(*sets):
                holders.setdefault(numbers, []).append(Holder(window, rank))
    return [_make_patch(dims, numbers, found) for numbers, found in holders.items()]


def _make_patch(dims: Sequence[_Sets], numbers: Sequence[int], holders: Sequence[Holder]) -> Patch:
    """The product of the sets of these numbers."""
    ranges = tuple(own.ranges[number] for own, number in zip(dims, numbers, strict=True))
    return Patch(ranges, tuple(sorted(holders)))


def _list_sets(layout: Layout, of_part: Sequence[list[list[int]]]) -> list[list[list[int]]]:
    """The sets that each rank has of each dimension, in mesh order, given those of each part."""
    by_rank: list[list[list[int]]] = [[] for _ in layout.mesh.ranks]
    for dim, sets in zip(layout.dims, of_part, strict=True):
        parts = partition(dim).by_rank(layout.mesh)
        for own, part in zip(by_rank, parts.tolist(), strict=True):
            own.append(sets[part])
    return by_rank


def _cut_dimension(windows: Windows, together: Sequence[int], dimension: int) -> _Sets:
    """One dimension of these windows, cut wherever the parts that hold it change."""
    divided = [partition(windows[i].dims[dimension]) for i in together]
    parts: list[Runs] = []
    for own in divided:
        parts += own.parts
    joint = Partition((), tuple(parts), np.arange(len(parts)))
    over = overlay(joint, joint)
    of_part: list[list[int]] = [[] for _ in parts]
    for number, members in enumerate(over.keys):
        for part in members:
            of_part[part].append(number)
    # The parts of each window, one after the other.
    rest = iter(of_part)
    by_window = [[next(rest) for _ in own.parts] for own in divided]
    return _Sets(_list_ranges(over), by_window)


def _list_ranges(over: Overlay) -> tuple[Ranges, ...]:
    """The ranges of each set of parts, of a dimension that is overlaid with itself."""
    # Each set meets itself alone: there is one pair for each.
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
    """(patch, window) of all that each rank holds, in the order of patches; ranks that hold nothing are
    left out."""
    held: dict[int, list[tuple[int, int]]] = {}
    for number, patch in enumerate(list_patches(windows)):
        for window, rank in patch.holders:
            held.setdefault(rank, []).append((number, window))
    return {rank: tuple(pairs) for rank, pairs in held.items()}


@memo(512)
def list_portions(windows: Windows, rank: int) -> tuple[Portion, ...]:
    """What the rank holds of each patch, in the order of `list_held`."""
    patches = list_patches(windows)
    portions = []
    for number, window in list_held(windows).get(rank, ()):
        runs = windows[window].runs(rank)
        kept = _keep(runs, patches[number].ranges)
        portions.append(Portion(number, window, kept))
    return tuple(portions)


def _keep(runs: Sequence[Runs], ranges: Sequence[Ranges]) -> tuple[Runs, ...]:
    """The Runs with holes for all that is outside of the ranges."""
    kept = []
    for own, inside in zip(runs, ranges, strict=True):
        if own.size == sum(hi - lo for lo, hi in inside):
            kept.append(own)
            continue
        segments = tuple((lo, lo, hi - lo) for lo, hi in inside)
        # Positions beyond the last range are holes, too.
        held = Runs(segments, max(own.extent, inside[-1][1]))
        kept.append(compose(own, held))
    return tuple(kept)


def narrow(portion: Portion, box: Box) -> Portion:
    """The portion with holes outside of the box."""
    runs = tuple(restrict(own, lo, hi) for own, (lo, hi) in zip(portion.runs, box, strict=True))
    return portion._replace(runs=runs)


def hull(patch: Patch) -> Box:
    """The smallest box that has all of the patch."""
    return tuple((ranges[0][0], ranges[-1][1]) for ranges in patch.ranges)
