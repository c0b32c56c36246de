"""Collectives: moves that are one textbook operation within groups of ranks.

1. A group is the ranks that differ only on some mesh axes. Within each group, and never across,
   **all_gather**: members hold different shares of a box, each gets all of it;
   **all_to_all**: members share a box along one dimension, each gets a share along another;
   **permute**: holdings move whole, each to one rank; **broadcast**: one member holds it all, each gets it;
   **all_reduce**: members hold addends of one box, each gets its reduction;
   **reduce_scatter**: the same, each gets a share; **local**: nothing is moved between ranks.
2. `recognise` compares what each rank holds before and after, element for element, and what the addends ask for: all
   that `plan(src, dst)` depends on. Placements, the order of splits and the names of axes do not matter.
3. Groups are of the source's mesh, or of the destination's where the source's axes do not say them. The smallest groups
   that fit are taken, then those of the first ranks, then broadcast, permute, all_gather, all_to_all in this order.
4. Order within a rank is free: a strided shard may be gathered in order, or as the buffers come. `contiguous` says that
   the buffers are the operation's own, without a hole and without a copy before or after.
5. Everything else is None: run its transfers. So are gathering and reducing to one rank, and destinations that wait
   for a reduction of their own, other than of addends that pass through.

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

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal, TypeAlias

import numpy as np

from shardmath.algebra.mesh import Mesh
from shardmath.algebra.partition import partition
from shardmath.algebra.runs import Runs, concat
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.layouts.layout import Layout
from shardmath.plans.reduction import reduction

__all__ = ["Collective", "Kind", "recognise"]

Kind: TypeAlias = Literal[
    "local", "broadcast", "permute", "all_gather", "all_to_all", "all_reduce", "reduce_scatter"
]
Axes: TypeAlias = tuple[str, ...]
Groups: TypeAlias = tuple[tuple[int, ...], ...]


@public
@dataclass(frozen=True, slots=True)
class Collective:
    """One operation, the same in every group of `groups`: rank tuples along `axes` of `mesh`, by coordinate.

    `dims` are the dimensions that are gathered (all_gather), divided (reduce_scatter), or both: all_to_all has
    (gathered, divided). `op` is the reduction. `senders` has, for permute and broadcast, beside each rank of `groups`
    the one whose holding it gets. `even`: within each group all buffers that are sent have one shape, and all that are
    received. `contiguous`: there are no holes, and what is sent, one buffer after the other along the gathered
    dimension, is what each member receives; for a divided dimension the reverse; without either, buffers stay as they
    are.
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
        what = f"{self.op} {self.kind}" if self.op else self.kind
        dims = f" of dimension {', '.join(map(str, self.dims))}" if self.dims else ""
        if self.kind == "all_to_all":
            dims = f" from dimension {self.dims[0]} to {self.dims[1]}"
        over = (
            f" over {'*'.join(self.axes)}: {len(self.groups)} groups of {len(self.groups[0])}"
            if self.axes
            else ""
        )
        return f"{what}{dims}{over}{', contiguous' * self.contiguous}"


Spans: TypeAlias = tuple[tuple[int, int], ...]
"""A set of positions: disjoint ranges (start, stop), ascending, no two of which touch."""
Holding: TypeAlias = tuple[Spans, ...]
"""A box: a set of positions a dimension."""
Buffer: TypeAlias = tuple[Runs, ...]
"""A local array: the Runs of each dimension."""
NOTHING: Holding = ((),)
"""What a rank outside the mesh holds, and everybody who holds no position of some dimension."""
Members: TypeAlias = tuple[int, ...]
"""A group as the classes of its ranks. Groups of the same classes are looked at once."""
Found: TypeAlias = tuple[tuple[int, ...], dict[Members, Members]]
"""The dimensions of a collective, and the senders of each group by their places in it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The box that ranks of each class hold, and their buffers."""

    held: list[Holding]
    buffers: list[Buffer | None]

    def boxes(self, group: Members) -> list[Holding]:
        """What the members of a group hold."""
        return [self.held[member] for member in group]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """A source and a destination. Ranks of one class (`number`) have the same before, and the same after."""

    before: _Side
    after: _Side
    number: Mapping[int, int]

    def members(self, groups: Groups) -> dict[tuple[int, ...], Members]:
        """The classes of each group's ranks."""
        return {group: tuple(map(self.number.__getitem__, group)) for group in groups}


