"""Verify: proofs that a plan, a program of it, or a list of transfers, does what two layouts ask for.

A plan is proved by its tables (`plan_proof`), from which its transfers are expanded, a program
by its streams (`program_proof`), a transposed plan by its forward plan. Transfers made by other code
are proved transfer by transfer (`claims`).

In each case, the destination holds every element of every tensor, except those that the plan names
in `in_part`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from shardmath.base.errors import PlanError
from shardmath.base.text import shown
from shardmath.layouts.holdings import Windows, label
from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed, adjoint, flip_digest
from shardmath.plans.plan import Movable, Plan, digest_of
from shardmath.plans.programs.program import Program, digest_program
from shardmath.plans.transfers import Transfer
from shardmath.plans.uncovered import find_not_whole
from shardmath.proofs.batches import check_rule
from shardmath.proofs.claims import check_claim
from shardmath.proofs.shapes import check_sides, require

__all__ = ["verify"]


def verify(
    plan: Plan | Transposed | Program, *, transfers: Iterable[Transfer] | None = None
) -> None:
    """Raise PlanError unless `plan`, or the `transfers` given in its place, brings each destination rank exactly what
    its layouts say.

    The proof shows that each element that the destination holds arrives there exactly once; that the
    destination holds all elements of every tensor that is not in `Plan.in_part`; and that the plan's digest,
    with which ranks tell plans apart, is the digest of its layouts. Without `transfers` it also covers the
    plan's own tables, fills and divisors. With `transfers` the error names the first wrong element.
    """
    promised: object = plan.plan if isinstance(plan, Program) else plan
    if not isinstance(promised, Plan | Transposed):
        what = "pass what plan(src, dst) or schedule(plan) returns"
        raise PlanError(f"{plan!r} is not a Plan; {what}")
    check_sides(promised)
    _check_in_part(promised)
    _check_left(promised.forward if isinstance(promised, Transposed) else promised)
    if transfers is None:
        _prove(plan)
    else:
        check_claim(promised, transfers)
    _check_digest(plan)


def _check_in_part(plan: Movable) -> None:
    """Check that `in_part` names exactly the tensors that the destination does not hold whole."""
    in_part = find_not_whole(plan.dst)
    given: object = plan.in_part
    if not isinstance(given, tuple) or not all(isinstance(name, str) for name in given):
        raise PlanError(f"in_part={shown(given)} is not a tuple of names; make the plan again")
    if given == in_part:
        return
    # The same names in another order are wrong too.
    wrong = sorted({*given} ^ {*in_part}) or list(given)
    name = wrong[0]
    lists = "names" if name in given else "does not name"
    holds = "whole" if name in given else "only in part"
    what = f"in_part of {plan!r} {lists} {label(name)}, which the destination holds {holds}"
    raise PlanError(f"{what}; make the plan again")


def _check_left(plan: Plan) -> None:
    """Check a plan that ranks have left: its whole plan is complete, and ranks that stay hold what they held there."""
    whole = plan.whole
    if whole is None:
        is_complete = isinstance(plan.left, tuple) and not plan.left
        require(is_complete, f"left={shown(plan.left)}, but the plan has no whole plan")
        return
    is_whole = isinstance(whole, Plan) and whole.whole is None
    require(is_whole, "the whole plan is not a Plan, or not whole")
    check_sides(whole)
    left = _read_left(plan.left, whole)
    # Many tensors share their windows: each pair of windows is checked once.
    pairs = {}
    for name, before in whole.dst.items():
        # A tensor of which no rank stays is not in the plan any more.
        after = plan.dst.get(name, Windows())
        pairs[id(before), id(after)] = name, before, after
        if name in plan.src:
            same = plan.src[name] == whole.src[name]
            require(same, f"{label(name)} has another source than in the whole plan")
    others = sorted(plan.src.keys() - whole.src.keys())
    require(not others, f"the whole plan does not have the tensors {others[:8]}")
    for name, before, after in pairs.values():
        _check_staying(name, before, after, left)


def _read_left(left: object, whole: Plan) -> frozenset[int]:
    """The ranks that have left. Raises PlanError unless they are ranks of the destination, ascending."""
    wrong = f"ranks {shown(left)} have not left the whole plan"
    ranks = left if isinstance(left, tuple) else ()
    require(ranks and all(type(rank) is int for rank in ranks), wrong)
    ascending = sorted(set(ranks))
    require(ranks == tuple(ascending), wrong)
    dst_ranks: set[int] = set()
    for layout in set(itertools.chain.from_iterable(whole.dst.values())):
        dst_ranks.update(layout.mesh.ranks)
    require(dst_ranks.issuperset(ranks), wrong)
    return frozenset(ranks)


def _check_staying(name: str, before: Windows, after: Windows, left: frozenset[int]) -> None:
    """Check that a tensor keeps the windows of which some rank stays, unchanged on each rank that stays."""
    staying = [layout for layout in before if not left.issuperset(layout.mesh.ranks)]
    same = len(staying) == len(after)
    require(same, f"{label(name)} has other windows than those of the ranks that stay")
    for whole, layout in zip(staying, after, strict=True):
        ranks = set(whole.mesh.ranks) - left
        same = ranks == set(layout.mesh.ranks)
        require(same, f"{label(name)} is on other ranks than those that stay")
        for rank in sorted(ranks):
            held = _describe_held(layout, rank)
            same = held == _describe_held(whole, rank)
            require(same, f"{label(name)}: rank {rank} stays and holds something else")


def _describe_held(layout: Layout, rank: int) -> tuple[object, ...]:
    """A key of the elements that a rank holds, and of their addend."""
    coords = layout.mesh.coords(rank)
    addend = [(axis, op, coords[axis]) for axis, op in layout.partial]
    return layout.shape, layout.dtype, layout.runs(rank), addend


def _prove(plan: Plan | Transposed | Program) -> None:
    """Prove the tables. The provers are imported here because few programs that import this module need them."""
    from shardmath.proofs.plan_proof import prove
    from shardmath.proofs.program_proof import prove_program

    if isinstance(plan, Plan):
        prove(plan)
    elif isinstance(plan, Transposed):
        prove(plan.forward)
        _check_transposed(plan)
    else:
        prove_program(plan)


def _check_transposed(plan: Transposed) -> None:
    """Check that a transposed plan is the adjoint of its forward plan, which is proved."""
    expected = adjoint(plan.forward)
    for name, rule in expected.rules.items():
        check_rule(name, plan.rules.get(name), rule)
    if plan.flip != expected.flip:
        what = f"{plan!r} does not list the transfers of {plan.forward!r} with their ends swapped"
        raise PlanError(f"{what}; transpose the plan again")
    if (plan.src, plan.dst) != (expected.src, expected.dst):
        what = f"{plan!r} is not between the transposed layouts of {plan.forward!r}"
        raise PlanError(f"{what}; transpose the plan again")


def _check_digest(plan: Plan | Transposed | Program) -> None:
    """Raise PlanError unless the digest, and the digest of the plan inside, is what the content gives."""
    if isinstance(plan, Plan):
        found = digest_of(plan)
    elif isinstance(plan, Transposed):
        _check_digest(plan.forward)
        found = flip_digest(plan.forward.digest)
    else:
        _check_digest(plan.plan)
        found = digest_program(plan)
    if plan.digest != found:
        what = f"{plan!r} has the digest {plan.digest!r}, but its content has {found!r}"
        raise PlanError(f"{what}; make it again")
