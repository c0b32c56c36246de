"""Goodbyes: notes in which a rank tells the others that it leaves a mover, or the group.

1. A rank writes a goodbye between turns, when nobody relies on it, with the number of the latest vote: the rank takes
   part in no later turn of that mover.
2. A goodbye is a note in the group's store. A background thread of every rank reads the notes a few times per second,
   so ranks know of it before their next call, even if the process that served the store has ended.
3. A rank that reads a goodbye in a later turn of the mover gives up at once, since it would wait in vain. A turn in
   which the leaving rank took part continues.
4. The process that serves the store waits until the others have read the goodbye, or have left the group, at most
   LINGER_S. Another process waits as long for a store that does not answer, but only once.

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

__all__ = ["LINGER_S", "WHOLE_GROUP", "Goodbye", "Goodbyes"]

WHOLE_GROUP = ""
"""Stands for a mover's key if the rank leaves the whole group."""

LOOK_AGAIN_S = 0.2
"""Time between two reads: goodbyes are rare, and a read takes the store a tenth of a millisecond."""

LINGER_S = 1.0
"""Time for the others to read a goodbye from a store served here, and for another's store to take one."""

SOON_S = 0.01
"""Time between two checks of who has read a goodbye."""


class Goodbye(NamedTuple):
    """A notice that `rank` closed the mover `key` (an object that moves tensors by a plan), or left the whole group if
    `key` is "". `after` is the number of votes (agreements of all ranks) in the group until then. If it `lingers`, the
    rank waits until the others have noted that they read the notice."""

    rank: int
    key: str
    after: int
    why: str
    lingers: bool


class Goodbyes:
    """The notices of ranks that closed a mover (an object that moves tensors by a plan) or left the group. They are in
    the group's store, under keys that contain `name`.

    `serves` is whether this process serves the store.
    """

    def __init__(
        self, store: Store, name: str, rank: int, ranks: Sequence[int], serves: bool = False
    ) -> None:
        # Weak, since a store that is served here has to end with its group.
        self._store = weakref.ref(store)
        self._name = name
        self._rank = rank
        self._ranks = ranks
        self._serves = serves
        self._is_lost = False
        # The goodbyes that this rank has written or read, by their numbers in the store.
        self._by_number: dict[int, Goodbye] = {}
        self._end_bell = threads.make_bell()
        self._listener: threading.Thread | None = None

    def say(self, key: str, after: int, why: str) -> None:
        """Announce that this rank closes a mover (an object that moves tensors by a plan) after vote number `after`,
        for the reason `why`. The `key` identifies the mover on all ranks; "" announces that this rank leaves the whole
        group.

        Never raises, and waits at most LINGER_S for the store, and as long for other ranks if it is served here.
        """
        goodbye = Goodbye(self._rank, key, after, why, self._serves)
        linger_s = LINGER_S if self._serves else 0.0

        def write() -> None:
            store = self._open()
            number = store.add(self._key("goodbyes"), 1)
            self._by_number[number] = goodbye
            store.set(self._key(f"goodbye/{number}"), json.dumps(goodbye))
            until = time.monotonic() + linger_s
            while time.monotonic() < until:
                self._read(store)
                if all(self._has_heard(store, number, rank) for rank in self._ranks):
                    break
                time.sleep(SOON_S)

        writer = self._beside(write)
        # If the first wait has shown that the store does not answer, do not wait again for each mover.
        if not self._is_lost:
            writer.join(LINGER_S + linger_s)
            self._is_lost = writer.is_alive()

    def _has_heard(self, store: Store, number: int, rank: int) -> bool:
        """Whether the rank has read goodbye `number`, or has left the group."""
        group_goodbye = (rank, WHOLE_GROUP)
        has_left = any((g.rank, g.key) == group_goodbye for g in self._by_number.values())
        return has_left or rank == self._rank or store.check([self._key(f"heard/{number}/{rank}")])

    def look(self, limit: float) -> None:
        """Read the new notices of ranks that left, waiting at most `limit` seconds for the store."""
        self._beside(lambda: self._read(self._open())).join(limit)

    def find(self, key: str, number: int, blamed: int | None = None) -> str:
        """Return a text that names the other ranks that left the group, or closed the mover `key`, before the group's
        vote `number`; "" if there are none. A rank given as `blamed` is also named if it closed another mover since the
        previous vote.

        A vote is an agreement of all ranks; the connection of the rank `blamed` has ended.

        The text has the lowest rank's reason.
        """
        reasons = {}
        for goodbye in list(self._by_number.values()):
            if goodbye.rank == self._rank:
                continue
            is_of_mover = goodbye.key in (key, WHOLE_GROUP)
            # No vote since: the rank's connection ended by this goodbye.
            ends_blamed = goodbye.rank == blamed and goodbye.after == number - 1
            if goodbye.after < number and (is_of_mover or ends_blamed):
                reasons[goodbye.rank] = goodbye.why
        if not reasons:
            return ""
        left = sorted(reasons)
        first = left[0]
        of_first = f"rank {first} because " if len(left) > 1 else ""
        return f"{show_ranks(left)} left: {of_first}{reasons[first]}"

    def list_left(self, key: str) -> tuple[int, ...]:
        """Return the other ranks that are known to have closed the mover `key` or left the group, ascending."""
        left = {g.rank for g in list(self._by_number.values()) if g.key in (key, WHOLE_GROUP)}
        return tuple(sorted(left - {self._rank}))

    def listen(self, act: Callable[[], bool]) -> None:
        """Start a thread that calls `act` and reads new notices of ranks that leave, repeatedly, until `act` returns
        False or `end` is called. `act` is the reaction to the notices; it returns False when no more are needed."""

        def loop() -> None:
            while act() and not self._end_bell.wait(LOOK_AGAIN_S):
                self._read(self._open())

        self._listener = self._beside(loop)

    def end(self) -> None:
        """End the thread that reads notices of leaving ranks; call it before the group is destroyed. The notices stay
        in the store."""
        self._end_bell.set()
        if self._listener is not None and not self._is_lost:
            self._listener.join(LINGER_S)

    def _beside(self, act: Callable[[], None]) -> threading.Thread:
        """Run `act` in a thread, since a store may take long; errors end the thread silently."""

        def run() -> None:
            # If the store fails, as when its host is gone, no more goodbyes can come.
            with suppress(Exception):
                act()

        return threads.start(run)

    def _open(self) -> Store:
        """The store, not to be kept. Raises RuntimeError if it is gone."""
        store = self._store()
        if store is None:
            raise RuntimeError("the group was destroyed")
        check_served(store)
        return store

    def _read(self, store: Store) -> None:
        """Read new goodbyes, and acknowledge those whose writer waits for it."""
        count_key = self._key("goodbyes")
        if not store.check([count_key]):
            return
        for number in range(1, int(store.get(count_key)) + 1):
            key = self._key(f"goodbye/{number}")
            # A goodbye is numbered before it is written, and `get` would wait for it.
            if number in self._by_number or not store.check([key]):
                continue
            goodbye = Goodbye(*json.loads(store.get(key)))
            self._by_number[number] = goodbye
            if goodbye.lingers:
                store.set(self._key(f"heard/{number}/{self._rank}"), "")

    def _key(self, topic: str) -> str:
        return f"shardmath/{self._name}/{topic}"
