"""Calls: calls to engines, while this rank does its own part.

Each call has a separate thread, so that no wait for an engine is endless: neither for one that hangs, nor for
another one when one fails. An engine gets one call at a time.

>>> said = []
>>> calls = Calls()
>>> calls.ask([lambda: said.append("theirs"), lambda: 1 / 0])
>>> calls.answer(60.0)
Traceback (most recent call last):
shardmath.ExchangeError: engine 1: ZeroDivisionError: division by zero
>>> said
['theirs']
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of, word_error

__all__ = ["GRACE_S", "Calls"]

GRACE_S = 5.0
"""What calls may take, all together, once this rank knows that something has failed."""

LOOK_AGAIN_S = 0.05
"""Seconds between looks at whether an open call has failed."""


def _ignore(why: str) -> None:
    """Do nothing: no rank waits for the engine's ranks."""


class _EngineCall:
    """A call to an engine, on a separate thread."""

    def __init__(
        self, name: str, act: Callable[[], object], give_up: Callable[[str], None]
    ) -> None:
        self.name = name
        self.fault = ""
        self.error: BaseException | None = None
        self._act = act
        self._give_up = give_up
        # Not is_alive(): if Ctrl-C ends a `join`, CPython 3.11 takes the thread for ended.
        self._end_event = threading.Event()
        # A daemon: a call that never ends does not keep the process.
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            # Kept, to be raised in the thread that calls `answer`.
            self.error = error
            self.fault = f"{self.name}: {word_error(error)}"
            # This rank may wait in vain for the engine's ranks. An error of `give_up` could not be raised anywhere.
            with suppress(Exception):
                self._give_up(self.fault)
        finally:
            self._end_event.set()

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` for the end of the call."""
        self._end_event.wait(seconds)

    @property
    def is_open(self) -> bool:
        """Whether the call has not ended."""
        return not self._end_event.is_set()


class Calls:
    """The latest call to each engine, by the engine's number; each call runs in a separate thread."""

    def __init__(self) -> None:
        self._calls: dict[int, _EngineCall] = {}

    def ask(
        self, acts: Sequence[Callable[[], object]], give_up: Callable[[str], None] = _ignore
    ) -> None:
        """Start a call to each engine i, `acts[i]()`, in a separate thread. If a call fails, its thread calls `give_up`
        with the error text, for example to end this rank's wait for other ranks.

        Raises ExchangeError, and calls none, if an engine has not answered the previous call.
        """
        silent = self._word_silent(
            "has not answered the previous call, so it gets no other; start it again if it hangs"
        )
        if silent:
            raise ExchangeError(silent)
        self._begin(dict(enumerate(acts)), give_up)

    def answer(self, seconds: float) -> None:
        """Wait until all calls have ended, at most `seconds` in total, and at most 5 s (GRACE_S) after a call has
        failed. Raises ExchangeError if a call has failed or not ended; the message says which.
        """
        until = time.monotonic() + seconds
        while self._is_open and not self.fault and time.monotonic() < until:
            self._join(LOOK_AGAIN_S)
        _join(self._calls.values(), min(GRACE_S, max(0.0, until - time.monotonic())))
        # In this order: a call that fails in between is silent, or has failed.
        silent = self._word_silent(
            f"has not answered in {seconds:g} s; start it again if it hangs, or pass a longer timeout"
        )
        fault = self.fault
        if fault:
            errors = [call.error for call in self._calls.values() if call.error]
            raise ExchangeError(fault) from errors[0]
        if silent:
            raise ExchangeError(silent)

    def tell(self, acts: Sequence[Callable[[], object]], seconds: float) -> None:
        """Start a call to each engine i, `acts[i]()`, in a separate thread, and wait at most `seconds` for the end of
        all. Raises ExchangeError if one fails or does not end in time.
        """
        self.ask(acts)
        self.answer(seconds)

    def try_to_tell(self, acts: Sequence[Callable[[], object]], seconds: float) -> None:
        """Call each engine i by `acts[i]()`, unless an earlier call to it is still open; wait at most `seconds` for
        all; ignore errors.
        """
        callable_now = {}
        for number, act in enumerate(acts):
            if number not in self._calls or not self._calls[number].is_open:
                callable_now[number] = act
        self._begin(callable_now, _ignore)
        _join([self._calls[number] for number in callable_now], seconds)

    @property
    def _is_open(self) -> bool:
        """Whether a call has not ended."""
        return any(call.is_open for call in self._calls.values())

    @property
    def fault(self) -> str:
        """The errors of the engines whose calls have failed so far, as text, one per line; "" if none has."""
        return "\n".join(call.fault for call in self._calls.values() if call.fault)

    @contextmanager
    def explain(self) -> Iterator[None]:
        """If the `with` block raises, and calls to engines have failed, raise an ExchangeError with all of their
        errors; otherwise leave the block's error as it is.

        Waits at most GRACE_S for open calls.
        """
        try:
            yield
        except Exception as error:
            fault = self._join(GRACE_S)
            # If a failed call ended this rank's wait, the error has the call's error already.
            if not fault or fault in message_of(error):
                raise
            raise ExchangeError(f"{message_of(error)}\n{fault}") from error

    def _begin(self, acts: dict[int, Callable[[], object]], give_up: Callable[[str], None]) -> None:
        for number, act in acts.items():
            self._calls[number] = _EngineCall(f"engine {number}", act, give_up)

    def _join(self, seconds: float) -> str:
        """Wait at most `seconds` for all calls to end; return the errors of those that failed, "" if none did."""
        _join(self._calls.values(), seconds)
        return self.fault

    def _word_silent(self, what: str) -> str:
        """An error that says `what` of each engine whose call has not ended, or ""."""
        return "\n".join(f"{call.name} {what}" for call in self._calls.values() if call.is_open)


def _join(calls: Iterable[_EngineCall], seconds: float) -> None:
    """Wait for the calls to end, at most `seconds` for all of them together."""
    until = time.monotonic() + seconds
    for call in calls:
        call.join(max(0.0, until - time.monotonic()))
