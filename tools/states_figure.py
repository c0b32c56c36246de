"""The figure of docs/failures.md: the states of a rank while ranks agree, and the events between them.

python tools/states_figure.py      # writes docs/states.svg

States and arrows are those of the table in shardmath/plans/protocol.py. Only their places are chosen here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shardmath.display.pictures.elements import (
    LETTER,
    VERMILION,
    Drawing,
    below,
    box,
    document,
    number,
    palette,
    words,
)
from shardmath.plans.protocol import TABLE, Event, State

FIGURE = Path(__file__).parents[1] / "docs" / "states.svg"

WIDTH, HEIGHT = 172.0, 44.0
"""Pixels of a state."""
COLUMN, ROW = 250.0, 132.0
"""Pixels from one column of states to the next, and from one row to the next."""
LEFT, TOP = 118.0, 92.0
"""Pixels from the left and from the top to the middle of the first state."""

BLUE, ORANGE, GREEN = palette(3)


class Look(NamedTuple):
    """A state: its column and row, what it means, and its color."""

    column: float
    row: float
    meaning: str
    color: str = "currentColor"


LOOKS = {
    State.IDLE: Look(0, 0, "well: may call again", GREEN),
    State.AGREEING: Look(1, 0, "has voted"),
    State.ACTING: Look(2, 0, "bytes are in flight"),
    State.COMMITTED: Look(3, 0, "puts new tensors in"),
    State.PROMISED: Look(2, 1, "has all its bytes"),
    State.DECIDING: Look(3, 1, "all have promised"),
    State.BROKEN: Look(0, 2.2, "error: make a new group", VERMILION),
    State.DOUBTING: Look(2, 2.4, "in doubt: reads record", ORANGE),
    State.OWING: Look(3, 2.4, "puts them in, then ends"),
}


class Kind(NamedTuple):
    """A kind of events: what they mean for this rank's tensors, and the dashes of their arrows."""

    meaning: str
    dashes: str


STEP = Kind("solid: all goes well, or what was committed is put in place", "")
UNCHANGED = Kind("dashed: the call ends in an error; this rank's tensors stay as they are", "7 4")
DOUBT = Kind("dotted: in doubt whether the others have the new tensors", "2 3")
KINDS = (STEP, UNCHANGED, DOUBT)


class Bend(NamedTuple):
    """How far, in pixels, an arrow bends to its left, the share of its way at which its event is written, and whether
    it is written inside the bend."""

    pixels: float
    share: float = 0.5
    inside: bool = False


BENDS = {
    (State.IDLE, Event.VOTE): Bend(20),
    (State.AGREEING, Event.REFUSE): Bend(20, 0.5, inside=True),
    (State.AGREEING, Event.AGREE): Bend(20),
    (State.ACTING, Event.VOTE): Bend(20),
    (State.ACTING, Event.FINISH): Bend(-130),
    (State.IDLE, Event.PROMISE): Bend(16, 0.6),
    (State.PROMISED, Event.REFUSE): Bend(16, 0.55),
    (State.DECIDING, Event.ABORT): Bend(-10, 0.45),
    (State.DECIDING, Event.LOSE): Bend(30, 0.42),
    (State.DECIDING, Event.LEAVE): Bend(24),
    (State.DOUBTING, Event.ABORT): Bend(-16, 0.4),
    (State.DOUBTING, Event.LOSE): Bend(16, 0.4),
    (State.COMMITTED, Event.LEAVE): Bend(230),
    (State.OWING, Event.PLACE): Bend(180),
}
"""By state and event; other arrows are straight."""
LOOPS = {
    (State.IDLE, Event.FINISH): -90.0,
    (State.IDLE, Event.LEAVE): 90.0,
    (State.BROKEN, Event.LEAVE): 90.0,
    (State.DOUBTING, Event.LEAVE): 90.0,
    (State.OWING, Event.LEAVE): 90.0,
}
"""The direction, in degrees to the right and down, in which an arrow leaves a state to which it returns."""


def classify(event: Event, target: State) -> Kind:
    """The kind of an entry of the table."""
    if event is Event.LOSE or target is State.DOUBTING:
        return DOUBT
    ends = event is Event.LEAVE and target in (State.IDLE, State.BROKEN)
    if ends or event in (Event.REFUSE, Event.ABORT):
        return UNCHANGED
    return STEP


def locate(state: State) -> tuple[float, float]:
    """The middle of a state."""
    look = LOOKS[state]
    return LEFT + look.column * COLUMN, TOP + look.row * ROW


def clip(middle: tuple[float, float], towards: tuple[float, float]) -> tuple[float, float]:
    """The point at which a line from the middle of a state towards another point leaves the state's box."""
    dx, dy = towards[0] - middle[0], towards[1] - middle[1]
    share = min(
        (WIDTH / 2 + 3) / abs(dx) if dx else math.inf,
        (HEIGHT / 2 + 3) / abs(dy) if dy else math.inf,
    )
    return middle[0] + dx * share, middle[1] + dy * share


