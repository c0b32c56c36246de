"""What `refit` says: tables as values, and two screens that show them, rich on a terminal and plain elsewhere.

1. Sizes are decimal: 1 MB is 10^6 bytes.
2. A bound stands beside what it bounds.
3. On a terminal progress is one line that changes; elsewhere it is a line a phase, and one every PLAIN_EVERY seconds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import shardmath as sm
from shardmath.base.given import plural
from shardmath.families.rules import Rule, Side
from shardmath_torch.commands.processes import Progress
from shardmath_torch.commands.refit_bounds import Bounds
from shardmath_torch.commands.refit_rank import Outcome
from shardmath_torch.files.weights import Weights

__all__ = [
    "PHASES",
    "Screen",
    "Table",
    "layouts_table",
    "rich_screen",
    "screen",
    "size",
    "times_table",
    "traffic_table",
]

PHASES = ("start", "load", "plan", "compile", "move", "check", "done")
"""In the order in which a rank goes through them."""

PLAIN_EVERY = 5.0
"""Seconds between lines about the same phase."""

Watch: TypeAlias = Callable[[Mapping[int, Progress]], None]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a header; columns of numbers stand right."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def right(self, column: int) -> bool:
        """Whether the column holds numbers."""
        return all(row[column].lstrip("-")[:1].isdigit() or not row[column] for row in self.rows)

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        rule = tuple("-" * width for width in widths)
        lines = [self._line(row, widths) for row in (self.header, rule, *self.rows)]
        return "\n".join([self.title, *lines])

    def _line(self, row: tuple[str, ...], widths: Sequence[int]) -> str:
        cells = (
            cell.rjust(w) if self.right(i) else cell.ljust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  " + "  ".join(cells).rstrip()


class Screen(Protocol):
    """Where `refit` writes."""

    def line(self, text: str) -> None:
        """A line of text."""

    def table(self, table: Table) -> None:
        """A table, with a blank line before it."""

    def progress(self) -> AbstractContextManager[Watch]:
        """While inside, shows every rank's progress."""


def screen() -> Screen:
    """rich on a terminal that has it, plain elsewhere."""
    if not sys.stdout.isatty():
        return _Plain()
    try:
        return rich_screen()
    except ImportError:
        return _Plain()


class _Plain:
    def line(self, text: str) -> None:
        print(text, flush=True)

    def table(self, table: Table) -> None:
        print(f"\n{table}\n", flush=True)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Watch]:
        start, shown, said = time.monotonic(), "", 0.0

        def watch(progress: Mapping[int, Progress]) -> None:
            nonlocal shown, said
            now, phase = time.monotonic() - start, _slowest(progress)
            if phase != shown or now - said > PLAIN_EVERY:
                shown, said = phase, now
                self.line(f"[{now:5.1f} s] {_summary(progress)}")

        yield watch


