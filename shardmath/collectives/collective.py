"""Collectives: moves that are one textbook operation within groups of ranks.

1. A group is the ranks that differ only on some mesh axes. Within each group, and never across,
   **all_gather**: members hold different shares of a box, each gets all of it; **all_to_all**:
   members share a box along one dimension, each gets a share along another; **permute**: holdings
   move whole, each to one rank; **broadcast**: one member holds it all, each gets it;
   **all_reduce**: members hold addends of one box, each gets its reduction; **reduce_scatter**: the
   same, each gets a share; **local**: nothing is moved between ranks.
2. `recognise` compares what each rank holds before and after, element for element, and what the
   addends ask for: all that `plan(src, dst)` depends on. Placements, the order of splits and the
   names of axes do not matter.
3. Groups are of the source's mesh, or of the destination's where the source's axes do not say them.
   The smallest groups that fit are taken, then those of the first ranks, then broadcast, permute,
   all_gather, all_to_all in this order.
4. Order within a rank is free: a strided shard may be gathered in order, or as the buffers come.
   `contiguous` says that the buffers are the operation's own, without a hole and without a copy
   before or after.
5. Everything else is None: run its transfers. So are gathering and reducing to one rank, and
   destinations that wait for a reduction of their own, other than of addends that pass through.

>>> from shardmath.algebra.mesh import Mesh
>>> mesh = Mesh(dp=2, tp=2)
>>> gather = recognise(Layout((8, 4), mesh, "(tp dp n) h"), Layout((8, 4), mesh, "(tp n) h"))
>>> print(gather)
all_gather of dimension 0 over dp: 2 groups of 2, contiguous
>>> gather.groups
((0, 2), (1, 3))
>>> print(recognise(Layout((8, 4), mesh, "(tp dp n) h"), Layout((8, 4), mesh, "(dp n) h")))
None
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from shardmath.algebra.mesh import Mesh
from shardmath.algebra.partition import partition
from shardmath.algebra.runs import Runs, concat
from shardmath.algebra.spans import NOTHING, inside, merge, spans_of
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.collectives.kinds import COPIES, FITS, Buffer, Kind, Members, Side
from shardmath.layouts.layout import Layout
from shardmath.plans.plan import Plan
from shardmath.plans.reduction import reduction

__all__ = ["Collective", "Kind", "recognise", "recognise_all"]

Axes: TypeAlias = tuple[str, ...]
Groups: TypeAlias = tuple[tuple[int, ...], ...]


@public
@dataclass(frozen=True, slots=True)
class Collective:
    """One operation, the same in every group of `groups`: rank tuples along `axes` of `mesh`, by
    coordinate.

    `dims` are the dimensions that are gathered (all_gather), divided (reduce_scatter), or both:
    all_to_all has (gathered, divided). `op` is the reduction. `senders` has, for permute and
    broadcast, beside each rank of `groups` the one whose holding it gets. `even`: within each group
    all buffers that are sent have one shape, and all that are received. `contiguous`: there are no
    holes, and what is sent, one buffer after the other along the gathered dimension, is what each
    member receives; for a divided dimension the reverse; without either, buffers stay as they are.
    """

    kind: Kind
    mesh: Mesh
    axes: tuple[str, ...] = ()
    groups: Groups = ()
    dims: tuple[int, ...] = ()
    op: str | None = None
    senders: Groups = ()
    contiguous: bool = False
    even: bool = False

    def __str__(self) -> str:
        return f"{self._name()}{self._dims()}{self._over()}{', contiguous' * self.contiguous}"

    def _name(self) -> str:
        """The kind, and the reduction if there is one."""
        return f"{self.op} {self.kind}" if self.op else self.kind

    def _dims(self) -> str:
        """What is said of dimensions, "" for none."""
        if self.kind == "all_to_all":
            gathered, divided = self.dims
            return f" from dimension {gathered} to {divided}"
        if not self.dims:
            return ""
        return f" of dimension {', '.join(map(str, self.dims))}"

    def _over(self) -> str:
        """What is said of groups, "" for no axes."""
        if not self.axes:
            return ""
        groups = f"{len(self.groups)} groups of {len(self.groups[0])}"
        return f" over {'*'.join(self.axes)}: {groups}"


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """A source and a destination. Ranks of one class have the same before, and the same after.

    `number` is the class of each rank.
    """

    before: Side
    after: Side
    number: Mapping[int, int]

    def members(self, groups: Groups) -> dict[tuple[int, ...], Members]:
        """The classes of each group's ranks."""
        return {group: tuple(self.number[rank] for rank in group) for group in groups}


