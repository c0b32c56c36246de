"""Transfers -> the messages that a transport sends: pure Python, no torch.

1. All transfers from one rank to another, in their common order, are one **stream**. A stream is
   cut into messages of at most `Pace.message_bytes`: big transfers are cut by whole rows, small
   ones joined. Both ends cut alike, because a cut depends on nothing but the stream and the pace,
   and the pace is agreed.
2. Message k of every stream belongs to **round** k. Every rank walks its rounds in one order, and
   posts all of a round before it waits: the earliest round in which anybody waits has all of its
   messages posted, so there is no deadlock.
3. Many peers or a small limit: streams take **turns**, (receiver - sender) modulo the number of
   ranks; only `Pace.turns` go at once, so a rank has at most so many messages each way in hand,
   however many ranks there are.
4. A rank's own copies are a stream like any other that never meets the wire.
5. Pieces that are folded into one element (a reduction) must come in order of addend.
   `keeps_fold_order` says whether the rounds do so by themselves; where not, `Pace.by_addend` sends
   one addend after the other.
6. A program's messages and steps are its own (`scheduled`): both ends have them from the same
   value, and its phases bring addends in order. What is relayed leaves the sender's destination,
   where an earlier round has put it.

>>> pace = set_pace((0, 1, 2), peers=2, max_inflight_bytes=1 << 20, by_addend=False)
>>> pace.message_bytes, pace.turns
(262144, 3)
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

from shardmath.algebra.box import Box, from_slices
from shardmath.base.errors import ExchangeError
from shardmath.plans.plan import Transfer
from shardmath.programs.program import Program

__all__ = [
    "Message",
    "Pace",
    "Round",
    "aligned",
    "keeps_fold_order",
    "messages",
    "most_peers",
    "rounds",
    "scheduled",
    "set_pace",
    "staging_bytes",
]

ALIGNMENT = 16
"""Bytes; the largest element of any type, so that a message may begin with any of them."""

LEAST_MESSAGE = 1 << 16
"""Bytes; rather than cut streams finer than this, let fewer of them go at once."""


Step: TypeAlias = tuple[int, int, int]
"""When a message goes: (phase of an addend, window of turns, number in its stream); a program's
(phase, slot, turn)."""


class Pace(NamedTuple):
    """What all ranks agree on before they cut their streams."""

    ranks: tuple[int, ...]
    message_bytes: int
    turns: int
    by_addend: bool


class Message(NamedTuple):
    """What one rank sends another in one go: pieces one after the other, each at its place in
    bytes.

    Pieces are transfers cut to size. Where `relayed`, the sender reads them from its destination
    tensors.
    """

    step: Step
    src_rank: int
    dst_rank: int
    pieces: tuple[Transfer, ...]
    starts: tuple[int, ...]
    nbytes: int
    relayed: bool = False


class Round(NamedTuple):
    """One rank's messages of one step; `keeps` stay on the rank."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    keeps: tuple[Message, ...]


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


def most_peers(transfers: Iterable[Transfer]) -> int:
    """The larger of how many ranks these transfers of one rank go to, and come from."""
    pairs = {(t.src_rank, t.dst_rank) for t in transfers if t.nbytes and t.src_rank != t.dst_rank}
    out_of = Counter(src for src, _ in pairs)
    into = Counter(dst for _, dst in pairs)
    return max([*out_of.values(), *into.values()], default=0)


def set_pace(
    ranks: tuple[int, ...], *, peers: int, max_inflight_bytes: int, by_addend: bool
) -> Pace:
    """The pace at which no rank stages more than `max_inflight_bytes`.

    `ranks` are the plan's; `peers` is the largest `most_peers` of any rank.
    Raises ExchangeError for a limit that has no room for one element each way.
    """
    wanted = max(1, peers)
    # Half of the room is for each way.
    most_at_once = max_inflight_bytes // (2 * LEAST_MESSAGE)
    at_once = min(wanted, max(1, most_at_once))
    message_bytes = max_inflight_bytes // (2 * at_once)
    message_bytes -= message_bytes % ALIGNMENT
    if message_bytes < ALIGNMENT:
        what = f"has no room for a message of {ALIGNMENT} bytes each way"
        raise ExchangeError(
            f"max_inflight_bytes={max_inflight_bytes} {what}; pass {2 * ALIGNMENT} or more"
        )
    turns = len(ranks) if at_once == wanted else at_once
    return Pace(ranks, message_bytes, turns, by_addend)


