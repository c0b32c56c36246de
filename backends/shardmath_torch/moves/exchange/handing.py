"""Handing: places in staging for messages that a rank is handed in one slot, and sends on in the next.

1. The two messages have equal pieces, so what was received is sent from where it lies.
2. A round's other messages take other bytes. In even slots, what is handed to the rank goes at the begin of staging,
   and what it was handed before lies at the end; in odd slots it is the other way round. So staging is as large as
   the fullest round needs.

>>> from shardmath.plans.programs.messages import Round, make_message
>>> from shardmath.plans.transfers import Transfer
>>> from shardmath_torch.moves.exchange.endpoints import bind
>>> whole = (slice(0, 4),)
>>> piece = Transfer("w", 0, 9, "copy", "w", whole, "w", whole, (4,), 16, whole, 0)
>>> handed = make_message((0, 0, 0), 0, 1, leg=4, pieces=[piece])
>>> passed = make_message((0, 1, 0), 1, 9, leg=5, pieces=[piece])
>>> first, second = keep_handed(bind([Round((), (handed,), ()), Round((passed,), (), ())], {}, {}))
>>> first.receives[0].start, second.sends[0].start
(0, 0)
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from shardmath.plans.programs.messages import Message, align
from shardmath_torch.moves.exchange.endpoints import (
    BoundRound,
    Endpoint,
    count_staging_bytes,
)

__all__ = ["keep_handed"]

_Kept: TypeAlias = defaultdict[tuple[int, int], deque[int]]
"""Where messages lie in staging, in their order, by the ranks that have the pieces and that need them."""


def keep_handed(rounds: Sequence[BoundRound]) -> tuple[BoundRound, ...]:
    """Return `rounds` with places in staging where messages that a rank is handed in one slot stay until it sends them
    on in the next. Without such messages, the rounds are returned unchanged."""
    if not any(not end.views for bound in rounds for end in bound.receives):
        return tuple(rounds)
    size = align(count_staging_bytes(rounds))
    kept: _Kept = defaultdict(deque)
    return tuple(_place_round(bound, size, kept) for bound in rounds)


def _place_round(bound: BoundRound, size: int, kept: _Kept) -> BoundRound:
    """The round with places in a block of `size` bytes; `kept` loses what the rank sends on, and gets what arrives."""
    arriving = _sum_bytes(bound.receives)
    leaving = _sum_bytes(bound.sends)
    _, slot, _ = bound.step
    is_odd = slot % 2
    handed_at = _count_from(size - arriving if is_odd else 0)
    other_at = _count_from(leaving if is_odd else arriving)
    sends = []
    for end in bound.sends:
        # Sent from where it arrived; before this round's messages are noted, which may have the same ends.
        start = other_at(end) if end.views else kept[_find_ends(end.message)].popleft()
        sends.append(end._replace(start=start))
    receives = []
    for end in bound.receives:
        start = other_at(end) if end.views else handed_at(end)
        receives.append(end._replace(start=start))
        if not end.views:
            kept[_find_ends(end.message)].append(start)
    return bound._replace(sends=tuple(sends), receives=tuple(receives))


def _sum_bytes(ends: Sequence[Endpoint]) -> int:
    """The bytes of staging of messages that stay there."""
    return sum(align(end.message.nbytes) for end in ends if not end.views)


def _count_from(start: int) -> Callable[[Endpoint], int]:
    """A function that returns the place of each message in staging, one after the other from byte `start` on."""
    next_start = start

    def place(end: Endpoint) -> int:
        nonlocal next_start
        begin = next_start
        if not end.contiguous:
            next_start += align(end.message.nbytes)
        return begin

    return place


def _find_ends(message: Message) -> tuple[int, int]:
    """The rank that has the pieces of the message, and the one that needs them."""
    first = message.pieces[0]
    return first.src_rank, first.dst_rank
