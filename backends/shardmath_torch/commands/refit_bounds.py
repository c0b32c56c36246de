"""Bounds: lower bounds on the bytes of any plan that sends every piece directly from a holder to a receiver.

1. A rank **receives** at least what it needs and does not hold.
2. A rank **sends** at least the bytes that others need and only it holds.
3. A set of ranks sends at least what only its members hold; so its busiest member sends at least
   that divided by the size of the set. `busiest` is the highest of these over all sets
   (`flows.flow.find_levels`): some choice of senders reaches it.

The bounds depend only on layouts, whose ranks' pieces are products of runs, identical or disjoint.
If receivers relay copies to each other, they could go below 2 and 3, never below 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from shardmath import Layout
from shardmath.base.memo import memo
from shardmath.layouts.algebra.runs import Runs, compose, invert
from shardmath.plans.flows.flow import find_levels

__all__ = ["Bounds", "find_bounds"]

Held: TypeAlias = tuple[Runs, ...]
Layouts: TypeAlias = Mapping[str, Layout]
Holders: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds on the bytes that each rank receives (`received`) and sends (`sent`) in a move in which no rank
    forwards bytes for others. At least one of the ranks `forced_by` has to send `busiest` bytes or more.

    Only the ranks `forced_by` hold certain bytes that others need.
    """

    received: dict[int, int]
    sent: dict[int, int]
    busiest: int
    forced_by: frozenset[int]


def find_bounds(src: Layouts, dst: Layouts) -> Bounds:
    """Return lower bounds on the bytes that ranks receive and send when all tensors move from the layouts `src` to the
    layouts `dst` (both by name), and no rank forwards bytes for others. No layout may be Partial."""
    received, demand_by_holders = _sum_demands(src, dst)
    senders = _list_ranks(src)
    ranks = sorted({*senders, *_list_ranks(dst)})
    # No bytes that any sender could send, so that every sender is in one of the levels (ranks of equal load).
    demand_by_holders[senders] += 0
    highest = find_levels(list(demand_by_holders.values()), list(demand_by_holders))[0]
    return Bounds(
        received={rank: received[rank] for rank in ranks},
        # What only this rank holds: the holders are a tuple of one.
        sent={rank: demand_by_holders[rank,] for rank in ranks},
        busiest=-(-highest.nbytes // len(highest.ranks)),  # rounded up
        forced_by=frozenset(highest.ranks),
    )


def _sum_demands(src: Layouts, dst: Layouts) -> tuple[Counter[int], Counter[Holders]]:
    """Bytes that receivers need of all tensors: by receiver, and by the set of their holders."""
    received: Counter[int] = Counter()
    demand: Counter[Holders] = Counter()
    # Tensors of a model often have equal layouts, which are compared once.
    pairs = Counter((src[name], dst[name]) for name in src)
    for (before, after), count in pairs.items():
        for rank, holders, nbytes in _list_demands(before, after):  # of one tensor
            received[rank] += nbytes * count
            demand[holders] += nbytes * count
    return received, demand


def _list_ranks(layouts: Layouts) -> Holders:
    """All ranks of the layouts, in order."""
    ranks: set[int] = set()
    for layout in layouts.values():
        ranks.update(layout.mesh.ranks)
    return tuple(sorted(ranks))


def _list_demands(src: Layout, dst: Layout) -> Iterator[tuple[int, Holders, int]]:
    """(receiver, all holders, bytes) of each piece of `src` that a rank of `dst` needs and does not hold."""
    for piece, holders in _group_holders(src).items():
        for rank in dst.mesh.ranks:
            if rank not in holders:
                common = _count_common(piece, dst.runs(rank), src.shape)
                yield rank, holders, common * src.itemsize


def _group_holders(layout: Layout) -> dict[Held, Holders]:
    """Each piece that ranks hold, and its holders."""
    found: dict[Held, set[int]] = {}
    for rank in layout.mesh.ranks:
        pairs = zip(layout.runs(rank), layout.shape, strict=True)
        piece = tuple(_sort_runs(runs, n) for runs, n in pairs)
        found.setdefault(piece, set()).add(rank)
    return {piece: tuple(sorted(holders)) for piece, holders in found.items()}


def _sort_runs(runs: Runs, n: int) -> Runs:
    """The runs in global order, so that they are equal for ranks with the same positions in another order."""
    # Each local start becomes the global one.
    segments = [(start, start, length) for _, start, length in runs.segments]
    return Runs(segments, n)


@memo()
def _count_common(a: Held, b: Held, shape: tuple[int, ...]) -> int:
    """The number of elements in both pieces."""
    sizes = []
    for p, q, n in zip(a, b, shape, strict=True):
        both = compose(p, invert(q, n))  # p's positions as places in q: only those that q has
        sizes.append(both.size)
    return math.prod(sizes)
