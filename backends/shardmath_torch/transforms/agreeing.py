"""Agreeing: ranks agree on what is to be made of tensors, before they agree on a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardmath_torch import compat
from shardmath_torch.agreement.agree import Ballot
from shardmath_torch.agreement.naming import word_objection
from shardmath_torch.agreement.party import Party, is_time
from shardmath_torch.agreement.transport import join
from shardmath_torch.movers.settings import DEFAULT_TIMEOUT_S

__all__ = ["agree", "attempt", "join_group"]

_T = TypeVar("_T")


def join_group(group: compat.Group | None, timeout: float) -> Party:
    """This rank in the group."""
    patience = float(timeout) if is_time(timeout) else DEFAULT_TIMEOUT_S
    return join(compat.group_of(group), patience, min(5.0, patience / 5))


def attempt(make: Callable[[], _T]) -> tuple[_T | None, str]:
    """What is made, or why not."""
    try:
        return make(), ""
    except Exception as error:
        # The others wait for this rank's vote, whatever went wrong here.
        return None, word_objection(error)


def agree(party: Party, claim: str, objection: str) -> None:
    """Ranks agree on what they are about to do. Raises ExchangeError."""
    ballot = Ballot(claim, objection=objection)
    party.together(lambda: party.vote(ballot), lambda failure, rank: "ranks were to agree")
