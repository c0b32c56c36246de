"""Turns: what the ranks of one process group do together, one thing after another.

1. A turn is a vote and what was agreed on in it. Votes of a group are counted, alike on all its
   ranks; the count marks every message, so that bytes of one are never taken for another's.
2. One thread of a rank at a time has the turn, since only order says which calls of two ranks
   belong together. So it is with calls of several steps (`Turns.call`), some of which are torch's
   own and have no turn: those of two threads do not come between each other.
3. A turn ends well, or by a refusal that all ranks know of (`Refused`). Left in any other way, as
   by Ctrl-C or an exception in a signal handler, it may leave messages on their way: the group is
   broken from then on, and says so.

>>> turns = Turns()
>>> with turns.taken(patience=1.0):
...     turns.next(), turns.agreed()
...     turns.next(), turns.agreed()
(1, None)
(2, None)
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from shardmath.base.errors import ExchangeError
from shardmath.plans.protocol import Event, Protocol, State
from shardmath_torch.groups.agreement import threads
from shardmath_torch.groups.agreement.failure import UNTOLD
from shardmath_torch.groups.agreement.goodbyes import WHOLE_GROUP, Goodbyes
from shardmath_torch.groups.compat import Group, Store, in_backward

__all__ = ["Refused", "Turns", "Unasked", "as_main", "check_thread", "in_thread", "turns_of"]

LONGEST = 60
"""Letters of a thread's name that a claim shows."""

LOOK_AGAIN_S = 0.001
"""While another thread has the turn."""


class Refused(ExchangeError):
    """All ranks know that nothing is done; the next turn may begin."""


class Unasked(NamedTuple):
    """A turn about which ranks have agreed before, so that nobody is asked.

    `mark` is of all that they would have said: where ranks do different things, none takes bytes of the other's.
    `patience` in seconds: to wait for a rank that comes late, where that is given.
    """

    mark: int
    patience: float | None = None


@dataclass(eq=False)
class _Turn:
    """What a thread has while the turn is its own.

    It lives as long as the call, and no longer: so the turn is free even where a signal handler
    raised just as it was to be given back.
    """

    thread: threading.Thread


def _nobody() -> None:
    return None


class _Seat:
    """What one thread at a time has, and the others wait for, in the order in which they came.

    `had` says in words what it had.
    """

    def __init__(self, had: str) -> None:
        self._had = had
        self._lock = threading.Lock()
        self._held: Callable[[], _Turn | None] = _nobody
        self._came: list[weakref.ref[_Turn]] = []

    def is_mine(self) -> bool:
        """Whether the calling thread has it."""
        held = self._held()
        return held is not None and held.thread is threading.current_thread()

    def take(self, turn: _Turn, patience: float) -> None:
        """Wait until it is this one's. Raises ExchangeError where another keeps it."""
        until = time.monotonic() + patience
        while (holder := self._claim(turn)) is not None:
            left = until - time.monotonic()
            if left <= 0:
                held = f"{holder.thread.name} has {self._had} of this process group"
                fix = "give each thread a group of its own, dist.new_group()"
                raise ExchangeError(f"{held} for {patience:.1f} s; {fix}")
            # Looking again needs no lock of Event or Condition, which an exception may leave held.
            time.sleep(min(left, LOOK_AGAIN_S))

    def _claim(self, turn: _Turn) -> _Turn | None:
        """Who has it, or waits for it and came before; if nobody does, it is now this one."""
        # Python runs no signal handler between taking a lock by `with` and its body; it may between
        # any other two steps, so holding it is one assignment, of what dies with the call.
        with self._lock:
            earlier = self._find_earlier(turn)
            first = self._held() or earlier
            if first is None:
                self._held = weakref.ref(turn)
            return first

    def _find_earlier(self, turn: _Turn) -> _Turn | None:
        """Of other threads who came before; None if nobody did.

        Otherwise a thread that takes turn after turn would leave none to the others, which look only now and then.
        """
        came = [one for it in self._came if (one := it()) is not None]
        if turn not in came:
            came.append(turn)
            self._came = list(map(weakref.ref, came))
        earlier = itertools.takewhile(lambda one: one is not turn, came)
        # A signal handler does not wait for the call that it interrupts.
        return next((one for one in earlier if one.thread is not turn.thread), None)

    def give_back(self, turn: _Turn) -> None:
        """Free it, if this one has it; it waits no more."""
        with self._lock:
            if self._held() is turn:
                self._held = _nobody
            self._came = [it for it in self._came if it() is not turn]


class _Heard(threading.local):
    """What the calling thread has heard: how many of its turns were refused, or not begun since a rank has left; and
    whether it moves beside another."""

    refusals = 0
    goodbyes = 0
    is_beside = False


