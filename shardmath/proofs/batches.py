"""Batches: checks that a plan's batches move all of its tensors, as their layouts say.

1. The reduction of every tensor is the one that its layouts ask for.
2. Every tensor is in one group of batches. They move each pair of its windows at most once, and
   reach every window in which something must arrive.
3. The template of each batch has the tensor's form on both sides, on the batch's ranks, and the
   tensor's reduction.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from shardmath.base.errors import PlanError
from shardmath.base.text import plural
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.edits import relabeled
from shardmath.layouts.holdings import equivalent, label
from shardmath.layouts.layout import Layout
from shardmath.plans.demands import Batch
from shardmath.plans.plan import Plan
from shardmath.plans.reduction import Reduction, find_reduction
from shardmath.plans.uncovered import check_disjoint, count_cells
from shardmath.proofs.shapes import require

__all__ = ["check_batches", "check_rule"]


def check_batches(plan: Plan) -> list[list[Batch]]:
    """Return the batches of `plan`, each of which describes how some tensors move; batches for the same tensors are in
    one inner list. Raises PlanError unless they move the elements that the plan's layouts ask for.
    """
    _check_rules(plan)
    groups = _group_batches(plan)
    held = [_find_windows(plan, batches[0].names) for batches in groups]
    _check_sides(plan, held)
    for batches, windows in zip(groups, held, strict=True):
        _check_group(batches, windows)
    return groups


def _group_batches(plan: Plan) -> list[list[Batch]]:
    """The batches by the tensors that they move. Raises PlanError unless every tensor is in exactly one group."""
    groups: dict[tuple[str, ...], list[Batch]] = {}
    for batch in plan.batches:
        require(batch.names, "a batch is of no tensor")
        groups.setdefault(batch.names, []).append(batch)
    times = Counter(itertools.chain.from_iterable(groups))
    for name, count in times.items():
        if count > 1:
            require(False, f"{label(name)} moves twice")
    for side in (plan.src, plan.dst):
        wrong = times.keys() ^ side.keys()
        if wrong:
            require(False, f"{label(min(wrong))} is in no batch, or not in the plan")
    return list(groups.values())


_Held: TypeAlias = dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], str]
"""By windows of the source and of the destination, the first tensor that has both."""


def _find_windows(plan: Plan, names: Iterable[str]) -> _Held:
    """The distinct windows of these tensors at the source and the destination, each with the first of its tensors."""
    out: _Held = {}
    for name in names:
        windows = plan.src[name], plan.dst[name]
        out.setdefault(windows, name)
    return out


def _check_sides(plan: Plan, held: Sequence[_Held]) -> None:
    """Check that the plan lists all ranks of both sides."""
    pairs = list(itertools.chain.from_iterable(held))
    sources = [src for src, _ in pairs]
    targets = [dst for _, dst in pairs]
    _check_ranks("source", plan.src_ranks, sources)
    _check_ranks("destination", plan.dst_ranks, targets)


def _check_ranks(word: str, ranks: tuple[int, ...], windows: Sequence[tuple[Layout, ...]]) -> None:
    """Check that the ranks are the ranks of all windows of a side, ascending."""
    layouts = itertools.chain.from_iterable(windows)
    meshes = {layout.mesh for layout in layouts}
    distinct = {rank for mesh in meshes for rank in mesh.ranks}
    known = tuple(sorted(distinct))
    if ranks != known:
        given = f"{plural(ranks, 'rank')} {ranks[:8]}"
        require(False, f"{given} are not those of the {word}, {plural(known, 'rank')} {known[:8]}")


def _check_group(batches: Sequence[Batch], held: _Held) -> None:
    """Check that batches move each pair of windows at most once, for all their tensors, and leave no window out."""
    first = batches[0].names[0]
    moved = {(batch.source, batch.target) for batch in batches}
    distinct = len(moved) == len(batches)
    require(distinct, f"{label(first)} moves twice between two windows")
    counts = {(len(src), len(dst)) for src, dst in held}
    same_counts = len(counts) == 1
    require(same_counts, f"tensors of other windows move as {first!r} does")
    reached = {batch.target for batch in batches}
    for (src, dst), name in held.items():
        check_disjoint(name, src)
        for batch in batches:
            _check_batch(name, src, dst, batch)
        _check_reached(name, dst, reached)


def _check_reached(name: str, dst: Sequence[Layout], reached: set[int]) -> None:
    """Check that some batch reaches every window in which something must arrive."""
    for j, layout in enumerate(dst):
        if j in reached:
            continue
        needed = count_cells(layout).any()
        require(not needed, f"{label(name)}: nothing arrives in window {j}")


def _check_batch(name: str, src: Sequence[Layout], dst: Sequence[Layout], batch: Batch) -> None:
    """Check that the batch's template, on the batch's ranks, has the tensor's layouts and reduction."""
    t = batch.template
    i = batch.source
    j = batch.target
    known = i in range(len(src)) and j in range(len(dst))
    moved = f"from window {i} of {len(src)} to window {j} of {len(dst)}"
    require(known, f"{label(name)} moves {moved}")
    a = src[i]
    b = dst[j]
    planned_a = _place_form(name, t.src, batch.src, a)
    planned_b = _place_form(name, t.dst, batch.dst, b)
    _check_form(name, a, planned_a)
    _check_form(name, b, planned_b)
    planned = find_reduction(planned_a, planned_b)
    expected = find_reduction(a, b)
    # The template's layouts may name and order their axes in another way than the tensor's.
    same = planned.by_ranks(planned_a, planned_b) == expected.by_ranks(a, b)
    if not same or repr(planned) != repr(t.reduction):
        what = f"{label(name)} is reduced by {t.reduction}, but its layouts need {expected}"
        raise PlanError(f"{what}; make the plan again")


