"""Changes: a compiled mover whose moves send only what changed since the previous move.

    send = smt.compile_changes(plan)     # collective, once
    send(mine, out=theirs)               # the first is a whole move
    send(mine, out=theirs)               # from then on, what has changed at the sources

1. Each source rank keeps a snapshot of what it sent, or the caller passes which cells have changed.
2. Destinations must still hold what the previous move brought: cells that a rank changes there are not restored.
3. Every call is a turn of the group, as every move is (`mover`): if one rank objects, all raise, and no destination has
   changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import Tensor

from shardmath.base.public import public
from shardmath.base.text import shown
from shardmath.plans.plan import Plan
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.naming import describe_crossing
from shardmath_torch.groups.agreement.party import is_time
from shardmath_torch.groups.agreement.transport import join
from shardmath_torch.moves.commits.shadows import Shadows
from shardmath_torch.moves.exchange.local import Local
from shardmath_torch.moves.exchange.task import Engine, Task
from shardmath_torch.moves.movers.calls import EVERY, Call, keep
from shardmath_torch.moves.movers.carriers import Whole
from shardmath_torch.moves.movers.compile import AgreeFirst, make_ready
from shardmath_torch.moves.movers.handles import Handle
from shardmath_torch.moves.movers.mover import Mover, move_by
from shardmath_torch.moves.movers.settings import (
    ALL,
    DEFAULT_TIMEOUT_S,
    DIRECT,
    LONGEST_GRACE_S,
    Settings,
    is_text,
)
from shardmath_torch.moves.movers.stages import Stage, list_own
from shardmath_torch.moves.observing.bars import Progress
from shardmath_torch.moves.observing.moved import Moved
from shardmath_torch.tensors.changes.carrying import How, Sent, Sparse

__all__ = ["Changes", "Sent", "compile_changes", "make_changes"]


@public
class Changes(Mover):
    """A mover whose first call sends all elements, and whose later calls send only elements changed since the call
    before. A message for which that saves no bytes is sent with all its elements.

    A call is `send(src_tensors, out=dst_tensors)`. `last` is what this rank sent in the last call, `snapshot_bytes` the
    size of its snapshots. Calls are collective. Raises ExchangeError.
    """

    @property
    def _sparse(self) -> Sparse:
        assert isinstance(self._carrier, Sparse), "made by make_changes"
        return self._carrier

    @property
    def last(self) -> Sent | None:  # type: ignore[override]
        """The amounts that this rank sent in the last move, committed or not; None before the first."""
        return self._sparse.last

    @property
    def moved(self) -> Moved | None:
        """The record of the latest successful move on this rank, as in `Mover.last`."""
        return self._ledger.last

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of this rank's snapshots (earlier copies of the parts of its source tensors that it sends)."""
        return self._sparse.snapshot_bytes

    def ask(self, whole: bool) -> How:
        """Return the arguments of a call that sends the elements that differ from this rank's snapshots, or all if
        `whole`.
        """
        return How(None, whole)

    @compat.untraced
    def __call__(  # type: ignore[override]
        self,
        src: Local,
        *,
        out: Local = None,
        positions: Mapping[str, Tensor] | None = None,
        whole: bool = False,
        timeout: float | None = None,
        acknowledge: bool = False,
        label: str = "",
        check: Literal["digest"] | None = None,
        async_op: bool = False,
        progress: Progress | None = None,
    ) -> Sent | Handle:
        """Update `out` to `src`; a whole move the first time, and with `whole`, which is the same on all ranks.

        `positions` gives the changed cells, by local key: int64 tensors of cell numbers, counted row by row in the
        local shape, each once; tensors that are not named are unchanged. The other arguments are a move's.
        """
        how = How(keep(positions), whole)
        call = Call(src, out, timeout, acknowledge, label, check, progress, how=how)
        handle = move_by(self, call, async_op)
        if handle is not None:
            return handle
        assert self.last is not None, "it has just sent"
        return self.last


