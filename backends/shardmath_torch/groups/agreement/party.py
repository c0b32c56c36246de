"""Party: this rank in a process group, which votes, takes turns and reports failures.

1. Joint operations go through `together`, under the group's turn. If one ends by anything but its
   normal end or a refusal, the group is broken: here at once, on the others as the report arrives.
2. This rank reports the cause (`failure`) before it closes its connections. A process that was forked from it in
   the middle of a call, and leaves the call, does neither: the connections and the store are its parent's.
3. In a group's first vote ranks learn which of them serves the store.
4. A rank that left a mover (`goodbyes`) has not failed. Before a call votes, its goodbye raises an error here, and the
   group stays whole. In the middle of a call, its goodbye breaks the group, with the goodbye as the cause.
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

__all__ = ["Party", "is_time", "retake", "word_bad_time"]

FIX = "this process group is broken: make another, and continue in it by mover.replan(plan, group=...)"

GO_ON = "continue on the other ranks in another process group, by mover.replan(plan, group=...)"
"""The fix once a rank has left."""

LONGEST_S = 1e9
"""Longest wait in seconds: torch counts nanoseconds in 64 bits, which overflow soon after."""

NONCE_BITS = 32
"""Bits of a nonce that fit into a ballot."""

_T = TypeVar("_T")

Describe: TypeAlias = Callable[[PeerFailure, int | None], str]
"""Words for the work that a rank's failure stopped, from the failure and the failed rank."""


