"""NCCL as a wire: what is posted between two starts is one group of sends and receives.

1. Kernels that pack before a `start`, and kernels that unpack after a `wait`, run on the caller's
   current stream; torch orders NCCL's own stream after the first and before the second.
2. NCCL does not say when a peer is gone, so waiting looks again and again whether the group is
   done, and gives up after the patience: `wait` returns when the bytes are there, also for the
   host.
3. Groups are bounded by the pace (`messages.Pace.turns`): NCCL has hung on groups of many thousand
   operations (pytorch issue 174288), and on groups whose operations the two ends split differently.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from shardmath_torch.agreement.wire import PeerFailure, check_is_torchs
from shardmath_torch.compat import Group

__all__ = ["NcclWire"]

LOOK_AGAIN_S = 0.0002
"""Seconds between two looks at whether the group is done."""


class _Batch:
    """What one start set moving."""

    def __init__(self) -> None:
        self.ops: list[dist.P2POp] = []
        self.works: list[dist.Work] = []
        self.until = 0.0


class _Pending:
    """One message of a batch."""

    def __init__(self, batch: _Batch, rank: int) -> None:
        self._batch = batch
        self._rank = rank

    def wait(self) -> None:
        """Return once all of the batch has come and left. Raises PeerFailure."""
        _finish(self._batch.works, self._batch.until, self._rank)


@contextmanager
def _blame(rank: int | None) -> Iterator[None]:
    """What torch raises inside is a failure of this rank."""
    try:
        yield
    except RuntimeError as error:
        check_is_torchs(error, __file__)
        raise PeerFailure(rank, str(error)) from error


def _finish(works: Sequence[dist.Work], until: float, rank: int | None) -> None:
    """Return when all are done, on the device and in the current stream.

    Raises PeerFailure naming `rank`.
    """
    with _blame(rank):
        while not all(work.is_completed() for work in works):
            if time.monotonic() > until:
                raise PeerFailure(rank, "it did not answer in time")
            time.sleep(LOOK_AGAIN_S)
        # They are done: this orders the current stream after them, and raises what they failed by.
        for work in works:
            work.wait()


def _list_works(work: dist.Work | None) -> list[dist.Work]:
    """Torch gives none where there is nothing to do."""
    return [] if work is None else [work]


class NcclWire:
    """An NCCL process group; waiting ends `patience` seconds after the start."""

    device_type = "cuda"

    def __init__(self, group: Group, patience: float) -> None:
        self._group = group
        self._own_patience = self._patience = patience
        self._size = dist.get_world_size(group)
        self._batch = _Batch()

    def begin(self, turn: int, patience: float | None = None) -> None:
        """Of the turn, how long it waits: NCCL pairs messages by their order alone, and votes keep that order."""
        self._patience = self._own_patience if patience is None else patience

    def receive(self, memory: Tensor, rank: int) -> _Pending:
        """Bytes from `rank` into `memory`, from the next start on."""
        op = dist.P2POp(dist.irecv, memory, rank, self._group)
        return self._post(op, rank)

    def send(self, memory: Tensor, rank: int) -> _Pending:
        """The bytes of `memory` to `rank`, from the next start on."""
        op = dist.P2POp(dist.isend, memory, rank, self._group)
        return self._post(op, rank)

    def _post(self, op: dist.P2POp, rank: int) -> _Pending:
        self._batch.ops.append(op)
        return _Pending(self._batch, rank)

    def start(self) -> None:
        """All that was posted goes as one group. Raises PeerFailure."""
        batch = self._batch
        # What is posted from now on is of the next, also where this one fails.
        self._batch = _Batch()
        batch.until = time.monotonic() + self._patience
        if batch.ops:
            with _blame(None):
                batch.works = dist.batch_isend_irecv(batch.ops)

    def gather(self, record: bytes, patience: float | None = None) -> list[bytes]:
        """Every rank's record, all of one size, in the group's order. Raises PeerFailure."""
        if patience is None:
            patience = self._patience
        on_host = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        mine = on_host.cuda()
        got = [torch.empty_like(mine) for _ in range(self._size)]
        with _blame(None):
            work = dist.all_gather(got, mine, group=self._group, async_op=True)
        _finish(_list_works(work), time.monotonic() + patience, None)
        # One copy to the host, not one per rank.
        rows = torch.stack(got).cpu()
        return [row.numpy().tobytes() for row in rows]

    def broadcast(self, memory: Tensor, rank: int) -> None:
        """The bytes of `memory` on `rank` into that of all others. Raises PeerFailure."""
        with _blame(None):
            work = dist.broadcast(memory, rank, group=self._group, async_op=True)
        _finish(_list_works(work), time.monotonic() + self._patience, None)

    def abandon(self) -> None:
        """Aborts the group's communicators. Never raises."""
        with suppress(Exception):
            self._group.abort()
