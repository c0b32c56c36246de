"""Spans: what takes time on a rank, and traces made of it.

1. A span is on a **track** of a **place**: a rank as it was measured, or as the model has it. Spans of
   one track follow each other, so that every track reads from left to right.
2. A message is on the tracks of both its ends, "to 3" and "from 0", under one **link**.
3. Times are seconds from where the trace begins, which a `Clock` says.

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

__all__ = ["Clock", "Place", "Span", "Trace", "Vote", "describe_message", "name_step", "name_track"]

About: TypeAlias = Mapping[str, object]
"""What is told of a span: values that JSON has."""

TOLERANCE_S = 2e-9
"""By which spans may seem to overlap: files have whole nanoseconds."""

ROUNDING = 1e-9
"""By what share of a time, since times are sums of many."""

NOTHING: About = {}


class Place(NamedTuple):
    """A rank as it was measured, or as the model has it."""

    rank: int
    is_model: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}{', model' * self.is_model}"


class Span(NamedTuple):
    """Something on a track that begins at `begin_s` and lasts `seconds`; a message has its `link` at both ends."""

    place: Place
    track: str
    name: str
    begin_s: float
    seconds: float
    about: About = NOTHING
    link: str = ""

    @property
    def end_s(self) -> float:
        """When it is over."""
        return self.begin_s + self.seconds


class Vote(NamedTuple):
    """A vote by a name that all its ranks have for it, and when this one had heard all others."""

    name: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    """The clock of a measured rank: when its trace began, in nanoseconds since 1970, and its votes.

    Ranks of one `machine` have one clock.
    """

    rank: int
    machine: str
    began_ns: int
    votes: tuple[Vote, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Spans from one beginning on; `clock` is that of the rank that measured them, None for several and for a model.

    `left_out` counts calls that there was no room for. Raises ShardError for spans of one track that overlap.
    """

    spans: tuple[Span, ...]
    clock: Clock | None = None
    left_out: int = 0

    def __post_init__(self) -> None:
        for before, after in _list_neighbours(self.spans):
            room = max(TOLERANCE_S, ROUNDING * abs(before.end_s))
            if after.begin_s < before.end_s - room:
                what = f"{after.name!r} begins before {before.name!r} ends"
                where = f"track {after.track!r} of {after.place}"
                raise ShardError(f"{what}, both on {where}; give each a track of its own")

    def __str__(self) -> str:
        places = {span.place for span in self.spans}
        ends = max((span.end_s for span in self.spans), default=0.0)
        spans = plural(self.spans, "span")
        return f"{spans} of {plural(places, 'place')} in {ends:.6f} s"


def _list_neighbours(spans: tuple[Span, ...]) -> Iterator[tuple[Span, Span]]:
    """Spans of one track, each with the one after it."""
    tracks: dict[tuple[Place, str], list[Span]] = {}
    for span in spans:
        tracks.setdefault((span.place, span.track), []).append(span)
    for track in tracks.values():
        in_time = sorted(track, key=lambda span: (span.begin_s, span.end_s))
        yield from itertools.pairwise(in_time)


def name_track(message: Message, rank: int) -> str:
    """The track of a message on the rank, one of its two ends."""
    if rank == message.src_rank:
        return f"to {message.dst_rank}"
    return f"from {message.src_rank}"


def name_step(step: Step) -> str:
    """The round of a step."""
    phase, slot, turn = step
    return f"phase {phase}, slot {slot}, turn {turn}"


def describe_message(message: Message) -> dict[str, object]:
    """What is told of a message."""
    return {
        "bytes": message.payload,
        "pieces": len(message.pieces),
        "leg": message.leg,
        "round": name_step(message.step),
    }
