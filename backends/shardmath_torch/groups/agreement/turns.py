"""Turns: the joint operations of a process group's ranks, one after another.

1. A turn is a vote and the work that was agreed on in it. Each rank counts the group's votes, and
   the counts are equal on all ranks. The count marks every message, so that bytes of one turn are
   never taken for another's.
2. One thread of a rank at a time holds the turn, since only their order pairs the calls of two
   ranks. The same holds for calls of several steps (`Turns.call`), even if some steps are torch's
   own collectives, which take no turn: steps of two threads never interleave.
3. A turn ends well, or by a refusal that all ranks know of (`Refused`). If Ctrl-C or an exception
   in a signal handler ends it, messages may still be in flight: the group is broken from then on,
   and later calls raise with the cause.

>>> turns = Turns()
>>> with turns.taken(patience=1.0):
...     turns.next(), turns.agreed()
...     turns.next(), turns.agreed()
(1, None)
(2, None)
"""

from __future__ import annotations

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
"""Longest part of a thread's name that a claim shows, in letters."""

LOOK_AGAIN_S = 0.001
"""Time between two tries to take a seat that another thread holds."""


class Refused(ExchangeError):
    """The error if a rank objects, or ranks intend different operations: raised on all ranks; nothing was done, and the
    group stays usable."""


class Unasked(NamedTuple):
    """An operation on which ranks agreed earlier, so that they do not vote on it.

    `mark` is a checksum of the claim they would have voted on: ranks that do different things never take each other's
    bytes. `patience` is the time to wait for a late rank, in seconds; None for the wire's default.
    """

    mark: int
    patience: float | None = None


@dataclass(eq=False)
class _Turn:
    """A thread's claim to a seat, alive exactly as long as the thread's call.

    Seats refer to it weakly: a seat is free again even if a signal handler raised just before it was given back.
    """

    thread: threading.Thread
    has_seat: bool = False


class _Seat:
    """A fair lock that survives exceptions: one thread at a time holds it, others wait in order of arrival.

    A signal handler may take it while it interrupts a thread that waits. So it is not made of locks, which the handler
    would wait for forever: each change is one operation on a dict, which Python does in one step.

    `activity` completes the sentence "thread has been in ... on this process group".
    """

    def __init__(self, activity: str) -> None:
        self._activity = activity
        # In order of arrival. The first is in the seat, or may take it.
        self._turns: dict[weakref.ref[_Turn], None] = {}

    def is_mine(self) -> bool:
        """Whether the calling thread holds this seat (a lock)."""
        current = threading.current_thread()
        turns = [reference() for reference in list(self._turns)]
        return any(turn and turn.has_seat and turn.thread is current for turn in turns)

    def take(self, turn: _Turn, patience: float) -> None:
        """Wait until this lock is free, and take it for `turn`, which stands for one call of one thread. Raises
        ExchangeError if that takes longer than `patience` seconds."""
        until = time.monotonic() + patience
        self._turns[weakref.ref(turn)] = None
        while (blocker := self._find_blocker(turn)) is not None:
            seconds_left = until - time.monotonic()
            if seconds_left <= 0:
                activity = f"thread {blocker.thread.name!r} has been in {self._activity}"
                what = f"{activity} on this process group for {patience:.1f} s"
                fix = "give each thread its own group, dist.new_group()"
                raise ExchangeError(f"{what}; {fix}")
            # Looking again needs no lock of Event or Condition, which an exception may leave held.
            time.sleep(min(seconds_left, LOOK_AGAIN_S))
        turn.has_seat = True

    def _find_blocker(self, turn: _Turn) -> _Turn | None:
        """The turn that `turn` has to wait for: the first in the queue, unless `turn` may take the seat in its place.

        A signal handler does not wait for the call that it interrupts, if that call waits itself: nobody else can take
        the seat before the handler returns.
        """
        for reference in list(self._turns):
            first = reference()
            if first is None:
                # An exception ended its call just before it was given back.
                self._turns.pop(reference, None)
            elif first.thread is turn.thread and not first.has_seat:
                return None
            else:
                return first
        return None

    def give_back(self, turn: _Turn) -> None:
        """Free this seat (a lock) if `turn`, one thread's call, holds it, and remove `turn` from the queue of calls
        that wait for the lock."""
        self._turns.pop(weakref.ref(turn), None)


