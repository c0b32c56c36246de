"""Rendezvous: processes find each other by notes in a store, each by its rank, and become one group of one run.

1. Rank 0 leads: it opens a meeting under a unique name, and announces it once. The others add themselves to the
   meeting's log, and read the announcement until it changes.
2. One compare-and-set of its log ends a meeting. If every rank has come, the leader ends it as full, and lists the
   processes. Others leave a meeting by a line in the same log, so no process is listed that has left.
3. A leader that finds another's announcement cannot know whether that process is alive: it ends that meeting, and
   announces its own. If the other process is alive, it sees that, and both raise.
4. If two processes give one rank, one of them may have died. So the leader opens another meeting, to which the live
   processes come: if both do, all raise.
5. Rank 0 names the run, by its argument or at random. A process that was given another run adds itself to no meeting.
6. The leader removes its notes, except the log of a full meeting, which goes once all ranks have left the group
   (`leave`). A process that adds to a removed log sees that the log has no first line, and removes it.

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
"""Key of the announcement: the open meeting, and its run."""

OFF = "called off"
"""Key of the reason why connecting was called off."""

LEFT = "left"
"""Key, below a full meeting, of the ranks that have left its group."""

OPEN, FULL, OVER, WRONG = "open", "full", "over", "wrong"
"""The first word of a log: the meeting's state. The tokens of a full meeting follow, or why it is over or wrong."""

LEAVES = "-"
OBJECTS = "!"
"""First characters of log lines that are not seats: a process leaves, or another leader objects."""


class Seat(NamedTuple):
    """A process's entry in a rendezvous: its rank, the group's size and backend, a `token` unique to the process, and
    `run`. The text `run` is equal for processes that were started together, so that processes left from an earlier
    start are told apart.

    `run` is "" if not given.
    """

    rank: int
    size: int
    backend: str
    token: str
    run: str = ""

    def word(self) -> str:
        """Return the process's `size` and `backend`, which must be equal on all ranks, as a text for errors."""
        return f"rank {self.rank} gives size={self.size} and backend={self.backend!r}"


class Met(NamedTuple):
    """The result of a rendezvous in which all ranks found each other: the rendezvous's name, and the name of its run
    (one start of the jobs)."""

    meeting: str
    run: str


class _Log(NamedTuple):
    """A meeting's log: its state, the rest of the first line, and the further lines."""

    state: str
    detail: str
    lines: tuple[str, ...]

    def list_seats(self) -> list[Seat]:
        """Return the entries (seats) of all processes that came to this rendezvous, even if they have left."""
        return [Seat(*json.loads(line)) for line in self.lines if line.startswith("[")]

    def list_gone(self) -> set[str]:
        """Return the tokens (texts, each unique to one process) of the processes that have left."""
        return {line.removeprefix(LEAVES) for line in self.lines if line.startswith(LEAVES)}

    def find_objection(self) -> str:
        """Return the error text that a process wrote into this log because two processes have rank 0; "" if there is
        none. The log is a text in the store, to which processes append lines while they form a group."""
        for line in self.lines:
            if line.startswith(OBJECTS):
                return str(json.loads(line.removeprefix(OBJECTS)))
        return ""

    def has(self, seat: Seat) -> bool:
        """Whether all ranks have come to this rendezvous, and the process with this `seat` (entry) is one of them."""
        return self.state == FULL and seat.token in self.detail.split()


def _parse(text: str | None) -> _Log:
    """Read a log; its state is "" if there is none, or only lines added after it was removed."""
    head, *lines = (text or "").split("\n")
    state, _, detail = head.partition(" ")
    return _Log(state, detail, tuple(lines))


def meet(seat: Seat) -> Steps[Met]:
    """Yield the steps (requests to the store) to find the processes of all other ranks; the generator returns the
    rendezvous's name and run (`Met`).

    Raises ExchangeError naming the ranks that did not come, for two processes of one rank, for ranks that give
    different sizes, backends or runs, and if the meeting is called off.
    """
    return _lead(seat) if seat.rank == 0 else _follow(seat)


