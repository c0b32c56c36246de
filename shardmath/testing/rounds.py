"""Rounds: a check that ranks which walk their rounds, post and wait, get to the end.

`walk` runs rounds given rank by rank, as ranks do. A round's messages are posted together, and it
ends when all of them are posted at their other ends too; in each direction between two ranks, the
first message sent matches the first one received.

>>> from shardmath.plans.programs.messages import gather_rounds
>>> one = make_message((0, 0, 0), src_rank=0, dst_rank=1, leg=1, pieces=())
>>> walk({0: gather_rounds([one], rank=0), 1: []})
Traceback (most recent call last):
shardmath.PlanError: rank 0 sends 0 B in step (0, 0, 0), leg 1 to rank 1, which does not receive them; give \
both ends the same messages
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn, TypeAlias

from shardmath.base.errors import PlanError
from shardmath.plans.programs.messages import Message, Round, Step, make_message

__all__ = ["Rounds", "Walk", "walk"]

Rounds: TypeAlias = Mapping[int, Sequence[Round]]
"""Every rank's rounds, in the order in which it walks them."""


class Walk(NamedTuple):
    """The size of a walk.

    The number of steps, and over all ranks the most rounds, the most messages in a round, and the
    most bytes in flight in a round, in both directions together.
    """

    steps: int
    rounds: int
    messages: int
    staged: int


class _End(NamedTuple):
    """One end of a message, and the number of its round at that rank."""

    at: int
    message: Message

    def __str__(self) -> str:
        m = self.message
        return f"{m.nbytes} B in step {m.step}, leg {m.leg}"


_Waits: TypeAlias = dict[tuple[int, int], dict[int, int]]
"""By rank and number of a round: the peers, and the round that each must have reached for it to end."""


def walk(rounds: Rounds) -> Walk:
    """Run the rounds of all ranks to their ends.

    Raises PlanError for a message that contradicts its pieces, if the two ends of a message differ
    in step, leg, bytes or pieces, if one of them is missing, and for a deadlock.
    """
    waits: _Waits = {}
    ends = _list_ends(rounds)
    for sender, receiver in sorted(ends):
        sends, receives = ends[sender, receiver]
        for sent, got in itertools.zip_longest(sends, receives):
            send_round, receive_round = _match_ends(sender, receiver, sent, got)
            _add_wait(waits, (sender, send_round), receiver, receive_round)
            _add_wait(waits, (receiver, receive_round), sender, send_round)
    _run(rounds, waits)
    return _measure(rounds)


def _add_wait(waits: _Waits, wait: tuple[int, int], peer: int, at: int) -> None:
    """Note that a rank waits in a round until a peer is at its round `at`, or at a later one noted already."""
    peers = waits.setdefault(wait, {})
    peers[peer] = max(at, peers.get(peer, 0))


def _measure(rounds: Rounds) -> Walk:
    """The size of a walk of rounds that end."""
    steps: set[Step] = set()
    longest = 0
    messages = 0
    staged = 0
    for rank_rounds in rounds.values():
        longest = max(longest, len(rank_rounds))
        for one in rank_rounds:
            steps.update(m.step for m in one.messages)
            posted = (*one.sends, *one.receives)
            nbytes = sum(m.nbytes for m in posted)
            messages = max(messages, len(posted))
            staged = max(staged, nbytes)
    return Walk(len(steps), longest, messages, staged)


_Ends: TypeAlias = dict[tuple[int, int], tuple[list[_End], list[_End]]]
"""By sender and receiver: the ends at the sender and at the receiver, each in order."""


def _list_ends(rounds: Rounds) -> _Ends:
    """Both ends of all messages that travel. Raises PlanError for a message that contradicts its pieces."""
    out: _Ends = defaultdict(lambda: ([], []))
    for rank, rank_rounds in rounds.items():
        for at, one in enumerate(rank_rounds):
            _check_round(rank, one)
            for m in one.sends:
                sent, _ = out[rank, m.dst_rank]
                sent.append(_End(at, m))
            for m in one.receives:
                _, received = out[m.src_rank, rank]
                received.append(_End(at, m))
    return out


