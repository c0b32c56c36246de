"""Threads: a function that runs first in each thread that certain threads start, and modes that enter these.

1. Torch's modes belong to one thread, so a recording has to enter them in the threads that its loader starts. Threads
   that the rest of the program starts meanwhile are left alone, which is why this is not `threading.setprofile`.
2. `threading.Thread.start` is replaced while anything is followed. All that is followed shares the replacement, so it
   may end in any order.

>>> import threading
>>> begun = []
>>> with Followed(lambda: begun.append("begun")):
...     thread = threading.Thread(target=begun.append, args=("target",))
...     thread.start()
...     thread.join()
>>> begun
['begun', 'target']
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from shardmath_torch.groups import compat

__all__ = ["Followed", "FollowingMode", "OtherThread"]

_lock = threading.Lock()
_entered: list[Followed] = []
_REAL = threading.Thread.start
_start_before: Callable[[threading.Thread], None] = _REAL
"""What `Thread.start` was before it was replaced."""
_starting = threading.local()
"""The thread that this thread starts: others may have replaced `Thread.start`, too, by what calls ours again."""


class Followed:
    """While entered, calls `begin` first in every thread that the entering thread starts, or that one of these starts.

    `is_on` is whether it is entered.
    """

    def __init__(self, begin: Callable[[], None]) -> None:
        self.is_on = False
        self._begin = begin
        # Says in each thread whether it is followed.
        self._here = threading.local()

    def is_here(self) -> bool:
        """Return whether this thread is followed."""
        return getattr(self._here, "is_here", False)

    def begin(self) -> None:
        """Follow this thread, which a followed thread has started."""
        self._here.is_here = True
        self._begin()

    def __enter__(self) -> Followed:
        """Follow this thread from now on."""
        global _start_before
        self.is_on = True
        self._here.is_here = True
        with _lock:
            _entered.append(self)
            if threading.Thread.start is not _start:
                _start_before = threading.Thread.start
                threading.Thread.start = _start  # type: ignore[assignment,method-assign]
        return self

    def __exit__(self, *raised: object) -> None:
        """Follow no further threads."""
        self.is_on = False
        with _lock:
            _entered.remove(self)
            # If another part of the program has replaced `_start` meanwhile, `_start` stays below that.
            if not _entered and threading.Thread.start is _start:
                threading.Thread.start = _start_before  # type: ignore[assignment,method-assign]


class FollowingMode(compat.TorchDispatchMode):
    """A torch mode that, while its `followed` is entered, also gets the operations of the threads that this follows."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.followed = Followed(self.enter_thread)

    def enter_thread(self) -> None:
        """Pass the operations of this thread to the mode."""
        if not self.followed.is_on:
            return
        # Never left: a pool's thread may outlive the call that started it, and work in the next one.
        OtherThread(self).__enter__()  # type: ignore[no-untyped-call]


class OtherThread(compat.TorchDispatchMode):
    """The mode that passes another thread's operations to `mode`, while that follows threads."""

    def __init__(self, mode: FollowingMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation as in the thread that has entered the mode."""
        if not self.mode.followed.is_on:
            return func(*args, **(kwargs or {}))
        return self.mode.__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


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
