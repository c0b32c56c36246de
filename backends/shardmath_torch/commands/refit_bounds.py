"""Bounds: bytes that no plan which sends every piece straight from a holder to a receiver can go below.

1. A rank **receives** at least what it needs and does not hold.
2. A rank **sends** at least what is asked of it alone: the bytes that others need and only it holds.
3. A set of ranks sends at least what only its members hold; so its busiest member sends at least that divided by the
   size of the set. `busiest` takes the highest of these over the sets of ranks that hold the same piece, and over all
   of them together.

Nothing here looks at a plan: only at layouts, whose ranks' pieces are products of runs, identical or disjoint.
Copies that receivers pass on to each other could go below 2 and 3, never below 1.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from shardmath import Layout
from shardmath.algebra.runs import Runs, compose, invert
from shardmath.base.memo import memo

__all__ = ["Bounds", "bounds"]

Held: TypeAlias = tuple[Runs, ...]
Layouts: TypeAlias = Mapping[str, Layout]
Demand: TypeAlias = dict[frozenset[int], int]


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lower bounds in bytes: received and sent by rank, the busiest sender's, and the ranks that force it."""

    received: dict[int, int]
    sent: dict[int, int]
    busiest: int
    forced_by: frozenset[int]


def bounds(src: Layouts, dst: Layouts) -> Bounds:
    """The bounds of moving every tensor from its layout in `src` to its layout in `dst`, none of them Partial."""
    received: Counter[int] = Counter()
    demand: Counter[frozenset[int]] = Counter()
    pairs = Counter((src[name], dst[name]) for name in src)
    for (a, b), count in pairs.items():
        for rank, holders, nbytes in _asked(a, b):
            received[rank] += nbytes * count
            demand[holders] += nbytes * count
    sources = frozenset(rank for layout in src.values() for rank in layout.mesh.ranks)
    ranks = sources | {rank for layout in dst.values() for rank in layout.mesh.ranks}
    busiest, forced_by = _busiest(demand, sources)
    sent = {rank: demand[frozenset({rank})] for rank in sorted(ranks)}
    return Bounds({rank: received[rank] for rank in sorted(ranks)}, sent, busiest, forced_by)


def _asked(src: Layout, dst: Layout) -> list[tuple[int, frozenset[int], int]]:
    """(receiver, all holders, bytes) of each piece of `src` that a rank of `dst` needs and does not hold."""
    return [
        (rank, holders, _common(piece, dst.runs(rank), src.shape) * src.itemsize)
        for piece, holders in _pieces(src).items()
        for rank in dst.mesh.ranks
        if rank not in holders
    ]


def _pieces(layout: Layout) -> dict[Held, frozenset[int]]:
    """Each piece that ranks hold, and who holds it."""
    out: dict[Held, set[int]] = {}
    for rank in layout.mesh.ranks:
        out.setdefault(tuple(map(_sorted, layout.runs(rank), layout.shape)), set()).add(rank)
    return {piece: frozenset(holders) for piece, holders in out.items()}


def _sorted(runs: Runs, n: int) -> Runs:
    """The same positions in global order: equal for ranks that hold the same in another order."""
    return Runs(((start, start, length) for _, start, length in runs.segments), n)


@memo()
def _common(a: Held, b: Held, shape: tuple[int, ...]) -> int:
    """Elements in both."""
    return math.prod(compose(p, invert(q, n)).size for p, q, n in zip(a, b, shape, strict=True))


def _busiest(
    demand: Mapping[frozenset[int], int], sources: frozenset[int]
) -> tuple[int, frozenset[int]]:
    """The highest load that some set of ranks forces on a member, and that set."""
    loads = {members: _forced(demand, members) for members in [*demand, sources]}
    members = max(loads, key=lambda members: (loads[members], -len(members)))
    return loads[members], members


def _forced(demand: Mapping[frozenset[int], int], members: frozenset[int]) -> int:
    return -(
        -sum(nbytes for holders, nbytes in demand.items() if holders <= members) // len(members)
    )
