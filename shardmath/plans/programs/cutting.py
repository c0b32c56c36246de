"""Pace: a plan as a program without relays, its transfers cut into messages.

1. All transfers from one rank to another, in their common order, are one **stream**. A stream is
   cut into messages of at most `Pace.message_bytes`: big transfers are cut by whole rows, small
   ones joined. Both ends cut at the same places, because a cut depends only on the stream and the
   pace, and ranks agree on the pace. So a rank needs only its own transfers; a schedule needs all.
2. Message k of every stream is in **slot** k.
3. With many peers or a small limit, streams take **turns**. One turn has the streams of
   `Pace.peers_at_once` neighboring values of (receiver - sender) modulo the number of ranks, so a
   rank has at most that many messages in each direction in flight, however many ranks there are, and
   at most `MOST_OPS` in both directions together.
4. A rank's local copies are a stream too, which is never sent.
5. If addends would arrive out of order, `Pace.by_addend` gives each addend its own **phase**.

>>> pace = set_pace((0, 1, 2), peers=2, max_inflight_bytes=1 << 20, by_addend=False)
>>> pace.message_bytes, pace.peers_at_once
(262144, 3)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardmath.base.errors import ExchangeError
from shardmath.plans.programs.messages import (
    ALIGNMENT,
    MOST_OPS,
    Message,
    make_message,
    start_after,
)
from shardmath.plans.transfers import Transfer

__all__ = ["Pace", "cut_transfers", "most_peers", "set_pace"]

LEAST_MESSAGE = 1 << 16
"""Bytes of a message: instead of cutting streams into smaller messages, fewer streams go at once."""


class Pace(NamedTuple):
    """The limits that all ranks keep when they cut transfers into messages: bytes per message, and peers at once."""

    ranks: tuple[int, ...]
    message_bytes: int
    peers_at_once: int
    by_addend: bool

    def is_like(self, other: Pace) -> bool:
        """Return whether this Pace and `other` are sure to cut transfers between two ranks into the same messages. Only
        ranks that both `self.ranks` and `other.ranks` contain are considered."""
        if self == other:
            return True
        # If all streams go in one turn, the other ranks make no difference.
        turns = self.peers_at_once < len(self.ranks), other.peers_at_once < len(other.ranks)
        cut = self.message_bytes, self.by_addend
        return not any(turns) and cut == (other.message_bytes, other.by_addend)


def most_peers(transfers: Iterable[Transfer]) -> int:
    """Count the other ranks that one rank sends to, and those that it receives from, and return the larger number.
    `transfers` are the transfers of that rank."""
    pairs = {(t.src_rank, t.dst_rank) for t in transfers}
    receivers_of: Counter[int] = Counter()
    senders_to: Counter[int] = Counter()
    for src, dst in pairs:
        if src != dst:
            receivers_of[src] += 1
            senders_to[dst] += 1
    # The other ranks' counts are 1, as all transfers are of one rank.
    counts = [*receivers_of.values(), *senders_to.values()]
    return max(counts, default=0)


def set_pace(
    ranks: tuple[int, ...], *, peers: int, max_inflight_bytes: int, by_addend: bool
) -> Pace:
    """Choose a Pace (message size, and number of peers at once) with which no rank has more than `max_inflight_bytes`
    in flight. `peers` is the largest number of peers of any rank; with `by_addend`, partial values are sent one after
    the other.

    `ranks` are the plan's ranks. Raises ExchangeError
    if the limit has no room for a message of `ALIGNMENT` bytes in each direction.
    """
    wanted = max(1, peers)
    # Each direction has half of the bytes, and half of the messages.
    most_at_once = max_inflight_bytes // (2 * LEAST_MESSAGE)
    at_once = min(wanted, MOST_OPS // 2, max(1, most_at_once))
    message_bytes = max_inflight_bytes // (2 * at_once)
    message_bytes -= message_bytes % ALIGNMENT
    if message_bytes < ALIGNMENT:
        what = f"has no room for a message of {ALIGNMENT} bytes each way"
        raise ExchangeError(
            f"max_inflight_bytes={max_inflight_bytes} {what}; pass {2 * ALIGNMENT} or more"
        )
    # If all peers have room there is one turn, whatever the distances between ranks.
    peers_at_once = len(ranks) if at_once == wanted else at_once
    return Pace(ranks, message_bytes, peers_at_once, by_addend)


def cut_transfers(transfers: Iterable[Transfer], pace: Pace) -> list[Message]:
    """Cut `transfers` into Messages by the limits of `pace`, and list them in the order in which ranks exchange them.
    Messages that are exchanged at the same time are sorted by sender, then by receiver.

    Rounds are in the order of (phase, slot, turn), as in Step. Any union of whole streams may be given; the messages
    of a stream depend on that stream alone.
    """
    place = {rank: i for i, rank in enumerate(pace.ranks)}
    count = len(place)
    streams = _group_by_stream(transfers, pace)
    messages: list[Message] = []
    for (phase, src, dst), stream in streams.items():
        distance = (place[dst] - place[src]) % count
        turn = distance // pace.peers_at_once
        for slot, pieces in enumerate(_cut_stream(stream, pace.message_bytes)):
            step = phase, slot, turn
            message = make_message(step, src, dst, leg=1, pieces=pieces)
            messages.append(message)
    messages.sort(key=lambda m: m[:3])  # step, sender, receiver
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


def _cut_stream(stream: list[Transfer], limit: int) -> Iterator[list[Transfer]]:
    """The stream as lists of pieces, each list of at most `limit` bytes."""
    if sum(t.nbytes for t in stream) + ALIGNMENT * len(stream) <= limit:
        yield stream  # even if each piece is aligned
        return
    pieces: list[Transfer] = []
    end = 0
    uncut = stream[::-1]  # a stack: the next transfer is the last
    while uncut:
        t = uncut.pop()
        start = start_after(end, t)
        if t.nbytes <= limit - start:
            pieces.append(t)
            end = start + t.nbytes
            continue
        # A row is cut only if even an empty message has no room for it.
        head, tail = _split(t, limit - start, within_rows=not pieces)
        uncut.extend(reversed(tail))
        if head is None:
            yield pieces
            pieces, end = [], 0
        else:
            pieces.append(head)
            end = start + head.nbytes
    if pieces:
        yield pieces


def _split(t: Transfer, room: int, *, within_rows: bool) -> tuple[Transfer | None, list[Transfer]]:
    """The beginning of `t` that fits into `room` bytes (None if nothing fits), and the rest in order.

    Cuts between rows of the outermost dimension longer than 1; inside a row only if `within_rows`.
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
    other_rows = _narrow(t, dim, 1, n)
    row_head, row_tail = _split(row, room, within_rows=True)
    return row_head, [*row_tail, other_rows]


def _find_rows(t: Transfer) -> int | None:
    """The outermost dimension longer than 1; None if there is none."""
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
    """The slices, with the slice of `dim` narrowed to its positions lo..hi-1."""
    start = slices[dim].start
    narrow = slice(start + lo, start + hi)
    return (*slices[:dim], narrow, *slices[dim + 1 :])
