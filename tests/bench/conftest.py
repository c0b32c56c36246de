"""The table at the end of a benchmark run: each figure beside its target and its peer's figure.

Machines are shared and noisy, so both the median and the minimum are shown, and no figure fails a test.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from shardmath.show import table


class Row(NamedTuple):
    """One figure: seconds of each round, the target in seconds, and a peer's seconds."""

    what: str
    seconds: Sequence[float]
    target: float | None = None
    peer: str = ""
    peer_seconds: Sequence[float] = ()


ROWS = pytest.StashKey[list[Row]]()
HEAD = ["figure", "median", "min", "target", "peer", "median", "min", "peer / ours"]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture
def record(pytestconfig: pytest.Config) -> Callable[..., None]:
    """Puts a row into the table: record(what, seconds, target=, peer=, peer_seconds=)."""
    return lambda *args, **named: pytestconfig.stash[ROWS].append(Row(*args, **named))


def duration(seconds: float) -> str:
    """A time as people read it: us, ms or s."""
    for unit, size in (("us", 1e-6), ("ms", 1e-3)):
        if seconds < 1000 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2f} s"


def cells(row: Row) -> list[str]:
    """The row as text."""
    ours, theirs = row.seconds, row.peer_seconds
    target = duration(row.target) if row.target else ""
    out = [row.what, duration(statistics.median(ours)), duration(min(ours)), target, row.peer]
    if not theirs:
        return [*out, "", "", ""]
    ratio = statistics.median(theirs) / statistics.median(ours)
    return [*out, duration(statistics.median(theirs)), duration(min(theirs)), f"{ratio:,.3g}x"]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[ROWS]
    if rows:
        terminalreporter.section("figures, each beside its peer")
        terminalreporter.write_line(table(HEAD, map(cells, rows)))