@compat.untraced
def compile_changes(
    plan: Plan,
    *,
    group: compat.Group | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    max_inflight_bytes: int | None = None,
    thread: str | None = None,
    commit: str = DIRECT,
    agree: str = EVERY,
    snapshots: bool = True,
) -> Changes:
    """Compile `plan`, on all ranks of `group`, into a Changes: a mover whose first call sends all elements, and each
    later call only the changed ones. Without `snapshots` (copies to compare with), callers pass the positions of
    changed elements. The other arguments are the same as for `compile`.

    Collective over `group`. A message is sent whole unless its changes take fewer bytes. `snapshots=False` keeps none:
    every call except whole ones must then pass `positions`. With `commit="all"` a whole move needs additional memory of
    the destination's size, a move of changes as much as it receives. Raises ExchangeError on every rank if ranks pass
    different plans or settings, for a plan that reduces, and for a program.
    """
    settings = Settings(timeout, max_inflight_bytes, "auto", thread, commit, agree)
    return make_changes(plan, group, settings, snapshots)


def make_changes(
    plan: Plan,
    group: compat.Group | None,
    settings: Settings,
    snapshots: bool = True,
    stages: tuple[Stage, ...] = (),
    agree_first: AgreeFirst | None = None,
) -> Changes:
    """Compile a Changes as `compile_changes` does, with `stages` of extra work, such as casts, before and after each
    move. Before the mover takes another plan, all ranks together call `agree_first` (if given), which raises if the
    plan does not fit the stages.
    """

    def agree(plan: object, group: compat.Group | None, settings: Settings) -> None:
        objection = _find_objection(plan, snapshots) or _find_unfinished(stages, settings.commit)
        _agree(plan, group, settings.timeout, snapshots, objection)

    def agree_again(plan: object, group: compat.Group | None, settings: Settings) -> None:
        if agree_first is not None:
            agree_first(plan, group, settings)
        agree(plan, group, settings)

    def make(task: Task, engine: Engine, shadows: Shadows | None) -> Sparse:
        return Sparse(task, Whole(task.part, engine, shadows), snapshots)

    agree(plan, group, settings)
    return Changes(make_ready(plan, group, settings, stages, make, agree_again))


def _agree(
    plan: object, group: compat.Group | None, timeout: float, snapshots: bool, objection: str
) -> None:
    """Vote on moving changes, and object to a plan by which they cannot be moved. Raises ExchangeError."""
    # The vote that rejects a bad timeout needs a valid one.
    limit = float(timeout) if is_time(timeout) else DEFAULT_TIMEOUT_S
    # As a mover does: a part of the timeout is for the reports after a failure.
    grace = min(LONGEST_GRACE_S, limit / 5)
    party = join(compat.group_of(group), limit - grace, grace)
    claim = f"compile_changes(snapshots={snapshots!r})"
    party.together(
        lambda: party.vote(Ballot(claim, objection=objection)),
        lambda failure, rank: describe_crossing(plan, failure.tensor, rank),
    )


def _find_objection(plan: object, snapshots: object) -> str:
    """Why changes cannot be moved by this plan; "" if they can."""
    if not isinstance(snapshots, bool):
        return f"snapshots={shown(snapshots)} is not a bool; pass True or False"
    if not isinstance(plan, Plan):
        what = f"compile_changes got {type(plan).__name__}, where a Plan is needed"
        return f"{what}; pass sm.plan(src, dst), not a program of it"
    for name, windows in (*plan.src.items(), *plan.dst.items()):
        if any(layout.addend_axes for layout in windows):
            what = f"compile_changes cannot move partial sums, but {name or 'the tensor'!r} is {windows[0]}"
            return f"{what}; use smt.compile, or a layout without Partial"
    return ""


def _find_unfinished(stages: Sequence[Stage], commit: object) -> str:
    """Why `commit="all"` is not supported with stages that finalize tensors; "" if it is, or is not requested."""
    finalized = list_own(stages)
    if not (is_text(commit, ALL) and finalized):
        return ""
    what = f"a rule computes a tensor from {shown(min(finalized))} at the destination"
    why = "with changes=True and commit='all' only its changed elements arrive, at the commit"
    return f"{what}, but {why}; leave out one of the two, or apply the rule at the source"
