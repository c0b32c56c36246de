"""Logs: a line per move, on the logger "shardmath" at INFO.

1. Nothing is shown unless the program configures logging, as by `logging.basicConfig(level=logging.INFO)`.
2. A line is made only if INFO is enabled. Errors of handlers are handled by `logging`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardmath.base.text import show_bytes, word_error
from shardmath_torch.moves.observing.moved import Moved

__all__ = ["log_move"]

LOGGER = logging.getLogger("shardmath")
LOGGER.addHandler(logging.NullHandler())

MOST_SAID = 300
"""Most characters of a failure's message in a line; the exception has all of it."""


def log_move(rank: int, tell: Callable[[], Moved], failure: BaseException | None) -> None:
    """Log one line at INFO about a move on `rank`. `tell` returns the report to log, and `failure` is the move's error,
    or None if the move succeeded.
    """
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    moved = tell()
    if failure is not None:
        # Objections of several ranks are on several lines, which become one.
        message = " ".join(word_error(failure).split())
        line = "rank %d: %s failed: %s; %s"
        LOGGER.info(line, rank, moved.title, message[:MOST_SAID], moved.phases)
        return
    sent, received = moved.sent, moved.received
    LOGGER.info(
        "rank %d: %s: sent %s in %d, received %s in %d, %s; %s",
        rank,
        moved.title,
        show_bytes(sent.nbytes),
        sent.messages,
        show_bytes(received.nbytes),
        received.messages,
        moved.rate,
        moved.phases,
    )
