"""Wire: NCCL as a wire, on which the messages posted between two starts are one NCCL group.

1. A group runs on torch's own stream for the process group: after the current stream's work before
   `start`, and before its work after `wait`. The host continues in the meantime.
2. All ranks start groups in one order of steps, and a message is in groups of one step at both ends:
   so no group waits for a later one. NCCL pairs messages by their order only, without tags.
3. The host waits in `finish` and for votes. NCCL does not report a lost peer: so the host polls
   whether a group is done, and gives up if none has ended within the patience.
4. Another thread posts the groups, for two reasons. NCCL counts open groups per thread, and one whose
   messages it refuses stays open (2.28.9): all that the thread posts later, in any group, would never
   start. And a post can wait for a lost peer, which ends neither by itself nor by Ctrl-C. It is the same
   thread until a post fails, since torch keeps a cache of CUDA events for each thread that has posted.
5. NCCL does not tell which rank kept a group waiting: failures name none.
"""

from __future__ import annotations

import functools
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar
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
from shardmath_torch.groups.agreement.turns import turns_of
from shardmath_torch.groups.agreement.wire import LATE, PeerFailure, check_is_torchs

__all__ = ["NcclWire"]

LOOK_AGAIN_S = 0.0002
"""Time between two checks whether a group is done."""

HERE = "shardmath/here"
"""Key in the group's store: the ranks that have come, one per line."""

MEET_AGAIN_S = 0.01
"""Time between two checks whether all ranks have come, which read the store."""

ANSWER_S = 1.0
"""Time for the store to answer after the patience is over: it never does if its server has stopped."""

SETTLE_S = 1.0
"""Time for a post to end after Ctrl-C: the group's communicators are aborted next."""

MOST_AHEAD = 8
"""Most groups in flight before the host waits for the first: torch's watchdog measures each from its start."""

_T = TypeVar("_T")

_met: WeakSet[compat.Group] = WeakSet()
"""Groups whose ranks have all come."""

_connected: WeakSet[compat.Group] = WeakSet()
"""Groups that have a communicator."""


class _Batch:
    """Messages of one NCCL group, which are done together."""

    def __init__(self) -> None:
        self.ops: list[WireMessage] = []
        self.works: list[dist.Work] = []
        # Whether later work on the current stream already waits for the messages.
        self._is_ordered = False

    def wait(self) -> None:
        """Make later work on the current CUDA stream wait for all messages of this batch. Raises PeerFailure if a
        message is already known to have failed."""
        if not self._is_ordered:
            _order(self.works)
            self._is_ordered = True


def _order(works: Sequence[dist.Work]) -> None:
    """Order the current stream after the works. Raises PeerFailure if one is known to have failed."""
    with _converting_errors():
        for work in works:
            work.wait()


@contextmanager
def _converting_errors() -> Iterator[None]:
    """Turn torch's errors into PeerFailures of an unknown rank."""
    try:
        yield
    except RuntimeError as error:
        check_is_torchs(error, __file__, batches.__file__, notes.__file__, threads.__file__)
        raise PeerFailure(None, str(error)) from error


def _settle(works: Sequence[dist.Work], patience: float) -> None:
    """Wait on the host until all works are done. Raises PeerFailure."""
    until = time.monotonic() + patience
    with _converting_errors():
        while not all(work.is_completed() for work in works):
            if time.monotonic() > until:
                raise PeerFailure(None, LATE)
            time.sleep(LOOK_AGAIN_S)
    # Done may mean failed, which waiting raises.
    _order(works)


def _check_handling() -> None:
    """Raise ExchangeError if torch's watchdog would cancel messages in flight, and report them as received."""
    for name in ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"):
        if os.environ.get(name) == "2":
            what = f"the environment has {name}=2, with which torch reports cancelled messages as received"
            fix = "unset it, or set it to 0, before the process starts"
            raise ExchangeError(f"{what}; {fix}")


def _check_offered(group: compat.Group) -> None:
    """Raise ExchangeError for an NCCL group that lacks APIs on which this wire relies."""
    if compat.backend_of(group) != "nccl":
        return
    kind, missing = compat.find_missing(group)
    if missing:
        what = f"torch's {kind} lacks {', '.join(missing)}, which moves over NCCL rely on"
        raise ExchangeError(f"{what}; start the processes with TORCH_DIST_USE_NCCL2=0")


