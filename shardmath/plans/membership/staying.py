"""Staying: the windows of a destination without the ranks that left.

1. Ranks leave by whole copies: the ranks of a mesh that stay form a mesh of the same axes, shorter along
   axes that divide nothing. So every rank that stays holds the same elements as before.
2. A window of which no rank stays is gone. The others keep their names.

>>> mesh = Mesh(engine=3, tp=2)
>>> stays = Staying(frozenset({2, 3}))
>>> print(stays.keep_layout("w", Layout((4,), mesh, "(tp n)")))
float32[4] (tp n) on engine=2 tp=2
>>> stays.keep_layout("w", Layout((6,), mesh, "(engine n)"))
Traceback (most recent call last):
shardmath.PlanError: tensor 'w': rank 2 leaves and holds element (2,) of float32[6] (engine n) on engine=3 tp=2, but \
ranks 0, 4 of the same copy stay; let whole copies leave, or make a new plan from layouts of the ranks that stay
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import numpy as np

from shardmath.base.arrays import Bools
from shardmath.base.errors import PlanError
from shardmath.base.text import show_ranks
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.holdings import Windows, label
from shardmath.layouts.layout import Layout, intern

__all__ = ["Kept", "Staying", "find_held"]


class _Shorter(NamedTuple):
    """The mesh of the ranks that stay (None if they do not form one), and the axes that are shorter in it."""

    mesh: Mesh | None
    axes: frozenset[str]


class Kept(NamedTuple):
    """The layouts of a tensor after ranks have left: `windows` has those layouts that still have ranks. `places` maps a
    layout's index before the ranks left to its index in `windows`."""

    windows: Windows
    places: dict[int, int]


@dataclass(frozen=True, slots=True)
class Staying:
    """A cache of meshes and windows from which the ranks in `left`, which are gone, have been removed. Windows are
    layouts that together hold a tensor."""

    left: frozenset[int]
    _meshes: dict[Mesh, _Shorter] = field(default_factory=dict)
    _windows: dict[int, Kept] = field(default_factory=dict)

    def keep(self, name: str, windows: Windows) -> Kept:
        """Return, as Kept, those `windows` of the tensor `name` that still have ranks, without the ranks that left.

        Raises PlanError as `keep_layout` does.
        """
        # The plan keeps its windows alive, so that no id is reused.
        kept = self._windows.get(id(windows))
        if kept is None:
            kept = self._windows[id(windows)] = self._keep(name, windows)
        return kept

    def _keep(self, name: str, windows: Windows) -> Kept:
        layouts: dict[int, Layout] = {}
        for place, layout in enumerate(windows):
            if not self.left.issuperset(layout.mesh.ranks):
                layouts[place] = self.keep_layout(name, layout)
        places = {before: now for now, before in enumerate(layouts)}
        kept = windows.keep(layouts)
        # Windows that no rank leaves stay the same object.
        return Kept(windows if kept == windows else kept, places)

    def keep_layout(self, name: str, layout: Layout) -> Layout:
        """Return `layout` without the ranks that left; at least one of its ranks must stay.

        Raises PlanError, naming an element of tensor `name`, if these ranks are not whole copies.
        """
        mesh = layout.mesh
        if self.left.isdisjoint(mesh.ranks):
            return layout
        shorter = self._meshes.get(mesh)
        if shorter is None:
            shorter = self._meshes[mesh] = _shorten(mesh, self.left)
        if shorter.mesh is None or not shorter.axes.issubset(layout.free_axes):
            _raise_torn(name, layout, self.left)
        return intern(layout.shape, layout.dtype, shorter.mesh, layout.dims, layout.partial)


def _shorten(mesh: Mesh, left: Iterable[int]) -> _Shorter:
    """The mesh without these ranks, of which it has some and not all."""
    ranks = mesh.array()
    stays: Bools = np.isin(ranks, list(left), invert=True)
    coordinates = list(map(np.unique, np.nonzero(stays)))  # of the ranks that stay, by axis
    sizes = dict(zip(mesh.shape, map(len, coordinates), strict=True))
    shorter = frozenset(name for name, n in mesh.axes if sizes[name] < n)
    # The ranks that stay form a mesh if they are all ranks at these coordinates.
    grid = np.ix_(*coordinates)
    if not stays[grid].all():
        return _Shorter(None, shorter)
    in_grid = ranks[grid].ravel()
    return _Shorter(Mesh(sizes, ranks=in_grid.tolist()), shorter)


def _raise_torn(name: str, layout: Layout, leaving_ranks: frozenset[int]) -> NoReturn:
    """Raise PlanError for an element of a copy of which only some ranks leave."""
    fix = "let whole copies leave, or make a new plan from layouts of the ranks that stay"
    mesh = layout.mesh
    copy_of = mesh.coordinate(layout.free_axes).tolist()
    copies: dict[int, list[int]] = {}
    for rank, copy in zip(mesh.ranks, copy_of, strict=True):
        copies.setdefault(copy, []).append(rank)
    for ranks in copies.values():
        leaving = sorted(leaving_ranks.intersection(ranks))
        stay = sorted(set(ranks) - leaving_ranks)
        if leaving and stay:
            rank, element = find_held(layout, leaving)
            listed = show_ranks(stay, noun=False, joined_from=None, most=16)
            raise PlanError(
                f"{label(name)}: rank {rank} leaves and holds {element} of {layout}, but ranks {listed} "
                f"of the same copy stay; {fix}"
            )
    stay = sorted(set(mesh.ranks) - leaving_ranks)
    listed = show_ranks(stay, noun=False, joined_from=None, most=16)
    raise PlanError(
        f"{label(name)}: ranks {listed}, which stay, do not form a mesh of the axes of {layout}; let "
        f"whole coordinates of an axis leave, or make a new plan from layouts of the ranks that stay"
    )


def find_held(layout: Layout, ranks: Sequence[int]) -> tuple[int, str]:
    """Find the first of `ranks` that holds an element under `layout`; return this rank, and a text for error messages
    with the element's index, such as "element (0, 4)".

    Returns the first rank if none holds any.
    """
    for rank in ranks:
        boxes = layout.boxes(rank)
        if boxes:
            _, spans = boxes[0]
            element = tuple(start for start, _ in spans)
            return rank, f"element {element}"
    return ranks[0], "no element"
