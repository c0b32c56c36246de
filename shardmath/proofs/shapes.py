"""Shapes: checks that the tables that a proof reads have the right types and dimensions.

Every value must have the type that its class annotates, and every column be an array of the right number of dimensions.
Once that holds, later checks find wrong tables by their content (`tables`), and any other error is a bug of shardmath.
"""

from __future__ import annotations

from dataclasses import fields
from types import MappingProxyType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import numpy as np

from shardmath.base.errors import PlanError
from shardmath.base.memo import memo
from shardmath.base.text import plural, shown
from shardmath.layouts.algebra.overlay import Overlay
from shardmath.layouts.algebra.partition import Partition
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed
from shardmath.plans.demands import Batch, Demands
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan
from shardmath.plans.programs.legs import Bands, Legs, Mates
from shardmath.plans.programs.program import Program
from shardmath.plans.reduction import Reduction
from shardmath.plans.template import Members, Template

__all__ = [
    "check_integers",
    "check_plan_shapes",
    "check_program_shapes",
    "check_sides",
    "require",
]

TABLES = (Bands, Batch, Demands, Legs, Mates, Members, Overlay, Partition, Template)
"""Classes whose fields are checked too."""

PLAIN = (int, str)
"""Classes whose values have no parts to check."""

MATRICES = {"Overlay.src", "Overlay.dst", "Template.unit_pairs"}
"""Columns with a number for each row and part, or unit and dimension; others have one number each."""


def require(holds: object, what: str) -> None:
    """Unless `holds` is true, raise PlanError with a message that begins with `what`, a description of the mistake."""
    if not holds:
        raise PlanError(f"{what}; make the plan again")


# Types


def _check_kind(value: object, kind: Any, what: str, checked_ids: set[int]) -> None:
    """Check that a value, and everything in it, is of a kind: a class, an array, or a tuple of one of these.

    Tables in `checked_ids` are skipped: tensors share them.
    """
    origin = get_origin(kind) or kind
    # isinstance takes a union such as int | None as it is, but not tuple[int, ...].
    expected = kind if origin is UnionType else origin
    if not isinstance(value, expected):
        name = getattr(expected, "__name__", expected)
        require(False, f"{what}: {type(value).__name__}, not {name}")
    if isinstance(value, np.ndarray):
        ndim = 2 if what in MATRICES else 1
        require(value.ndim == ndim, f"{what} has {plural(value.ndim, 'dimension')}, not {ndim}")
    elif isinstance(value, tuple) and origin is tuple:
        _check_items(value, get_args(kind)[0], what, checked_ids)
    elif type(value) in TABLES:
        _check_fields(value, type(value), checked_ids)


def _check_fields(table: object, kind: type, checked_ids: set[int]) -> None:
    """Check that the fields of a table, unless it is in `checked_ids`, are of their kinds."""
    if id(table) not in checked_ids:
        checked_ids.add(id(table))
        for field, inner in _list_kinds(kind):
            _check_kind(getattr(table, field), inner, f"{kind.__name__}.{field}", checked_ids)


def _check_items(values: tuple[object, ...], kind: Any, what: str, checked_ids: set[int]) -> None:
    """Check that all values are of a kind."""
    # Of names and ranks there are tens of thousands, and looking at their types is enough.
    if kind in PLAIN and {*map(type, values)} <= {kind}:
        return
    for i, value in enumerate(values):
        _check_kind(value, kind, f"{what}[{i}]", checked_ids)


@memo()
def _list_kinds(table: type) -> list[tuple[str, Any]]:
    """The fields of a table and their kinds, without the fields that only cache results."""
    kinds = get_type_hints(table)
    given = [field.name for field in fields(table) if field.init]
    return [(name, kinds[name]) for name in given]


