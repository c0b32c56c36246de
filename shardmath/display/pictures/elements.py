"""Elements: SVG as strings: elements, drawings made of them, scales, colors, and documents.

1. A `Drawing` is elements in a box of pixels from (0, 0). Drawings are combined with `beside` and `below`, and become a
   `document`.
2. Text has the color of its surroundings (`currentColor`). A standalone document has its own text and background
   colors, light or dark as the viewer prefers; a document inside a page has the page's.
3. Fonts are monospaced, so that a text's width is known: `LETTER` pixels per character.
4. A document has a title and a description for people who do not see it; boxes have titles, too.
5. Colors can be told apart by the color-blind. Up to eight things have the colors of Okabe and Ito; more things have
   evenly spaced colors of viridis, in order. Amounts have one of five shades: blues inside a node, oranges between
   nodes. Text on a color is black or white, whichever has more contrast.

>>> palette(2), ink("#0072b2"), shade(0.5), shade(1, crossing=True)
(('#56b4e9', '#e69f00'), '#fff', '#6baed6', '#a63603')
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple, TypeAlias

from shardmath.base.text import show_bytes

__all__ = [
    "BLUES",
    "LETTER",
    "LINE",
    "ORANGES",
    "VERMILION",
    "Drawing",
    "Scale",
    "Stretch",
    "below",
    "beside",
    "box",
    "brief",
    "document",
    "draw_entry",
    "every",
    "few_digits",
    "find_step",
    "group",
    "in_rows",
    "ink",
    "lines",
    "list_ticks",
    "moved",
    "name_ranks",
    "number",
    "palette",
    "plain",
    "scale_stretches",
    "shade",
    "words",
]

LETTER = 6.65
"""Pixels of a character at the font size of documents, 11 pixels."""

LINE = 16
"""Pixels from one line of text to the next."""

MARGIN = 12

MOST_LETTERS = 140
"""Characters of a text."""
MOST_TITLE = 240
"""Characters of a tooltip."""
MOST_DESCRIBED = 2000
"""Characters of the title and of the description of a document."""

FONT = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"

# `svg:root` matches only standalone documents, never an SVG inside a page.
THEMES = (
    "svg:root{color:#1f2328;background:#fff}"
    "@media(prefers-color-scheme:dark){svg:root{color:#e6edf3;background:#0d1117}}"
)


class Drawing(NamedTuple):
    """SVG elements (`parts`) within a box of pixels from (0, 0) to (width, height)."""

    width: float
    height: float
    parts: tuple[str, ...]


def plain(text: str) -> str:
    """Return `text` escaped for XML, with U+FFFD in place of unprintable characters except line breaks."""
    printable = [c if c.isprintable() or c == "\n" else "\ufffd" for c in text]
    return escape("".join(printable))


def brief(text: str, most: int) -> str:
    """Return `text`, shortened to `most` characters (with "..." as its end) if it is longer."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def number(value: float) -> str:
    """Return the coordinate `value` as text with at most two decimals, as short as possible."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def words(x: float, y: float, text: str, **attributes: object) -> str:
    """Return an SVG text element at (x, y); `text` is cut to at most 140 characters. Other keyword arguments become XML
    attributes, with `_` in their names replaced by `-`."""
    place = f'x="{number(x)}" y="{number(y)}"'
    shown = brief(text, MOST_LETTERS)
    return f"<text {place}{_written(attributes)}>{plain(shown)}</text>"


def box(
    x: float, y: float, width: float, height: float, title: str = "", **attributes: object
) -> str:
    """An SVG rectangle with its top left corner at (x, y), and a `title` that shows under the mouse.

    In the names of its XML `attributes`, `_` stands for `-`.
    """
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    head = f"<rect {place}{_written(attributes)}"
    if not title:
        return f"{head}/>"
    shown = brief(title, MOST_TITLE)
    return f"{head}><title>{plain(shown)}</title></rect>"


def group(parts: Iterable[str], **attributes: object) -> str:
    """SVG elements as one, which share XML attributes; in the names of `attributes`, `_` stands for `-`."""
    inside = "\n".join(parts)
    return f"<g{_written(attributes)}>\n{inside}\n</g>"


def _written(attributes: Mapping[str, object]) -> str:
    """Attributes in XML, with a space before each."""
    texts = [f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items()]
    return "".join(texts)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return `ranks` for an attribute that pages read to find what a rank holds: spans of equal steps, in order.

    >>> name_ranks([3, 0, 1, 2, 8, 16, 24]), name_ranks([5])
    ('0-3 8-24/8', '5')
    """
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        last = spans[-1] if spans else []
        if len(last) == 1 or (len(last) > 1 and rank - last[-1] == last[1] - last[0]):
            last.append(rank)
        else:
            spans.append([rank])
    return " ".join(map(_name_span, spans))


def _name_span(ranks: list[int]) -> str:
    """Ranks of equal steps, as a span from the first to the last one."""
    first, last = ranks[0], ranks[-1]
    if first == last:
        return str(first)
    step = ranks[1] - first
    return f"{first}-{last}" if step == 1 else f"{first}-{last}/{step}"