def call_off(why: str) -> Steps[None]:
    """Yield the steps (requests to the store) that make processes that wait for other ranks, or come later, raise
    ExchangeError with the text `why`."""
    reason = json.dumps(why)
    expected: str | None = None
    # Overwrites any earlier reason, since a swap answers with the note that was there instead.
    while (present := (yield Swap(OFF, expected, reason))) != reason:
        expected = present
    # Rank 0's process may end next, and the store with it: give the others time to read.
    yield Linger()


def leave(met: Met, rank: int, size: int) -> Steps[None]:
    """Yield the steps (requests to the store) to leave the group; the last rank to leave removes the group's entries in
    the store."""
    key = f"{met.meeting}/{LEFT}"
    yield Add(key, str(rank))
    leavers = yield Read(key)
    # None if all others left, and the notes were removed, before this read.
    if len(set((leavers or "").split())) == size:
        yield Purge(met.meeting)


# Rank 0.


def _lead(seat: Seat) -> Steps[Met]:
    """Open one meeting after another until one is full, and return its name and run."""
    # Tokens of processes that share a rank, one of which may be dead.
    doubtful: set[str] = set()
    for number in itertools.count(1):
        met = Met(f"{seat.token}.{number}", seat.run or seat.token)
        try:
            yield from _announce(met)
            if (yield from _gather(met, seat, doubtful)):
                return met
        except Quit:
            yield from _withdraw(met)
            yield from _undo(met, seat)
            raise
    raise AssertionError


def _undo(met: Met, seat: Seat) -> Steps[None]:
    """Leave the group if its meeting is full; else remove the meeting."""
    yield from _remove(met.meeting)
    # The log of a full meeting is still there: its members are a group.
    if _parse((yield Read(met.meeting))).state == FULL:
        yield from leave(met, seat.rank, seat.size)


def _announce(met: Met) -> Steps[None]:
    """Open the meeting, and end the one announced before. Raises ExchangeError for another program's note."""
    text = json.dumps(met)
    announced = yield Read(LEAD)
    previous = _read_lead(announced)
    yield Swap(met.meeting, None, OPEN)
    # The swap fails as long as others announce meetings between the read and the swap.
    while (announced := (yield Swap(LEAD, announced, text))) != text:
        previous = _read_lead(announced)
    if previous is not None:
        yield from _remove(previous.meeting)


def _read_lead(text: str | None) -> Met | None:
    """Parse an announcement; None for no note. Raises ExchangeError for another program's note."""
    if text is None:
        return None
    try:
        meeting, run = json.loads(text)
    except (TypeError, ValueError):
        raise ExchangeError(_word_foreign(LEAD, text)) from None
    return Met(str(meeting), str(run))


def _gather(met: Met, seat: Seat, doubtful: set[str]) -> Steps[bool]:
    """Wait until the meeting is full; return False if another meeting is needed. Raises ExchangeError.

    Adds to `doubtful` the tokens of processes that share a rank.
    """
    while text := (yield from _read_open_log(met)):
        log = _parse(text)
        fault = log.find_objection() or _find_fault(log, seat, doubtful)
        if fault:
            yield from _give_up(met, WRONG, fault)
        present = _list_present(log, seat)
        rivals = _find_rivals(present)
        if rivals:
            doubtful |= rivals
            break
        if len(present) == seat.size:
            full = " ".join([FULL, *(other.token for other in sorted(present))])
            # A process that left since the log was read has changed it, so that the swap fails.
            if (yield Swap(met.meeting, text, full)) == full:
                yield from _withdraw(met)
                return True
        elif (yield Pause()) == LATE:
            yield from _give_up(met, OVER, _word_absent(log, seat))
    yield from _remove(met.meeting)
    return False


