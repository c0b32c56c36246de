"""Wire: the interface of transports, which send bytes to a rank, receive bytes from one, and gather records.

1. Messages that belong together are posted first (`receive`, `send`), then `start`ed, waited for,
   and `finish`ed. At most `MOST_OPS` messages of this rank start together, and both ends of each
   message start it in the same step.
2. Memory is contiguous bytes on the wire's device. Waiting for a message orders this rank's next
   work on that device after it; the host must `finish` before it reads received bytes.
3. A wait ends with the bytes, or by PeerFailure after the patience that the wire was opened with.
   On a device, `finish` may be the call that raises.
4. `begin` marks the turn of the messages that follow: bytes of one turn never arrive in another's
   memory.
5. After a failure nothing may write into memory that the caller owns: `abandon` cancels the messages
   in flight, which ends the group's connections and so lets the other ranks notice.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["LATE", "PeerFailure", "Pending", "Wire", "check_is_torchs", "says_ended"]

TORCH = os.path.dirname(torch.__file__) + os.sep

LATE = "it did not answer in time"
"""The cause if no connection broke, but the time was over."""


class PeerFailure(Exception):
    """The failure of `rank` (None if the transport cannot tell which rank failed), while `tensor` (None if unknown) was
    in flight."""

    def __init__(self, rank: int | None, cause: str, tensor: str | None = None) -> None:
        super().__init__(cause)
        self.rank = rank
        self.cause = cause
        self.tensor = tensor


def check_is_torchs(error: BaseException, *files: str) -> None:
    """Raise `error` again unless it was raised in torch's source files or in one of `files`. These, the paths of other
    source files that call torch, are passed as further positional arguments.

    Otherwise an error of a signal handler, raised during the call, would be taken for the network's.
    """
    trace = error.__traceback__
    if trace is None:
        # Torch made it, and returned it: nobody has raised it yet.
        return
    while trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_code.co_filename
    # Torch's C++ has no Python frames: its errors seem to come from the file that called it.
    if raised_in not in files and not raised_in.startswith(TORCH):
        raise error


def says_ended(text: str) -> bool:
    """Whether an error's text, by gloo, NCCL or the system, reports an ended connection.

    >>> says_ended("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31337")
    True
    """
    # Without first letters, which may be capitals.
    return any(word in text for word in ("losed", "reset by peer", "roken pipe"))


class Pending(Protocol):
    """A message in flight, being sent or received, that can be waited for."""

    def wait(self) -> None:
        """Make later work on the device of the message's tensor wait until this message has been received or sent.
        Raises PeerFailure if the message has failed or takes too long."""


class Wire(Protocol):
    """The connections of one process group, over which a rank sends bytes, receives bytes and gathers records."""

    @property
    def device(self) -> torch.device:
        """The device on which tensors to send or receive must be."""

    def begin(self, turn: int, patience: float | None = None) -> None:
        """Mark later messages with `turn`, the number of the operation that they belong to, and let waits for them take
        at most `patience` seconds (None: the wire's default)."""

    def receive(self, memory: Tensor, rank: int) -> Pending:
        """Post a receive of bytes from `rank` into `memory`, and return a Pending to wait for. Raises PeerFailure if
        the connection to `rank` is already lost."""

    def send(self, memory: Tensor, rank: int) -> Pending:
        """Post a send of the bytes of `memory` to `rank`, and return a Pending to wait for. Raises PeerFailure if the
        connection to `rank` is already lost."""

    def start(self) -> None:
        """Start the posted messages that have not started yet. Raises PeerFailure if that fails, or if earlier messages
        fail or take too long."""

    def finish(self) -> None:
        """Wait until all started messages have been sent and received. Raises PeerFailure if a message fails or takes
        too long."""

    def gather(self, record: bytes, patience: float | None = None) -> list[bytes]:
        """Return every rank's `record` (bytes of equal length), in the order of the group's ranks, within `patience`
        seconds (None: the time passed to `begin`).

        Raises PeerFailure.
        """

    def abandon(self) -> None:
        """Cancel the messages in flight. Never raises."""
