"""Proof: that a plan's tables do what its layouts ask for, without expanding them.

What is read is what `transfers` expands: names, units, rows, sets of ranks, blocks, lines and cuts. Once these are
well formed (`tables`):

1. **Tensors** are in one group of batches each, which move a pair of windows once and lie as their templates say.
2. **Ends**: all holders of a line hold the units of its rows, all receivers of a block want them.
3. **Once**: no receiver has an element from two rows, and where any one addend may receive, all replicas agree on it.
4. **Counting**: as many elements arrive everywhere as there are cells, so every cell is reached.

The cost is that of the tables: rows, batches and distinct sets of ranks, not pairs of ranks.

>>> from dataclasses import replace
>>> from shardmath.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> p = plan(Layout((4,), Mesh(tp=2), "(tp n)"), Layout((4,), Mesh(ranks=[2]), "n"))
>>> prove(p)
>>> prove(replace(p, lines=replace(p.lines, cuts=p.lines.cuts * 0)))
Traceback (most recent call last):
shardmath.PlanError: line 0, of ranks (0,), is not cut from its first byte to its last; make the plan anew
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np

from shardmath.algebra.box import Box, first_gap, from_slices
from shardmath.algebra.mesh import Mesh
from shardmath.algebra.overlay import Parts
from shardmath.base.arrays import Bools, Ints
from shardmath.base.errors import PlanError
from shardmath.base.memo import memo
from shardmath.layouts.edits import relabelled
from shardmath.layouts.holdings import equivalent
from shardmath.layouts.layout import Layout
from shardmath.plans.cover import cells_held, check_disjoint
from shardmath.plans.demands import Batch, Lines, Ranks
from shardmath.plans.pieces import expand, unit_boxes
from shardmath.plans.plan import Plan
from shardmath.plans.reduction import reduction
from shardmath.plans.template import Template
from shardmath.proofs.tables import check_lines, check_template, require

__all__ = ["prove"]


def prove(p: Plan) -> None:
    """Raise PlanError unless the tables of a plan (not an adjoint) do what its layouts ask for."""
    try:
        _prove(p)
    except PlanError:
        raise
    except (
        Exception
    ) as error:  # wrong tables fail in any way at all, and what cannot be read is not proved
        raise PlanError(
            f"the plan's tables cannot be read: {error!r}; make the plan anew"
        ) from error


def _prove(p: Plan) -> None:
    groups = _groups(p)
    held = [_held(p, batches[0].names) for batches in groups]
    _check_sides(p, held)
    for batches, alike in zip(groups, held, strict=True):
        _check_group(batches, alike)
    known: set[int] = set()
    for t in {id(batch.template): batch.template for batch in p.batches}.values():
        check_template(t, known)
    check_lines(p.lines, p.batches)
    places = _Places(p.lines.sets)
    _check_ends(p, places)
    _check_once(p, places)
    _check_complete(p, groups, places)


# tensors


def _groups(p: Plan) -> list[list[Batch]]:
    """The batches by the tensors that they move; every tensor is in one group."""
    groups: dict[tuple[str, ...], list[Batch]] = {}
    for batch in p.batches:
        require(batch.names, "a batch is of no tensor")
        groups.setdefault(batch.names, []).append(batch)
    times = Counter(itertools.chain.from_iterable(groups))
    for name in [name for name, n in times.items() if n > 1]:
        raise PlanError(f"tensor {name!r} moves twice; make the plan anew")
    if not times.keys() == p.src.keys() == p.dst.keys():
        odd = sorted((times.keys() ^ p.src.keys()) | (times.keys() ^ p.dst.keys()))
        raise PlanError(f"tensor {odd[0]!r} is in no batch, or not in the plan; make the plan anew")
    return list(groups.values())


_Held: TypeAlias = dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], str]
"""The windows at both ends, and the first tensor that is held so."""


def _held(p: Plan, names: Iterable[str]) -> _Held:
    out: _Held = {}
    for name in names:
        out.setdefault((p.src[name], p.dst[name]), name)
    return out


def _check_sides(p: Plan, held: Sequence[_Held]) -> None:
    """The plan knows all ranks of both sides."""
    for side, word, ranks in ((0, "source", p.src_ranks), (1, "destination", p.dst_ranks)):
        meshes = {layout.mesh for alike in held for pair in alike for layout in pair[side]}
        known = tuple(sorted({rank for mesh in meshes for rank in mesh.ranks}))
        if ranks != known:
            what = f"{len(ranks)} ranks {ranks[:8]} are not those of the {word}, {len(known)} ranks {known[:8]}"
            raise PlanError(f"{what}; make the plan anew")


def _check_group(batches: Sequence[Batch], held: _Held) -> None:
    """Batches move each pair of windows once, of all their tensors, and none is left out."""
    first = batches[0].names[0]
    moved = {(batch.source, batch.target) for batch in batches}
    require(len(moved) == len(batches), f"tensor {first!r} moves twice between two windows")
    counts = {(len(src), len(dst)) for src, dst in held}
    require(len(counts) == 1, f"tensors of other windows move as {first!r} does")
    for (src, dst), name in held.items():
        check_disjoint(name, src)
        for batch in batches:
            _check_batch(name, src, dst, batch)
        for j in set(range(len(dst))) - {target for _, target in moved}:
            require(not cells_held(dst[j]).any(), f"tensor {name!r}: nothing arrives in window {j}")


def _check_batch(name: str, src: Sequence[Layout], dst: Sequence[Layout], batch: Batch) -> None:
    """The tensor lies as the batch's template says, on the batch's ranks, and is reduced so."""
    t, known = batch.template, batch.source in range(len(src)) and batch.target in range(len(dst))
    moved = f"from window {batch.source} of {len(src)} to window {batch.target} of {len(dst)}"
    require(known, f"tensor {name!r} moves {moved}")
    held = src[batch.source], dst[batch.target]
    planned = _placed(t.src, batch.src, held[0]), _placed(t.dst, batch.dst, held[1])
    for layout, other in zip(held, planned, strict=True):
        if not (layout is other or equivalent(layout, other)):
            lies = (
                f"tensor {name!r} lies as {layout} on {layout.mesh}, not as {other} on {other.mesh}"
            )
            raise PlanError(f"{lies}; make the plan anew")
    rule, asked = reduction(*planned), reduction(*held)
    if repr(rule) != repr(t.reduction) or rule.by_ranks(*planned) != asked.by_ranks(*held):
        raise PlanError(f"tensor {name!r} is reduced by {t.reduction}; its layouts ask for {asked}")


def _placed(form: Layout, mesh: Mesh, layout: Layout) -> Layout:
    """The layout of this form on the ranks of the mesh: `layout` where that is it."""
    if layout.form is form and layout.mesh.ranks == mesh.ranks:
        return layout
    return relabelled(form, dict(enumerate(mesh.ranks)))


# ends


class _Places:
    """The positions of sets of ranks in meshes, each found once; -1 for strangers."""

    def __init__(self, sets: Sequence[Ranks]) -> None:
        self._sets = sets
        self._known: dict[tuple[Mesh, int], Ints] = {}

    def of(self, mesh: Mesh, number: int) -> Ints:
        if (mesh, number) not in self._known:
            at = [mesh.position(rank) if rank in mesh else -1 for rank in self._sets[number]]
            self._known[mesh, number] = np.array(at, np.int64)
        return self._known[mesh, number]


class _End(NamedTuple):
    """One end of a template: the number of each unit's set of parts in each dimension, and what positions hold."""

    sets: list[Parts]
    held: list[Ints]
    number: Ints
    code: Ints

    def has(self, unit: int, at: Ints) -> Bools:
        """Whether positions have the unit's part in every dimension; units of one code have the same ones."""
        out = at >= 0
        for sets, held, n in zip(self.sets, self.held, self.number[unit].tolist(), strict=True):
            out &= held[at] == sets[n][0] if len(sets[n]) == 1 else np.isin(held[at], sets[n])
        return out