def moved(drawing: Drawing, x: float, y: float) -> str:
    """The drawing as one SVG element, moved to (x, y)."""
    return group(drawing.parts, transform=f"translate({number(x)} {number(y)})")


def beside(drawings: Sequence[Drawing], gap: float) -> Drawing:
    """Arrange drawings from left to right as one drawing, `gap` pixels apart, with their tops aligned."""
    parts = []
    x = 0.0
    for drawing in drawings:
        parts.append(moved(drawing, x, 0))
        x += drawing.width + gap
    width = max(x - gap, 0)
    heights = [drawing.height for drawing in drawings]
    return Drawing(width, max(heights, default=0), tuple(parts))


def in_rows(drawings: Sequence[Drawing]) -> Drawing:
    """Arrange drawings in rows of three as one drawing."""
    rows = [beside(drawings[i : i + 3], 16) for i in range(0, len(drawings), 3)]
    return below(rows, 10)


def below(drawings: Sequence[Drawing], gap: float) -> Drawing:
    """Arrange drawings from top to bottom as one drawing, `gap` pixels apart, with their left sides aligned."""
    parts = []
    y = 0.0
    for drawing in drawings:
        parts.append(moved(drawing, 0, y))
        y += drawing.height + gap
    height = max(y - gap, 0)
    widths = [drawing.width for drawing in drawings]
    return Drawing(max(widths, default=0), height, tuple(parts))


def lines(texts: Iterable[str], **attributes: object) -> Drawing:
    """A drawing of lines of text, one below the other."""
    parts = []
    longest = 0
    for i, text in enumerate(texts):
        shown = brief(text, MOST_LETTERS)
        baseline = LINE * (i + 0.75)
        parts.append(words(0, baseline, shown, **attributes))
        longest = max(longest, len(shown))
    return Drawing(longest * LETTER, LINE * len(parts), tuple(parts))


def document(drawing: Drawing, title: str, about: str, *, inline: bool = False) -> str:
    """Return `drawing` as an SVG document, or as an element for a web page if `inline`, with a `title` and a
    description, `about`, for people who do not see it."""
    width = number(drawing.width + 2 * MARGIN)
    height = number(drawing.height + 2 * MARGIN)
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = f'font-family="{FONT}" font-size="11" fill="currentColor"'
    short_title = plain(brief(title, MOST_DESCRIBED))
    short_about = plain(brief(about, MOST_DESCRIBED))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>',
        f"<title>{short_title}</title>",
        f"<desc>{short_about}</desc>",
    ]
    if not inline:
        parts.append(f"<style>{THEMES}</style>")
    parts += [moved(drawing, MARGIN, MARGIN), "</svg>", ""]
    return "\n".join(parts)


def draw_entry(text: str, shades: Sequence[str]) -> Drawing:
    """An entry of a legend: `shades` next to each other, and what they mean."""
    parts = []
    x = 0
    for fill in shades:
        parts.append(box(x, 3, 12, 12, fill=fill))
        x += 12
    x += 6
    parts.append(words(x, LINE * 0.75, text))
    return Drawing(x + len(text) * LETTER, LINE, tuple(parts))


def few_digits(count: int) -> str:
    """A number of bytes as text that fits into a box.

    >>> few_digits(134_217_728), few_digits(999_620)
    ('134 MB', '1000 kB')
    """
    digits, unit = show_bytes(count).split()
    amount = float(digits)
    # From 999.5 on, .3g writes an exponent: 1e+03.
    return f"{amount:.3g} {unit}" if amount < 999.5 else f"{amount:.0f} {unit}"


# Scales

Stretch: TypeAlias = tuple[int, int]
"""Positions start..stop-1 of a dimension."""

ELEMENT = 28.0
"""Pixels of an element, if there are few."""
MOST_PIXELS = 640.0
"""Pixels that a panel's columns or rows may take so that all stretches can be seen."""
SEEN = 4.0
"""The least pixels of a stretch, while there is room."""
GAP = 22.0
"""Pixels of a gap for positions that are left out."""


class Scale(NamedTuple):
    """The drawn positions, in pixels, of ranges of a dimension: the beginning and size of each, and the total size."""

    at: tuple[float, ...]
    size: tuple[float, ...]
    total: float


def scale_stretches(spans: Sequence[Stretch], room: float, least: float = SEEN) -> Scale:
    """Return the positions and sizes, in pixels, at which to draw `spans` (ranges of a dimension) in a row. The sizes
    are scaled to a total of at most `room`; then gaps between ranges that do not meet, and a least size for tiny
    ranges, can make the row longer.

    Ranges of fewer than `least` pixels are widened to that size, while there is room.
    """
    total = sum(stop - start for start, stop in spans)
    per_position = min(ELEMENT, room / max(total, 1))
    smallest = min(least, MOST_PIXELS / max(len(spans), 1))
    at = []
    pixels = []
    x = 0.0
    previous_stop = None
    for start, stop in spans:
        if previous_stop not in (None, start):
            x += GAP
        size = max((stop - start) * per_position, smallest)
        at.append(x)
        pixels.append(size)
        x += size
        previous_stop = stop
    return Scale(tuple(at), tuple(pixels), x)


