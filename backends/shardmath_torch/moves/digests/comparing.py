"""Replicas and sides compared by all ranks, and the box in which they differ.

1. All ranks have all shares, so all come to the same end, and ask each other for the same boxes.
2. A round of asking is one number for each box and side: the sum of what a rank has in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import ne
from typing import TypeAlias

from shardmath.layouts.algebra.box import Box, full
from shardmath.values.digests.bounds import find_bounds
from shardmath.values.digests.field import PRIME
from shardmath.values.digests.patches import Portion, hull, list_patches, list_portions
from shardmath.values.digests.shares import (
    MAKE_ALIKE,
    Shares,
    Unlike,
    counted_portions,
    find_unlike,
    word_unlike,
)
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.digests.sides import DigestSide, gather_numbers

__all__ = ["bound_sides", "find_odd_replica"]

_Weigher: TypeAlias = Callable[[list[Box]], list[int]]
"""What this rank has in boxes."""


def find_odd_replica(
    party: Party, side: DigestSide, shares: Mapping[str, Shares], fix: str = MAKE_ALIKE
) -> str:
    """What to say of the first tensor whose replicas differ; "" where all are alike. Raises PeerFailure."""
    for name, windows in side.windows.items():
        unlike = find_unlike(windows, shares[name])
        if unlike is not None:
            return word_unlike(name, unlike, _bound_unlike(party, side, name, unlike), fix)
    return ""


def _bound_unlike(party: Party, side: DigestSide, name: str, unlike: Unlike) -> Box:
    """The box in which a replica differs from the first holder's."""
    windows = side.windows[name]
    ends = []
    for holder in (unlike.alike[0], unlike.others[0]):
        own: list[Portion] = []
        if holder.rank == side.rank:
            held = list_portions(windows, side.rank)
            own = [p for p in held if (p.patch, p.window) == (unlike.patch, holder.window)]
        ends.append(_weigh(side, name, own))
    return _bound(party, hull(list_patches(windows)[unlike.patch]), ends)


def bound_sides(party: Party, name: str, sides: Sequence[DigestSide]) -> Box:
    """The box in which two sides of a tensor differ. Raises PeerFailure."""
    ends = []
    for side in sides:
        ends.append(_weigh(side, name, counted_portions(side.windows[name], side.rank)))
    return _bound(party, full(sides[0].windows[name][0].shape), ends)


def _weigh(side: DigestSide, name: str, portions: Sequence[Portion]) -> _Weigher:
    return lambda boxes: side.weigh(name, portions, boxes) if portions else [0] * len(boxes)


def _bound(party: Party, box: Box, ends: Sequence[_Weigher]) -> Box:
    """The smallest box in which what all ranks have on one side differs from what they have on the other."""

    def differ(boxes: list[Box]) -> list[bool]:
        mine = ends[0](boxes) + ends[1](boxes)
        counts = dict.fromkeys(party.ranks, len(mine))
        columns = zip(*gather_numbers(party, mine, counts).values(), strict=True)
        sums = [sum(column) % PRIME for column in columns]
        return list(map(ne, sums[: len(boxes)], sums[len(boxes) :]))

    return find_bounds(box, differ)
