"""Palette: colours that the colour-blind can tell apart, and what is written on them.

1. Up to eight things have the colours of Okabe and Ito; more have evenly spaced ones of viridis, in their order.
2. Amounts have one of five shades: blues inside a node, oranges between nodes.
3. What is written on a colour is black or white, whichever has more contrast.

>>> palette(2), ink("#0072b2"), shade(0.5), shade(1, crossing=True)
(('#56b4e9', '#e69f00'), '#fff', '#6baed6', '#a63603')
"""

from __future__ import annotations

import math

__all__ = ["BLUES", "ORANGES", "VERMILION", "ink", "palette", "shade"]

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
"""Evenly spaced, dark to light."""

BLUES = ("#deebf7", "#9ecae1", "#6baed6", "#3182bd", "#08519c")
ORANGES = ("#feedde", "#fdbe85", "#fd8d3c", "#e6550d", "#a63603")
"""ColorBrewer's, light to dark."""


def palette(count: int) -> tuple[str, ...]:
    """That many colours."""
    if count <= len(OKABE_ITO):
        return OKABE_ITO[:count]
    return tuple(_blend(i / (count - 1)) for i in range(count))


def _blend(share: float) -> str:
    """The colour of viridis at this share of its length."""
    at = share * (len(VIRIDIS) - 1)
    left = min(int(at), len(VIRIDIS) - 2)
    dark, light = _channels(VIRIDIS[left]), _channels(VIRIDIS[left + 1])
    out = "#"
    for a, b in zip(dark, light, strict=True):
        mixed = round(a + (b - a) * (at - left))
        out += f"{mixed:02x}"
    return out


def _channels(colour: str) -> tuple[int, int, int]:
    """Red, green and blue of `#rrggbb`."""
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _linear(channel: int) -> float:
    """The light of a channel of sRGB."""
    value = channel / 255
    return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4


def ink(fill: str) -> str:
    """Black or white, whichever shows better on `#rrggbb` (WCAG's relative luminance)."""
    red, green, blue = map(_linear, _channels(fill))
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    # Black has a contrast of (luminance + .05) / .05, white one of 1.05 / (luminance + .05).
    return "#000" if luminance > 0.179 else "#fff"


def shade(share: float, *, crossing: bool = False) -> str:
    """The shade of an amount that is this share, above 0 and at most 1, of the largest."""
    shades = ORANGES if crossing else BLUES
    number = math.ceil(share * len(shades)) - 1
    return shades[min(max(number, 0), len(shades) - 1)]
