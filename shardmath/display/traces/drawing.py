"""Drawing: a trace as SVG: a row per track, time from left to right.

1. A rank's model stands below its measured rows, on the same axis.
2. Spans of one name have one color; messages have one color per direction.
3. Spans that are too short to be seen separately are drawn as one, with the name of the longest.

>>> from shardmath.display.traces.spans import TraceRank
>>> move = Span(TraceRank(0), "phases", "moving", 0.0, 1e-3)
>>> print(svg(Trace((move,))).splitlines()[1])
<title>1 span of 1 place in 0.001000 s</title>
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base.arguments import instance, listed
from shardmath.base.errors import ShardError
from shardmath.base.text import plural, show_seconds, shown
from shardmath.display.pictures.elements import (
    LETTER,
    Drawing,
    below,
    box,
    document,
    find_step,
    lines,
    palette,
    words,
)
from shardmath.display.traces.spans import Span, Trace, TraceRank

__all__ = ["TRACKS", "svg"]

TRACKS = ("phases", "work", "rounds")
"""The tracks of each place that are drawn by default."""

WIDTH = 840.0
"""Pixels of the time axis."""

ROW = 14.0
"""Pixels of a row."""

ROWS_GAP, PLACES_GAP = 3.0, 7.0
"""Pixels between two rows, and more between two places."""

TOP = 20.0
"""Pixels above the rows, for the times."""

TICKS_TOP = 16.0
"""Pixels above the lines at round times; each line's time is there, 5 pixels above the line."""

MOST_ROWS = 128

FEW_TICKS = 6
"""Numbers along the axis, roughly; at most twice as many are drawn."""

TOO_NEAR = 0.25
"""Pixels below which a distance or a width is not seen."""

Colors: TypeAlias = Mapping[str, str]
"""Colors by kind of span."""

COLORS: Colors = {
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
    "folding": "#8856a7",
    "finalizing": "#8856a7",
    "committing": "#009e73",
    "comparing": "#cc79a7",
    "failing": "#d55e00",
    "messages to others": "#009e73",
    "messages from others": "#e69f00",
}
"""Colors of the kinds that moves have; waiting is gray. Other kinds have colors of `palette`."""

SHORT = 8.0
"""Pixels below which a row's time is written next to it."""

PARTED = 0.6
"""Pixels between two bars, if they are long enough."""


class _Row(NamedTuple):
    """A track and its spans, at height `y`."""

    place: TraceRank
    track: str
    spans: list[Span]
    y: float

    @property
    def name(self) -> str:
        """The text at the left of a row of the timeline: the rank, and the track (the kind of work that the row shows),
        such as "moves"."""
        return f"{self.place} {self.track}"


class _TimeAxis(NamedTuple):
    """The time axis: its beginning in pixels and in seconds, and its length in seconds."""

    left: float
    first_s: float
    seconds: float

    def find(self, at_s: float) -> float:
        """The horizontal position, in pixels, of the time `at_s`."""
        if not self.seconds:
            return self.left
        share = (at_s - self.first_s) / self.seconds
        return self.left + share * WIDTH


class _Bar(NamedTuple):
    """A rectangle of a row, from one pixel to another, for one or more spans; `span` is the longest."""

    begin: float
    end: float
    span: Span

    @property
    def width(self) -> float:
        """The width of the bar in pixels."""
        return self.end - self.begin


def svg(trace: Trace, *, tracks: Iterable[str] = TRACKS, inline: bool = False) -> str:
    """Return a picture of the trace's timeline as SVG: a document, or an element for a web page if `inline`. `tracks`
    chooses the rows to draw, by the kind of work that they show, such as "phases".

    `tracks` are the tracks to draw, if a place has them: "moves", "phases", "rounds", "work", "to 3", "from 0".
    Raises ShardError for anything but a trace, and if it has none of the tracks.
    """
    fix = "pass the Trace that traces.read reads from a file of smt.trace"
    instance(trace, Trace, fix, ShardError)
    wanted = listed(tracks, "tracks", ShardError)
    rows = _list_rows(trace, wanted)
    if not rows:
        present = sorted({span.track for span in trace.spans})
        what = f"the trace has none of the tracks {shown(wanted)}"
        raise ShardError(f"{what}; pass tracks= with some that it has: {shown(present)}")
    drawn = rows[:MOST_ROWS]
    colors = _choose_colors(drawn)
    parts = [_draw_rows(drawn, colors), _draw_legend(colors)]
    more = len(rows) - len(drawn)
    if more:
        parts.append(lines([f"{more} more rows are left out"]))
    about = f"{plural(drawn, 'row')}: {', '.join(colors)}"
    return document(below(parts, 10), str(trace), about, inline=inline)


def _list_rows(trace: Trace, wanted: Sequence[str]) -> list[_Row]:
    """The rows, place by place."""
    by_track: dict[tuple[TraceRank, int], list[Span]] = {}
    for span in trace.spans:
        if span.track in wanted:
            number = wanted.index(span.track)
            by_track.setdefault((span.place, number), []).append(span)
    rows: list[_Row] = []
    y = TOP
    for place, number in sorted(by_track):
        if rows and rows[-1].place != place:
            y += PLACES_GAP
        rows.append(_Row(place, wanted[number], by_track[place, number], y))
        y += ROW + ROWS_GAP
    return rows


