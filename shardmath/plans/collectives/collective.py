"""Collectives: moves that are one textbook operation within groups of ranks.

1. A group is the ranks that differ only on some mesh axes. Within each group, and never across,
   **all_gather**: members hold different shares of a box, each gets all of it; **all_to_all**:
   members share a box along one dimension, each gets a share along another; **permute**: holdings
   move whole, each to one rank; **broadcast**: one member holds it all, each gets it;
   **all_reduce**: members hold addends of one box, each gets its reduction; **reduce_scatter**: the
   same, each gets a share; **local**: nothing is moved between ranks.
2. `recognize` compares what each rank holds before and after, element for element, and what the
   addends ask for: all that `plan(src, dst)` depends on. Placements, the order of splits and the
   names of axes do not matter.
3. Groups are along axes of the source's mesh, or else of the destination's mesh.
   The smallest groups that fit are taken, then the groups of the first ranks, then broadcast, permute,
   all_gather, all_to_all in this order.
4. Order within a rank is free: a strided shard may be gathered in order, or as the buffers arrive.
   `contiguous` says that the operation can use the buffers directly, without holes and without a copy
   before or after.
5. Everything else is None: run its transfers. That includes gathering and reducing to one rank, and
   destinations that are Partial themselves, unless their addends pass through.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> mesh = Mesh(dp=2, tp=2)
>>> gather = recognize(Layout((8, 4), mesh, "(tp dp n) h"), Layout((8, 4), mesh, "(tp n) h"))
>>> print(gather)
all_gather of dimension 0 over dp: 2 groups of 2, contiguous
>>> gather.groups
((0, 2), (1, 3))
>>> print(recognize(Layout((8, 4), mesh, "(tp dp n) h"), Layout((8, 4), mesh, "(dp n) h")))
None
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.runs import Runs, concat
from shardmath.layouts.layout import Layout
from shardmath.plans.collectives.kinds import COPIES, FITS, Buffer, Kind, Members
from shardmath.plans.collectives.moves import Groups, Move, compare_ranks
from shardmath.plans.collectives.spans import NOTHING, is_inside, merge
from shardmath.plans.plan import Plan
from shardmath.plans.reduction import Reduction, find_reduction

__all__ = ["Collective", "Kind", "recognize", "recognize_all"]

Axes: TypeAlias = tuple[str, ...]


@public
@dataclass(frozen=True, slots=True)
class Collective:
    """A collective operation, such as an all-gather, in each group of ranks; `groups` lie along `axes` of `mesh`.

    Ranks of a group are in the order of their coordinates. `dims` are the dimensions that are gathered
    (all_gather), divided (reduce_scatter), or both: all_to_all has (gathered, divided). `op` is the
    reduction. `senders` has, for permute and broadcast, the rank whose holding is sent to each rank of
    `groups`. `even`: within each group all buffers that are sent have one shape, and all that are
    received. `contiguous`: there are no holes, and what is sent, one buffer after the other along the
    gathered dimension, is what each member receives; for a divided dimension the reverse; without
    either, buffers stay as they are.
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
        """The dimensions, as text; "" if there are none."""
        if self.kind == "all_to_all":
            gathered, divided = self.dims
            return f" from dimension {gathered} to {divided}"
        if not self.dims:
            return ""
        return f" of dimension {', '.join(map(str, self.dims))}"

    def _over(self) -> str:
        """The groups and their axes, as text; "" if there are no axes."""
        if not self.axes:
            return ""
        groups = f"{plural(self.groups, 'group')} of {len(self.groups[0])}"
        return f" over {'*'.join(self.axes)}: {groups}"


def recognize_all(plan: Plan) -> dict[str, Collective]:
    """Find the tensors of `plan` whose move is one collective, such as an all-gather; return name -> Collective.

    A tensor with several windows on a side, or with other ranks on one side than on the other, is left out.
    """
    known: dict[tuple[Layout, Layout], Collective | None] = {}
    collectives: dict[str, Collective] = {}
    for name, windows in plan.src.items():
        if len(windows) > 1 or len(plan.dst[name]) > 1:
            continue
        src = windows[0]
        dst = plan.dst[name][0]
        if not _has_same_ranks(src, dst):
            continue
        if (src, dst) not in known:
            known[src, dst] = recognize(src, dst)
        found = known[src, dst]
        if found is not None:
            collectives[name] = found
    return collectives


