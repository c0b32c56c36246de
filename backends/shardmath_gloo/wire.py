"""Wire: gloo as a wire, whose messages start when they are posted, and whose waits have a time limit.

1. gloo ends all connections of a group when a wait of it times out. `abandon` uses that on purpose:
   it is the only way to cancel messages in flight into memory of the caller.
2. When a connection breaks, gloo ends every wait on it, except for a message of which part has
   moved: that wait lasts until its time limit. So one byte follows a long message, and another
   answers it. Receivers first wait for the following byte, senders for the answer, and a broken
   connection ends these waits at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath_torch.groups.agreement import threads
from shardmath_torch.groups.agreement.wire import (
    LATE,
    PeerFailure,
    Pending,
    check_is_torchs,
    says_ended,
)
from shardmath_torch.groups.compat import Group, channel_of, check_there, ranks_of

__all__ = ["LONG", "GlooWire"]

OURS = 1 << 30
"""A bit set in the tags of all our messages, so that they never match the caller's own."""

STEPS = 32
"""Tags per turn (an operation on the group): DATA, one per step of the operation's vote (fewer than 30), ANSWER and
NOTHING. Each step needs a tag, as messages of steps differ in length: gloo ends the process if a message is longer than
the memory posted for its tag."""

DATA, ANSWER, NOTHING = 0, STEPS - 2, STEPS - 1
"""Tags of moved bytes, of the answers to long messages, and of a message that is never sent."""

LONG = 1 << 20
"""Least bytes of a long message: shorter ones are seldom caught half moved, and two more messages would slow them."""

LEAST_S = 0.001
"""Shortest wait: gloo takes zero for no limit."""

TURNS = OURS // STEPS
"""Turns until tags repeat; all messages in flight are of one turn."""


class _Pending(NamedTuple):
    """A message posted to or from `rank` (None: all ranks), and until when to wait for it.

    `is_late`: the wait may be long, and Ctrl-C must be able to end it.
    """

    work: dist.Work
    rank: int | None
    until: float
    is_late: bool = False

    def wait(self) -> None:
        """Wait until this message has been received or sent. Raises PeerFailure if it fails or is late."""
        if self.is_late:
            _wait_in_thread(self._replace(is_late=False))
            return
        seconds_left = max(LEAST_S, self.until - time.monotonic())
        try:
            self.work.wait(timedelta(seconds=seconds_left))
        except RuntimeError as error:
            check_is_torchs(error, __file__)
            raise PeerFailure(self.rank, _explain(error)) from error


def _wait_in_thread(pending: _Pending) -> None:
    """Wait in another thread, so that Ctrl-C works during the wait: gloo's own wait ignores it."""
    # The wait has its own limit.
    threads.within(threading.TIMEOUT_MAX, pending.wait)


class _Long(NamedTuple):
    """A long message in waiting order; `answer` is posted once all parts have been received."""

    parts: tuple[_Pending, ...]
    answer: Callable[[], _Pending] | None = None

    def wait(self) -> None:
        """Wait for this long message (1 MiB or more), and for the one-byte message by which its receiver confirms the
        arrival. Raises PeerFailure if one of the two fails or is late."""
        for part in self.parts:
            part.wait()
        if self.answer is not None:
            self.answer().wait()


def _explain(error: RuntimeError) -> str:
    """The cause that gloo's error means, or its text if that is not known."""
    text = str(error)
    # Without the first letter, which only some messages write as a capital.
    if "imed out" in text:
        return LATE
    return "its connection closed" if says_ended(text) else text


def _make_byte() -> Tensor:
    """Memory for the byte that follows or answers a long message; its value means nothing."""
    return torch.empty(1, dtype=torch.uint8, device="cpu")