class NcclWire:
    """The connections of an NCCL group, over which batches of messages are started and waited for in order. A wait
    raises PeerFailure if a batch takes more than `patience` seconds, counted from when the host begins to wait for that
    batch."""

    def __init__(self, group: compat.Group, patience: float) -> None:
        _check_handling()
        _check_offered(group)
        self._group = group
        self._default_patience = self._patience = patience
        self._ranks = compat.ranks_of(group)
        self._places = {rank: place for place, rank in enumerate(self._ranks)}
        self._batch = _Batch()
        self._started_batches: deque[_Batch] = deque()
        self._posting = turns_of(group).posting
        self._is_abandoned = False

    @functools.cached_property
    def device(self) -> torch.device:
        """The device on which the group communicates: the one that the group is bound to, or else the device that was
        current when this property was first read.

        A group has one communicator per device.
        """
        return compat.device_of(self._group)

    def begin(self, turn: int, patience: float | None = None) -> None:
        """Set how many seconds the host waits, from now on, for a batch of messages to complete: `patience`, or if
        None, the limit passed to the constructor. `turn` is not used: NCCL pairs messages by order."""
        self._patience = self._default_patience if patience is None else patience

    def receive(self, memory: Tensor, rank: int) -> _Batch:
        """Queue a receive of bytes from `rank` into `memory`; the next `start` launches it with all queued messages.
        Return the _Batch of these messages, which are waited for together."""
        self._batch.ops.append(WireMessage(False, memory, self._places[rank]))
        return self._batch

    def send(self, memory: Tensor, rank: int) -> _Batch:
        """Queue a send of the bytes of `memory` to `rank`; the next `start` launches it with all queued messages.
        Return the _Batch of these messages, which are waited for together."""
        message = WireMessage(sends=True, memory=memory, place=self._places[rank])
        self._batch.ops.append(message)
        return self._batch

    def start(self) -> None:
        """Start all queued messages as one batch, coalesced as by ncclGroupStart and ncclGroupEnd; if 8 batches are in
        flight, first wait for the oldest. Raises PeerFailure if the start fails, or if the oldest batch fails or is
        late."""
        # Messages posted later are of the next group, even if this one fails.
        batch, self._batch = self._batch, _Batch()
        if not batch.ops:
            return
        assert len(batch.ops) <= MOST_OPS, "rounds are cut to this size, equally at both ends"
        if len(self._started_batches) == MOST_AHEAD:
            self._finish_first()
        compat.check_there(self._group)
        # torch's watchdog measures from now on, but each batch in flight before this one may take all its patience,
        # to be posted and to be done.
        compat.allow_seconds(self._group, 2 * MOST_AHEAD * self._patience)
        post = partial(start_batch, self._group, self.device, batch.ops)
        batch.works = self._post(post, self._patience)
        self._started_batches.append(batch)

    def finish(self) -> None:
        """Wait, on the host, until all started messages have been sent and received. Raises PeerFailure if a message
        fails or is late."""
        while self._started_batches:
            self._finish_first()

    def _finish_first(self) -> None:
        # The group before is done by now, so the patience is for this group only.
        _settle(self._started_batches[0].works, self._patience)
        self._started_batches.popleft()

    def gather(self, record: bytes, patience: float | None = None) -> list[bytes]:
        """Send `record`, of the same size on all ranks, to all ranks; return a list of all ranks' records, in the
        group's order. Raises PeerFailure if the gather fails, or if a wait for other ranks takes longer than `patience`
        seconds (None: the limit that `begin` set)."""
        if patience is None:
            patience = self._patience
        self._meet(patience)
        compat.check_there(self._group)
        # All ranks have come. To make the communicator, which happens once, takes NCCL long if they are many.
        is_new = self._group not in _connected
        longest = max(patience, compat.time_limit_of(self._group)) if is_new else patience
        compat.allow_seconds(self._group, longest + patience)
        on_host = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        mine = on_host.to(self.device)
        records = mine.new_empty(len(self._ranks), len(record))
        work = self._post(partial(start_gather, self._group, list(records), mine), longest)
        _connected.add(self._group)
        _settle([] if work is None else [work], patience)
        return [row.numpy().tobytes() for row in records.cpu()]

    def _post(self, post: Callable[[], _T], patience: float) -> _T:
        """Return the result of `post`, which runs in the posting thread as it would run here: on the same GPU and CUDA
        stream, and in inference mode or not. Raises PeerFailure if torch fails, or after `patience` seconds."""
        # None, on the CPU, changes nothing.
        stream = torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None
        in_inference = torch.is_inference_mode_enabled()

        def act() -> _T:
            if stream is not None:
                # Otherwise the thread would go back to GPU 0 after the post, and take memory there.
                torch.cuda.set_device(self.device)
            with torch.inference_mode(in_inference), torch.cuda.stream(stream):
                result = post()
            if self._is_abandoned:
                # Nobody waits for it any more, and its communicator may be newer than the abort.
                self._abort()
            return result

        with _converting_errors():
            try:
                return self._posting.within(patience, act, SETTLE_S)
            except threads.Late:
                raise PeerFailure(None, LATE) from None

    def _meet(self, patience: float) -> None:
        """Wait until all ranks have come: making its communicator, NCCL would wait for ever, and ignore Ctrl-C.

        If an earlier group of the same name used the store, its ranks may be taken for this group's.
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

        with _converting_errors():
            threads.within(patience + ANSWER_S, wait)
        _met.add(self._group)

    def abandon(self) -> None:
        """Abort the group's communicators, ignoring errors. Waits for that at most as long as for a batch."""
        self._is_abandoned = True
        with suppress(Exception):
            threads.within(self._default_patience, self._abort)

    def _abort(self) -> None:
        with suppress(Exception):
            compat.channel_of(self._group).abort()
