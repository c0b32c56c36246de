"""The driver of the protocol's table, in threads of one process: whatever happens to a rank, and whenever."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist

from shardmath.plans.protocol import TABLE, Event, State, Table
from shardmath_torch.groups.agreement.turns import Turns
from shardmath_torch.groups.agreement.wire import PeerFailure
from shardmath_torch.moves.commits import conclude as concluding
from shardmath_torch.moves.commits.blocks import CommitBlock, Member
from shardmath_torch.moves.commits.conclude import conclude
from shardmath_torch.moves.commits.record import Record

SIZE = 3


class OfPython(dist.Store):
    """A store written in Python, without `clone`."""

    def __init__(self) -> None:
        super().__init__()
        self._store = dist.HashStore()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._store.compare_set(key, expected, desired)


@pytest.mark.parametrize("prefix", ["", "prefix"])
def test_a_store_that_cannot_be_cloned(prefix: str) -> None:
    """It is asked itself."""
    mine = OfPython()
    record = Record(dist.PrefixStore(prefix, mine) if prefix else mine, "group", 7)
    assert record.ask(Event.COMMIT, 5.0) is record.ask(Event.ABORT, 5.0) is Event.COMMIT


class Dead(BaseException):
    """The rank does nothing more."""


@dataclass(eq=False)
class Crowd:
    """What ranks share: a store, who has promised, and whether anybody is gone."""

    store: Any = field(default_factory=dist.HashStore)
    promised: set[int] = field(default_factory=set)
    is_over: threading.Event = field(default_factory=threading.Event)


class Rank:
    """A party of a rank, as far as `conclude` knows it; ends at a moment that is drawn."""

    def __init__(self, crowd: Crowd, rank: int, seed: str, table: Table) -> None:
        self.crowd = crowd
        self.rank, self.ranks = rank, tuple(range(SIZE))
        self.turns = Turns()
        self.turns.nonce = "crowd"
        self.turns.protocol.table = table
        self.turns.protocol.state = State.ACTING
        self.patience = self.grace = 5.0
        self.placed = 0
        self.version = 0
        self.is_dead = False
        self._draw = random.Random(f"{seed} {rank}")
        self._left = 2

    @property
    def group(self) -> Any:
        """Whoever asks for its store gets the crowd's."""
        return self.crowd

    def moment(self) -> None:
        """Any moment: nothing comes, or the rank waits, dies, or is interrupted."""
        kind = self._draw.random()
        if kind < 0.3:
            time.sleep(0.002 * self._draw.random())
        elif kind < 0.4 and self._left:
            self._left -= 1
            raise KeyboardInterrupt
        elif kind < 0.45:
            self.is_dead = True
            raise Dead

    def vote(self, promise: Any, event: Event) -> None:
        """Promise, and hear of the others'."""
        self.moment()
        self.turns.next(event)
        self.moment()
        self.crowd.promised.add(self.rank)
        self.moment()
        while len(self.crowd.promised) < SIZE:
            if self.crowd.is_over.is_set():
                raise PeerFailure(None, "gone")
            time.sleep(0.0005)
        self.moment()
        self.turns.agreed()

    def place(self) -> None:
        """Put the new in place, in two steps."""
        if self.is_dead:
            raise Dead
        self.placed = 1
        self.moment()
        self.placed = 2
        self.version = 1

    def run(self) -> None:
        """All of it."""
        try:
            conclude(self, None, self.place)  # type: ignore[arg-type]
        except (Dead, KeyboardInterrupt, PeerFailure):
            # Its connections end.
            self.crowd.is_over.set()


def run(seed: str, table: Table) -> list[Rank]:
    """The ranks that are alive at the end."""
    crowd = Crowd()
    ranks = [Rank(crowd, rank, seed, table) for rank in range(SIZE)]
    threads = [threading.Thread(target=one.run) for one in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
        assert not thread.is_alive(), "a rank waits for ever"
    return [one for one in ranks if not one.is_dead]


def find_faults(table: Table, seeds: int) -> list[str]:
    """The seeds for which survivors differ, or are torn."""
    found = []
    for seed in map(str, range(seeds)):
        alive = run(seed, table)
        is_torn = any(one.placed == 1 for one in alive)
        if is_torn or len({one.version for one in alive}) > 1:
            found.append(seed)
    return found


@pytest.fixture(autouse=True)
def _crowds_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concluding.compat, "store_of", lambda crowd: crowd.store)


@pytest.mark.parametrize("seeds", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_survivors_have_one_version(seeds: int) -> None:
    assert find_faults(TABLE, seeds) == []


def test_it_goes_by_the_table() -> None:
    """Driven by one that calls off alone, survivors differ: what is walked through is what runs."""
    table = {state: dict(row) for state, row in TABLE.items()}
    table[State.PROMISED][Event.LEAVE] = State.BROKEN
    assert find_faults(table, 60)


def test_a_block_waits_as_long_as_its_movers() -> None:
    """Of those that are named and those that have moved: an engine's may wait for the next step for an hour."""
    slow, slower = (Member(object(), key, key, True, s) for key, s in (("a", 300.0), ("b", 3600.0)))  # type: ignore[arg-type]
    assert CommitBlock(Turns(), {}).timeout == 60.0
    block = CommitBlock(Turns(), {"a": slow})
    assert block.timeout == 300.0
    block.add(slower, object())  # type: ignore[arg-type]
    assert block.timeout == 3600.0