@memo()
def _end(t: Template, source: bool) -> _End:
    mesh = t.src.mesh if source else t.dst.mesh
    pick = [
        (o.keys, o.source, o.pair_key) if source else (o.goals, o.target, o.pair_goal)
        for o in t.overlays
    ]
    number, code = np.zeros_like(t.unit_pairs), np.zeros(len(t.unit_pairs), np.int64)
    for d, (sets, _, pairs) in enumerate(pick):
        number[:, d] = pairs[t.unit_pairs[:, d]]
        code = code * len(sets) + number[:, d]
    return _End(
        [sets for sets, _, _ in pick], [held.by_rank(mesh) for _, held, _ in pick], number, code
    )


def _sets_of_rows(on: Lines) -> tuple[Ints, Ints]:
    """By row, the numbers of the sets of its holders and of its receivers."""
    block = np.repeat(np.arange(len(on.receivers)), np.diff(on.row_first))
    return np.repeat(on.holders, np.diff(on.first))[block], on.receivers[block]


def _check_ends(p: Plan, places: _Places) -> None:
    """Every holder of a row's line has its unit, and every receiver wants it."""
    for source, sets in zip((True, False), _sets_of_rows(p.lines), strict=True):
        for row in _distinct_rows(p, sets, source):
            _check_end(p, places, row, int(sets[row]), source)


