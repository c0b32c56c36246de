"""Ready: the parts of a mover, and those that a replan keeps.

1. Ranks that left or came back change nothing between the others: a rank's part follows the previous one
   (`membership.keeping`), and if ranks only left, so do its views of tensors.
2. Any other plan is made ready like a first one, and keeps only connections and staging, if its group is the same, and
   what templates save.
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
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.exchange.task import Task
from shardmath_torch.moves.movers.carriers import Carrier
from shardmath_torch.moves.movers.stages import Stage

__all__ = ["Again", "Former", "Ready"]


class Former(NamedTuple):
    """The state of a mover before a replan, from which the mover continues with the next plan.

    `peers` is the most of any rank, `version` the number of moves committed, and `objection` why the mover cannot
    continue, "" if it can.
    """

    part: RankProgram
    carrier: Carrier
    device: torch.device
    peers: int
    version: int
    objection: str = ""

    def count_peers(self, plan: object) -> int | None:
        """Return the largest of three numbers: ranks that this rank sends to under `plan`, ranks that it receives from,
        and the most that any rank had under the previous plan. Return None if this rank's part of that plan cannot be
        reused.

        `peers` is the largest such number of any rank under the previous plan. The result is never below it, since a
        smaller number would change the pace of all ranks.
        """
        # `change` has the ranks that are gone since the previous plan, and those that are back.
        change = compare(self.part, plan)
        if change is None or not isinstance(plan, Plan):
            return None
        # Only ranks that are back can be new peers.
        if not change.back or self.part.rank in change.gone:
            return self.peers
        return max(self.peers, count_peers(self.part, plan))

    def follow(self, plan: object, pace: Pace) -> RankProgram | None:
        """Return this rank's part of `plan`, derived from its part of the previous plan; None if that is impossible.
        `pace` limits the bytes of a message, and the number of ranks with which one rank exchanges messages at the same
        time."""
        return follow(self.part, plan, pace) if isinstance(plan, Plan) else None

    def keep_carrier(self, task: Task) -> Carrier | None:
        """Return a carrier (the object that moves a rank's bytes) for `task` that reuses the previous carrier's tensors
        and memory, or None if the change of plan, another device or the kind of carrier does not permit that."""
        change = compare(self.part, task.part.plan)
        # A carrier can drop ranks that are gone, but not add ranks that are back.
        if change is None or change.back or self.part.rank in change.gone:
            return None
        if task.wire.device != self.device:
            return None
        gone = change.gone
        # The engine posts the messages; it keeps those from and to ranks that stay.
        return self.carrier.keep(task.part, lambda engine: engine.keep(task, gone))


class Ready(NamedTuple):
    """The parts of a mover on this rank: the plan and settings, on which all ranks have agreed, and this rank's
    connections and memory.

    `name` is the plan's in claims and logs. `peers` is the most of any rank, and `version` the most moves committed
    before on any rank. `keeps_bound` is whether the carrier is bound to the previous one's tensors. `again` makes
    another plan ready.
    """

    given: Plan | Transposed | Program
    name: str
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


class Again(Protocol):
    """The interface of functions that compile another plan for a mover. `find_former` returns the mover's state under
    the previous plan, from which the mover continues; it is called within the turn, before which other threads may
    still move.

    Calls `take` once all ranks agree; an exception in it, as Ctrl-C, is this rank's failure.
    """

    def __call__(
        self,
        plan: object,
        group: compat.Group,
        timeout: float | None,
        find_former: Callable[[], Former],
        take: Callable[[Ready], None],
    ) -> None: ...