class _Heard(threading.local):
    """Counters of the calling thread: turns refused, and turns not begun because a rank had left.

    `is_beside` is set in a thread that runs moves in the background of another. `replans` is the key of the mover that
    the thread's call is about to change, "" in other calls.
    """

    refusals = 0
    goodbyes = 0
    is_beside = False
    replans = ""


class Turns:
    """A record that this rank keeps of a process group: how many votes this rank has taken part in, which threads wait
    for their turn, and why the group is unusable ("" if it is usable).

    - `decided`: number of the latest vote recorded in the group's store (`commits`).
    - `beside`: the latest errand, a background move that runs after the errands before it; other calls wait for it.
    - `unasked`: the earlier agreement that stands for the current turn's vote, if there is one.
    - `told`: the exception now raised on this rank that all ranks know of, in the current call of several steps.
    - `broken`: why the group takes no more turns; "" while it does.
    - `host`: the rank that serves the group's store; None if no rank of the group does, UNTOLD before the first vote.
    - `nonce`: drawn by the first rank and sent in the first vote: entries that an earlier group left in the store
      are not taken for this group's.
    - `goodbyes`: None until this rank listens: in a joint group from its start, otherwise from the first mover on.
    - `give_up`: ends the current turn if a rank left before it; its caller holds `giving_up`.
    - `posting`: the thread that posts the group's messages, if its transport needs one (NCCL).
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
        self.posting = threads.CallThread()
        # Held during one operation; during a call of several steps; and during the local part of a step, in which the
        # thread may begin no operation, as the other ranks wait for its result.
        self._turn = _Seat("a call")
        self._call = _Seat("a call of several steps")
        self._step = _Seat("a step of a call")
        self.told: BaseException | None = None
        self._names: dict[str, weakref.ref[threading.Thread]] = {}
        self._beside_lock = threading.Lock()

    def next(self, event: Event = Event.VOTE) -> int:
        """Add 1 to the number of votes, since one begins now, and return the number. The kind of vote, `event`, is
        recorded: VOTE, or PROMISE for a vote with which a rank says that it has received all bytes of a move."""
        self.protocol.note(event)
        self.votes += 1
        return self.votes

    def agreed(self) -> None:
        """Record that the current vote has ended without an objection."""
        self.protocol.note(Event.AGREE)

    @property
    def latest(self) -> tuple[str, int, bool]:
        """The identity of the group's latest collective operation, equal on all ranks: a random text that identifies
        the group, the operation's number, and whether ranks voted on it. They do not vote on an operation that they
        agreed on earlier."""
        return self.nonce, self.votes, self.unasked is None

    @property
    def under_way(self) -> bool:
        """Whether this rank is in the middle of an operation of all ranks: either other ranks could be waiting for this
        rank, or this rank waits for the ranks' decision."""
        return self.protocol.counted_on

    def check_name(self, name: str) -> None:
        """Reserve `name` as the calling thread's name, since ranks match their calls by thread name. Raises
        ExchangeError if another live thread of this process has that name."""
        current = threading.current_thread()
        self._names = {known: ref for known, ref in self._names.items() if _is_alive(ref())}
        owner = self._names.setdefault(name, weakref.ref(current))()
        # A live thread that has not moved yet counts too: it may have moved first on another rank.
        namesakes = [thread for thread in threading.enumerate() if thread.name == current.name]
        has_twin = current.name == name and len(namesakes) > 1
        if owner is not current or has_twin:
            what = f"two threads of this rank are called {name!r}, and ranks pair calls by name"
            raise ExchangeError(f"{what}; give them different names, or each its own group")

    @contextmanager
    def alone(self, patience: float) -> Iterator[None]:
        """Make other calls of this process on the group wait during the `with` block, even if the group has become
        unusable. `patience` limits, in seconds, the wait for another thread's call before the block begins.

        Waits for background moves, too. Raises ExchangeError inside of a call, and if another thread keeps the turn.
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
        """Reserve the group for a collective operation in the `with` block, waiting at most `patience` seconds for
        other threads. Raises ExchangeError if the group is broken; `what` is the error's noun for the group, and
        `let_go` closes connections first.

        Also raises ExchangeError if another thread's operation takes longer. Whether the group is broken may be unknown
        if an exception ended the operation before in the middle; only then is `let_go` called.
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
        """Reserve the group during the `with` block for one call of this thread that has several collective steps.
        Waits at most `patience` seconds while another thread has such a block; this thread can nest them.

        Raises ExchangeError if another thread's call takes longer.
        """
        self._refuse_in_step()
        if self._call.is_mine():
            yield
            return
        turn = _Turn(threading.current_thread())
        try:
            self._call.take(turn, patience)
            # Only now: before, `told` may belong to another thread's call.
            self.told = None
            try:
                yield
            finally:
                self.told = None
        finally:
            self._call.give_back(turn)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark the `with` block as local work for whose result other ranks wait: if this thread begins an operation on
        the group in the block, the operation raises ExchangeError.

        Also raises ExchangeError inside of another step of this thread.
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
        """Announce that this rank leaves the group because of `cause`, and keep other calls off the group during the
        `with` block; later calls raise. Waits at most `patience` seconds for a call of another thread."""
        with self.alone(patience):
            self.part(WHOLE_GROUP, cause)
            self.broken = self.broken or cause
            if self.goodbyes is not None:
                self.goodbyes.end()
            self.posting.leave()
            yield

    def listen(
        self, store: Store, name: str, rank: int, ranks: Sequence[int], serves: bool
    ) -> None:
        """Start to watch `store` for notices, stored under `name`, of ranks that leave the group; a second call does
        nothing. `serves` says that the store's server runs in this process, so this rank leaves only when the other
        `ranks` have read its notice."""
        if self.goodbyes is not None or len(ranks) == 1:
            return
        self.goodbyes = Goodbyes(store, name, rank, ranks, serves)
        # The listening thread must not keep the group alive.
        turns = weakref.ref(self)
        self.goodbyes.listen(lambda: _give_up_if_left(turns()))

    def part(self, key: str, why: str) -> None:
        """Announce that this rank closes a mover (an object that moves tensors by a plan), for the reason `why`, unless
        the group is broken. The `key` identifies the mover on all ranks. Call `part` inside a `with` block of the
        method `alone`."""
        is_broken = self.under_way or self.broken
        if self.goodbyes is not None and not is_broken:
            self.goodbyes.say(key, self.votes, why)

    def put_beside(self, errand: threads.Errand) -> threads.Errand | None:
        """Record `errand`, a job that runs a move in the background, as the group's latest job, and return the previous
        one, or None. The job `errand` has to wait until the previous one has ended before it begins its move."""
        with self._beside_lock:
            previous, self.beside = self.beside, errand
        return previous

    def wait_for_beside(self) -> None:
        """Wait until the background moves have ended. Ranks match their calls by order, so a call made before that
        could be matched with another rank's background move."""
        if self.beside is not None and not self.heard.is_beside:
            self.beside.wait()

    def refuse_nested(self) -> None:
        """Raise ExchangeError if the calling thread is in an operation on the group: it would wait for itself."""
        if self._turn.is_mine():
            what = "this thread is in the middle of a move or a compile on this process group"
            where = "and made another call on it, as in a signal handler or progress callback"
            raise ExchangeError(f"{what}, {where}; call it after the first has ended")
        self._refuse_in_step()

    def _refuse_in_step(self) -> None:
        """Raise ExchangeError inside of a step, whose result the other ranks wait for."""
        if self._step.is_mine():
            what = "this thread is in the middle of a save, load or export on this process group"
            where = "and made another call on it, as in a progress callback"
            fix = "call it after the first has ended, or on another group"
            raise ExchangeError(f"{what}, {where}; {fix}")

    def _check_not_broken(self, what: str, let_go: Callable[[], None]) -> None:
        """Raise ExchangeError if the group is broken, and `what` with it."""
        # The call before ended neither well nor by a refusal: it was left.
        if self.under_way:
            self.protocol.note(Event.LEAVE)
        # The cause was lost if an exception came while another was being handled.
        if self.protocol.state is not State.IDLE and not self.broken:
            self.broken = (
                "an exception ended a move or a compile in the middle; make a new process group"
            )
            let_go()
        if self.broken:
            raise ExchangeError(f"this {what} is broken: {self.broken}")


