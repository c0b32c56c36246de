"""Spans: intervals of a rank's work, and traces made of them.

1. A span is on a **track** of a **place**: a measured rank, or a rank in the model. Spans of one track do not overlap,
   so that every track reads from left to right.
2. A message is on the tracks of both its ends, "to 3" and "from 0", under one **link**.
3. Times are seconds from the beginning of the trace, which a `Clock` records.

>>> from shardmath.plans.programs.messages import make_message
>>> message = make_message((0, 0, 0), 0, 3, 1, ())
>>> name_track(message, 0), name_track(message, 3), describe_message(message)["bytes"]
('to 3', 'from 0', 0)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from shardmath.base.errors import ShardError
from shardmath.base.text import plural
from shardmath.plans.programs.messages import Message, Step

__all__ = [
    "Clock",
    "Span",
    "Trace",
    "TraceRank",
    "Vote",
    "describe_message",
    "name_step",
    "name_track",
]

About: TypeAlias = Mapping[str, object]
"""Details of a span, by name: values that JSON can express."""

TOLERANCE_S = 2e-9
"""Seconds by which spans may seem to overlap: files have whole nanoseconds."""

ROUNDING = 1e-9
"""Share of a time by which spans may seem to overlap, since times are sums with rounding errors."""

NOTHING: About = {}


class TraceRank(NamedTuple):
    """The rank of a track (a line of a timeline), and whether its times are measured or modeled."""

    rank: int
    is_model: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}{', model' * self.is_model}"


class Span(NamedTuple):
    """An interval of work on a track of one rank; the spans that send and receive a message have equal `link`."""

    place: TraceRank
    track: str
    name: str
    begin_s: float
    seconds: float
    about: About = NOTHING
    link: str = ""

    @property
    def end_s(self) -> float:
        """The time, in seconds, at which the span ends."""
        return self.begin_s + self.seconds


class Vote(NamedTuple):
    """A vote in which all ranks agree to start a move. `name` identifies it; `at_s` is the time, in seconds, when the
    traced rank had the votes of all others."""

    name: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a traced rank: when its trace began, in ns since 1970, and `votes`, events that align the clocks of
    several ranks.

    Ranks of one `machine` share a clock.
    """

    rank: int
    machine: str
    began_ns: int
    votes: tuple[Vote, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """A timeline: spans (intervals of work), all timed in seconds from the same moment. `clock` is the clock of the
    traced rank, or None if the timeline is modeled or has several ranks.

    `left_out` counts calls for which there was no room. Raises ShardError for overlapping spans of one track.
    """

    spans: tuple[Span, ...]
    clock: Clock | None = None
    left_out: int = 0

    def __post_init__(self) -> None:
        for before, after in _pair_successive(self.spans):
            room = max(TOLERANCE_S, ROUNDING * abs(before.end_s))
            if after.begin_s < before.end_s - room:
                what = (
                    f"{after.name!r} begins at {after.begin_s:.9g} s, before {before.name!r} ends"
                )
                where = f"track {after.track!r} of {after.place}"
                what = f"{what} at {before.end_s:.9g} s, both on {where}"
                raise ShardError(f"{what}; give each its own track")

    def __str__(self) -> str:
        places = {span.place for span in self.spans}
        ends = max((span.end_s for span in self.spans), default=0.0)
        spans = plural(self.spans, "span")
        return f"{spans} of {plural(places, 'place')} in {ends:.6f} s"


def _pair_successive(spans: tuple[Span, ...]) -> Iterator[tuple[Span, Span]]:
    """Each span with the next span on its track."""
    tracks: dict[tuple[TraceRank, str], list[Span]] = {}
    for span in spans:
        tracks.setdefault((span.place, span.track), []).append(span)
    for track in tracks.values():
        in_time = sorted(track, key=lambda span: (span.begin_s, span.end_s))
        yield from itertools.pairwise(in_time)


def name_track(message: Message, rank: int) -> str:
    """The name of the track (line of a timeline) that shows `message` on `rank`, which sends or receives it."""
    if rank == message.src_rank:
        return f"to {message.dst_rank}"
    return f"from {message.src_rank}"


def name_step(step: Step) -> str:
    """Return text such as "phase 0, slot 1, turn 2" for `step`, which numbers a group of messages sent at the same
    time. A phase is for one partial value of a sum, a slot for one slice of the data, a turn for some of a rank's
    peers."""
    phase, slot, turn = step
    return f"phase {phase}, slot {slot}, turn {turn}"


def describe_message(message: Message) -> dict[str, object]:
    """Return a dict of details of `message`, to show with its span: "bytes", "pieces" (the number of slices sent),
    "round" (text that numbers the group of messages sent at the same time), and "leg" (1 if a rank sends what it holds
    at the source, 2 or 3 if it relays what it received, 4 if it hands bytes to a rank of its node to send, 5 if it
    sends what it was handed)."""
    return {
        "bytes": message.payload,
        "pieces": len(message.pieces),
        "leg": message.leg,
        "round": name_step(message.step),
    }
