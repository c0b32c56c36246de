"""Bars: the progress of a call, reported to the caller's function, and shown on a terminal.

1. The function is called with this rank's bytes done and bytes in all; in the last call both are equal. For a move
   (`Meter`) bytes are counted both ways together: it is called after the vote, and as each message has been received or
   sent. For files (`Tally`) it is called at least every TELL_BYTES or TELL_S while they are read or written.
2. In a move other ranks wait for this one. So if the function raises, it is not called again, and its exception is
   raised once the move has ended. Ctrl-C is raised at once. In a step on files an exception is raised at once, and the
   ranks tell each other. A process that the function forks ends as it leaves the function.
3. What draws a bar is imported with the first bar, and no call advances Python's random numbers.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from torch import Tensor

from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown
from shardmath.plans.programs.messages import Message
from shardmath_torch.groups import compat
from shardmath_torch.moves.observing.laps import AGREED, ARRIVED, LEFT

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["TELL_BYTES", "Meter", "Progress", "Tally", "check_progress", "progress_bar"]

Progress: TypeAlias = Callable[[int, int], object]
"""Called with this rank's bytes done, and its bytes in all."""

TELL_BYTES = 8 << 20
"""Bytes of files after which the function is called, and most bytes of one copy. So there are less than twice as many
between two calls."""

TELL_S = 0.2
"""Time after which a call on files calls the function again."""

SHOW_EVERY_S = 0.02
"""Least time between two updates of a bar: it is drawn less often, and there may be many messages."""


def check_progress(progress: object) -> None:
    """Raise ExchangeError unless `progress` is None or can be called."""
    if progress is not None and not callable(progress):
        what = f"progress={shown(progress)} cannot be called"
        raise ExchangeError(f"{what}; pass a function(done, total) of bytes, or leave it out")


class Meter:
    """A counter of the bytes that one move has sent and received, which passes its counts to the caller's progress
    function. An error of that function is kept in `failure` (else None)."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._total_bytes = total
        self._done_bytes = 0
        self.failure: Exception | None = None

    def hear(self, lap: int, about: object, at_s: float) -> None:
        """Report progress if phase number `lap` of a move, which has just ended, is the ranks' vote or the wait for a
        message. After a wait, `about` is the Message, whose bytes count as done; `at_s`, the time, is not used."""
        if lap == AGREED:
            self._tell()
        elif lap in (ARRIVED, LEFT) and isinstance(about, Message):
            self._done_bytes += about.payload
            self._tell()

    def expect(self, total: int) -> None:
        """Set the total number of bytes to `total`, and report the progress."""
        self._total_bytes = total
        self._tell()

    def finish(self) -> None:
        """Tell the progress function that all bytes are done, unless it was told before. Raises any error that the
        progress function has raised, now or earlier.
        """
        if self._done_bytes < self._total_bytes:
            self._done_bytes = self._total_bytes
            self._tell()
        if self.failure is not None:
            raise self.failure

    def _tell(self) -> None:
        if self.failure is not None:
            return
        try:
            _report(self._progress, self._done_bytes, self._total_bytes)
        except Exception as error:
            self.failure = error


class Tally:
    """A counter of the bytes that one call reads or writes in files; it calls the caller's progress function."""

    def __init__(self, progress: Progress | None) -> None:
        check_progress(progress)
        self.is_heard = progress is not None
        self._progress = progress
        self._done_bytes = self._reported_bytes = 0
        self._total_bytes: int | None = None
        self._reported_at_s = 0.0

    def begin(self, total: int) -> None:
        """Set the total number of bytes to read or write, and report progress; later calls do nothing."""
        if self._total_bytes is None:
            self._total_bytes = total
            self._tell()

    def add(self, nbytes: int) -> None:
        """Count `nbytes` more bytes as done. Progress is reported if these are the last bytes, or if 8 MiB (TELL_BYTES)
        or 0.2 s (TELL_S) have passed since the last report.
        """
        self._done_bytes += nbytes
        is_last = nbytes > 0 and self._done_bytes == self._total_bytes
        is_late = time.monotonic() - self._reported_at_s >= TELL_S
        if is_last or is_late or self._done_bytes - self._reported_bytes >= TELL_BYTES:
            self._tell()

    def copy(self, target: Tensor, source: Tensor, *, counts: bool = True) -> Tensor:
        """Copy `source` into `target`, of the same shape, report progress on the way, and return `target`. With
        `counts=False` the copied bytes are not added to the progress, since they are counted when they are written to a
        file.
        """
        for into, part in _split(target, source):
            into.copy_(part)
            self.add(part.nbytes if counts else 0)
        return target

    def _tell(self) -> None:
        self._reported_bytes, self._reported_at_s = self._done_bytes, time.monotonic()
        if self._progress is not None and self._total_bytes is not None:
            _report(self._progress, self._done_bytes, self._total_bytes)


def _report(progress: Progress, done: int, total: int) -> None:
    """Call the progress function. A process that the function forks ends as it leaves the function.

    It is in the middle of a call that belongs to its parent. An error would not do: torch passes errors on in
    collectives, over the parent's connections.
    """
    process = os.getpid()
    try:
        progress(done, total)
    except BaseException as error:
        if os.getpid() == process:
            raise
        _end_forked(error)
    if os.getpid() != process:
        _end_forked(None)


def _end_forked(error: BaseException | None) -> NoReturn:
    """End this process, with the status that the error asks for."""
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    else:
        cause = "returned" if error is None else f"raised {type(error).__name__}"
        what = f"progress= has {cause} in a forked process, which ends here"
        print(
            f"shardmath: {what}: only the process that began the call can continue it",
            file=sys.stderr,
        )
        status = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(status)


def _split(target: Tensor, source: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Split both equally, into parts of at most TELL_BYTES of the source."""
    if source.nbytes <= TELL_BYTES:
        yield target, source
        return
    dim = next(dim for dim, size in enumerate(source.shape) if size > 1)
    size = source.shape[dim]
    rows = max(1, TELL_BYTES * size // source.nbytes)
    for parts in zip(target.split(rows, dim), source.split(rows, dim), strict=True):
        # A single row may still be too large: then the next dimension is split.
        yield from _split(*parts)


@contextmanager
@compat.untraced
def progress_bar(
    description: str = "moving", *, console: Console | None = None
) -> Iterator[Progress]:
    """Show a progress bar in the `with` block, on a terminal only; yield a function to pass as `progress=` to a move,
    `save` or `load`.

    The console is stderr by default. Ranks that share a terminal draw over each other: let only one show the bar.
    """
    # rich draws a random number as it is first imported, which would change the order of a training's data.
    state = None if "rich.progress" in sys.modules else random.getstate()
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bar

    if state is not None:
        random.setstate(state)
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
            # Another call begins.
            if done == 0:
                bar.reset(task, total=total)
            elif now - shown_at < SHOW_EVERY_S and done < total:
                return
            shown_at = now
            bar.update(task, completed=done, total=total)

        yield tell