def recognise_all(p: Plan) -> dict[str, Collective]:
    """The tensors of a plan whose move is one textbook operation within groups of ranks, by name.

    Only tensors of one window on either side are, with the same ranks on both sides.
    """
    known: dict[tuple[Layout, Layout], Collective | None] = {}
    out: dict[str, Collective] = {}
    for name, windows in p.src.items():
        src, dst = windows[0], p.dst[name][0]
        if len(windows) > 1 or len(p.dst[name]) > 1:
            continue
        if set(src.mesh.ranks) != set(dst.mesh.ranks):
            continue
        if (src, dst) not in known:
            known[src, dst] = recognise(src, dst)
        found = known[src, dst]
        if found is not None:
            out[name] = found
    return out


def recognise(src: Layout, dst: Layout) -> Collective | None:
    """The collective that moves `src` to `dst`, None if it is not one.

    The sides have the same ranks, or a broadcast's source some of the destination's. Raises
    PlanError for two tensors of different shape or dtype, and for reductions that do not exist.
    """
    _check(src, dst)
    rule = reduction(src, dst)
    if rule.chosen:
        return None
    move = _compare_ranks(src, dst)
    if _stays(move, rule.folded):
        alone = tuple((rank,) for rank in sorted(dst.mesh.ranks))
        return _describe(Collective("local", src.mesh, groups=alone), move, {})
    if rule.folded:
        if set(src.mesh.ranks) != set(dst.mesh.ranks):
            return None
        kind: Kind = "all_reduce" if move.before.held == move.after.held else "reduce_scatter"
        return _fit(kind, src.mesh, rule.folded, move, src.op)
    through = [name for axes, _ in rule.matched for name in axes]
    addends = src.mesh.coordinate(through).tolist()
    addend = dict(zip(src.mesh.ranks, addends, strict=True))
    return _find_copy(src.mesh, dst.mesh, move, addend)


def _check(src: Layout, dst: Layout) -> None:
    """Raise PlanError unless these are two layouts of one tensor."""
    for layout in (src, dst):
        if not isinstance(layout, Layout):
            raise PlanError(f"{layout!r} is not a Layout; recognise compares two layouts")
    if (src.shape, src.dtype) != (dst.shape, dst.dtype):
        here, there = (f"{x.dtype}{list(x.shape)}" for x in (src, dst))
        what = "both sides hold one tensor of one shape and dtype"
        raise PlanError(f"{here} here, {there} there; {what}")


def _stays(move: _Move, folded: tuple[str, ...]) -> bool:
    """Whether every rank has what it needs."""
    if folded:
        return set(move.after.held) == {NOTHING}
    return all(map(inside, move.after.held, move.before.held))


def _find_copy(
    here: Mesh, there: Mesh, move: _Move, addend: Mapping[int, int]
) -> Collective | None:
    """The collective that copies: smallest groups first, of those that keep addends apart."""
    same = set(here.ranks) == set(there.ranks)
    if not set(here.ranks) <= set(there.ranks):
        return None
    meshes = dict.fromkeys((here, there)) if same else [there]
    kinds = COPIES if same else ("broadcast",)
    for mesh, axes in _list_groupings(meshes):
        if _mixes_addends(_groups(mesh, axes), addend):
            continue
        for kind in kinds:
            found = _fit(kind, mesh, axes, move)
            if found:
                return found
    return None


def _mixes_addends(groups: Groups, addend: Mapping[int, int]) -> bool:
    """Whether some group has ranks of two addends; a rank without one counts as of addend 0."""
    return any(len({addend.get(rank, 0) for rank in group}) > 1 for group in groups)


def _fit(
    kind: Kind, mesh: Mesh, axes: Axes, move: _Move, op: str | None = None
) -> Collective | None:
    """The collective if these groups fit, with its axes in a contiguous order if there is one."""
    first = None
    for order in itertools.permutations(axes):
        groups = _groups(mesh, order)
        distinct = dict.fromkeys(move.members(groups).values())
        found = FITS[kind](move.before, move.after, distinct)
        if found is None:
            return None
        dims, places = found
        out = _describe(Collective(kind, mesh, order, groups, dims, op), move, places)
        if out.contiguous:
            return out
        first = first or out
    return first


# Groups


def _list_groupings(meshes: Iterable[Mesh]) -> list[tuple[Mesh, Axes]]:
    """Sets of axes, smaller groups first, then those of the first ranks, of whichever mesh."""
    found: list[tuple[Mesh, Axes]] = []
    for mesh in meshes:
        axes = [name for name, n in mesh.axes if n > 1]
        for k in range(1, len(axes) + 1):
            found += [(mesh, some) for some in itertools.combinations(axes, k)]
    return sorted(found, key=_order_of_grouping)


def _order_of_grouping(grouping: tuple[Mesh, Axes]) -> tuple[int, list[list[int]]]:
    """The size of the groups, and the groups whatever the order of their ranks."""
    mesh, axes = grouping
    size = math.prod(map(mesh.axis_size, axes))
    return size, sorted(map(sorted, _groups(mesh, axes)))


def _groups(mesh: Mesh, axes: Axes) -> Groups:
    """The ranks along the axes, by coordinate, first slowest; groups in order of their first
    ranks."""
    return tuple(sorted(mesh.groups(axes)))


