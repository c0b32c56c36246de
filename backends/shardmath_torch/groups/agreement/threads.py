"""Threads beside: calls of torch that this thread does not wait for, or not without an end.

1. They are daemons, since a call of torch may take its whole time limit and a process that is done
   should end before.
2. Python ends daemons on their way back from C++, which ends the process with SIGABRT. So at exit
   they are told to leave (`make_bell`), and are waited for a little; errands that go on all the same
   are called off.
3. An errand is a thread for whose end others wait. A wait that is left by Ctrl-C leaves it as it is:
   after `Thread.join` CPython 3.11 would take it for ended.

>>> errand = Errand(lambda: None)
>>> errand.start()
>>> errand.wait(), errand.is_over
(True, True)
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

__all__ = ["Errand", "make_bell", "start", "within"]

LAST_SECONDS = 3.0
"""What they get at exit, all together: time for a call that a broken connection ends."""

LAST_CALL_SECONDS = 1.0
"""What errands get after that, once they are called off."""

LOOK_AGAIN_S = 1.0
"""While an errand is under way, whether its thread still is: in a forked process it is not."""

SETTLE_AGAIN_S = 0.001
"""While an interrupted call has not ended."""

_T = TypeVar("_T")

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_errands: weakref.WeakSet[Errand] = weakref.WeakSet()
_bells: weakref.WeakSet[threading.Event] = weakref.WeakSet()


def start(act: Callable[[], None]) -> threading.Thread:
    """A thread that acts; `act` handles its own errors."""
    thread = threading.Thread(target=act, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def within(limit: float, make: Callable[[], _T], settle: float = 0.0) -> _T:
    """What it gives, made on its own thread: torch, which waits in it for other processes, is deaf to Ctrl-C.

    Raises what it raises, and RuntimeError once `limit` seconds are over. Left by Ctrl-C, it first gives the thread
    `settle` seconds to end.
    """
    made: list[_T] = []
    failed: list[BaseException] = []

    def act() -> None:
        try:
            made.append(make())
        except BaseException as error:
            # Raised below, where somebody can take it.
            failed.append(error)

    try:
        beside = start(act)
        beside.join(limit)
    except BaseException:
        until = time.monotonic() + settle
        # Not joined again: CPython 3.11 would take it for ended.
        while not (made or failed) and time.monotonic() < until:
            time.sleep(SETTLE_AGAIN_S)
        raise
    if failed:
        # Not kept: the error's frames, which hold what was used, hold this list.
        raise failed.pop()
    if not made:
        # What does not answer now will not at exit either.
        _started.discard(beside)
        raise RuntimeError(f"no answer in {limit:.0f} s")
    return made.pop()


def make_bell() -> threading.Event:
    """What its owner sets to end a thread beside that sleeps; set as the process is about to end, too."""
    bell = threading.Event()
    _bells.add(bell)
    return bell


def _nothing() -> None:
    return None


class Errand:
    """What a thread beside is to do; `act` handles its own errors. `call_off`, from any thread, makes it end early."""

    def __init__(self, act: Callable[[], None], call_off: Callable[[], None] = _nothing) -> None:
        self.is_over = False
        self._act = act
        self._call_off = call_off
        self._bells: list[threading.Lock] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        _started.add(self._thread)
        _errands.add(self)
        self._thread.start()

    @property
    def is_mine(self) -> bool:
        """Whether it is the calling thread that does it."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        try:
            self._act()
        finally:
            # What it was done with is let go of.
            self._act = self._call_off = _nothing
            self.is_over = True
            for bell in list(self._bells):
                bell.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is over, at the latest after `timeout` seconds.

        So it is where its thread is no more, or was never begun.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        # A lock for each wait: no exception can leave one held that others need.
        bell = threading.Lock()
        bell.acquire()
        # Before looking: whoever ends rings all the bells that are there.
        self._bells.append(bell)
        while not self.is_over:
            left = min(LOOK_AGAIN_S, until - time.monotonic())
            if left <= 0:
                break
            bell.acquire(timeout=left)
            if not self._thread.is_alive():
                return True
        self._bells.remove(bell)
        return self.is_over

    def call_off(self) -> None:
        """Make it end early."""
        self._call_off()


def _wait_for_all() -> None:
    """At exit: tell the threads to leave, and wait a little."""
    for bell in list(_bells):
        bell.set()
    _join_all(LAST_SECONDS)
    left = [errand for errand in _errands if not errand.is_over]
    for errand in left:
        with suppress(Exception):
            errand.call_off()
    if left:
        _join_all(LAST_CALL_SECONDS)


def _join_all(seconds: float) -> None:
    until = time.monotonic() + seconds
    for thread in list(_started):
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_wait_for_all)
