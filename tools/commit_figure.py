"""The figure of docs/failures.md: what three ranks and the store exchange in a move with `commit="all"`.

python tools/commit_figure.py      # writes docs/commit.svg
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardmath.display.pictures.elements import (
    Drawing,
    box,
    document,
    ink,
    number,
    palette,
    words,
)

FIGURE = Path(__file__).parents[1] / "docs" / "commit.svg"

LINES = {"rank 0": 20.0, "rank 1": 150.0, "rank 2": 280.0, "store": 410.0}
"""The horizontal position of each one's line."""
RIGHT = 480.0
"""Where it is said what a failure leaves."""
STEP = 62.0
"""Pixels of a step, from top to bottom."""


class Step(NamedTuple):
    """A step: its name, who sends to whom, and what others hold if a rank fails in it."""

    name: str
    arrows: tuple[tuple[str, str], ...]
    after: str


RANKS = ("rank 0", "rank 1", "rank 2")
EVERY = tuple((one, other) for one in RANKS for other in RANKS if one != other)
STEPS = (
    Step("vote", EVERY, "old tensors: nothing was moved"),
    Step("receive", (("rank 0", "rank 1"), ("rank 0", "rank 2")), "old tensors"),
    Step("promise", EVERY, "all old, or all new: the store says which"),
    Step("decide", (("rank 1", "store"),), "all old, or all new: the store says which"),
    Step("commit", (), "new tensors"),
)


def draw_arrow(source: str, target: str, y: float) -> str:
    """An arrow from a line to another, that falls by half a step."""
    x, end = LINES[source], LINES[target]
    side = 1 if end > x else -1
    head = " ".join(
        f"{number(px)},{number(py)}"
        for px, py in ((end, y + 26), (end - 8 * side, y + 20), (end - 8 * side, y + 28))
    )
    line = f'x1="{number(x)}" y1="{number(y)}" x2="{number(end)}" y2="{number(y + 26)}"'
    return (
        f'<line {line} stroke="currentColor" stroke-width="1"/>'
        f'<polygon points="{head}" fill="currentColor"/>'
    )


def draw_steps() -> Iterator[str]:
    """Lines, and the steps from top to bottom."""
    colors = palette(len(STEPS))
    bottom = 34 + STEP * len(STEPS)
    for name, x in LINES.items():
        yield words(x + 62, 12, name)
        yield (
            f'<line x1="{number(x + 80)}" y1="20" x2="{number(x + 80)}" y2="{number(bottom)}" '
            f'stroke="currentColor" stroke-opacity="0.4"/>'
        )
    yield words(RIGHT + 70, 12, "if a rank fails here, the others have")
    for i, (step, color) in enumerate(zip(STEPS, colors, strict=True)):
        y = 30 + i * STEP
        yield box(0, y, 66, STEP - 8, fill=color)
        yield words(8, y + 30, step.name, fill=ink(color))
        yield '<g transform="translate(80 0)">'
        for source, target in step.arrows:
            yield draw_arrow(source, target, y + 10)
        yield "</g>"
        yield words(RIGHT + 70, y + 30, step.after)


def figure() -> str:
    """The steps of a commit."""
    drawing = Drawing(RIGHT + 360, 34 + STEP * len(STEPS), tuple(draw_steps()))
    about = "All ranks vote, rank 0 sends to both others, all promise, one proposes to the store, all commit."
    return document(drawing, "A move with commit='all'", about)


if __name__ == "__main__":
    FIGURE.write_text(figure())
