"""This rank in a process group: how it votes, takes its turn, and says what broke.

1. What ranks do together goes through `together`: under the group's turn, and any way out of it but
   its end or a refusal breaks the group, on this rank at once and on the others as they are told.
2. Others are told why (`failure`) before this rank lets go of its connections.
3. In a group's first vote ranks tell each other who serves its store, so that they know whom to ask.
4. A rank that has left a mover (`goodbyes`) has not failed. Before a call votes, that is an error here, and the group
   is whole. Whoever hears it in the middle of a call breaks the group, and says why.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeGuard, TypeVar

import numpy as np

from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown, word_error
from shardmath.plans.protocol import Event, State
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot, vote
from shardmath_torch.groups.agreement.failure import UNTOLD, FailureDetector, Report
from shardmath_torch.groups.agreement.turns import Refused, Turns, Unasked
from shardmath_torch.groups.agreement.wire import LATE, PeerFailure, Wire
from shardmath_torch.groups.stores import serves_store

__all__ = ["Party", "is_time", "word_bad_time"]

FIX = (
    "this process group is broken: make a new one, in which movers go on by replan(plan, group=...)"
)

GO_ON = "the others go on in another process group, by replan(plan, group=...)"
"""What to do once a rank has left."""

LONGEST_S = 1e9
"""Longest wait: what torch makes of seconds, nanoseconds in 64 bits, ends soon after."""

NONCE_BITS = 32
"""What a ballot has room for."""

_T = TypeVar("_T")

Describe: TypeAlias = Callable[[PeerFailure, int | None], str]
"""What the failure of a rank has stopped, in words."""


def is_time(timeout: object) -> TypeGuard[float]:
    """Whether that can be waited for: seconds above 0 and up to LONGEST_S."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | np.number):
        return False
    return bool(0 < timeout <= LONGEST_S)


def word_bad_time(timeout: object) -> str:
    """What to say of a timeout that `is_time` refuses."""
    fix = f"pass seconds > 0, at most {LONGEST_S:.0e}"
    return f"timeout={shown(timeout)} is not a time to wait; {fix}"


