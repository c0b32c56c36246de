"""Moved: the bytes, messages and times of a move on this rank.

>>> traffic = Traffic({1: Amount(2, 4_000_000)}, {}, Amount(1, 1_000_000))
>>> seconds = {"preparing": 1e-5, "agreeing": 5e-4, "packing": 3e-4, "waiting": 7e-4}
>>> print(Moved("move 3 of plan 1234", "step 3", traffic, seconds, {1: 7e-4}))
move 3 of plan 1234, 'step 3': 1.51 ms, 4.00 GB/s
sent 4.00 MB in 2 messages, received 0 B in 0 messages, kept 1.00 MB
preparing 10 us, agreeing 500 us, packing 300 us, waiting 700 us
rank     sent  messages  received  messages  waited for
   1  4.00 MB         2       0 B         0      700 us
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardmath.base.public import public
from shardmath.base.text import make_table, plural, show_bytes, show_seconds
from shardmath_torch.moves.observing.laps import WORK
from shardmath_torch.moves.observing.traffic import Amount, Traffic, add_up

__all__ = ["Moved"]

HEAD = ("rank", "sent", "messages", "received", "messages", "waited for")


@public
@dataclass(frozen=True, slots=True)
class Moved:
    """The report of a move on this rank (`move.last`): messages and bytes exchanged with each other rank, seconds of
    each phase, and seconds that this rank waited for each other rank.

    `seconds` add up to the time of the call. `waited` is the time, by peer, that this rank spent waiting for the peer's
    messages to arrive or leave. Messages are waited for one after another, so if several peers are late at once, only
    the first one waited for counts.
    """

    name: str
    label: str
    traffic: Traffic
    seconds: Mapping[str, float]
    waited: Mapping[int, float]

    @property
    def sent(self) -> Amount:
        """The messages and bytes sent to other ranks, in total."""
        return add_up(self.traffic.sent)

    @property
    def received(self) -> Amount:
        """The messages and bytes received from other ranks, in total."""
        return add_up(self.traffic.received)

    @property
    def kept(self) -> Amount:
        """The messages and bytes that stayed on this rank, in total."""
        return self.traffic.kept

    @property
    def total_s(self) -> float:
        """The seconds of the whole call."""
        return sum(self.seconds.values())

    @property
    def moving_s(self) -> float:
        """The seconds in which the call sent and received messages, waited for them, reduced what arrived, and made
        local copies. Other phases, such as preparation, the ranks' vote and the commit, are left out.
        """
        return sum(seconds for name, seconds in self.seconds.items() if name in WORK)

    @property
    def bytes_per_s(self) -> float:
        """The bytes sent or received, whichever are more, per second of `moving_s`; 0.0 if nothing moved."""
        most = max(self.sent.nbytes, self.received.nbytes)
        return most / self.moving_s if self.moving_s else 0.0

    def __str__(self) -> str:
        sent, received, kept = self.sent, self.received, self.kept
        lines = [
            f"{self.title}: {show_seconds(self.total_s)}, {self.rate}",
            f"sent {_show(sent)}, received {_show(received)}, kept {show_bytes(kept.nbytes)}",
            self.phases,
        ]
        if self.traffic.sent or self.traffic.received:
            lines.append(make_table(HEAD, self._list_peers()))
        return "\n".join(lines)

    @property
    def title(self) -> str:
        """The move's name, such as "move 3 of plan 1234", followed by the label that the caller gave it, if any."""
        return f"{self.name}, {self.label!r}" if self.label else self.name

    @property
    def rate(self) -> str:
        """The throughput `bytes_per_s` as text, such as "4.00 GB/s"."""
        return f"{show_bytes(self.bytes_per_s)}/s"

    @property
    def phases(self) -> str:
        """The time of each phase as text, such as "agreeing 500 us, packing 300 us"."""
        return ", ".join(f"{name} {show_seconds(took)}" for name, took in self.seconds.items())

    def _list_peers(self) -> Iterator[tuple[object, ...]]:
        """A table row per peer."""
        sent, received, _ = self.traffic
        for peer in sorted({*sent, *received}):
            out = sent.get(peer, Amount())
            into = received.get(peer, Amount())
            yield (
                peer,
                show_bytes(out.nbytes),
                out.messages,
                show_bytes(into.nbytes),
                into.messages,
                show_seconds(self.waited.get(peer, 0.0)),
            )


def _show(amount: Amount) -> str:
    return f"{show_bytes(amount.nbytes)} in {plural(amount.messages, 'message')}"
