"""Rounds: the messages that a rank posts together, and completes over any wire before its next round.

1. A message's end on this rank is a value: a `Receive` or a `Send` with the message's memory, or a `Keep` for pieces
   that stay here. Callers make these values and so decide what moves; this loop decides when.
2. All receives of a round are posted first, then all sends are packed and posted. While the wire works, the rank
   copies the pieces that stay, then unpacks messages as they arrive. At last it folds reduced pieces in order of
   addend, so results do not depend on the order of arrival.
3. A failure names the first tensor of its message. Each phase is a lap of the watch.

>>> import torch
>>> from shardmath.plans.programs.messages import make_message
>>> message = make_message((0, 0, 0), src_rank=1, dst_rank=0, leg=1, pieces=())
>>> Receive(message, torch.zeros(2), find_unpacking=None)[1:]    # received in place
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
    """A reduction to do, such as a sum: combine the tensor `piece` into the tensor `into`, in place, by the operation
    `op`. `addend` is the index of `piece` among the values to combine; lower indices come first."""

    addend: int
    op: str
    into: Tensor
    piece: Tensor


Unpacking: TypeAlias = Callable[[], list[Fold]]
"""Copies a message's pieces to their places, and returns those to be folded."""


class Receive(NamedTuple):
    """A message to receive into `memory`, contiguous bytes.

    `find_unpacking` is called while the message is in flight; None if the message is received in place.
    """

    message: Message
    memory: Tensor
    find_unpacking: Callable[[], Unpacking] | None


class Send(NamedTuple):
    """A message to send from `memory`, contiguous bytes; `pack` fills them first, and is None if the message is sent in
    place."""

    message: Message
    memory: Tensor
    pack: Callable[[], object] | None


class Keep(NamedTuple):
    """A copy between two tensors of this rank, which the plan lists as a message from the rank to itself. Calling
    `unpack` copies the slices in `message` from source to destination."""

    message: Message
    unpack: Unpacking


class Rounds:
    """The execution of one move's rounds of messages over `wire` (the connections of one process group), timed by
    `watch`."""

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
        """Send and receive all messages of one round of a move, and copy or reduce the slices in `keeps`, which stay on
        this rank. `step` identifies the round in the timings.

        Received and kept slices that belong to a reduction are combined with the values in the destination tensor, such
        as by addition. Raises PeerFailure if a rank fails or does not answer in time.
        """
        # All messages are posted before any wait: a rank that waited first could wait for ever.
        arriving = [(receive, self._receive(receive)) for receive in receives]
        leaving = [(send, self._send(send)) for send in sends]
        self._wire.start()
        folds = [*self._keep(keeps), *self._unpack(arriving)]
        # Before folding, since a relayed message may be sent from a destination.
        for send, pending in leaving:
            _wait(pending, send.message)
            self._watch.waited(LEFT, send.message, send.message.dst_rank)
        # In order of addend, not of arrival: rounding depends on the order.
        for fold in sorted(folds, key=lambda fold: fold.addend):
            dtypes.fold(fold.op, fold.into, fold.piece)
        self._watch.lap(FOLDED, step)

    def finish(self) -> None:
        """Wait until the device has done all receives, so that the host can read the bytes. Raises PeerFailure if a
        message fails or takes too long."""
        self._wire.finish()
        if self._wire.device.type != "cpu":
            self._watch.lap(ARRIVED)

    def _receive(self, receive: Receive) -> Pending:
        """Post the receive."""
        message = receive.message
        with _NamingTensor(message):
            pending = self._wire.receive(receive.memory, message.src_rank)
        self._watch.lap(POSTED, message)
        return pending

    def _send(self, send: Send) -> Pending:
        """Pack the message, and post the send."""
        message = send.message
        if send.pack is not None:
            send.pack()
            self._watch.lap(PACKED, message)
        with _NamingTensor(message):
            pending = self._wire.send(send.memory, message.dst_rank)
        self._watch.lap(POSTED, message)
        return pending

    def _keep(self, keeps: Iterable[Keep]) -> list[Fold]:
        """Copy the pieces that stay on this rank, and return those to be folded."""
        folds: list[Fold] = []
        for keep in keeps:
            folds += keep.unpack()
            self._watch.lap(KEPT, keep.message)
        return folds

    def _unpack(self, arriving: Sequence[tuple[Receive, Pending]]) -> list[Fold]:
        """Wait for the messages, copy their pieces to their places, and return those to be folded."""
        watch = self._watch
        folds: list[Fold] = []
        # Before waiting, since finding the places of many small pieces takes as long as the wire does. None for
        # messages that are received in place.
        unpackings = [
            None if receive.find_unpacking is None else receive.find_unpacking()
            for receive, _ in arriving
        ]
        if unpackings:
            watch.lap(UNPACKED)  # counts the time of finding as unpacking
        for (receive, pending), unpack in zip(arriving, unpackings, strict=True):
            message = receive.message
            _wait(pending, message)
            watch.waited(ARRIVED, message, message.src_rank)
            if unpack is not None:
                folds += unpack()
                watch.lap(UNPACKED, message)
        return folds


def _wait(pending: Pending, message: Message) -> None:
    """Wait until the message has been received or sent."""
    with _NamingTensor(message):
        pending.wait()


class _NamingTensor:
    """Names the message's first tensor in a PeerFailure inside.

    A class, which is faster than a generator, since every message enters it twice.
    """

    def __init__(self, message: Message) -> None:
        self._message = message

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, failure: object, trace: object) -> None:
        if isinstance(failure, PeerFailure):
            failure.tensor = self._message.pieces[0].tensor
