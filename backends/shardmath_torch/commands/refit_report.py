"""Report of `refit`: tables as values, and two screens that show them, rich on a terminal and plain elsewhere.

1. Sizes are decimal: 1 MB is 10^6 bytes.
2. A bound is shown next to what it bounds.
3. On a terminal progress is one line that changes; elsewhere it is one line per phase, and one
   every PLAIN_EVERY seconds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table as RichTable
from rich.text import Text

import shardmath as sm
from shardmath.base.text import plural, show_bytes
from shardmath.models.systems.rules import Rule, Side
from shardmath_torch.checkpoints.safetensors.weights import Weights
from shardmath_torch.commands.processes import Progress
from shardmath_torch.commands.refit_bounds import Bounds
from shardmath_torch.commands.refit_rank import Outcome

__all__ = [
    "PHASES",
    "ErrorScreen",
    "Screen",
    "TextTable",
    "choose_screen",
    "layouts_table",
    "times_table",
    "traffic_table",
]

PHASES = ("start", "load", "plan", "compile", "move", "check", "done")
"""The phases of a rank, in order."""

PLAIN_EVERY = 5.0
"""Seconds between lines about the same phase."""

Watch: TypeAlias = Callable[[Mapping[int, Progress]], None]


@dataclass(frozen=True, slots=True)
class TextTable:
    """A title, a header and rows of text; columns whose cells begin with digits are right-aligned."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def right(self, column: int) -> bool:
        """Whether every cell of the column is empty or begins with a digit (after any minus sign), so that the column
        is right-aligned."""
        for row in self.rows:
            cell = row[column]
            digits = cell.lstrip("-")
            if cell and not digits[:1].isdigit():
                return False
        return True

    def __str__(self) -> str:
        columns = zip(self.header, *self.rows, strict=True)
        widths = [max(map(len, column)) for column in columns]
        rule = tuple("-" * width for width in widths)
        lines = [self.title]
        for row in (self.header, rule, *self.rows):
            lines.append(self._write_row(row, widths))
        return "\n".join(lines)

    def _write_row(self, row: tuple[str, ...], widths: Sequence[int]) -> str:
        cells = []
        for i, width in enumerate(widths):
            cell = row[i].rjust(width) if self.right(i) else row[i].ljust(width)
            cells.append(cell)
        return "  " + "  ".join(cells).rstrip()


class Screen(Protocol):
    """The interface of an output, such as a terminal or text stream, to which the command `python -m shardmath refit`
    writes lines, tables and progress."""

    def line(self, text: str) -> None:
        """Write a line of text."""

    def table(self, table: TextTable) -> None:
        """Write a table with its title."""

    def progress(self) -> AbstractContextManager[Watch]:
        """Return a context manager that shows the ranks' progress. Its `as` target is a function to call with a dict
        from rank to Progress (phase and amount done), to update the display."""


def choose_screen() -> Screen:
    """Return a screen for stdout: formatted by the package rich on a terminal, plain text elsewhere."""
    return _TerminalScreen() if sys.stdout.isatty() else _PlainScreen()