def _has_same_ranks(src: Layout, dst: Layout) -> bool:
    """Whether both sides have the same ranks."""
    return set(src.mesh.ranks) == set(dst.mesh.ranks)


def recognize(src: Layout, dst: Layout) -> Collective | None:
    """Return the one collective operation, such as an all-gather, that moves a tensor from layout `src` to `dst`, as a
    Collective; None if no single operation does.

    The sides have the same ranks, or a broadcast's source some of the destination's. Raises
    PlanError for two tensors of different shape or dtype, and for reductions that do not exist.
    """
    _check(src, dst)
    rule = find_reduction(src, dst)
    if rule.chosen:
        return None
    move = compare_ranks(src, dst)
    if _stays(move, rule.folded):
        alone = tuple((rank,) for rank in sorted(dst.mesh.ranks))
        local = Collective("local", src.mesh, groups=alone)
        return _describe(local, move, {})
    if not rule.folded:
        addend = _find_addends(src, rule)
        return _find_copy(src.mesh, dst.mesh, move, addend)
    if not _has_same_ranks(src, dst):
        return None
    stays_in_place = move.before.held == move.after.held
    kind: Kind = "all_reduce" if stays_in_place else "reduce_scatter"
    return _fit(kind, src.mesh, rule.folded, move, src.op)


def _find_addends(src: Layout, rule: Reduction) -> dict[int, int]:
    """The addend that each rank of the source holds, of those that pass through."""
    passing_axes: list[str] = []
    for axes, _ in rule.matched:
        passing_axes += axes
    addends = src.mesh.coordinate(passing_axes).tolist()
    return dict(zip(src.mesh.ranks, addends, strict=True))


def _check(src: Layout, dst: Layout) -> None:
    """Raise PlanError unless these are two layouts of one tensor."""
    for layout in (src, dst):
        if not isinstance(layout, Layout):
            raise PlanError(f"{layout!r} is not a Layout; pass recognize two Layouts")
    if (src.shape, src.dtype) == (dst.shape, dst.dtype):
        return
    src_form = f"{src.dtype}{list(src.shape)}"
    dst_form = f"{dst.dtype}{list(dst.shape)}"
    fix = "give both the same shape and dtype"
    raise PlanError(f"the source has {src_form}, the destination {dst_form}; {fix}")


def _stays(move: Move, folded: tuple[str, ...]) -> bool:
    """Whether every rank already has what it needs."""
    before = move.before.held
    after = move.after.held
    if folded:
        # A sum of several ranks' addends is on none of them, unless it has no elements.
        return set(after) == {NOTHING}
    return all(map(is_inside, after, before))


def _find_copy(here: Mesh, there: Mesh, move: Move, addend: Mapping[int, int]) -> Collective | None:
    """The collective that copies: the smallest groups come first, and groups that mix addends are left out."""
    sources = set(here.ranks)
    destinations = set(there.ranks)
    if not sources <= destinations:
        return None
    meshes = [there]
    kinds: tuple[Kind, ...] = ("broadcast",)
    if sources == destinations:
        meshes = list(dict.fromkeys((here, there)))
        kinds = COPIES
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
    for group in groups:
        addends = {addend.get(rank, 0) for rank in group}
        if len(addends) > 1:
            return True
    return False


def _fit(
    kind: Kind, mesh: Mesh, axes: Axes, move: Move, op: str | None = None
) -> Collective | None:
    """The collective if these groups fit, with its axes in a contiguous order if there is one."""
    first = None
    for order in itertools.permutations(axes):
        groups = _groups(mesh, order)
        members = move.members(groups)
        distinct = dict.fromkeys(members.values())
        fit = FITS[kind](move.before, move.after, distinct)
        # Whether groups fit does not depend on the order of their ranks.
        if fit is None:
            return None
        dims, places = fit
        collective = Collective(kind, mesh, order, groups, dims, op)
        found = _describe(collective, move, places)
        if found.contiguous:
            return found
        if first is None:
            first = found
    return first


# Groups


def _list_groupings(meshes: Iterable[Mesh]) -> list[tuple[Mesh, Axes]]:
    """Sets of axes, each with its mesh, by the size of their groups, and if that is equal, by the groups' ranks."""
    found: list[tuple[Mesh, Axes]] = []
    for mesh in meshes:
        axes = [name for name, n in mesh.axes if n > 1]
        for count in range(1, len(axes) + 1):
            for chosen in itertools.combinations(axes, count):
                found.append((mesh, chosen))
    return sorted(found, key=_order_of_grouping)


