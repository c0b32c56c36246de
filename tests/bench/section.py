"""A section of the benchmark page by a program of its own: a table, printed, and written with `--page FILE`."""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from shardmath.base.text import make_table


def arguments(description: str, **numbers: int) -> argparse.Namespace:
    """What the program was called with: numbers by position, and the page."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in numbers.items():
        parser.add_argument(name, type=int, nargs="?", default=default)
    parser.add_argument(
        "--page",
        type=Path,
        help="write the section to this page, in place of the one that is there",
    )
    parser.add_argument("--folder", help="where files go, by default the system's folder for such")
    return parser.parse_args()


def slowest(ranks: Iterable[Sequence[float]]) -> float:
    """The median over repeats of the slowest rank's seconds."""
    return statistics.median(map(max, zip(*ranks, strict=True)))


def show(page: Path | None, title: str, about: str, head: list[str], rows: list[list[str]]) -> None:
    """Prints the table, and puts it into the page."""
    print(f"{title}: {about}\n{make_table(head, rows)}")
    if page is not None:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        text = "\n".join(
            [
                f"## {title}",
                "",
                about,
                "",
                f"| {' | '.join(head)} |",
                "|---" * len(head) + "|",
                *lines,
                "",
            ]
        )
        page.write_text(_replaced(page.read_text() if page.exists() else "", title, text))


def _replaced(page: str, title: str, text: str) -> str:
    """The page with this section, at the end if it was not there."""
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.M | re.S)
    if pattern.search(page):
        return pattern.sub(lambda _: text + "\n", page).rstrip("\n") + "\n"
    return (page.rstrip("\n") + "\n\n" + text).lstrip("\n")
