"""Threads: background threads for calls of torch, waited for with a time limit or not at all.

1. They are daemons: a call of torch may take its whole time limit, and a process that is done should
   end before.
2. Python kills daemons on their way back from C++, which ends the process with SIGABRT. So at exit
   their bells ring (`make_bell`), and they get a short time to end; errands still running then are
   called off. A forked child forgets its parent's.
3. An errand is a thread for whose end others wait. A wait that Ctrl-C interrupts does not change the
   errand: after an interrupted `Thread.join` CPython 3.11 would take the thread for ended.
4. They have a name (`NAME`). Otherwise Python would number them as "Thread-N" with the program's own threads. Ranks
   pair calls by the threads' names, and default names would then differ between ranks.

>>> errand = Errand(lambda: None)
>>> errand.start()
>>> errand.wait(), errand.is_over
(True, True)
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

__all__ = ["NAME", "Errand", "Late", "CallThread", "make_bell", "start", "within"]

NAME = "shardmath background"
"""Name of all threads that this library starts: not one that a program would give to one of its threads, which could
then not move (`Turns.check_name`)."""

LAST_SECONDS = 3.0
"""Time for all threads together at exit, enough for a call that a broken connection ends."""

LAST_CALL_SECONDS = 1.0
"""Further time for errands once they are called off."""

LOOK_AGAIN_S = 1.0
"""Time between two checks that an errand's thread still runs: in a forked process it does not."""

SETTLE_AGAIN_S = 0.001
"""Time between two checks whether an interrupted call has ended."""

_T = TypeVar("_T")

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_errands: weakref.WeakSet[Errand] = weakref.WeakSet()
_bells: weakref.WeakSet[threading.Event] = weakref.WeakSet()
_call_threads: weakref.WeakSet[CallThread] = weakref.WeakSet()


class Late(RuntimeError):
    """The error of `within` for a call that takes too long."""


def start(act: Callable[[], None]) -> threading.Thread:
    """Start and return a daemon thread that runs `act`, which must handle its own errors."""
    thread = threading.Thread(target=act, name=NAME, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def within(limit: float, make: Callable[[], _T], settle: float = 0.0) -> _T:
    """Run `make` in a thread, and return its result; raises Late, a RuntimeError, if this takes more than `limit`
    seconds. Ctrl-C ends the wait, after up to `settle` more seconds for the thread to end.

    Also raises any exception of `make`.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def act() -> None:
        try:
            results.append(make())
        except BaseException as error:
            # Raised below, in the caller's thread.
            errors.append(error)

    try:
        thread = start(act)
        thread.join(limit)
    except BaseException:
        until = time.monotonic() + settle
        # Not joined again: CPython 3.11 would take the thread for ended.
        while not (results or errors) and time.monotonic() < until:
            time.sleep(SETTLE_AGAIN_S)
        raise
    if errors:
        # Popped to break a cycle: the error's frames hold this list.
        raise errors.pop()
    if not results:
        # A call that does not answer now will not at exit either.
        _started.discard(thread)
        raise Late(f"no answer in {limit:.0f} s")
    return results.pop()


def make_bell() -> threading.Event:
    """Return an event for a background thread to wait on; it is set when the process exits, which wakes the thread."""
    bell = threading.Event()
    _bells.add(bell)
    return bell


def _nothing() -> None:
    return None


def _serve(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """Run the calls of the queue until None comes."""
    while (call := calls.get()) is not None:
        call()
        # While the thread waits for the next call, it must not keep what this one holds, such as tensors.
        del call


class CallThread:
    """A background thread that runs calls one after another. It ends with this object, and after a call that failed or
    took too long; the next call is then another thread's.

    >>> calls = CallThread()
    >>> calls.within(5.0, lambda: 7)
    7
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] | None = None
        self._end: Callable[[], object] = _nothing

    def within(self, limit: float, make: Callable[[], _T], settle: float = 0.0) -> _T:
        """Run `make` in this thread, as the function `within` does in a new one."""
        results: list[_T] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def act() -> None:
            try:
                results.append(make())
            except BaseException as error:
                errors.append(error)
            done.set()

        calls = self._calls or self._begin()
        try:
            calls.put(act)
            done.wait(limit)
        except BaseException:
            self.leave()
            until = time.monotonic() + settle
            while not done.is_set() and time.monotonic() < until:
                time.sleep(SETTLE_AGAIN_S)
            raise
        if not results:
            self.leave()
            raise errors.pop() if errors else Late(f"no answer in {limit:.0f} s")
        return results.pop()

    def _begin(self) -> SimpleQueue[Callable[[], None] | None]:
        calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        start(partial(_serve, calls))
        self._calls = calls
        self._end = weakref.finalize(self, calls.put, None)
        _call_threads.add(self)
        return calls

    def leave(self) -> None:
        """Let the thread end after its present call; the next call begins another thread."""
        self._end()
        self._calls = None


class Errand:
    """A background job: a thread that runs the function `act`, and whose end other threads can wait for. The function
    `call_off` makes the job end early."""

    def __init__(self, act: Callable[[], None], call_off: Callable[[], None] = _nothing) -> None:
        self.is_over = False
        self._act = act
        self._call_off = call_off
        self._bells: list[threading.Lock] = []
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)

    def start(self) -> None:
        """Start the thread of the background job."""
        _started.add(self._thread)
        _errands.add(self)
        self._thread.start()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread is the thread of this background job."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        try:
            self._act()
        finally:
            # Release the memory that the calls hold.
            self._act = self._call_off = _nothing
            self.is_over = True
            for bell in list(self._bells):
                bell.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds for the end of the job, and return whether it has ended.

        An errand whose thread is gone, or was never started, counts as over.
        """
        until = float("inf") if timeout is None else time.monotonic() + timeout
        # A lock per wait: no exception can leave a lock held that others need.
        bell = threading.Lock()
        bell.acquire()
        # Before the check: the errand's end rings all bells that are listed then.
        self._bells.append(bell)
        while not self.is_over:
            seconds = min(LOOK_AGAIN_S, until - time.monotonic())
            if seconds <= 0:
                break
            bell.acquire(timeout=seconds)
            if not self._thread.is_alive():
                return True
        self._bells.remove(bell)
        return self.is_over

    def call_off(self) -> None:
        """Make the background job end early, from any thread."""
        self._call_off()


def _wait_for_all() -> None:
    """At exit, ring all bells, and give the threads a short time to end."""
    for bell in list(_bells):
        bell.set()
    # Their finalizers run after this function, if torch made one before this file was imported.
    for calls in list(_call_threads):
        calls.leave()
    _join_all(LAST_SECONDS)
    running = [errand for errand in _errands if not errand.is_over]
    for errand in running:
        with suppress(Exception):
            errand.call_off()
    if running:
        _join_all(LAST_CALL_SECONDS)


def _join_all(seconds: float) -> None:
    until = time.monotonic() + seconds
    for thread in list(_started):
        thread.join(max(0.0, until - time.monotonic()))


def _forget_all() -> None:
    """In a forked child, forget the threads of its parent: they do not run here, and to call an errand off would end
    connections that the parent uses.
    """
    for known in (_started, _errands, _bells, _call_threads):
        known.clear()


atexit.register(_wait_for_all)
os.register_at_fork(after_in_child=_forget_all)
