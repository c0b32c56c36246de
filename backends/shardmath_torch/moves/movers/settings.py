"""Settings: what every rank must pass alike with a plan, and what speaks against a plan or a setting."""

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
"""How bytes come to the destination: as they arrive, or on all ranks at the end, or on none."""

LONGEST_GRACE_S = 5.0
"""For finding out who failed, however long ranks wait for each other."""

SHOWN = 16
"""Ranks that an error shows."""


class Settings(NamedTuple):
    """What every rank must pass alike, with the plan or program."""

    timeout: float = DEFAULT_TIMEOUT_S
    max_inflight_bytes: int | None = None
    engine: str = "auto"
    thread: str | None = None
    commit: str = DIRECT
    agree: str = EVERY

    @property
    def text(self) -> str:
        """How agreement words them; a thread stands apart, since its name need not be given."""
        given = self._asdict()
        del given["thread"]
        if is_text(self.commit, DIRECT):
            del given["commit"]
        if is_text(self.agree, EVERY):
            del given["agree"]
        return ", ".join(f"{name}={value!r}" for name, value in given.items())

    @property
    def patience(self) -> float:
        """Seconds to wait for a peer; the rest of the timeout is for finding out who failed."""
        # A fifth of the grace is for what comes after it: letting go, and telling the caller.
        return self.timeout - 1.2 * self.grace

    @property
    def grace(self) -> float:
        """Seconds for asking the others, once something failed."""
        return min(LONGEST_GRACE_S, self.timeout / 5)


def is_text(given: object, text: str) -> bool:
    """Whether that is given; asked so that an array, too, has an answer."""
    return isinstance(given, str) and given == text


def check_plan(plan: object) -> None:
    """Raise ExchangeError for what is neither a plan nor a program."""
    if not isinstance(plan, Plan | Transposed | Program):
        fix = "pass shardmath.plan(src, dst), or what shardmath.schedule makes of it"
        # In words, since the class would bring all formats and transforms along.
        fix += "; compile_transformed takes a Transformed"
        raise ExchangeError(f"compile takes a Plan, got {type(plan).__name__}; {fix}")


def check_settings(party: Party, plan: Plan | Transposed | Program, settings: Settings) -> None:
    """Raise ExchangeError for settings that are of no use for this plan in this group."""
    _check_numbers(plan, settings)
    _check_commit(party, settings)
    _check_agree(settings)
    _check_engine(party, settings)
    _check_ranks(party, plan)


def _check_numbers(plan: Plan | Transposed | Program, settings: Settings) -> None:
    """Raise ExchangeError for a time, a name or a limit that is of no use."""
    if not is_time(settings.timeout):
        raise ExchangeError(word_bad_time(settings.timeout))
    if not isinstance(settings.thread, str | None):
        raise ExchangeError(
            f"thread={settings.thread!r} is not a name; pass a text, or leave it out"
        )
    limit = settings.max_inflight_bytes
    if not isinstance(limit, int) or not 0 < limit < 1 << 63:
        what = f"max_inflight_bytes={shown(limit)} is not a number of bytes"
        raise ExchangeError(f"{what}; pass an int from 1 on")
    if isinstance(plan, Program) and limit != plan.max_inflight_bytes:
        own = f"the program has {plan.max_inflight_bytes} of its own"
        fix = "leave it out, or schedule the plan with it"
        raise ExchangeError(f"max_inflight_bytes={limit}, {own}; {fix}")
    if isinstance(plan, Program) and plan.max_ops_per_group > MOST_OPS:
        own = f"the program has up to {plan.max_ops_per_group} messages of a rank in a round"
        raise ExchangeError(f"{own}; schedule the plan with max_ops_per_group={MOST_OPS} or less")


def _check_commit(party: Party, settings: Settings) -> None:
    """Raise ExchangeError for a way to commit that there is not, and where nobody could decide."""
    if not any(is_text(settings.commit, known) for known in (DIRECT, ALL)):
        raise ExchangeError(f"commit={shown(settings.commit)}; pass {DIRECT!r} or {ALL!r}")
    if settings.commit == ALL and compat.store_of(party.group) is None:
        what = "the process group has no store in which ranks could decide"
        raise ExchangeError(f"{what}; compile with commit={DIRECT!r}")


def _check_agree(settings: Settings) -> None:
    """Raise ExchangeError for a way to agree that there is not."""
    if not any(is_text(settings.agree, known) for known in (EVERY, ONCE)):
        raise ExchangeError(f"agree={shown(settings.agree)}; pass {EVERY!r} or {ONCE!r}")


def _check_engine(party: Party, settings: Settings) -> None:
    """Raise ExchangeError for an engine that the group's transport does not have."""
    engines = transport_of(party.group).ENGINES
    # An array is not hashable, hence asked for its type first.
    if not isinstance(settings.engine, str) or settings.engine not in engines:
        known = ", ".join(map(repr, ("auto", *engines)))
        backend = compat.backend_of(party.group)
        what = f"engine {settings.engine!r} is unknown on {backend}"
        raise ExchangeError(f"{what}; use one of {known}")


def _check_ranks(party: Party, plan: Plan | Transposed | Program) -> None:
    """Raise ExchangeError where the group lacks a rank of the plan."""
    outside = sorted(set(plan.ranks) - set(party.ranks))
    if outside:
        there = list(plan.ranks)[:SHOWN]
        here = list(party.ranks)[:SHOWN]
        what = (
            f"the plan has ranks {there}, the group {here}: {outside[:SHOWN]} are not in the group"
        )
        raise ExchangeError(f"{what}; compile on a group that has all of them")


def check_arithmetic(mine: Outline) -> None:
    """Every operation that this rank will do must exist in torch for the dtype that it is done in."""
    plan = plan_of(mine.given)
    for name, op in sorted(mine.operations):
        dtype = plan.dst[name][0].dtype
        if dtypes.missing(dtype, op):
            what = f"tensor {name!r} needs {op!r} of {dtype}, which torch does not have"
            fix = "cast it to float32 before the move and plan with dtype='float32'"
            raise ExchangeError(f"{what}; {fix}")
