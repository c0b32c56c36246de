"""Links: what ranks have of each other once they have met, and how each goes through an update.

1. What goes wrong on one rank is an error on all, that says whose it is.
2. A rank that fails while weights may move leaves the group: others notice that at once, and need not wait for their
   time limit.
3. The outcome of an update at this rank is one value (`update.Update`), even if it fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of, word_error
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import gather
from shardmath_torch.groups.agreement.naming import attempt, word_objection
from shardmath_vllm.board import WAITED_FOR, Board, name_rank
from shardmath_vllm.update import Phase, Step, Update

__all__ = ["Life", "Link", "NotJoinedError", "together"]

_T = TypeVar("_T")


def together(
    group: dist.ProcessGroup | None, what: str, act: Callable[[], _T], trainers: int | None = None
) -> _T:
    """Call `act` on every rank of `group`, and return this rank's result. If `act` fails on one rank, raises
    ExchangeError on all ranks; `what` is the verb phrase after "could not" in the message. The group's first `trainers`
    ranks are the trainer's: all, if it is None.

    Without a group this rank is the only one, and raises what `act` raises.
    """
    if group is None:
        return act()
    results: list[_T] = []
    fault = ""
    try:
        results.append(act())
    except Exception as error:
        # Any error is reported: the others wait for this rank's report.
        fault = word_objection(error)
    faults = []
    for place, reported in enumerate(gather(fault, group, what)):
        if reported:
            who = name_rank(place, group.size() if trainers is None else trainers)
            faults.append(f"{who} could not {what}: {reported}")
    if faults:
        raise ExchangeError("\n".join(faults))
    return results[0]


class NotJoinedError(ExchangeError, RuntimeError):
    """The error for an update before the worker is connected to a trainer; a RuntimeError, as vLLM's engines raise."""

    code = "SM114"


@dataclass(frozen=True)
class Link:
    """A connection of trainer and engine ranks: their process group in `group`, the plan of all moves in `planned`, and
    in `refits` the movers, each for a part of the plan.

    `recorded` is what this rank's loader stores, where it is a worker; `trainers` have the first places. Where ranks of
    an engine process together what has arrived, a portion `acknowledges`: it is over once all ranks have theirs.
    `beside` are groups of some of the ranks, which end with this one. `update_numbers` are the updates that this rank
    has begun and of which the board may still have messages, the last one included.
    """

    group: dist.ProcessGroup
    place: int
    planned: sm.Refit
    refits: tuple[smt.Refit, ...]
    recorded: sm.storage.Recorded | None
    trainers: int
    timeout: float
    acknowledges: bool = False
    beside: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    update_numbers: list[int] = field(default_factory=list)

    def leave(self) -> None:
        """Disconnect this rank from the process group of the connection, and from the groups in `beside`, each of which
        has only some of the connection's ranks.
        """
        for group in (*self.beside.values(), self.group):
            smt.disconnect(group)

    @property
    def board(self) -> Board:
        """The board through which the group's ranks exchange messages. Raises ExchangeError if this rank has left the
        group, and in a forked child process, which would use the connections of its parent.
        """
        compat.check_not_forked(self.group)
        store = compat.store_of(self.group)
        if store is None:
            what = "this rank has left the group of the engines, by shutdown() or after an update that failed"
            raise ExchangeError(f"{what}; connect again by trainer_init")
        return Board(store, self.place, self.trainers, self.group.size(), self.timeout)


