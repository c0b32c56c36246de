"""Windows: what ranks have of each parameter in their flat arrays, in the parameter's own shape.

1. A row-major range of a tensor of d dimensions is at most 2 d - 1 boxes, each a window: a layout of the tensor in
   which the ranks that hold the box hold nothing else.
2. Ranks that have the same of a tensor in buffers that are cut elsewhere hold the pieces between all of these cuts.
3. Tensors that are cut alike have the same windows; a tensor without elements has one, on its first rank.

>>> from shardmath.layouts.algebra.runs import identity
>>> shares = Shares((Cut(0, 0, 4), Cut(1, 4, 6)), 0, 0)
>>> groups = [GroupShares((0, 1), (identity(2), identity(3)), shares)]
>>> windows, store = make_windows({"w": (2, 3)}, {"w": groups}, "float32", None, "shard")
>>> for layout, ((name, rank), view) in zip(windows["w"], store.entries):
...     print(name, rank, *layout.runs(rank), view.offset)
w[0] 0 [0:1] [0:3] 0
w[1] 0 [1:2] [0:1] 3
w[2] 1 [1:2] [1:3] 0
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import ParamLayoutError
from shardmath.buffers.shares import Cut, Shares
from shardmath.layouts.algebra.box import Box, flat_boxes, volume
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs, compose, from_ranges
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.layouts.store import Store, View

__all__ = ["GroupShares", "make_windows"]


class GroupShares(NamedTuple):
    """How one data-parallel group holds a tensor: its ranks, what they have of each dimension, and their shares."""

    group: tuple[int, ...]
    runs: tuple[Runs, ...]
    shares: Shares


class WindowHolder(NamedTuple):
    """A rank that holds a window, of which cut of which group, and how far into the cut the window begins."""

    window: int
    group: int
    cut: Cut
    rank: int
    within: int


_Divided: TypeAlias = tuple[Windows, list[WindowHolder]]
"""The windows of a tensor, and who holds each."""

_GroupCut: TypeAlias = tuple[int, Cut]
"""The number of a group, and a cut of its shares."""


def make_windows(
    shapes: Mapping[str, tuple[int, ...]],
    held: Mapping[str, Sequence[GroupShares]],
    dtype: object,
    ranks: Container[int] | None,
    buffer: str,
) -> tuple[dict[str, Windows], Store]:
    """The windows of each tensor, and where they lie in the arrays of these ranks, or of all.

    Raises ParamLayoutError for a tensor that nobody holds, and where a window has the name of a tensor.
    """
    made: dict[object, _Divided] = {}
    windows: dict[str, Windows] = {}
    views: dict[tuple[str, int], View] = {}
    for name, groups in held.items():
        # Runs and cuts are interned by the caller, and `held` keeps them: their ids are short keys.
        alike = tuple((one.group, id(one.runs), id(one.shares.cuts)) for one in groups)
        key = shapes[name], alike
        if key not in made:
            shape = shapes[name]
            divided, holders = _divide(name, shape, groups, dtype)
            if ranks is not None:
                holders = [holder for holder in holders if holder.rank in ranks]
            made[key] = divided, holders
        divided, holders = made[key]
        windows[name] = divided
        for holder in holders:
            local = divided.local_name(name, holder.window)
            start = _find_start(groups, holder)
            views[local, holder.rank] = View(buffer, start)
    _check_names(windows)
    return windows, Store(views)


def _find_start(groups: Sequence[GroupShares], holder: WindowHolder) -> int:
    """Where the window begins in the flat array of a rank that holds it."""
    shares = groups[holder.group].shares
    return shares.place(holder.cut) + holder.within


def _check_names(windows: Mapping[str, Windows]) -> None:
    """A window's name is not that of a parameter."""
    for name in windows:
        owner, bracket, _ = name.rpartition("[")
        if bracket and name in windows.get(owner, Windows()).local_names(owner):
            what = f"parameter {name!r} has the name of a window of parameter {owner!r}"
            raise ParamLayoutError(f"{what}; rename one")


def _divide(
    name: str, shape: tuple[int, ...], groups: Sequence[GroupShares], dtype: object
) -> _Divided:
    """The windows of a tensor, and where each rank has each."""
    if not groups:
        what = f"parameter {name!r}: no rank of the mesh has a part of it"
        raise ParamLayoutError(f"{what}; give its ranks")
    windows: list[Layout] = []
    holders: list[WindowHolder] = []
    for runs, cuts in _group_cuts(groups).items():
        sizes = tuple(map(len, runs))
        for lo, hi, having in _cut_pieces(cuts):
            ranks = [groups[number].group[cut.shard] for number, cut in having]
            mesh = _make_replicas(ranks)
            at = lo
            for box in flat_boxes(sizes, lo, hi):
                holders += _list_holders(len(windows), having, ranks, at)
                stored = _select_box(runs, box)
                window = Layout(shape, mesh, {}, dtype=dtype, stored=stored)
                windows.append(window)
                at += volume(box)
    if not windows:
        return _make_empty(shape, groups[0], dtype)
    return Windows(windows), holders


def _list_holders(
    window: int, cuts: Sequence[_GroupCut], ranks: Sequence[int], at: int
) -> Iterator[WindowHolder]:
    """The ranks that hold a window which begins at element `at` of what their groups have."""
    for (number, cut), rank in zip(cuts, ranks, strict=True):
        within = at - cut.lo
        yield WindowHolder(window, number, cut, rank, within)


def _make_replicas(ranks: list[int]) -> Mesh:
    """The mesh of ranks that all have the same."""
    if len(ranks) == 1:
        return Mesh(ranks=ranks)
    return Mesh(replica=len(ranks), ranks=ranks)


def _make_empty(shape: tuple[int, ...], first: GroupShares, dtype: object) -> _Divided:
    """The window of a tensor without elements, which the first rank holds."""
    rank = first.group[0]
    mesh = _make_replicas([rank])
    stored = dict(enumerate(first.runs))
    window = Layout(shape, mesh, {}, dtype=dtype, stored=stored)
    nothing = Cut(0, 0, 0)
    holder = WindowHolder(0, 0, nothing, rank, 0)
    return Windows([window]), [holder]


def _select_box(runs: Sequence[Runs], box: Box) -> dict[int, Runs]:
    """For each dimension the global positions of a box of what the runs hold."""
    stored = {}
    for d, span in enumerate(box):
        stored[d] = compose(from_ranges([span]), runs[d])
    return stored


def _group_cuts(groups: Sequence[GroupShares]) -> dict[tuple[Runs, ...], list[_GroupCut]]:
    """The cuts of all groups that have the same of the tensor, by what they have."""
    by_runs: dict[tuple[Runs, ...], list[_GroupCut]] = {}
    for number, one in enumerate(groups):
        cuts = by_runs.setdefault(one.runs, [])
        for cut in one.shares.cuts:
            cuts.append((number, cut))
    return by_runs


def _cut_pieces(cuts: Sequence[_GroupCut]) -> Iterator[tuple[int, int, list[_GroupCut]]]:
    """The pieces lo..hi-1 between all borders of the cuts, and the cuts that have each."""
    found: set[int] = set()
    for _, cut in cuts:
        found |= {cut.lo, cut.hi}
    borders = sorted(found)
    coming = sorted(cuts, key=lambda pair: pair[1].lo, reverse=True)
    here: list[_GroupCut] = []
    for lo, hi in itertools.pairwise(borders):
        here = [pair for pair in here if pair[1].hi > lo]
        while coming and coming[-1][1].lo <= lo:
            here.append(coming.pop())
        if here:
            yield lo, hi, sorted(here)
