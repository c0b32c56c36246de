"""Boards: messages between ranks of a trainer and its engines about their updates, in the store of their group.

1. Place 0 calls the engines, so it reports of each step whether it succeeded; the others read that. Before weights
   move, every rank reports whether it is ready.
2. The store ends with place 0's process, which may end once it has returned from an update, or raised: it waits until
   the others have read its last report.
3. Other ranks wait a little longer than place 0 may take, so that no rank is blamed for a late place 0.
4. A rank that has left the group takes part in no later step, so nobody waits for it.
5. A store whose process was stopped, or whose machine is cut off, never answers, and torch waits for it forever and
   ignores Ctrl-C. So requests to the store are made on a separate thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from shardmath.base.errors import ExchangeError
from shardmath.base.text import plural
from shardmath_torch.groups.agreement import notes, threads
from shardmath_torch.groups.agreement.naming import word_objection
from shardmath_torch.groups.compat import Store
from shardmath_torch.groups.joint.rendezvous import LEFT

__all__ = ["HEARD_S", "WAITED_FOR", "Board", "name_rank"]

_T = TypeVar("_T")

WAITED_FOR = ("start", "begin", "end", "finish")
"""The steps of an update whose results others await from place 0."""

LOOK_AGAIN_S = 0.005
"""The seconds between two looks at the store, while ranks have not answered."""

MEET_AGAIN = "start that rank again if it ended, and connect again by trainer_init"

HEARD_S = 5.0
"""The seconds, at most, that a rank waits for others to read what went wrong."""

ANSWER_S = 1.0
"""The seconds that the store has to answer a rank that posts something: others may wait for that rank."""

FIRST = "trainer rank 0"
"""The words for the rank at place 0."""

LATER_S = 2 * HEARD_S
"""How many seconds longer ranks wait for place 0 than place 0 waits for others and engines."""


@dataclass(frozen=True)
class Board:
    """A board of messages in the key-value store `store`, through which all ranks of trainer and engines coordinate
    updates. `size` is the number of these ranks; this rank has number `place` among them, counted from 0, with the
    trainer's ranks first.
    """

    store: Store
    place: int
    trainers: int
    size: int
    timeout: float

    def relay(self, what: str, act: Callable[[], None]) -> None:
        """Call `act` on the trainer's first rank, while the trainer's other ranks wait until it has ended. `what` is
        the name of this step of a weight update.

        Raises ExchangeError on all of the trainer's ranks if `act` fails.
        """
        fault = self._hear(what) if self.place else self._act(what, act)
        if fault:
            raise ExchangeError(f"{FIRST} could not {what}: {fault}")

    def _act(self, what: str, act: Callable[[], None]) -> str:
        """Call `act`, post its error as the result of the step `what`, and return it; "" if it succeeds."""
        with self._posting_errors(what):
            fault = _try(act)
            self._say(what, fault, range(self.trainers))
        return fault

    @contextmanager
    def _posting_errors(self, what: str) -> Iterator[None]:
        """At place 0, post an exception that ends the `with` block as the result of the step `what`, unless one is
        posted.
        """
        try:
            yield
        except BaseException as error:
            self.give_up([what], error)
            raise

    def give_up(self, whats: Iterable[str], error: BaseException) -> None:
        """On the first rank, post `error` as the result of each step named in `whats` that has no result yet, so that
        no rank waits for it. On other ranks, do nothing.
        """
        if self.place:
            return
        with suppress(RuntimeError):
            for what in whats:
                if notes.read(self.store, what) is None:
                    self.store.set(what, word_objection(error))

    def finish(
        self, what: str, act: Callable[[], None], find_failure: Callable[[], str] = str
    ) -> None:
        """Run the last step of an update, named `what`, by calling `act` on the first rank. That rank then waits until
        the trainer's other ranks have read the result, or until `find_failure()` returns an error.

        `find_failure()` is called at place 0, and returns why a rank will not read the result, "" if all will (the
        default: `str()` is ""). Raises ExchangeError at place 0 if a rank does not read it in time, or has left.
        """
        self.relay(what, act)
        self._confirm(what)
        if self.place == 0:
            has_read = partial(self._has_read, what)

            def word_failure() -> str:
                return find_failure() or self._word_left(range(self.trainers), has_read)

            late = _await(
                has_read, range(self.trainers), self.timeout, lambda: word_failure() != ""
            )
            if late:
                fix = "start those again that have ended, or pass TrainerInfo a longer timeout"
                raise ExchangeError(word_failure() or f"{self._word_late(what, late)}; {fix}")

    def vote(self, what: str, fault: str) -> None:
        """Post this rank's vote on the step `what`: `fault`, the error that prevents it, or "" if it is ready."""
        self._post(f"{what}/{self.place}", fault, self.timeout)

    def decline(self, what: str, error: BaseException) -> None:
        """Post `error` as this rank's vote on the step `what`, and on the first rank also as the step's result, so that
        no rank waits.
        """
        objection = word_objection(error)
        # If place 0 is gone, nobody waits.
        with suppress(ExchangeError):
            if self.place == 0:
                self._post(what, f"{FIRST} could not {what}: {objection}")
            self._post(f"{what}/{self.place}", objection)
        # Another error, such as a Ctrl-C, leaves the step, so that this rank does not read its result.
        if not isinstance(error, ExchangeError):
            self.excuse(what)

    def excuse(self, what: str) -> None:
        """Tell the first rank not to wait for this rank to read the result of the step `what` of a weight update."""
        self._confirm(what)

    def decide(self, what: str, fail_early: Callable[[], str] = str) -> str:
        """Return the first rank's decision on the step `what`: "" if all ranks have voted to be ready, else the errors,
        as text. The first rank stops waiting for votes when a rank votes against, or `fail_early()` returns an error.

        `fail_early()` says at place 0 why some will not come, "" if they will (the default: `str()` is "").
        """
        return self._hear(what) if self.place else self._decide(what, fail_early)

    def _decide(self, what: str, fail_early: Callable[[], str]) -> str:
        """At place 0: wait for all votes, or for a reason not to; post the decision, and return it ("" for yes)."""
        votes: dict[int, str] = {}

        def has_voted(place: int) -> bool:
            vote = notes.read(self.store, f"{what}/{place}")
            if vote is not None:
                votes[place] = vote
            return vote is not None

        def word_faults() -> str:
            # First, since it also puts into `votes` the errors of ranks that voted, and then left.
            gone = self._word_left(range(self.size), has_voted)
            faults = [
                f"{name_rank(place, self.trainers)} could not {what}: {votes[place]}"
                for place in sorted(votes)
                if votes[place]
            ]
            return "\n".join(faults) or fail_early() or gone

        with self._posting_errors(what):
            late = _await(has_voted, range(self.size), self.timeout, lambda: word_faults() != "")
            fault = word_faults()
            if late and not fault:
                fix = (
                    "call send_weights equally often on all ranks, or connect again by trainer_init"
                )
                fault = f"{self._word_late(what, late)}; {fix}"
            # Who is to read a refusal: all who voted, and late trainers, which will come; late workers may never.
            self._say(what, fault, votes.keys() | set(range(self.trainers)))
        return fault

    def find(self, what: str, seconds: float = ANSWER_S) -> str:
        """Return the error that a rank has posted for the step `what`, "" if none has. Raises ExchangeError if the
        store is gone, or silent for `seconds`.
        """
        try:
            return self._read(what, seconds) or ""
        except RuntimeError as error:
            why = f"{FIRST} left, has stopped or is gone: {error}"
            raise ExchangeError(f"{why}; {MEET_AGAIN}") from error

    def forget(self, numbers: Iterable[int]) -> None:
        """Delete from the store all messages about the updates with these `numbers`, which no rank needs any more."""
        for number in numbers:
            for step in (*WAITED_FOR, "fail"):
                what = f"{step} update {number}"
                self.store.delete_key(what)
                for place in range(self.size):
                    self.store.delete_key(f"{what}/heard/{place}")
            for place in range(self.size):
                self.store.delete_key(f"begin update {number}/{place}")

    def break_off(self, what: str, why: str, leave: Callable[[], None]) -> str:
        """After a failure, disconnect this rank by calling `leave`. If `why`, its own reason for the failure, is not
        "", first post it to other ranks under the name `what`, and return ""; otherwise return the reason that another
        rank has posted there.

        `why` is "" for an error that other ranks have caused.
        """
        reason = ""
        try:
            # Place 0 may be gone, and the store with it.
            with suppress(RuntimeError):
                if why:
                    self._write(what, f"{name_rank(self.place, self.trainers)}: {why}")
                # Read even if this rank wrote it: the answer shows that others find it before this rank leaves.
                report = self._read(what) or ""
                if not why:
                    reason = report
                self._confirm(what)
        finally:
            # Also after another Ctrl-C: nobody may go on with this rank.
            leave()
        if self.place == 0:
            # Others notice that this rank has left, and read the reason; this process, which serves the store, waits.
            with suppress(RuntimeError):
                self._await_readers(what, range(1, self.size), HEARD_S)
        return reason

    def _find_left(self) -> set[int]:
        """The places that have left the group, as after an update that failed there."""
        return set(map(int, notes.read_lines(self.store, LEFT)))

    def _word_left(self, places: Iterable[int], has_answered: Callable[[int], bool]) -> str:
        """Words for the ranks among `places` that left the group without an answer; "" if none did."""
        left = sorted(self._find_left() & set(places))
        # Answers are looked for after departures, since a rank may answer and then leave.
        silent = [place for place in left if not has_answered(place)]
        if not silent:
            return ""
        return _word_gone(self._name_ranks(silent))

    def _word_late(self, what: str, late: set[int]) -> str:
        """The error for places that did not vote, or read, in time."""
        who = self._name_ranks(sorted(late))
        return f"{plural(late, 'rank')} did not {what} in {self.timeout:g} s: {who}"

    def _name_ranks(self, places: Iterable[int]) -> str:
        return ", ".join(name_rank(place, self.trainers) for place in places)

    def _say(self, what: str, fault: str, readers: Iterable[int]) -> None:
        """Post `fault`, "" for success, as place 0's result of a step; after a fault wait until `readers` read it."""
        self._post(what, fault)
        # After a fault this process may end, and with it the store, so it waits for those who have to read.
        if fault:
            self._confirm(what)
            self._await_readers(what, readers, HEARD_S)

    def _post(self, key: str, text: str, seconds: float = ANSWER_S) -> None:
        """Write `text` to the store under `key`. Raises ExchangeError if the store is gone, or does not answer."""
        try:
            self._write(key, text, seconds)
        except RuntimeError as error:
            what = (
                f"{FIRST} left, has stopped or is gone, as {name_rank(self.place, self.trainers)}"
            )
            raise ExchangeError(f"{what} was to report {key!r}: {error}; {MEET_AGAIN}") from error

    def _hear(self, what: str) -> str:
        """Wait for place 0's result of a step: an error, or "" for success. Raises ExchangeError if none comes."""
        seconds = self.timeout + LATER_S
        until = time.monotonic() + seconds
        try:
            while (report := self._look(what, until - time.monotonic())) is None:
                if time.monotonic() > until:
                    fix = "start it again if it hangs, or pass TrainerInfo a longer timeout"
                    raise ExchangeError(f"{FIRST} did not {what} in {seconds:g} s; {fix}")
                time.sleep(LOOK_AGAIN_S)
        except RuntimeError as error:
            raise ExchangeError(
                f"{FIRST} left, has stopped or is gone, as it was to {what}: {error}; {MEET_AGAIN}"
            ) from error
        if report:  # an error: place 0 waits until it has been read
            self._confirm(what)
        return report

    def _look(self, what: str, seconds: float) -> str | None:
        """Return place 0's result of a step, or None.

        Raises ExchangeError if place 0 has left without one, RuntimeError if the store does not answer.
        """

        def look() -> tuple[bool, str | None]:
            # In this order: place 0 may report, and then leave.
            return 0 in self._find_left(), notes.read(self.store, what)

        has_left, report = self._ask(look, seconds)
        if has_left and report is None:
            raise ExchangeError(_word_gone(FIRST))
        return report

    def _confirm(self, what: str) -> None:
        """Mark the result of the step `what` as read by this rank."""
        # If place 0 is gone, it does not wait for that.
        with suppress(RuntimeError):
            self._write(f"{what}/heard/{self.place}", "yes")

    def _read(self, key: str, seconds: float = ANSWER_S) -> str | None:
        """Return the store's text under `key`, or None. Raises RuntimeError if the store does not answer."""
        return self._ask(partial(notes.read, self.store, key), seconds)

    def _write(self, key: str, text: str, seconds: float = ANSWER_S) -> None:
        """Write `text` to the store under `key`. Raises RuntimeError if the store is gone, or does not answer."""
        self._ask(partial(self.store.set, key, text), seconds)

    def _ask(self, act: Callable[[], _T], seconds: float) -> _T:
        """Call the store, within `seconds` except at place 0, which serves it and must keep the order of calls."""
        return threads.within(max(ANSWER_S, seconds), act) if self.place else act()

    def _await_readers(self, what: str, places: Iterable[int], seconds: float) -> None:
        """Wait, at most `seconds`, until `places` have read a result, or have left."""

        def has_read_or_left(place: int) -> bool:
            return self._has_read(what, place) or place in self._find_left()

        _await(has_read_or_left, places, seconds)

    def _has_read(self, what: str, place: int) -> bool:
        """Whether a place has read the result of the step `what`. Called at place 0."""
        if notes.read(self.store, f"{what}/heard/{place}") is not None:
            return True
        # The last place to leave clears the store, of place 0's mark too; and a place leaves only after it has read.
        return notes.read(self.store, f"{what}/heard/{self.place}") is None


