"""Rendezvous: processes find each other in a store, each by its rank, and form one generation.

1. A process takes the seat of its rank in the generation that is open. Who finds all seats taken closes it as full,
   and those who sit in it are a group.
2. Who has waited long enough closes it as over. Whoever has time left goes on to the next. So a name may be used again,
   also after a process died, and nobody is of a generation that went on without it.
3. A generation is closed by compare-and-set: all read the one answer that stands there first.
4. A seat may have been taken by a process that died as it waited. So who finds it taken closes the generation as over;
   who meets the same process again knows that both are alive, and tells all.

>>> import torch.distributed as dist
>>> meet(dist.HashStore(), Seat(0, 1, "gloo", "a"), time.monotonic() + 1.0)
1
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import NamedTuple

from shardmath.base.errors import ExchangeError
from shardmath.base.text import plural, show_ranks
from shardmath_torch.compat import Store

__all__ = ["Seat", "call_off", "meet"]

LOOK_AGAIN_S = (0.005, 0.1)
"""Between two looks at whether a generation is closed: at first, and after a while."""

OFF = "called off"
"""What the store has where nobody is to wait any more: why."""

OVER = "over"
WRONG = "wrong: "
"""How a generation is closed that is not full; what is wrong with it follows."""


class Seat(NamedTuple):
    """What a process says of itself: its rank of how many, the backend, and what no other process says."""

    rank: int
    size: int
    backend: str
    token: str

    @property
    def full(self) -> str:
        """How a generation is closed that is full of such seats."""
        return f"full: {self.size} ranks over {self.backend}"


def meet(store: Store, mine: Seat, until: float) -> int:
    """The number of the generation in which all ranks have met, until that time.

    Raises ExchangeError: with the ranks that did not come; for two processes of one rank; for ranks that give
    other sizes or backends. Raises RuntimeError where the store is lost.
    """
    number = _find_open(store)
    met: set[str] = set()
    fewest: list[int] = []
    while True:
        if store.check([OFF]):
            raise ExchangeError(store.get(OFF).decode())
        generation = _Generation(store, number, mine)
        verdict = generation.sit(met) or generation.wait(until)
        if verdict == mine.full:
            return number
        if verdict != OVER:
            raise ExchangeError(_word_verdict(verdict, mine))
        absent = generation.list_absent()
        # Others may have given up just before this one: they had come.
        if absent and (not fewest or len(absent) < len(fewest)):
            fewest = absent
        if time.monotonic() >= until:
            raise ExchangeError(_word_absent(fewest, mine.size))
        number += 1


def call_off(store: Store, why: str) -> None:
    """Close the generation that is open: those who wait in it, or come later, raise ExchangeError with this text.

    Raises RuntimeError where the store is lost.
    """
    # Before the generation is looked for: whoever comes to the next one finds this.
    store.set(OFF, why)
    store.compare_set(_name(_find_open(store), "closed"), "", f"{WRONG}{why}")


def _find_open(store: Store) -> int:
    """The first generation that was not closed before."""
    number = int(store.get("open")) if store.check(["open"]) else 1
    while store.check([_name(number, "closed")]):
        number += 1
    return number


def _name(number: int, what: str) -> str:
    return f"{number}/{what}"


def _word_verdict(verdict: str, mine: Seat) -> str:
    if verdict.startswith(WRONG):
        return verdict.removeprefix(WRONG)
    what = f"rank {mine.rank} gives size={mine.size} and backend={mine.backend!r}"
    return f"{what}, and the others have a group without it ({verdict}); give the same on all ranks"


def _word_absent(absent: Sequence[int], size: int) -> str:
    among = plural(size, "rank")
    if not absent:
        return f"the group of {among} was given up as the last came; connect again"
    fix = "see that they run, and connect to the same address with the same size and name"
    return f"{show_ranks(absent)} of {among} did not come in time; {fix}"


class _Generation:
    """One generation, as a process sees it that comes to it."""

    def __init__(self, store: Store, number: int, mine: Seat) -> None:
        self._store = store
        self._number = number
        self._mine = mine

    def sit(self, met: set[str]) -> str:
        """Take the seat, and close the generation if all are taken. How it is closed; "" while it is open.

        `met` are the tokens of processes that had this one's seat in earlier generations.
        """
        mine = json.dumps(self._mine)
        there = self._store.compare_set(self._seat(self._mine.rank), "", mine).decode()
        if there != mine:
            return self._give_way(Seat(*json.loads(there)), met)
        if self.list_absent():
            return ""
        return self._close(self._judge())

    def wait(self, until: float) -> str:
        """How it is closed, by this process if nobody has until that time."""
        pause, longest = LOOK_AGAIN_S
        while not self._store.check([self._name("closed")]):
            left = until - time.monotonic()
            if left <= 0:
                return self._close(OVER)
            time.sleep(min(pause, left))
            pause = min(2 * pause, longest)
        return self._store.get(self._name("closed")).decode()

    def _give_way(self, other: Seat, met: set[str]) -> str:
        """Close the generation for a process that has this one's seat, and may be dead or alive."""
        verdict = OVER
        if other.token in met:
            what = f"two processes give rank {other.rank}"
            verdict = f"{WRONG}{what}; give each process a rank of its own"
        met.add(other.token)
        found = self._close(verdict)
        # Where it is full, it is so with the other one.
        return OVER if found == self._mine.full else found

    def _judge(self) -> str:
        """How to close it, now that all sit."""
        for rank in range(self._mine.size):
            seat = Seat(*json.loads(self._store.get(self._seat(rank))))
            if seat.full != self._mine.full:
                here = f"rank {self._mine.rank} gives size={self._mine.size}, backend={self._mine.backend!r}"
                there = f"rank {rank} size={seat.size}, backend={seat.backend!r}"
                return f"{WRONG}{here}, and {there}; give the same on all ranks"
        return self._mine.full

    def _close(self, verdict: str) -> str:
        """How it is closed: so, unless it was before."""
        found = self._store.compare_set(self._name("closed"), "", verdict).decode()
        # Only where to begin to look: whoever sets it later to less costs a look or two.
        self._store.set("open", str(self._number + 1))
        return found

    def list_absent(self) -> list[int]:
        """The ranks whose seats are not taken."""
        ranks = range(self._mine.size)
        if self._store.check([self._seat(rank) for rank in ranks]):
            return []
        return [rank for rank in ranks if not self._store.check([self._seat(rank)])]

    def _seat(self, rank: int) -> str:
        return self._name(f"seat/{rank}")

    def _name(self, what: str) -> str:
        return _name(self._number, what)
