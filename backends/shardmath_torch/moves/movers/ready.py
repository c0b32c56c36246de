"""Ready: what a mover is made of, and what of that goes on where it is planned anew.

1. Ranks that have left, or are back, change nothing between the others: a rank's part follows (`membership.keeping`),
   and where only some have left, so does all that was bound to its tensors.
2. Any other plan is made ready as the first one was. Of the former one only connections and staging are kept, where
   it is of the same group, and all that templates save.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from shardmath.plans.adjoint import Transposed
from shardmath.plans.membership.keeping import compare, count_peers, follow
from shardmath.plans.plan import Plan
from shardmath.plans.programs.cutting import Pace
from shardmath.plans.programs.part import RankProgram
from shardmath.plans.programs.program import Program
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.naming import name_given
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.exchange.task import Task
from shardmath_torch.moves.movers.carriers import Carrier
from shardmath_torch.moves.movers.stages import Stage
from shardmath_torch.moves.observing.stopwatch import Ledger

__all__ = ["Again", "Former", "Ready"]


class Former(NamedTuple):
    """What a rank did, and had agreed on: the most peers of any rank, and how many moves were committed.

    `objection` is what speaks against going on from here.
    """

    part: RankProgram
    carrier: Carrier
    device: torch.device
    peers: int
    version: int
    objection: str = ""

    def count_peers(self, plan: object) -> int | None:
        """As many peers as this rank says it has, that its part can follow the plan; None where it cannot.

        Not fewer than before: with fewer, all would go at another pace.
        """
        found = compare(self.part, plan)
        if found is None or not isinstance(plan, Plan):
            return None
        if not found.back or self.part.rank in found.gone:
            return self.peers
        return max(self.peers, count_peers(self.part, plan))

    def follow(self, plan: object, pace: Pace) -> RankProgram | None:
        """This rank's part of the plan; None where it has to be made anew."""
        return follow(self.part, plan, pace) if isinstance(plan, Plan) else None

    def keep_carrier(self, task: Task) -> Carrier | None:
        """What carries the part that followed, with all that was bound; None where it has to be made anew."""
        found = compare(self.part, task.part.plan)
        if found is None or found.back or self.part.rank in found.gone:
            return None
        if task.wire.device != self.device:
            return None
        gone = found.gone
        return self.carrier.keep(task.part, lambda engine: engine.keep(task, gone))


class Ready(NamedTuple):
    """What ranks have agreed on, and what it is on this one: all that a mover is made of.

    `peers` is the most of any rank, `version` how many moves were committed before, on whichever rank that is most.
    `keeps_bound`: the carrier is ready for the tensors of the former one. `again` makes another of another plan.
    """

    given: Plan | Transposed | Program
    party: Party
    part: RankProgram
    carrier: Carrier
    stages: tuple[Stage, ...]
    thread: str | None
    agree: str
    peers: int
    version: int
    keeps_bound: bool
    again: Again

    def open_ledger(self) -> Ledger:
        """For the times of its moves."""
        name, rank = name_given(self.given), self.party.rank
        return Ledger(name, self.given, rank, lambda: self.carrier.posted)


class Again(Protocol):
    """Makes ready another plan, in the place of a former one, by the settings of the first.

    `take` is called once all have agreed: left in the middle of it, as by Ctrl-C, this rank has failed.
    """

    def __call__(
        self,
        plan: object,
        group: compat.Group,
        timeout: float | None,
        former: Former,
        take: Callable[[Ready], None],
    ) -> None: ...
