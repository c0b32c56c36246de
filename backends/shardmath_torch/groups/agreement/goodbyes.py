"""Goodbyes: a rank that is done with a mover, or with the group, says so, and the others need not find out.

1. A goodbye is said between turns, when nobody counts on the rank, and has the number of the latest vote: the rank
   takes part in no later turn of that mover.
2. It is written into the group's store, where every rank looks for it a few times per second, on a thread that nobody
   waits for. So ranks have heard it before their next call, even if the process that served the store has ended.
3. Who hears it in a later turn of the mover waits in vain, and gives up at once. A turn in which the rank took part
   goes on.
4. The process that serves the store stays until the others have heard, or have left the group, at most LINGER_S. So
   long does another wait for a store that does not answer, and once only.

>>> import torch.distributed as dist
>>> store = dist.HashStore()
>>> Goodbyes(store, "group", 1, (0, 1)).say("mover", 7, "it closed the mover")
>>> others = Goodbyes(store, "group", 0, (0, 1))
>>> others.look(1.0)
>>> others.find("mover", 8), others.find("mover", 7), others.find("another", 8)
('rank 1 left: it closed the mover', '', '')
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from shardmath.base.text import show_ranks
from shardmath_torch.groups.agreement import threads
from shardmath_torch.groups.compat import Store
from shardmath_torch.groups.stores import check_served

__all__ = ["WHOLE_GROUP", "Goodbye", "Goodbyes"]

WHOLE_GROUP = ""
"""In place of a mover's key: the rank does nothing more in the group."""

LOOK_AGAIN_S = 0.2
"""Between two looks: a goodbye is said once, and a look takes the store a tenth of a millisecond."""

LINGER_S = 1.0
"""What the process that serves the store gives the others to hear a goodbye, and another gives the store to take it."""

SOON_S = 0.01
"""Between two looks at who has heard."""


class Goodbye(NamedTuple):
    """Which rank left what, after its vote of that number, and why; whether it `lingers` until others have heard."""

    rank: int
    key: str
    after: int
    why: str
    lingers: bool


class Goodbyes:
    """Those of the ranks of one group, in its store under `name`, as this rank has heard them.

    Its process `serves` the store, or another does.
    """

    def __init__(
        self, store: Store, name: str, rank: int, ranks: Sequence[int], serves: bool = False
    ) -> None:
        # Held by whoever has the group: a store that is served here has to end with that.
        self._store = weakref.ref(store)
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._serves = serves
        self._is_lost = False
        self._heard: dict[int, Goodbye] = {}
        self._is_over = threads.make_bell()
        self._listening: threading.Thread | None = None

    def say(self, key: str, after: int, why: str) -> None:
        """Leave the mover of this key, after the vote of that number. Never raises, and waits for nobody for long."""
        mine = Goodbye(self._rank, key, after, why, self._serves)

        def write() -> None:
            store = self._open()
            number = store.add(self._key("goodbyes"), 1)
            self._heard[number] = mine
            store.set(self._key(f"goodbye/{number}"), json.dumps(mine))
            until = time.monotonic() + LINGER_S * self._serves
            while time.monotonic() < until:
                self._read(store)
                if all(self._has_heard(store, number, rank) for rank in self._ranks):
                    break
                time.sleep(SOON_S)

        saying = self._beside(write)
        # The first wait has shown that the store does not answer: another would take as long, for each mover.
        if not self._is_lost:
            saying.join(LINGER_S * (1 + self._serves))
            self._is_lost = saying.is_alive()

    def _has_heard(self, store: Store, number: int, rank: int) -> bool:
        """Whether the rank has heard that one, or does nothing more in the group."""
        has_left = any(one[:2] == (rank, WHOLE_GROUP) for one in self._heard.values())
        return has_left or rank == self._rank or store.check([self._key(f"heard/{number}/{rank}")])

    def look(self, limit: float) -> None:
        """Hear what there is to be heard, in at most so many seconds."""
        self._beside(lambda: self._read(self._open())).join(limit)

    def find(self, key: str, number: int, blamed: int | None = None) -> str:
        """Who takes no part in the mover's turn whose latest vote has that number, and why; "" if all may.

        A `blamed` rank, whose connection ended, takes none either if it has left anything since the vote before.
        """
        left = {}
        for one in list(self._heard.values()):
            if one.rank == self._rank:
                continue
            is_of_this = one.key in (key, WHOLE_GROUP)
            is_gone = one.rank == blamed and one.after == number - 1
            if one.after < number and (is_of_this or is_gone):
                left[one.rank] = one.why
        if not left:
            return ""
        first = min(left)
        return f"{show_ranks(sorted(left))} left: {left[first]}"

    def listen(self, act: Callable[[], bool]) -> None:
        """Look, and `act` after each look, on a thread beside, until `act` gives False or this is ended."""

        def loop() -> None:
            while act() and not self._is_over.wait(LOOK_AGAIN_S):
                self._read(self._open())

        self._listening = self._beside(loop)

    def end(self) -> None:
        """Hear no more, and write no more into a store that answers: the last to leave removes what is there."""
        self._is_over.set()
        if self._listening is not None and not self._is_lost:
            self._listening.join(LINGER_S)

    def _beside(self, act: Callable[[], None]) -> threading.Thread:
        """Do it on a thread of its own, since a store may take its time."""

        def run() -> None:
            # Whatever goes wrong, as where the store's host is gone: there is nothing more to be heard.
            with suppress(Exception):
                act()

        return threads.start(run)

    def _open(self) -> Store:
        """The store, for a moment. Raises RuntimeError where it is gone."""
        store = self._store()
        if store is None:
            raise RuntimeError("the group was destroyed")
        check_served(store)
        return store

    def _read(self, store: Store) -> None:
        """Hear what was not heard yet."""
        count = self._key("goodbyes")
        if not store.check([count]):
            return
        for number in range(1, int(store.get(count)) + 1):
            key = self._key(f"goodbye/{number}")
            # Numbered before it is written, and `get` would wait.
            if number in self._heard or not store.check([key]):
                continue
            found = Goodbye(*json.loads(store.get(key)))
            self._heard[number] = found
            if found.lingers:
                store.set(self._key(f"heard/{number}/{self._rank}"), "")

    def _key(self, what: str) -> str:
        return f"shardmath/{self._name}/{what}"
