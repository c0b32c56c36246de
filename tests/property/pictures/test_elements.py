"""SVG as strings."""

from __future__ import annotations

from xml.etree import ElementTree

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shardmath.display.pictures.elements import (
    BLUES,
    ORANGES,
    Drawing,
    below,
    beside,
    box,
    document,
    ink,
    lines,
    number,
    palette,
    shade,
    words,
)

SVG = "{http://www.w3.org/2000/svg}"


@given(st.text(), st.text())
def test_any_text_is_well_formed(title: str, text: str) -> None:
    drawing = Drawing(10, 10, (words(0, 0, text), box(0, 0, 1, 1, text, fill="#fff")))
    root = ElementTree.fromstring(document(drawing, title, text).encode())
    assert root[0].tag == f"{SVG}title" and root[1].tag == f"{SVG}desc"


def test_what_is_printable_is_kept() -> None:
    root = ElementTree.fromstring(document(lines(['<a> & "b" é\x00']), "t < u", "d"))
    assert root[0].text == "t < u"
    assert [x.text for x in root.iter(f"{SVG}text")] == ['<a> & "b" é�']


def test_a_document_alone_has_themes_and_one_in_a_page_has_not() -> None:
    alone = document(lines(["a"]), "t", "d")
    within = document(lines(["a"]), "t", "d", inline=True)
    assert "prefers-color-scheme:dark" in alone and "<style>" not in within
    assert 'fill="currentColor"' in alone and 'fill="currentColor"' in within
    assert "href" not in alone and "<script" not in alone


def test_drawings_side_by_side_and_stacked() -> None:
    a, b = Drawing(10, 20, ("<a/>",)), Drawing(30, 5, ("<b/>",))
    assert beside([a, b], 4)[:2] == (44, 20) and below([a, b], 4)[:2] == (30, 29)
    assert "translate(14 0)" in beside([a, b], 4).parts[1]
    assert "translate(0 24)" in below([a, b], 4).parts[1]
    assert beside([], 4) == below([], 4) == Drawing(0, 0, ())


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (10, "10"), (1.5, "1.5"), (1 / 3, "0.33")])
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


# --- colors


def light(color: str) -> float:
    """WCAG's relative luminance."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(c * w for c, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(a: str, b: str) -> float:
    dark, bright = sorted((light(a) + 0.05, light(b) + 0.05))
    return bright / dark


@pytest.mark.parametrize("count", [1, 8, 9, 512])
def test_what_is_written_on_a_color_can_be_read(count: int) -> None:
    for fill in (*palette(count), *BLUES, *ORANGES):
        text = {"#000": "#000000", "#fff": "#ffffff"}[ink(fill)]
        assert contrast(fill, text) >= 4.5


def test_colors_are_distinct() -> None:
    assert palette(0) == ()
    for count in (1, 8, 9, 100):
        assert len(set(palette(count))) == count


def test_more_is_darker() -> None:
    for crossing in (False, True):
        shades = [shade(i / 100, crossing=crossing) for i in range(1, 101)]
        assert [light(x) for x in shades] == sorted((light(x) for x in shades), reverse=True)
        assert len(set(shades)) == 5
    assert shade(1e-9) == BLUES[0] and shade(1.0) == BLUES[-1]
