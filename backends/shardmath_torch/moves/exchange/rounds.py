"""Rounds: what one rank posts together, moved over any wire before its next round begins.

1. What a message gives and takes at this end is a value: a `Receive` has the memory that the message comes into, a
   `Send` the memory that it leaves from, a `Keep` what stays here. Whoever makes these values decides what goes;
   this loop decides when.
2. All receives of a round are posted first, then all sends are packed and posted, then the rank keeps what it keeps
   while the wire works, unpacks messages as they arrive, and at last folds what is reduced, in order of addend: so
   results do not depend on what arrives first.
3. A failure names the first tensor of the message that it met, and each thing that is done is a lap of the watch.

>>> import torch
>>> from shardmath.plans.programs.messages import make_message
>>> message = make_message((0, 0, 0), src_rank=1, dst_rank=0, leg=1, pieces=())
>>> Receive(message, torch.zeros(2), find_unpacking=None)[1:]    # it comes to where it belongs
(tensor([0., 0.]), None)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from shardmath.plans.programs.messages import Message, Step
from shardmath_torch.groups import dtypes
from shardmath_torch.groups.agreement.wire import PeerFailure, Pending, Wire
from shardmath_torch.moves.observing.laps import (
    ARRIVED,
    FOLDED,
    KEPT,
    LEFT,
    PACKED,
    POSTED,
    UNPACKED,
)
from shardmath_torch.moves.observing.stopwatch import Stopwatch

__all__ = ["Fold", "Keep", "Receive", "Rounds", "Send", "Unpacking"]


class Fold(NamedTuple):
    """A piece that has come, and what it is to be folded into."""

    addend: int
    op: str
    into: Tensor
    piece: Tensor


Unpacking: TypeAlias = Callable[[], list[Fold]]
"""Puts what has come where it belongs, and gives what is to be folded."""


class Receive(NamedTuple):
    """A message that comes into this memory, contiguous bytes.

    `find_unpacking` is called while the message is on its way; None: the memory is where the message belongs.
    """

    message: Message
    memory: Tensor
    find_unpacking: Callable[[], Unpacking] | None


class Send(NamedTuple):
    """A message that leaves from this memory, contiguous bytes; `pack` fills the memory; None: it is full already."""

    message: Message
    memory: Tensor
    pack: Callable[[], object] | None


class Keep(NamedTuple):
    """A message that stays on this rank, and what brings it from here to there."""

    message: Message
    unpack: Unpacking


class Rounds:
    """Runs the rounds of one move, timed by its watch."""

    def __init__(self, wire: Wire, watch: Stopwatch) -> None:
        self._wire = wire
        self._watch = watch

    def run(
        self,
        step: Step,
        receives: Iterable[Receive],
        sends: Iterable[Send],
        keeps: Iterable[Keep] = (),
    ) -> None:
        """Move the messages of one round, all of them before the next round begins. Raises PeerFailure."""
        # All is posted before anything is waited for: a rank that waited first could wait for ever.
        arriving = [(one, self._receive(one)) for one in receives]
        leaving = [(one, self._send(one)) for one in sends]
        self._wire.start()
        folds = [*self._keep(keeps), *self._take_in(arriving)]
        # What has not left must not change: a relayed message may be sent from a destination.
        for one, pending in leaving:
            _wait(pending, one.message)
            self._watch.waited(LEFT, one.message, one.message.dst_rank)
        # In order of addend, not of arrival: rounding depends on the order.
        for fold in sorted(folds, key=lambda fold: fold.addend):
            dtypes.fold(fold.op, fold.into, fold.piece)
        self._watch.lap(FOLDED, step)

    def finish(self) -> None:
        """Return when the host, too, may read what has come. Raises PeerFailure."""
        self._wire.finish()
        if self._wire.device.type != "cpu":
            self._watch.lap(ARRIVED)

    def _receive(self, one: Receive) -> Pending:
        """Post the receive of the message."""
        message = one.message
        with _Blame(message):
            pending = self._wire.receive(one.memory, message.src_rank)
        self._watch.lap(POSTED, message)
        return pending

    def _send(self, one: Send) -> Pending:
        """Pack the message, and post the send of it."""
        message = one.message
        if one.pack is not None:
            one.pack()
            self._watch.lap(PACKED, message)
        with _Blame(message):
            pending = self._wire.send(one.memory, message.dst_rank)
        self._watch.lap(POSTED, message)
        return pending

    def _keep(self, keeps: Iterable[Keep]) -> list[Fold]:
        """Bring what stays to where it belongs; give what is to be folded."""
        folds: list[Fold] = []
        for one in keeps:
            folds += one.unpack()
            self._watch.lap(KEPT, one.message)
        return folds

    def _take_in(self, arriving: Sequence[tuple[Receive, Pending]]) -> list[Fold]:
        """Wait for what comes, and put it where it belongs; give what is to be folded."""
        watch = self._watch
        folds: list[Fold] = []
        # Of many small pieces finding where they go takes as long as the wire does.
        unpackings = [one.find_unpacking and one.find_unpacking() for one, _ in arriving]
        if unpackings:
            watch.lap(UNPACKED)
        for (one, pending), unpack in zip(arriving, unpackings, strict=True):
            message = one.message
            _wait(pending, message)
            watch.waited(ARRIVED, message, message.src_rank)
            if unpack is not None:
                folds += unpack()
                watch.lap(UNPACKED, message)
        return folds


def _wait(pending: Pending, message: Message) -> None:
    """Wait until the message has come or left."""
    with _Blame(message):
        pending.wait()


class _Blame:
    """A failure inside is one of this message's first tensor.

    A class and no generator, since every message enters it twice.
    """

    def __init__(self, message: Message) -> None:
        self._message = message

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, failure: object, trace: object) -> None:
        if isinstance(failure, PeerFailure):
            failure.tensor = self._message.pieces[0].tensor
