"""Transfers -> the messages that a transport sends: pure Python, no torch.

1. All transfers from one rank to another, in their common order, are one **stream**. A stream is cut into messages of
   at most `Pace.message_bytes`: big transfers are cut by whole rows, small ones joined. Both ends cut alike, because a
   cut depends on nothing but the stream and the pace, and the pace is agreed.
2. Message k of every stream belongs to **round** k. Every rank walks its rounds in one order, and posts all of a round
   before it waits: the earliest round in which anybody waits has all of its messages posted, so nobody waits for ever.
3. Many peers or a small limit: streams take **turns**, (receiver - sender) modulo the number of ranks; only
   `Pace.turns` go at once, so a rank has at most so many messages each way in hand, however many ranks there are.
4. A rank's own copies are a stream like any other that never meets the wire.
5. Pieces that are folded into one element (a reduction) must come in order of addend. `keeps_fold_order` says whether
   the rounds do so by themselves; where not, `Pace.by_addend` sends one addend after the other.
6. A program's messages and steps are its own (`scheduled`): both ends have them from the same value, and its phases
   bring addends in order. What is passed on leaves the sender's destination, where an earlier round has put it.

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
"""When a message goes: (phase of an addend, window of turns, number in its stream); a program's (phase, slot, turn)."""


class Pace(NamedTuple):
    """What all ranks agree on before they cut their streams."""

    ranks: tuple[int, ...]
    message_bytes: int
    turns: int
    by_addend: bool