# What ranks hold

_Parts: TypeAlias = list[tuple[Runs, ...]]
"""The distinct parts of each dimension of a layout."""


def _compare_ranks(src: Layout, dst: Layout) -> _Move:
    """What ranks of each class hold before and after."""
    parts_before, by_rank_before = _list_parts(src)
    parts_after, by_rank_after = _list_parts(dst)
    ranks = sorted({*src.mesh.ranks, *dst.mesh.ranks})
    held = {rank: (by_rank_before.get(rank), by_rank_after.get(rank)) for rank in ranks}
    classes = list(dict.fromkeys(held.values()))
    number = {pair: i for i, pair in enumerate(classes)}
    return _Move(
        _make_side(parts_before, [before for before, _ in classes]),
        _make_side(parts_after, [after for _, after in classes]),
        {rank: number[pair] for rank, pair in held.items()},
    )


def _list_parts(layout: Layout) -> tuple[_Parts, dict[int, Members]]:
    """The parts of each dimension, and the number of the one that each rank holds."""
    parts = [partition(dim) for dim in layout.dims]
    columns = np.array([part.by_rank(layout.mesh) for part in parts], np.int64)
    # Without dimensions there are no columns, and still one row per rank.
    rows = columns.reshape(-1, layout.mesh.size).T.tolist()
    by_rank = dict(zip(layout.mesh.ranks, map(tuple, rows), strict=True))
    return [part.parts for part in parts], by_rank


def _make_side(parts: _Parts, classes: Iterable[Members | None]) -> Side:
    """What each class holds, given by the number of its part of each dimension.

    None stands for ranks outside the mesh.
    """
    spans = [[spans_of(runs) for runs in each] for each in parts]
    side = Side([], [])
    for numbers in classes:
        if numbers is None:
            side.held.append(NOTHING)
            side.buffers.append(None)
            continue
        box = tuple(each[i] for each, i in zip(spans, numbers, strict=True))
        side.held.append(box if all(box) else NOTHING)
        side.buffers.append(tuple(each[i] for each, i in zip(parts, numbers, strict=True)))
    return side


# Buffers


def _describe(found: Collective, move: _Move, places: Mapping[Members, Members]) -> Collective:
    """The collective with its senders, and whether its buffers are even and contiguous."""
    gathered, scattered = _split_dims(found)
    members = move.members(found.groups)
    even = contiguous = True
    for group in dict.fromkeys(members.values()):
        senders = places.get(group, range(len(group)))
        have = [move.before.buffers[group[i]] for i in senders]
        want = [move.after.buffers[member] for member in group]
        even = even and _have_one_shape(have) and _have_one_shape(want)
        if contiguous:
            sent = _join(have, gathered)
            contiguous = sent == _join(want, scattered) != []
    by_rank: Groups = ()
    if places:
        by_rank = tuple(_pick_senders(group, places[members[group]]) for group in found.groups)
    return replace(found, senders=by_rank, contiguous=contiguous, even=even)


def _split_dims(found: Collective) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions along which buffers are joined before, and after."""
    if found.kind == "all_gather":
        return found.dims, ()
    if found.kind == "reduce_scatter":
        return (), found.dims
    if found.kind == "all_to_all":
        return found.dims[:1], found.dims[1:]
    return (), ()


def _pick_senders(group: tuple[int, ...], places: Members) -> tuple[int, ...]:
    """The ranks at these places of a group."""
    return tuple(group[i] for i in places)


def _have_one_shape(buffers: list[Buffer | None]) -> bool:
    """Whether all of these have one shape, or none is there."""
    shapes = {None if buffer is None else tuple(map(len, buffer)) for buffer in buffers}
    return len(shapes) == 1


def _join(buffers: list[Buffer | None], dims: tuple[int, ...]) -> list[Buffer]:
    """The buffers, or for each the concatenation of all along the dimension named.

    [] where one is missing or has holes, and where they cannot be joined.
    """
    known = [buffer for buffer in buffers if buffer is not None and _is_dense(buffer)]
    if len(known) < len(buffers):
        return []
    for d in dims:
        if not _can_join(known, d):
            return []
        whole = concat([buffer[d] for buffer in known])
        known = [(*buffer[:d], whole, *buffer[d + 1 :]) for buffer in known]
    return known


def _can_join(buffers: list[Buffer], d: int) -> bool:
    """Whether buffers are alike but along dimension d, and share no position there."""
    others = {(buffer[:d], buffer[d + 1 :]) for buffer in buffers}
    return len(others) <= 1 and _are_apart([buffer[d] for buffer in buffers])


def _is_dense(buffer: Buffer) -> bool:
    """Whether a buffer has no holes."""
    return all(len(runs) == runs.size for runs in buffer)


def _are_apart(parts: list[Runs]) -> bool:
    """Whether no two of them hold one position."""
    return merge((g, g + n) for part in parts for _, g, n in part.segments) is not None
