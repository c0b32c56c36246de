"""Rendezvous: processes find each other by notes in a store, each by its rank, and become one group of one run.

1. Rank 0 leads: it opens a meeting under a name that no other has, and announces it, once. Others add themselves to
   the meeting's log, and look at the announcement until it changes.
2. What becomes of a meeting is one compare-and-set of its log. Its leader ends it as full if every rank is there, and
   says with whom; others leave it by a line in the same log, so nobody is counted who has left.
3. A leader that finds another's announcement cannot know whether that process lives: it ends that meeting, and
   announces its own. If the other lives, it sees that, and both raise.
4. A rank that two processes give may have been taken by one that died. So the leader opens another meeting, to which
   those who live come: if both do, all raise.
5. A run is named by rank 0, by what it was given or by a text that it draws. A process that was given another run adds
   itself to nothing.
6. The leader removes what it has written, but for the log of a full meeting: that goes once all have left the group
   (`leave`). Whoever adds to a log that was removed sees that it has no beginning, and removes it.

>>> import torch.distributed as dist
>>> from shardmath_torch.groups.joint.steps import carry_out
>>> carry_out(meet(Seat(0, 1, "gloo", "a", "job 7")), dist.HashStore(), until=0.0)
Met(meeting='a.1', run='job 7')
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from typing import NamedTuple

from shardmath.base.errors import ExchangeError
from shardmath.base.text import plural, show_ranks, shown
from shardmath_torch.groups.joint.steps import (
    LATE,
    Add,
    Drop,
    Linger,
    Pause,
    Purge,
    Quit,
    Read,
    Steps,
    Swap,
)

__all__ = ["LEFT", "Met", "Seat", "call_off", "leave", "meet"]

LEAD = "lead"
"""The announcement: the meeting that is open, and its run."""

OFF = "called off"
"""Why nobody is to wait any more."""

LEFT = "left"
"""Below a full meeting: the ranks that have left its group."""

OPEN, FULL, OVER, WRONG = "open", "full", "over", "wrong"
"""How a log begins. With whom a meeting is full follows, or why it is over or wrong."""

LEAVES = "-"
OBJECTS = "!"
"""How lines of a log begin that are not seats."""


class Seat(NamedTuple):
    """What a process says of itself; `token` is what no other process says, and `run` "" if it was given none."""

    rank: int
    size: int
    backend: str
    token: str
    run: str = ""

    def word(self) -> str:
        """What all ranks have to give alike."""
        return f"rank {self.rank} gives size={self.size} and backend={self.backend!r}"


class Met(NamedTuple):
    """A meeting, and its run."""

    meeting: str
    run: str


class _Log(NamedTuple):
    """A meeting's log: how it begins, what follows that, and its lines."""

    state: str
    said: str
    lines: tuple[str, ...]

    def list_seats(self) -> list[Seat]:
        """The seats of all who came, those who left too."""
        return [Seat(*json.loads(line)) for line in self.lines if line.startswith("[")]

    def list_gone(self) -> set[str]:
        """The tokens of those who left."""
        return {line.removeprefix(LEAVES) for line in self.lines if line.startswith(LEAVES)}

    def find_objection(self) -> str:
        """What another leader has against the meeting; "" for nothing."""
        for line in self.lines:
            if line.startswith(OBJECTS):
                return str(json.loads(line.removeprefix(OBJECTS)))
        return ""

    def has(self, seat: Seat) -> bool:
        """Whether the meeting is full, and this process one of it."""
        return self.state == FULL and seat.token in self.said.split()


def _parse(text: str | None) -> _Log:
    """The log; its state is "" if there is none, and if it has no beginning, since it was removed."""
    head, *lines = (text or "").split("\n")
    state, _, said = head.partition(" ")
    return _Log(state, said, tuple(lines))


def meet(seat: Seat) -> Steps[Met]:
    """Find the other ranks: the full meeting of which this process is one.

    Raises ExchangeError: with the ranks that did not come; for two processes of one rank; for ranks that give
    other sizes, backends or runs; and if the meeting is called off.
    """
    return _lead(seat) if seat.rank == 0 else _follow(seat)


def call_off(why: str) -> Steps[None]:
    """Have nobody wait: those who do, or come later, raise ExchangeError with this text."""
    off = json.dumps(why)
    there: str | None = None
    while (found := (yield Swap(OFF, there, off))) != off:
        there = found
    # Rank 0's process may end next, and the store with it: the others have looked by then.
    yield Linger()


def leave(met: Met, rank: int, size: int) -> Steps[None]:
    """Leave the group: the last rank removes what the store has of it."""
    left = f"{met.meeting}/{LEFT}"
    yield Add(left, str(rank))
    there = yield Read(left)
    # None if all had left before this one looked.
    if len(set((there or "").split())) == size:
        yield Purge(met.meeting)


# Rank 0.


