"""This rank in a process group: how it votes, takes its turn, and says what broke.

1. What ranks do together goes through `together`: under the group's turn, and any way out of it but
   its end or a refusal breaks the group, on this rank at once and on the others as they are told.
2. Others are told why (`failure`) before this rank lets go of its connections.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeGuard, TypeVar

import numpy as np

from shardmath.base.errors import ExchangeError
from shardmath_torch import compat
from shardmath_torch.agreement.agree import Ballot, vote
from shardmath_torch.agreement.failure import UNTOLD, Evidence, Inquest
from shardmath_torch.agreement.turns import Refused, Turns
from shardmath_torch.agreement.wire import PeerFailure, Wire

__all__ = ["Party", "is_time", "no_time"]

FIX = "see that it calls compile and every move; start the ranks again with a new process group, and compile again"

LONGEST_S = 1e9
"""Longest wait: what torch makes of seconds, nanoseconds in 64 bits, ends soon after."""

_T = TypeVar("_T")


def is_time(timeout: object) -> TypeGuard[float]:
    """Whether that can be waited for: seconds above 0 and up to LONGEST_S."""
    if isinstance(timeout, bool) or not isinstance(timeout, int | float | np.number):
        return False
    return bool(0 < timeout <= LONGEST_S)


def no_time(timeout: object) -> str:
    """What to say of one that cannot."""
    return f"timeout={timeout!r} is no time to wait; pass seconds > 0, at most {LONGEST_S:.0e}"


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

    def named(self) -> Party:
        """The party under a key of its own: ranks have voted as often, so they find the same one."""
        return replace(self, key=str(self.turns.votes + 1))

    def vote(self, mine: Ballot, patience: float | None = None) -> tuple[Ballot, ...]:
        """Everybody's ballots. Raises Refused if any rank objects, PeerFailure if one does not vote."""
        self.wire.begin(self.turns.next())
        return vote(self.wire, self.ranks, mine, patience)

    def together(
        self,
        act: Callable[[], _T],
        describe: Callable[[PeerFailure, int | None], str],
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
                return self._guarded(act, describe)
        except Refused as refusal:
            raise ExchangeError(str(refusal)) from None

    def _guarded(
        self, act: Callable[[], _T], describe: Callable[[PeerFailure, int | None], str]
    ) -> _T:
        try:
            return act()
        except PeerFailure as failure:
            raise self._broken(failure, describe) from failure
        except Refused:
            raise
        except BaseException as error:  # Ctrl-C too: messages may be on their way
            if self.turns.under_way:
                self._leave(error)
            raise

    def _leave(self, error: BaseException) -> None:
        """Tells the others that this rank gives up, and why; does not ask them."""
        cause = f"it was left in the middle by {_called(error)}"
        self.turns.broken = f"rank {self.rank} (this one) failed: {cause}; {FIX}"
        try:
            asking = self._inquest().tell(Evidence(self.rank, None, cause), self.wire.abandon)
            if self.turns.host == self.rank:  # others read the store that this process serves
                asking.join(self.grace / 4)
        except BaseException:
            self.wire.abandon()
            raise

    def _broken(
        self, failure: PeerFailure, describe: Callable[[PeerFailure, int | None], str]
    ) -> ExchangeError:
        """What to tell the caller when a peer failed: asks the others who was first."""
        self.turns.broken = failure.cause
        try:
            text = self._asked(failure, describe)
        except BaseException:
            self.wire.abandon()
            raise
        self.turns.broken = text
        return ExchangeError(text)

    def _asked(
        self, failure: PeerFailure, describe: Callable[[PeerFailure, int | None], str]
    ) -> str:
        mine = Evidence(failure.rank, failure.tensor, failure.cause)
        inquest = self._inquest()
        first, evidence = inquest.hold(mine, self.wire.abandon)
        if first == self.rank:
            return f"rank {first} (this one) failed or was given up by the others: {evidence.cause}; {FIX}"
        told = PeerFailure(evidence.blames, evidence.cause, evidence.tensor)
        if first is not None:
            return f"rank {first} failed while {describe(told, first)}: {evidence.cause}; {FIX}"
        seen = "a rank" if evidence.blames is None else f"rank {evidence.blames}"
        what = f"the exchange with {seen} broke while {describe(told, evidence.blames)}: {evidence.cause}"
        return f"{what}; who failed first is not known{self._why(inquest)}; {FIX}"

    def _why(self, inquest: Inquest) -> str:
        host = self.turns.host
        if inquest.answered or host is None:
            return ""
        if host == UNTOLD:
            return ", since the group's store does not answer"
        return f", since rank {host}, whose process serves the group's store, does not answer"

    def _inquest(self) -> Inquest:
        store = compat.store_of(self.group)
        return Inquest(
            store,
            self.turns.host,
            self.turns.nonce,
            self.rank,
            self.ranks,
            self.grace,
        )


def _called(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
