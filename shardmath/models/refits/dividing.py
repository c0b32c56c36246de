"""Dividing: a refit as several, whose moves one after the other are the move of the whole.

An engine that takes its weights a layer at a time needs memory for one layer. Each portion is a refit like any other:
planned, proved and moved alone.

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
    """The refit as one of each group of tensors, by default those of each layer.

    What lies in one module of an engine's rank moves at once: groups that share one are joined. Raises PlanError for
    groups that lack a tensor which moves, name one that does not, or name one twice, and for a refit that engines have
    left: divide the whole one.
    """
    if not isinstance(planned, Refit):
        raise PlanError(f"{shown(planned)} is not a refit; give what sm.refit gives")
    if planned.whole is not None:
        raise PlanError("engines have left this refit; divide it first, and each portion without()")
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
    """Raise PlanError where groups are not all tensors that move, each once."""
    left = set(moved)
    for group in groups:
        for name in group:
            if name not in left:
                raise PlanError(f"{shown(name)} does not move, or is in two groups; name it once")
            left.remove(name)
    if left:
        raise PlanError(f"{shown(min(left))} moves and is in no group; put it in one")


def _select(planned: Refit, group: Iterable[str]) -> Refit:
    """The refit of these tensors."""
    wanted = frozenset(group)
    if planned.transforms is not None:
        return _select_transformed(planned, planned.transforms, wanted)
    part = plan(_keep(planned.plan.src, wanted), _keep(planned.plan.dst, wanted))
    return _bind(planned, part, wanted, None)


def _select_transformed(planned: Refit, whole: Transformed, wanted: frozenset[str]) -> Refit:
    """The refit of these tensors, and of their companions."""
    wired = _keep(whole.wired, wanted)
    rules = {}
    own = set(wanted)
    for name, one in wired.items():
        rules[name] = one.transform
        own.update(name + suffix for suffix in itertools.chain(*one.suffixes))
    made = transformed(_keep(whole.held_src, own), _keep(whole.held_dst, own), rules)
    return _bind(planned, plan(made.src, made.dst), own, made)


def _keep(named: Mapping[str, _T], names: Container[str]) -> dict[str, _T]:
    return {name: one for name, one in named.items() if name in names}


def _bind(
    planned: Refit, part: Plan, names: Iterable[str], transforms: Transformed | None
) -> Refit:
    """The part as a refit between the same sides."""
    own = frozenset(names)
    engines = {name: Selected(side, own) for name, side in planned.engines.items()}
    return Refit(part, Selected(planned.trainer, own), engines, transforms)
