"""Certificate pictures: the bound and the time of a plan as bars on one time axis, drawn as SVG.

1. Both bars begin at 0. The hatched part of the bound is latency, the rest the bytes of the witness at its rate.
2. A line at the end of the bound crosses both bars: what is right of it is what a better plan could save at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardmath.base.text import count_ranks, show_seconds
from shardmath.display.pictures.elements import (
    LETTER,
    LINE,
    Drawing,
    below,
    box,
    document,
    find_step,
    lines,
    palette,
    words,
)
from shardmath.plans.flows.certificate import Certificate, Witness, show_si

__all__ = ["certificate_svg"]

LEFT = 48.0
"""Pixels of the names of the bars."""
ROOM = 330.0
"""Pixels of the longer bar."""
BAR, PITCH = 16.0, 22.0
"""Pixels of a bar, and from one to the next."""
FEW_TICKS = 3

HATCH = (
    '<defs><pattern id="shardmath-latency" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="1.6" height="5" fill="#000"/></pattern></defs>'
)


def certificate_svg(certificate: Certificate, *, inline: bool = False) -> str:
    """Return a picture of a certificate as SVG: a document, or an element for a web page if `inline`."""
    head = _compare(certificate)
    parts = [lines([head], font_weight="bold")]
    if certificate.plan_s:
        parts.append(_draw_bars(certificate))
    if certificate.witness is not None:
        parts.append(lines(_explain(certificate, certificate.witness)))
    return document(below(parts, 6), head, str(certificate), inline=inline)


def _compare(certificate: Certificate) -> str:
    """The time of the plan and the bound in words."""
    if certificate.witness is None:
        return "nothing has to move"
    times = f"{certificate.ratio:.4g}"
    if times == "1":
        return "no plan is faster: this one takes as long as the bound"
    return f"the plan takes {times} times the bound"


def _explain(certificate: Certificate, witness: Witness) -> Iterator[str]:
    """Why no plan takes less than the bound."""
    verb = "take in" if witness.direction == "in" else "give out"
    yield f"{count_ranks(witness.ranks)} must {verb} {show_si(witness.nbytes)}B"
    links = f"over links of together {show_si(witness.bytes_per_s)}B/s"
    latency = show_seconds(certificate.latency_s)
    yield f"{links}; hatched: {latency} of latency" if certificate.latency_s else links


def _draw_bars(certificate: Certificate) -> Drawing:
    """Both bars above their axis."""
    longest = max(certificate.plan_s, certificate.bound_s)
    scale = ROOM / longest
    first, second = palette(2)
    hatched = certificate.latency_s * scale
    bound = certificate.bound_s * scale
    plan = certificate.plan_s * scale
    height = PITCH + BAR
    parts = [
        HATCH,
        *_draw_bar("bound", 0, certificate.bound_s, bound, first),
        box(LEFT, 0, hatched, BAR, fill="url(#shardmath-latency)", pointer_events="none"),
        *_draw_bar("plan", PITCH, certificate.plan_s, plan, second),
        box(LEFT + bound - 0.5, -2, 1, height + 4, fill="currentColor"),
        *_draw_axis(longest, scale, height + 5),
    ]
    return Drawing(LEFT + ROOM + 11 * LETTER, height + 5 + LINE, tuple(parts))


def _draw_bar(name: str, y: float, seconds: float, width: float, fill: str) -> Iterator[str]:
    """A bar between its name and its time."""
    text = show_seconds(seconds)
    yield words(LEFT - 6, y + 12, name, text_anchor="end")
    yield box(LEFT, y, width, BAR, f"{name}: {text}", fill=fill)
    yield words(LEFT + width + 6, y + 12, text)


def _draw_axis(longest: float, scale: float, y: float) -> Iterator[str]:
    """A thin line with the times below it."""
    yield box(LEFT, y, ROOM, 0.5, fill="currentColor", fill_opacity="0.5")
    step = find_step(longest, FEW_TICKS)
    # A time at a tick may be a little more than the whole by rounding.
    for i in range(math.floor(longest / step * (1 + 1e-9)) + 1):
        seconds = i * step
        x = LEFT + seconds * scale
        yield box(x, y, 0.5, 3, fill="currentColor", fill_opacity="0.5")
        text = show_seconds(seconds) if i else "0"
        yield words(x, y + 13, text, text_anchor="middle", opacity="0.75")
