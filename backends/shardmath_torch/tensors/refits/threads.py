"""Threads: a function that runs first in each thread that certain threads start.

1. Torch's modes belong to one thread, so a recording has to enter them in the threads that its loader starts. Threads
   that the rest of the program starts meanwhile are left alone, which is why this is not `threading.setprofile`.
2. `threading.Thread.start` is replaced while anything is followed. All that is followed shares the replacement, so it
   may end in any order.

>>> import threading
>>> begun = []
>>> with Followed(lambda: True, lambda: begun.append("begun")):
...     thread = threading.Thread(target=begun.append, args=("target",))
...     thread.start()
...     thread.join()
>>> begun
['begun', 'target']
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["Followed"]

_lock = threading.Lock()
_entered: list[Followed] = []
_REAL = threading.Thread.start
_start_before: Callable[[threading.Thread], None] = _REAL
"""What `Thread.start` was before it was replaced."""
_starting = threading.local()
"""The thread that this thread starts: others may have replaced `Thread.start`, too, by what calls ours again."""


class Followed:
    """While entered, calls `begin` first in every thread that is started by a thread in which `is_here` returns True.
    `is_here` is called in the thread that starts another.
    """

    def __init__(self, is_here: Callable[[], bool], begin: Callable[[], None]) -> None:
        self.is_here = is_here
        self.begin = begin

    def __enter__(self) -> Followed:
        """Follow threads from now on."""
        global _start_before
        with _lock:
            _entered.append(self)
            if threading.Thread.start is not _start:
                _start_before = threading.Thread.start
                threading.Thread.start = _start  # type: ignore[assignment,method-assign]
        return self

    def __exit__(self, *raised: object) -> None:
        """Follow no further threads."""
        with _lock:
            _entered.remove(self)
            # If another part of the program has replaced `_start` meanwhile, `_start` stays below that.
            if not _entered and threading.Thread.start is _start:
                threading.Thread.start = _start_before  # type: ignore[assignment,method-assign]


def _start(thread: threading.Thread) -> None:
    """Start a thread, in place of `threading.Thread.start`."""
    if getattr(_starting, "thread", None) is thread:
        _REAL(thread)
        return
    # A copy: other threads enter and exit meanwhile.
    following = [followed for followed in tuple(_entered) if followed.is_here()]
    if following:
        run = thread.run

        def run_followed() -> None:
            # The thread's own `run` again, so that the thread does not keep the followers alive.
            vars(thread).pop("run")
            for followed in following:
                followed.begin()
            run()

        thread.run = run_followed  # type: ignore[method-assign]
    _starting.thread = thread
    try:
        _start_before(thread)
    finally:
        _starting.thread = None
