"""Comparing: replicas and sides compared by all ranks, and the box in which they differ.

1. All ranks have all shares (weighted sums of elements' bits), so all find the same difference, and weigh the same
   boxes.
2. In each round of narrowing the box, a rank sends one number per box and side: its share of the box.
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
"""Gives this rank's share of each box."""


def find_odd_replica(
    party: Party, side: DigestSide, shares: Mapping[str, Shares], fix: str = MAKE_ALIKE
) -> str:
    """Return the error text, with the advice `fix`, for the first tensor in `side` (the tensors at the source, or at
    the destination, of a move) whose replicas differ; "" if none differ. `shares` has all ranks' checksums of parts of
    tensors: name -> rank -> list.

    `party` is this rank as a member of the process group. Raises PeerFailure if a rank fails or does not answer in
    time.
    """
    for name, windows in side.windows.items():
        unlike = find_unlike(windows, shares[name])
        if unlike is not None:
            return word_unlike(name, unlike, _bound_unlike(party, side, name, unlike), fix)
    return ""


def _bound_unlike(party: Party, side: DigestSide, name: str, unlike: Unlike) -> Box:
    """The box in which a replica differs from the first holder's."""
    windows = side.windows[name]
    weighers = []
    for holder in (unlike.alike[0], unlike.others[0]):
        # Only the holder weighs its replica; other ranks' shares are 0.
        replica: list[Portion] = []
        if holder.rank == side.rank:
            key = unlike.patch, holder.window
            portions = list_portions(windows, side.rank)
            replica = [portion for portion in portions if (portion.patch, portion.window) == key]
        weighers.append(_make_weigher(side, name, replica))
    return _bound(party, hull(list_patches(windows)[unlike.patch]), weighers)


def bound_sides(party: Party, name: str, sides: Sequence[DigestSide]) -> Box:
    """Return the smallest box (index range per dimension) that contains all elements of tensor `name` that differ
    between the source and the destination of a move, which are given as `sides`. `party` is this rank as a member of
    the process group.

    Raises PeerFailure if a rank fails or does not answer in time.
    """
    weighers = []
    for side in sides:
        portions = counted_portions(side.windows[name], side.rank)
        weighers.append(_make_weigher(side, name, portions))
    return _bound(party, full(sides[0].windows[name][0].shape), weighers)


def _make_weigher(side: DigestSide, name: str, portions: Sequence[Portion]) -> _Weigher:
    return lambda boxes: side.weigh(name, portions, boxes) if portions else [0] * len(boxes)


def _bound(party: Party, box: Box, weighers: Sequence[_Weigher]) -> Box:
    """The smallest box in which all ranks' sum by the first weigher differs from their sum by the second."""

    def differ(boxes: list[Box]) -> list[bool]:
        first, second = weighers
        mine = first(boxes) + second(boxes)
        counts = dict.fromkeys(party.ranks, len(mine))
        columns = zip(*gather_numbers(party, mine, counts).values(), strict=True)
        sums = [sum(column) % PRIME for column in columns]
        # The first half is by the first weigher, in the order of boxes.
        return list(map(ne, sums[: len(boxes)], sums[len(boxes) :]))

    return find_bounds(box, differ)
