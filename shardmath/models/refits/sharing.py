"""Sharing: engines that store a tensor alike are one window of it.

1. Their ranks hold copies, as replicas of one engine do: so a node with ranks of several engines takes each byte in
   once.
2. Tensors that belong together, as a quantised one and its scales, have the same windows: engines are one where they
   store all of these alike.

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
"""The axis along which engines that store alike follow each other."""


Together: TypeAlias = tuple[Layout, ...]
"""How one engine stores tensors that belong together."""


@memo()
def share(held: tuple[Together, ...]) -> tuple[tuple[Together, ...], tuple[int, ...]]:
    """The windows of each tensor that engines hold so, and which of them each engine has."""
    groups: list[list[Together]] = []
    numbers = []
    for layouts in held:
        number = _find_group(groups, layouts)
        if number == len(groups):
            groups.append([])
        groups[number].append(layouts)
        numbers.append(number)
    joined = []
    for group in groups:
        each = zip(*group, strict=True)
        joined.append([_join(layouts) for layouts in each])
    windows = zip(*joined, strict=True)
    return tuple(windows), tuple(numbers)


def _find_group(groups: list[list[Together]], layouts: Together) -> int:
    """The first group that stores all like these, on other ranks; the number of groups if none does."""
    for number, group in enumerate(groups):
        if all(_are_copies(one, layouts) for one in group):
            return number
    return len(groups)


def _are_copies(some: Together, others: Together) -> bool:
    pairs = zip(some, others, strict=True)
    return all(_is_copy(one, other) for one, other in pairs)


def _is_copy(one: Layout, other: Layout) -> bool:
    """Whether two layouts differ in their ranks alone, and have none in common."""
    if one.form != other.form or AXIS in one.mesh.shape:
        return False
    ranks = set(one.mesh.ranks)
    return ranks.isdisjoint(other.mesh.ranks)


def _join(group: Together) -> Layout:
    """The layout of all ranks of these copies."""
    first, *others = group
    if not others:
        return first
    ranks = [rank for layout in group for rank in layout.mesh.ranks]
    shape = {AXIS: len(group), **first.mesh.shape}
    mesh = Mesh(shape, ranks=ranks)
    return intern(first.shape, first.dtype, mesh, first.dims, first.partial)
