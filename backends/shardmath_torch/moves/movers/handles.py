"""Handles: moves that go on beside the thread that called.

1. Each has a thread of its own, which waits for those that the group's earlier calls have left under way: so ranks
   pair calls in the order in which they were made, whatever goes on beside. Other calls on the group wait likewise
   (`turns`).
2. On a GPU a move begins after what its caller had queued before the call, and what the caller queues after `wait`
   comes after the move. Both are orders of streams: nobody waits on the host for either.
3. Ctrl-C reaches the thread that waits, and never the move. Left unfinished at the end of the process, a move is called
   off a few seconds later: the group is broken, and the others are told.
"""

from __future__ import annotations

import warnings
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
    """A move that is under way: what `move(..., async_op=True)` returns.

    Of one that fails and that nobody waits for there is a RuntimeWarning.
    """

    def __init__(self, party: Party, act: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._was_told = False
        device = party.wire.device
        self._order = _OrderOfStreams(device) if device.type == "cuda" else _Order()
        turns = party.turns

        def run() -> None:
            turns.heard.is_beside = True
            self._run(act, former)

        def call_off() -> None:
            party.give_up("its process ended in the middle of a move")

        self._errand = Errand(run, call_off)
        former = turns.put_beside(self._errand)

    def __repr__(self) -> str:
        state = "is under way" if not self.done() else "failed" if self._error else "is done"
        return f"<a move that {state}>"

    def __del__(self) -> None:
        # There is none where the handle could not be made.
        error = getattr(self, "_error", None)
        if error is not None and not self._was_told:
            what = "a move failed that was made with async_op=True, and nobody waited for it"
            warnings.warn(f"{what}: {message_of(error)}", RuntimeWarning, stacklevel=2)

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._errand.is_over

    def wait(self, timeout: float | None = None) -> None:
        """Return once it has ended here, as the call without `async_op` would. Raises what that would, each time.

        `timeout` in seconds: an ExchangeError after it, while the move goes on. So it does where the wait is left by
        Ctrl-C; wait again.
        """
        if timeout is not None and not is_time(timeout):
            raise ExchangeError(word_bad_time(timeout))
        if self._errand.is_mine:
            raise ExchangeError("a move waits for itself; wait in the thread that has made it")
        if not self._errand.wait(timeout):
            what = f"the move is under way after {shown(timeout)} s"
            raise ExchangeError(f"{what}; wait again, and leave its tensors alone meanwhile")
        if not self.done():
            raise ExchangeError("this process was forked from the one that moves; wait there")
        self._order.follow()
        self._was_told = True
        if self._error is not None:
            # One object raised twice would grow by a trace each time.
            raise self._error.with_traceback(None)

    def _run(self, act: Callable[[], None], former: Errand | None) -> None:
        """Move, after the former one."""
        try:
            if former is not None:
                former.wait()
            with self._order.begin():
                act()
        except BaseException as error:
            self._error = error


def find_objection(party: Party, thread: str | None, async_op: object) -> str:
    """Why a move of the calling thread cannot go on beside it; "" where it can."""
    if not isinstance(async_op, bool):
        return f"async_op={shown(async_op)}; pass True or False"
    if not compat.has_own_connections(party.group):
        what = "async_op=True on the default process group, whose collectives others call meanwhile"
        return f"{what}; compile on a group of its own, dist.new_group()"
    if block_of(party.group) is not None:
        return "in smt.commit moves follow each other; leave async_op out"
    try:
        check_thread(party.turns, thread)
    except ExchangeError as error:
        return word_objection(error)
    return ""


def start(party: Party, act: Callable[[], None]) -> Handle:
    """Do it beside, after all that this group's earlier calls have left under way."""
    handle = Handle(party, act)
    handle._errand.start()
    return handle


class _Order:
    """What comes before a move, and what after it; on a CPU calls alone are in order."""

    def begin(self) -> AbstractContextManager[None]:
        """What the move happens within."""
        return nullcontext()

    def follow(self) -> None:
        """What the calling thread does from now on comes after the move."""


class _OrderOfStreams(_Order):
    """On a GPU: a stream of the move's own, between events of its caller's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = torch.cuda.Event()
        self._before.record(torch.cuda.current_stream(device))
        self._after = torch.cuda.Event()
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def begin(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._before)
            yield
            self._after.record(self._stream)

    def follow(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._after)
