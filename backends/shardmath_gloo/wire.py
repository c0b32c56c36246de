"""gloo as a wire: messages begin to move when they are posted, and waiting takes a time limit.

1. gloo ends all connections of a group when a wait of it times out. `abandon` uses that on purpose:
   it is the only way to cancel messages that are on their way into memory of the caller.
2. When a connection breaks, gloo ends every wait on it but that for the message of which part has
   moved, which goes on until its time is over. So a long message is followed by one byte, and
   answered by one: receivers wait for the first of these and senders for the other, which a break
   ends at once.
"""

from __future__ import annotations

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
"""In the tag of each of our messages, so that they never meet the caller's own."""

STEPS = 32
"""Tags per turn: DATA, then one for each step of its vote, which are fewer than 30. Steps are of different lengths, and
gloo ends the process where a message is longer than the memory that waits for it. The last two are of no step."""

DATA, ANSWER, NOTHING = 0, STEPS - 2, STEPS - 1
"""Of what is moved, of the answers to long messages, and of what is never sent."""

LONG = 1 << 20
"""Bytes from which on a message is long: shorter ones are seldom caught half moved, and would feel two more."""

LEAST_S = 0.001
"""Shortest wait: gloo takes none at all for one without an end."""

TURNS = OURS // STEPS
"""Turns until tags repeat; what is on its way is of one turn alone."""


class _Pending(NamedTuple):
    """What was posted, to or from `rank` (None: all ranks), and until when to wait for it.

    `is_late`: the caller has said that it may take long.
    """

    work: dist.Work
    rank: int | None
    until: float
    is_late: bool = False

    def wait(self) -> None:
        """Return once it has come or left. Raises PeerFailure."""
        if self.is_late:
            _wait_beside(self._replace(is_late=False))
            return
        left = max(LEAST_S, self.until - time.monotonic())
        try:
            self.work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            check_is_torchs(error, __file__)
            raise PeerFailure(self.rank, _explain(error)) from error


def _wait_beside(pending: _Pending) -> None:
    """Wait on a thread of its own, so that Ctrl-C is taken meanwhile: gloo's wait is deaf to it until its end."""
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            pending.wait()
        except BaseException as error:
            # Raised below, where somebody can take it.
            failed.append(error)

    threads.start(wait).join()
    if failed:
        raise failed[0]


class _Long(NamedTuple):
    """A long message: what a break ends comes first. `answer` is posted once all has come."""

    parts: tuple[_Pending, ...]
    answer: Callable[[], _Pending] | None = None

    def wait(self) -> None:
        """Return once all of it has come or left. Raises PeerFailure."""
        for part in self.parts:
            part.wait()
        if self.answer is not None:
            self.answer().wait()


def _explain(error: RuntimeError) -> str:
    """What gloo's error means, as far as its text says it."""
    text = str(error)
    if "imed out" in text:
        return LATE
    return "its connection closed" if says_ended(text) else text


def _make_byte() -> Tensor:
    """Memory for what follows or answers a long message; its value means nothing."""
    return torch.empty(1, dtype=torch.uint8, device="cpu")


