"""Verify: proofs that a plan, a program of it, or a list of transfers, does what two layouts ask
for.

A plan is proved by its tables (`plan_proof`), which are what its transfers expand from, a program
by its streams (`program_proof`), a transposed plan by what its plan becomes. Transfers from
elsewhere are proved one by one (`claims`).

Whatever is proved, every element of a tensor is held at the destination, but of those tensors that
the plan names in `in_part`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardmath.base.errors import PlanError
from shardmath.base.text import shown
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed, adjoint, flip_digest
from shardmath.plans.plan import Movable, Plan, Transfer, digest_of
from shardmath.plans.reduction import Reduction, find_reduction
from shardmath.plans.uncovered import find_not_whole
from shardmath.proofs.claims import check_claim
from shardmath.proofs.shapes import check_sides, require
from shardmath.proofs.simulate import as_program

if TYPE_CHECKING:
    from shardmath.plans.programs.program import Program

__all__ = ["verify"]


def verify(
    plan: Plan | Transposed | Program, *, transfers: Iterable[Transfer] | None = None
) -> None:
    """Raise PlanError unless the plan's or program's tables, or the transfers given, do what the
    layouts ask for.

    Proved is that each element that the destination holds arrives there exactly once, and that all
    elements of every tensor but those of `Plan.in_part` are held there; and that the digest, by which
    ranks tell plans apart, is that of the layouts. Without `transfers` the plan's own tables are
    proved, and what it fills in and divides by. With them the error names the first offending element.
    """
    if not isinstance(plan, Plan | Transposed):
        plan = as_program(plan)
    promised = plan if isinstance(plan, Plan | Transposed) else plan.plan
    check_sides(promised)
    _check_in_part(promised)
    _check_left(promised.forward if isinstance(promised, Transposed) else promised)
    if transfers is None:
        _prove(plan)
    else:
        check_claim(promised, transfers)
    _check_digest(plan)


def _check_in_part(plan: Movable) -> None:
    """The plan says of exactly those tensors that the destination holds them in part."""
    short = find_not_whole(plan.dst)
    given: object = plan.in_part
    if not isinstance(given, tuple) or not all(isinstance(name, str) for name in given):
        raise PlanError(f"in_part={shown(given)} is not a tuple of names; make the plan anew")
    if given == short:
        return
    # The same names in another order are odd too.
    odd = sorted({*given} ^ {*short}) or list(given)
    name = odd[0]
    says = "in part" if name in given else "whole"
    what = f"tensor {name!r} is not held {says} at the destination of {plan!r}"
    raise PlanError(f"{what}; make the plan anew")


def _check_left(plan: Plan) -> None:
    """Ranks have left a plan of which nobody had, and who stays holds what it held in that."""
    whole = plan.whole
    if whole is None:
        nobody = isinstance(plan.left, tuple) and not plan.left
        require(nobody, f"ranks {shown(plan.left)} have left no plan")
        return
    is_whole = isinstance(whole, Plan) and whole.whole is None
    require(is_whole, "the whole plan is none, or not whole")
    check_sides(whole)
    left = _read_left(plan.left, whole)
    pairs = {}
    for name, before in whole.dst.items():
        after = plan.dst.get(name, Windows())
        pairs[id(before), id(after)] = name, before, after
        if name in plan.src:
            same = plan.src[name] == whole.src[name]
            require(same, f"tensor {name!r} has another source than in the whole plan")
    others = sorted(plan.src.keys() - whole.src.keys())
    require(not others, f"the whole plan does not have the tensors {others[:8]}")
    for name, before, after in pairs.values():
        _check_staying(name, before, after, left)


def _read_left(left: object, whole: Plan) -> frozenset[int]:
    """Those who have left: ranks of the destination, ascending."""
    wrong = f"ranks {shown(left)} have not left the whole plan"
    ranks = left if isinstance(left, tuple) else ()
    require(ranks and all(type(rank) is int for rank in ranks), wrong)
    ascending = sorted(set(ranks))
    require(ranks == tuple(ascending), wrong)
    there: set[int] = set()
    for layout in set(itertools.chain.from_iterable(whole.dst.values())):
        there.update(layout.mesh.ranks)
    gone = frozenset(ranks)
    require(gone.issubset(there), wrong)
    return gone


def _check_staying(name: str, before: Windows, after: Windows, left: frozenset[int]) -> None:
    """The windows of a tensor of which somebody stays are there, as they were on each rank that stays."""
    there = [layout for layout in before if not left.issuperset(layout.mesh.ranks)]
    same = len(there) == len(after)
    require(same, f"tensor {name!r} has other windows than those of who stays")
    for whole, layout in zip(there, after, strict=True):
        ranks = left.symmetric_difference(whole.mesh.ranks) - left
        same = ranks == set(layout.mesh.ranks)
        require(same, f"tensor {name!r} is on other ranks than stay")
        for rank in sorted(ranks):
            held = _describe_held(layout, rank)
            same = held == _describe_held(whole, rank)
            require(same, f"tensor {name!r}: rank {rank} stays and holds something else")


def _describe_held(layout: Layout, rank: int) -> tuple[object, ...]:
    """What a rank holds, and of which addend."""
    coords = layout.mesh.coords(rank)
    addend = [(axis, op, coords[axis]) for axis, op in layout.partial]
    return layout.shape, layout.dtype, layout.runs(rank), addend


def _prove(plan: Plan | Transposed | Program) -> None:
    """Prove the tables. The provers are imported here because few who import this prove a table."""
    from shardmath.proofs.plan_proof import prove
    from shardmath.proofs.program_proof import prove_program

    if isinstance(plan, Plan):
        _check_rules(plan)
        prove(plan)
    elif isinstance(plan, Transposed):
        _check_transposed(plan)
        prove(plan.forward)
    else:
        _check_rules(plan.plan)
        prove_program(plan)


def _check_transposed(plan: Transposed) -> None:
    """All that it says is what its plan becomes, and what that fills in, and divides by, is what its
    own layouts ask for."""
    _check_rules(plan.forward)
    expected = adjoint(plan.forward)
    for name, rule in expected.rules.items():
        _check_rule(name, plan.rules.get(name), rule)
    if plan.flip != expected.flip:
        what = f"{plan!r} does not list the transfers of {plan.forward!r} with their ends swapped"
        raise PlanError(what)
    if (plan.src, plan.dst) != (expected.src, expected.dst):
        what = f"{plan!r} is not between the layouts that those of {plan.forward!r} become"
        raise PlanError(f"{what}; transpose the plan anew")


def _check_digest(plan: Plan | Transposed | Program) -> None:
    """Raise PlanError unless the digest is that of what is proved, and so is that of its plan."""
    if isinstance(plan, Plan):
        found = digest_of(plan)
    elif isinstance(plan, Transposed):
        _check_digest(plan.forward)
        found = flip_digest(plan.forward.digest)
    else:
        from shardmath.plans.programs.program import digest_program

        _check_digest(plan.plan)
        found = digest_program(plan)
    if plan.digest != found:
        what = f"{plan!r} has the digest {plan.digest!r}, and what it does the digest {found!r}"
        raise PlanError(f"{what}; make it anew")


def _check_rules(plan: Plan) -> None:
    """What is filled in, and divided by, is what the layouts ask for."""
    asked: dict[tuple[Layout, Layout], Reduction] = {}
    # Tensors share their windows and rules: what is the same three objects is compared once. The plan
    # keeps them alive, so that their ids are theirs alone.
    compared: set[tuple[int, int, int]] = set()
    for name, here in plan.src.items():
        there = plan.dst[name]
        given = plan.rules[name]
        objects = id(here), id(there), id(given)
        if objects in compared:
            continue
        compared.add(objects)
        pair = here[0], there[0]
        if pair not in asked:
            asked[pair] = find_reduction(*pair)
        _check_rule(name, given, asked[pair])


def _check_rule(name: str, given: Reduction | None, expected: Reduction) -> None:
    """A tensor is reduced as it should be; what fills in is compared as text, as -0.0 == 0."""
    if given is expected or repr(given) == repr(expected):
        return
    what = f"tensor {name!r} is reduced by {given}; its layouts ask for {expected}"
    raise PlanError(what)