def messages(transfers: Iterable[Transfer], pace: Pace) -> tuple[Message, ...]:
    """The messages that carry these transfers, in order of step, sender and receiver.

    Any union of whole streams may be given; the messages of a stream depend on that stream alone.
    """
    place = {rank: i for i, rank in enumerate(pace.ranks)}
    out: list[Message] = []
    for (phase, src, dst), stream in _group_by_stream(transfers, pace).items():
        turn = (place[dst] - place[src]) % len(place)
        window = turn // pace.turns
        for k, pieces in enumerate(_cut(stream, pace.message_bytes)):
            step = phase, window, k
            out.append(_make_message(step, src, dst, pieces))
    return tuple(sorted(out, key=lambda m: m[:3]))


def _group_by_stream(
    transfers: Iterable[Transfer], pace: Pace
) -> dict[tuple[int, int, int], list[Transfer]]:
    """The transfers that are not empty, by phase, sender and receiver."""
    streams: dict[tuple[int, int, int], list[Transfer]] = {}
    for t in transfers:
        if t.nbytes:
            phase = t.addend if pace.by_addend else 0
            key = phase, t.src_rank, t.dst_rank
            streams.setdefault(key, []).append(t)
    return streams


def scheduled(prog: Program, rank: int) -> tuple[Message, ...]:
    """The program's messages from, to and on `rank`, in order of step and peer, and of leg where
    these are the same.

    Pieces with large elements come first, so that no byte of a message is padding.
    """
    out = []
    for one in prog.for_rank(rank):
        for m in one.messages:
            src = m.peer if m.direction == "receive" else rank
            dst = m.peer if m.direction == "send" else rank
            some = [t for t in m.pieces if t.nbytes]
            some.sort(key=_itemsize, reverse=True)
            if some:
                message = _make_message(one.step, src, dst, some)
                out.append(message._replace(relayed=m.leg > 1))
    return tuple(out)


def rounds(given: Iterable[Message], rank: int) -> tuple[Round, ...]:
    """The messages from or to `rank`, step by step. A message from a rank to itself is kept.

    Several messages of one step between the same ranks stay in the order in which they are given.
    """
    steps: dict[Step, tuple[list[Message], list[Message], list[Message]]] = {}
    for m in given:
        sends, receives, keeps = steps.setdefault(m.step, ([], [], []))
        if m.src_rank == m.dst_rank == rank:
            keeps.append(m)
        elif m.src_rank == rank:
            sends.append(m)
        elif m.dst_rank == rank:
            receives.append(m)
    out = []
    for step in sorted(steps):
        sends, receives, keeps = steps[step]
        if sends or receives or keeps:
            out.append(_order_round(sends, receives, keeps, rank))
    return tuple(out)


def _order_round(
    sends: list[Message], receives: list[Message], keeps: list[Message], rank: int
) -> Round:
    """The round of one rank.

    Sends to the ranks behind this one come first, and receives from those before it, so that not
    all call on one rank.
    """
    sends = sorted(sends, key=lambda m: (m.dst_rank < rank, m.dst_rank))
    receives = sorted(receives, key=lambda m: (m.src_rank > rank, -m.src_rank))
    return Round(tuple(sends), tuple(receives), tuple(keeps))


def staging_bytes(one: Round) -> int:
    """Bytes that stage all messages of the round that travel."""
    return sum(aligned(m.nbytes) for m in (*one.sends, *one.receives))


