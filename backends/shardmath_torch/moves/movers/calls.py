"""Calls: what a mover is called with, and how often ranks agree on it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown
from shardmath.plans.plan import Movable
from shardmath_torch.groups.agreement.party import is_time, word_bad_time
from shardmath_torch.moves.digests.checking import check_checkable
from shardmath_torch.moves.exchange.local import Local, Tensors
from shardmath_torch.moves.observing.bars import Progress, check_progress

__all__ = ["EVERY", "ONCE", "Call", "Checked", "CallKind", "check_call", "keep"]

EVERY, ONCE = "every", "once"
"""How often ranks agree: before every move, or before the first of its kind."""


_T = TypeVar("_T")


def keep(given: _T) -> _T | dict[Any, Any]:
    """A mapping as it is now; anything else as it is."""
    # What cannot be copied is looked at, and objected to, when ranks vote.
    with suppress(Exception):
        if isinstance(given, Mapping):
            return dict(given)
    return given


class CallKind(NamedTuple):
    """What all ranks must do alike in a move, but for its number and purpose."""

    word: str
    acknowledge: bool
    check: bool
    in_block: bool

    def claim(self, number: int, what: str) -> str:
        """What a rank is about to do: its move of that number, of a plan and a mover in words."""
        claim = f"{self.word} {number} of {what}"
        if self.acknowledge:
            claim += ", acknowledged"
        if self.check:
            claim += ", compared"
        if self.in_block:
            claim += ", in smt.commit"
        return claim


class Call(NamedTuple):
    """What a mover is called with.

    `held` tensors stay where they are from move to move. `objection` is what speaks against the move, as far as the
    caller knows. `label` is this rank's own word for the move; `purpose` is what all ranks must say that it is for.
    `how` is the carrier's own. `thread` is what claims say of the thread that called, where another
    moves for it.
    """

    src: Local = None
    out: Local = None
    timeout: float | None = None
    acknowledge: bool = False
    label: str = ""
    check: str | None = None
    progress: Progress | None = None
    purpose: str = ""
    records_gradient: bool = False
    objection: str = ""
    held: bool = False
    how: object = None
    thread: str | None = None

    @property
    def patience(self) -> float | None:
        """Seconds to wait for all ranks to make the call, where that is given."""
        return self.timeout if is_time(self.timeout) else None

    def keep(self) -> Call:
        """The same tensors, whatever the caller puts into its mappings from now on."""
        if self.held:
            return self
        return self._replace(src=keep(self.src), out=keep(self.out))

    def kind(self, word: str, in_block: bool) -> CallKind:
        """What others must do alike. Of what means nothing it says nothing: that is objected to."""
        acknowledge = self.acknowledge is True
        check = isinstance(self.check, str) and self.check == "digest"
        return CallKind(word, acknowledge, check, in_block)


class Checked(NamedTuple):
    """A call that was looked at: its tensors, by local buffer key, and what speaks against it.

    `out` are the destinations as the caller gave them.
    """

    src: Tensors
    dst: Tensors
    objection: str
    out: Local = None


def check_call(call: Call, plan: Movable, in_block: bool) -> None:
    """Raise ExchangeError for arguments that mean nothing, or nothing here."""
    if not (call.timeout is None or is_time(call.timeout)):
        raise ExchangeError(word_bad_time(call.timeout))
    if not isinstance(call.acknowledge, bool):
        raise ExchangeError(f"acknowledge={shown(call.acknowledge)}; pass True or False")
    if not isinstance(call.label, str):
        raise ExchangeError(f"label={shown(call.label)} is not a text; pass one, or leave it out")
    check_checkable(call.check, plan)
    check_progress(call.progress)
    if in_block and call.check is not None:
        what = "in smt.commit nothing is in place before the block ends"
        raise ExchangeError(f"{what}; leave check= out, and compare by smt.digest after it")
