"""The table at the end of a benchmark run: each figure beside its target and its peer's figure.

Machines are shared and noisy, so both the median and the minimum are shown, and no figure fails a test. With
`--page FILE` the benchmark page is written too, except for the sections that other programs write.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shardmath.base.text import make_table


class Row(NamedTuple):
    """One figure: seconds of each round, the target in seconds, and a peer's seconds."""

    what: str
    seconds: Sequence[float]
    target: float | None = None
    peer: str = ""
    peer_seconds: Sequence[float] = ()


ROWS = pytest.StashKey[list[Row]]()
NOTES = pytest.StashKey[dict[str, list[str]]]()
PACE = pytest.StashKey[list[float]]()
HEAD = ["figure", "median", "min", "target", "peer", "median", "min", "peer / ours"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", help="write the benchmark page to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []
    config.stash[NOTES] = {}
    config.stash[PACE] = []


@pytest.fixture
def record(pytestconfig: pytest.Config) -> Callable[..., None]:
    """Puts a row into the table: record(what, seconds, target=, peer=, peer_seconds=)."""
    return lambda *args, **named: pytestconfig.stash[ROWS].append(Row(*args, **named))


@pytest.fixture
def note(pytestconfig: pytest.Config) -> Callable[..., None]:
    """Puts a line of text under a heading of the page: note(heading, line)."""
    return lambda heading, line: pytestconfig.stash[NOTES].setdefault(heading, []).append(line)


@pytest.fixture(autouse=True)
def _pace(pytestconfig: pytest.Config) -> None:
    """How fast this machine is right now, before every test: neighbors slow it down by spells."""
    pytestconfig.stash[PACE].append(
        min(timeit.repeat("for i in range(1_000_000): pass", number=1, repeat=3))
    )


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
    times = f"{ratio:,.0f}x" if ratio >= 1000 else f"{ratio:.3g}x"
    return [*out, duration(statistics.median(theirs)), duration(min(theirs)), times]


HEADS = {
    "certificates": "These times are computed, not measured. [Programs and certificates](programs.md) explains "
    "`fanout`, bounds, witnesses and slots.\n\n"
    "| program | `fanout` | time | bound | time / bound | witness | slots |\n" + "|---" * 7 + "|",
    "scaling": "Each column is a number of ranks on each side. Figures are milliseconds.\n\n![scaling](scaling.svg)\n\n"
    "| | 64 | 128 | 256 | 512 | 1,024 | 2,048 | 4,096 | 8,192 | 16,384 |\n" + "|---" * 10 + "|",
    "memory": "",
}


def page(rows: list[Row], notes: dict[str, list[str]], pace: list[float]) -> str:
    """The benchmark page."""
    slow, fast = duration(max(pace)), duration(min(pace))
    machine = f"{os.cpu_count()} cores ({platform.machine()}), Python {platform.python_version()}"
    out = [
        "# Benchmarks",
        "",
        f"`make bench` wrote this page on {machine}. [How to read the numbers](numbers.md) explains the figures. "
        "Compare figures only within a table: other programs may have run at the same time. The first table measures "
        "planning and flat buffers. The sections from [Exchange](#exchange) on measure everything "
        "else. DeepSeek-V3 has 45,395 tensors, of which 45,337 are parameters. In the first "
        'table, every cache is emptied before each round of a measurement, except in rows with "planned before". If a '
        "figure misses its target, no test fails, since machines are shared and noisy. To show how much the machine's "
        "speed varied, the run timed an empty loop of a million turns before every test. This loop took from "
        f"{fast} to {slow}.",
        "",
        f"| {' | '.join(HEAD)} |",
        "|" + "---|" * len(HEAD),
        *(f"| {' | '.join(cells(row))} |" for row in rows),
    ]
    for heading, lines in notes.items():
        out += ["", f"## {heading.capitalize()}", "", *filter(None, [HEADS[heading]]), *lines]
    return "\n".join(out) + "\n"


def list_others(to: Path, notes: Mapping[str, object]) -> list[str]:
    """The sections of the page that other programs have written."""
    sections = re.split("^## ", to.read_text() if to.exists() else "", flags=re.M)[1:]
    titles = [heading.capitalize() for heading in notes]
    kept = [one for one in sections if one.partition("\n")[0] not in titles]
    return [f"## {one.rstrip()}\n" for one in kept]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows, notes = config.stash[ROWS], config.stash[NOTES]
    if rows:
        terminalreporter.section("figures, each beside its peer")
        terminalreporter.write_line(make_table(HEAD, map(cells, rows)))
    for heading, lines in notes.items():
        terminalreporter.section(heading)
        terminalreporter.write_line("\n".join(lines))
    if rows and config.getoption("--page"):
        to = Path(config.getoption("--page"))
        to.parent.mkdir(exist_ok=True)
        others = list_others(to, notes)
        to.write_text("\n".join([page(rows, notes, config.stash[PACE]), *others]))