def _order_of_grouping(grouping: tuple[Mesh, Axes]) -> tuple[int, list[list[int]]]:
    """The size of the groups, and the groups whatever the order of their ranks."""
    mesh, axes = grouping
    groups = _groups(mesh, axes)
    size = len(groups[0])
    return size, sorted(map(sorted, groups))


def _groups(mesh: Mesh, axes: Axes) -> Groups:
    """The ranks along the axes, by coordinate, first slowest; groups in order of their first
    ranks."""
    return tuple(sorted(mesh.groups(axes)))


# Buffers


def _describe(found: Collective, move: Move, places: Mapping[Members, Members]) -> Collective:
    """The collective with its senders, and whether its buffers are even and contiguous. `places` has the place of each
    member's sender in a group, by the classes of the group's ranks."""
    members = move.members(found.groups)
    senders = []
    if places:
        for group in found.groups:
            sender_places = places[members[group]]
            senders.append(tuple(group[place] for place in sender_places))
    gathered, scattered = _split_dims(found)
    even = contiguous = True
    for classes in dict.fromkeys(members.values()):
        have, want = _list_buffers(move, classes, places)
        even = even and _have_one_shape(have) and _have_one_shape(want)
        # Joined only as long as it matters: this takes the time.
        if contiguous:
            sent = _join(have, gathered)
            contiguous = bool(sent) and sent == _join(want, scattered)
    return replace(found, senders=tuple(senders), contiguous=contiguous, even=even)


def _list_buffers(
    move: Move, group: Members, places: Mapping[Members, Members]
) -> tuple[list[Buffer | None], list[Buffer | None]]:
    """The buffers that are sent to each member of a group, and the buffers that each needs. `places` has the place of
    each member's sender in a group, itself if the group is not in it."""
    senders = places.get(group, range(len(group)))
    have = []
    for place in senders:
        have.append(move.before.buffers[group[place]])
    want = [move.after.buffers[member] for member in group]
    return have, want


def _split_dims(found: Collective) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The dimensions along which the buffers of a group are joined: before the collective, and after it."""
    if found.kind == "all_gather":
        return found.dims, ()
    if found.kind == "reduce_scatter":
        return (), found.dims
    if found.kind == "all_to_all":
        return found.dims[:1], found.dims[1:]
    return (), ()


def _have_one_shape(buffers: list[Buffer | None]) -> bool:
    """Whether all buffers have one shape, or all are missing."""
    shapes: set[tuple[int, ...] | None] = set()
    for buffer in buffers:
        # A buffer is the Runs of each dimension; their lengths are its shape.
        shape = None if buffer is None else tuple(len(runs) for runs in buffer)
        shapes.add(shape)
    return len(shapes) == 1


def _join(buffers: list[Buffer | None], dims: tuple[int, ...]) -> list[Buffer]:
    """The buffers as they are without `dims`; otherwise each is the concatenation of all along `dims`.

    [] if a buffer is missing or has holes, or if they cannot be joined.
    """
    known = [buffer for buffer in buffers if buffer is not None and _is_dense(buffer)]
    if len(known) < len(buffers):
        return []
    for dim in dims:
        if not _can_join(known, dim):
            return []
        joined = concat([buffer[dim] for buffer in known])
        known = [(*buffer[:dim], joined, *buffer[dim + 1 :]) for buffer in known]
    return known


def _can_join(buffers: list[Buffer], dim: int) -> bool:
    """Whether buffers differ only along a dimension, and share no position there."""
    others = {(buffer[:dim], buffer[dim + 1 :]) for buffer in buffers}
    if len(others) > 1:
        return False
    along = [buffer[dim] for buffer in buffers]
    return _are_apart(along)


def _is_dense(buffer: Buffer) -> bool:
    """Whether a buffer has no holes."""
    return all(len(runs) == runs.size for runs in buffer)


def _are_apart(parts: list[Runs]) -> bool:
    """Whether no two parts hold the same position."""
    spans = []
    for part in parts:
        for _, start, size in part.segments:
            spans.append((start, start + size))
    return merge(spans) is not None  # None if two spans overlap