def _distinct_rows(p: Plan, sets: Ints, source: bool) -> list[int]:
    """One row of all that ask the same: whether a set of ranks of a mesh has a unit's parts."""
    number: dict[tuple[Template, Mesh], int] = {}
    keys = [(batch.template, batch.src if source else batch.dst) for batch in p.batches]
    of = np.array([number.setdefault(key, len(number)) for key in keys], np.int64)[p.lines.batch]
    codes = [np.zeros(0, np.int64), *(_end(t, source).code for t, _ in number)]
    first = np.cumsum([len(x) for x in codes[:-1]])
    code = np.concatenate(codes)[first[of] + p.lines.unit] if len(of) else of
    order = np.lexsort((sets, code, of))
    new = [np.diff(column[order], prepend=-1) != 0 for column in (sets, code, of)]
    rows: list[int] = order[functools.reduce(np.logical_or, new)].tolist()
    return rows


def _check_end(p: Plan, places: _Places, row: int, number: int, source: bool) -> None:
    batch, unit = _batch(p, row), int(p.lines.unit[row])
    mesh = batch.src if source else batch.dst
    has = _end(batch.template, source).has(unit, places.of(mesh, number))
    if not has.all():
        rank = p.lines.sets[number][int(np.argmin(has))]
        what = f"tensor {batch.names[0]!r}: rank {rank} is to {'send' if source else 'receive'} element"
        where = "source" if source else "destination"
        raise PlanError(
            f"{what} {_element(p, row)}, which it does not hold at the {where}; make the plan anew"
        )


def _batch(p: Plan, row: int) -> Batch:
    return p.batches[int(p.lines.batch[row])]


def _element(p: Plan, row: int) -> tuple[int, ...]:
    """The first element of a row."""
    t, unit, at = _batch(p, row).template, int(p.lines.unit[row]), int(p.lines.lo[row])
    boxes, sizes, ends = unit_boxes(t, unit)
    b = bisect.bisect_right(ends, at)
    inside = np.unravel_index(at - (ends[b - 1] if b else 0), sizes[b]) if sizes[b] else ()
    starts = [int(over.start[r]) for over, r in zip(t.overlays, boxes[b], strict=True)]
    return tuple(x + int(i) for x, i in zip(starts, inside, strict=True))[t.hidden :]


# once


def _check_once(p: Plan, places: _Places) -> None:
    """No receiver has elements from two rows, and all receivers of an element are of one addend."""
    on = p.lines
    asking = _sets_of_rows(on)[1]
    order = np.lexsort((asking, on.lo, on.unit, on.batch))
    batch, unit, lo, hi = (column[order] for column in (on.batch, on.unit, on.lo, on.hi))
    unlike = (np.diff(batch, prepend=-1) != 0) | (np.diff(unit, prepend=-1) != 0)
    apart = np.append(True, lo[1:] >= hi[:-1])[: len(lo)]
    same = np.append(False, (lo[1:] == lo[:-1]) & (hi[1:] == hi[:-1]))[: len(lo)]
    for row in order[~(unlike | apart | same)].tolist():
        what = f"tensor {_batch(p, row).names[0]!r}: element {_element(p, row)}"
        raise PlanError(f"{what} is in two rows that are not alike; make the plan anew")
    first = np.flatnonzero(unlike | ~same)
    for rows in _unlike_groups(p, order, first, asking):
        _check_apart(p, places, rows, asking[rows].tolist())


def _unlike_groups(p: Plan, order: Ints, first: Ints, asking: Ints) -> Iterable[Ints]:
    """The rows of the same elements, one group of all that are asked for by the same sets."""
    chosen = [(b.template, b.dst) if b.template.reduction.chosen else None for b in p.batches]
    number = {key: n for n, key in enumerate(dict.fromkeys([None, *chosen]))}
    rule = np.array([number[key] for key in chosen], np.int64)[p.lines.batch]
    count = np.diff(np.append(first, len(order)))
    for k in np.unique(count).tolist():
        rows = order[first[count == k][:, None] + np.arange(k)]
        rows = rows[(rule[rows[:, 0]] > 0) | (k > 1)]
        _, some = np.unique(np.hstack((rule[rows[:, :1]], asking[rows])), axis=0, return_index=True)
        yield from rows[some]


