"""Alternatives: what a move would take if it were done as other systems do it.

1. Seconds come from the model of certificates: links at full rate, and a latency per round.
2. Without relays: every rank is sent its own copy, all at once.
3. Stage by stage: a pipeline stage is the tensors on the ranks of one mesh, or of meshes with common ranks. One stage
   is sent while the others wait, so the time is at least the sum of the bounds of stages on their own ranks' links.
4. A gather of whole tensors is not listed. Most engines' nodes together need whole tensors in any case, so that
   between nodes whole tensors take no longer: they take memory, and time inside nodes.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> stages = {name: Layout((1 << 20,), Mesh(pp=1, ranks=(i,)), "n") for i, name in enumerate("uv")}
>>> engine = {name: Layout((1 << 20,), Mesh(tp=2, ranks=(8, 9)), "(tp n)") for name in "uv"}
>>> blocks = [Block((0,), (8,), 1 << 21), Block((1,), (9,), 1 << 21)]
>>> for what, seconds in list_alternatives(plan(stages, engine), Topology(), blocks):
...     print(what, f"{seconds * 1e6:.0f} us")
Without relays, each rank is sent its own copy in 94 us
Its 2 stages, one after the other, take at least 104 us
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TypeAlias

from shardmath.plans.flows.blocks import Block
from shardmath.plans.flows.bound import find_bound
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan
from shardmath.plans.programs.loads import estimate_seconds, sum_round_loads
from shardmath.plans.programs.scheduling import run_straight
from shardmath.plans.template import Ranks

__all__ = ["Alternative", "list_alternatives"]

Alternative: TypeAlias = tuple[str, float]
"""The beginning of a sentence that says what is done, and the seconds that it takes."""


def list_alternatives(
    plan: Plan, topology: Topology, blocks: Iterable[Block]
) -> tuple[Alternative, ...]:
    """List other ways to do the move of `plan` on `topology`, with the seconds that they take. `blocks` are the bytes
    that have to move. Stages are left out if there is only one."""
    straight = estimate_seconds(topology, sum_round_loads(run_straight(plan, topology)))
    found = [("Without relays, each rank is sent its own copy in", straight)]
    stages = _divide_by_stage(plan, blocks)
    if len(stages) > 1:
        times = (_find_stage_bound(stage, topology) for stage in stages)
        found.append((f"Its {len(stages)} stages, one after the other, take at least", sum(times)))
    return tuple(found)


def _divide_by_stage(plan: Plan, blocks: Iterable[Block]) -> list[list[Block]]:
    """The blocks of each stage."""
    # Tens of thousands of tensors have few layouts, and these are on fewer meshes.
    sides = dict.fromkeys(plan.src.values())
    meshes = {tuple(layout.mesh.ranks for layout in windows) for windows in sides}
    stages = _join(tuple(itertools.chain(*ranks)) for ranks in meshes)
    divided: dict[int, list[Block]] = {}
    for block in blocks:
        # Ranks of one stage have the same set object.
        stage = id(stages[block.holders[0]])
        divided.setdefault(stage, []).append(block)
    return list(divided.values())


def _join(groups: Iterable[Ranks]) -> dict[int, set[int]]:
    """By rank of these groups, all ranks that groups with common ranks connect with it."""
    joined: dict[int, set[int]] = {}
    for group in groups:
        known = [joined[rank] for rank in group if rank in joined]
        merged = max(known, key=len, default=set())
        for rank in group:
            other = joined.get(rank, {rank})
            # Smaller sets are added to the largest, so that few ranks get another set, and few times.
            if other is not merged:
                merged |= other
                joined.update(dict.fromkeys(other, merged))
    return joined


def _find_stage_bound(stage: list[Block], topology: Topology) -> float:
    """The seconds that a stage takes at least, if ranks that neither hold nor need any of it do nothing."""
    ranks = {rank for block in stage for rank in (*block.holders, *block.receivers)}
    seconds, _ = find_bound(stage, ranks, topology)
    return seconds