def rich_screen() -> Screen:
    """The screen of a terminal. Raises ImportError without rich (extra `pretty`)."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Table as RichTable
    from rich.text import Text

    class Rich:
        console = Console(highlight=False)

        def line(self, text: str) -> None:
            self.console.print(text, markup=False, soft_wrap=True)

        def table(self, table: Table) -> None:
            shown = RichTable(title=table.title, title_justify="left", title_style="bold")
            for i, name in enumerate(table.header):
                shown.add_column(
                    name, justify="right" if table.right(i) else "left", overflow="fold"
                )
            for row in table.rows:
                shown.add_row(*map(Text, row))
            self.console.print(shown)

        @contextlib.contextmanager
        def progress(self) -> Iterator[Watch]:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
            )
            with Bar(*columns, console=self.console, transient=True) as bar:
                task = bar.add_task("start", total=len(PHASES) - 1)

                def watch(progress: Mapping[int, Progress]) -> None:
                    bar.update(task, description=_summary(progress), completed=_completed(progress))

                yield watch

    return Rich()


def _slowest(progress: Mapping[int, Progress]) -> str:
    return min((at.phase for at in progress.values()), key=PHASES.index)


def _summary(progress: Mapping[int, Progress]) -> str:
    """The slowest phase, how many ranks are in it, and how much of it they have done."""
    phase = _slowest(progress)
    there = [at for at in progress.values() if at.phase == phase]
    done, total = sum(at.done for at in there), sum(at.total for at in there)
    amount = {
        "load": f": {size(done)} of {size(total)}",
        "check": f": {size(done)} of {size(total)}",
        "move": f": step {min(at.done for at in there) + 1:.0f} of {there[0].total:.0f}",
    }
    return f"{phase} ({len(there)} of {plural(progress, 'rank')}){amount.get(phase, '')}"


def _completed(progress: Mapping[int, Progress]) -> float:
    """Phases behind the ranks, on average, with the part of the present one."""
    parts = (
        PHASES.index(at.phase) + (at.done / at.total if at.total else 0.0)
        for at in progress.values()
    )
    return min(sum(parts) / len(progress), len(PHASES) - 1)


def size(nbytes: float) -> str:
    """Bytes for people: `12.3 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes:.0f} B"


def layouts_table(weights: Weights, src: Side, dst: Side) -> Table:
    """The layouts chosen: tensors by the rules that they fall to on either side."""
    a, b = (side.matches(weights.entries) for side in (src, dst))
    groups: dict[tuple[Rule | None, Rule | None], list[str]] = {}
    for name in weights.entries:
        groups.setdefault((a[name], b[name]), []).append(name)
    rows = [
        _group(weights, pair, names)
        for pair, names in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    header = ("rule", "tensors", "size", "source", "destination", "for example")
    return Table(f"Layouts: {_mesh(src)}  ->  {_mesh(dst)}", header, tuple(rows))


def _group(
    weights: Weights, pair: tuple[Rule | None, Rule | None], names: list[str]
) -> tuple[str, ...]:
    patterns = list(dict.fromkeys(rule.pattern if rule else "(none)" for rule in pair))
    texts = [rule.layout if rule else "..." for rule in pair]
    total = sum(weights.entries[name].nbytes for name in names)
    largest = max(names, key=lambda name: weights.entries[name].nbytes)
    entry = weights.entries[largest]
    return (
        " / ".join(patterns),
        str(len(names)),
        size(total),
        *texts,
        f"{largest} {entry.dtype}{list(entry.shape)}",
    )


def _mesh(side: Side) -> str:
    return str(Side(side.mesh))


def traffic_table(plan: sm.Plan, bound: Bounds, outcomes: Sequence[Outcome]) -> Table:
    """Bytes that each rank loaded, sent and received, each beside what no direct plan can go below."""
    sent, received = plan.sent_bytes(), plan.received_bytes()
    counts = [
        (
            outcomes[r].loaded,
            sent[r],
            bound.sent[r],
            received[r],
            bound.received[r],
            outcomes[r].checked,
        )
        for r in plan.ranks
    ]
    rows = [(str(r), *map(size, row)) for r, row in zip(plan.ranks, counts, strict=True)]
    header = (
        "rank",
        "loaded",
        "sent",
        ">= held by it alone",
        "received",
        ">= needed, not held",
        "checked",
    )
    total = ("all", *(size(sum(column)) for column in zip(*counts, strict=True)))
    return Table("Bytes of one move, each beside its lower bound", header, (*rows, total))


def times_table(nbytes: int, outcomes: Sequence[Outcome]) -> Table:
    """Seconds and throughput of the moves, beside those of a plain exchange of the same bytes.

    A step takes as long as its slowest rank.
    """
    ours = [max(steps) for steps in zip(*(o.move_s for o in outcomes), strict=True)]
    peer = [max(steps) for steps in zip(*(o.peer_s for o in outcomes), strict=True)]
    rows = (
        ("shardmath", *_times(nbytes, ours)),
        ("isend/irecv", *_times(nbytes, peer)),
        ("ratio", *(_ratio(nbytes, a(ours), a(peer)) for a in (lambda s: s[0], min)), ""),
    )
    header = ("", "first", f"best of {len(ours)}", "best throughput")
    return Table(
        "Time of one move, beside hand-written isend/irecv of the same bytes between the same ranks",
        header,
        rows,
    )


def _ratio(nbytes: int, ours: float, peer: float) -> str:
    """How much longer ours took; nothing to compare where no byte goes from rank to rank."""
    return f"{ours / peer:.2f}" if nbytes and peer else "-"


def _times(nbytes: int, steps: Sequence[float]) -> tuple[str, str, str]:
    best = min(steps)
    return f"{steps[0] * 1e3:.1f} ms", f"{best * 1e3:.1f} ms", f"{size(nbytes / best)}/s"
