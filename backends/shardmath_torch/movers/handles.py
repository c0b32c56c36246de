"""Handles: moves that go on beside the thread that called.

1. Each has a thread of its own, which waits for those that the group's earlier calls have left under way: so ranks
   pair calls in the order in which they were made, whatever goes on beside. Other calls on the group wait likewise
   (`turns`).
2. On a GPU a move begins after what its caller had queued before the call, and what the caller queues after `wait`
   comes after the move. Both are orders of streams: nobody waits on the host for either.
3. Left unfinished at the end of the process, a move is left in the middle, as it is by Ctrl-C.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown
from shardmath_torch.agreement import threads
from shardmath_torch.agreement.party import is_time, word_bad_time
from shardmath_torch.agreement.turns import Turns

__all__ = ["Handle", "start"]


class Handle:
    """A move that is under way: what `move(..., async_op=True)` returns."""

    def __init__(self, order: _Order) -> None:
        self._order = order
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        state = "under way" if not self.done() else "failed" if self._error else "done"
        return f"<a move that is {state}>"

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._thread is not None and not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Return once it has ended here, as the call without `async_op` would. Raises what that would, each time.

        `timeout` in seconds: an ExchangeError after it, while the move goes on. So it does where the wait is left by
        Ctrl-C; wait again.
        """
        if timeout is not None and not is_time(timeout):
            raise ExchangeError(word_bad_time(timeout))
        assert self._thread is not None, "started as it was made"
        self._thread.join(timeout)
        if self._thread.is_alive():
            what = f"the move is under way after {shown(timeout)} s"
            raise ExchangeError(f"{what}; wait again, and leave its tensors alone meanwhile")
        self._order.follow()
        if self._error is not None:
            # One object raised twice would grow by a trace each time.
            raise self._error.with_traceback(None)

    def _run(self, act: Callable[[], None], former: threading.Thread | None, turns: Turns) -> None:
        """Move, after the former one."""
        turns.heard.is_beside = True
        try:
            if former is not None:
                former.join()
            with self._order.begin():
                act()
        except BaseException as error:
            self._error = error


def start(turns: Turns, act: Callable[[], None], device_type: str) -> Handle:
    """Do it beside, after all that this group's earlier calls have left under way."""
    handle = Handle(_OrderOfStreams() if device_type == "cuda" else _Order())
    former = turns.beside
    handle._thread = threads.start(lambda: handle._run(act, former, turns))
    turns.beside = handle._thread
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

    def __init__(self) -> None:
        self._before = torch.cuda.Event()
        self._before.record()
        self._after = torch.cuda.Event()
        self._stream = torch.cuda.Stream()

    @contextmanager
    def begin(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._before)
            yield
            self._after.record()

    def follow(self) -> None:
        torch.cuda.current_stream().wait_event(self._after)