class GlooWire:
    """The connections of a gloo group; a wait for a message fails `patience` seconds after the message was posted."""

    device = torch.device("cpu")

    def __init__(self, group: Group, patience: float) -> None:
        self._group = group
        self._default_patience = self._patience = patience
        self._is_late = False
        self._ranks = ranks_of(group)
        self._places = {rank: place for place, rank in enumerate(self._ranks)}
        self._place = group.rank()
        self._tag = OURS

    def begin(self, turn: int, patience: float | None = None) -> None:
        """Begin operation number `turn`: tag all later messages with this number, so that they are not mistaken for
        another operation's. Each is waited for at most `patience` seconds; None means the limit passed to the
        constructor."""
        self._tag = OURS + turn % TURNS * STEPS
        self._patience = self._default_patience if patience is None else patience
        # This call's limit may be long, so Ctrl-C must end the waits.
        self._is_late = patience is not None

    def receive(self, memory: Tensor, rank: int) -> Pending:
        """Post a receive of bytes from `rank` into `memory`, and return a Pending to wait for. Raises PeerFailure if
        the receive cannot be posted, as on a closed connection."""
        data = self._receive(memory, rank, self._patience, DATA)
        if memory.nbytes < LONG:
            return data
        # One byte follows a long message, by the data's tag, and so after the data; another byte answers it (rule 2).
        tail = self._receive(_make_byte(), rank, self._patience, DATA)

        def answer() -> _Pending:
            return self._send(_make_byte(), rank, self._patience, ANSWER)

        # The tail first: a broken connection does not end a wait for data of which part has arrived.
        return _Long((tail, data), answer)

    def send(self, memory: Tensor, rank: int) -> Pending:
        """Post a send of the bytes of `memory` to `rank`, and return a Pending to wait for. Raises PeerFailure if the
        send cannot be posted, as on a closed connection."""
        data = self._send(memory, rank, self._patience, DATA)
        if memory.nbytes < LONG:
            return data
        tail = self._send(_make_byte(), rank, self._patience, DATA)
        answer = self._receive(_make_byte(), rank, self._patience, ANSWER)
        # The answer first: a broken connection does not end a wait for data of which part has been sent.
        return _Long((answer, tail, data))

    def _receive(self, memory: Tensor, rank: int, patience: float, step: int) -> _Pending:
        tag, place = self._tag + step, self._places[rank]

        def post(channel: Group) -> dist.Work:
            return channel.recv([memory], place, tag)

        return self._post(rank, patience, post)

    def _send(self, memory: Tensor, rank: int, patience: float, step: int) -> _Pending:
        tag, place = self._tag + step, self._places[rank]

        def post(channel: Group) -> dist.Work:
            return channel.send([memory], place, tag)

        return self._post(rank, patience, post)

    def start(self) -> None:
        """Do nothing: messages start when they are posted."""

    def finish(self) -> None:
        """Do nothing: a message that was waited for has arrived."""

    def gather(self, record: bytes, patience: float | None = None) -> list[bytes]:
        """Send `record`, of the same size on all ranks, to all ranks; return a list of all ranks' records, in the
        group's order. Raises PeerFailure if a message fails, or takes longer than `patience` seconds (None: the limit
        that `begin` set).

        Bruck's algorithm: each step doubles the records that a rank has, log2(size) steps in all. gloo's own all-gather
        is a ring of size - 1 steps, twice as slow for 8 ranks, and does not tell which rank failed.
        """
        # Ctrl-C must end a wait that the caller has made long; a thread per wait would slow other votes.
        wait_for = _Pending.wait if patience is None else _wait_in_thread
        if patience is None:
            patience = self._patience
        size = len(self._ranks)
        # Row k is the record of the k-th rank after this one.
        records = torch.zeros(size, len(record), dtype=torch.uint8, device="cpu")
        records[0] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        count = 1
        step = 0
        while count < size:
            step += 1
            # The rank `count` places ahead has the records that follow this rank's; the last step needs fewer.
            more = min(count, size - count)
            ahead = self._ranks[(self._place + count) % size]
            behind = self._ranks[(self._place - count) % size]
            arriving = self._receive(records[count : count + more], ahead, patience, step)
            leaving = self._send(records[:more], behind, patience, step)
            wait_for(arriving)
            leaving.wait()
            count += more
        # In the group's order: row k becomes the record of the group's k-th rank.
        rows = records.roll(self._place, 0)
        return [row.numpy().tobytes() for row in rows]

    def broadcast(self, memory: Tensor, rank: int) -> None:
        """Broadcast the bytes of `memory` from the sender `rank` into `memory` of all other ranks. Raises PeerFailure
        if the broadcast fails or is late."""
        options = dist.BroadcastOptions()
        options.rootRank = self._places[rank]
        options.asyncOp = True

        def post(channel: Group) -> dist.Work:
            return channel.broadcast([memory], options)

        # None, since all ranks take part.
        self._post(None, self._patience, post).wait()

    def abandon(self) -> None:
        """End all connections of the group, ignoring torch's errors."""
        nothing = _make_byte()
        # A wait that times out ends all connections. Every rank is tried, since a wait on a closed connection
        # fails before it times out, and ends no other.
        for place in range(len(self._ranks)):
            if place != self._place:
                # Errors mean that the group was destroyed or disconnected in the meantime.
                with suppress(RuntimeError, ExchangeError):
                    work = channel_of(self._group).recv([nothing], place, OURS + NOTHING)
                    work.wait(timedelta(milliseconds=1))

    def _post(
        self, rank: int | None, patience: float, post: Callable[[Group], dist.Work]
    ) -> _Pending:
        """Post a message, to be waited for at most `patience` seconds. Raises PeerFailure.

        Not by torch's own functions, which take registered groups only, and do further checks.
        """
        check_there(self._group)
        try:
            return _Pending(
                post(channel_of(self._group)), rank, time.monotonic() + patience, self._is_late
            )
        except RuntimeError as error:
            check_is_torchs(error, __file__)
            raise PeerFailure(rank, _explain(error)) from error
