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
    """Counts of a simulated exchange: `rounds` is the most rounds of any rank; `messages` and `staged` are the most
    messages and bytes of any rank in one round. `steps` is the number of different `Message.step` values, the keys by
    which all ranks order rounds.

    A round's messages and bytes are those that its rank sends and receives, together.
    """

    steps: int
    rounds: int
    messages: int
    staged: int


class _End(NamedTuple):
    """One end of a message, and the number of its round at that rank."""

    number: int
    message: Message

    def __str__(self) -> str:
        message = self.message
        return f"{message.nbytes} B in step {message.step}, leg {message.leg}"


_Waits: TypeAlias = dict[tuple[int, int], dict[int, int]]
"""By rank and number of a round: the peers, and the round that each must have reached for it to end."""


def walk(rounds: Rounds) -> Walk:
    """Simulate ranks that send and receive `rounds` (by rank: groups of messages posted together), one group after the
    other; return the run's counts as a Walk.

    Raises PlanError for a message that contradicts its pieces, if the two ends of a message differ
    in step, leg, bytes or pieces, if one of them is missing, and for a deadlock.
    """
    waits: _Waits = {}
    ends = _list_ends(rounds)
    for sender, receiver in sorted(ends):
        sends, receives = ends[sender, receiver]
        for sent, received in itertools.zip_longest(sends, receives):
            send_round, receive_round = _match_ends(sender, receiver, sent, received)
            _add_wait(waits, (sender, send_round), receiver, receive_round)
            _add_wait(waits, (receiver, receive_round), sender, send_round)
    _run(rounds, waits)
    return _measure(rounds)


def _add_wait(waits: _Waits, wait: tuple[int, int], peer: int, number: int) -> None:
    """Note that a rank waits in a round until a peer is at its round `number`, or at a later one noted already."""
    peers = waits.setdefault(wait, {})
    peers[peer] = max(number, peers.get(peer, 0))


def _measure(rounds: Rounds) -> Walk:
    """The size of a walk of rounds that end."""
    steps: set[Step] = set()
    longest = 0
    messages = 0
    staged = 0
    for rank_rounds in rounds.values():
        longest = max(longest, len(rank_rounds))
        for round_ in rank_rounds:
            steps.update(message.step for message in round_.messages)
            posted = (*round_.sends, *round_.receives)
            nbytes = sum(message.nbytes for message in posted)
            messages = max(messages, len(posted))
            staged = max(staged, nbytes)
    return Walk(len(steps), longest, messages, staged)


_Ends: TypeAlias = dict[tuple[int, int], tuple[list[_End], list[_End]]]
"""By sender and receiver: the ends at the sender and at the receiver, each in order."""


def _list_ends(rounds: Rounds) -> _Ends:
    """Both ends of all messages that travel. Raises PlanError for a message that contradicts its pieces."""
    out: _Ends = defaultdict(lambda: ([], []))
    for rank, rank_rounds in rounds.items():
        for number, round_ in enumerate(rank_rounds):
            _check_round(rank, round_)
            for message in round_.sends:
                sent, _ = out[rank, message.dst_rank]
                sent.append(_End(number, message))
            for message in round_.receives:
                _, received = out[message.src_rank, rank]
                received.append(_End(number, message))
    return out


def _check_round(rank: int, round_: Round) -> None:
    """Raise PlanError unless messages are of one step, go the way of their lists, and fit their pieces."""
    for message in round_.messages:
        if message.step != round_.step:
            what = f"rank {rank} posts {message} of step {message.step} in step {round_.step}"
            raise PlanError(f"{what}; give each step a separate round")
        _check_pieces(rank, message)
    for message in round_.sends:
        _check_way("sends", message, rank, goes=message.src_rank == rank != message.dst_rank)
    for message in round_.receives:
        _check_way("receives", message, rank, goes=message.src_rank != rank == message.dst_rank)
    for message in round_.keeps:
        _check_way("keeps", message, rank, goes=message.src_rank == rank == message.dst_rank)


def _check_way(way: str, message: Message, rank: int, *, goes: bool) -> None:
    """Raise PlanError unless the message goes the way that it is posted."""
    if not goes:
        what = f"rank {rank}, step {message.step}: the rank {way} {message}"
        ends = f"rank {message.src_rank} to rank {message.dst_rank}"
        raise PlanError(f"{what}, which goes from {ends}; list it at these two ranks")


