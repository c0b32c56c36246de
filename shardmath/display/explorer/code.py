"""Code: two layouts and their plan as Python, to continue in a notebook or in a test.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> src = Layout((9, 4), Mesh(tp=2), "(tp n) h")
>>> print(write_script(src, src, None, window=False))
import shardmath as sm
<BLANKLINE>
src = sm.Layout((9, 4), sm.Mesh(tp=2), '(tp n) h', dtype='float32')
dst = sm.Layout((9, 4), sm.Mesh(tp=2), '(tp n) h', dtype='float32')
plan = sm.plan(src, dst)
sm.verify(plan)  # raises unless every element arrives exactly once
print(*plan.transfers(), sep="\\n")
"""

from __future__ import annotations

from shardmath.layouts.layout import Layout
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan

__all__ = ["write_script", "write_test"]

MOST_ASSERTED = 16
"""Ranks whose local shapes a test asserts."""


def write_script(src: Layout, dst: Layout, topology: Topology | None, *, window: bool) -> str:
    """Return a program that makes the same plan, proves it, and prints its transfers."""
    lines = ["import shardmath as sm", "", *_write_plan(src, dst, topology, window=window)]
    if topology is not None:
        lines.append("program = sm.schedule(plan)  # rounds in which nodes may pass copies on")
        lines.append("print(sm.certify(program))")
    return "\n".join([*lines, 'print(*plan.transfers(), sep="\\n")'])


def write_test(plan: Plan, topology: Topology | None, *, window: bool) -> str:
    """Return a test that makes and proves `plan`, a plan of one tensor, and fails if its bytes or its shapes change."""
    ((src,),) = plan.src.values()
    ((dst,),) = plan.dst.values()
    asserted = dst.mesh.ranks[:MOST_ASSERTED]
    shapes = {rank: dst.local_shape(rank) for rank in asserted}
    body = [
        *_write_plan(src, dst, topology, window=window),
        f"assert sum(plan.sent_bytes().values()) == {sum(plan.sent_bytes().values())}",
        f"shapes = {shapes}",
        "assert {rank: dst.local_shape(rank) for rank in shapes} == shapes",
    ]
    head = ["import shardmath as sm", "", "", "def test_every_element_arrives():"]
    return "\n".join([*head, *(f"    {line}" for line in body)])


def _write_plan(src: Layout, dst: Layout, topology: Topology | None, *, window: bool) -> list[str]:
    """The lines that make and prove the plan."""
    options = ""
    if topology is not None:
        options += f", topology=sm.Topology(ranks_per_node={topology.ranks_per_node})"
    if window:
        options += ", window=True"
    return [
        f"src = {_write(src)}",
        f"dst = {_write(dst)}",
        f"plan = sm.plan(src, dst{options})",
        "sm.verify(plan)  # raises unless every element arrives exactly once",
    ]


def _write(layout: Layout) -> str:
    """The call that makes the layout."""
    return repr(layout).replace("Layout(", "sm.Layout(", 1).replace("Mesh(", "sm.Mesh(", 1)
