"""Updates: what one rank goes through while all take new weights, as a table, without I/O.

    idle     no engine was told
    called   engines were told to receive; this rank has said nothing
    voted    this rank has said yes or no: where all said yes, all begin to move
    begun    this rank moves weights
    moved    all ranks have all that was sent to them
    taken    every engine says so
    ended    every engine was told that it is over
    kept     failed before a weight moved
    parted   failed before a weight moved, and others may wait for this rank to move
    torn     failed where weights may have moved: engines may have old ones and new ones
    stale    failed where weights are new, and an engine may not know

1. A rank is never without an answer to what its engine has: as before, mixed, or new (`Update.mixed`).
2. All ranks vote once more as they begin to move, each time that tensors are prepared. So no weight moves on any rank
   before this one has begun (`Step.BEGIN`).
3. A rank that has said yes is waited for, unless place 0 says that nobody moves (`Step.REFUSE`). If it fails before
   that, it leaves the group, so that no rank can move.
4. What an update has mixed, only one that writes the same cells makes whole again.

>>> import numpy as np
>>> qk, qv = (Cells({name: np.array([0, 4]) for name in names}) for names in ("qk", "qv"))
>>> update = Update(1, writes=qk)
>>> for step in (Step.CALL, Step.CHECK, Step.BEGIN, Step.FAIL):
...     update = update.after(step)
>>> update.phase.value, update.mixed, update.keeps_link
('torn', Cells({'q': ((0, 4),), 'k': ((0, 4),)}), False)
>>> other = Update(1, writes=qv, torn=update.mixed)
>>> for step in (Step.CALL, Step.CHECK, Step.BEGIN, Step.ARRIVE):
...     other = other.after(step)
>>> other.phase.value, other.mixed
('moved', Cells({'k': ((0, 4),)}))
>>> other.after(Step.CALL)
Traceback (most recent call last):
shardmath.ExchangeError: an update that is moved cannot call; it has to take or fail
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from shardmath.base.errors import ExchangeError
from shardmath_vllm.cells import Cells

__all__ = ["TABLE", "Step", "Phase", "Update"]

NO_CELLS = Cells({})


class Phase(Enum):
    """The state that a weight update has reached on one rank."""

    IDLE = "idle"
    CALLED = "called"
    VOTED = "voted"
    BEGUN = "begun"
    MOVED = "moved"
    TAKEN = "taken"
    ENDED = "ended"
    KEPT = "kept"
    PARTED = "parted"
    TORN = "torn"
    STALE = "stale"


class Step(Enum):
    """The steps and ends of a weight update on one rank. For example, ARRIVE says that the new weights have arrived,
    END that the update has ended, and FAIL that it has failed.
    """

    CALL = "call"
    CHECK = "check"
    REFUSE = "refuse"
    BEGIN = "begin"
    ARRIVE = "arrive"
    TAKE = "take"
    END = "end"
    FAIL = "fail"


TABLE: Mapping[Phase, Mapping[Step, Phase]] = {
    Phase.IDLE: {Step.CALL: Phase.CALLED, Step.FAIL: Phase.KEPT},
    Phase.CALLED: {Step.CHECK: Phase.VOTED, Step.FAIL: Phase.KEPT},
    Phase.VOTED: {
        Step.BEGIN: Phase.BEGUN,
        Step.REFUSE: Phase.KEPT,
        Step.FAIL: Phase.PARTED,
    },
    Phase.BEGUN: {Step.ARRIVE: Phase.MOVED, Step.FAIL: Phase.TORN},
    Phase.MOVED: {Step.TAKE: Phase.TAKEN, Step.FAIL: Phase.STALE},
    Phase.TAKEN: {Step.END: Phase.ENDED, Step.FAIL: Phase.STALE},
}

MIXING = (Phase.BEGUN, Phase.TORN)
NEW = (Phase.MOVED, Phase.TAKEN, Phase.ENDED, Phase.STALE)


@dataclass(frozen=True)
class Update:
    """An update of an engine's weights: its `number`, counted since ranks connected, and the `phase` that this rank is
    in.

    `writes` are the cells of the engine's stored tensors that it writes, on any rank of the engine; `torn` those that
    were mixed before. A trainer's rank has neither.
    """

    number: int
    phase: Phase = Phase.IDLE
    writes: Cells = NO_CELLS
    torn: Cells = NO_CELLS

    def after(self, step: Step) -> Update:
        """Return the update in the phase that follows `step`. Raises ExchangeError if `step` is impossible now."""
        ways = TABLE.get(self.phase, {})
        if step not in ways:
            able = " or ".join(way.value for way in ways) or "do nothing more"
            raise ExchangeError(
                f"an update that is {self.phase.value} cannot {step.value}; it has to {able}"
            )
        return replace(self, phase=ways[step])

    @property
    def mixed(self) -> Cells:
        """The elements that may be old on some ranks of the engine and new on others; while there are any, the model
        must not answer.
        """
        if self.phase in MIXING:
            return self.torn | self.writes
        return self.torn - self.writes if self.phase in NEW else self.torn

    @property
    def is_new(self) -> bool:
        """Whether the engines have the new weights, so that their caches of prompts are outdated."""
        return self.phase in NEW

    @property
    def is_over(self) -> bool:
        """Whether the update has ended, so that no step can follow."""
        return self.phase not in TABLE

    @property
    def keeps_link(self) -> bool:
        """Whether ranks may stay connected after the update; False if others may wait for this rank to move, or weights
        may be torn (partly new), so that ranks must connect again.
        """
        return self.phase not in (Phase.PARTED, Phase.TORN)