def _find_kind(span: Span) -> str:
    """The kind of a span, which determines its color."""
    # The rest of the track's name is a peer, or a thread.
    first = span.track.partition(" ")[0]
    if first in ("to", "from"):
        return f"messages {first} others"
    return "rounds" if first == "rounds" else span.name


def _choose_colors(rows: Iterable[_Row]) -> Colors:
    """The color of each kind, in the order in which kinds first appear."""
    spans = [span for row in rows for span in row.spans]
    kinds = list(dict.fromkeys(map(_find_kind, spans)))
    others = [kind for kind in kinds if kind not in COLORS]
    all_colors = {**dict(zip(others, palette(len(others)), strict=True)), **COLORS}
    return {kind: all_colors[kind] for kind in kinds}


def _draw_rows(rows: Sequence[_Row], colors: Colors) -> Drawing:
    """All rows on one axis."""
    height = rows[-1].y + ROW
    axis = _find_axis(rows)
    parts = list(_draw_axis(axis, height))
    for row in rows:
        parts.append(words(0, row.y + ROW - 3, row.name))
        parts += _draw_bars(row, axis, colors)
    # The last number extends beyond the end of the axis.
    width = axis.left + WIDTH + 4 * LETTER
    return Drawing(width, height, tuple(parts))


def _find_axis(rows: Sequence[_Row]) -> _TimeAxis:
    """The axis that covers all spans."""
    longest = max(len(row.name) for row in rows)
    spans = [span for row in rows for span in row.spans]
    first = min(span.begin_s for span in spans)
    end = max(span.end_s for span in spans)
    left = longest * LETTER + 10
    return _TimeAxis(left, first, end - first)


def _draw_axis(axis: _TimeAxis, height: float) -> Iterator[str]:
    """Thin lines at round times, each with its time above it."""
    step = find_step(axis.seconds, FEW_TICKS)
    count = int(axis.seconds / step) if step else 0
    for number in range(count + 1):
        seconds = number * step
        x = axis.find(axis.first_s + seconds)
        length = height - TICKS_TOP
        yield box(x, TICKS_TOP, 0.5, length, fill="currentColor", fill_opacity=0.3)
        text = show_seconds(seconds) if number else "0"
        yield words(x, TICKS_TOP - 5, text, text_anchor="middle")


def _draw_bars(row: _Row, axis: _TimeAxis, colors: Colors) -> Iterator[str]:
    """The spans of a row."""
    for bar in _join_short(row.spans, axis):
        gap = PARTED if bar.width > 4 * PARTED else 0.0
        width = max(bar.width - gap, TOO_NEAR)
        kind = _find_kind(bar.span)
        title = _describe(bar.span)
        yield box(bar.begin, row.y, width, ROW, title, fill=colors[kind])
    yield from _write_short(row, axis)


def _write_short(row: _Row, axis: _TimeAxis) -> Iterator[str]:
    """The time of a row whose bars are too short to be seen, next to them; such as a model with fast links, below rows
    that were measured on slow ones."""
    first = min(span.begin_s for span in row.spans)
    end = max(span.end_s for span in row.spans)
    x = axis.find(end)
    if x - axis.find(first) < SHORT:
        text = show_seconds(end - first)
        yield words(x + 4, row.y + ROW - 3, text)


def _describe(span: Span) -> str:
    """The tooltip of a span."""
    texts = [f"{span.name}: {show_seconds(span.seconds)}"]
    texts += [f"{name} {value}" for name, value in span.about.items()]
    return ", ".join(texts)


def _join_short(spans: Iterable[Span], axis: _TimeAxis) -> list[_Bar]:
    """The bars of spans; short neighbors of one kind are joined."""
    bars: list[_Bar] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        begin = axis.find(span.begin_s)
        end = axis.find(span.end_s)
        bar = _Bar(begin, end, span)
        if bars and _is_seen_as_one(bars[-1], bar):
            previous = bars.pop()
            longest = max(previous.span, span, key=lambda span: span.seconds)
            bar = _Bar(previous.begin, bar.end, longest)
        bars.append(bar)
    return bars


def _is_seen_as_one(previous: _Bar, bar: _Bar) -> bool:
    """Whether two bars touch, are of one kind, and one of them is too short to be seen."""
    if bar.begin - previous.end > TOO_NEAR:
        return False
    if _find_kind(previous.span) != _find_kind(bar.span):
        return False
    return min(previous.width, bar.width) < TOO_NEAR


def _draw_legend(colors: Colors) -> Drawing:
    """Each color with its kind, in lines as long as the axis."""
    parts: list[str] = []
    x = 0.0
    y = 0.0
    for kind, color in colors.items():
        width = ROW + (len(kind) + 3) * LETTER  # the color, the text, and gaps of 3 letters
        if x + width > WIDTH:
            x = 0.0
            y += ROW + ROWS_GAP
        parts.append(box(x, y, ROW, ROW, fill=color))
        parts.append(words(x + ROW + 4, y + ROW - 3, kind))
        x += width
    return Drawing(WIDTH, y + ROW, tuple(parts))
