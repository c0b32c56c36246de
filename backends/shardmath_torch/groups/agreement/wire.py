"""What a transport gives: bytes to a rank, bytes from a rank, and a vote.

1. Everything that a rank will wait for together is posted first (`receive`, `send`), then
   `start`ed, then waited for, and at last `finish`ed. What is started together is at most
   `MOST_OPS` messages of this rank, and of one step at both ends of each message.
2. Memory is contiguous bytes on the wire's device. Waiting for a message is for what this rank does
   next on that device; before the host looks at what came, it finishes.
3. Waiting ends: with the bytes, or after the patience that the wire was opened with, by
   PeerFailure. On a device it may be `finish` that finds out.
4. `begin` says of which turn the messages are that follow: bytes of one turn never arrive in
   another's memory.
5. After a failure nothing may write into memory that the caller owns: `abandon` cancels what is
   still on its way, which ends the group's connections and so lets the other ranks notice.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["LATE", "PeerFailure", "Pending", "Wire", "check_is_torchs", "says_ended"]

TORCH = os.path.dirname(torch.__file__)

LATE = "it did not answer in time"
"""The cause where nothing broke, and the time was over."""


class PeerFailure(Exception):
    """A rank did not do its part: `rank`, None where the transport cannot tell which; `tensor` was on its way."""

    def __init__(self, rank: int | None, cause: str, tensor: str | None = None) -> None:
        super().__init__(cause)
        self.rank = rank
        self.cause = cause
        self.tensor = tensor


def check_is_torchs(error: BaseException, *files: str) -> None:
    """Raises the error itself unless torch raised it, called from one of `files`.

    Otherwise a signal handler's own error, raised meanwhile, would be taken for the network's.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_code.co_filename if trace is not None else files[0]
    # Torch's C++ has no frames of its own: what it raises is raised in the file that called it.
    if raised_in not in files and not raised_in.startswith(TORCH):
        raise error


def says_ended(text: str) -> bool:
    """Whether an error's text says that a connection has ended, as gloo, NCCL and the system word it.

    >>> says_ended("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31337")
    True
    """
    return any(word in text for word in ("losed", "reset by peer", "roken pipe"))


class Pending(Protocol):
    """Bytes on their way."""

    def wait(self) -> None:
        """What is done on the wire's device from now on is done when they are there, or have left.

        Raises PeerFailure.
        """


class Wire(Protocol):
    """A process group as a transport sees it; ranks are those of plans."""

    @property
    def device(self) -> torch.device:
        """Where tensors must be."""

    def begin(self, turn: int, patience: float | None = None) -> None:
        """What is posted from now on is of this turn, as `Turns` counts them, until another begins.

        It waits `patience` seconds instead of the wire's own.
        """

    def receive(self, memory: Tensor, rank: int) -> Pending:
        """Bytes from `rank` into `memory`. Raises PeerFailure."""

    def send(self, memory: Tensor, rank: int) -> Pending:
        """The bytes of `memory` to `rank`. Raises PeerFailure."""

    def start(self) -> None:
        """What was posted since the last start begins to move, at the latest now. Raises PeerFailure."""

    def finish(self) -> None:
        """Returns when all that was started has come and left. Raises PeerFailure."""

    def gather(self, record: bytes, patience: float | None = None) -> list[bytes]:
        """Every rank's record, all of one size, in the group's order.

        Waits `patience` seconds instead of the turn's own. Raises PeerFailure.
        """

    def abandon(self) -> None:
        """Cancels what is on its way. Never raises."""