def _read_open_log(met: Met) -> Steps[str]:
    """The meeting's log; "" if it is not open any more. Raises ExchangeError if the meeting was called off, or if there
    is another leader."""
    off = yield Read(OFF)
    if off is not None:
        yield from _give_up(met, WRONG, _read_off(off))
    announced = _read_lead((yield Read(LEAD)))
    if announced not in (None, met):
        yield from _object(met, announced)
    text = (yield Read(met.meeting)) or ""
    return "" if announced is None or _parse(text).state != OPEN else text


def _list_present(log: _Log, seat: Seat) -> list[Seat]:
    """The seats of the leader, and of all processes that came and did not leave."""
    gone = log.list_gone()
    return [seat, *(other for other in log.list_seats() if other.token not in gone)]


def _find_fault(log: _Log, seat: Seat, doubtful: set[str]) -> str:
    """Why the processes present cannot make a group; "" if they can."""
    tokens: dict[int, str] = {}
    for other in _list_present(log, seat):
        # Size and backend.
        if other[1:3] != seat[1:3]:
            return f"{seat.word()}, and {other.word()}; give the same on all ranks"
        first = tokens.setdefault(other.rank, other.token)
        # Both came to a second meeting, so both are alive.
        if first != other.token and {first, other.token} <= doubtful:
            return _word_twice(other.rank)
    return ""


def _find_rivals(seats: Iterable[Seat]) -> set[str]:
    """The tokens of processes whose rank another process has, too."""
    by_rank: dict[int, set[str]] = {}
    for seat in seats:
        by_rank.setdefault(seat.rank, set()).add(seat.token)
    return {token for tokens in by_rank.values() if len(tokens) > 1 for token in tokens}


def _object(met: Met, other: Met) -> Steps[None]:
    """Object to the meeting that another leader has announced since, and raise ExchangeError."""
    runs = "" if met.run == other.run else f", in runs {met.run!r} and {other.run!r}"
    why = _word_twice(0, runs)
    yield from _add_to_log(other.meeting, f"{OBJECTS}{json.dumps(why)}")
    yield from _give_up(met, WRONG, why)


def _give_up(met: Met, state: str, why: str) -> Steps[None]:
    """End the meeting, so that others can read why, and raise ExchangeError."""
    yield from _end(met.meeting, f"{state} {json.dumps(why)}")
    yield from _withdraw(met)
    yield Linger()
    yield Drop(met.meeting)
    raise ExchangeError(why)


def _withdraw(met: Met) -> Steps[None]:
    """Remove the announcement."""
    # An announcement between the two steps is lost: its leader sees that, and opens another meeting.
    if (yield Read(LEAD)) == json.dumps(met):
        yield Drop(LEAD)


def _end(meeting: str, head: str) -> Steps[_Log]:
    """Replace the log of a meeting that is open by the line `head`, and return the log that is then there."""
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
    """Attend each meeting that rank 0 announces until one is full with this process, and return its name and run."""
    ended_meeting = why = ""
    while True:
        off = yield Read(OFF)
        if off is not None:
            raise ExchangeError(_read_off(off))
        # If nothing is announced, the meeting that has ended stands in, and neither branch below is taken.
        lead = _read_lead((yield Read(LEAD))) or Met(ended_meeting, seat.run)
        if seat.run not in ("", lead.run):
            why = f"rank 0 is of run {lead.run!r}, and rank {seat.rank} of run {seat.run!r}; {RUN_FIX}"
        elif lead.meeting != ended_meeting:
            is_full, why = yield from _come(lead, seat)
            if is_full:
                return lead
            ended_meeting = lead.meeting
            continue
        if (yield Pause()) == LATE:
            raise ExchangeError(why or _word_ranks([range(1)], seat.size))


