"""Sharing: engines that store a tensor alike are one window of it.

Their ranks hold copies, as replicas of one engine do: so a node with ranks of several engines takes each byte in once.

>>> from shardmath.algebra.mesh import Mesh
>>> halves = [Layout((4,), Mesh(tp=2, ranks=range(i, i + 2)), "(tp n)") for i in (0, 2)]
>>> whole = Layout((4,), Mesh(dp=1, ranks=[4]), "n")
>>> windows, numbers = share((*halves, whole))
>>> [str(layout) for layout in windows], numbers
(['float32[4] (tp n) on engine=2 tp=2', 'float32[4] n on dp=1'], (0, 0, 1))
"""

from __future__ import annotations

from shardmath.algebra.mesh import Mesh
from shardmath.base.memo import memo
from shardmath.layouts.layout import Layout, intern

__all__ = ["share"]

AXIS = "engine"
"""The axis along which engines that store alike follow each other."""


@memo()
def share(held: tuple[Layout, ...]) -> tuple[tuple[Layout, ...], tuple[int, ...]]:
    """The windows of a tensor that engines hold so, and which of them each engine has."""
    groups: list[list[Layout]] = []
    numbers = []
    for layout in held:
        number = _find_group(groups, layout)
        if number == len(groups):
            groups.append([])
        groups[number].append(layout)
        numbers.append(number)
    windows = tuple(map(_join, groups))
    return windows, tuple(numbers)


def _find_group(groups: list[list[Layout]], layout: Layout) -> int:
    """The first group that stores like the layout, on other ranks; the number of groups if none does."""
    for number, group in enumerate(groups):
        if all(_is_copy(one, layout) for one in group):
            return number
    return len(groups)


def _is_copy(one: Layout, other: Layout) -> bool:
    """Whether two layouts differ in their ranks alone, and have none in common."""
    if one.form != other.form or AXIS in one.mesh.shape:
        return False
    ranks = set(one.mesh.ranks)
    return ranks.isdisjoint(other.mesh.ranks)


def _join(group: list[Layout]) -> Layout:
    """The layout of all ranks of these copies."""
    first, *others = group
    if not others:
        return first
    ranks = [rank for layout in group for rank in layout.mesh.ranks]
    shape = {AXIS: len(group), **first.mesh.shape}
    mesh = Mesh(shape, ranks=ranks)
    return intern(first.shape, first.dtype, mesh, first.dims, first.partial)
