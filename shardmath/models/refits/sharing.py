"""Sharing: one window of a tensor for all engines that store it in the same way.

1. The ranks of such engines hold copies, like replicas of one engine: a node with ranks of several engines receives
   each byte once.
2. Tensors that belong together, such as a quantized one and its scales, have the same windows: engines share one if
   they store all of these in the same way.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> halves = [Layout((4,), Mesh(tp=2, ranks=range(i, i + 2)), "(tp n)") for i in (0, 2)]
>>> whole = Layout((4,), Mesh(dp=1, ranks=[4]), "n")
>>> (windows,), numbers = share(tuple((layout,) for layout in (*halves, whole)))
>>> [str(layout) for layout in windows], numbers
(['float32[4] (tp n) on engine=2 tp=2', 'float32[4] n on dp=1'], (0, 0, 1))
"""

from __future__ import annotations

from typing import TypeAlias

from shardmath.base.memo import memo
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout, intern

__all__ = ["share"]

AXIS = "engine"
"""The mesh axis over engines that store alike."""


Together: TypeAlias = tuple[Layout, ...]
"""One engine's layouts of tensors that belong together."""


@memo()
def share(held: tuple[Together, ...]) -> tuple[tuple[Together, ...], tuple[int, ...]]:
    """Group the engines whose layouts differ only in ranks, where `held[i]` has engine i's layouts, in order of
    tensors. Return (joined, groups): `joined[t][g]` is the layout of tensor t over the ranks of all engines in group g,
    and engine i is in group `groups[i]`."""
    groups: list[list[Together]] = []
    numbers = []
    for layouts in held:
        number = _find_group(groups, layouts)
        if number == len(groups):
            groups.append([])
        groups[number].append(layouts)
        numbers.append(number)
    by_group = [map(_join_layouts, zip(*group, strict=True)) for group in groups]
    windows = zip(*by_group, strict=True)
    return tuple(windows), tuple(numbers)


def _find_group(groups: list[list[Together]], layouts: Together) -> int:
    """The first group whose engines store all tensors like these layouts, on other ranks; else the number of groups."""
    for number, group in enumerate(groups):
        if all(_are_copies(one, layouts) for one in group):
            return number
    return len(groups)


def _are_copies(some: Together, others: Together) -> bool:
    """Whether two engines store every tensor alike, on different ranks."""
    pairs = zip(some, others, strict=True)
    return all(_is_copy(one, other) for one, other in pairs)


def _is_copy(one: Layout, other: Layout) -> bool:
    """Whether two layouts differ only in their ranks, share none, and can be joined along AXIS."""
    if one.form != other.form:
        return False
    # A mesh that has an axis of this name cannot have another.
    if AXIS in one.mesh.shape:
        return False
    ranks = set(one.mesh.ranks)
    return ranks.isdisjoint(other.mesh.ranks)


def _join_layouts(group: Together) -> Layout:
    """The layout over the ranks of all these copies."""
    first, *others = group
    if not others:
        return first
    ranks = [rank for layout in group for rank in layout.mesh.ranks]
    shape = {AXIS: len(group), **first.mesh.shape}
    mesh = Mesh(shape, ranks=ranks)
    return intern(first.shape, first.dtype, mesh, first.dims, first.partial)
