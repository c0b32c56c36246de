"""NCCL as a wire: what is posted between two starts is one group of sends and receives.

1. A group runs on torch's own stream for the process group: after what the current stream was told
   before `start`, and before what it is told after `wait`. The host goes on meanwhile.
2. All ranks start groups in one order of steps, and a message is in groups of one step at both ends:
   so no group waits for a later one. NCCL pairs messages by their order alone, without tags.
3. The host waits in `finish` and for votes. NCCL does not say when a peer is gone: so it looks again
   and again whether a group is done, and gives up where none has ended for the patience.
4. Which rank kept a group waiting is not to be seen: failures name none.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.plans.programs.messages import MOST_OPS
from shardmath_nccl import batches
from shardmath_nccl.batches import WireMessage, start_batch, start_gather
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement import notes, threads
from shardmath_torch.groups.agreement.wire import LATE, PeerFailure, check_is_torchs

__all__ = ["NcclWire"]

LOOK_AGAIN_S = 0.0002
"""Seconds between two looks at whether a group is done."""

HERE = "shardmath/here"
"""In the group's store: the ranks that have come, one per line."""

MEET_AGAIN_S = 0.01
"""Seconds between two looks at whether all ranks are there, which ask the store."""

ANSWER_S = 1.0
"""For the store to answer after the patience is over: one whose server has stopped never does."""

MOST_AHEAD = 8
"""Groups that may be on their way before the host waits for the first of them: torch's watchdog counts the time of each
from its start."""

_met: WeakSet[compat.Group] = WeakSet()
"""Groups whose ranks have all been there."""


class _Batch:
    """Messages of one group of NCCL's, which are done together."""

    def __init__(self) -> None:
        self.ops: list[WireMessage] = []
        self.works: list[dist.Work] = []
        self._is_ordered = False

    def wait(self) -> None:
        """What the current stream is told from now on comes after all of them. Raises PeerFailure."""
        if not self._is_ordered:
            _order(self.works)
            self._is_ordered = True


def _order(works: Sequence[dist.Work]) -> None:
    """Order the current stream after them; raises what they failed by, as far as is known by now."""
    with _blame():
        for work in works:
            work.wait()


@contextmanager
def _blame() -> Iterator[None]:
    """What torch raises inside is a failure of some rank."""
    try:
        yield
    except RuntimeError as error:
        check_is_torchs(error, __file__, batches.__file__, notes.__file__, threads.__file__)
        raise PeerFailure(None, str(error)) from error


def _settle(works: Sequence[dist.Work], patience: float) -> None:
    """Return when all are done, for the host too. Raises PeerFailure."""
    until = time.monotonic() + patience
    with _blame():
        while not all(work.is_completed() for work in works):
            if time.monotonic() > until:
                raise PeerFailure(None, LATE)
            time.sleep(LOOK_AGAIN_S)
    # Done may mean failed, which waiting raises.
    _order(works)


def _check_handling() -> None:
    """Raise ExchangeError where torch's watchdog would cancel what is on its way, and let it look as if it had come."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if os.environ.get(name) == "2":
            what = (
                f"under {name}=2 torch lets messages that it has cancelled look as if they had come"
            )
            raise ExchangeError(
                f"{what}; leave it out, or set it to 0, so that errors come from here"
            )


def _check_offered(group: compat.Group) -> None:
    """Raise ExchangeError for an NCCL group of torch's without what this wire relies on."""
    if compat.backend_of(group) != "nccl":
        return
    kind, missing = compat.find_missing(group)
    if missing:
        what = f"torch's {kind} lacks {', '.join(missing)}, which moves over NCCL rely on"
        raise ExchangeError(f"{what}; start the processes with TORCH_DIST_USE_NCCL2=0")


class NcclWire:
    """An NCCL process group; waiting ends where nothing has come for `patience` seconds."""

    def __init__(self, group: compat.Group, patience: float) -> None:
        _check_handling()
        _check_offered(group)
        self._group = group
        self._own_patience = self._patience = patience
        self._ranks = compat.ranks_of(group)
        self._places = {rank: place for place, rank in enumerate(self._ranks)}
        self._batch = _Batch()
        self._started: deque[_Batch] = deque()

    @functools.cached_property
    def device(self) -> torch.device:
        """The device that the group is bound to, or the current one: a group has one communicator per device."""
        return compat.device_of(self._group)

    def begin(self, turn: int, patience: float | None = None) -> None:
        """Of the turn, how long it waits: NCCL pairs messages by their order alone, and votes keep that order."""
        self._patience = self._own_patience if patience is None else patience

    def receive(self, memory: Tensor, rank: int) -> _Batch:
        """Bytes from `rank` into `memory`, from the next start on."""
        self._batch.ops.append(WireMessage(False, memory, self._places[rank]))
        return self._batch

    def send(self, memory: Tensor, rank: int) -> _Batch:
        """The bytes of `memory` to `rank`, from the next start on."""
        self._batch.ops.append(WireMessage(True, memory, self._places[rank]))
        return self._batch

    def start(self) -> None:
        """All that was posted goes as one group. Raises PeerFailure."""
        # What is posted from now on is of the next, also where this one fails.
        batch, self._batch = self._batch, _Batch()
        if not batch.ops:
            return
        assert len(batch.ops) <= MOST_OPS, "rounds are cut where both ends of each message know it"
        if len(self._started) == MOST_AHEAD:
            self._finish_first()
        compat.check_there(self._group)
        compat.allow_seconds(self._group, MOST_AHEAD * self._patience)
        with _blame(), compat.closing_group(self._group, self.device):
            batch.works = start_batch(self._group, self.device, batch.ops)
        self._started.append(batch)

    def finish(self) -> None:
        """Return once all that was started has come and left. Raises PeerFailure."""
        while self._started:
            self._finish_first()

    def _finish_first(self) -> None:
        # The one before is done by now, so that the patience is for this one alone.
        _settle(self._started[0].works, self._patience)
        self._started.popleft()

    def gather(self, record: bytes, patience: float | None = None) -> list[bytes]:
        """Every rank's record, all of one size, in the group's order. Raises PeerFailure."""
        if patience is None:
            patience = self._patience
        self._meet(patience)
        compat.check_there(self._group)
        compat.allow_seconds(self._group, patience)
        on_host = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        mine = on_host.to(self.device)
        got = mine.new_empty(len(self._ranks), len(record))
        with _blame():
            work = start_gather(self._group, list(got), mine)
        # Torch gives none where there is nothing to do.
        _settle([] if work is None else [work], patience)
        return [row.numpy().tobytes() for row in got.cpu()]

    def _meet(self, patience: float) -> None:
        """Wait until all ranks are there: in making its communicator NCCL would wait for them for ever, deaf to Ctrl-C.

        A store that an earlier group of the same name has used may say so of ranks that are not.
        """
        store = compat.store_of(self._group)
        if store is None or self._group in _met:
            return
        mine = str(compat.rank_in(self._group))
        until = time.monotonic() + patience

        def wait() -> None:
            notes.add_line(store, HERE, mine)
            while absent := set(self._ranks) - set(map(int, notes.read_lines(store, HERE))):
                if time.monotonic() > until:
                    raise PeerFailure(min(absent), LATE)
                time.sleep(MEET_AGAIN_S)

        with _blame():
            threads.within(patience + ANSWER_S, wait)
        _met.add(self._group)

    def abandon(self) -> None:
        """Aborts the group's communicators. Never raises."""
        with suppress(Exception):
            compat.channel_of(self._group).abort()
