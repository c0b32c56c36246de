"""Handles: moves in background threads.

1. Each move has its own thread, which waits for the group's earlier background moves: so ranks pair calls in the order
   in which they were made. Other calls on the group wait for background moves, too (`turns`).
2. On a GPU a move begins after the work that its caller queued before the call, and work that the caller queues after
   `wait` comes after the move. Both are orders of streams, for which the host does not wait.
3. Ctrl-C reaches the thread that waits, and never the move. A move that is unfinished when the process exits is called
   off a few seconds later: the group is broken, and the cause is reported to the others.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from shardmath.base.errors import ExchangeError
from shardmath.base.public import public
from shardmath.base.text import message_of, shown
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.naming import word_objection
from shardmath_torch.groups.agreement.party import Party, is_time, word_bad_time
from shardmath_torch.groups.agreement.threads import Errand
from shardmath_torch.groups.agreement.turns import check_thread
from shardmath_torch.moves.commits.blocks import block_of

__all__ = ["Handle", "find_objection", "start"]


@public
class Handle:
    """A move that runs in the background, as returned by `move(..., async_op=True)`; `wait()` returns when it has
    ended.

    If it fails and nobody waits for it, there is a RuntimeWarning.
    """

    def __init__(self, party: Party, act: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._was_awaited = False
        device = party.wire.device
        self._order = _OrderOfStreams(device) if device.type == "cuda" else _Order()
        turns = party.turns
        # Weakly: a handle that is kept must not keep a group's listening thread.
        self._turns = weakref.ref(turns)

        def run() -> None:
            # Of this thread: its calls on the group do not wait for background moves, of which they are one.
            turns.heard.is_beside = True
            self._run(act, previous)

        def call_off() -> None:
            party.give_up("its process ended in the middle of a move")

        self._errand = Errand(run, call_off)
        # Read by `run`, which does not begin before `start`.
        previous = turns.put_beside(self._errand)

    def __repr__(self) -> str:
        state = "is in flight" if not self.done() else "failed" if self._error else "is done"
        return f"<a move that {state}>"

    def __del__(self) -> None:
        # Without the attribute if `__init__` raised.
        error = getattr(self, "_error", None)
        if error is not None and not self._was_awaited:
            what = "a move failed that was made with async_op=True, and nobody waited for it"
            warnings.warn(f"{what}: {message_of(error)}", RuntimeWarning, stacklevel=2)

    @compat.untraced
    def done(self) -> bool:
        """Whether the move has ended, successfully or not."""
        return self._errand.is_over

    @compat.untraced
    def wait(self, timeout: float | None = None) -> None:
        """Wait until the move has ended on this rank; raises as the call without `async_op` would, each time.

        Raises ExchangeError after `timeout` seconds; the move continues, as it does if Ctrl-C ends the wait, and may be
        waited for again. Also raises ExchangeError, at once, in the middle of another call on the process group, as in
        a progress callback, for whose end the move waits.
        """
        if timeout is not None and not is_time(timeout):
            raise ExchangeError(word_bad_time(timeout))
        if self._errand.is_mine:
            what = "handle.wait() was called inside of the move that it would wait for"
            raise ExchangeError(f"{what}; call it in the thread that started the move")
        turns = self._turns()
        if turns is not None and not self.done():
            # The move waits for the operation that this thread is in.
            turns.refuse_nested()
        if not self._errand.wait(None if timeout is None else float(timeout)):
            what = f"the move is still in flight after {shown(timeout)} s"
            raise ExchangeError(f"{what}; wait again, and do not touch its tensors until then")
        if not self.done():
            what = "handle.wait() was called in a process forked from the one that moves"
            raise ExchangeError(f"{what}; call it in the process that started the move")
        # On a GPU, the caller's later work then comes after the move.
        self._order.follow()
        self._was_awaited = True
        if self._error is not None:
            # Without its trace, which would grow each time the exception is raised.
            raise self._error.with_traceback(None)

    def _run(self, act: Callable[[], None], previous: Errand | None) -> None:
        """Move, after the previous background move."""
        try:
            if previous is not None:
                previous.wait()
            with self._order.begin():
                act()
        except BaseException as error:
            self._error = error


def find_objection(party: Party, thread: str | None, async_op: object) -> str:
    """Return an error text if the calling thread cannot run a move in the background on the process group of `party`,
    or if `async_op` is not a bool; else "". Ranks pair their calls by the name `thread`, so no other thread can be
    using it."""
    if not isinstance(async_op, bool):
        return f"async_op={shown(async_op)} is not a bool; pass True or False"
    if not compat.has_own_connections(party.group):
        what = "async_op=True on the default process group, whose collectives others call meanwhile"
        return f"{what}; compile on a separate group, dist.new_group()"
    if block_of(party.group) is not None:
        return "async_op=True in smt.commit, where moves run one after another; leave async_op out"
    try:
        check_thread(party.turns, thread)
    except ExchangeError as error:
        return word_objection(error)
    return ""


def start(party: Party, act: Callable[[], None]) -> Handle:
    """Start the move `act` in a background thread, after earlier background moves on the same process group, and return
    its handle. `party` is this rank as a member of that group."""
    handle = Handle(party, act)
    handle._errand.start()
    return handle


class _Order:
    """The order of a move and its caller's work on the device; on a CPU the order of calls is enough."""

    def begin(self) -> AbstractContextManager[None]:
        """Return a context manager to run the move in: the move's work on the device then comes after the caller's
        earlier work."""
        return nullcontext()

    def follow(self) -> None:
        """Delay later GPU work of the calling thread until the background move has finished on the GPU. The call itself
        does not wait."""


class _OrderOfStreams(_Order):
    """The order on a GPU, by a separate stream for the move, between two events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin_event = torch.cuda.Event()
        self._begin_event.record(torch.cuda.current_stream(device))
        self._end_event = torch.cuda.Event()
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def begin(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._begin_event)
            yield
            self._end_event.record(self._stream)

    def follow(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._end_event)