def _check_pieces(rank: int, message: Message) -> None:
    """Raise PlanError unless all pieces of the message go from its sender to its receiver, and its sizes are as
    `make_message` computes them from the pieces. What is handed to a rank, and what it was handed, goes on or came from
    elsewhere."""
    where = f"rank {rank}, step {message.step}: the message {message}"
    for piece in message.pieces:
        leaves = message.is_handed or piece.src_rank == message.src_rank
        arrives = message.is_handing or piece.dst_rank == message.dst_rank
        if not (leaves and arrives):
            what = f"{where} has the piece {piece}"
            ends = f"rank {message.src_rank} to rank {message.dst_rank}"
            raise PlanError(f"{what}; give the message only pieces from {ends}")
    expected = make_message(
        message.step, message.src_rank, message.dst_rank, message.leg, message.pieces
    )
    if message != expected:
        what = f"{where} has {message.nbytes} B from {message.starts} on, its pieces {expected.nbytes} B"
        raise PlanError(f"{what} from {expected.starts} on; make it with make_message")


def _match_ends(
    sender: int, receiver: int, sent: _End | None, received: _End | None
) -> tuple[int, int]:
    """The rounds of the two ends. Raises PlanError unless they are ends of one message."""
    if received is None:
        what = f"rank {sender} sends {sent} to rank {receiver}"
        raise PlanError(f"{what}, which does not receive them; give both ends the same messages")
    if sent is None:
        what = f"rank {receiver} receives {received} from rank {sender}"
        raise PlanError(f"{what}, which does not send them; give both ends the same messages")
    first, second = sent.message, received.message
    if (first.step, first.leg, first.nbytes) != (second.step, second.leg, second.nbytes):
        what = f"rank {sender} sends {sent} to rank {receiver}, which receives {received}"
        raise PlanError(f"{what}; give both ends the same messages in the same order")
    for one, other in itertools.zip_longest(first.pieces, second.pieces):
        if one != other:
            what = f"rank {sender} sends {sent} to rank {receiver}"
            what += f": the piece {one}, which is received as {other}"
            raise PlanError(f"{what}; give both ends the same pieces in the same order")
    return sent.number, received.number


def _run(rounds: Rounds, waits: _Waits) -> None:
    """Let every rank continue while it can. Raises PlanError if some ranks do not get to their ends."""
    reached = dict.fromkeys(rounds, 0)
    moving = list(rounds)
    while moving:
        rank = moving.pop()
        if reached[rank] < len(rounds[rank]) and _is_ready(waits, reached, rank):
            reached[rank] += 1
            # Waits are mutual: the ranks that may now continue are those that this rank waits for in its new round.
            peers = waits.get((rank, reached[rank]), {})
            moving += [rank, *peers]
    stuck = [rank for rank, rank_rounds in rounds.items() if reached[rank] < len(rank_rounds)]
    if stuck:
        _raise_deadlock(rounds, waits, reached, min(stuck))


def _is_ready(waits: _Waits, reached: Mapping[int, int], rank: int) -> bool:
    """Whether every peer that the rank waits for is at the round that it waits for, or later."""
    peers = waits.get((rank, reached[rank]), {})
    return all(reached[peer] >= n for peer, n in peers.items())


def _raise_deadlock(
    rounds: Rounds, waits: _Waits, reached: Mapping[int, int], rank: int
) -> NoReturn:
    """Raise PlanError for a circle of ranks that wait for each other, found from this rank on."""
    path: list[int] = []
    while rank not in path:
        path.append(rank)
        round_by_peer = waits[rank, reached[rank]]
        rank = next(peer for peer, number in round_by_peer.items() if reached[peer] < number)
    start = path.index(rank)
    circle = [*path[start:], rank]
    waiting = []
    for waiter, awaited in itertools.pairwise(circle):
        step = rounds[waiter][reached[waiter]].step
        waiting.append(f"rank {waiter} waits in step {step} for rank {awaited}")
    raise PlanError(
        f"{', '.join(waiting)}: no rank can continue; give all ranks one order of steps"
    )
