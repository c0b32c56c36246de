"""Facts: layouts and plans as values for JSON, which the page shows.

Numbers are bytes, seconds or elements; texts are those that shardmath prints.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from shardmath.base.errors import ShardError
from shardmath.base.text import plural, show_bytes
from shardmath.display.explorer.reading import read_aloud
from shardmath.display.explorer.spellings import spell
from shardmath.display.pictures.text import LEGEND, show
from shardmath.layouts.holdings import Windows
from shardmath.layouts.layout import Layout
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan
from shardmath.plans.programs.certify import certify, crossing_bytes
from shardmath.plans.programs.scheduling import schedule
from shardmath.plans.transfers import Transfer
from shardmath.plans.uncovered import first_unheld
from shardmath.proofs.verify import verify

__all__ = ["Facts", "cost_facts", "describe_proof", "layout_facts", "plan_facts", "spelling_facts"]

Facts: TypeAlias = dict[str, Any]

MOST_RANKS = 128
"""Ranks of a layout that are listed."""

MOST_TRANSFERS = 1000
"""Transfers that are listed."""

MOST_RANGES = 6
"""Ranges of positions that are listed of a rank and a dimension."""


def layout_facts(
    layout: Layout, rank: int | None = None, most: int = MOST_RANKS, *, spelled: bool = True
) -> Facts:
    """Return facts about a layout: in sentences, in other systems' words, and what each of the first `most` ranks, and
    `rank`, holds. Without `spelled`, other systems' words, which take longest, are left out."""
    listed = list(layout.mesh.ranks[:most])
    if rank in layout.mesh.ranks[most:]:
        listed.append(rank)
    return {
        "text": str(layout),
        "sentences": read_aloud(layout),
        "spellings": spelling_facts(layout) if spelled else [],
        "axes": list(layout.mesh.shape),
        "ranks": [_rank_facts(layout, each) for each in listed],
        "more": layout.mesh.size - len(listed),
    }


def spelling_facts(layout: Layout) -> list[Facts]:
    """Return the layout in other systems' words."""
    return [spelling._asdict() for spelling in spell(layout)]


def _rank_facts(layout: Layout, rank: int) -> Facts:
    """A rank, its coordinates, and what it holds of each dimension."""
    shape = layout.local_shape(rank)
    held = []
    for runs in layout.runs(rank):
        text = str(runs).strip("[]")
        if len(runs.segments) > MOST_RANGES:
            text = f"{plural(runs.segments, 'range')}, from {runs.segments[0][1]}"
        held.append(text)
    return {
        "rank": rank,
        "coordinates": list(layout.mesh.coords(rank).values()),
        "shape": list(shape),
        "held": held,
        "elements": math.prod(shape),
    }


def plan_facts(plan: Plan, rank: int | None = None, most: int | None = MOST_TRANSFERS) -> Facts:
    """Return facts about a plan: its proof, its bytes, and its first `most` transfers (None: all), of `rank` only if it
    is given.

    Raises ShardError if `verify` does.
    """
    verify(plan)
    sent = sum(plan.sent_bytes().values())
    transfers, is_all = _list_transfers(plan, rank, most)
    return {
        "proof": describe_proof(plan),
        "digest": plan.digest,
        "bytes": sent,
        "legend": LEGEND,
        "transfers": [_transfer_facts(transfer) for transfer in transfers],
        "rank": rank,
        "drawn": next(iter(plan.src), ""),
        "all": is_all,
        "busiest": _find_busiest(plan),
    }


def describe_proof(plan: Plan) -> str:
    """Return what `verify` proves about a plan."""
    if plan.in_part and len(plan.src) == 1:
        missing = first_unheld(plan.dst[next(iter(plan.src))])
        what = "what the destination holds arrives exactly once"
        return f"{what}; element {missing} is not held there"
    if plan.in_part:
        tensors = plural(plan.in_part, "tensor")
        return f"what the destination holds arrives exactly once; it does not hold all of {tensors}"
    if _has_partial(plan.dst):
        return "the destination's values together are the tensor, and each arrives exactly once"
    if _has_partial(plan.src):
        return (
            "the destination holds every element, and each value of the source counts exactly once"
        )
    return "the destination holds every element, and each destination rank receives each of its elements once"


def _has_partial(side: Mapping[str, Windows]) -> bool:
    """Whether ranks of a side hold values whose reduction is the tensor."""
    return any(layout.partial for windows in side.values() for layout in windows)


def _find_busiest(plan: Plan) -> str:
    """The rank that sends most, in words."""
    sent = plan.sent_bytes()
    most = max(sent.values(), default=0)
    if not most:
        return "nothing has to move between ranks"
    rank = next(rank for rank, nbytes in sent.items() if nbytes == most)
    return f"rank {rank} sends most: {show_bytes(most)}"


def _list_transfers(plan: Plan, rank: int | None, most: int | None) -> tuple[list[Transfer], bool]:
    """The first transfers, and whether these are all of the plan, or of `rank`."""
    transfers = _transfers_of(plan, rank)
    listed = list(itertools.islice(transfers, most))
    return listed, next(transfers, None) is None


def _transfers_of(plan: Plan, rank: int | None) -> Iterator[Transfer]:
    """All transfers, or those that a rank sends, keeps or receives."""
    if rank is None:
        return plan.transfers()
    received = (transfer for transfer in plan.transfers(dst=rank) if transfer.src_rank != rank)
    return itertools.chain(plan.transfers(src=rank), received)


def _transfer_facts(transfer: Transfer) -> Facts:
    box = [[part.start, part.stop] for part in transfer.global_slices]
    return {
        "tensor": transfer.tensor,
        "src": transfer.src_rank,
        "dst": transfer.dst_rank,
        "box": box,
        "bytes": transfer.nbytes,
        "text": str(transfer),
    }


def cost_facts(plan: Plan, topology: Topology | None) -> Facts:
    """Return what a move of the plan costs on nodes of `topology`: bytes between nodes, and the estimated times of the
    plan and of its schedule, each with a lower bound. Without a topology or a schedule, return only `advice`: what to
    write, or why there is none."""
    if topology is None:
        advice = (
            "write how many ranks a node has, to see what crosses nodes and how long a move takes"
        )
        return {"advice": advice}
    try:
        program = schedule(plan, topology=topology)
    except ShardError as error:
        # A row may be larger than what a rank may have in flight.
        return {"advice": f"no schedule: {error}"}
    return {
        "crossing": crossing_bytes(plan, topology),
        "scheduled_crossing": crossing_bytes(program),
        "topology": str(show(topology)),
        "plan": str(certify(plan, topology)),
        "schedule": str(certify(program)),
        "collectives": sorted({str(each) for each in program.collectives.values()}),
    }
