"""Bars: how much of a call is done, told to the caller's function, and shown on a terminal.

1. The function is called with this rank's bytes that are done and those that are to be done, the last time with twice
   the same. Of a move (`Meter`), that is both ways together: when ranks have agreed, and as each message has come or
   left. Of files (`Tally`), it is at least every TELL_BYTES or TELL_S while they are read or written.
2. In a move other ranks wait for it. So what it raises waits: it is called no more, the move goes on to its end, and
   then raises that. Ctrl-C does not wait. In a step on files it is raised, and the ranks tell each other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bar
from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown
from shardmath.plans.programs.messages import Message
from shardmath_torch.moves.observing.laps import AGREED, ARRIVED, LEFT

__all__ = ["TELL_BYTES", "Meter", "Progress", "Tally", "check_progress", "progress_bar"]

Progress: TypeAlias = Callable[[int, int], object]
"""Called with this rank's bytes that are done, and with all that are to be done."""

TELL_BYTES = 8 << 20
"""Of files: bytes go in parts of at most so many, and after at least so many the function is called. So there are less
than twice as many between two calls."""

TELL_S = 0.2
"""The most time of a call on files between two times at which the function is called."""

SHOW_EVERY_S = 0.02
"""Between two times at which a bar is told: it is drawn less often, and messages may be many."""


def check_progress(progress: object) -> None:
    """Raise ExchangeError for what cannot be called."""
    if progress is not None and not callable(progress):
        what = f"progress={shown(progress)} cannot be called"
        raise ExchangeError(f"{what}; pass a function of two numbers, or leave it out")


class Meter:
    """The bytes of one call; `failure` is what the caller's function raised."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self.failure: Exception | None = None

    def hear(self, lap: int, about: object, at_s: float) -> None:
        """Take note of a lap."""
        if lap == AGREED:
            self._tell()
        elif lap in (ARRIVED, LEFT) and isinstance(about, Message):
            self._done += about.payload
            self._tell()

    def expect(self, total: int) -> None:
        """So many bytes go, and not what was said before."""
        self._total = total
        self._tell()

    def finish(self) -> None:
        """All is done, also where the engine has no messages to tell of. Raises what the function has raised."""
        if self._done < self._total:
            self._done = self._total
            self._tell()
        if self.failure is not None:
            raise self.failure

    def _tell(self) -> None:
        if self.failure is not None:
            return
        try:
            self._progress(self._done, self._total)
        except Exception as error:
            self.failure = error


class Tally:
    """The bytes of one call that reads or writes files; nothing if nobody wants to know."""

    def __init__(self, progress: Progress | None) -> None:
        check_progress(progress)
        self.is_heard = progress is not None
        self._progress = progress
        self._done = self._told = 0
        self._total: int | None = None
        self._told_at = 0.0

    def begin(self, total: int) -> None:
        """So many bytes are to be done. Said once."""
        if self._total is None:
            self._total = total
            self._tell()

    def add(self, nbytes: int) -> None:
        """So many more are done, or none, and it takes long."""
        self._done += nbytes
        is_last = nbytes > 0 and self._done == self._total
        is_late = time.monotonic() - self._told_at >= TELL_S
        if is_last or is_late or self._done - self._told >= TELL_BYTES:
            self._tell()

    def copy(self, target: Tensor, source: Tensor, *, counts: bool = True) -> Tensor:
        """`target.copy_(source)`, of the same shape, and the bytes of the source are done unless not `counts`."""
        for into, part in _cut(target, source):
            into.copy_(part)
            self.add(part.nbytes if counts else 0)
        return target

    def _tell(self) -> None:
        self._told, self._told_at = self._done, time.monotonic()
        if self._progress is not None and self._total is not None:
            self._progress(self._done, self._total)


def _cut(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both in parts of TELL_BYTES of the source at most."""
    if source.nbytes <= TELL_BYTES:
        yield target, source
        return
    dim = next(dim for dim, size in enumerate(source.shape) if size > 1)
    size = source.shape[dim]
    rows = max(1, TELL_BYTES * size // source.nbytes)
    for both in zip(target.split(rows, dim), source.split(rows, dim), strict=True):
        yield from _cut(*both)


@contextmanager
def progress_bar(
    description: str = "moving", *, console: Console | None = None
) -> Iterator[Progress]:
    """A bar of rich, as any `progress=` takes it, for one call after another; nothing if `console` is not a terminal.

    The console is stderr by default. Several ranks that share a terminal draw over each other: let one of them show it.
    """
    screen = console or Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=screen, disable=not screen.is_terminal) as bar:
        task = bar.add_task(description, total=None)
        shown_at = 0.0

        def tell(done: int, total: int) -> None:
            nonlocal shown_at
            now = time.monotonic()
            if done == 0:
                bar.reset(task, total=total)
            elif now - shown_at < SHOW_EVERY_S and done < total:
                return
            shown_at = now
            bar.update(task, completed=done, total=total)

        yield tell
