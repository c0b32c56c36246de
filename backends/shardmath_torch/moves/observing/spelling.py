"""Spelling: what was timed of a call, as spans.

| track | what is on it |
|---|---|
| moves | each call |
| phases | what it went through; all that the engine does is "moving" |
| rounds | the program's rounds, as this rank went through them |
| work | what this rank did in them, one thing after another |
| to 3, from 3 | messages, from when they were posted, or the one before was over, until this rank saw them over |

1. Calls of other threads than the main one have tracks of their own, which name the thread.
2. A message has one link at both ends: the vote, the step, its ranks, and the how many-eth it is between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardmath.display.traces.spans import (
    Place,
    Span,
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
    """A lap that ended: what it is of (a message, the step of a round, the key of a vote), and when."""

    lap: int
    about: object
    at_s: float


@dataclass
class Timed:
    """One call on this rank that is traced; times are those of `time.perf_counter`.

    `thread` is what its tracks are marked by, "" for calls of the main thread.
    """

    rank: int
    thread: str
    began_s: float
    name: str = ""
    about: dict[str, object] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)

    @property
    def ended_s(self) -> float:
        """When it was over."""
        return self.marks[-1].at_s if self.marks else self.began_s

    @property
    def agreed(self) -> Vote | None:
        """Its first vote, after which bytes move; None where there was none."""
        return next(find_votes([self], unasked=True), None)


class _Lap(NamedTuple):
    """A mark, and when its lap began."""

    mark: Mark
    began_s: float

    @property
    def name(self) -> str:
        return NAMES[self.mark.lap]


def find_votes(calls: Iterable[Timed], unasked: bool = False) -> Iterator[Vote]:
    """The votes of the calls; `unasked`: those, too, that were left out, at which ranks did not meet."""
    for call in calls:
        for lap, about, at_s in call.marks:
            if lap == AGREED and isinstance(about, tuple):
                nonce, number, was_asked = about
                if not (was_asked or unasked):
                    continue
                yield Vote(f"{nonce}:{number}", at_s)


def spell(call: Timed) -> list[Span]:
    """The spans of a call."""
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


def _place(call: Timed) -> Place:
    return Place(call.rank)


def _find_peer(span: Span) -> tuple[int, str]:
    """Messages of one peer stand beside each other."""
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
    """What the call went through; laps of one phase are one."""
    phases: list[list[_Lap]] = []
    names: list[str] = []
    for lap in laps:
        name = MOVING if lap.name in WORK else lap.name
        if names[-1:] == [name]:
            phases[-1].append(lap)
        else:
            names.append(name)
            phases.append([lap])
    for name, same in zip(names, phases, strict=True):
        began = same[0].began_s
        yield Span(_place(call), "phases", name, began, same[-1].mark.at_s - began)


def _spell_rounds(call: Timed, laps: Iterable[_Lap]) -> Iterator[Span]:
    """Rounds end with a lap that has their step."""
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
    """What the engine did."""
    for lap in laps:
        if lap.name not in WORK:
            continue
        about: dict[str, object] = {}
        message = lap.mark.about
        if isinstance(message, Message):
            about = {"for": name_track(message, call.rank), "bytes": message.payload}
        yield Span(_place(call), "work", lap.name, lap.began_s, lap.mark.at_s - lap.began_s, about)


def _spell_messages(call: Timed, laps: Iterable[_Lap]) -> Iterator[Span]:
    """From when each message was posted until it was seen to have come or left."""
    posted: dict[int, float] = {}
    over: dict[str, float] = {}
    count: Counter[str] = Counter()
    vote = call.agreed
    for lap in laps:
        message = lap.mark.about
        if not isinstance(message, Message):
            continue
        if lap.mark.lap == POSTED:
            # A message is one object as long as its rounds are there, and in one of them.
            posted[id(message)] = lap.began_s
        elif lap.mark.lap in (ARRIVED, LEFT) and id(message) in posted:
            track = name_track(message, call.rank)
            # Those of one pair go one after another, whenever they were posted.
            began = max(posted.pop(id(message)), over.get(track, 0.0))
            over[track] = lap.mark.at_s
            link = f"{message.step} {message.src_rank}>{message.dst_rank}"
            count[link] += 1
            known = f"{vote.name if vote else ''} {link} {count[link]}"
            yield _spell_message(call, message, began, lap.mark.at_s, known)


def _spell_message(call: Timed, message: Message, began: float, ended: float, link: str) -> Span:
    track = name_track(message, call.rank)
    name = f"{message.payload} B"
    about = describe_message(message)
    return Span(_place(call), track, name, began, ended - began, about, link)
