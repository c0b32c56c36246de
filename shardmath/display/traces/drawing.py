"""Drawing: a trace as SVG: a row per track, time from left to right.

1. A rank's model stands below what was measured, on the same axis.
2. Spans of one name have one colour; messages have one for each way.
3. Spans that are too short to be told apart are drawn as one, under the name of the longest.

>>> from shardmath.display.traces.spans import Place
>>> move = Span(Place(0), "phases", "moving", 0.0, 1e-3)
>>> print(svg(Trace((move,))).splitlines()[1])
<title>1 span of 1 place in 0.001000 s</title>
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base.arguments import instance, listed
from shardmath.base.errors import ShardError
from shardmath.base.text import plural, show_seconds, shown
from shardmath.display.pictures.elements import (
    LETTER,
    LINE,
    Drawing,
    below,
    box,
    document,
    lines,
    palette,
    words,
)
from shardmath.display.traces.spans import Place, Span, Trace

__all__ = ["TRACKS", "svg"]

TRACKS = ("phases", "work", "rounds")
"""What is drawn of each place where nothing else is said."""

WIDTH = 840.0
"""Pixels of the line of time."""

ROW = 14.0
"""Pixels of a row."""

ROWS_GAP, PLACES_GAP = 3.0, 7.0
"""Pixels between two rows, and more between two places."""

TOP = 20.0
"""Pixels above the rows, for the times."""

MOST_ROWS = 128

FEW_TICKS = 6
"""Numbers along the axis; there are at most twice as many."""

TOO_NEAR = 0.25
"""Pixels: what is nearer is not seen to be apart."""

Colours: TypeAlias = Mapping[str, str]
"""By kind of spans."""

COLOURS: Colours = {
    "queueing": "#999999",
    "preparing": "#56b4e9",
    "agreeing": "#f0e442",
    "moving": "#0072b2",
    "rounds": "#6baed6",
    "packing": "#e69f00",
    "posting": "#009e73",
    "keeping": "#cc79a7",
    "waiting": "#d0d0d0",
    "unpacking": "#b35806",
    "folding": "#542788",
    "finalizing": "#542788",
    "committing": "#009e73",
    "comparing": "#cc79a7",
    "failing": "#d55e00",
    "messages to others": "#009e73",
    "messages from others": "#e69f00",
}
"""Of the kinds that moves have: what is only waiting is grey. Other kinds have those of `palette`."""

SHORT = 8.0
"""Pixels of a row whose time is written beside it."""

PARTED = 0.6
"""Pixels that part two bars, where they are long enough."""


class _Row(NamedTuple):
    """A track, and where it is drawn."""

    place: Place
    track: str
    spans: list[Span]
    y: float

    @property
    def name(self) -> str:
        """What stands at its left."""
        return f"{self.place} {self.track}"


class _Axis(NamedTuple):
    """The line of time: where it begins, in pixels and in seconds, and how many seconds it has."""

    left: float
    first_s: float
    seconds: float

    def find(self, at_s: float) -> float:
        """Where a time is, in pixels."""
        if not self.seconds:
            return self.left
        share = (at_s - self.first_s) / self.seconds
        return self.left + share * WIDTH


class _Bar(NamedTuple):
    """What is drawn of a row from one pixel to another."""

    begin: float
    end: float
    span: Span

    @property
    def width(self) -> float:
        """Pixels from one to the other."""
        return self.end - self.begin


def svg(trace: Trace, *, tracks: Iterable[str] = TRACKS, inline: bool = False) -> str:
    """The trace as SVG: a document, or an element of a page if `inline`.

    `tracks` are those drawn, of each place those that it has: "moves", "phases", "rounds", "work", "to 3", "from 0".
    Raises ShardError for what is no trace, and where it has none of the tracks.
    """
    instance(trace, Trace, "draw what smt.trace wrote, as traces.read reads it", ShardError)
    wanted = listed(tracks, "tracks", ShardError)
    rows = _list_rows(trace, wanted)
    if not rows:
        there = sorted({span.track for span in trace.spans})
        raise ShardError(f"the trace has none of the tracks {shown(wanted)}; it has {shown(there)}")
    drawn = rows[:MOST_ROWS]
    colours = _choose_colours(drawn)
    chart = _draw_rows(drawn, colours)
    legend = _draw_legend(colours)
    parts = [chart, legend]
    more = len(rows) - len(drawn)
    if more:
        note = lines([f"{more} more rows are left out"])
        parts.append(note)
    kinds = ", ".join(colours)
    about = f"{plural(drawn, 'row')}: {kinds}"
    drawing = below(parts, 10)
    return document(drawing, str(trace), about, inline=inline)


def _list_rows(trace: Trace, wanted: Sequence[str]) -> list[_Row]:
    """The rows, place by place."""
    found: dict[tuple[Place, int], list[Span]] = {}
    for span in trace.spans:
        if span.track in wanted:
            number = wanted.index(span.track)
            spans = found.setdefault((span.place, number), [])
            spans.append(span)
    rows: list[_Row] = []
    y = TOP
    for place, number in sorted(found):
        if rows and rows[-1].place != place:
            y += PLACES_GAP
        spans = found[place, number]
        row = _Row(place, wanted[number], spans, y)
        rows.append(row)
        y += ROW + ROWS_GAP
    return rows


def _find_kind(span: Span) -> str:
    """What of spans has one colour."""
    # What follows is a peer, or a thread.
    first = span.track.partition(" ")[0]
    if first in ("to", "from"):
        return f"messages {first} others"
    return "rounds" if first == "rounds" else span.name


def _choose_colours(rows: Iterable[_Row]) -> Colours:
    """Colours of kinds, in the order in which they are first met."""
    spans = [span for row in rows for span in row.spans]
    kinds = list(dict.fromkeys(map(_find_kind, spans)))
    others = [kind for kind in kinds if kind not in COLOURS]
    found = dict(zip(others, palette(len(others)), strict=True))
    return {kind: COLOURS.get(kind) or found[kind] for kind in kinds}


def _draw_rows(rows: Sequence[_Row], colours: Colours) -> Drawing:
    """All rows on one axis."""
    height = rows[-1].y + ROW
    axis = _find_axis(rows)
    parts = list(_draw_axis(axis, height))
    for row in rows:
        baseline = row.y + ROW - 3
        name = words(0, baseline, row.name)
        parts.append(name)
        parts += _draw_bars(row, axis, colours)
    # The last number stands over the end of the axis.
    width = axis.left + WIDTH + 4 * LETTER
    return Drawing(width, height, tuple(parts))


def _find_axis(rows: Sequence[_Row]) -> _Axis:
    """The axis that has all spans."""
    longest = max(len(row.name) for row in rows)
    spans = [span for row in rows for span in row.spans]
    first = min(span.begin_s for span in spans)
    end = max(span.end_s for span in spans)
    left = longest * LETTER + 10
    return _Axis(left, first, end - first)


def _draw_axis(axis: _Axis, height: float) -> Iterator[str]:
    """Lines at round times, their numbers above them."""
    step = _find_step(axis.seconds)
    count = int(axis.seconds / step) if step else 0
    for number in range(count + 1):
        at = number * step
        x = axis.find(axis.first_s + at)
        yield box(x, LINE, 0.5, height - LINE, fill="currentColor", fill_opacity=0.3)
        text = show_seconds(at) if number else "0"
        yield words(x, LINE - 5, text, text_anchor="middle")


def _find_step(seconds: float) -> float:
    """1, 2 or 5 times a power of ten, of which there are some in that time; 0.0 for no time."""
    if not seconds:
        return 0.0
    least = seconds / (2 * FEW_TICKS)
    power = 10.0 ** math.floor(math.log10(least))
    steps = (power, 2 * power, 5 * power, 10 * power)
    return next(step for step in steps if step >= least)


def _draw_bars(row: _Row, axis: _Axis, colours: Colours) -> Iterator[str]:
    """The spans of a row."""
    for bar in _join_short(row.spans, axis):
        part = PARTED if bar.width > 4 * PARTED else 0.0
        width = max(bar.width - part, TOO_NEAR)
        kind = _find_kind(bar.span)
        title = _describe(bar.span)
        yield box(bar.begin, row.y, width, ROW, title, fill=colours[kind])
    yield from _write_short(row, axis)


def _write_short(row: _Row, axis: _Axis) -> Iterator[str]:
    """The time of a row that is too short to be seen, beside its bars: a model of fast links, next to slow ones."""
    first = min(span.begin_s for span in row.spans)
    end = max(span.end_s for span in row.spans)
    x = axis.find(end)
    if x - axis.find(first) < SHORT:
        text = show_seconds(end - first)
        yield words(x + 4, row.y + ROW - 3, text)


def _describe(span: Span) -> str:
    """What shows under the mouse."""
    lasts = show_seconds(span.seconds)
    told = [f"{span.name}: {lasts}"]
    for name, value in span.about.items():
        told.append(f"{name} {value}")
    return ", ".join(told)


def _join_short(spans: Iterable[Span], axis: _Axis) -> list[_Bar]:
    """Bars of spans, short neighbours of one kind as one."""
    bars: list[_Bar] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        begin = axis.find(span.begin_s)
        end = axis.find(span.end_s)
        bar = _Bar(begin, end, span)
        if bars and _is_seen_as_one(bars[-1], bar):
            former = bars.pop()
            longest = max(former.span, span, key=lambda one: one.seconds)
            bar = _Bar(former.begin, bar.end, longest)
        bars.append(bar)
    return bars


def _is_seen_as_one(former: _Bar, bar: _Bar) -> bool:
    """Whether the two touch, are of one kind, and one of them is too short to be seen."""
    if bar.begin - former.end > TOO_NEAR:
        return False
    if _find_kind(former.span) != _find_kind(bar.span):
        return False
    return min(former.width, bar.width) < TOO_NEAR


def _draw_legend(colours: Colours) -> Drawing:
    """Each colour beside what it stands for, in lines as long as the axis."""
    parts: list[str] = []
    x = 0.0
    y = 0.0
    for kind, colour in colours.items():
        letters = len(kind) + 3
        width = ROW + letters * LETTER
        if x + width > WIDTH:
            x = 0.0
            y += ROW + ROWS_GAP
        sample = box(x, y, ROW, ROW, fill=colour)
        name = words(x + ROW + 4, y + ROW - 3, kind)
        parts += [sample, name]
        x += width
    return Drawing(WIDTH, y + ROW, tuple(parts))
