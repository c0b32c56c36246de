"""Shapes: whether what a proof reads are tables at all.

Every value is of its class, and every column an array of as many dimensions as it should have. Once
that holds, wrong tables are found by what they say (`tables`), and any other error is a fault of
ours.
"""

from __future__ import annotations

from dataclasses import fields
from types import UnionType

import numpy as np

from shardmath.base.errors import PlanError
from shardmath.base.text import plural, shown
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.overlay import Overlay
from shardmath.layouts.algebra.partition import Partition
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed
from shardmath.plans.demands import Batch, Demands
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan
from shardmath.plans.programs.legs import Bands, Legs
from shardmath.plans.programs.program import Program
from shardmath.plans.reduction import Reduction
from shardmath.plans.template import Template

__all__ = [
    "check_integers",
    "check_plan_shapes",
    "check_program_shapes",
    "check_sides",
    "require",
]

ARRAYS = ("Ints", "Bools")
"""How the types of columns are written."""

MATRICES = {"Overlay.src", "Overlay.dst", "Template.unit_pairs"}
"""Columns with a number for each row and part, or unit and dimension; others have one number
each."""


def require(holds: object, what: str) -> None:
    """Raise PlanError, which says `what` is wrong, unless it holds."""
    if not holds:
        raise PlanError(f"{what}; make the plan anew")


def check_sides(p: Plan | Transposed) -> None:
    """Raise PlanError unless all that is said of tensors is said of the same ones, and of its kind."""
    if isinstance(p, Transposed):
        _check_forward(p.forward)
    _check_type(p, Plan | Transposed, "the plan of the program")
    _check_windows(p.src, "the source")
    _check_windows(p.dst, "the destination")
    _check_values(p.rules, Reduction, "the rules of the plan")
    names = list(p.src)
    same = names == list(p.dst) and names == list(p.rules)
    what = "the source, the destination and the rules of the plan"
    require(same, f"{what} are of tensors of other names")
    _check_type(p.is_tree, bool, "is_tree")
    require(p.is_tree or names == [""], "a plan of two layouts has tensors by name")
    _check_type(p.topology, Topology | None, "the topology of the plan")
    _check_type(p.digest, str, "the digest of the plan")


def _check_windows(side: object, what: str) -> None:
    """Every tensor of the side has windows, which are layouts."""
    _check_values(side, Windows, f"{what} of the plan")
    assert isinstance(side, dict)
    # Tens of thousands of tensors share their windows.
    distinct = {id(windows): windows for windows in side.values()}
    for windows in distinct.values():
        require(windows, f"a tensor has no window at {what}")
        _check_items(windows, Layout, f"the windows of {what}")


def _check_values(by_name: object, kind: type, what: str) -> None:
    """The values are of the class itself, by names, in a dict: another mapping may change its mind."""
    _check_type(by_name, dict, what)
    assert isinstance(by_name, dict)
    names = {type(name): name for name in by_name}
    for name in names.values():
        _check_type(name, str, f"a name of {what}")
    values = {type(value): value for value in by_name.values()}
    for value in values.values():
        is_other = type(value) is not kind
        require(not is_other, f"{what} has a {type(value).__name__}, not a {kind.__name__}")


def _check_forward(forward: object) -> None:
    """Raise PlanError unless what an adjoint turns round is a plan, and is said of the same tensors."""
    if not isinstance(forward, Plan):
        what = f"forward={shown(forward)} is not a Plan"
        raise PlanError(f"{what}; transpose one by adjoint(plan)")
    check_sides(forward)


def check_plan_shapes(p: Plan) -> None:
    """Raise PlanError unless the tables of a plan are tables."""
    _check_items(p.src_ranks, int, "the plan's source ranks")
    _check_items(p.dst_ranks, int, "the plan's destination ranks")
    _check_type(p.lines, Demands, "the plan's lines")
    _check_lines(p.lines)
    _check_items(p.batches, Batch, "the plan's batches")
    known: set[int] = set()
    for batch in p.batches:
        _check_batch(batch)
        template = batch.template
        if id(template) not in known:
            known.add(id(template))
            _check_template(template)


