"""Logs: a line per move, on the logger "shardmath" at INFO.

1. Nothing is shown unless the program says so, as by `logging.basicConfig(level=logging.INFO)`: nothing is configured
   here.
2. A line is made only where somebody listens. What a listener raises is its own affair, as `logging` has it.
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
"""Characters of what a failure says: it is raised in full."""


def log_move(rank: int, tell: Callable[[], Moved], failure: BaseException | None) -> None:
    """A line about a move on this rank, which `tell` gives; `failure` is what ended it, None where it ended well."""
    if not LOGGER.isEnabledFor(logging.INFO):
        return
    moved = tell()
    if failure is not None:
        # What several ranks say is on several lines.
        said = " ".join(word_error(failure).split())
        line = "rank %d: %s failed: %s; %s"
        LOGGER.info(line, rank, moved.title, said[:MOST_SAID], moved.phases)
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
