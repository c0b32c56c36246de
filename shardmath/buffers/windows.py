"""Windows: the ranks' shares of each parameter, as layouts of the parameter's shape.

1. A row-major range of a tensor of d dimensions is at most 2 d - 1 boxes, each a window: a layout of the tensor in
   which the ranks that hold the box hold nothing else.
2. Groups that have the same part of a tensor may cut it at different borders; windows are cut at all of these borders.
3. Tensors that are cut in the same way share windows; a tensor without elements has one, on its first rank.

>>> from shardmath.layouts.algebra.runs import identity
>>> shares = Shares((ShardRange(0, 0, 4), ShardRange(1, 4, 6)), 0, 0)
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
from shardmath.buffers.shares import ShardRange, Shares
from shardmath.layouts.algebra.box import Box, flat_boxes, volume
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs, compose, from_ranges
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.layouts.store import Store, View

__all__ = ["GroupShares", "make_windows"]


class GroupShares(NamedTuple):
    """The part of a tensor that one data-parallel group holds, and how the group's ranks share it. `runs` gives the
    part's indices in each dimension of the tensor, as ranges."""

    group: tuple[int, ...]
    runs: tuple[Runs, ...]
    shares: Shares


class WindowHolder(NamedTuple):
    """A rank that holds a window (a slice of a tensor). `cut` is the range of elements that the rank holds, counted in
    the flattened part of the tensor that its data-parallel group shares; `within` is the number of elements in this
    range before the window."""

    window: int
    group: int
    cut: ShardRange
    rank: int
    within: int


_Divided: TypeAlias = tuple[Windows, list[WindowHolder]]
"""The windows of a tensor, and the holders of all."""


class _HeldCut(NamedTuple):
    """A cut of a group's shares, by the number of the group, and the rank that holds it."""

    group: int
    cut: ShardRange
    rank: int


class _SharedPiece(NamedTuple):
    """Elements start..stop-1 of a part of a tensor, and the cuts that have all of these elements."""

    start: int
    stop: int
    cuts: list[_HeldCut]


def make_windows(
    shapes: Mapping[str, tuple[int, ...]],
    held: Mapping[str, Sequence[GroupShares]],
    dtype: object,
    ranks: Container[int] | None,
    buffer: str,
) -> tuple[dict[str, Windows], Store]:
    """Return, by tensor name, one layout for each slice that ranks hold, and a Store: the slices' offsets in the flat
    array, named `buffer`, of each rank in `ranks` (None: all). `held` gives each data-parallel group's part of a
    tensor, and each rank's range of elements in it; such a range can consist of several slices.

    Without `ranks`, the Store is for all. Raises ParamLayoutError for a tensor that no rank holds, and if a window has
    the name of a tensor.
    """
    known: dict[object, _Divided] = {}
    windows: dict[str, Windows] = {}
    views: dict[tuple[str, int], View] = {}
    for name, groups in held.items():
        # Runs and cuts are interned by the caller, and `held` keeps them: their ids are short keys.
        group_keys = tuple((group.group, id(group.runs), id(group.shares.cuts)) for group in groups)
        key = shapes[name], group_keys
        if key not in known:
            shape = shapes[name]
            divided, holders = _make_tensor_windows(name, shape, groups, dtype)
            if ranks is not None:
                holders = [holder for holder in holders if holder.rank in ranks]
            known[key] = divided, holders
        divided, holders = known[key]
        windows[name] = divided
        for holder in holders:
            local = divided.local_name(name, holder.window)
            start = _find_start(groups, holder)
            views[local, holder.rank] = View(buffer, start)
    _check_names(windows)
    return windows, Store(views)


def _find_start(groups: Sequence[GroupShares], holder: WindowHolder) -> int:
    """The start of the window in the flat array of a rank that holds it."""
    shares = groups[holder.group].shares
    return shares.place(holder.cut) + holder.within


def _check_names(windows: Mapping[str, Windows]) -> None:
    """Raise ParamLayoutError if a window has the name of a parameter."""
    for name in windows:
        owner, bracket, _ = name.rpartition("[")
        if bracket and name in windows.get(owner, Windows()).local_names(owner):
            what = f"parameter {name!r} has the name of a window of parameter {owner!r}"
            raise ParamLayoutError(f"{what}; rename one of the two parameters")