class Turns:
    """The turns of one group on this rank.

    `decided` is the number of the latest vote of which the group's store has a record (`commits`).

    `beside` is the latest errand, which moves beside the thread that called, after the ones before it: other calls
    wait for it. `unasked` is what the turn was agreed on by, where that was before.

    `told` is the exception that this rank goes on with and of which all ranks have heard, in the
    call of several steps that is under way.

    `broken` says why there are no more, "" while there are. `host` is the rank that serves the
    group's store, None if it is none of the group, UNTOLD until ranks have voted on it; `nonce` is
    drawn by the first rank and told in the first vote, so that what an earlier group has left in
    the store is not taken for this one's. `goodbyes` are heard once this rank listens: in a joint group from its
    beginning, in another from the first mover on;
    `give_up` ends the turn that goes on if a rank has left before it; whoever calls it holds `giving_up`.
    """

    def __init__(self) -> None:
        self.broken = ""
        self.protocol = Protocol()
        self.votes = 0
        self.decided: int | None = None
        self.heard = _Heard()
        self.beside: threads.Errand | None = None
        self.unasked: Unasked | None = None
        self.host: int | None = UNTOLD
        self.nonce = ""
        self.goodbyes: Goodbyes | None = None
        self.give_up: Callable[[], None] | None = None
        self.giving_up = threading.Lock()
        self._turn = _Seat("had the turn")
        self._call = _Seat("been in a call of several steps")
        self._step = _Seat("been in a step")
        self.told: BaseException | None = None
        self._names: dict[str, weakref.ref[threading.Thread]] = {}
        self._queue = threading.Lock()

    def next(self, event: Event = Event.VOTE) -> int:
        """The number of the vote, or of the PROMISE, that now begins."""
        self.protocol.note(event)
        self.votes += 1
        return self.votes

    def agreed(self) -> None:
        """The vote is over, and nobody objects."""
        self.protocol.note(Event.AGREE)

    @property
    def latest(self) -> tuple[str, int, bool]:
        """What the latest vote is known by on all ranks, as no other of any group; and whether ranks were asked."""
        return self.nonce, self.votes, self.unasked is None

    @property
    def under_way(self) -> bool:
        """Whether others may count on this rank, which has begun to vote (`protocol`)."""
        return self.protocol.counted_on

    def check_name(self, name: str) -> None:
        """Raises ExchangeError if two threads that are both alive go by one name."""
        here = threading.current_thread()
        self._names = {n: ref for n, ref in self._names.items() if _is_alive(ref())}
        known = self._names.setdefault(name, weakref.ref(here))()
        # A thread that lives and has not moved yet counts too: it may have done so first on another rank.
        namesakes = [one for one in threading.enumerate() if one.name == here.name]
        has_twin = here.name == name and len(namesakes) > 1
        if known is not here or has_twin:
            what = f"two threads of this rank are called {name!r}, and ranks pair calls by name"
            raise ExchangeError(f"{what}; name them apart, or give each a group of its own")

    @contextmanager
    def alone(self, patience: float) -> Iterator[None]:
        """No call on the group goes on in this process meanwhile; ranks are not asked, and it may be broken.

        Waits for moves beside, and at most `patience` seconds for other threads. Raises ExchangeError inside of a call,
        and where the turn cannot be had.
        """
        turn = _Turn(threading.current_thread())
        self.refuse_nested()
        self.wait_for_beside()
        try:
            self._turn.take(turn, patience)
            yield
        finally:
            self._turn.give_back(turn)

    @contextmanager
    def taken(
        self, patience: float, what: str = "group", let_go: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """The turn is this thread's, as `alone` has it, for what ranks do together.

        Raises ExchangeError where it cannot be had, or the group is broken, and so is `what` needs
        it. `let_go` is called if the turn before was left in the middle and nobody could.
        """
        with self.alone(patience):
            self._check_not_broken(what, let_go)
            self.unasked = None
            try:
                yield
                self.protocol.note(Event.FINISH)
            except Refused:
                self.protocol.note(Event.REFUSE)
                self.heard.refusals += 1
                raise

    @contextmanager
    def call(self, patience: float) -> Iterator[None]:
        """A call of several steps is this thread's, and so are such calls inside of it.

        Waits for other threads' at most `patience` seconds. Raises ExchangeError where it cannot be had.
        """
        self._refuse_in_step()
        if self._call.is_mine():
            yield
            return
        turn = _Turn(threading.current_thread())
        try:
            self._call.take(turn, patience)
            # Not where it could not be had: what has been told is then of another thread's call.
            self.told = None
            try:
                yield
            finally:
                self.told = None
        finally:
            self._call.give_back(turn)

    @contextmanager
    def step(self) -> Iterator[None]:
        """What this thread now does by itself, while the other ranks wait to hear how it ends: it takes no turn.

        Raises ExchangeError where it is in one already.
        """
        self._refuse_in_step()
        turn = _Turn(threading.current_thread())
        try:
            self._step.take(turn, float("inf"))
            yield
        finally:
            self._step.give_back(turn)

    @contextmanager
    def ending(self, patience: float, cause: str) -> Iterator[None]:
        """The last turn, as `alone` has it: there are no more, by this cause, and the others hear of it."""
        with self.alone(patience):
            self.part(WHOLE_GROUP, cause)
            self.broken = self.broken or cause
            if self.goodbyes is not None:
                self.goodbyes.end()
            yield

    def listen(
        self, store: Store, name: str, rank: int, ranks: Sequence[int], serves: bool
    ) -> None:
        """Hear from now on which of the ranks leave; as `Goodbyes` has it. Of a group that listens nothing changes."""
        if self.goodbyes is not None or len(ranks) == 1:
            return
        self.goodbyes = Goodbyes(store, name, rank, ranks, serves)
        # The thread that listens keeps nothing of the group.
        known = weakref.ref(self)
        self.goodbyes.listen(lambda: _give_up_if_left(known()))

    def part(self, key: str, why: str) -> None:
        """Say goodbye to the mover of this key; of a broken group the others know. Only in a turn, `alone`."""
        is_broken = self.under_way or self.broken
        if self.goodbyes is not None and not is_broken:
            self.goodbyes.say(key, self.votes, why)

    def put_beside(self, errand: threads.Errand) -> threads.Errand | None:
        """The latest is this one from now on; gives the one after which it comes."""
        with self._queue:
            former, self.beside = self.beside, errand
        return former

    def wait_for_beside(self) -> None:
        """Return once the moves that go on beside are over: order says which calls belong together."""
        if self.beside is not None and not self.heard.is_beside:
            self.beside.wait()

    def refuse_nested(self) -> None:
        """Raise ExchangeError where the thread has the turn already: it would wait for itself."""
        if self._turn.is_mine():
            what = "this thread is in the middle of a move or a compile, and calls another one"
            fix = "call it after the first has ended"
            raise ExchangeError(f"{what}, as a signal handler may; {fix}")
        self._refuse_in_step()

    def _refuse_in_step(self) -> None:
        """Raise ExchangeError where the other ranks wait to hear how this thread's step ends."""
        if self._step.is_mine():
            what = (
                "this thread is in the middle of a save, load or export, and calls something else"
            )
            fix = "call it after the first has ended, or on a group of its own"
            raise ExchangeError(f"{what} of its process group, as a progress callback may; {fix}")

    def _check_not_broken(self, what: str, let_go: Callable[[], None]) -> None:
        """Raise ExchangeError where the group is broken, and `what` with it."""
        # The call before ended neither well nor by a refusal: it was left.
        if self.under_way:
            self.protocol.note(Event.LEAVE)
        # Nobody could say why where an exception came on top of another that was being handled.
        if self.protocol.state is not State.IDLE and not self.broken:
            self.broken = "a move or a compile was left in the middle"
            let_go()
        if self.broken:
            raise ExchangeError(f"this {what} is broken: {self.broken}")


def _give_up_if_left(turns: Turns | None) -> bool:
    """End the turn that goes on, if a rank has left before it; whether there may be more turns to look after."""
    if turns is None or turns.broken:
        return False
    with turns.giving_up:
        if turns.give_up is not None:
            turns.give_up()
    return True


def _is_alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


_turns: weakref.WeakKeyDictionary[Group, Turns] = weakref.WeakKeyDictionary()

_here = threading.local()
"""Of the calling thread: whether it stands in for the main one."""


def turns_of(group: Group) -> Turns:
    """The turns of the group: the same for all that is made on it in this process."""
    return _turns.setdefault(group, Turns())


def in_thread(given: str | None) -> str:
    """What a claim says of the calling thread, by the name `given` to it or by its own; nothing of the main one."""
    # Autograd's threads are not Python's, and have no names of their own.
    if given is None and _is_thread_of_autograd():
        return " in a thread of autograd"
    name = _name_thread() if given is None else given
    if name is not None and len(name) > LONGEST:
        # Long names that differ beyond what is shown are different names.
        checksum = zlib.crc32(name.encode(errors="backslashreplace"))
        name = f"{name[:LONGEST]}... {checksum:08x}"
    return "" if name is None else f" in thread {name!r}"


def check_thread(turns: Turns, given: str | None) -> None:
    """Raises ExchangeError if another thread that is still alive has moved by this thread's name."""
    if given is None and _is_thread_of_autograd():
        return
    name = _name_thread() if given is None else given
    if name is not None:
        turns.check_name(name)


def _name_thread() -> str | None:
    """The calling thread's name; None for the main one, which needs none. Another's may be empty."""
    here = threading.current_thread()
    is_main = here is threading.main_thread() or getattr(_here, "is_as_main", False)
    return None if is_main else here.name


@contextmanager
def as_main() -> Iterator[None]:
    """This thread's calls belong to those of other ranks' main threads.

    For ranks of several jobs, which know nothing of each other's threads, on a group that one thread of each uses.
    """
    before = getattr(_here, "is_as_main", False)
    _here.is_as_main = True
    try:
        yield
    finally:
        _here.is_as_main = before


def _is_thread_of_autograd() -> bool:
    """Whether torch has made the calling thread, for a backward."""
    here = threading.current_thread()
    return in_backward() and isinstance(here, threading._DummyThread)
