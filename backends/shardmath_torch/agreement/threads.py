"""Threads beside: calls of torch that this thread does not wait for, or not without an end.

1. They are daemons, since a call of torch may take its whole time limit and a process that is done
   should end before.
2. Python ends daemons on their way back from C++, which ends the process with SIGABRT. So at exit
   they are told to leave (`leaving`), and are waited for a little.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["leaving", "start"]

LAST_SECONDS = 3.0
"""What they get at exit, all together: time for a call that a broken connection ends."""

leaving = threading.Event()
"""Set once the process is about to end: loops on threads beside end with it."""

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(act: Callable[[], None]) -> threading.Thread:
    """A thread that acts; `act` handles its own errors."""
    thread = threading.Thread(target=act, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def _wait_for_all() -> None:
    """At exit: tell the threads to leave, and wait a little."""
    leaving.set()
    until = time.monotonic() + LAST_SECONDS
    for thread in list(_started):
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_wait_for_all)