def _check_form(name: str, layout: Layout, planned: Layout) -> None:
    """Check that a window is equivalent to the layout that its template plans."""
    if layout is planned or equivalent(layout, planned):
        return
    lies = f"{label(name)} lies as {layout} on {layout.mesh}"
    require(False, f"{lies}, not as {planned} on {planned.mesh}")


def _place_form(name: str, form: Layout, mesh: Mesh, layout: Layout) -> Layout:
    """The layout of this form (a layout whose ranks are positions) on the ranks of the mesh: `layout` itself if it has
    that form and those ranks."""
    if layout.form is form and layout.mesh.ranks == mesh.ranks:
        return layout
    positions = set(form.mesh.ranks)
    fits = positions == set(range(mesh.size))
    require(fits, f"{label(name)}: {mesh} has other positions than its template's {form.mesh}")
    return relabeled(form, dict(enumerate(mesh.ranks)))


def _check_rules(plan: Plan) -> None:
    """Check that every tensor's reduction is the one that its layouts ask for."""
    expected: dict[tuple[Layout, Layout], Reduction] = {}
    # Tensors share their windows and rules: the same three objects are compared once. The plan keeps
    # them alive, so that no id is reused.
    compared: set[tuple[int, int, int]] = set()
    for name, src in plan.src.items():
        dst = plan.dst[name]
        given = plan.rules[name]
        objects = id(src), id(dst), id(given)
        if objects in compared:
            continue
        compared.add(objects)
        # All windows of a side have the same Partial axes, so the first ones tell the reduction.
        pair = src[0], dst[0]
        if pair not in expected:
            expected[pair] = find_reduction(*pair)
        check_rule(name, given, expected[pair])


def check_rule(name: str, given: Reduction | None, expected: Reduction) -> None:
    """Raise PlanError unless the reduction `given` for the tensor `name` is the `expected` one. Reductions are compared
    as text, so that initial values 0.0 and -0.0 differ."""
    if given is expected or repr(given) == repr(expected):
        return
    what = f"{label(name)} is reduced by {given}, but its layouts need {expected}"
    raise PlanError(f"{what}; make the plan again")
