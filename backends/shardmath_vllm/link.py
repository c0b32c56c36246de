"""Links: what ranks have of each other once they have met.

1. What goes wrong on one rank is an error on all, that says whose it is.
2. Who fails while weights move leaves the group: others hear of that at once, and need not wait for their time limit.
3. Whether an update begins place 0 says, in the group's store: where an engine could not be told of it, its ranks do
   not come, and nothing on their connections would tell the others.
4. The store ends with place 0's process, which may end once it has returned from an update, or raised: it waits until
   others have heard what it said last.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import Store

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of, plural, word_error
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement import notes
from shardmath_torch.groups.agreement.gather import gather
from shardmath_torch.groups.agreement.naming import word_objection

__all__ = ["Link", "together"]

_T = TypeVar("_T")

STEPS = ("start", "begin", "end", "finish")
"""What place 0 says of an update."""

LOOK_AGAIN_S = 0.005
"""While ranks have not come."""

HEARD_S = 5.0
"""At most, for others to hear what went wrong."""


def together(group: dist.ProcessGroup | None, what: str, act: Callable[[], _T]) -> _T:
    """What `act` gives on this rank, once it was right on all. Raises ExchangeError with what was wrong on each.

    Without a group this rank is all, and raises what `act` does.
    """
    if group is None:
        return act()
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
        return word_objection(error)
    return ""


@dataclass(frozen=True)
class Link:
    """The group, and the refit of each portion of the tensors; `planned` is all of them, on all ranks.

    `recorded` is what this rank's loader stores, where it is a worker; `trainers` have the first places. Where ranks of
    an engine process together what has arrived, a portion `acknowledges`: it is over once all ranks have theirs.
    `beside` are groups of some of the ranks, which end with this one.
    """

    group: dist.ProcessGroup
    place: int
    planned: sm.Refit
    refits: tuple[smt.Refit, ...]
    recorded: sm.Recorded | None
    trainers: int
    timeout: float
    acknowledges: bool = False
    given_up: dict[int, str] = field(default_factory=dict)
    beside: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def leave(self) -> None:
        """End the group, and those beside it."""
        for group in (*self.beside.values(), self.group):
            smt.disconnect(group)

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
            why = self._break_off(number, error)
            if why:
                raise ExchangeError(f"{message_of(error)}\n{why}") from error
            raise

    def _break_off(self, number: int, error: BaseException) -> str:
        """Leave, as all ranks do when an update fails: why another one says that it did, "" if none does."""
        what = f"fail update {number}"
        why = ""
        try:
            store = self.store
        except ExchangeError:
            return why
        # Place 0 may be gone, and the store with it.
        with suppress(RuntimeError, ExchangeError):
            own = not isinstance(error, ExchangeError)
            if own:
                store.set(what, f"place {self.place}: {word_error(error)}")
            # Also of what this rank has set: it is there by the answer, and only then do others find this rank gone.
            if store.check([what]) and not own:
                why = store.get(what).decode()
            self._confirm(what)
        self.leave()
        if self.place == 0:
            # Others hear of it as this rank leaves; the store is there for as long as it is held here.
            self._await_heard(store, what, range(1, self.group.size()), HEARD_S)
        return why

    def _begin(self, number: int, check: Callable[[], None]) -> None:
        """Raise ExchangeError, on all ranks, where one does not come or finds a fault."""
        what = f"begin update {number}"
        fault = _try(check)
        self.store.set(f"{what}/{self.place}", fault)
        said = self._hear(what) if self.place else self._await_all(number, what)
        if said:
            raise ExchangeError(said)

    def _await_all(self, number: int, what: str) -> str:
        """Wait for all ranks, and say what is wrong; "" for nothing."""
        store = self.store
        places = set(range(self.group.size()))
        late = _await(
            lambda place: store.check([f"{what}/{place}"]),
            places,
            self.timeout,
            lambda: number in self.given_up,
        )
        come = places - late
        if not late:
            said = self._read_faults(what)
            self._forget(number - 1)
        elif number in self.given_up:
            said = self.given_up[number]
            # They are on their way. Of workers nobody knows.
            come |= set(range(self.trainers))
        else:
            said = self._word_late(what, late)
        self._say(what, said, come)
        return said

    def _word_late(self, what: str, late: set[int]) -> str:
        places = ", ".join(map(str, sorted(late)))
        return f"{plural(len(late), 'rank')} did not {what} in {self.timeout:g} s: place {places}"

    def _read_faults(self, what: str) -> str:
        """What ranks that have come find wrong."""
        faults = []
        for place in range(self.group.size()):
            said = self.store.get(f"{what}/{place}").decode()
            if said:
                faults.append(f"place {place} could not {what}: {said}")
        return "\n".join(faults)

    def _forget(self, number: int) -> None:
        """Remove what was said of an update from the store: all have read it who come to the next."""
        store = self.store
        for what in STEPS:
            store.delete_key(f"{what} update {number}")
        for place in range(self.group.size()):
            store.delete_key(f"begin update {number}/{place}")

    def relay(self, what: str, act: Callable[[], None]) -> None:
        """Have place 0 act while other trainers wait. Raises ExchangeError on all of them where that fails."""
        if self.place > 0:
            fault = self._hear(what)
        else:
            fault = _try(act)
            self._say(what, fault, range(self.trainers))
        if fault:
            raise ExchangeError(f"place 0 could not {what}: {fault}")

    def finish(self, number: int, act: Callable[[], None]) -> None:
        """What is last in an update, as `relay`: place 0, whose process may end next, waits for others to have heard.

        Raises ExchangeError there if they do not in time.
        """
        what = f"finish update {number}"
        self.relay(what, act)
        self._confirm(what)
        if self.place == 0:
            late = self._await_heard(self.store, what, range(self.trainers), self.timeout)
            if late:
                raise ExchangeError(self._word_late(what, late))

    def _say(self, what: str, fault: str, hearers: Iterable[int]) -> None:
        """Say what place 0 finds wrong, "" for nothing. If it then raises, its process may end: wait for who hears."""
        store = self.store
        store.set(what, fault)
        if fault:
            self._confirm(what)
            self._await_heard(store, what, hearers, HEARD_S)

    def _hear(self, what: str) -> str:
        """What went wrong at place 0; "" for nothing."""
        store = self.store
        try:
            store.wait([what], timedelta(seconds=self.timeout))
            said = store.get(what).decode()
        except dist.DistNetworkError as error:
            raise ExchangeError(
                f"place 0 left, or is gone, as it was to {what}: {error}"
            ) from error
        except RuntimeError as error:
            raise ExchangeError(f"place 0 did not {what} in {self.timeout:g} s: {error}") from error
        if said:
            self._confirm(what)
        return said

    def _confirm(self, what: str) -> None:
        """This rank has heard of that, the last thing it has heard."""
        self.store.set(f"heard/{self.place}", what)

    def _await_heard(
        self, store: Store, what: str, places: Iterable[int], seconds: float
    ) -> set[int]:
        """The places that have not heard of it in time."""

        def has_heard(place: int) -> bool:
            if notes.read(store, f"heard/{place}") == what:
                return True
            # Once all have left, the store has nothing of the group; before they left they heard.
            return notes.read(store, f"heard/{self.place}") is None

        return _await(has_heard, places, min(seconds, self.timeout))

    @property
    def store(self) -> Store:
        """What its ranks have in common."""
        store = compat.store_of(self.group)
        if store is None:
            raise ExchangeError("the group was left; meet the engines again, by trainer_init")
        return store


def _await(
    is_there: Callable[[int], bool],
    places: Iterable[int],
    seconds: float,
    is_over: Callable[[], bool] = bool,
) -> set[int]:
    """The places that are not there in time, or once it is over."""
    until = time.monotonic() + seconds
    awaited = set(places)
    while awaited := {place for place in awaited if not is_there(place)}:
        if is_over() or time.monotonic() > until:
            break
        time.sleep(LOOK_AGAIN_S)
    return awaited
