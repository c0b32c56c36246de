"""Bars: how much of a move is done, told to the caller's function, and shown on a terminal.

1. The function is called with the bytes of this rank that have moved and those that are to move, both ways together:
   when ranks have agreed, and as each message has come or left.
2. It is called in the middle of a move, while other ranks wait. So what it raises waits: it is called no more, the move
   goes on to its end, and then raises that. Ctrl-C does not wait.
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

from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown
from shardmath.programs.messages import Message
from shardmath_torch.observing.laps import AGREED, ARRIVED, LEFT

__all__ = ["Meter", "Progress", "check_progress", "progress_bar"]

Progress: TypeAlias = Callable[[int, int], object]
"""Called with the bytes that have moved, and with all that are to move."""

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


@contextmanager
def progress_bar(
    description: str = "moving", *, console: Console | None = None
) -> Iterator[Progress]:
    """A bar of rich, as `progress=` takes it, for one move after another; nothing where `console` is no terminal.

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
