"""Traffic: messages and bytes that a rank sends, receives and keeps in a move, by peer.

>>> from shardmath import Layout, Mesh, plan
>>> from shardmath.plans.programs.part import make_parts
>>> mesh = Mesh(tp=2)
>>> first, _ = make_parts(plan(Layout((4,), mesh, "(tp n)"), Layout((4,), mesh, "n")))
>>> count_traffic(first.rounds)
Traffic(sent={1: Amount(messages=1, nbytes=8)}, received={1: Amount(messages=1, nbytes=8)}, kept=Amount(messages=1, \
nbytes=8))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from shardmath.plans.programs.messages import Message, Round

__all__ = ["Traffic", "Amount", "add_up", "count_traffic"]


class Amount(NamedTuple):
    """A number of messages, and their bytes without padding."""

    messages: int = 0
    nbytes: int = 0


class Traffic(NamedTuple):
    """Messages and bytes of a call: sent to and received from other ranks, by rank, and kept on this rank."""

    sent: Mapping[int, Amount]
    received: Mapping[int, Amount]
    kept: Amount

    @property
    def nbytes(self) -> int:
        """The bytes sent plus the bytes received, without those kept on this rank."""
        return add_up(self.sent).nbytes + add_up(self.received).nbytes


def add_up(amounts: Mapping[int, Amount]) -> Amount:
    """Return the sum of the messages and bytes in `amounts`."""
    messages = sum(amount.messages for amount in amounts.values())
    return Amount(messages, sum(amount.nbytes for amount in amounts.values()))


def count_traffic(rounds: Iterable[Round]) -> Traffic:
    """Return the messages and bytes of a rank's `rounds`: sent to and received from each other rank, and kept here."""
    sent: dict[int, Amount] = {}
    received: dict[int, Amount] = {}
    kept: dict[int, Amount] = {}
    for one_round in rounds:
        for message in one_round.sends:
            _add(sent, message.dst_rank, message)
        for message in one_round.receives:
            _add(received, message.src_rank, message)
        for message in one_round.keeps:
            _add(kept, message.src_rank, message)
    return Traffic(dict(sorted(sent.items())), dict(sorted(received.items())), add_up(kept))


def _add(amounts: dict[int, Amount], peer: int, message: Message) -> None:
    messages, nbytes = amounts.get(peer, Amount())
    amounts[peer] = Amount(messages + 1, nbytes + message.payload)