@dataclass(frozen=True)
class Party:
    """This rank in a group, and how it reaches the others.

    `patience` and `grace` are in seconds: to wait for a peer, and to find out who failed. `key` is
    the same on all ranks, and of one mover alone.
    """

    group: compat.Group
    rank: int
    ranks: tuple[int, ...]
    wire: Wire
    turns: Turns
    patience: float
    grace: float
    key: str = ""

    @property
    def timeout(self) -> float:
        """Seconds for both."""
        # A fifth of the grace is for what comes after it.
        return self.patience + 1.2 * self.grace

    def with_own_key(self) -> Party:
        """The party under a key of its own: ranks have voted as often, so they find the same one."""
        return replace(self, key=str(self.turns.votes + 1))

    def vote(
        self, mine: Ballot, patience: float | None = None, event: Event = Event.VOTE
    ) -> tuple[Ballot, ...]:
        """Everybody's ballots; `event` says whether they are votes or promises.

        Raises Refused if any rank objects, PeerFailure if one does not vote.
        """
        is_first = self.turns.host == UNTOLD
        if is_first:
            nonce = secrets.randbits(NONCE_BITS)
            mine = mine._replace(serves_store=serves_store(self.group), nonce=nonce)
        self._begin(event)
        ballots = vote(self.wire, self.ranks, mine, patience)
        self.turns.agreed()
        if is_first:
            self._note_host(ballots)
        return ballots

    def _begin(self, event: Event = Event.VOTE) -> None:
        """What is posted from now on is of the next vote or promise."""
        # Counted before anything is posted: whoever interrupts from here on breaks the group.
        number = self.turns.next(event)
        unasked = self.turns.unasked
        if unasked is None:
            self.wire.begin(number)
            return
        # Promises are compared, so those of different calls may meet.
        mark = 0 if event is Event.PROMISE else unasked.mark
        self.wire.begin(number + mark, unasked.patience)

    def go_on(self, unasked: Unasked) -> None:
        """Begin what ranks have agreed on before: nobody is asked, and others count on this rank."""
        self.turns.unasked = unasked
        self._begin()
        self.turns.agreed()

    def _note_host(self, ballots: Sequence[Ballot]) -> None:
        """Remember the rank that serves the store, and what the first rank has drawn."""
        self.turns.nonce = f"{ballots[0].nonce:x}"
        hosts = []
        for rank, ballot in zip(self.ranks, ballots, strict=True):
            if ballot.serves_store:
                hosts.append(rank)
        self.turns.host = hosts[0] if hosts else None

    def gather(self, record: bytes) -> list[bytes]:
        """Every rank's record, all of one size: a vote that nobody can object to. Raises PeerFailure."""
        self._begin()
        records = self.wire.gather(record)
        self.turns.agreed()
        return records

    def together(
        self,
        act: Callable[[], _T],
        describe: Describe,
        what: str = "group",
        patience: float = 0.0,
    ) -> _T:
        """What `act` gives, which votes first; `what` needs it. `describe` says what a failure of a rank stopped.

        Waits for other threads' turns at least `patience` seconds.

        Raises ExchangeError, and whatever else `act` is left by.
        """
        compat.check_not_forked(self.group)
        try:
            with self.turns.taken(max(patience, self.patience), what, self.wire.abandon):
                left = self._find_left(self.turns.votes + 1)
                if left:
                    self.turns.heard.goodbyes += 1
                    raise ExchangeError(left)
                return self._guard(partial(self._hear_within, act), describe)
        except Refused as refusal:
            raise ExchangeError(str(refusal)) from None

    def _hear_within(self, act: Callable[[], _T]) -> _T:
        """Act, and hear of ranks that have left: inside of the guard, which tells others of a Ctrl-C at any moment."""
        with self._hearing():
            return act()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What this rank does by itself to what calls on the group use: none goes on here meanwhile.

        Raises ExchangeError inside of a call, as from a progress callback, and where other threads keep the turn.
        """
        compat.check_not_forked(self.group)
        with self.turns.alone(self.patience):
            yield

    def listen(self) -> None:
        """Hear from now on which ranks leave. After the group's first vote."""
        turns = self.turns
        store = compat.store_of(self.group)
        if store is not None:
            serves = turns.host == self.rank
            turns.listen(store, turns.nonce, self.rank, self.ranks, serves)

    @contextmanager
    def _hearing(self) -> Iterator[None]:
        """Give up, from the thread that listens, where a rank has left before the turn."""

        def give_up() -> None:
            left = self._find_left(self.turns.votes)
            if left and not self.turns.broken:
                self._pass_on(left)

        self.turns.give_up = give_up
        try:
            yield
        finally:
            # Whoever gives up ends with the turn: the next may be of a mover that nobody has left.
            with self.turns.giving_up:
                self.turns.give_up = None

    def _find_left(self, number: int, blamed: int | None = None) -> str:
        """As `Goodbyes.find` has it for a turn of this party whose latest vote has that number, with what to do."""
        goodbyes = self.turns.goodbyes
        left = "" if goodbyes is None else goodbyes.find(self.key, number, blamed)
        return f"{left}; {GO_ON}" if left else ""

    def _guard(self, act: Callable[[], _T], describe: Describe) -> _T:
        """What `act` gives; the group is broken, and others are told, where it is left otherwise."""
        try:
            return act()
        except PeerFailure as failure:
            # Another thread has given up for all of them, and told the others why.
            if self.turns.broken:
                raise ExchangeError(self.turns.broken) from None
            left = self._hear_left(failure)
            if left:
                raise ExchangeError(left) from None
            raise self.break_by(failure, describe) from failure
        except Refused:
            raise
        except BaseException as error:
            # Ctrl-C too: messages may be on their way, or others told that this rank has left.
            if self.turns.protocol.state is not State.IDLE:
                self.leave(error)
            if isinstance(error, Exception) and not compat.is_there(self.group):
                gone = compat.word_gone(self.group)
                what = f"the process group was {gone} while a call on it was under way"
                raise ExchangeError(f"{what}; wait for moves beside before") from error
            raise

    def _hear_left(self, failure: PeerFailure) -> str:
        """Where a rank has left before this turn, that, and the group is broken; "" where none has."""
        goodbyes = self.turns.goodbyes
        if goodbyes is None or failure.rank == self.rank:
            return ""
        number = self.turns.votes
        if not self._find_left(number, failure.rank):
            # What the grace leaves for telling the caller.
            goodbyes.look(self.grace / 5)
        left = self._find_left(number, failure.rank)
        if left:
            self._pass_on(left)
        return left

    def _pass_on(self, left: str) -> None:
        """Break the group, since a rank has left: the others hear that, and do not take this one for failed."""
        self.turns.broken = left
        try:
            mine = Report(None, None, left, is_goodbye=True)
            self._make_detector().report(mine, self.wire.abandon)
        except BaseException:
            self.wire.abandon()
            raise

    def answer_for(self, act: Callable[[], None]) -> None:
        """What goes wrong here once others rely on this rank is this rank's failure, and they are told."""
        try:
            act()
        except PeerFailure:
            raise
        except Exception as error:
            raise PeerFailure(self.rank, word_error(error)) from error

    def leave(self, error: BaseException) -> None:
        """Break the group, which this exception has left in the middle."""
        self.give_up(f"it was left in the middle by {word_error(error)}")

    def give_up(self, cause: str) -> None:
        """Break the group: tell the others that this rank gives up, and why; do not ask them."""
        # First of all: a second Ctrl-C while others are told must find the group broken.
        self.turns.broken = f"rank {self.rank} (this one) failed: {_word_fix(cause)}"
        try:
            mine = Report(self.rank, None, cause)
            asking = self._make_detector().report(mine, self.wire.abandon)
            # Others read the store that this process serves, which may be about to end.
            if self.turns.host == self.rank:
                asking.join(self.grace / 4)
        except BaseException:
            # Whatever comes in between, nothing may write into the caller's memory from now on.
            self.wire.abandon()
            raise

    def break_by(self, failure: PeerFailure, describe: Describe) -> ExchangeError:
        """What to tell the caller when a peer failed: asks the others who was first."""
        # Asking takes seconds; meanwhile a signal handler or another thread may call.
        self.turns.broken = failure.cause
        try:
            text = self._explain(failure, describe)
        except BaseException:
            self.wire.abandon()
            raise
        self.turns.broken = text
        return ExchangeError(text)

    def _explain(self, failure: PeerFailure, describe: Describe) -> str:
        """Who failed first, as far as the ranks can tell, and what that stopped."""
        mine = Report(failure.rank, failure.tensor, failure.cause)
        detector = self._make_detector()
        first, report = detector.detect(mine, self.wire.abandon)
        if report.is_goodbye:
            return report.cause
        if first == self.rank:
            what = f"rank {first} (this one) failed or was given up by the others"
            return f"{what}: {_word_fix(report.cause)}"
        told = PeerFailure(report.blames, report.cause, report.tensor)
        if first is not None:
            return f"rank {first} failed while {describe(told, first)}: {_word_fix(report.cause)}"
        seen = "a rank" if report.blames is None else f"rank {report.blames}"
        stopped = describe(told, report.blames)
        what = f"the exchange with {seen} broke while {stopped}: {report.cause}"
        why = self._explain_silence(detector)
        return f"{what}; who failed first is not known{why}; {FIX}"

    def _explain_silence(self, detector: FailureDetector) -> str:
        """Why nobody could be asked; "" where somebody was, and nobody knew."""
        host = self.turns.host
        if detector.answered or host is None:
            return ""
        if host == UNTOLD:
            return ", since the group's store does not answer"
        return f", since rank {host}, whose process serves the group's store, does not answer"

    def _make_detector(self) -> FailureDetector:
        """One that asks this group's ranks."""
        store = compat.store_of(self.group)
        turns = self.turns
        return FailureDetector(store, turns.host, turns.nonce, self.rank, self.ranks, self.grace)


def _word_fix(cause: str) -> str:
    """The cause, and what to do about it and about the group."""
    # Who is late may have made another call, and often has none to make.
    calls = "; see that it makes the calls that the others make" if cause == LATE else ""
    return f"{cause}{calls}; {FIX}"