def recognise(src: Layout, dst: Layout) -> Collective | None:
    """The collective that moves `src` to `dst`, None if it is not one.

    The sides have the same ranks, or a broadcast's source some of the destination's. Raises PlanError for two tensors
    of different shape or dtype, and for reductions that do not exist.
    """
    _check(src, dst)
    rule = reduction(src, dst)
    if rule.chosen:
        return None
    move = _move(src, dst)
    if _stays(move, rule.folded):
        alone = tuple((rank,) for rank in sorted(dst.mesh.ranks))
        return _described(Collective("local", src.mesh, groups=alone), move, {})
    if rule.folded:
        if set(src.mesh.ranks) != set(dst.mesh.ranks):
            return None
        kind: Kind = "all_reduce" if move.before.held == move.after.held else "reduce_scatter"
        return _fitted(kind, src.mesh, rule.folded, move, src.op)
    through = [name for axes, _ in rule.matched for name in axes]
    addend = dict(zip(src.mesh.ranks, src.mesh.coordinate(through).tolist(), strict=True))
    return _copied(src.mesh, dst.mesh, move, addend)


def _check(src: Layout, dst: Layout) -> None:
    for layout in (src, dst):
        if not isinstance(layout, Layout):
            raise PlanError(f"{layout!r} is not a Layout; recognise compares two layouts")
    if (src.shape, src.dtype) != (dst.shape, dst.dtype):
        here, there = (f"{x.dtype}{list(x.shape)}" for x in (src, dst))
        raise PlanError(
            f"{here} here, {there} there; both sides hold one tensor of one shape and dtype"
        )


def _stays(move: _Move, folded: tuple[str, ...]) -> bool:
    """Whether every rank has what it needs."""
    if folded:
        return set(move.after.held) == {NOTHING}
    return all(map(_inside, move.after.held, move.before.held))


def _copied(here: Mesh, there: Mesh, move: _Move, addend: Mapping[int, int]) -> Collective | None:
    """The collective that copies: the smallest groups, then the first kind, of those that keep addends apart."""
    same = set(here.ranks) == set(there.ranks)
    if not set(here.ranks) <= set(there.ranks):
        return None
    for mesh, axes in _groupings(dict.fromkeys((here, there)) if same else [there]):
        if all(len({addend.get(rank, 0) for rank in group}) == 1 for group in _groups(mesh, axes)):
            for kind in COPIES if same else COPIES[:1]:
                found = _fitted(kind, mesh, axes, move)
                if found:
                    return found
    return None


def _fitted(
    kind: Kind, mesh: Mesh, axes: Axes, move: _Move, op: str | None = None
) -> Collective | None:
    """The collective if these groups fit, with the axes in an order in which it is contiguous, if there is one."""
    first = None
    for order in itertools.permutations(axes):
        groups = _groups(mesh, order)
        found = FITS[kind](move.before, move.after, dict.fromkeys(move.members(groups).values()))
        if found is None:
            return None
        out = _described(Collective(kind, mesh, order, groups, found[0], op), move, found[1])
        if out.contiguous:
            return out
        first = first or out
    return first


# Groups


def _groupings(meshes: Iterable[Mesh]) -> list[tuple[Mesh, Axes]]:
    """Sets of axes, smaller groups first, then those of the first ranks, whichever mesh and axes they are of."""
    found = []
    for mesh in meshes:
        axes = [name for name, n in mesh.axes if n > 1]
        found += [
            (mesh, some)
            for k in range(1, len(axes) + 1)
            for some in itertools.combinations(axes, k)
        ]
    return sorted(
        found,
        key=lambda x: (math.prod(map(x[0].axis_size, x[1])), sorted(map(sorted, _groups(*x)))),
    )


def _groups(mesh: Mesh, axes: Axes) -> Groups:
    """The ranks along the axes, by coordinate, first slowest; groups in order of their first ranks."""
    others = mesh.coordinate(name for name in mesh.shape if name not in axes)
    order = np.lexsort((mesh.coordinate(axes), others))
    size = math.prod(map(mesh.axis_size, axes))
    return tuple(sorted(map(tuple, np.array(mesh.ranks)[order].reshape(-1, size).tolist())))


# What ranks hold