def _check_round(rank: int, one: Round) -> None:
    """Raise PlanError unless messages are of one step, go the way of their lists, and fit their pieces."""
    for m in one.messages:
        if m.step != one.step:
            what = f"rank {rank} posts {m} of step {m.step} in step {one.step}"
            raise PlanError(f"{what}; give each step a separate round")
        _check_pieces(rank, m)
    for m in one.sends:
        _check_way("sends", m, rank, goes=m.src_rank == rank != m.dst_rank)
    for m in one.receives:
        _check_way("receives", m, rank, goes=m.src_rank != rank == m.dst_rank)
    for m in one.keeps:
        _check_way("keeps", m, rank, goes=m.src_rank == rank == m.dst_rank)


def _check_way(way: str, m: Message, rank: int, *, goes: bool) -> None:
    """Raise PlanError unless the message goes the way that it is posted."""
    if not goes:
        what = f"rank {rank}, step {m.step}: it {way} {m}"
        raise PlanError(f"{what}; put it where its ends say")


def _check_pieces(rank: int, m: Message) -> None:
    """Raise PlanError unless the message is made of its pieces, and has their ends."""
    where = f"rank {rank}, step {m.step}: the message {m}"
    for t in m.pieces:
        if (t.src_rank, t.dst_rank) != (m.src_rank, m.dst_rank):
            what = f"{where} has the piece {t}"
            raise PlanError(f"{what}; put it where it goes from its sender to its receiver")
    counted = make_message(m.step, m.src_rank, m.dst_rank, m.leg, m.pieces)
    if m != counted:
        what = f"{where} has {m.nbytes} B from {m.starts} on, its pieces {counted.nbytes} B"
        raise PlanError(f"{what} from {counted.starts} on; count them again")


def _match_ends(sender: int, receiver: int, sent: _End | None, got: _End | None) -> tuple[int, int]:
    """The rounds of the two ends. Raises PlanError unless they are ends of one message."""
    if got is None:
        what = f"rank {sender} sends {sent} to rank {receiver}"
        raise PlanError(f"{what}, which does not receive them; give both ends the same messages")
    if sent is None:
        what = f"rank {receiver} receives {got} from rank {sender}"
        raise PlanError(f"{what}, which does not send them; give both ends the same messages")
    first, second = sent.message, got.message
    if (first.step, first.leg, first.nbytes) != (second.step, second.leg, second.nbytes):
        what = f"rank {sender} sends {sent} to rank {receiver}, which receives {got}"
        raise PlanError(f"{what}; give both ends the same messages in the same order")
    for one, other in itertools.zip_longest(first.pieces, second.pieces):
        if one != other:
            what = f"rank {sender} sends {sent} to rank {receiver}"
            what += f": the piece {one}, which is received as {other}"
            raise PlanError(f"{what}; give both ends the same pieces in the same order")
    return sent.at, got.at


def _run(rounds: Rounds, waits: _Waits) -> None:
    """Let every rank continue while it can. Raises PlanError if some ranks do not get to their ends."""
    at = dict.fromkeys(rounds, 0)
    moving = list(rounds)
    while moving:
        rank = moving.pop()
        if at[rank] < len(rounds[rank]) and _is_ready(waits, at, rank):
            at[rank] += 1
            # Waits are mutual: the ranks that may now continue are those that this rank waits for in its new round.
            peers = waits.get((rank, at[rank]), {})
            moving += [rank, *peers]
    stuck = [rank for rank, mine in rounds.items() if at[rank] < len(mine)]
    if stuck:
        _raise_deadlock(rounds, waits, at, min(stuck))


def _is_ready(waits: _Waits, at: Mapping[int, int], rank: int) -> bool:
    """Whether every peer that the rank waits for is at the round that it waits for, or later."""
    peers = waits.get((rank, at[rank]), {})
    return all(at[peer] >= n for peer, n in peers.items())


def _raise_deadlock(rounds: Rounds, waits: _Waits, at: Mapping[int, int], rank: int) -> NoReturn:
    """Raise PlanError for a circle of ranks that wait for each other, found from this rank on."""
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        peers = waits[rank, at[rank]]
        rank = next(peer for peer, n in peers.items() if at[peer] < n)
    start = path.index(rank)
    circle = [*path[start:], rank]
    waiting = []
    for a, b in itertools.pairwise(circle):
        step = rounds[a][at[a]].step
        waiting.append(f"rank {a} waits in step {step} for rank {b}")
    raise PlanError(
        f"{', '.join(waiting)}: no rank can continue; give all ranks one order of steps"
    )
