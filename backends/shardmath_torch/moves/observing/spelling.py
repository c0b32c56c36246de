"""Spelling: a timed call as spans of a trace.

| track | spans |
|---|---|
| moves | each call |
| phases | the call's phases; the engine's laps together are "moving" |
| rounds | the program's rounds, as this rank ran them |
| work | the engine's laps, one after another |
| to 3, from 3 | messages, from their posting, or the end of the one before, until this rank saw their end |

1. Calls of other threads than the main one have separate tracks, which name the thread.
2. A message has the same link at both ends: the vote, the step, its ranks, and its number between them in that step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardmath.display.traces.spans import (
    Span,
    TraceRank,
    Vote,
    describe_message,
    name_step,
    name_track,
)
from shardmath.plans.programs.messages import Message
from shardmath_torch.moves.observing.laps import AGREED, ARRIVED, FOLDED, LEFT, NAMES, POSTED, WORK

__all__ = ["Mark", "Timed", "find_votes", "spell"]

MOVING = "moving"


class Mark(NamedTuple):
    """The end of a phase of a call: the phase's number `lap`, its subject `about` (a message, round or vote), and the
    time `at_s`.

    A round is a group of messages that are sent together; in a vote, ranks agree on a move.
    """

    lap: int
    about: object
    at_s: float


@dataclass
class Timed:
    """The record of one traced call on this rank: its start, and the end of each of its phases, by `time.perf_counter`.

    `thread` is added to its tracks' names, "" for calls of the main thread.
    """

    rank: int
    thread: str
    began_s: float
    name: str = ""
    about: dict[str, object] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)

    @property
    def ended_s(self) -> float:
        """The time at which the call ended, in seconds of `time.perf_counter`."""
        return self.marks[-1].at_s if self.marks else self.began_s

    @property
    def agreed(self) -> Vote | None:
        """Return a Vote: the call's name, and the time when the ranks' vote ended, or, without a vote, when this rank
        went on to move. Return None if the rank did not get that far."""
        return next(find_votes([self], unasked=True), None)


class _Lap(NamedTuple):
    """A mark, and the time when its lap began."""

    mark: Mark
    began_s: float

    @property
    def name(self) -> str:
        return NAMES[self.mark.lap]


def find_votes(calls: Iterable[Timed], unasked: bool = False) -> Iterator[Vote]:
    """Yield a Vote (name and time) for each call in `calls` before which the ranks voted, with the time when the vote
    ended. With `unasked=True`, also yield one for each call that needed no vote, with the time when it continued.
    """
    for call in calls:
        for lap, about, at_s in call.marks:
            if lap == AGREED and isinstance(about, tuple):
                nonce, number, was_asked = about
                if not (was_asked or unasked):
                    continue
                yield Vote(f"{nonce}:{number}", at_s)


def spell(call: Timed) -> list[Span]:
    """Return a traced call, and its phases, rounds and messages, as spans (intervals of time) of a trace."""
    laps = _list_laps(call)
    spans = [
        Span(
            _place(call), "moves", call.name, call.began_s, call.ended_s - call.began_s, call.about
        )
    ]
    spans += _spell_phases(call, laps)
    spans += _spell_rounds(call, laps)
    spans += _spell_work(call, laps)
    spans += sorted(_spell_messages(call, laps), key=_find_peer)
    if not call.thread:
        return spans
    return [span._replace(track=f"{span.track} {call.thread}") for span in spans]


def _place(call: Timed) -> TraceRank:
    return TraceRank(call.rank)


def _find_peer(span: Span) -> tuple[int, str]:
    """A sort key that puts messages to and from one peer next to each other."""
    way, peer = span.track.split()
    return int(peer), way


def _list_laps(call: Timed) -> list[_Lap]:
    laps = []
    began = call.began_s
    for mark in call.marks:
        laps.append(_Lap(mark, began))
        began = mark.at_s
    return laps


def _spell_phases(call: Timed, laps: Iterable[_Lap]) -> Iterator[Span]:
    """The call's phases; consecutive laps of one phase make one span."""
    phases: list[list[_Lap]] = []
    names: list[str] = []
    for lap in laps:
        name = MOVING if lap.name in WORK else lap.name
        if names[-1:] == [name]:
            phases[-1].append(lap)
        else:
            names.append(name)
            phases.append([lap])
    for name, phase in zip(names, phases, strict=True):
        began = phase[0].began_s
        yield Span(_place(call), "phases", name, began, phase[-1].mark.at_s - began)


def _spell_rounds(call: Timed, laps: Iterable[_Lap]) -> Iterator[Span]:
    """The rounds, each of which ends with a folding lap that has its step."""
    began: float | None = None
    for lap in laps:
        if lap.name not in WORK:
            began = None
            continue
        began = lap.began_s if began is None else began
        step = lap.mark.about
        if lap.mark.lap == FOLDED and isinstance(step, tuple):
            name = name_step(step)
            yield Span(_place(call), "rounds", name, began, lap.mark.at_s - began)
            began = None


def _spell_work(call: Timed, laps: Iterable[_Lap]) -> Iterator[Span]:
    """The engine's laps."""
    for lap in laps:
        if lap.name not in WORK:
            continue
        about: dict[str, object] = {}
        message = lap.mark.about
        if isinstance(message, Message):
            about = {"for": name_track(message, call.rank), "bytes": message.payload}
        yield Span(_place(call), "work", lap.name, lap.began_s, lap.mark.at_s - lap.began_s, about)


def _spell_messages(call: Timed, laps: Iterable[_Lap]) -> Iterator[Span]:
    """The messages, each from its posting until its arrival or departure was seen."""
    # When each message was posted, by its `id`; when the latest one of each track ended; and messages of each pair.
    posted: dict[int, float] = {}
    ended: dict[str, float] = {}
    count: Counter[str] = Counter()
    vote = call.agreed
    for lap in laps:
        message = lap.mark.about
        if not isinstance(message, Message):
            continue
        if lap.mark.lap == POSTED:
            # By identity: a message is one object, in one round, as long as the mark refers to it.
            posted[id(message)] = lap.began_s
        elif lap.mark.lap in (ARRIVED, LEFT) and id(message) in posted:
            track = name_track(message, call.rank)
            # Messages of one pair move one after another, whenever they were posted.
            began = max(posted.pop(id(message)), ended.get(track, 0.0))
            ended[track] = lap.mark.at_s
            pair = f"{message.step} {message.src_rank}>{message.dst_rank}"
            count[pair] += 1
            link = f"{vote.name if vote else ''} {pair} {count[pair]}"
            yield _spell_message(call, message, began, lap.mark.at_s, link)


def _spell_message(call: Timed, message: Message, began: float, ended: float, link: str) -> Span:
    track = name_track(message, call.rank)
    name = f"{message.payload} B"
    about = describe_message(message)
    return Span(_place(call), track, name, began, ended - began, about, link)
