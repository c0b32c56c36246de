"""Kinds: the textbook operations that fit the boxes of a group's ranks before and after.

A group fits a kind if its members hold before, and after, what the operation takes and gives. Ranks
are looked at in **classes** that hold the same before and the same after, and groups of the same
classes once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shardmath.layouts.algebra.runs import Runs
from shardmath.plans.collectives.spans import NOTHING, Holding, find_divided, tile

__all__ = ["COPIES", "FITS", "Buffer", "Found", "Kind", "Members", "CollectiveSide"]

Kind: TypeAlias = Literal[
    "local", "broadcast", "permute", "all_gather", "all_to_all", "all_reduce", "reduce_scatter"
]

Buffer: TypeAlias = tuple[Runs, ...]
"""A local array: the Runs of each dimension."""
Members: TypeAlias = tuple[int, ...]
"""A group as the classes of its ranks. Groups of the same classes are looked at once."""
Found: TypeAlias = tuple[tuple[int, ...], dict[Members, Members]]
"""The dimensions of a collective, and the senders of each group by their places in it."""


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveSide:
    """The local data of each class of ranks before or after a collective: `held[i]` is the box of elements of class i,
    `buffers[i]` its local array. Ranks of one class hold the same elements.

    Ranks outside the mesh hold `NOTHING`, as do those that hold no position of some dimension.
    """

    held: list[Holding]
    buffers: list[Buffer | None]

    def boxes(self, group: Members) -> list[Holding]:
        """List the boxes (multidimensional slices) of elements that the classes with the numbers in `group` hold. A
        class is all ranks that hold the same elements."""
        return [self.held[member] for member in group]


def _broadcast(
    before: CollectiveSide, after: CollectiveSide, groups: Iterable[Members]
) -> Found | None:
    """One member holds a box, every member gets it."""
    senders: dict[Members, Members] = {}
    for group in groups:
        have = before.boxes(group)
        holders = [i for i, box in enumerate(have) if box != NOTHING]
        if len(holders) > 1:
            return None
        # A box without elements has no holder, and comes from any rank of the source's mesh.
        root = holders[0] if holders else _find_member(before, group)
        if set(after.boxes(group)) != {have[root]}:
            return None
        senders[group] = (root,) * len(group)
    return (), senders


def _find_member(side: CollectiveSide, group: Members) -> int:
    """The place in the group of the first member that is on the side's mesh; 0 if no member is."""
    for i, member in enumerate(group):
        if side.buffers[member] is not None:
            return i
    return 0


def _permute(
    before: CollectiveSide, after: CollectiveSide, groups: Iterable[Members]
) -> Found | None:
    """Every member gets the box that one member held; a member that needs its own box keeps it."""
    senders: dict[Members, Members] = {}
    for group in groups:
        have = before.boxes(group)
        want = after.boxes(group)
        if Counter(have) != Counter(want):
            return None
        senders[group] = _match(have, want)
    # No dimension is gathered or divided.
    return (), senders


def _match(have: list[Holding], want: list[Holding]) -> tuple[int, ...]:
    """By member, the place of the member that sends it its box: its own place if possible."""
    pairs = list(zip(have, want, strict=True))
    # By box, the places of the members that hold it and do not keep it.
    free: dict[Holding, list[int]] = {}
    for place, (held, wanted) in enumerate(pairs):
        if held != wanted:
            free.setdefault(held, []).append(place)
    senders = []
    for place, (held, wanted) in enumerate(pairs):
        sender = place if held == wanted else free[wanted].pop(0)
        senders.append(sender)
    return tuple(senders)


def _all_gather(
    before: CollectiveSide, after: CollectiveSide, groups: Iterable[Members]
) -> Found | None:
    """Members hold shares of a box, every member gets the whole box."""
    dims: set[int] = set()
    for group in groups:
        have = before.boxes(group)
        shared = tile(have)
        if shared is None:
            return None
        if set(after.boxes(group)) != {shared}:
            return None
        dims |= find_divided(have, shared)
    # Without senders: every member sends to all.
    return tuple(sorted(dims)), {}


def _all_to_all(
    before: CollectiveSide, after: CollectiveSide, groups: Iterable[Members]
) -> Found | None:
    """Members share a box along one dimension (gathered), and then along another (scattered)."""
    gathered: set[int] = set()
    scattered: set[int] = set()
    for group in groups:
        have = before.boxes(group)
        want = after.boxes(group)
        shared = tile(have)
        if shared is None or tile(want) != shared:
            return None
        gathered |= find_divided(have, shared)
        scattered |= find_divided(want, shared)
    if len(gathered) != 1 or len(scattered) != 1:
        return None
    if gathered == scattered:
        return None
    return (*gathered, *scattered), {}


def _all_reduce(
    before: CollectiveSide, after: CollectiveSide, groups: Iterable[Members]
) -> Found | None:
    """Members hold addends of a box, every member gets their reduction."""
    for group in groups:
        if before.boxes(group) != after.boxes(group):
            return None
    return (), {}  # no dimension is divided, and no member sends for others


def _reduce_scatter(
    before: CollectiveSide, after: CollectiveSide, groups: Iterable[Members]
) -> Found | None:
    """Members hold addends of a box, every member gets a share of their reduction.

    That is the transpose of an all_gather.
    """
    found = _all_gather(after, before, groups)
    if found is None:
        return None
    dims, _ = found
    # If no dimension is divided, one member gets everything, which is a reduction to one rank.
    return found if dims else None


FITS: dict[Kind, Callable[[CollectiveSide, CollectiveSide, Iterable[Members]], Found | None]] = {
    "broadcast": _broadcast,
    "permute": _permute,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
}
COPIES: tuple[Kind, ...] = ("broadcast", "permute", "all_gather", "all_to_all")
"""The kinds that copy, in the order in which they are tried."""
