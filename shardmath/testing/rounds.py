"""Rounds: whether ranks that walk their rounds, post and wait, ever get to the end.

`walk` runs rounds given rank by rank, as ranks do. A round's messages are posted together, and it
ends when all of them are posted at their other ends too; between two ranks, one way, the first that
is sent meets the first that is received.

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
    """What a walk found.

    The number of steps, and of any rank the most rounds, the most messages of one, and the most
    bytes that are under way in one, both ways together.
    """

    steps: int
    rounds: int
    messages: int
    staged: int


class _End(NamedTuple):
    """One end of a message: the number of the round at that rank."""

    at: int
    message: Message

    def __str__(self) -> str:
        m = self.message
        return f"{m.nbytes} B in step {m.step}, leg {m.leg}"


_Waits: TypeAlias = dict[tuple[int, int], dict[int, int]]
"""By rank and number of a round: the peers, and at which of their rounds each has to be for it to
end."""


def walk(rounds: Rounds) -> Walk:
    """Run the rounds of all ranks to their ends.

    Raises PlanError for a message that says one thing and has other pieces, where the two ends of a
    message differ in step, leg, bytes or pieces, where one of them is missing, and for a deadlock.
    """
    waits: _Waits = {}
    ends = _list_ends(rounds)
    for sender, receiver in sorted(ends):
        sends, receives = ends[sender, receiver]
        for sent, got in itertools.zip_longest(sends, receives):
            here, there = _meet(sender, receiver, sent, got)
            _add_wait(waits, (sender, here), receiver, there)
            _add_wait(waits, (receiver, there), sender, here)
    _run(rounds, waits)
    return _measure(rounds)


def _add_wait(waits: _Waits, wait: tuple[int, int], peer: int, at: int) -> None:
    """A rank waits in a round until a peer is at its round `at`, or a later one that it waits for
    already."""
    peers = waits.setdefault(wait, {})
    peers[peer] = max(at, peers.get(peer, 0))


def _measure(rounds: Rounds) -> Walk:
    """What rounds that end took."""
    steps: set[Step] = set()
    longest = 0
    messages = 0
    staged = 0
    for mine in rounds.values():
        longest = max(longest, len(mine))
        for one in mine:
            steps.update(m.step for m in one.messages)
            posted = (*one.sends, *one.receives)
            nbytes = sum(m.nbytes for m in posted)
            messages = max(messages, len(posted))
            staged = max(staged, nbytes)
    return Walk(len(steps), longest, messages, staged)


_Ends: TypeAlias = dict[tuple[int, int], tuple[list[_End], list[_End]]]
"""By sender and receiver: what is sent and what is received, each in order."""


def _list_ends(rounds: Rounds) -> _Ends:
    """Both ends of all messages that travel. Raises PlanError for one that is not what it says."""
    out: _Ends = defaultdict(lambda: ([], []))
    for rank, mine in rounds.items():
        for at, one in enumerate(mine):
            _check_round(rank, one)
            for m in one.sends:
                sent, _ = out[rank, m.dst_rank]
                sent.append(_End(at, m))
            for m in one.receives:
                _, received = out[m.src_rank, rank]
                received.append(_End(at, m))
    return out


def _check_round(rank: int, one: Round) -> None:
    """Messages are of one step, go the way that the round says, and are their pieces."""
    for m in one.messages:
        if m.step != one.step:
            what = f"rank {rank} posts {m} of step {m.step} in step {one.step}"
            raise PlanError(f"{what}; give each step a round of its own")
        _check_pieces(rank, m)
    for m in one.sends:
        _check_way("sends", m, rank, goes=m.src_rank == rank != m.dst_rank)
    for m in one.receives:
        _check_way("receives", m, rank, goes=m.src_rank != rank == m.dst_rank)
    for m in one.keeps:
        _check_way("keeps", m, rank, goes=m.src_rank == rank == m.dst_rank)


def _check_way(way: str, m: Message, rank: int, *, goes: bool) -> None:
    """A message goes the way that it is posted."""
    if not goes:
        what = f"rank {rank}, step {m.step}: it {way} {m}"
        raise PlanError(f"{what}; put it where its ends say")


def _check_pieces(rank: int, m: Message) -> None:
    """A message is its pieces, and has their ends."""
    where = f"rank {rank}, step {m.step}: the message {m}"
    for t in m.pieces:
        if (t.src_rank, t.dst_rank) != (m.src_rank, m.dst_rank):
            what = f"{where} has the piece {t}"
            raise PlanError(f"{what}; put it where it goes from its sender to its receiver")
    counted = make_message(m.step, m.src_rank, m.dst_rank, m.leg, m.pieces)
    if m != counted:
        what = f"{where} has {m.nbytes} B from {m.starts} on, its pieces {counted.nbytes} B"
        raise PlanError(f"{what} from {counted.starts} on; count them anew")


def _meet(sender: int, receiver: int, sent: _End | None, got: _End | None) -> tuple[int, int]:
    """In which rounds of theirs the two ends are. Raises PlanError unless they are of one
    message."""
    if got is None:
        what = f"rank {sender} sends {sent} to rank {receiver}"
        raise PlanError(f"{what}, which does not receive them; give both ends the same messages")
    if sent is None:
        what = f"rank {receiver} receives {got} from rank {sender}"
        raise PlanError(f"{what}, which does not send them; give both ends the same messages")
    here, there = sent.message, got.message
    if (here.step, here.leg, here.nbytes) != (there.step, there.leg, there.nbytes):
        what = f"rank {sender} sends {sent} to rank {receiver}, which receives {got}"
        raise PlanError(f"{what}; give both ends the same messages in the same order")
    for one, other in itertools.zip_longest(here.pieces, there.pieces):
        if one != other:
            what = f"rank {sender} sends {sent} to rank {receiver}"
            what += f": the piece {one}, which is received as {other}"
            raise PlanError(f"{what}; give both ends the same pieces in the same order")
    return sent.at, got.at


def _run(rounds: Rounds, waits: _Waits) -> None:
    """Let every rank go on while it can. Raises PlanError where some do not get to their ends."""
    at = dict.fromkeys(rounds, 0)
    moving = list(rounds)
    while moving:
        rank = moving.pop()
        if at[rank] < len(rounds[rank]) and _is_ready(waits, at, rank):
            at[rank] += 1
            # Whoever waits for this rank in its new round is among those that it waits for there.
            peers = waits.get((rank, at[rank]), {})
            moving += [rank, *peers]
    stuck = [rank for rank, mine in rounds.items() if at[rank] < len(mine)]
    if stuck:
        _raise_deadlock(rounds, waits, at, min(stuck))


def _is_ready(waits: _Waits, at: Mapping[int, int], rank: int) -> bool:
    """Whether every peer that the rank waits for is where it has to be."""
    here = at[rank]
    peers = waits.get((rank, here), {})
    return all(at[peer] >= n for peer, n in peers.items())


def _raise_deadlock(rounds: Rounds, waits: _Waits, at: Mapping[int, int], rank: int) -> NoReturn:
    """Raise PlanError for ranks that wait for each other, round in a circle from somewhere behind
    this one."""
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        here = at[rank]
        peers = waits[rank, here]
        rank = next(peer for peer, n in peers.items() if at[peer] < n)
    start = path.index(rank)
    circle = [*path[start:], rank]
    told = []
    for a, b in itertools.pairwise(circle):
        here = at[a]
        step = rounds[a][here].step
        told.append(f"rank {a} waits in step {step} for rank {b}")
    raise PlanError(f"{', '.join(told)}: nobody goes on; give all ranks one order of steps")