def check_plan_shapes(plan: Plan) -> None:
    """Raise PlanError unless the plan's ranks and tables have the right types and numbers of dimensions."""
    checked_ids: set[int] = set()
    ranks = tuple[int, ...]
    kinds = {"src_ranks": ranks, "dst_ranks": ranks, "lines": Demands, "batches": tuple[Batch, ...]}
    for field, kind in kinds.items():
        _check_kind(getattr(plan, field), kind, f"Plan.{field}", checked_ids)


def check_program_shapes(prog: Program) -> None:
    """Raise PlanError unless the program's tables (not its plan's) have the right types and numbers of dimensions."""
    checked_ids: set[int] = set()
    kinds = {"slots": int, "turns": int, "weights": tuple[int, ...], "legs": Legs}
    for field, kind in kinds.items():
        _check_kind(getattr(prog, field), kind, f"Program.{field}", checked_ids)


def check_integers(table: Overlay | Template | Demands) -> None:
    """Raise PlanError unless the arrays in `table` have 64-bit integers, so that sums are exact. Only the column `near`
    has bools instead."""
    for field in fields(table):
        column = getattr(table, field.name)
        if not isinstance(column, np.ndarray):
            continue
        expected = bool if field.name == "near" else np.int64
        name = f"{type(table).__name__}.{field.name}"
        require(column.dtype == expected, f"{name} is not of 64-bit integers")


# Sides


def check_sides(plan: Plan | Transposed) -> None:
    """Raise PlanError unless the source layouts, the destination layouts and the reductions of `plan` have the right
    types, and are mappings with the same tensor names."""
    if isinstance(plan, Transposed):
        _check_forward(plan.forward)
    checked_ids: set[int] = set()
    _check_kind(plan, Plan | Transposed, "the plan of the program", checked_ids)
    _check_windows(plan.src, "Plan.src", checked_ids)
    _check_windows(plan.dst, "Plan.dst", checked_ids)
    _check_values(plan.rules, Reduction, "Plan.rules", checked_ids)
    names = list(plan.src)
    same = names == list(plan.dst) and names == list(plan.rules)
    what = "the source, the destination and the rules of the plan"
    require(same, f"{what} are of tensors of other names")
    kinds: dict[str, Any] = {"is_tree": bool, "topology": Topology | None, "digest": str}
    for field, kind in kinds.items():
        _check_kind(getattr(plan, field), kind, f"Plan.{field}", checked_ids)
    require(plan.is_tree or names == [""], "a plan of two layouts has tensors by name")


def _check_forward(forward: object) -> None:
    """Raise PlanError unless the forward plan of an adjoint is a Plan that `check_sides` accepts."""
    if not isinstance(forward, Plan):
        what = f"forward={shown(forward)} is not a Plan"
        raise PlanError(f"{what}; transpose one by adjoint(plan)")
    check_sides(forward)


def _check_windows(side: object, what: str, checked_ids: set[int]) -> None:
    """Check that every tensor of a side has windows, and that they are layouts."""
    _check_values(side, Windows, what, checked_ids)
    assert isinstance(side, MappingProxyType)
    # Tens of thousands of tensors share their windows.
    distinct = {id(windows): windows for windows in side.values()}
    for windows in distinct.values():
        require(windows, f"a tensor has no window in {what}")
        _check_kind(windows, tuple[Layout, ...], f"the windows of {what}", checked_ids)


def _check_values(by_name: object, kind: type, what: str, checked_ids: set[int]) -> None:
    """Check that values by name are in the view that Plan makes of a dict: another mapping may change between two
    reads."""
    _check_kind(by_name, MappingProxyType, what, checked_ids)
    assert isinstance(by_name, MappingProxyType)
    # Of tens of thousands of names, one of each class is enough.
    name_by_class = {type(name): name for name in by_name}
    for name in name_by_class.values():
        _check_kind(name, str, f"a name of {what}", checked_ids)
    for other in {type(value) for value in by_name.values()} - {kind}:
        require(False, f"{what} has a {other.__name__}, not a {kind.__name__}")
