"""Calls: engines are told to do their part while this rank does its own.

>>> said = []
>>> with calling([lambda: said.append("theirs")]):
...     pass
>>> said
['theirs']
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shardmath.base.errors import ExchangeError

__all__ = ["calling"]

GRACE_S = 5.0
"""What a call may take to say why it failed, once this rank knows that something did."""


class _Call:
    """A call on a thread of its own."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act
        self.error: BaseException | None = None
        # By the name of this one, since ranks see by it that their calls belong together: an engine in this very
        # process does its part on the new thread. A daemon: a call that never ends does not keep the process.
        name = threading.current_thread().name
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            # Raised where somebody can take it.
            self.error = error


@contextmanager
def calling(acts: Sequence[Callable[[], object]]) -> Iterator[None]:
    """Calls that are under way within, and over afterwards.

    Raises ExchangeError where one fails; where this rank does, with what calls that fail, too, say of it.
    """
    calls = [_Call(act) for act in acts]
    try:
        yield
    except Exception as error:
        for call in calls:
            call.thread.join(GRACE_S)
        said = _word(calls)
        if not said:
            raise
        raise ExchangeError(f"{error}\n{said}") from error
    for call in calls:
        call.thread.join()
    said = _word(calls)
    if said:
        raise ExchangeError(said) from calls[0].error


def _word(calls: Sequence[_Call]) -> str:
    """What calls that failed say."""
    lines = []
    for number, call in enumerate(calls):
        if call.error is not None:
            lines.append(f"engine {number}: {type(call.error).__name__}: {call.error}")
    return "\n".join(lines)
