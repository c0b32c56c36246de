"""Pace: a plan as the program that relays nothing, its transfers cut into messages.

1. All transfers from one rank to another, in their common order, are one **stream**. A stream is
   cut into messages of at most `Pace.message_bytes`: big transfers are cut by whole rows, small
   ones joined. Both ends cut alike, because a cut depends on nothing but the stream and the pace,
   and the pace is agreed. So a rank needs its own transfers alone, where a schedule looks at all.
2. Message k of every stream is of **slot** k.
3. Many peers or a small limit: streams take **turns**. In one turn go the streams of
   `Pace.peers_at_once` neighbouring values of (receiver - sender) modulo the number of ranks, so a
   rank has at most so many messages each way in hand, however many ranks there are, and never more
   than `MOST_OPS` both ways together.
4. A rank's own copies are a stream like any other that never meets the wire.
5. Where addends would come out of order, `Pace.by_addend` gives each a **phase** of its own.

>>> pace = set_pace((0, 1, 2), peers=2, max_inflight_bytes=1 << 20, by_addend=False)
>>> pace.message_bytes, pace.peers_at_once
(262144, 3)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardmath.base.errors import ExchangeError
from shardmath.plans.plan import Transfer
from shardmath.plans.programs.messages import (
    ALIGNMENT,
    MOST_OPS,
    Message,
    align,
    itemsize_of,
    make_message,
)

__all__ = ["Pace", "cut_transfers", "most_peers", "set_pace"]

LEAST_MESSAGE = 1 << 16
"""Bytes; rather than cut streams finer than this, let fewer of them go at once."""


class Pace(NamedTuple):
    """What all ranks agree on before they cut their streams."""

    ranks: tuple[int, ...]
    message_bytes: int
    peers_at_once: int
    by_addend: bool

    def is_like(self, other: Pace) -> bool:
        """Whether streams of ranks that are in both are cut alike, and go in the same steps."""
        if self == other:
            return True
        # Where all go in one turn, it does not matter who the other ranks are.
        turns = self.peers_at_once < len(self.ranks), other.peers_at_once < len(other.ranks)
        here = self.message_bytes, self.by_addend
        return not any(turns) and here == (other.message_bytes, other.by_addend)


def most_peers(transfers: Iterable[Transfer]) -> int:
    """The larger of how many ranks these transfers of one rank go to, and come from."""
    pairs = {(t.src_rank, t.dst_rank) for t in transfers}
    out_of: Counter[int] = Counter()
    into: Counter[int] = Counter()
    for src, dst in pairs:
        if src != dst:
            out_of[src] += 1
            into[dst] += 1
    counts = [*out_of.values(), *into.values()]
    return max(counts, default=0)


def set_pace(
    ranks: tuple[int, ...], *, peers: int, max_inflight_bytes: int, by_addend: bool
) -> Pace:
    """The pace at which no rank stages more than `max_inflight_bytes`.

    `ranks` are the plan's; `peers` is the largest `most_peers` of any rank. Raises ExchangeError
    for a limit that has no room for one element each way.
    """
    wanted = max(1, peers)
    # Half of the room is for each way, and half of the messages.
    most_at_once = max_inflight_bytes // (2 * LEAST_MESSAGE)
    at_once = min(wanted, MOST_OPS // 2, max(1, most_at_once))
    message_bytes = max_inflight_bytes // (2 * at_once)
    message_bytes -= message_bytes % ALIGNMENT
    if message_bytes < ALIGNMENT:
        what = f"has no room for a message of {ALIGNMENT} bytes each way"
        raise ExchangeError(
            f"max_inflight_bytes={max_inflight_bytes} {what}; pass {2 * ALIGNMENT} or more"
        )
    # Where all peers have room there is one turn, however far ranks are from each other.
    peers_at_once = len(ranks) if at_once == wanted else at_once
    return Pace(ranks, message_bytes, peers_at_once, by_addend)


def cut_transfers(transfers: Iterable[Transfer], pace: Pace) -> list[Message]:
    """The messages that carry these transfers, in order of step, sender and receiver.

    Any union of whole streams may be given; the messages of a stream depend on that stream alone.
    """
    place = {rank: i for i, rank in enumerate(pace.ranks)}
    count = len(place)
    streams = _group_by_stream(transfers, pace)
    messages: list[Message] = []
    for (phase, src, dst), stream in streams.items():
        ahead = place[dst] - place[src]
        distance = ahead % count
        turn = distance // pace.peers_at_once
        cut = _cut(stream, pace.message_bytes)
        for slot, pieces in enumerate(cut):
            step = phase, slot, turn
            message = make_message(step, src, dst, 1, pieces)
            messages.append(message)
    messages.sort(key=lambda m: m[:3])
    return messages


_Stream = tuple[int, int, int]
"""A stream by its phase, sender and receiver."""


def _group_by_stream(transfers: Iterable[Transfer], pace: Pace) -> dict[_Stream, list[Transfer]]:
    """The transfers of each stream, in their order."""
    streams: dict[_Stream, list[Transfer]] = {}
    for t in transfers:
        phase = t.addend if pace.by_addend else 0
        key = phase, t.src_rank, t.dst_rank
        streams.setdefault(key, []).append(t)
    return streams


def _cut(stream: list[Transfer], limit: int) -> Iterator[list[Transfer]]:
    """The stream as lists of pieces, each list of at most `limit` bytes."""
    pieces: list[Transfer] = []
    end = 0
    left = stream[::-1]  # a stack: the next transfer is the last
    while left:
        t = left.pop()
        start = align(end, itemsize_of(t))
        # A row is cut only where even an empty message has no room for it.
        head, tail = _split(t, limit - start, within_rows=not pieces)
        left.extend(reversed(tail))
        if head is None:
            yield pieces
            pieces, end = [], 0
        else:
            pieces.append(head)
            end = start + head.nbytes
    if pieces:
        yield pieces


def _split(t: Transfer, room: int, *, within_rows: bool) -> tuple[Transfer | None, list[Transfer]]:
    """What of `t` fits into `room` bytes, None for nothing, and the rest in order.

    Cuts between rows of the outermost dimension longer than 1; inside a row only where
    `within_rows`.
    """
    if t.nbytes <= room:
        return t, []
    dim = _find_rows(t)
    if room <= 0 or dim is None:
        return None, [t]
    n = t.shape[dim]
    nbytes_of_row = t.nbytes // n
    rows = room // nbytes_of_row
    if rows:
        head = _narrow(t, dim, 0, rows)
        tail = _narrow(t, dim, rows, n)
        return head, [tail]
    if not within_rows:
        return None, [t]
    row = _narrow(t, dim, 0, 1)
    others = _narrow(t, dim, 1, n)
    first, rest = _split(row, room, within_rows=True)
    return first, [*rest, others]


def _find_rows(t: Transfer) -> int | None:
    """The outermost dimension longer than 1, None if there is not any."""
    for dim, n in enumerate(t.shape):
        if n != 1:
            return dim
    return None


def _narrow(t: Transfer, dim: int, lo: int, hi: int) -> Transfer:
    """The rows lo..hi-1 of the transfer along `dim`."""
    count = hi - lo
    nbytes_of_row = t.nbytes // t.shape[dim]
    shape = list(t.shape)
    shape[dim] = count
    return t._replace(
        src_slices=_narrow_slices(t.src_slices, dim, lo, hi),
        dst_slices=_narrow_slices(t.dst_slices, dim, lo, hi),
        global_slices=_narrow_slices(t.global_slices, dim, lo, hi),
        shape=tuple(shape),
        nbytes=nbytes_of_row * count,
    )


def _narrow_slices(slices: tuple[slice, ...], dim: int, lo: int, hi: int) -> tuple[slice, ...]:
    """The slices, that along `dim` narrowed to its positions lo..hi-1."""
    start = slices[dim].start
    narrow = slice(start + lo, start + hi)
    return (*slices[:dim], narrow, *slices[dim + 1 :])