def name_rank(place: int, trainers: int) -> str:
    """Return words for the rank at `place` of a group in which the first `trainers` places are the trainer's ranks, and
    the others the workers of its engines, which are counted over all engines from 0.

    >>> name_rank(1, trainers=2), name_rank(2, trainers=2)
    ('trainer rank 1', 'worker 0')
    """
    return f"trainer rank {place}" if place < trainers else f"worker {place - trainers}"


def _word_gone(ranks: str) -> str:
    """The error for ranks that left the group, with what may have made them leave."""
    why = "by shutdown(), after an update that failed, or to join another trainer"
    return f"{ranks} has left the group, {why}; connect again by trainer_init"


def _try(act: Callable[[], None]) -> str:
    """Call `act`, and return its error as text, since other ranks wait for this rank's report; "" if it succeeds."""
    try:
        act()
    except Exception as error:
        return word_objection(error)
    return ""


def _await(
    is_there: Callable[[int], bool],
    places: Iterable[int],
    seconds: float,
    is_over: Callable[[], bool] = bool,
) -> set[int]:
    """Wait until `is_there` is true of all places; return those of which it is not in time, or once `is_over`. The
    default, `bool()`, is False.
    """
    until = time.monotonic() + seconds
    awaited = set(places)
    while awaited := {place for place in awaited if not is_there(place)}:
        if is_over() or time.monotonic() > until:
            break
        time.sleep(LOOK_AGAIN_S)
    return awaited