def _make_tensor_windows(
    name: str, shape: tuple[int, ...], groups: Sequence[GroupShares], dtype: object
) -> _Divided:
    """The windows of a tensor, and their holders. Raises ParamLayoutError if no rank has a part of it."""
    if not groups:
        what = f"parameter {name!r}: no rank of the mesh has a part of it"
        raise ParamLayoutError(f"{what}; give the mesh of the ranks that hold it")
    windows: list[Layout] = []
    holders: list[WindowHolder] = []
    for runs, held_cuts in _group_cuts(groups).items():
        for piece in _cut_pieces(held_cuts):
            mesh = _make_replicas([rank for _, _, rank in piece.cuts])
            for start, box in _list_boxes(runs, piece):
                for group, cut, rank in piece.cuts:
                    holder = WindowHolder(len(windows), group, cut, rank, within=start - cut.lo)
                    holders.append(holder)
                stored = _select_box(runs, box)
                window = Layout(shape, mesh, {}, dtype=dtype, stored=stored)
                windows.append(window)
    if not windows:
        return _make_empty(shape, groups[0], dtype)
    return Windows(windows), holders


def _list_boxes(runs: Sequence[Runs], piece: _SharedPiece) -> Iterator[tuple[int, Box]]:
    """The boxes of a piece, each with the number of its first element in row-major order of the runs."""
    sizes = tuple(map(len, runs))
    start = piece.start
    for box in flat_boxes(sizes, piece.start, piece.stop):
        yield start, box
        start += volume(box)


def _make_replicas(ranks: list[int]) -> Mesh:
    """The mesh of ranks that all hold the same elements."""
    if len(ranks) == 1:
        return Mesh(ranks=ranks)
    return Mesh(replica=len(ranks), ranks=ranks)


def _make_empty(shape: tuple[int, ...], first: GroupShares, dtype: object) -> _Divided:
    """The window of a tensor without elements, which the first rank holds."""
    rank = first.group[0]
    mesh = _make_replicas([rank])
    stored = dict(enumerate(first.runs))
    window = Layout(shape, mesh, {}, dtype=dtype, stored=stored)
    nothing = ShardRange(0, 0, 0)
    holder = WindowHolder(window=0, group=0, cut=nothing, rank=rank, within=0)
    return Windows([window]), [holder]


def _select_box(runs: Sequence[Runs], box: Box) -> dict[int, Runs]:
    """By dimension, the tensor's positions in a box of a group's part, of which `runs` gives the positions."""
    stored = {}
    for d, span in enumerate(box):
        stored[d] = compose(from_ranges([span]), runs[d])
    return stored


def _group_cuts(groups: Sequence[GroupShares]) -> dict[tuple[Runs, ...], list[_HeldCut]]:
    """The cuts of all groups, by the part of the tensor that the group has."""
    by_runs: dict[tuple[Runs, ...], list[_HeldCut]] = {}
    for number, group_shares in enumerate(groups):
        cuts = by_runs.setdefault(group_shares.runs, [])
        for cut in group_shares.shares.cuts:
            cuts.append(_HeldCut(number, cut, group_shares.group[cut.shard]))
    return by_runs


def _cut_pieces(cuts: Sequence[_HeldCut]) -> Iterator[_SharedPiece]:
    """The pieces between all borders of the cuts, without pieces that no cut has."""
    borders = sorted({border for held in cuts for border in (held.cut.lo, held.cut.hi)})
    # In reverse, so that the next cut to begin is the last one.
    later_cuts = sorted(cuts, key=lambda held: held.cut.lo, reverse=True)
    current: list[_HeldCut] = []
    for start, stop in itertools.pairwise(borders):
        current = [held for held in current if held.cut.hi > start]
        while later_cuts and later_cuts[-1].cut.lo <= start:
            current.append(later_cuts.pop())
        if current:
            # By group, so that pieces on the same ranks have the ranks in the same order.
            yield _SharedPiece(start, stop, sorted(current))
