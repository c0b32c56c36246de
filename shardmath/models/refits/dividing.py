"""Dividing: a refit as several refits, whose moves in sequence are the move of the whole.

An engine that receives its weights layer by layer needs memory for one layer. Each portion is a refit like any other:
planned, proved and moved separately.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.layouts.layout import Layout
>>> from shardmath.models.refits.refit import refit
>>> shapes = {f"layers.{i}.weight": ((4, 2), "float32") for i in range(3)}
>>> halves = {name: Layout(shape, Mesh(dp=2), "(dp n) m") for name, (shape, _) in shapes.items()}
>>> wholes = {name: Layout(shape, Mesh(ranks=[2]), "n m") for name, (shape, _) in shapes.items()}
>>> for portion in divide(refit(halves, wholes, shapes)):
...     print(*portion.moved)
layers.0.weight
layers.1.weight
layers.2.weight
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from typing import TypeVar

from shardmath.base.errors import PlanError
from shardmath.base.text import shown
from shardmath.models.refits.grouping import group_by_layer, join_modules
from shardmath.models.refits.refit import Refit
from shardmath.models.refits.selecting import Selected
from shardmath.plans.plan import Plan, plan
from shardmath.values.transforms.transformed import Transformed, transformed

__all__ = ["divide"]

_T = TypeVar("_T")


def divide(planned: Refit, groups: Iterable[Iterable[str]] | None = None) -> tuple[Refit, ...]:
    """Divide `planned`, a refit from a trainer to engines, into several Refits, one per group of tensor names in
    `groups` (default: one group per layer). Groups are merged first if they have tensors in the same module on one rank
    of an engine.

    All tensors in one module of an engine's rank move together. Raises PlanError for groups that omit a tensor that
    moves, name one that does not, or name one twice, and for a refit that engines have left: divide the whole one.
    """
    if not isinstance(planned, Refit):
        raise PlanError(f"{shown(planned)} is not a Refit; pass the result of sm.refit")
    if planned.whole is not None:
        fix = "divide its .whole, then call without(...) on each of the results"
        raise PlanError(f"engines have left the refit {planned!r}; {fix}")
    known = set(planned.moved)
    # In the trainer's order, in which models are mostly run.
    moved = [name for name in planned.trainer.layouts if name in known]
    chosen = group_by_layer(moved)
    if groups is not None:
        chosen = [list(group) for group in groups]
        _check_groups(chosen, moved)
    joined = join_modules(chosen, planned.engines.values())
    return tuple(_select(planned, group) for group in joined)


def _check_groups(groups: Iterable[Iterable[str]], moved: Iterable[str]) -> None:
    """Raise PlanError unless the groups have every tensor that moves, each once."""
    known = set(moved)
    remaining = set(known)
    for group in groups:
        for name in group:
            if name not in remaining:
                why = "in two groups" if name in known else "which does not move"
                what = f"groups= has {shown(name)} {why}"
                raise PlanError(f"{what}; name each tensor of refit.moved once")
            remaining.remove(name)
    if remaining:
        what = f"no group of groups= has {shown(min(remaining))}, which moves"
        raise PlanError(f"{what}; add it to one")


def _select(planned: Refit, group: Iterable[str]) -> Refit:
    """The portion of the refit with these tensors."""
    wanted = frozenset(group)
    if planned.transforms is not None:
        return _select_transformed(planned, planned.transforms, wanted)
    part = plan(_keep(planned.plan.src, wanted), _keep(planned.plan.dst, wanted))
    return _bind(planned, part, wanted, None)


def _select_transformed(planned: Refit, whole: Transformed, wanted: frozenset[str]) -> Refit:
    """The portion of a refit with transforms that has these tensors and their companions, such as their scales."""
    wired = _keep(whole.wired, wanted)
    rules = {name: tensor.transform for name, tensor in wired.items()}
    names = set(wanted)
    for name, tensor in wired.items():
        # Companions at the source, and those at the destination.
        suffixes = itertools.chain(*tensor.suffixes)
        names.update(name + suffix for suffix in suffixes)
    portion = transformed(_keep(whole.held_src, names), _keep(whole.held_dst, names), rules)
    return _bind(planned, plan(portion.src, portion.dst), names, portion)


def _keep(by_name: Mapping[str, _T], names: Container[str]) -> dict[str, _T]:
    """The entries with these names."""
    return {name: value for name, value in by_name.items() if name in names}


def _bind(
    planned: Refit, part: Plan, names: Iterable[str], transforms: Transformed | None
) -> Refit:
    """The refit with the plan `part` between the same sides, restricted to these tensors."""
    selected = frozenset(names)
    engines = {name: Selected(side, selected) for name, side in planned.engines.items()}
    return Refit(part, Selected(planned.trainer, selected), engines, transforms)
