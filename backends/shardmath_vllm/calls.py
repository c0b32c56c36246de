"""Calls: engines are told to do their part while this rank does its own.

>>> said = []
>>> with calling([lambda: said.append("theirs")], give_up=print) as finish:
...     finish()
>>> said
['theirs']
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of, word_error

__all__ = ["calling"]

GRACE_S = 5.0
"""What a call may take to say why it failed, once this rank knows that something did."""


class _Call:
    """A call of an engine, on a thread of its own."""

    def __init__(
        self, name: str, act: Callable[[], object], give_up: Callable[[str], None]
    ) -> None:
        self._name = name
        self._act = act
        self._give_up = give_up
        self.error: BaseException | None = None
        # A daemon: a call that never ends does not keep the process.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            # Raised where somebody can take it.
            self.error = error
            # Its ranks may not have come, and are waited for in vain. Nobody is there to take another error.
            with suppress(Exception):
                self._give_up(self.said)

    def join(self, seconds: float) -> None:
        """Wait for its end."""
        self._thread.join(seconds)

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    @property
    def said(self) -> str:
        """Why it failed; "" where it has not."""
        if self.error is None:
            return ""
        return f"{self._name}: {word_error(self.error)}"


@contextmanager
def calling(
    acts: Sequence[Callable[[], object]], give_up: Callable[[str], None], timeout: float = 300.0
) -> Iterator[Callable[[], None]]:
    """Calls that are under way within, until what it gives is called, which waits for their end and raises what failed.

    Where one fails while this rank waits for others, `give_up(why)` has to end that: it is called on another thread.
    Raises ExchangeError where this rank fails, with what calls that fail, too, say of it, and where calls take longer
    than `timeout` seconds once this rank is done.
    """
    calls = [_Call(f"engine {number}", act, give_up) for number, act in enumerate(acts)]

    def finish() -> None:
        said = _join(calls, timeout)
        if said:
            raise ExchangeError(said) from next(call.error for call in calls if call.error)
        if any(call.is_open for call in calls):
            raise ExchangeError(f"an engine has not answered in {timeout:g} s; see what it does")

    try:
        yield finish
    except Exception as error:
        said = _join(calls, GRACE_S)
        # Where the rank was given up for a call, it says so already.
        if not said or said in message_of(error):
            raise
        raise ExchangeError(f"{message_of(error)}\n{said}") from error
    finish()


def _join(calls: Sequence[_Call], seconds: float) -> str:
    """What calls that failed say, once they have ended; all of them have so many seconds together."""
    until = time.monotonic() + seconds
    for call in calls:
        call.join(max(0.0, until - time.monotonic()))
    return "\n".join(call.said for call in calls if call.said)