def _lead(seat: Seat) -> Steps[Met]:
    doubtful: set[str] = set()
    for number in itertools.count(1):
        own = Met(f"{seat.token}.{number}", seat.run or seat.token)
        try:
            yield from _announce(own)
            if (yield from _gather(own, seat, doubtful)):
                return own
        except Quit:
            yield from _withdraw(own)
            yield from _undo(own, seat)
            raise
    raise AssertionError


def _undo(own: Met, seat: Seat) -> Steps[None]:
    """Leave the meeting if it is full; else remove it."""
    yield from _remove(own.meeting)
    if _parse((yield Read(own.meeting))).state == FULL:
        yield from leave(own, seat.rank, seat.size)


def _announce(own: Met) -> Steps[None]:
    """Open the meeting, and end the one that was announced before. Raises ExchangeError for a stranger's note."""
    text = json.dumps(own)
    there = yield Read(LEAD)
    former = _read_lead(there)
    yield Swap(own.meeting, None, OPEN)
    while (there := (yield Swap(LEAD, there, text))) != text:
        former = _read_lead(there)
    if former is not None:
        yield from _remove(former.meeting)


def _read_lead(text: str | None) -> Met | None:
    """The announcement that the note is; None for none. Raises ExchangeError for a note that another program wrote."""
    if text is None:
        return None
    try:
        meeting, run = json.loads(text)
    except (TypeError, ValueError):
        raise ExchangeError(_word_strange(LEAD, text)) from None
    return Met(str(meeting), str(run))


def _gather(own: Met, seat: Seat, doubtful: set[str]) -> Steps[bool]:
    """Whether the meeting is full; False if another one has to be opened. Raises ExchangeError."""
    while text := (yield from _look(own)):
        log = _parse(text)
        wrong = log.find_objection() or _find_fault(log, seat, doubtful)
        if wrong:
            yield from _give_up(own, WRONG, wrong)
        there = _list_there(log, seat)
        twice = _find_twice(there)
        if twice:
            doubtful |= twice
            break
        if len(there) == seat.size:
            full = " ".join([FULL, *(one.token for one in sorted(there))])
            if (yield Swap(own.meeting, text, full)) == full:
                yield from _withdraw(own)
                return True
        elif (yield Pause()) == LATE:
            yield from _give_up(own, OVER, _word_absent(log, seat))
    yield from _remove(own.meeting)
    return False


def _look(own: Met) -> Steps[str]:
    """The meeting's log; "" if it is not open any more. Raises ExchangeError for another leader."""
    off = yield Read(OFF)
    if off is not None:
        yield from _give_up(own, WRONG, _read_off(off))
    there = yield Read(LEAD)
    other = _read_lead(there)
    if other not in (None, own):
        yield from _object(own, other)
    text = (yield Read(own.meeting)) or ""
    return "" if there is None or _parse(text).state != OPEN else text


def _list_there(log: _Log, seat: Seat) -> list[Seat]:
    """The seats of all who have come and not left, the leader's too."""
    gone = log.list_gone()
    return [seat, *(one for one in log.list_seats() if one.token not in gone)]


def _find_fault(log: _Log, seat: Seat, doubtful: set[str]) -> str:
    """Why those who are there can make no group; "" if they can."""
    known: dict[int, str] = {}
    for other in _list_there(log, seat):
        if other[1:3] != seat[1:3]:
            return f"{seat.word()}, and {other.word()}; give the same on all ranks"
        former = known.setdefault(other.rank, other.token)
        if former != other.token and {former, other.token} <= doubtful:
            return _word_twice(other.rank)
    return ""


def _find_twice(seats: Iterable[Seat]) -> set[str]:
    """The tokens of those whose rank another has, too."""
    by_rank: dict[int, set[str]] = {}
    for seat in seats:
        by_rank.setdefault(seat.rank, set()).add(seat.token)
    return {token for tokens in by_rank.values() if len(tokens) > 1 for token in tokens}


def _object(own: Met, other: Met) -> Steps[None]:
    """Tell the leader that has announced another meeting since, and raise ExchangeError."""
    runs = "" if own.run == other.run else f", in runs {own.run!r} and {other.run!r}"
    why = f"{_word_twice(0)}{runs}"
    yield from _say(other.meeting, f"{OBJECTS}{json.dumps(why)}")
    yield from _give_up(own, WRONG, why)


def _give_up(own: Met, state: str, why: str) -> Steps[None]:
    """End the meeting, so that others can read why, and raise ExchangeError."""
    yield from _end(own.meeting, f"{state} {json.dumps(why)}")
    yield from _withdraw(own)
    yield Linger()
    yield Drop(own.meeting)
    raise ExchangeError(why)


def _withdraw(own: Met) -> Steps[None]:
    """Remove the announcement."""
    # Another one that comes between is lost: its leader sees that, and opens another meeting.
    if (yield Read(LEAD)) == json.dumps(own):
        yield Drop(LEAD)


