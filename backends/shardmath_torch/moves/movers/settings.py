"""Settings: the arguments of `compile`, which must be equal on all ranks, and their check."""

from __future__ import annotations

from typing import NamedTuple

from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.plans.programs.messages import MOST_OPS
from shardmath.plans.programs.part import Outline, plan_of
from shardmath.plans.programs.program import Program
from shardmath_torch.groups import compat, dtypes
from shardmath_torch.groups.agreement.party import Party, is_time, word_bad_time
from shardmath_torch.moves.exchange.task import transport_of
from shardmath_torch.moves.movers.calls import EVERY, ONCE

__all__ = [
    "ALL",
    "DEFAULT_ENGINE",
    "DEFAULT_TIMEOUT_S",
    "DIRECT",
    "LONGEST_GRACE_S",
    "Settings",
    "check_arithmetic",
    "check_plan",
    "check_settings",
    "is_text",
]

DEFAULT_ENGINE = "exchange"

DEFAULT_TIMEOUT_S = 60.0

DIRECT, ALL = "direct", "all"
"""When bytes reach the destination: as they arrive, or at the end on all ranks or none."""

LONGEST_GRACE_S = 5.0
"""Most time for finding out who failed, however long ranks wait for each other."""

SHOWN = 16
"""Most ranks that an error shows."""


class Settings(NamedTuple):
    """The arguments of `compile`, except plan and group."""

    timeout: float = DEFAULT_TIMEOUT_S
    max_inflight_bytes: int | None = None
    engine: str = "auto"
    thread: str | None = None
    commit: str = DIRECT
    agree: str = EVERY

    @property
    def text(self) -> str:
        """The settings as text that ranks compare. `thread` is always left out; `commit` and `agree` are left out if
        they are defaults."""
        given = self._asdict()
        del given["thread"]
        if is_text(self.commit, DIRECT):
            del given["commit"]
        if is_text(self.agree, EVERY):
            del given["agree"]
        return ", ".join(f"{name}={value!r}" for name, value in given.items())

    @property
    def patience(self) -> float:
        """The seconds to wait for another rank: the timeout minus 1.2 times `grace`. The subtracted seconds are for
        finding out which rank failed, and for raising the error."""
        # An extra fifth of the grace is for closing connections and raising the error.
        return self.timeout - 1.2 * self.grace

    @property
    def grace(self) -> float:
        """The seconds, after a failure, for reading the other ranks' reports: a fifth of the timeout, but at most
        LONGEST_GRACE_S.
        """
        return min(LONGEST_GRACE_S, self.timeout / 5)


def is_text(given: object, text: str) -> bool:
    """Whether `given` is the text `text`; False for an array, which `==` would compare element by element."""
    return isinstance(given, str) and given == text


def check_plan(plan: object) -> None:
    """Raise ExchangeError if `plan` is not a Plan, a Transposed plan (for gradients) or a Program."""
    if not isinstance(plan, Plan | Transposed | Program):
        what = f"compile takes a Plan or Program, got {type(plan).__name__}"
        fix = "pass shardmath.plan(src, dst), or shardmath.schedule(plan)"
        # Not checked by its class, whose import would load all formats and transforms.
        fix += ", and a Transformed to compile_transformed"
        raise ExchangeError(f"{what}; {fix}")


def check_settings(party: Party, plan: Plan | Transposed | Program, settings: Settings) -> None:
    """Raise ExchangeError if `settings` are invalid for `plan` and the process group, or if the group lacks a rank of
    the plan. `party` is this rank as a member of that group.
    """
    _check_numbers(plan, settings)
    _check_commit(party, settings)
    _check_agree(settings)
    _check_engine(party, settings)
    _check_ranks(party, plan)


def _check_numbers(plan: Plan | Transposed | Program, settings: Settings) -> None:
    """Raise ExchangeError for an invalid timeout, thread name or limit."""
    if not is_time(settings.timeout):
        raise ExchangeError(word_bad_time(settings.timeout))
    if not isinstance(settings.thread, str | None):
        raise ExchangeError(
            f"thread={settings.thread!r} is not a str; pass a name such as 'refit', or leave it out"
        )
    limit = settings.max_inflight_bytes
    if not isinstance(limit, int) or not 0 < limit < 1 << 63:
        what = f"max_inflight_bytes={shown(limit)} is not a number of bytes"
        raise ExchangeError(f"{what}; pass an int of at least 1 and below 2**63")
    if isinstance(plan, Program) and limit != plan.max_inflight_bytes:
        what = f"max_inflight_bytes={limit}, but the program has {plan.max_inflight_bytes}"
        raise ExchangeError(f"{what}; leave it out, or pass it to shardmath.schedule instead")
    if isinstance(plan, Program) and plan.max_ops_per_group > MOST_OPS:
        most = plan.max_ops_per_group
        what = f"the program has max_ops_per_group={most}, where at most {MOST_OPS} can be posted"
        raise ExchangeError(f"{what}; schedule the plan with max_ops_per_group={MOST_OPS} or less")


def _check_commit(party: Party, settings: Settings) -> None:
    """Raise ExchangeError for an unknown `commit`, and for "all" on a group without a store."""
    if not any(is_text(settings.commit, known) for known in (DIRECT, ALL)):
        what = f"commit={shown(settings.commit)} is unknown"
        raise ExchangeError(f"{what}; pass {DIRECT!r} or {ALL!r}")
    if settings.commit == ALL and compat.store_of(party.group) is None:
        what = f"commit={ALL!r} needs a process group with a key-value store, and this one has none"
        raise ExchangeError(f"{what}; compile with commit={DIRECT!r}, or on another group")


def _check_agree(settings: Settings) -> None:
    """Raise ExchangeError for an unknown `agree`."""
    if not any(is_text(settings.agree, known) for known in (EVERY, ONCE)):
        what = f"agree={shown(settings.agree)} is unknown"
        raise ExchangeError(f"{what}; pass {EVERY!r} or {ONCE!r}")


def _check_engine(party: Party, settings: Settings) -> None:
    """Raise ExchangeError for an engine that the group's transport does not have."""
    engines = transport_of(party.group).ENGINES
    # The type first, since an array is not hashable.
    if not isinstance(settings.engine, str) or settings.engine not in engines:
        known = ", ".join(map(repr, ("auto", *engines)))
        backend = compat.backend_of(party.group)
        what = f"engine={settings.engine!r} is unknown on {backend}"
        raise ExchangeError(f"{what}; pass one of {known}")


def _check_ranks(party: Party, plan: Plan | Transposed | Program) -> None:
    """Raise ExchangeError if the group lacks a rank of the plan."""
    outside = sorted(set(plan.ranks) - set(party.ranks))
    if outside:
        ranks = (
            f"the plan has ranks {list(plan.ranks)[:SHOWN]}, the group {list(party.ranks)[:SHOWN]}"
        )
        what = f"{ranks}: {outside[:SHOWN]} are not in the group"
        raise ExchangeError(f"{what}; compile on a group that has all of them")


def check_arithmetic(outline: Outline) -> None:
    """Raise ExchangeError if `outline`, one rank's part of a plan, needs an operation, such as a sum, that torch lacks
    for a tensor's dtype.
    """
    plan = plan_of(outline.given)
    for name, op in sorted(outline.operations):
        dtype = plan.dst[name][0].dtype
        if dtypes.missing(dtype, op):
            what = f"tensor {name!r} needs {op!r} of {dtype}, which torch does not have"
            fix = "cast it to float32 before the move and plan with dtype='float32'"
            raise ExchangeError(f"{what}; {fix}")
