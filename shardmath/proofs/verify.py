"""Verify: proofs that a plan, a program of it, or a list of transfers, does what two layouts ask
for.

A plan is proved by its tables (`plan_proof`), which are what its transfers expand from, a program
by its streams (`program_proof`). Transfers from elsewhere are proved one by one (`claims`).

Whatever is proved, every element of a tensor is held at the destination, but of those tensors that
the plan names in `in_part`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from shardmath.base.errors import PlanError
from shardmath.base.given import shown
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import flip_of
from shardmath.plans.cover import not_whole
from shardmath.plans.plan import Plan, Transfer
from shardmath.plans.reduction import Reduction, identity_of, reduction
from shardmath.proofs.claims import check_claim

if TYPE_CHECKING:
    from shardmath.programs.program import Program

__all__ = ["verify"]


def verify(p: Plan | Program, *, transfers: Iterable[Transfer] | None = None) -> None:
    """Raise PlanError unless the plan's or program's tables, or the transfers given, do what the
    layouts ask for.

    Proved is that each element that the destination holds arrives there exactly once, and that all
    elements of every tensor but those of `Plan.in_part` are held there. Without `transfers` the
    plan's own tables are proved, and what it fills in and divides by. With them the error names the
    first offending element.
    """
    promised = p if isinstance(p, Plan) else getattr(p, "plan", None)
    if not isinstance(promised, Plan):
        raise PlanError(f"{p!r} is not a Plan; pass what plan(src, dst) or schedule(plan) returns")
    _check_in_part(promised)
    if transfers is None:
        _prove(p, promised)
    else:
        check_claim(promised, transfers)


def _check_in_part(p: Plan) -> None:
    """The plan says of exactly those tensors that the destination holds them in part."""
    short = not_whole(p.dst)
    given: object = p.in_part
    if not isinstance(given, tuple) or not all(isinstance(name, str) for name in given):
        raise PlanError(f"in_part={shown(given)} is not a tuple of names; make the plan anew")
    if given == short:
        return
    # The same names in another order are odd too.
    odd = sorted({*given} ^ {*short}) or list(given)
    name = odd[0]
    says = "in part" if name in given else "whole"
    what = f"tensor {name!r} is not held {says} at the destination of {p!r}"
    raise PlanError(f"{what}; make the plan anew")


def _prove(p: Plan | Program, promised: Plan) -> None:
    """Prove the tables. The provers are imported here because few who import this prove a table."""
    _check_rules(promised)
    if not isinstance(p, Plan):
        from shardmath.proofs.program_proof import prove_program

        prove_program(p)
        return
    from shardmath.proofs.plan_proof import prove

    if p.forward is not None and p.flip != flip_of(p.forward):
        what = f"{p!r} does not list the transfers of {p.forward!r} with their ends swapped"
        raise PlanError(what)
    prove(p.forward or p)


def _check_rules(p: Plan) -> None:
    """What is filled in, and divided by, is what the layouts ask for."""
    forward = p.forward or p
    asked: dict[tuple[Layout, Layout], Reduction] = {}
    for name, windows in forward.src.items():
        pair = windows[0], forward.dst[name][0]
        if pair not in asked:
            asked[pair] = reduction(*pair)
        expected = asked[pair]
        if p.forward is not None:
            expected = replace(expected, fill=identity_of("sum", windows[0].dtype))
        given = p.rules[name]
        if given is not expected and repr(given) != repr(expected):
            what = f"tensor {name!r} is reduced by {given}; its layouts ask for {expected}"
            raise PlanError(what)
