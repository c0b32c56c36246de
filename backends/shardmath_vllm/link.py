"""Links: what ranks have of each other once they have met.

1. What goes wrong on one rank is an error on all, that says whose it is.
2. Who fails while weights move leaves the group: others hear of that at once, and need not wait for their time limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.errors import ExchangeError, ShardError
from shardmath_torch import compat
from shardmath_torch.agreement.gather import gather

__all__ = ["Link", "together"]

_T = TypeVar("_T")


FINE = "fine"


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

    def leave(self) -> None:
        """End the group."""
        smt.disconnect(self.group)

    def move(self, number: int, check: Callable[[], None], act: Callable[[], None]) -> None:
        """An update: nothing moves before `check` was right on all ranks, and it is over once `act` was on all."""
        together(self.group, f"begin update {number}", check)
        try:
            act()
        except BaseException:
            self.leave()
            raise
        together(self.group, f"end update {number}", lambda: None)

    def relay(self, what: str, act: Callable[[], None]) -> None:
        """Have place 0 act while other trainers wait. Raises ExchangeError on all of them where that fails."""
        store = self._store
        if self.place == 0:
            fault = _try(act)
            store.set(what, fault or FINE)
        else:
            fault = self._hear(what)
        if fault:
            raise ExchangeError(f"place 0 could not {what}: {fault}")

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