def draw_arrow(state: State, event: Event, target: State) -> Iterator[str]:
    """The arrow of an entry of the table, with its event."""
    kind = classify(event, target)
    if state is target:
        points, (x, y), anchor = trace_loop(state, event)
    else:
        points, (x, y), anchor = trace_bend(state, event, target)
    start, *controls, end = points
    path = f"M{show(start)} {'Q' if len(controls) == 1 else 'C'}{' '.join(map(show, [*controls, end]))}"
    dashes = f' stroke-dasharray="{kind.dashes}"' if kind.dashes else ""
    title = f"<title>{state.value}, {event.value}: {target.value}</title>"
    yield f'<path d="{path}" fill="none" stroke="currentColor"{dashes}>{title}</path>'
    yield draw_head(controls[-1], end)
    yield words(x, y + 4, event.value, text_anchor=anchor)


def show(point: tuple[float, float]) -> str:
    """A point of a path."""
    return f"{number(point[0])} {number(point[1])}"


Traced = tuple[list[tuple[float, float]], tuple[float, float], str]
"""Points of a curve, the place of its text, and the text's anchor."""


def trace_bend(state: State, event: Event, target: State) -> Traced:
    """A curve from one state to another."""
    one, other = locate(state), locate(target)
    bend = BENDS.get((state, event), Bend(0))
    length = math.dist(one, other)
    # The normal points to the left of somebody who follows the arrow; y grows downwards.
    normal = (other[1] - one[1]) / length, (one[0] - other[0]) / length
    control = (
        (one[0] + other[0]) / 2 + normal[0] * bend.pixels,
        (one[1] + other[1]) / 2 + normal[1] * bend.pixels,
    )
    start, end = clip(one, control), clip(other, control)
    t = bend.share
    weights = (1 - t) ** 2, 2 * t * (1 - t), t**2
    curve = [start, control, end]
    x, y = (
        sum(w * point[axis] for w, point in zip(weights, curve, strict=True)) for axis in (0, 1)
    )
    side = -1 if (bend.pixels < 0) != bend.inside else 1
    nx, ny = normal[0] * side, normal[1] * side
    anchor = "middle" if abs(nx) < 0.3 else "start" if nx > 0 else "end"
    # Text above a sloping arrow keeps its ends off it.
    rise = abs(nx) * len(event.value) * LETTER / 2 if anchor == "middle" else 0
    return curve, (x + nx * 7, y + ny * (9 + rise)), anchor


def trace_loop(state: State, event: Event) -> Traced:
    """A curve from a state to itself."""
    x, y = locate(state)
    down = 1 if LOOPS[state, event] > 0 else -1
    edge = y + down * (HEIGHT / 2 + 3)
    far = edge + down * 42
    curve = [(x - 26, edge), (x - 34, far), (x + 34, far), (x + 26, edge)]
    return curve, (x, edge + down * 40), "middle"


def draw_head(before: tuple[float, float], end: tuple[float, float]) -> str:
    """The head of an arrow that comes from `before`."""
    angle = math.atan2(end[1] - before[1], end[0] - before[0])
    wings = [
        (end[0] - 9 * math.cos(angle + turn), end[1] - 9 * math.sin(angle + turn))
        for turn in (0.4, -0.4)
    ]
    points = " ".join(f"{number(x)},{number(y)}" for x, y in [end, *wings])
    return f'<polygon points="{points}" fill="currentColor"/>'


def draw_state(state: State) -> Iterator[str]:
    """A state with its meaning: idle is round, broken has a double edge, doubting a dashed one."""
    look = LOOKS[state]
    x, y = locate(state)
    left, top = x - WIDTH / 2, y - HEIGHT / 2
    opacity = "0.06" if look.color == "currentColor" else "0.35"
    tint = {"fill": look.color, "fill_opacity": opacity}
    edge = {"stroke": "currentColor"}
    if state is State.IDLE:
        edge |= {"rx": number(HEIGHT / 2), "stroke_width": "2"}
    if state is State.DOUBTING:
        edge |= {"stroke_dasharray": "2 3", "stroke_width": "2"}
    title = f"{state.value}: {look.meaning}"
    yield box(left, top, WIDTH, HEIGHT, title, **tint, **edge)
    if state is State.BROKEN:
        yield box(left + 3, top + 3, WIDTH - 6, HEIGHT - 6, fill="none", stroke="currentColor")
    yield words(x, y - 3, state.value, text_anchor="middle", font_weight="bold")
    yield words(x, y + 13, look.meaning, text_anchor="middle")


def draw_legend() -> Drawing:
    """The meaning of the arrows' dashes."""
    entries = []
    for kind in KINDS:
        dashes = f' stroke-dasharray="{kind.dashes}"' if kind.dashes else ""
        line = f'<path d="M0 8h40" stroke="currentColor"{dashes}/>'
        text = words(48, 12, kind.meaning)
        entries.append(Drawing(48 + len(kind.meaning) * LETTER, 16, (line, text)))
    return below(entries, 0)


def figure() -> str:
    """All states and events of the table."""
    parts = [part for state in TABLE for part in draw_state(state)]
    sentences = []
    for state, events in TABLE.items():
        for event, target in events.items():
            parts += draw_arrow(state, event, target)
        leads = [f"{event.value} to {target.value}" for event, target in events.items()]
        sentences.append(f"{state.value}: {', '.join(leads)}")
    drawing = Drawing(LEFT + 3 * COLUMN + 172, TOP + 2.4 * ROW + 100, tuple(parts))
    return document(
        below([drawing, draw_legend()], 4),
        "The states of a rank in a move with commit='all'",
        "; ".join(sentences),
    )


if __name__ == "__main__":
    FIGURE.write_text(figure())