class GlooWire:
    """A gloo process group; waiting ends `patience` seconds after posting."""

    device = torch.device("cpu")

    def __init__(self, group: Group, patience: float) -> None:
        self._group = group
        self._own_patience = self._patience = patience
        self._is_late = False
        self._ranks = ranks_of(group)
        self._places = {rank: place for place, rank in enumerate(self._ranks)}
        self._place = group.rank()
        self._tag = OURS

    def begin(self, turn: int, patience: float | None = None) -> None:
        """What is posted from now on is of this turn, and waits `patience` seconds instead of the wire's own."""
        self._tag = OURS + turn % TURNS * STEPS
        self._patience = self._own_patience if patience is None else patience
        self._is_late = patience is not None

    def receive(self, memory: Tensor, rank: int) -> Pending:
        """Bytes from `rank` into `memory`. Raises PeerFailure."""
        data = self._receive(memory, rank, self._patience, DATA)
        if memory.nbytes < LONG:
            return data
        # Of one tag with the data, hence after it: messages of a tag come in order.
        tail = self._receive(_make_byte(), rank, self._patience, DATA)

        def answer() -> _Pending:
            return self._send(_make_byte(), rank, self._patience, ANSWER)

        # The tail first: a wait for data of which some have come is deaf to a broken connection.
        return _Long((tail, data), answer)

    def send(self, memory: Tensor, rank: int) -> Pending:
        """The bytes of `memory` to `rank`. Raises PeerFailure."""
        data = self._send(memory, rank, self._patience, DATA)
        if memory.nbytes < LONG:
            return data
        tail = self._send(_make_byte(), rank, self._patience, DATA)
        answer = self._receive(_make_byte(), rank, self._patience, ANSWER)
        # The answer first, for the same reason.
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
        """Nothing: what is posted moves."""

    def finish(self) -> None:
        """Nothing: what was waited for is there."""

    def gather(self, record: bytes, patience: float | None = None) -> list[bytes]:
        """Every rank's record, all of one size, in the group's order. Raises PeerFailure.

        Waits `patience` seconds instead of the turn's own.

        Bruck's algorithm: each step doubles what a rank has, log2(size) steps in all. gloo's own
        all-gather is a ring of size - 1 steps, twice as slow for 8 ranks, and does not tell who
        failed.
        """
        # Ctrl-C has to end a wait that the caller has made long; a thread for each would slow other votes.
        wait_for = _Pending.wait if patience is None else _wait_beside
        if patience is None:
            patience = self._patience
        size = len(self._ranks)
        # Row k is the record of the k-th rank after this one.
        got = torch.zeros(size, len(record), dtype=torch.uint8, device="cpu")
        got[0] = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        have = 1
        step = 0
        while have < size:
            step += 1
            more = min(have, size - have)
            ahead = self._ranks[(self._place + have) % size]
            behind = self._ranks[(self._place - have) % size]
            arriving = self._receive(got[have : have + more], ahead, patience, step)
            leaving = self._send(got[:more], behind, patience, step)
            wait_for(arriving)
            leaving.wait()
            have += more
        # In the group's order: row k becomes that of its k-th rank.
        rows = got.roll(self._place, 0)
        return [row.numpy().tobytes() for row in rows]

    def broadcast(self, memory: Tensor, rank: int) -> None:
        """The bytes of `memory` on `rank` into that of all others. Raises PeerFailure."""
        options = dist.BroadcastOptions()
        options.rootRank = self._places[rank]
        options.asyncOp = True

        def post(channel: Group) -> dist.Work:
            return channel.broadcast([memory], options)

        self._post(None, self._patience, post).wait()

    def abandon(self) -> None:
        """Ends all connections of the group. Never raises."""
        nothing = _make_byte()
        # A wait that times out ends all connections. One rank after the other: a wait on a connection that is
        # closed already does not time out, and ends no other.
        for place in range(len(self._ranks)):
            if place != self._place:
                # Also of a group that was destroyed meanwhile; one that was disconnected has none.
                with suppress(RuntimeError, ExchangeError):
                    work = channel_of(self._group).recv([nothing], place, OURS + NOTHING)
                    work.wait(timedelta(milliseconds=1))

    def _post(
        self, rank: int | None, patience: float, post: Callable[[Group], dist.Work]
    ) -> _Pending:
        """What was posted, to be waited for until the patience is over. Raises PeerFailure.

        Not by torch's own functions, which know registered groups alone, and ask more than this.
        """
        check_there(self._group)
        try:
            return _Pending(
                post(channel_of(self._group)), rank, time.monotonic() + patience, self._is_late
            )
        except RuntimeError as error:
            check_is_torchs(error, __file__)
            raise PeerFailure(rank, _explain(error)) from error