class Life:
    """The driver of one weight update on this rank: its methods run the update's steps together with other ranks. The
    attribute `update` says which phase this rank has reached.

    Raises ExchangeError once the group was left.
    """

    def __init__(self, link: Link, update: Update) -> None:
        self.update = update
        self._link = link
        self._board = link.board

    def call(self, act: Callable[[], None]) -> None:
        """Start the update in engines by calling `act` on the trainer's first rank. Raises ExchangeError on all of the
        trainer's ranks if `act` fails.
        """
        self._note()
        with self._step(Step.CALL):
            self._board.relay(self._name("start"), act)

    def receive(self, act: Callable[[], None]) -> None:
        """On a worker, receive weights by calling `act`, once all ranks are ready. Raises ExchangeError on all ranks if
        one fails.

        Raises ExchangeError, without a report to other ranks, if this update or a later one has begun before.
        """
        self._note()
        with self._step(Step.CALL):
            # If place 0 is gone, this rank finds out before it votes, while it knows that nobody moves.
            self._board.find(self._name("fail"), self._board.timeout)
        self.move(lambda: None, act)

    def move(
        self,
        check: Callable[[], None],
        act: Callable[[], None],
        fail_early: Callable[[], str] = str,
    ) -> None:
        """Call `act`, which moves weights, once `check` has succeeded on all ranks; return once all have moved. If
        `fail_early()` returns an error on the first rank, nothing moves, and all ranks raise ExchangeError. In `act`
        no rank may move weights before all ranks have called it: it begins with a vote.

        Raises ExchangeError on all ranks if one fails. The default of `fail_early`, `str()`, is "".
        """
        begin = self._name("begin")
        with self.failing():
            _, fault = attempt(check)
            # Before the vote: others may have read the vote of a rank that is interrupted as it votes.
            self.update = self.update.after(Step.CHECK)
            self._board.vote(begin, fault)
            fault = self._board.decide(begin, lambda: fail_early() or self._find_failure())
            if fault:
                self.update = self.update.after(Step.REFUSE)
                raise ExchangeError(fault)
            # All ranks are in this update now, and none reads messages about earlier ones.
            self._forget()
            # Before this rank takes part in a move. Without it none moves: all vote as they prepare their tensors.
            self.update = self.update.after(Step.BEGIN)
            act()
            # A vote without further work: it ends once all ranks have moved.
            together(self._link.group, self._name("end"), lambda: None, self._link.trainers)
            self.update = self.update.after(Step.ARRIVE)

    def _find_failure(self) -> str:
        """At place 0, the error of a rank that has failed and left, or ""."""
        return self._board.find(self._name("fail"))

    def take(self, act: Callable[[], None]) -> None:
        """On the trainer's first rank, call `act`, which waits for the engines' answers; the trainer's other ranks wait
        until it returns. Raises ExchangeError on all of the trainer's ranks if `act` fails.
        """
        with self._step(Step.TAKE):
            self._board.relay(self._name("end"), act)

    def end(self, act: Callable[[], None]) -> None:
        """End the update in engines by calling `act` on the trainer's first rank. Raises ExchangeError on all of the
        trainer's ranks if `act` fails.
        """
        with self._step(Step.END):
            self._board.finish(self._name("finish"), act, self._find_failure)

    def _name(self, step: str) -> str:
        """The key of a step of this update on the board."""
        return f"{step} update {self.update.number}"

    def _note(self) -> None:
        """Record that this update begins. Raises ExchangeError if it or a later one has begun before."""
        last = max(self._link.update_numbers, default=0)
        if self.update.number <= last:
            raise ExchangeError(
                f"update {self.update.number} comes after update {last} was begun, by a late or repeated request; "
                f"call send_weights again on all of the trainer's ranks"
            )
        self._link.update_numbers.append(self.update.number)

    def _forget(self) -> None:
        """Delete the messages about earlier updates from the board, since all ranks have reached this one."""
        *earlier, number = self._link.update_numbers
        if self._link.place == 0:
            self._board.forget(earlier)
        self._link.update_numbers[:] = [number]

    @contextmanager
    def _step(self, step: Step) -> Iterator[None]:
        """Advance the update by `step` if the `with` block succeeds; end the update if it raises."""
        with self.failing():
            yield
            self.update = self.update.after(step)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """If the `with` block raises during the update, in a step or between two steps, end the update, and tell the
        other ranks the reason.

        Raises its error, with the other ranks' reports on it.
        """
        try:
            yield
        except BaseException as error:
            if self.update.is_over or compat.is_inherited(self._link.group):
                # All ranks know that nobody moves; or a Ctrl-C came after the last step; or this is a child of the
                # rank, forked in a step, and the rank itself goes on.
                raise
            self.update = self.update.after(Step.FAIL)
            why = self._tell(error)
            if why:
                raise ExchangeError(f"{message_of(error)}\n{why}") from error
            raise

    def _tell(self, error: BaseException) -> str:
        """Report this rank's failure, so that no rank waits for it; return another rank's reason for it, or ""."""
        # It failed before weights moved: others may wait for this rank's vote.
        if self.update.phase is Phase.KEPT:
            self._board.decline(self._name("begin"), error)
        # It failed after weights moved: this rank will not read how the update ended.
        if self.update.phase is Phase.STALE and not isinstance(error, ExchangeError):
            self._board.excuse(self._name("finish"))
        self._board.give_up(map(self._name, WAITED_FOR), error)
        if self.update.keeps_link:
            return ""
        # An ExchangeError comes from another rank's failure, which that rank reports.
        own_fault = "" if isinstance(error, ExchangeError) else word_error(error)
        return self._board.break_off(self._name("fail"), own_fault, self._link.leave)