class _PlainScreen:
    """Lines of text, for files and pipes."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def table(self, table: TextTable) -> None:
        print(f"\n{table}\n", flush=True)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Watch]:
        start = time.monotonic()
        shown_phase = ""
        shown_at = 0.0

        def watch(progress: Mapping[int, Progress]) -> None:
            nonlocal shown_phase, shown_at
            now = time.monotonic() - start
            phase = _find_slowest(progress)
            if phase != shown_phase or now - shown_at > PLAIN_EVERY:
                shown_phase, shown_at = phase, now
                self.line(f"[{now:5.1f} s] {_summarize(progress)}")

        yield watch


class ErrorScreen(_PlainScreen):
    """Progress on stderr, and nothing else: stdout is for a program that reads it."""

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def table(self, table: TextTable) -> None:
        """Write nothing: what the table has is in the result."""


class _TerminalScreen:
    """Tables with borders, and one line of progress that changes."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def table(self, table: TextTable) -> None:
        rich_table = RichTable(title=table.title, title_justify="left", title_style="bold")
        for i, name in enumerate(table.header):
            is_right = table.right(i)
            rich_table.add_column(name, justify="right" if is_right else "left", overflow="fold")
        for row in table.rows:
            rich_table.add_row(*map(Text, row))  # Text: no cell is markup
        self._console.print(rich_table)

    @contextlib.contextmanager
    def progress(self) -> Iterator[Watch]:
        text = TextColumn("{task.description}")
        columns = (SpinnerColumn(), text, BarColumn(), TimeElapsedColumn())
        with Bar(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task("start", total=len(PHASES) - 1)

            def watch(progress: Mapping[int, Progress]) -> None:
                done = _count_phases(progress)
                bar.update(task, description=_summarize(progress), completed=done)

            yield watch


def _find_slowest(progress: Mapping[int, Progress]) -> str:
    """The earliest phase of any rank."""
    phases = {each.phase for each in progress.values()}
    return min(phases, key=PHASES.index)


def _summarize(progress: Mapping[int, Progress]) -> str:
    """The slowest phase, how many ranks are in it, and how much of it they have done."""
    phase = _find_slowest(progress)
    slowest = [each for each in progress.values() if each.phase == phase]
    text = f"{phase} ({len(slowest)} of {plural(progress, 'rank')})"
    if phase in ("load", "check"):
        done = sum(each.done for each in slowest)
        total = sum(each.total for each in slowest)
        return f"{text}: {show_bytes(done)} of {show_bytes(total)}"
    if phase == "move":
        step = min(each.done for each in slowest) + 1
        return f"{text}: step {step:.0f} of {slowest[0].total:.0f}"
    return text


def _count_phases(progress: Mapping[int, Progress]) -> float:
    """The number of finished phases, averaged over ranks, with the finished part of the present one."""
    finished = 0.0
    for each in progress.values():
        finished += PHASES.index(each.phase)
        if each.total:
            finished += each.done / each.total
    return min(finished / len(progress), len(PHASES) - 1)


def layouts_table(weights: Weights, src: Side, dst: Side) -> TextTable:
    """Return a table of the layout rules (tensor name pattern -> layout) that apply to the weights at the source and at
    the destination; the Sides `src` and `dst` each have a mesh and such rules. A row is for all tensors with the same
    two rules; rows with the most tensors come first."""
    groups = _group_by_rules(weights, src, dst)
    rows = []
    for rules in sorted(groups, key=lambda rules: -len(groups[rules])):
        rows.append(_write_group(weights, rules, groups[rules]))
    header = ("rule", "tensors", "size", "source", "destination", "for example")
    before_mesh, after_mesh = Side(src.mesh), Side(dst.mesh)  # without rules, to show only meshes
    title = f"Layouts: {before_mesh}  ->  {after_mesh}"
    return TextTable(title, header, tuple(rows))


_Rules: TypeAlias = tuple[Rule | None, Rule | None]
"""The rules that match a tensor: the source's and the destination's."""


def _group_by_rules(weights: Weights, src: Side, dst: Side) -> dict[_Rules, list[str]]:
    """The names of tensors by the rules that match them."""
    src_rules = src.matches(weights.entries)
    dst_rules = dst.matches(weights.entries)
    groups: dict[_Rules, list[str]] = {}
    for name in weights.entries:
        groups.setdefault((src_rules[name], dst_rules[name]), []).append(name)
    return groups


def _write_group(weights: Weights, rules: _Rules, names: list[str]) -> tuple[str, ...]:
    """The row of a group of tensors, with the largest as an example."""
    patterns = [rule.pattern if rule else "no rule" for rule in rules]
    texts = [rule.layout if rule else "..." for rule in rules]
    sizes = {name: weights.entries[name].nbytes for name in names}
    largest = max(names, key=lambda name: sizes[name])
    entry = weights.entries[largest]
    return (
        " -> ".join(dict.fromkeys(patterns)),
        str(len(names)),
        show_bytes(sum(sizes.values())),
        *texts,
        f"{largest} {entry.dtype}{list(entry.shape)}",
    )


def traffic_table(plan: sm.Plan, bound: Bounds, outcomes: Sequence[Outcome]) -> TextTable:
    """Return a table of each rank's bytes loaded, sent, received and compared after arrival. `plan` gives the bytes
    sent and received, `bound` their lower bounds, and `outcomes` (one per rank) the bytes loaded and compared."""
    counts = _count_traffic(plan, bound, outcomes)
    rows = [(str(rank), *map(show_bytes, row)) for rank, row in counts.items()]
    totals = map(sum, zip(*counts.values(), strict=True))
    rows.append(("all", *map(show_bytes, totals)))
    title = "Bytes of one move, each beside its lower bound"
    return TextTable(title, TRAFFIC, tuple(rows))


TRAFFIC = (
    "rank",
    "loaded",
    "sent",
    ">= held by it alone",
    "received",
    ">= needed, not held",
    "checked",
)
"""The columns of `traffic_table`."""


def _count_traffic(
    plan: sm.Plan, bound: Bounds, outcomes: Sequence[Outcome]
) -> dict[int, tuple[int, ...]]:
    """The bytes of each rank, in the columns of TRAFFIC after the first."""
    sent = plan.sent_bytes()
    received = plan.received_bytes()
    counts: dict[int, tuple[int, ...]] = {}
    for rank in plan.ranks:
        loaded, checked = outcomes[rank].loaded, outcomes[rank].checked
        sending = (sent[rank], bound.sent[rank])
        receiving = (received[rank], bound.received[rank])
        counts[rank] = (loaded, *sending, *receiving, checked)
    return counts


def times_table(nbytes: int, outcomes: Sequence[Outcome]) -> TextTable:
    """Return a table of time and throughput for two ways to transfer `nbytes`: a move, and a hand-written isend/irecv
    exchange. `outcomes` has each rank's measured seconds of both.

    A step takes as long as its slowest rank.
    """
    ours = _find_slowest_ranks([outcome.move_s for outcome in outcomes])
    peer = _find_slowest_ranks([outcome.peer_s for outcome in outcomes])
    first = _write_ratio(nbytes, ours[0], peer[0])
    best = _write_ratio(nbytes, min(ours), min(peer))
    rows = (
        ("shardmath", *_write_times(nbytes, ours)),
        ("isend/irecv", *_write_times(nbytes, peer)),
        ("ratio", first, best, ""),
    )
    header = ("", "first", f"best of {len(ours)}", "best throughput")
    what = "hand-written isend/irecv of the same bytes between the same ranks"
    return TextTable(f"Time of one move, beside {what}", header, rows)


def _find_slowest_ranks(steps_of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each step on its slowest rank."""
    return [max(step) for step in zip(*steps_of_ranks, strict=True)]


def _write_ratio(nbytes: int, ours: float, peer: float) -> str:
    """How many times longer the move took than the plain exchange; "-" if ranks exchange no bytes."""
    return f"{ours / peer:.2f}" if nbytes and peer else "-"


def _write_times(nbytes: int, steps: Sequence[float]) -> tuple[str, str, str]:
    """The first and the best time, and the throughput of the best."""
    first = steps[0]
    best = min(steps)
    throughput = show_bytes(nbytes / best)
    return f"{first * 1e3:.1f} ms", f"{best * 1e3:.1f} ms", f"{throughput}/s"