class Message(NamedTuple):
    """What one rank sends another in one go: pieces one after the other, each at its place in bytes.

    Pieces are transfers cut to size. Where `relayed`, the sender reads them from its destination tensors.
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
    counts = [
        *Counter(src for src, _ in pairs).values(),
        *Counter(dst for _, dst in pairs).values(),
    ]
    return max(counts, default=0)


def set_pace(
    ranks: tuple[int, ...], *, peers: int, max_inflight_bytes: int, by_addend: bool
) -> Pace:
    """The pace at which no rank stages more than `max_inflight_bytes`.

    `ranks` are the plan's; `peers` is the largest `most_peers` of any rank.
    Raises ExchangeError for a limit that has no room for one element each way.
    """
    wanted = max(1, peers)
    at_once = min(wanted, max(1, max_inflight_bytes // (2 * LEAST_MESSAGE)))
    room = max_inflight_bytes // (2 * at_once) // ALIGNMENT * ALIGNMENT
    if room < ALIGNMENT:
        raise ExchangeError(
            f"max_inflight_bytes={max_inflight_bytes} has no room for a message of {ALIGNMENT} bytes each way; "
            f"pass {2 * ALIGNMENT} or more"
        )
    return Pace(ranks, room, len(ranks) if at_once == wanted else at_once, by_addend)


def messages(transfers: Iterable[Transfer], pace: Pace) -> tuple[Message, ...]:
    """The messages that carry these transfers, in order of step, sender and receiver.

    Any union of whole streams may be given; the messages of a stream depend on that stream alone.
    """
    place = {rank: i for i, rank in enumerate(pace.ranks)}
    streams: dict[tuple[int, int, int], list[Transfer]] = {}
    for t in transfers:
        if t.nbytes:
            phase = t.addend if pace.by_addend else 0
            streams.setdefault((phase, t.src_rank, t.dst_rank), []).append(t)
    out: list[Message] = []
    for (phase, src, dst), stream in streams.items():
        turn = (place[dst] - place[src]) % len(place)
        for k, pieces in enumerate(_cut(stream, pace.message_bytes)):
            out.append(_message((phase, turn // pace.turns, k), src, dst, pieces))
    return tuple(sorted(out, key=lambda m: m[:3]))


def scheduled(prog: Program, rank: int) -> tuple[Message, ...]:
    """The program's messages from, to and on `rank`, in order of step and peer, and of leg where these are the same.

    Pieces with large elements come first, so that no byte of a message is padding.
    """
    out = []
    for one in prog.for_rank(rank):
        for m in one.messages:
            ends = {"send": (rank, m.peer), "receive": (m.peer, rank), "keep": (rank, rank)}[
                m.direction
            ]
            pieces = sorted((t for t in m.pieces if t.nbytes), key=_itemsize, reverse=True)
            if pieces:
                out.append(_message(one.step, *ends, pieces)._replace(relayed=m.leg > 1))
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
    return tuple(_in_turns(*steps[step], rank) for step in sorted(steps) if any(steps[step]))


def _in_turns(
    sends: list[Message], receives: list[Message], keeps: list[Message], rank: int
) -> Round:
    """Sends to the ranks behind this one first, receives from those before it, so that not all call on one rank."""
    to = sorted(sends, key=lambda m: (m.dst_rank < rank, m.dst_rank))
    of = sorted(receives, key=lambda m: (m.src_rank > rank, -m.src_rank))
    return Round(tuple(to), tuple(of), tuple(keeps))


def staging_bytes(one: Round) -> int:
    """Bytes that stage all messages of the round that travel."""
    return sum(aligned(m.nbytes) for m in (*one.sends, *one.receives))


def keeps_fold_order(given: Iterable[Message]) -> bool:
    """Whether these messages to one rank bring the pieces of every element in order of addend.

    Rounds are ordered and pieces of one round are folded in order of addend, so two cases are enough for a tensor:
    its addends come in rounds one after the other, or they all bring the same boxes in the same rounds. (Boxes of one
    addend are disjoint, since each element receives each addend once.)
    """
    brought: dict[str, dict[int, list[tuple[Step, Box]]]] = {}
    for m in given:
        for piece in m.pieces:
            box = from_slices(piece.dst_slices)
            brought.setdefault(piece.dst_tensor, {}).setdefault(piece.addend, []).append(
                (m.step, box)
            )
    return all(_apart(by_addend) or _alike(by_addend) for by_addend in brought.values())


def _apart(by_addend: dict[int, list[tuple[Step, Box]]]) -> bool:
    steps = [[step for step, _ in by_addend[a]] for a in sorted(by_addend)]
    return all(max(a) <= min(b) for a, b in itertools.pairwise(steps))


def _alike(by_addend: dict[int, list[tuple[Step, Box]]]) -> bool:
    first, *rest = (sorted(boxes) for boxes in by_addend.values())
    return all(boxes == first for boxes in rest)


def _message(step: Step, src: int, dst: int, pieces: list[Transfer]) -> Message:
    starts, end = [], 0
    for piece in pieces:
        starts.append(aligned(end, _itemsize(piece)))
        end = starts[-1] + piece.nbytes
    return Message(step, src, dst, tuple(pieces), tuple(starts), end)


def _cut(stream: list[Transfer], limit: int) -> Iterator[list[Transfer]]:
    """The stream as lists of pieces, each list of at most `limit` bytes."""
    pieces: list[Transfer] = []
    end = 0
    left = stream[::-1]
    while left:
        start = aligned(end, _itemsize(left[-1]))
        head, tail = _split(left.pop(), limit - start, within_rows=not pieces)
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
    return t.nbytes // math.prod(t.shape)


def _split(t: Transfer, room: int, *, within_rows: bool) -> tuple[Transfer | None, list[Transfer]]:
    """What of `t` fits into `room` bytes, None for nothing, and the rest in order.

    Cuts between rows of the outermost dimension longer than 1; inside a row only where `within_rows`.
    """
    if t.nbytes <= room:
        return t, []
    dim, n = next((d, n) for d, n in enumerate((*t.shape, 0)) if n != 1)
    if dim == len(t.shape) or room <= 0:
        return None, [t]
    rows = room // (t.nbytes // n)
    if rows:
        return _narrow(t, dim, 0, rows), [_narrow(t, dim, rows, n)]
    if not within_rows:
        return None, [t]
    head, tail = _split(_narrow(t, dim, 0, 1), room, within_rows=True)
    return head, [*tail, _narrow(t, dim, 1, n)]


def _narrow(t: Transfer, dim: int, lo: int, hi: int) -> Transfer:
    """The rows lo..hi-1 of the transfer along `dim`."""
    n = t.shape[dim]
    return t._replace(
        src_slices=_narrowed(t.src_slices, dim, lo, hi),
        dst_slices=_narrowed(t.dst_slices, dim, lo, hi),
        global_slices=_narrowed(t.global_slices, dim, lo, hi),
        shape=(*t.shape[:dim], hi - lo, *t.shape[dim + 1 :]),
        nbytes=t.nbytes // n * (hi - lo),
    )


def _narrowed(slices: tuple[slice, ...], dim: int, lo: int, hi: int) -> tuple[slice, ...]:
    start = slices[dim].start
    return (*slices[:dim], slice(start + lo, start + hi), *slices[dim + 1 :])
