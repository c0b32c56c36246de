"""Walks: processes that meet in a store, in every order in which their steps can come.

1. A process is a generator of steps, which meets, and leaves the group if it has one. What it will do depends on where
   its generators stand and on their variables: by these, worlds are told apart.
2. Its time may be over at any pause, and it may die before any step, as many processes as the walk says.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardmath.base.errors import ExchangeError
from shardmath_torch.groups.joint import rendezvous
from shardmath_torch.groups.joint.rendezvous import Met, Seat
from shardmath_torch.groups.joint.steps import (
    LATE,
    Add,
    Drop,
    Linger,
    Pause,
    Purge,
    Read,
    Step,
    Steps,
    Swap,
)

Notes = dict[str, str]
DEAD = "dead"

End = Met | str
"""What a process has met in, or what it raised, or that it died."""


def _meet_and_leave(seat: Seat) -> Steps[Met]:
    met = yield from rendezvous.meet(seat)
    yield from rendezvous.leave(met, seat.rank, seat.size)
    return met


class World(NamedTuple):
    """The store, what each process was answered, who died, who was late, and with whom meetings became full."""

    notes: Notes
    answers: tuple[tuple[str | None, ...], ...]
    dead: frozenset[int] = frozenset()
    late: frozenset[int] = frozenset()
    full: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Stand(NamedTuple):
    """Where a process stands: its next step, or how it has ended; and what tells that from elsewhere."""

    step: Step | None
    end: Met | str | None
    mark: str


def _stand(seat: Seat, answers: Sequence[str | None]) -> Stand:
    steps: Any = _meet_and_leave(seat)
    try:
        step = next(steps)
        for answer in answers:
            step = steps.send(answer)
    except StopIteration as end:
        return Stand(None, end.value, repr(end.value))
    except ExchangeError as error:
        return Stand(None, str(error), str(error))
    marks = []
    # Held, since a generator that nobody holds ends, and those that it waits for.
    inner = steps
    while inner is not None:
        frame = inner.gi_frame
        marks.append(f"{frame.f_code.co_name} {frame.f_lasti} {frame.f_locals}")
        inner = inner.gi_yieldfrom
    return Stand(step, None, repr(marks))


def _act(notes: Notes, step: Step) -> tuple[Notes, str | None]:
    """The store after the step, and what the step gives."""
    after = dict(notes)
    match step:
        case Read(key):
            return notes, notes.get(key)
        case Swap(key, old, new):
            if notes.get(key) == old:
                after[key] = new
            return after, after.get(key)
        case Add(key, line):
            after[key] = f"{notes.get(key, '')}\n{line}"
        case Drop(key):
            after.pop(key, None)
        case Purge(key):
            after = {k: v for k, v in notes.items() if k != key and not k.startswith(f"{key}/")}
    return after, None


@dataclass
class Walk:
    """All worlds that processes of these seats come to, of which so many die; `ends` are those without a next step."""

    seats: Sequence[Seat]
    deaths: int = 0
    worlds: int = 0
    ends: list[tuple[World, tuple[End, ...]]] = field(default_factory=list)
    stuck: int = 0

    def go(self, notes: Notes | None = None, most: int = 3_000_000) -> Walk:
        first = World(notes or {}, ((),) * len(self.seats))
        ids: dict[Any, int] = {}
        leads: list[list[int]] = []
        good: set[int] = set()
        calm: set[int] = set()
        queue: deque[tuple[World, int]] = deque()

        def visit(world: World) -> int:
            stands = [_stand(*it) for it in zip(self.seats, world.answers, strict=True)]
            key = (
                tuple(sorted(world.notes.items())),
                tuple(stand.mark for stand in stands),
                *world[2:],
            )
            if key not in ids:
                ids[key] = len(ids)
                leads.append([])
                queue.append((world, ids[key]))
                if not world.late and not world.dead:
                    calm.add(ids[key])
            return ids[key]

        visit(first)
        while queue:
            assert len(ids) < most
            world, number = queue.popleft()
            stands = [_stand(*it) for it in zip(self.seats, world.answers, strict=True)]
            moves = [
                (who, stand.step)
                for who, stand in enumerate(stands)
                if stand.step is not None and who not in world.dead
            ]
            if not moves:
                self.ends.append((world, _list_ends(world, stands)))
                good.add(number)
            for who, step in moves:
                if len(world.dead) < self.deaths:
                    visit(world._replace(dead=world.dead | {who}))
                if isinstance(step, Pause):
                    on_time = self._answer(world, who, None, world.notes)
                    leads[number].append(visit(on_time))
                    late = world.late | {who}
                    visit(self._answer(world, who, LATE, world.notes)._replace(late=late))
                elif isinstance(step, Linger):
                    leads[number].append(visit(self._answer(world, who, None, world.notes)))
                else:
                    after, answer = _act(world.notes, step)
                    then = self._answer(_note_full(world, step, answer), who, answer, after)
                    leads[number].append(visit(then))
        self.worlds = len(ids)
        self.stuck = len(calm - _reach_back(leads, good))
        return self

    def _answer(self, world: World, who: int, answer: str | None, notes: Notes) -> World:
        answers = list(world.answers)
        answers[who] = (*answers[who], answer)
        return world._replace(notes=notes, answers=tuple(answers))


def _reach_back(leads: list[list[int]], good: set[int]) -> set[int]:
    """The worlds that come to good ones without another being late or dying."""
    back: list[list[int]] = [[] for _ in leads]
    for here, theres in enumerate(leads):
        for there in theres:
            back[there].append(here)
    found, queue = set(good), deque(good)
    while queue:
        for here in back[queue.popleft()]:
            if here not in found:
                found.add(here)
                queue.append(here)
    return found


def _list_ends(world: World, stands: Sequence[Stand]) -> tuple[End, ...]:
    return tuple(DEAD if who in world.dead else stand.end or "" for who, stand in enumerate(stands))


def _note_full(world: World, step: Step, answer: str | None) -> World:
    """With whom a meeting has become full, if it has."""
    if not isinstance(step, Swap) or answer != step.new or not answer.startswith("full "):
        return world
    return world._replace(full=(*world.full, (step.key, tuple(answer.split()[1:]))))


def wander(
    seats: Sequence[Seat],
    rng: random.Random,
    deaths: int,
    notes: Notes | None = None,
    lateness: float = 0.05,
) -> tuple[World, tuple[End, ...]]:
    """The last world of one walk, in which so many may die, and each time is over at a pause that often."""
    world = World(notes or {}, ((),) * len(seats))
    steps: list[Any] = [_meet_and_leave(seat) for seat in seats]
    answers: list[str | None] = [None] * len(seats)
    ends: dict[int, End] = {}
    # Some come when others have gone far.
    pace = [rng.random() ** 3 + 0.02 for _ in seats]
    while going := [who for who in range(len(seats)) if who not in ends]:
        (who,) = rng.choices(going, [pace[who] for who in going])
        if len(world.dead) < deaths and rng.random() < 0.03:
            world = world._replace(dead=world.dead | {who})
            ends[who] = DEAD
            continue
        try:
            step = steps[who].send(answers[who])
        except StopIteration as end:
            ends[who] = end.value
        except ExchangeError as error:
            ends[who] = str(error)
        else:
            after, answers[who] = _act(world.notes, step)
            if isinstance(step, Pause) and rng.random() < lateness:
                answers[who] = LATE
            world = _note_full(world, step, answers[who])._replace(notes=after)
    return world, tuple(ends[who] for who in range(len(seats)))