def _move(src: Layout, dst: Layout) -> _Move:
    sides = [_parts(layout) for layout in (src, dst)]
    ranks = sorted({*src.mesh.ranks, *dst.mesh.ranks})
    have = {rank: tuple(of.get(rank) for _, of in sides) for rank in ranks}
    number = {parts: i for i, parts in enumerate(dict.fromkeys(have.values()))}
    before, after = (
        _side(runs, [parts[i] for parts in number]) for i, (runs, _) in enumerate(sides)
    )
    return _Move(before, after, {rank: number[parts] for rank, parts in have.items()})


def _parts(layout: Layout) -> tuple[list[tuple[Runs, ...]], dict[int, Members]]:
    """The parts of each dimension, and which of them each rank holds."""
    parts = [partition(dim) for dim in layout.dims]
    columns = np.array([part.by_rank(layout.mesh) for part in parts], np.int64).reshape(
        -1, layout.mesh.size
    )
    return [part.parts for part in parts], dict(
        zip(layout.mesh.ranks, map(tuple, columns.T.tolist()), strict=True)
    )


def _side(parts: list[tuple[Runs, ...]], classes: Iterable[Members | None]) -> _Side:
    """What each class holds, given by the number of its part of each dimension, None outside the mesh."""
    spans = [[_spans(runs) for runs in each] for each in parts]
    out = _Side([], [])
    for numbers in classes:
        box = (
            NOTHING
            if numbers is None
            else tuple(each[i] for each, i in zip(spans, numbers, strict=True))
        )
        out.held.append(box if all(box) else NOTHING)
        out.buffers.append(
            None
            if numbers is None
            else tuple(each[i] for each, i in zip(parts, numbers, strict=True))
        )
    return out


def _spans(runs: Runs) -> Spans:
    return _merged((g, g + n) for _, g, n in runs.segments) or ()


