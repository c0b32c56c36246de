"""A crowd: ranks that act together by the protocol's table, in every order in which ranks, wire and store can act.

1. A rank follows its script: "vote", "promise" and "finish". A vote or promise may carry an objection.
2. Whatever a rank posts reaches another at any later time, or never; whoever waits may give up at any time, as where a
   time is over, a connection breaks, or Ctrl-C is pressed. A rank that stalls is one that does nothing for long.
3. Every rank may die at any moment, and the store may become unsure: it answers or does not, and carries out what it
   was asked at any time.
4. Putting the new in place takes two steps, between which it is torn.
5. Ranks that go by one script can change places, so of worlds that differ in that one is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from shardmath.plans.protocol import PLACING, PROPOSALS, TABLE, Event, Protocol, State, Table

WHOLE = 1
"""Steps of putting the new in place; before all is said to be there, it is torn."""

Script = tuple[str, ...]

ONE_MOVE: Script = ("vote", "promise", "finish")
ACKNOWLEDGED: Script = ("vote", "promise", "vote", "finish")
BLOCK: Script = ("vote", "finish", "vote", "finish", "promise", "finish")
LEFT_OUT: Script = ("vote", "finish", "promise", "finish")
TWO_MOVES: Script = ONE_MOVE + ONE_MOVE


class Rank(NamedTuple):
    """Where a rank stands. `posts` are its votes and promises; `pending` is what the store has still to hear."""

    script: Script
    at: int = 0
    state: State = State.IDLE
    verdict: Event | None = None
    posts: tuple[str, ...] = ()
    agreed: int = 0
    pending: tuple[tuple[int, Event], ...] = ()
    answer: Event | None = None
    placed: int = 0
    version: int = 0
    refused: bool = False
    alive: bool = True

    @property
    def ended(self) -> bool:
        """Whether its calls have returned or raised."""
        is_done = self.at == len(self.script) or self.refused
        return self.state is State.BROKEN or (is_done and self.state is State.IDLE)

    @property
    def promise(self) -> int:
        """The number of its latest promise among what it posted."""
        return max(
            (n for n, said in enumerate(self.posts) if said.startswith("promise")), default=-1
        )

    @property
    def doubts(self) -> bool:
        """Whether it was told that nobody can tell."""
        return self.verdict is Event.LOSE


class World(NamedTuple):
    """All ranks, and the store: what is decided by the number of the promise, and whether it is sure to answer."""

    ranks: tuple[Rank, ...]
    records: tuple[tuple[int, Event], ...] = ()
    sure: bool = True

    def with_rank(self, i: int, rank: Rank) -> World:
        """The world with this rank in the place of its i-th."""
        return self._replace(ranks=(*self.ranks[:i], rank, *self.ranks[i + 1 :]))


Write = Callable[[Event | None, Event], Event]
"""What the store has after a proposal, by what it had."""


def write_once(had: Event | None, proposed: Event) -> Event:
    """As compare-and-set does."""
    return proposed if had is None else had


def write_always(had: Event | None, proposed: Event) -> Event:
    """As a plain set does: what a record must not be."""
    return proposed


@dataclass(frozen=True)
class Crowd:
    """The rules of a world: the table that its ranks go by, and how its store writes."""

    table: Table = field(default_factory=lambda: TABLE)
    write: Write = write_once

    def moved(self, rank: Rank, event: Event) -> Rank | None:
        """The rank after the event, which asks the record where it has to; None where the table has none."""
        state = self.table[rank.state].get(event)
        if state is None:
            return None
        protocol = Protocol(rank.state, rank.verdict, self.table)
        protocol.note(event)
        after = rank._replace(state=state, verdict=protocol.verdict)
        if state in PROPOSALS and state is not rank.state:
            request = rank.promise, PROPOSALS[state]
            return after._replace(pending=(*rank.pending, request))
        return after

    def successors(self, world: World) -> Iterator[tuple[int | None, str, World]]:
        """Every step that anybody may take, and the world after it; by which rank, where it is its own to take."""
        for i, rank in enumerate(world.ranks):
            if rank.alive and not rank.ended:
                yield None, f"rank {i} dies", world.with_rank(i, rank._replace(alive=False))
                for what, after in self.own_steps(world, rank):
                    yield i, f"rank {i} {what}", world.with_rank(i, after)
            # The store is waited for where it is sure to answer.
            by = i if world.sure else None
            for what, heard in self.store_steps(world, i):
                yield by, what, heard
        if world.sure:
            yield None, "the store is unsure", world._replace(sure=False)

    def own_steps(self, world: World, rank: Rank) -> Iterator[tuple[str, Rank]]:
        """What the rank itself may do next."""
        if rank.state in (State.IDLE, State.ACTING):
            yield from self.script_steps(world, rank)
        elif rank.state in (State.AGREEING, State.PROMISED):
            yield from self.hear(world, rank)
        elif rank.state in PROPOSALS:
            yield from self.decide(world, rank)
        elif rank.state in PLACING:
            yield from self.place(rank)
        yield from self.leave(rank)

    def script_steps(self, world: World, rank: Rank) -> Iterator[tuple[str, Rank]]:
        """The next of its script: it posts, or its call ends."""
        step = rank.script[rank.at]
        ready = rank._replace(at=rank.at + 1)
        if step == "finish":
            after = self.moved(ready, Event.FINISH)
            if after is not None:
                yield "finishes", after
            return
        # Its bytes are there once all others have begun to send.
        if (
            rank.state is State.ACTING
            and step == "promise"
            and any(one.agreed < rank.agreed for one in world.ranks)
        ):
            return
        event = Event.PROMISE if step == "promise" else Event.VOTE
        for said in (step, f"{step} against"):
            posted = ready._replace(answer=None, posts=(*rank.posts, said))
            after = self.moved(posted, event)
            if after is not None:
                yield f"posts {said}", after

    def hear(self, world: World, rank: Rank) -> Iterator[tuple[str, Rank]]:
        """All have posted: all the same, or not."""
        number = len(rank.posts) - 1
        if any(len(one.posts) <= number for one in world.ranks):
            return
        said = {one.posts[number] for one in world.ranks}
        if said == {rank.posts[number].partition(" ")[0]}:
            after = self.moved(rank._replace(agreed=rank.agreed + 1), Event.AGREE)
        else:
            after = self.moved(rank._replace(refused=True), Event.REFUSE)
        if after is not None:
            yield "hears all", after

    def decide(self, world: World, rank: Rank) -> Iterator[tuple[str, Rank]]:
        """It hears what stands in the record, or nothing."""
        if rank.answer is not None:
            yield from self.told(rank, rank.answer)
        if not world.sure:
            yield from self.told(rank, Event.LOSE)

    def told(self, rank: Rank, event: Event) -> Iterator[tuple[str, Rank]]:
        """The rank that hears of the record."""
        after = self.moved(rank, event)
        if after is not None:
            yield f"is told {event.value}", after

    def place(self, rank: Rank) -> Iterator[tuple[str, Rank]]:
        """One more part of the new is in place, or all of it has been."""
        if rank.placed < WHOLE:
            yield "copies", rank._replace(placed=rank.placed + 1)
            return
        after = self.moved(rank._replace(placed=0, version=rank.version + 1), Event.PLACE)
        if after is not None:
            yield "has it in place", after

    def leave(self, rank: Rank) -> Iterator[tuple[str, Rank]]:
        """It gives up, or is interrupted."""
        after = self.moved(rank, Event.LEAVE)
        # Where that leads nowhere else, it goes on as it would have.
        if after is not None and after.state is not rank.state:
            yield "leaves", after

    def store_steps(self, world: World, i: int) -> Iterator[tuple[str, World]]:
        """The store does one of the things that the rank, dead or alive, has asked of it."""
        rank = world.ranks[i]
        for turn, (number, proposed) in enumerate(rank.pending):
            records = dict(world.records)
            records[number] = self.write(records.get(number), proposed)
            left = rank.pending[:turn] + rank.pending[turn + 1 :]
            is_waited_for = number == rank.promise
            answer = records[number] if is_waited_for else rank.answer
            after = world.with_rank(i, rank._replace(pending=left, answer=answer))
            written = tuple(sorted(records.items(), key=lambda item: item[0]))
            yield f"the store hears rank {i}", after._replace(records=written)


def key_of(world: World) -> object:
    """Equal for worlds in which ranks of one script have changed places."""
    order: dict[Rank, int] = {}
    for rank in map(_drop_idle, world.ranks):
        order[rank] = order.get(rank, 0) + 1
    return frozenset(order.items()), world.records, world.sure


def _drop_idle(rank: Rank) -> Rank:
    """Of a rank that does nothing more, what still matters to others."""
    if rank.alive and not rank.ended:
        return rank
    bare = rank._replace(at=0, answer=None)
    return bare if rank.alive else bare._replace(state=State.BROKEN, placed=0, version=0)


def find_wrong(world: World) -> str:
    """What must not be in any world; "" for nothing."""
    told = {(rank.promise, rank.verdict) for rank in world.ranks if _knows(rank)}
    if len(told) > len({number for number, _ in told}):
        return "one rank was told to commit, another to abort"
    for rank in world.ranks:
        if rank.alive and rank.ended and rank.placed:
            return "a rank has ended with neither old nor new"
        if rank.doubts and world.sure:
            return "a rank is told that nobody can tell, and the store answers"
        if rank.doubts and rank.state in PLACING:
            return "a rank cannot tell what is decided, and puts the new in place"
    return _compare(world)


def _knows(rank: Rank) -> bool:
    return rank.verdict in (Event.COMMIT, Event.ABORT)


def _compare(world: World) -> str:
    """What is wrong between ranks that have ended and know how."""
    ended = [rank for rank in world.ranks if rank.alive and rank.ended and not rank.doubts]
    for rank in ended:
        is_well = rank.state is State.IDLE and not rank.refused
        if is_well and rank.version != rank.script.count("promise"):
            return "a rank has ended well, and has not all that its script commits"
    everyone = all(rank.ended or not rank.alive for rank in world.ranks)
    if everyone and len({rank.version for rank in ended}) > 1:
        return "survivors have ended with different versions"
    return ""


class Found(NamedTuple):
    """What exploring found: how many worlds, what is wrong, and the steps that lead there."""

    worlds: int
    wrong: str = ""
    steps: tuple[str, ...] = ()


def explore(scripts: tuple[Script, ...], crowd: Crowd | None = None) -> Found:
    """Walk through all worlds that these ranks can come to; stops at the first that is wrong.

    Every step leads on, never back: so a rank that can always take one of its own comes to an end.
    """
    rules = crowd or Crowd()
    start = World(tuple(map(Rank, scripts)))
    seen = {key_of(start)}
    waiting: list[tuple[World, tuple[object, ...]]] = [(start, ())]
    while waiting:
        world, path = waiting.pop()
        steps = list(rules.successors(world))
        wrong = find_wrong(world) or find_stuck(world, {by for by, _, _ in steps})
        if wrong:
            return Found(len(seen), wrong, _unfold(path))
        for _, step, after in steps:
            key = key_of(after)
            if key not in seen:
                seen.add(key)
                waiting.append((after, (path, step)))
    return Found(len(seen))


def find_stuck(world: World, movers: set[int | None]) -> str:
    """Whether a rank that is alive waits for others, who may never do anything; "" where none does."""
    for i, rank in enumerate(world.ranks):
        if rank.alive and not rank.ended and i not in movers:
            return f"rank {i} waits for ever"
    return ""


def _unfold(path: tuple[object, ...]) -> tuple[str, ...]:
    """The steps of a path that is (the path before, its last step)."""
    steps = []
    while path:
        path, step = path  # type: ignore[assignment]
        steps.append(str(step))
    return tuple(reversed(steps))
