"""gloo as a wire: messages begin to move when they are posted, and waiting takes a time limit.

gloo ends all connections of a group when a wait of it times out. `abandon` uses that on purpose: it is the only way to
cancel messages that are on their way into memory of the caller.
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

from shardmath_torch.compat import Group
from shardmath_torch.wire import PeerFailure

__all__ = ["GlooWire"]

TAG = 7_348
"""Of our messages, so that they never meet the caller's own."""


class _Pending(NamedTuple):
    work: dist.Work | None
    rank: int | None
    until: float

    def wait(self) -> None:
        if self.work is None:
            return
        left = max(0.001, self.until - time.monotonic())
        try:
            self.work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise PeerFailure(self.rank, _cause(error)) from error


def _cause(error: RuntimeError) -> str:
    text = str(error)
    return "it did not answer in time" if "imed out" in text else "its connection closed" if "losed" in text else text


class GlooWire:
    """A gloo process group; waiting ends `patience` seconds after posting."""

    device_type = "cpu"

    def __init__(self, group: Group, patience: float) -> None:
        self._group, self._patience = group, patience
        self._size = dist.get_world_size(group)
        self._others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]

    def receive(self, memory: Tensor, rank: int) -> _Pending:
        """Bytes from `rank` into `memory`. Raises PeerFailure."""
        return self._posted(rank, lambda: dist.irecv(memory, rank, group=self._group, tag=TAG))

    def send(self, memory: Tensor, rank: int) -> _Pending:
        """The bytes of `memory` to `rank`. Raises PeerFailure."""
        return self._posted(rank, lambda: dist.isend(memory, rank, group=self._group, tag=TAG))

    def start(self) -> None:
        """Nothing: what is posted moves."""

    def gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, all of one size, in the group's order. Raises PeerFailure."""
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        all_records = [torch.empty_like(mine) for _ in range(self._size)]
        self._posted(None, lambda: dist.all_gather(all_records, mine, group=self._group, async_op=True)).wait()
        return [t.numpy().tobytes() for t in all_records]

    def broadcast(self, memory: Tensor, rank: int) -> None:
        """The bytes of `memory` on `rank` into that of all others. Raises PeerFailure."""
        self._posted(None, lambda: dist.broadcast(memory, rank, group=self._group, async_op=True)).wait()

    def abandon(self) -> None:
        """Ends all connections of the group. Never raises."""
        nothing = torch.empty(1, dtype=torch.uint8)
        for rank in self._others[:1]:
            with suppress(RuntimeError, PeerFailure):
                _Pending(dist.irecv(nothing, rank, group=self._group, tag=TAG + 1), rank, time.monotonic()).wait()

    def _posted(self, rank: int | None, post: Callable[[], dist.Work | None]) -> _Pending:
        try:
            return _Pending(post(), rank, time.monotonic() + self._patience)
        except RuntimeError as error:
            raise PeerFailure(rank, _cause(error)) from error
