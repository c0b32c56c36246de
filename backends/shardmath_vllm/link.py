"""Links: what ranks have of each other once they have met.

1. What goes wrong on one rank is an error on all, that says whose it is.
2. Who fails while weights move leaves the group: others hear of that at once, and need not wait for their time limit.
3. Whether an update begins place 0 says, in the group's store: where an engine could not be told of it, its ranks do
   not come, and nothing on their connections would tell the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.errors import ExchangeError, ShardError
from shardmath.base.text import plural
from shardmath_torch import compat
from shardmath_torch.agreement.gather import gather

__all__ = ["Link", "together"]

_T = TypeVar("_T")

FINE = "fine"

STEPS = ("start", "begin", "end", "finish")
"""What place 0 says of an update."""

LOOK_AGAIN_S = 0.005
"""While ranks have not come."""


def together(group: dist.ProcessGroup, what: str, act: Callable[[], _T]) -> _T:
    """What `act` gives on this rank, once it was right on all. Raises ExchangeError with what was wrong on each."""
    made: list[_T] = []
    fault = _try(lambda: made.append(act()))
    faults = []
    for place, said in enumerate(gather(fault, group, what)):
        if said:
            faults.append(f"place {place} could not {what}: {said}")
    if faults:
        raise ExchangeError("\n".join(faults))
    return made[0]


def _try(act: Callable[[], None]) -> str:
    """What goes wrong, since others wait to hear of this rank whatever that is; "" for nothing."""
    try:
        act()
    except Exception as error:
        kind = "" if isinstance(error, ShardError) else f"{type(error).__name__}: "
        return f"{kind}{error}"
    return ""


@dataclass(frozen=True)
class Link:
    """The group, and the refit of each portion of the tensors; `planned` is all of them, on all ranks.

    `recorded` is what this rank's loader stores, where it is a worker.
    """

    group: dist.ProcessGroup
    place: int
    planned: sm.Refit
    refits: tuple[smt.Refit, ...]
    recorded: sm.Recorded | None
    timeout: float
    given_up: dict[int, str] = field(default_factory=dict)

    def leave(self) -> None:
        """End the group."""
        smt.disconnect(self.group)

    def give_up(self, number: int, why: str) -> None:
        """Have an update not begin for which ranks do not come; from any thread at place 0."""
        self.given_up[number] = why

    def move(self, number: int, check: Callable[[], None], act: Callable[[], None]) -> None:
        """An update: nothing moves before `check` was right on all ranks, and it is over once `act` was on all."""
        self._begin(number, check)
        try:
            act()
            together(self.group, f"end update {number}", lambda: None)
        except BaseException as error:
            why = self._share(number, error)
            self.leave()
            if why:
                raise ExchangeError(f"{error}\n{why}") from error
            raise

    def _share(self, number: int, error: BaseException) -> str:
        """Say why an update failed, where that is this rank's; else, why another says that it did, "" if none does."""
        key = f"fail update {number}"
        # Place 0 may be the one that has failed, and the store with it.
        with suppress(RuntimeError, ExchangeError):
            if not isinstance(error, ExchangeError):
                self._store.set(key, f"place {self.place}: {type(error).__name__}: {error}")
            elif self._store.check([key]):
                return self._store.get(key).decode()
        return ""

    def _begin(self, number: int, check: Callable[[], None]) -> None:
        """Raise ExchangeError, on all ranks, where one does not come or finds a fault."""
        what = f"begin update {number}"
        fault = _try(check)
        self._store.set(f"{what}/{self.place}", fault or FINE)
        said = self._decide(what, lambda: self._await_all(number, what))
        if said:
            raise ExchangeError(said)

    def _await_all(self, number: int, what: str) -> str:
        """What is wrong once all ranks have come; "" for nothing."""
        store = self._store
        until = time.monotonic() + self.timeout
        awaited = set(range(self.group.size()))
        while awaited := {place for place in awaited if not store.check([f"{what}/{place}"])}:
            if number in self.given_up:
                return self.given_up[number]
            if time.monotonic() > until:
                places = ", ".join(map(str, sorted(awaited)))
                return f"{plural(len(awaited), 'rank')} did not {what} in {self.timeout:g} s: place {places}"
            time.sleep(LOOK_AGAIN_S)
        self._forget(number - 1)
        faults = []
        for place in range(self.group.size()):
            said = store.get(f"{what}/{place}").decode()
            if said != FINE:
                faults.append(f"place {place} could not {what}: {said}")
        return "\n".join(faults)

    def _forget(self, number: int) -> None:
        """Remove what was said of an update from the store: all have read it who come to the next."""
        store = self._store
        for what in STEPS:
            store.delete_key(f"{what} update {number}")
        for place in range(self.group.size()):
            store.delete_key(f"begin update {number}/{place}")

    def relay(self, what: str, act: Callable[[], None]) -> None:
        """Have place 0 act while other trainers wait. Raises ExchangeError on all of them where that fails."""
        fault = self._decide(what, lambda: _try(act))
        if fault:
            raise ExchangeError(f"place 0 could not {what}: {fault}")

    def _decide(self, what: str, find: Callable[[], str]) -> str:
        """What place 0 finds wrong, on all ranks; "" for nothing."""
        if self.place > 0:
            return self._hear(what)
        store = self._store
        fault = find()
        store.set(what, fault or FINE)
        return fault

    def _hear(self, what: str) -> str:
        """What went wrong at place 0; "" for nothing."""
        store = self._store
        try:
            store.wait([what], timedelta(seconds=self.timeout))
            said = store.get(what).decode()
        except RuntimeError as error:
            raise ExchangeError(f"place 0 did not {what} in {self.timeout:g} s: {error}") from error
        return "" if said == FINE else said

    @property
    def _store(self) -> Store:
        store = compat.store_of(self.group)
        if store is None:
            raise ExchangeError("the group was left; meet the engines again, by trainer_init")
        return store