def _end(meeting: str, head: str) -> Steps[_Log]:
    """End the meeting so, unless it was ended before; its log then."""
    text = yield Read(meeting)
    while (log := _parse(text)).state == OPEN:
        text = yield Swap(meeting, text, head)
    return log


def _remove(meeting: str) -> Steps[None]:
    """End the meeting and remove its log, unless it is full."""
    log = yield from _end(meeting, f'{OVER} ""')
    if log.state != FULL:
        yield Drop(meeting)


# The other ranks.


def _follow(seat: Seat) -> Steps[Met]:
    ended = why = ""
    while True:
        off = yield Read(OFF)
        if off is not None:
            raise ExchangeError(_read_off(off))
        lead = _read_lead((yield Read(LEAD))) or Met(ended, seat.run)
        if seat.run not in ("", lead.run):
            why = f"rank 0 is of run {lead.run!r}, and rank {seat.rank} of run {seat.run!r}; {RUN_FIX}"
        elif lead.meeting != ended:
            found, why = yield from _come(lead, seat)
            if found:
                return lead
            ended = lead.meeting
            continue
        if (yield Pause()) == LATE:
            raise ExchangeError(why or _word_ranks([range(1)], seat.size))


def _come(lead: Met, seat: Seat) -> Steps[tuple[bool, str]]:
    """As `_sit`; whoever quits leaves the meeting, or the group if it is full."""
    try:
        return (yield from _sit(lead, seat))
    except Quit:
        log = yield from _say(lead.meeting, f"{LEAVES}{seat.token}")
        if log.has(seat):
            yield from leave(lead, seat.rank, seat.size)
        raise


def _sit(lead: Met, seat: Seat) -> Steps[tuple[bool, str]]:
    """Whether the meeting is full, and with this process; if not, what has become of it. Raises ExchangeError."""
    log = yield from _say(lead.meeting, json.dumps(seat))
    is_last, off = False, ""
    if log.state == OPEN:
        is_last, off = yield from _wait(lead)
        log = _parse((yield Read(lead.meeting)))
    if log.state == OPEN:
        log = yield from _say(lead.meeting, f"{LEAVES}{seat.token}")
    if log.has(seat):
        return True, ""
    why = off or _word_end(log, seat)
    if is_last or log.state == WRONG:
        raise ExchangeError(why or _word_ranks([range(1)], seat.size))
    return False, why


def _wait(lead: Met) -> Steps[tuple[bool, str]]:
    """Wait while the meeting is announced. Whether this process has to give up, and why if it was called off."""
    text = json.dumps(lead)
    while True:
        late = yield Pause()
        off = yield Read(OFF)
        if late or off:
            return True, _read_off(off) if off else ""
        if (yield Read(LEAD)) != text:
            return False, ""


def _say(meeting: str, line: str) -> Steps[_Log]:
    """Add a line to the log, and read it; one that was removed is removed again."""
    yield Add(meeting, line)
    log = _parse((yield Read(meeting)))
    if not log.state:
        yield Drop(meeting)
    return log


def _read_off(text: str) -> str:
    """Why nobody is to wait, or that another program wrote the note."""
    try:
        return str(json.loads(text))
    except ValueError:
        return _word_strange(OFF, text)


# What to say.

RUN_FIX = "end processes of an earlier run, or give all the same run="


def _word_end(log: _Log, seat: Seat) -> str:
    """Why a meeting came to nothing for this process; "" if that is not known."""
    if log.state == FULL:
        return f"the others have a group in which another process is rank {seat.rank}"
    if log.state == OPEN:
        return _word_absent(log, seat)
    return str(json.loads(log.said)) if log.said else ""


def _word_absent(log: _Log, seat: Seat) -> str:
    # Others may have given up just before this one: they had come.
    there = {0, *(one.rank for one in log.list_seats())}
    absent = _find_gaps(there, seat.size)
    if not absent and seat.rank:
        # All have come, and it does not see that.
        absent = [range(1)]
    return _word_ranks(absent, seat.size)


def _find_gaps(there: Iterable[int], size: int) -> list[range]:
    """Each span of ranks that are not there. Takes no longer for a larger size."""
    gaps = []
    first = 0
    for rank in [*sorted(there), size]:
        if first < rank:
            gaps.append(range(first, rank))
        first = rank + 1
    return gaps


def _word_ranks(absent: list[range], size: int) -> str:
    among = plural(size, "rank")
    if not absent:
        return f"the group of {among} was given up as the last came; connect again"
    fix = "see that they run, and connect to the same address with the same size and name"
    return f"{show_ranks(absent)} of {among} did not come in time; {fix}"


def _word_strange(key: str, text: str) -> str:
    what = f"the store has {shown(text)} under 'shardmath/joint/<name>/{key}'"
    fix = "remove that key, or connect by another name="
    return f"{what}, which smt.connect did not write; {fix}"


def _word_twice(rank: int) -> str:
    return f"two processes give rank {rank}; give each process its own rank"
