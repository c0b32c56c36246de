"""Colours, and what is written on them."""

from __future__ import annotations

import pytest

from shardmath.pictures.palette import BLUES, ORANGES, ink, palette, shade


def light(colour: str) -> float:
    """WCAG's relative luminance."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(c * w for c, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(a: str, b: str) -> float:
    dark, bright = sorted((light(a) + 0.05, light(b) + 0.05))
    return bright / dark


@pytest.mark.parametrize("count", [1, 8, 9, 512])
def test_what_is_written_on_a_colour_can_be_read(count: int) -> None:
    for fill in (*palette(count), *BLUES, *ORANGES):
        text = {"#000": "#000000", "#fff": "#ffffff"}[ink(fill)]
        assert contrast(fill, text) >= 4.5


def test_colours_are_distinct() -> None:
    assert palette(0) == ()
    for count in (1, 8, 9, 100):
        assert len(set(palette(count))) == count


def test_more_is_darker() -> None:
    for crossing in (False, True):
        shades = [shade(i / 100, crossing=crossing) for i in range(1, 101)]
        assert [light(x) for x in shades] == sorted((light(x) for x in shades), reverse=True)
        assert len(set(shades)) == 5
    assert shade(1e-9) == BLUES[0] and shade(1.0) == BLUES[-1]
