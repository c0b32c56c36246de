"""Elements: SVG as strings: elements, drawings made of them, and documents.

1. A `Drawing` is elements in a box of pixels from (0, 0). Drawings are put beside and below each other, and become a
   `document`.
2. Text takes the colour of what is around it (`currentColor`). A document that stands alone has a colour and a paper
   of its own, light or dark as whoever looks at it prefers; one inside a page takes the page's.
3. Fonts are monospaced, so that a text's width is known: `LETTER` pixels per character.
4. A document has a title and a description for people who do not see it; boxes have titles of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

__all__ = [
    "LETTER",
    "LINE",
    "Drawing",
    "below",
    "beside",
    "box",
    "brief",
    "document",
    "lines",
    "moved",
    "number",
    "plain",
    "words",
]

LETTER = 6.65
"""Pixels of a character at the size that documents have, 11 pixels."""

LINE = 16
"""Pixels from one line of text to the next."""

MARGIN = 12

MOST_LETTERS = 100
"""Characters of a text."""
MOST_TITLE = 240
"""Characters of what shows under the mouse."""
MOST_DESCRIBED = 2000
"""Characters of the title and of the description of a document."""

FONT = "ui-monospace, Menlo, Consolas, DejaVu Sans Mono, monospace"

THEMES = (
    "svg{color:#1f2328;background:#fff}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3;background:#0d1117}}"
)


class Drawing(NamedTuple):
    """Elements in a box of pixels from (0, 0)."""

    width: float
    height: float
    parts: tuple[str, ...]


def plain(text: str) -> str:
    """Text that XML may hold."""
    return escape("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text))


def brief(text: str, most: int) -> str:
    """The text, or the beginning of a long one."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def number(value: float) -> str:
    """A coordinate, in as few characters as tell it apart."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def words(x: float, y: float, text: str, **attributes: object) -> str:
    """Text whose baseline begins at (x, y); `_` in the names of attributes stands for `-`."""
    place = f'x="{number(x)}" y="{number(y)}"'
    return f"<text {place}{_written(attributes)}>{plain(brief(text, MOST_LETTERS))}</text>"


def box(
    x: float, y: float, width: float, height: float, title: str = "", **attributes: object
) -> str:
    """A rectangle, with a title that shows under the mouse."""
    place = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    head = f"<rect {place}{_written(attributes)}"
    if not title:
        return f"{head}/>"
    return f"{head}><title>{plain(brief(title, MOST_TITLE))}</title></rect>"


def _written(attributes: Mapping[str, object]) -> str:
    """Attributes as they stand in an element, a space before each."""
    texts = [f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items()]
    return "".join(texts)


def moved(drawing: Drawing, x: float, y: float) -> str:
    """The drawing as one element, elsewhere."""
    inside = "\n".join(drawing.parts)
    return f'<g transform="translate({number(x)} {number(y)})">\n{inside}\n</g>'


def beside(drawings: Sequence[Drawing], gap: float) -> Drawing:
    """From left to right, tops aligned."""
    parts, x = [], 0.0
    for drawing in drawings:
        parts.append(moved(drawing, x, 0))
        x += drawing.width + gap
    height = max((drawing.height for drawing in drawings), default=0)
    return Drawing(max(x - gap, 0), height, tuple(parts))


def below(drawings: Sequence[Drawing], gap: float) -> Drawing:
    """From top to bottom, left sides aligned."""
    parts, y = [], 0.0
    for drawing in drawings:
        parts.append(moved(drawing, 0, y))
        y += drawing.height + gap
    width = max((drawing.width for drawing in drawings), default=0)
    return Drawing(width, max(y - gap, 0), tuple(parts))


def lines(texts: Iterable[str], **attributes: object) -> Drawing:
    """Lines of text."""
    listed = [brief(text, MOST_LETTERS) for text in texts]
    parts = [words(0, LINE * (i + 0.75), text, **attributes) for i, text in enumerate(listed)]
    longest = max(map(len, listed), default=0)
    return Drawing(longest * LETTER, LINE * len(listed), tuple(parts))


def document(drawing: Drawing, title: str, about: str, *, inline: bool = False) -> str:
    """The drawing as a document that stands alone, or as an element of a page if `inline`."""
    width, height = (number(side + 2 * MARGIN) for side in (drawing.width, drawing.height))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    font = f'font-family="{FONT}" font-size="11" fill="currentColor"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {font}>']
    parts.append(f"<title>{plain(brief(title, MOST_DESCRIBED))}</title>")
    parts.append(f"<desc>{plain(brief(about, MOST_DESCRIBED))}</desc>")
    if not inline:
        parts.append(f"<style>{THEMES}</style>")
    parts += [moved(drawing, MARGIN, MARGIN), "</svg>", ""]
    return "\n".join(parts)
