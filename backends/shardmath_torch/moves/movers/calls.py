"""Calls: a mover's arguments, their check, and the part of them on which ranks vote."""

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
"""How often ranks vote: before every move, or only before the first of its kind."""


_T = TypeVar("_T")


def keep(given: _T) -> _T | dict[Any, Any]:
    """Return a copy, as a dict, of `given` if it is a mapping; anything else unchanged."""
    # A mapping that cannot be copied is rejected when ranks vote.
    with suppress(Exception):
        if isinstance(given, Mapping):
            return dict(given)
    return given


class CallKind(NamedTuple):
    """The options of a move that must be equal on all ranks. Ranks also compare the move's number and purpose (a text
    from the caller), which are not in this class."""

    word: str
    acknowledge: bool
    check: bool
    in_block: bool

    def claim(self, number: int, what: str) -> str:
        """Return the text that ranks compare in a vote: move number, options, and `what`, the plan's name."""
        claim = f"{self.word} {number} of {what}"
        if self.acknowledge:
            claim += ", acknowledged"
        if self.check:
            claim += ", compared"
        if self.in_block:
            claim += ", in smt.commit"
        return claim


class Call(NamedTuple):
    """The arguments of one call of a mover.

    - `label`: this rank's word for the move.
    - `purpose`: what the move is for, equal on all ranks.
    - `objection`: why the caller knows that the move cannot be made; "" if it can.
    - `held`: tensors keep their addresses from move to move.
    - `how`: an option of the carrier.
    - `thread`: the calling thread's part of claims, if another thread moves for it.
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
        """The seconds to wait until all ranks have made the call; None (use the mover's timeout) if `timeout` was not
        given or is invalid."""
        return float(self.timeout) if is_time(self.timeout) else None

    def keep(self) -> Call:
        """Return the call with copies of its dicts of tensors (not of the tensors), so that the caller can change the
        dicts. With `held`, the caller promises to use the same tensors in all moves, so no copies are made."""
        if self.held:
            return self
        return self._replace(src=keep(self.src), out=keep(self.out))

    def kind(self, word: str, in_block: bool) -> CallKind:
        """Return a CallKind: the options of this call that must be equal on all ranks. `word` (the kind of move, such
        as "move") and `in_block` (whether the call is in a `commit` block) become its fields of the same names.

        Invalid options count as not given.
        """
        acknowledge = self.acknowledge is True
        check = isinstance(self.check, str) and self.check == "digest"
        return CallKind(word, acknowledge, check, in_block)


class Checked(NamedTuple):
    """A checked call of a mover (an object that moves tensors): the source and destination tensors by name, and why
    this rank cannot make the move (`objection`; "" if it can). `out` has the destinations as the caller passed them."""

    src: Tensors
    dst: Tensors
    objection: str
    out: Local = None


def check_call(call: Call, plan: Movable, in_block: bool) -> None:
    """Raise ExchangeError if an option of `call`, such as `timeout` or `check`, is invalid for the plan. `in_block`
    says that the call is inside a `with commit(...)` block, where `check` is not allowed; tensors are not checked
    here."""
    if not (call.timeout is None or is_time(call.timeout)):
        raise ExchangeError(word_bad_time(call.timeout))
    if not isinstance(call.acknowledge, bool):
        raise ExchangeError(
            f"acknowledge={shown(call.acknowledge)} is not a bool; pass True or False"
        )
    if not isinstance(call.label, str):
        raise ExchangeError(f"label={shown(call.label)} is not a str; pass a str, or leave it out")
    check_checkable(call.check, plan)
    check_progress(call.progress)
    if in_block and call.check is not None:
        what = (
            f"check={call.check!r} in smt.commit, where nothing is in place before the block ends"
        )
        raise ExchangeError(f"{what}; leave check= out, and compare by smt.digest after the block")
