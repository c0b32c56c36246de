"""Certify: a program's time compared with a bound that no program can beat.

The bound counts each element once, wherever it is wanted and however it gets there (`flows.bound`); the
program's time counts every byte of every round, one round after the other. The time of a plan that is
compiled itself is the time of `as_planned`: its own senders, whatever the topology. Elements whose
receiver the plan was free to choose (the addend of a Partial destination) do not count in the bound.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> from shardmath.plans.programs.scheduling import schedule
>>> p = plan(Layout((1 << 20,), Mesh(tp=2), "(tp n)"), Layout((1 << 20,), Mesh(tp=2, ranks=(2, 3)), "(tp n)"))
>>> print(certify(schedule(p, topology=Topology(ranks_per_node=1))))
51.94 us, 1 times the bound of 51.94 us: rank 2 must take in 2.097 MB at 50 GB/s, after 10 us of latency
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.errors import PlanError
from shardmath.base.memo import memo
from shardmath.base.text import shown
from shardmath.plans.adjoint import Transposed
from shardmath.plans.demands import Demands, gather_lines
from shardmath.plans.flows.blocks import Block
from shardmath.plans.flows.bound import find_bound
from shardmath.plans.flows.certificate import Certificate, Witness, make_certificate
from shardmath.plans.flows.topology import Topology, checked
from shardmath.plans.plan import Plan
from shardmath.plans.programs.alternatives import Alternative, list_alternatives
from shardmath.plans.programs.loads import estimate_seconds, sum_pairs, sum_round_loads
from shardmath.plans.programs.program import Program
from shardmath.plans.programs.scheduling import run_straight
from shardmath.plans.uncovered import find_meeting

__all__ = ["certify", "crossing_bytes", "find_running", "list_blocks"]


def certify(plan: Plan | Program, topology: Topology | None = None) -> Certificate:
    """Compare the estimated time of a plan or program on `topology` (default: its own) with a bound that no schedule
    can beat; return a Certificate.

    The certificate has the bound, the time, their ratio, and the ranks that force the bound. A plan has the
    time of the program that runs when it is compiled, on the given topology or the plan's own. A program runs
    on its own topology. Raises PlanError if `plan` is neither a Plan nor a Program, if no topology was given
    here or for the plan or program, and if `topology` is another one than the program's.
    """
    prog = find_running(plan, topology)
    loads = sum_round_loads(prog)
    time = estimate_seconds(prog.topology, loads)
    least = _find_least(prog.plan, prog.plan.lines, prog.topology)
    certificate = make_certificate(least, time)
    return replace(certificate, _compare=partial(_compare, prog.plan, prog.topology))


def _compare(plan: Plan, topology: Topology) -> tuple[Alternative, ...]:
    """What other ways to move the plan's bytes would take."""
    return list_alternatives(plan, topology, list_blocks(plan))


@memo(2)
def _find_least(plan: Plan, lines: Demands, topology: Topology) -> tuple[float, Witness | None]:
    """The bound of a plan, cached since a plan is often certified together with its program. `lines` are the plan's,
    and only a part of the cache's key: plans of equal digests may have different lines."""
    return find_bound(list_blocks(plan), plan.ranks, topology)


def crossing_bytes(plan: Plan | Transposed | Program, topology: Topology | None = None) -> int:
    """Return the number of bytes that ranks send to ranks of other nodes of `topology` (default: its own) when a plan
    or a program runs.

    A byte that crosses twice counts twice. Arguments and errors are as in `certify`. An adjoint has
    the same number as its plan, in the other direction.
    """
    if isinstance(plan, Transposed):
        plan = plan.forward
    prog = find_running(plan, topology)
    pairs = sum_pairs(prog)
    crossing = pairs.nbytes[pairs.far]
    return int(crossing.sum())


def find_running(plan: object, topology: Topology | None) -> Program:
    """Return `plan` itself if it is a Program; else return a Program for `topology` with the plan's transfers, in which
    no rank forwards bytes for other ranks.

    Limits of such a Program are not computed. Raises PlanError as `certify` does.
    """
    if not isinstance(plan, Plan | Program):
        what = "give what plan(src, dst) or schedule(plan) returns"
        raise PlanError(f"{shown(plan)} is not a plan or a Program; {what}")
    prog = run_straight(plan, topology) if isinstance(plan, Plan) else plan
    if topology is not None and checked(topology) != prog.topology:
        what = f"{plan!r} was scheduled for {prog.topology}, not for {topology}"
        raise PlanError(f"{what}; schedule its plan for that topology, or leave topology= out")
    if topology is None and prog.assumes_nodes:
        what = f"nothing says which ranks of {plan!r} share a node"
        to = "" if isinstance(plan, Plan) else " to schedule"
        raise PlanError(f"{what}; pass topology=shardmath.Topology(ranks_per_node=8){to}")
    return prog


def list_blocks(plan: Plan) -> Iterator[Block]:
    """Yield the Blocks from which the time bound of `plan` is found: bytes, and the ranks that hold and need them."""
    # Without the topology: it would divide one set of receivers into near and far lines, but the
    # bound counts what must move, whichever rank is asked for it.
    demands = plan.lines if plan.topology is None else gather_lines(plan.batches)
    # Two groups, since tensors whose addends are reduced have other elements than the rest.
    groups = _find_reduced(plan, demands).tolist()
    addend = demands.addend.tolist()
    nbytes = _count_bytes(plan, demands).tolist()
    owners = demands.blocks.owners().tolist()
    for block, line in enumerate(owners):
        if not nbytes[block]:
            continue
        holders = demands.held_by(line)
        receivers = demands.asked_by(block)
        amount = nbytes[block]
        yield Block(holders, receivers, amount, addend[block], groups[block])


def _find_reduced(plan: Plan, demands: Demands) -> Ints:
    """1 for each block with bytes of tensors whose addends are reduced, 0 for others."""
    is_folded = [bool(batch.template.reduction.folded) for batch in plan.batches]
    by_batch = np.array(is_folded, np.int64)
    by_row = by_batch[demands.batch]
    count = demands.rows.sums(by_row)
    return np.minimum(count, 1)


def _count_bytes(plan: Plan, demands: Demands) -> Ints:
    """The bytes of each block of the lines, without batches that do not count."""
    tensors = []
    for number, batch in enumerate(plan.batches):
        count = len(batch.names) if _is_counted(plan, number) else 0
        tensors.append(count)
    counted = np.array(tensors, np.int64)
    nbytes = demands.each * counted[demands.batch]
    return demands.rows.sums(nbytes)


def _is_counted(plan: Plan, number: int) -> bool:
    """Whether a batch's elements count: exactly the ranks that receive them need them.

    Elements that several windows of a destination share count only for the first of them.
    """
    batch = plan.batches[number]
    # Of the ranks along these axes, any one may receive an element.
    if batch.template.reduction.chosen:
        return False
    if batch.target == 0:  # the destination's first window
        return True
    windows = plan.dst[batch.names[0]]
    common = find_meeting(windows, windows)
    return all((i, batch.target) not in common for i in range(batch.target))