def is_time(timeout: object) -> TypeGuard[float]:
    """Whether `timeout` is a time to wait: a Python or NumPy number of seconds above 0 and at most LONGEST_S. The
    caller has to convert a NumPy number to a float before use.

    Timedelta and locks take no NumPy number, and the clock's time plus a float16 would be a float16.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | np.integer | np.floating):
        return False
    # A float16 cannot be compared with LONGEST_S, nor an int of any size become a float.
    seconds = float(timeout) if isinstance(timeout, np.floating) else timeout
    return bool(0 < seconds <= LONGEST_S)


def word_bad_time(timeout: object) -> str:
    """Return the error message for a timeout that `is_time` rejects."""
    fix = f"pass seconds > 0, at most {LONGEST_S:.0e}"
    return f"timeout={shown(timeout)} is not a time to wait; {fix}"


@dataclass(frozen=True)
class Party:
    """This rank as a member of a group, with its connections to the other ranks.

    `patience` is the time to wait for a peer, `grace` the time to find out who failed, both in seconds. `key` is one
    mover's, equal on all ranks.
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
        """The most seconds from when a call begins to wait for a failed rank until the call raises. This is the sum of
        the wait for that rank and of the time to find out which rank failed first."""
        # An extra fifth of the grace is for reporting the failure.
        return self.patience + 1.2 * self.grace

    def with_own_key(self) -> Party:
        """Return a copy of this Party for one mover (an object that moves tensors by a plan), with a `key` that
        identifies the mover in the group. The key is 1 + the number of votes (agreements of all ranks) so far, so it is
        equal on all ranks."""
        return replace(self, key=str(self.turns.votes + 1))

    def vote(
        self, mine: Ballot, patience: float | None = None, event: Event = Event.VOTE
    ) -> tuple[Ballot, ...]:
        """Send this rank's vote `mine` on an operation to all ranks, and return all ranks' votes in the order of the
        group's ranks. `event` is PROMISE for a vote after all bytes of a move have arrived on this rank, VOTE for any
        other; `patience` limits the wait, in seconds.

        Raises Refused if any rank objects, PeerFailure if one does not vote.
        """
        is_first = self.turns.host == UNTOLD
        if is_first:
            # The first vote also tells all ranks who serves the store, and the nonce for keys in it.
            nonce = secrets.randbits(NONCE_BITS)
            mine = mine._replace(serves_store=serves_store(self.group), nonce=nonce)
        self._begin(event)
        ballots = vote(self.wire, self.ranks, mine, patience)
        self.turns.agreed()
        if is_first:
            self._note_host(ballots)
        return ballots

    def _begin(self, event: Event = Event.VOTE) -> None:
        """Number the next vote or promise, and mark the following messages with its number."""
        # Counted before anything is posted: an interrupt from here on breaks the group.
        number = self.turns.next(event)
        unasked = self.turns.unasked
        if unasked is None:
            self.wire.begin(number)
            return
        # Ranks do not vote on this operation. Its mark, a checksum of what they would have voted on, keeps apart the
        # messages of ranks that do different things.
        # No mark on promises: those of different calls have to reach each other, to be compared.
        mark = 0 if event is Event.PROMISE else unasked.mark
        self.wire.begin(number + mark, unasked.patience)

    def go_on(self, unasked: Unasked) -> None:
        """Begin the operation `unasked` without a vote, since the ranks agreed on it earlier. From now on other ranks
        rely on this rank to take part."""
        self.turns.unasked = unasked
        self._begin()
        self.turns.agreed()

    def _note_host(self, ballots: Sequence[Ballot]) -> None:
        """Remember the rank that serves the store, and the first rank's nonce."""
        self.turns.nonce = f"{ballots[0].nonce:x}"
        voted = zip(self.ranks, ballots, strict=True)
        self.turns.host = next((rank for rank, ballot in voted if ballot.serves_store), None)

    def gather(self, record: bytes) -> list[bytes]:
        """Return a list of every rank's `record`, bytes of the same length on all ranks. Raises PeerFailure if a rank
        fails or does not answer in time.

        The call adds 1 to the group's number of votes.
        """
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
        """Wait up to `patience` seconds until no other thread uses the group, then run `act`, a collective operation,
        and return its result. Error messages call the group `what`, such as "mover", and say with `describe` which work
        a failed rank stopped.

        `act` begins with a vote, unless ranks agreed on such an operation before.

        Raises ExchangeError if other threads do not free the group within `patience` seconds (or the Party's patience,
        if longer), and any other exception that `act` raises.
        """
        compat.check_not_forked(self.group)
        # A rank that has closed a mover does not come to its replan either.
        party = replace(self, key=self.key or self.turns.heard.replans)
        try:
            with self.turns.taken(max(patience, self.patience), what, self._let_go):
                next_vote = self.turns.votes + 1
                goodbye = party._find_goodbye(next_vote)
                if goodbye:
                    # Counted for the block of `smt.commit` that this thread may be in.
                    self.turns.heard.goodbyes += 1
                    raise ExchangeError(goodbye)
                return party._guard(partial(party._watch, act), describe)
        except Refused as refusal:
            raise ExchangeError(str(refusal)) from None

    def _watch(self, act: Callable[[], _T]) -> _T:
        """Run `act`, watching for goodbyes. Called inside of the guard, which reports a Ctrl-C at any moment."""
        with self._watching_goodbyes():
            return act()

    @contextmanager
    def replanning(self) -> Iterator[None]:
        """During the `with` block, let a rank's goodbye from this Party's mover end every call of this thread on the
        group, even calls that belong to no mover yet."""
        heard = self.turns.heard
        heard.replans = self.key
        try:
            yield
        finally:
            heard.replans = ""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Make other calls of this process on the group wait during the `with` block.

        Raises ExchangeError inside of a call, as in a progress callback, and if other threads keep the turn.
        """
        compat.check_not_forked(self.group)
        with self.turns.alone(self.patience):
            yield

    def listen(self) -> None:
        """Start to watch the store for ranks that leave the group. Call it after the group's first vote."""
        turns = self.turns
        store = compat.store_of(self.group)
        if store is not None:
            serves = turns.host == self.rank
            turns.listen(store, turns.nonce, self.rank, self.ranks, serves)

    @contextmanager
    def _watching_goodbyes(self) -> Iterator[None]:
        """Have the listening thread break the group if a rank left before this turn."""

        def give_up() -> None:
            goodbye = self._find_goodbye(self.turns.votes)
            if goodbye and not self.turns.broken:
                self._break_by_goodbye(goodbye)

        self.turns.give_up = give_up
        try:
            yield
        finally:
            # Only for this turn: nobody may have left the mover of the next.
            with self.turns.giving_up:
                self.turns.give_up = None

    def _find_goodbye(self, number: int, blamed: int | None = None) -> str:
        """The goodbye of ranks that left before the group's vote `number`, as `Goodbyes.find` words it, and its fix; ""
        if none left.
        """
        goodbyes = self.turns.goodbyes
        goodbye = "" if goodbyes is None else goodbyes.find(self.key, number, blamed)
        return f"{goodbye}; {GO_ON}" if goodbye else ""

    def _guard(self, act: Callable[[], _T], describe: Describe) -> _T:
        """Run `act`; on any exception but a refusal, break the group and report the cause to the others."""
        try:
            return act()
        except PeerFailure as failure:
            # Another thread has given up for all threads, and reported why.
            if self.turns.broken:
                raise ExchangeError(self.turns.broken) from None
            goodbye = self._look_for_goodbye(failure)
            if goodbye:
                raise ExchangeError(goodbye) from None
            raise self.break_by(failure, describe) from failure
        except Refused:
            raise
        except BaseException as error:
            # Ctrl-C too: messages may be in flight, or this rank's leaving already reported.
            if self.turns.protocol.state is not State.IDLE:
                self.leave(error)
            if isinstance(error, Exception) and not compat.is_there(self.group):
                ended = compat.word_gone(self.group)
                what = f"the process group was {ended} while a call on it was in flight"
                raise ExchangeError(
                    f"{what}; wait for background moves before you destroy it"
                ) from error
            raise

    def _look_for_goodbye(self, failure: PeerFailure) -> str:
        """Break the group and return the goodbye if a rank left before this turn; "" if none did."""
        goodbyes = self.turns.goodbyes
        if goodbyes is None or failure.rank == self.rank:
            return ""
        number = self.turns.votes
        if not self._find_goodbye(number, failure.rank):
            # `timeout` has a fifth of the grace for this.
            goodbyes.look(self.grace / 5)
        goodbye = self._find_goodbye(number, failure.rank)
        if goodbye:
            self._break_by_goodbye(goodbye)
        return goodbye

    def _break_by_goodbye(self, goodbye: str) -> None:
        """Break the group and report another rank's goodbye as the cause, so that nobody takes this rank for failed."""
        self.turns.broken = goodbye
        try:
            mine = Report(None, None, goodbye, is_goodbye=True)
            self._make_detector().report(mine, self._let_go)
        except BaseException:
            self._let_go()
            raise

    def answer_for(self, act: Callable[[], None]) -> None:
        """Run `act`, for which other ranks wait; turn any error but a PeerFailure into a PeerFailure that blames this
        rank."""
        try:
            act()
        except PeerFailure:
            raise
        except Exception as error:
            raise PeerFailure(self.rank, word_error(error)) from error

    def leave(self, error: BaseException) -> None:
        """Make the group unusable for further calls, since `error` ended a call on it in the middle, and report this
        cause to the other ranks."""
        self.give_up(f"it was left in the middle by {word_error(error)}")

    def give_up(self, cause: str) -> None:
        """Make the group unusable because this rank has failed, and report the `cause` to the other ranks. Their
        reports are not needed, since the cause is known here."""
        # First of all: a second Ctrl-C during the report must find the group broken.
        self.turns.broken = f"rank {self.rank} (this one) failed: {_word_fix(cause)}"
        try:
            mine = Report(self.rank, None, cause)
            reporting = self._make_detector().report(mine, self._let_go)
            # Others read the store that this process serves, which may be about to end.
            if self.turns.host == self.rank:
                reporting.join(self.grace / 4)  # not for all the grace: this rank needs no report
        except BaseException:
            # Even after an interrupt nothing may write into the caller's memory from now on.
            self._let_go()
            raise

    def break_by(self, failure: PeerFailure, describe: Describe) -> ExchangeError:
        """Make the group unusable after a peer's `failure`, and return the error to raise. Its text tells which rank
        failed first, if that is known, and contains the text that `describe` returns about the work that was
        stopped."""
        # Reading the reports takes seconds; meanwhile a signal handler or another thread may call.
        self.turns.broken = failure.cause
        try:
            text = self._explain(failure, describe)
        except BaseException:
            self._let_go()
            raise
        self.turns.broken = text
        return ExchangeError(text)

    def _explain(self, failure: PeerFailure, describe: Describe) -> str:
        """The error's text: who failed first, if the reports tell, and the work that this stopped."""
        own_report = Report(failure.rank, failure.tensor, failure.cause)
        detector = self._make_detector()
        first_failed, report = detector.detect(own_report, self._let_go)
        if report.is_goodbye:
            return report.cause
        if first_failed == self.rank:
            what = f"rank {first_failed} (this one) failed, or the others stopped waiting for it"
            return f"{what}: {_word_fix(report.cause)}"
        reported = PeerFailure(report.blames, report.cause, report.tensor)
        if first_failed is not None:
            work = describe(reported, first_failed)
            return f"rank {first_failed} failed while {work}: {_word_fix(report.cause)}"
        peer = "a rank" if report.blames is None else f"rank {report.blames}"
        work = describe(reported, report.blames)
        what = f"the exchange with {peer} broke while {work}: {report.cause}"
        why = self._explain_silence(detector)
        return f"{what}; who failed first is not known{why}; {FIX}"

    def _explain_silence(self, detector: FailureDetector) -> str:
        """Why no reports could be read; "" if the store answered, without a rank to blame."""
        host = self.turns.host
        if detector.answered or host is None:
            return ""
        if host == UNTOLD:
            return ", since the group's store does not answer"
        return f", since rank {host}, whose process serves the group's store, does not answer"

    def _let_go(self) -> None:
        """Cancel the messages in flight, unless a process that was forked from this rank calls this: they are the
        rank's, which goes on."""
        if not compat.is_inherited(self.group):
            self.wire.abandon()

    def _make_detector(self) -> FailureDetector:
        """A detector that reads the reports of this group's ranks; in a process that was forked from this rank, one
        without a store, which reports nothing."""
        store = None if compat.is_inherited(self.group) else compat.store_of(self.group)
        turns = self.turns
        return FailureDetector(store, turns.host, turns.nonce, self.rank, self.ranks, self.grace)


def retake(find: Callable[[], Party], take: Callable[[Party, Callable[[], None]], _T]) -> _T:
    """Return `take(party, begin)`, with the Party that `find` returns, such as a mover's. `take` takes a turn of that
    Party and calls `begin` first of all in it. If `find` returns another Party by then, since another thread has
    replanned the mover meanwhile, `begin` raises, and `take` is called again with that one.
    """
    while True:
        party = find()
        has_begun = False

        def begin(party: Party = party) -> None:
            nonlocal has_begun
            if find() is not party:
                raise ExchangeError(
                    "another thread has replanned the mover meanwhile, and this is called again"
                )
            has_begun = True

        try:
            return take(party, begin)
        except ExchangeError:
            # Also of errors of the former Party's group, which may be broken: they are nobody's now.
            if has_begun or find() is party:
                raise


def _word_fix(cause: str) -> str:
    """The cause with its fix, and the fix for the group."""
    # A late rank may have made another call, or none.
    calls = ""
    if cause == LATE:
        calls = "; make the same calls on it as on the other ranks, or pass a longer timeout="
    return f"{cause}{calls}; {FIX}"