def _merged(ranges: Iterable[tuple[int, int]]) -> Spans | None:
    """The ranges as one set, None if two of them meet."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if out and start < out[-1][1]:
            return None
        if out and start == out[-1][1]:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)


def _volume(box: Holding) -> int:
    return math.prod(sum(stop - start for start, stop in spans) for spans in box)


def _inside(box: Holding, other: Holding) -> bool:
    """Whether all of one box is in another."""
    if box in (NOTHING, other):
        return True
    return other != NOTHING and all(map(_subset, box, other))


def _subset(spans: Spans, of: Spans) -> bool:
    at = [bisect.bisect_right(of, start, key=itemgetter(0)) - 1 for start, _ in spans]
    return all(i >= 0 and stop <= of[i][1] for i, (_, stop) in zip(at, spans, strict=True))


def _tiled(boxes: list[Holding]) -> Holding | None:
    """The box that these make up without sharing an element, as a grid; None if they do not."""
    some = [box for box in boxes if box != NOTHING]
    if not some:
        return NOTHING
    if len(set(some)) < len(some):
        return None
    whole = []
    for column in zip(*some, strict=True):
        spans = _merged(span for part in set(column) for span in part)
        if spans is None:
            return None
        whole.append(spans)
    return tuple(whole) if sum(map(_volume, some)) == _volume(tuple(whole)) else None


def _divided(boxes: list[Holding], whole: Holding) -> set[int]:
    """The dimensions in which some box is not the whole."""
    return {d for box in boxes if box != NOTHING for d in range(len(whole)) if box[d] != whole[d]}


# Kinds: whether groups fit


def _broadcast(before: _Side, after: _Side, groups: Iterable[Members]) -> Found | None:
    """One member holds it all, everybody gets it."""
    senders: dict[Members, Members] = {}
    for group in groups:
        have = before.boxes(group)
        some = [i for i, box in enumerate(have) if box != NOTHING]
        inside = [i for i, member in enumerate(group) if before.buffers[member] is not None]
        root = [*some, *inside, 0][0]
        if len(some) > 1 or set(after.boxes(group)) != {have[root]}:
            return None
        senders[group] = (root,) * len(group)
    return (), senders


def _permute(before: _Side, after: _Side, groups: Iterable[Members]) -> Found | None:
    """Every member gets what one member held; whoever holds it already keeps it."""
    senders: dict[Members, Members] = {}
    for group in groups:
        have, want = before.boxes(group), after.boxes(group)
        if Counter(have) != Counter(want):
            return None
        free: dict[Holding, list[int]] = {}
        for i, (a, b) in enumerate(zip(have, want, strict=True)):
            if a != b:
                free.setdefault(a, []).append(i)
        pairs = enumerate(zip(have, want, strict=True))
        senders[group] = tuple(i if a == b else free[b].pop(0) for i, (a, b) in pairs)
    return (), senders


def _all_gather(before: _Side, after: _Side, groups: Iterable[Members]) -> Found | None:
    """Members hold shares of a box, everybody gets it."""
    dims: set[int] = set()
    for group in groups:
        have = before.boxes(group)
        whole = _tiled(have)
        if whole is None or set(after.boxes(group)) != {whole}:
            return None
        dims |= _divided(have, whole)
    return tuple(sorted(dims)), {}


def _all_to_all(before: _Side, after: _Side, groups: Iterable[Members]) -> Found | None:
    """Members share a box along one dimension, and then along another."""
    gathered: set[int] = set()
    divided: set[int] = set()
    for group in groups:
        have, want = before.boxes(group), after.boxes(group)
        whole = _tiled(have)
        if whole is None or _tiled(want) != whole:
            return None
        gathered |= _divided(have, whole)
        divided |= _divided(want, whole)
    fits = len(gathered) == len(divided) == 1 and gathered != divided
    return ((*gathered, *divided), {}) if fits else None


def _all_reduce(before: _Side, after: _Side, groups: Iterable[Members]) -> Found | None:
    """Members hold addends of a box, everybody gets their reduction."""
    fits = all(before.boxes(group) == after.boxes(group) for group in groups)
    return ((), {}) if fits else None


def _reduce_scatter(before: _Side, after: _Side, groups: Iterable[Members]) -> Found | None:
    """Members hold addends of a box, everybody gets a share of their reduction: the transpose of an all_gather."""
    found = _all_gather(after, before, groups)
    return found if found and found[0] else None


FITS: dict[Kind, Callable[[_Side, _Side, Iterable[Members]], Found | None]] = {
    "broadcast": _broadcast,
    "permute": _permute,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}
COPIES: tuple[Kind, ...] = ("broadcast", "permute", "all_gather", "all_to_all")
"""In the order in which they are tried."""


# Buffers


def _described(found: Collective, move: _Move, places: Mapping[Members, Members]) -> Collective:
    """The collective with its senders, and what is to be said of its buffers."""
    gathered = {"all_gather": found.dims, "all_to_all": found.dims[:1]}.get(found.kind, ())
    divided = {"reduce_scatter": found.dims, "all_to_all": found.dims[1:]}.get(found.kind, ())
    members = move.members(found.groups)
    even = contiguous = True
    for group in dict.fromkeys(members.values()):
        have = [move.before.buffers[group[i]] for i in places.get(group, range(len(group)))]
        want = [move.after.buffers[member] for member in group]
        even = even and all(len(set(map(_shape, buffers))) == 1 for buffers in (have, want))
        contiguous = contiguous and _joined(have, gathered) == _joined(want, divided) != []
    senders = (
        tuple(tuple(group[i] for i in places[members[group]]) for group in found.groups)
        if places
        else ()
    )
    return replace(found, senders=senders, contiguous=contiguous, even=even)


def _shape(buffer: Buffer | None) -> tuple[int, ...] | None:
    return None if buffer is None else tuple(map(len, buffer))


def _joined(buffers: list[Buffer | None], dims: tuple[int, ...]) -> list[Buffer]:
    """The buffers, or for each the concatenation of all along the one dimension named; [] if that cannot be."""
    known = [
        buffer
        for buffer in buffers
        if buffer is not None and all(len(runs) == runs.size for runs in buffer)
    ]
    if len(known) < len(buffers):
        return []
    for d in dims:
        if len({(buffer[:d], buffer[d + 1 :]) for buffer in known}) > 1 or not _apart(
            [buffer[d] for buffer in known]
        ):
            return []
        whole = concat([buffer[d] for buffer in known])
        known = [(*buffer[:d], whole, *buffer[d + 1 :]) for buffer in known]
    return known


def _apart(parts: list[Runs]) -> bool:
    """Whether no two of them hold one position."""
    return _merged((g, g + n) for part in parts for _, g, n in part.segments) is not None