def _come(lead: Met, seat: Seat) -> Steps[tuple[bool, str]]:
    """Attend the meeting as `_attend` does; on Quit, leave it, or its group if it is full."""
    try:
        return (yield from _attend(lead, seat))
    except Quit:
        log = yield from _add_to_log(lead.meeting, f"{LEAVES}{seat.token}")
        if log.has(seat):
            yield from leave(lead, seat.rank, seat.size)
        raise


def _attend(lead: Met, seat: Seat) -> Steps[tuple[bool, str]]:
    """Attend the meeting to its end; return whether it is full with this process, and if not, why."""
    log = yield from _add_to_log(lead.meeting, json.dumps(seat))
    gives_up, why_off = False, ""
    if log.state == OPEN:
        gives_up, why_off = yield from _wait(lead)
        log = _parse((yield Read(lead.meeting)))
    if log.state == OPEN:
        log = yield from _add_to_log(lead.meeting, f"{LEAVES}{seat.token}")
    if log.has(seat):
        return True, ""
    why = why_off or _word_end(log, seat)
    if gives_up or log.state == WRONG:
        # Without a reason, rank 0 is the one that is missing.
        raise ExchangeError(why or _word_ranks([range(1)], seat.size))
    return False, why


def _wait(lead: Met) -> Steps[tuple[bool, str]]:
    """Wait while the meeting is announced; return whether to give up, and why if it was called off."""
    text = json.dumps(lead)
    while True:
        late = yield Pause()
        off = yield Read(OFF)
        if late or off:
            return True, _read_off(off) if off else ""
        if (yield Read(LEAD)) != text:
            return False, ""


def _add_to_log(meeting: str, line: str) -> Steps[_Log]:
    """Add a line to the log, and return the log; if it had been removed, remove it again."""
    yield Add(meeting, line)
    log = _parse((yield Read(meeting)))
    if not log.state:
        yield Drop(meeting)
    return log


def _read_off(text: str) -> str:
    """The reason why connecting was called off, or words for another program's note."""
    try:
        return str(json.loads(text))
    except ValueError:
        return _word_foreign(OFF, text)


# Errors.

RUN_FIX = "end processes of an earlier run, or give all the same run="


def _word_end(log: _Log, seat: Seat) -> str:
    """Why a meeting ended without this process; "" if that is not known."""
    if log.state == FULL:
        what = f"the others have a group in which another process is rank {seat.rank}"
        return f"{what}; give each process its own rank"
    if log.state == OPEN:
        return _word_absent(log, seat)
    return str(json.loads(log.detail)) if log.detail else ""


def _word_absent(log: _Log, seat: Seat) -> str:
    """Words for the ranks that have not come to the meeting."""
    # Processes that left count as present: they may have given up just before this one.
    present = {0, *(other.rank for other in log.list_seats())}
    absent = _find_gaps(present, seat.size)
    if not absent and seat.rank:
        # All have come, but rank 0 has not ended the meeting.
        absent = [range(1)]
    return _word_ranks(absent, seat.size)


def _find_gaps(present: Iterable[int], size: int) -> list[range]:
    """The ranges of absent ranks. The time depends on the ranks present, not on the size."""
    gaps = []
    first = 0
    for rank in [*sorted(present), size]:
        if first < rank:
            gaps.append(range(first, rank))
        first = rank + 1
    return gaps


def _word_ranks(absent: list[range], size: int) -> str:
    among = plural(size, "rank")
    if not absent:
        what = f"the time was over just as the last of {among} called smt.connect"
        return f"{what}; connect again on all ranks"
    fix = "start them with the same where, size and name, or pass a longer timeout="
    return f"{show_ranks(absent)} of {among} did not call smt.connect in time; {fix}"


def _word_foreign(key: str, text: str) -> str:
    what = f"the store has {shown(text)} under 'shardmath/joint/<name>/{key}'"
    fix = "remove that key, or connect by another name="
    return f"{what}, which smt.connect did not write; {fix}"


def _word_twice(rank: int, runs: str = "") -> str:
    return f"two processes give rank {rank}{runs}; give each process its own rank"