def _give_up_if_left(turns: Turns | None) -> bool:
    """End the current turn if a rank said goodbye (left) before it; return whether more turns may come.

    The thread that listens for goodbyes calls this a few times per second, until it returns False. It does not keep the
    group alive: `turns` is None once the group is gone.
    """
    if turns is None or turns.broken:
        return False
    # The turn cannot end meanwhile: nobody may have left the mover of the next turn.
    with turns.giving_up:
        # Set only during a turn that goodbyes may end; `give_up` itself finds out whether a rank left.
        if turns.give_up is not None:
            turns.give_up()
    return True


def _is_alive(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


_turns: weakref.WeakKeyDictionary[Group, Turns] = weakref.WeakKeyDictionary()

_this_thread = threading.local()
"""`is_as_main`: whether the calling thread stands in for the main thread."""


def turns_of(group: Group) -> Turns:
    """Return the state of this process's operations on the group (`Turns`), the same object at each call."""
    return _turns.setdefault(group, Turns())


def in_thread(given: str | None) -> str:
    """Return " in thread NAME", words for the thread called `given` or, if None, for the calling thread; "" for the
    main thread."""
    # Autograd's threads are not Python's, and have no names.
    if given is None and _is_thread_of_autograd():
        return " in a thread of autograd"
    name = _name_thread() if given is None else given
    if name is not None and len(name) > LONGEST:
        # Long names that differ only in the omitted part stay different.
        checksum = zlib.crc32(name.encode(errors="backslashreplace"))
        name = f"{name[:LONGEST]}... {checksum:08x}"
    return "" if name is None else f" in thread {name!r}"


def check_thread(turns: Turns, given: str | None) -> None:
    """Reserve `given`, or the calling thread's name if None, for the calling thread; ranks match calls of threads that
    have the same name. Raises ExchangeError if another live thread of this process has it."""
    if given is None and _is_thread_of_autograd():
        return
    name = _name_thread() if given is None else given
    if name is not None:
        turns.check_name(name)


def _name_thread() -> str | None:
    """The calling thread's name, which may be empty; None for the main thread, which needs none."""
    current = threading.current_thread()
    is_main = current is threading.main_thread() or getattr(_this_thread, "is_as_main", False)
    return None if is_main else current.name


@contextmanager
def as_main() -> Iterator[None]:
    """Pair the calls of this thread in the `with` block with calls of other ranks' main threads.

    For ranks of several jobs, whose threads have unrelated names, on a group that one thread of each rank uses.
    """
    before = getattr(_this_thread, "is_as_main", False)
    _this_thread.is_as_main = True
    try:
        yield
    finally:
        _this_thread.is_as_main = before


def _is_thread_of_autograd() -> bool:
    """Whether the calling thread is torch's, made for a backward pass."""
    current = threading.current_thread()
    return in_backward() and isinstance(current, threading._DummyThread)