def keeps_fold_order(given: Iterable[Message]) -> bool:
    """Whether these messages to one rank bring the pieces of every element in order of addend.

    Rounds are ordered and pieces of one round are folded in order of addend, so two cases are
    enough for a tensor: its addends come in rounds one after the other, or they all bring the same
    boxes in the same rounds. (Boxes of one addend are disjoint, since each element receives each
    addend once.)
    """
    brought: dict[str, _ByAddend] = {}
    for m in given:
        for piece in m.pieces:
            by_addend = brought.setdefault(piece.dst_tensor, {})
            boxes = by_addend.setdefault(piece.addend, [])
            boxes.append((m.step, from_slices(piece.dst_slices)))
    return all(_are_apart(x) or _are_alike(x) for x in brought.values())


_ByAddend: TypeAlias = dict[int, list[tuple[Step, Box]]]
"""What comes of each addend of a tensor: the boxes, and in which steps."""


def _are_apart(by_addend: _ByAddend) -> bool:
    """Whether addends come one after the other, in steps that meet in one at most."""
    steps = []
    for addend in sorted(by_addend):
        steps.append([step for step, _ in by_addend[addend]])
    return all(max(a) <= min(b) for a, b in itertools.pairwise(steps))


def _are_alike(by_addend: _ByAddend) -> bool:
    """Whether all addends bring the same boxes in the same steps."""
    first, *rest = (sorted(boxes) for boxes in by_addend.values())
    return all(boxes == first for boxes in rest)


def _make_message(step: Step, src: int, dst: int, pieces: list[Transfer]) -> Message:
    """The message of these pieces, each where its elements may begin."""
    starts = []
    end = 0
    for piece in pieces:
        start = aligned(end, _itemsize(piece))
        starts.append(start)
        end = start + piece.nbytes
    return Message(step, src, dst, tuple(pieces), tuple(starts), end)


def _cut(stream: list[Transfer], limit: int) -> Iterator[list[Transfer]]:
    """The stream as lists of pieces, each list of at most `limit` bytes."""
    pieces: list[Transfer] = []
    end = 0
    left = stream[::-1]  # a stack: the next transfer is the last
    while left:
        t = left.pop()
        start = aligned(end, _itemsize(t))
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


def _itemsize(t: Transfer) -> int:
    """The bytes of an element of a transfer."""
    return t.nbytes // math.prod(t.shape)


def _split(t: Transfer, room: int, *, within_rows: bool) -> tuple[Transfer | None, list[Transfer]]:
    """What of `t` fits into `room` bytes, None for nothing, and the rest in order.

    Cuts between rows of the outermost dimension longer than 1; inside a row only where
    `within_rows`.
    """
    if t.nbytes <= room:
        return t, []
    if room <= 0:
        return None, [t]
    dim = next((d for d, n in enumerate(t.shape) if n != 1), None)
    if dim is None:
        return None, [t]
    n = t.shape[dim]
    rows = room // (t.nbytes // n)
    if rows:
        return _narrow(t, dim, 0, rows), [_narrow(t, dim, rows, n)]
    if not within_rows:
        return None, [t]
    head, tail = _split(_narrow(t, dim, 0, 1), room, within_rows=True)
    return head, [*tail, _narrow(t, dim, 1, n)]


def _narrow(t: Transfer, dim: int, lo: int, hi: int) -> Transfer:
    """The rows lo..hi-1 of the transfer along `dim`."""
    nbytes_of_row = t.nbytes // t.shape[dim]
    count = hi - lo
    return t._replace(
        src_slices=_narrow_slices(t.src_slices, dim, lo, hi),
        dst_slices=_narrow_slices(t.dst_slices, dim, lo, hi),
        global_slices=_narrow_slices(t.global_slices, dim, lo, hi),
        shape=(*t.shape[:dim], count, *t.shape[dim + 1 :]),
        nbytes=nbytes_of_row * count,
    )


def _narrow_slices(slices: tuple[slice, ...], dim: int, lo: int, hi: int) -> tuple[slice, ...]:
    """The slices, that along `dim` narrowed to its positions lo..hi-1."""
    start = slices[dim].start
    narrow = slice(start + lo, start + hi)
    return (*slices[:dim], narrow, *slices[dim + 1 :])