def list_ticks(
    spans: Sequence[Stretch], scale: Scale, *, across: bool
) -> Iterator[tuple[float, int]]:
    """Yield (pixel, position) for each border of `spans` where a label has room, and always for the last border. If
    `across`, labels stand next to each other, otherwise one below the other."""
    if not spans:
        return
    *inner, last = _list_borders(spans, scale)
    last_at, last_position = last
    # The other labels have room from the end of the label before to the beginning of the last one.
    free_from = -math.inf
    free_to = last_at - _half(last_position, across)
    for at, position in inner:
        half = _half(position, across)
        if at - half >= free_from and at + half <= free_to:
            yield at, position
            free_from = at + half
    yield last


def _list_borders(spans: Sequence[Stretch], scale: Scale) -> list[tuple[float, int]]:
    """(pixel, position) of each border; where two stretches meet, of the later one."""
    borders = {}
    for (_, stop), at, size in zip(spans, scale.at, scale.size, strict=True):
        end = at + size
        borders[end] = stop
    for (start, _), at in zip(spans, scale.at, strict=True):
        borders[at] = start
    return sorted(borders.items())


def _half(position: int, across: bool) -> float:
    """Half of the pixels that a position's number takes along the dimension."""
    if not across:
        return 6.5
    return (len(str(position)) * LETTER + 6) / 2


def every(ranks: int, width: float, room: float) -> int:
    """Return the least power of two n for which labels at every n-th rank are at least `room` pixels apart. The drawing
    of all `ranks` ranks is `width` pixels wide.

    Without room for two labels, n is the least power of two that is not below `ranks`.
    """
    step = 1
    while step < ranks and step * width / ranks < room:
        step *= 2
    return step


def find_step(length: float, few: int) -> float:
    """Return the distance between two ticks of an axis: 1, 2 or 5 times a power of ten, at most `2 * few` times in its
    `length`. 0.0 if the axis has no length."""
    if not length:
        return 0.0
    least = length / (2 * few)
    power = 10.0 ** math.floor(math.log10(least))
    steps = (power, 2 * power, 5 * power, 10 * power)
    return next(step for step in steps if step >= least)


# Colors

VERMILION = "#d55e00"

OKABE_ITO = (
    "#56b4e9",
    "#e69f00",
    "#009e73",
    "#f0e442",
    "#0072b2",
    VERMILION,
    "#cc79a7",
    "#999999",
)
VIRIDIS = (
    "#440154",
    "#472d7b",
    "#3b528b",
    "#2c728e",
    "#21918c",
    "#28ae80",
    "#5ec962",
    "#addc30",
    "#fde725",
)
"""Evenly spaced colors of viridis, dark to light."""

BLUES = ("#deebf7", "#9ecae1", "#6baed6", "#3182bd", "#08519c")
ORANGES = ("#feedde", "#fdbe85", "#fd8d3c", "#e6550d", "#a63603")
"""ColorBrewer's shades, light to dark."""


def palette(count: int) -> tuple[str, ...]:
    """Return a tuple of `count` colors, each "#rrggbb". Up to eight are from the Okabe-Ito palette; for a larger
    `count`, all are evenly spaced along viridis."""
    if count <= len(OKABE_ITO):
        return OKABE_ITO[:count]
    return tuple(_blend(i / (count - 1)) for i in range(count))


def _blend(share: float) -> str:
    """The color of viridis at this share of its length."""
    index = share * (len(VIRIDIS) - 1)
    lower = min(int(index), len(VIRIDIS) - 2)
    rest = index - lower
    pairs = zip(_channels(VIRIDIS[lower]), _channels(VIRIDIS[lower + 1]), strict=True)
    mixed = [round(dark + (light - dark) * rest) for dark, light in pairs]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _channels(color: str) -> bytes:
    """Red, green and blue of `#rrggbb`."""
    return bytes.fromhex(color[1:])


def _linear(channel: int) -> float:
    """The linear intensity of a channel of sRGB."""
    value = channel / 255
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def ink(fill: str) -> str:
    """Return "#000" or "#fff", whichever shows better on the color `fill`, `#rrggbb` (by WCAG's relative luminance)."""
    red, green, blue = map(_linear, _channels(fill))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    # The contrast of black is (luminance + .05) / .05, of white 1.05 / (luminance + .05).
    return "#000" if luminance > 0.179 else "#fff"


def shade(share: float, *, crossing: bool = False) -> str:
    """Return the color for an amount of bytes in a picture, darker for a larger `share` (the amount divided by the
    largest amount in the picture). The color is orange if `crossing` is True (most of the bytes go from node to node),
    otherwise blue."""
    shades = ORANGES if crossing else BLUES
    last = len(shades) - 1
    number = math.ceil(share * len(shades)) - 1
    within = min(max(number, 0), last)
    return shades[within]