def _check_batch(batch: Batch) -> None:
    """Raise PlanError unless the fields of a batch are of their kinds."""
    _check_items(batch.names, str, "the names of a batch")
    _check_type(batch.source, int, "the source window of a batch")
    _check_type(batch.target, int, "the destination window of a batch")
    _check_type(batch.src, Mesh, "the source mesh of a batch")
    _check_type(batch.dst, Mesh, "the destination mesh of a batch")
    _check_type(batch.template, Template, "the template of a batch")


def check_program_shapes(prog: Program) -> None:
    """Raise PlanError unless the tables of a program, but for those of its plan, are tables."""
    _check_type(prog.slots, int, "the program's slots")
    _check_type(prog.turns, int, "the program's turns")
    _check_type(prog.legs, Legs, "the program's legs")
    legs = prog.legs
    _check_type(legs.bands, Bands, "the program's bands")
    _check_columns(legs.bands)
    _check_type(legs.lines, Demands, "the program's lines")
    _check_lines(legs.lines)


def check_integers(table: Overlay | Template | Demands) -> None:
    """Raise PlanError unless all columns are of 64-bit integers: no float decides anything, and no
    sum is cut off."""
    for field in fields(table):
        column = getattr(table, field.name)
        if not isinstance(column, np.ndarray):
            continue
        expected = bool if field.name == "near" else np.int64
        name = f"{type(table).__name__}.{field.name}"
        require(column.dtype == expected, f"{name} is not of 64-bit integers")


def _check_type(value: object, kind: type | UnionType, what: str) -> None:
    """The value is of the class."""
    if not isinstance(value, kind):
        name = kind.__name__ if isinstance(kind, type) else str(kind)
        require(False, f"{what}: a {type(value).__name__}, not a {name}")


def _check_items(values: object, kind: type, what: str) -> None:
    """The values are a tuple of such."""
    _check_type(values, tuple, what)
    assert isinstance(values, tuple)
    for value in values:
        _check_type(value, kind, f"one of {what}")


def _check_columns(table: Bands | Demands | Overlay | Partition | Template) -> None:
    """Every column is an array."""
    for field in fields(table):
        if field.type not in ARRAYS:
            continue
        name = f"{type(table).__name__}.{field.name}"
        column = getattr(table, field.name)
        _check_type(column, np.ndarray, name)
        dimensions = 2 if name in MATRICES else 1
        require(
            column.ndim == dimensions,
            f"{name} has {plural(column.ndim, 'dimension')}, not {dimensions}",
        )


def _check_lines(demands: Demands) -> None:
    """Columns are arrays, and sets of ranks are of integers."""
    _check_columns(demands)
    _check_numbers(demands.sets, "the sets of ranks of lines")


def _check_numbers(sets: object, what: str) -> None:
    """The sets are tuples of integers."""
    _check_items(sets, tuple, what)
    assert isinstance(sets, tuple)
    for numbers in sets:
        _check_items(numbers, int, f"one of {what}")


def _check_template(t: Template) -> None:
    """The template is of two layouts, and its dimensions are overlays."""
    _check_columns(t)
    _check_type(t.src, Layout, "the source of a template")
    _check_type(t.dst, Layout, "the destination of a template")
    _check_type(t.reduction, Reduction, "the reduction of a template")
    _check_items(t.overlays, Overlay, "the dimensions of a template")
    for over in t.overlays:
        _check_columns(over)
        _check_partition(over.source, "the source of a dimension")
        _check_partition(over.target, "the destination of a dimension")
        _check_numbers(over.keys, "the keys of a dimension")
        _check_numbers(over.goals, "the goals of a dimension")


def _check_partition(of: Partition, what: str) -> None:
    """The partition is of named axes into Runs."""
    _check_type(of, Partition, what)
    _check_columns(of)
    _check_items(of.axes, str, f"the axes of {what}")
    _check_items(of.parts, Runs, f"the parts of {what}")