def _check_apart(p: Plan, places: _Places, rows: Ints, sets: list[int]) -> None:
    """Sets that receive the same elements are disjoint, and of one of the addends of which any one receives."""
    batch, at = _batch(p, int(rows[0])), _element(p, int(rows[0]))
    what = f"tensor {batch.names[0]!r}:"
    times = Counter(rank for n in sets for rank in p.lines.sets[n])
    for rank in [rank for rank, n in times.items() if n > 1]:
        raise PlanError(
            f"{what} rank {rank} receives element {at} twice; it is to be received exactly once"
        )
    addend = batch.template.dst.mesh.coordinate(batch.template.reduction.chosen)
    found = sorted({int(x) for n in sets for x in addend[places.of(batch.dst, n)]})
    if len(found) > 1:
        where = f"addend {found[0]} of some replicas and to addend {found[1]} of others"
        raise PlanError(f"{what} element {at} goes to {where}; replicas have to stay equal")


# counting


def _check_complete(p: Plan, groups: Sequence[Sequence[Batch]], places: _Places) -> None:
    """As many elements arrive everywhere, of every tensor and addend, as there are cells."""
    arrive = dict(zip(map(id, p.batches), _arrivals(p, places), strict=True))
    for group in groups:
        windows: dict[int, list[Batch]] = {}
        for batch in group:
            windows.setdefault(batch.target, []).append(batch)
        for batches in windows.values():
            alike = all(batch.dst.ranks == batches[0].dst.ranks for batch in batches)
            require(
                alike,
                f"tensor {batches[0].names[0]!r} arrives in one window in several orders of ranks",
            )
            _check_count(
                p, batches, functools.reduce(np.add, (arrive[id(batch)] for batch in batches))
            )


def _arrivals(p: Plan, places: _Places) -> Iterable[Ints]:
    """By batch, how many elements each position of its destination gets."""
    order = np.argsort(p.lines.batch, kind="stable")
    asking, elements = _sets_of_rows(p.lines)[1][order], (p.lines.hi - p.lines.lo)[order]
    bounds = np.searchsorted(p.lines.batch[order], np.arange(len(p.batches) + 1)).tolist()
    known: dict[object, Ints] = {}
    for batch, (a, b) in zip(p.batches, itertools.pairwise(bounds), strict=True):
        sets, sizes = asking[a:b], elements[a:b]
        key = batch.dst, sets.tobytes(), sizes.tobytes()
        if key not in known:
            known[key] = np.zeros(batch.dst.size, np.int64)
            for n, size in zip(sets.tolist(), sizes.tolist(), strict=True):
                known[key][places.of(batch.dst, n)] += size
        yield known[key]


@memo()
def _asked(t: Template) -> tuple[Ints, Ints]:
    """By position of the destination: its group, of which one receives for all, and the elements that it asks for."""
    mesh = t.dst.mesh
    group = mesh.coordinate(axis for axis in mesh.shape if axis not in t.reduction.chosen)
    return group, cells_held(t.dst) * t.reduction.addends


def _check_count(p: Plan, batches: Sequence[Batch], arrive: Ints) -> None:
    group, asked = _asked(batches[0].template)
    if batches[0].template.reduction.chosen:
        together = np.zeros_like(arrive)
        np.add.at(together, group, arrive)
        arrive = together[group]
    for position in np.flatnonzero(arrive != asked).tolist():
        _missing(p, batches, set(np.flatnonzero(group == group[position]).tolist()), position)


def _missing(p: Plan, batches: Sequence[Batch], group: set[int], position: int) -> NoReturn:
    """Raise PlanError for the first element that does not arrive at a position, or at any of its group."""
    first, boxes = batches[0], _boxes(p, batches, group)
    held = [[(g, g + n) for _, g, n in runs.segments] for runs in first.template.dst.runs(position)]
    addends = first.template.reduction.addends
    gaps = ((a, first_gap(held, [box for at, box in boxes if at == a])) for a in range(addends))
    addend, element = next((a, gap) for a, gap in gaps if gap is not None)
    what = f"tensor {first.names[0]!r}: rank {first.dst.ranks[position]}" + f", addend {addend}" * (
        addends > 1
    )
    raise PlanError(f"{what} never receives element {element}; it is to be received exactly once")


def _boxes(p: Plan, batches: Sequence[Batch], group: set[int]) -> list[tuple[int, Box]]:
    """(addend, global box) of all that arrives at positions of a group."""
    on, out = p.lines, []
    mine = set(map(id, batches))
    for row, (holders, receivers) in enumerate(
        zip(*(x.tolist() for x in _sets_of_rows(on)), strict=True)
    ):
        batch = _batch(p, row)
        there = map(batch.dst.position, on.sets[receivers]) if id(batch) in mine else ()
        for at in group.intersection(there):
            sender = batch.src.position(on.sets[holders][0])
            pieces = expand(
                batch.template, int(on.unit[row]), sender, at, int(on.lo[row]), int(on.hi[row])
            )
            out += [(piece.addend, from_slices(piece.whole)) for piece in pieces]
    return out
