"""Agreeing: ranks vote on transforms before they agree on a plan."""

from __future__ import annotations

from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.party import Party, is_time
from shardmath_torch.groups.agreement.transport import join
from shardmath_torch.moves.movers.settings import DEFAULT_TIMEOUT_S

__all__ = ["agree", "join_group"]


def join_group(group: compat.Group | None, timeout: float) -> Party:
    """Return this rank's connections to the other ranks of `group`, as a Party, for checks that must succeed on all
    ranks. An invalid `timeout` is replaced by the default.
    """
    patience = float(timeout) if is_time(timeout) else DEFAULT_TIMEOUT_S
    # How long a rank that failed waits for the others' votes.
    grace = min(5.0, patience / 5)
    return join(compat.group_of(group), patience, grace)


def agree(party: Party, claim: str, objection: str) -> None:
    """Compare `claim` on all ranks of a process group, in which `party` represents this rank. Raises ExchangeError on
    all these ranks if claims differ, or if a rank objects: `objection` is its reason, "" for none.
    """
    ballot = Ballot(claim, objection=objection)
    party.together(lambda: party.vote(ballot), lambda failure, rank: "ranks were to agree")
