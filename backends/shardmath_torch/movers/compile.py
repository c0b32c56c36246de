"""`compile` a plan, or a program made of one, once; `move` tensors many times.

1. Ranks are global ranks of torch.distributed. Every rank of the plan is in the group; ranks that
   the plan does not name take part in agreement and move nothing.
2. Both calls are collective over the group, and every rank makes those of one group in one order.
   Before a byte moves all ranks agree (`agree`): an objection of one is an ExchangeError on all,
   and no destination has changed.
3. `timeout` is how long a rank waits for another without progress; after that, or as soon as a
   connection breaks, every survivor raises an ExchangeError that names the rank that failed first,
   where that can be found out (`failure`). The mover is then broken, and so is the group: its
   pending messages had to be cancelled. So they are when a move or a compile is left by any other
   exception once it has begun to vote, as by Ctrl-C (`turns`).
4. Threads: one at a time has a group. Ranks pair calls by their order and the thread's name, so two
   threads that share a group and come in other orders on other ranks get an ExchangeError on all; a
   group for each thread never does.
5. A plan is cut into messages here, at a pace on which all agree; a program's messages are part of
   what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.programs.cutting import set_pace
from shardmath.programs.part import INFLIGHT_BYTES, Outline, Part, outline_part, plan_of
from shardmath.programs.program import Program
from shardmath_torch import compat, dtypes
from shardmath_torch.agreement.agree import Ballot
from shardmath_torch.agreement.naming import describe_crossing, name_given, word_objection
from shardmath_torch.agreement.party import Party, is_time, word_bad_time
from shardmath_torch.agreement.transport import join
from shardmath_torch.agreement.turns import in_thread
from shardmath_torch.commits.shadows import Shadows
from shardmath_torch.exchange.task import Engine, Task, transport_of
from shardmath_torch.movers.calls import EVERY, ONCE
from shardmath_torch.movers.carriers import Carrier, Whole, make_shadows
from shardmath_torch.movers.mover import Mover, Ready
from shardmath_torch.movers.stages import Stage, list_own

__all__ = ["MakeCarrier", "Mover", "Settings", "compile", "make_ready", "make_whole"]

DEFAULT_ENGINE = "exchange"

DEFAULT_TIMEOUT_S = 60.0

DIRECT, ALL = "direct", "all"
"""How bytes come to the destination: as they arrive, or on all ranks at the end, or on none."""

LONGEST_GRACE_S = 5.0
"""For finding out who failed, however long ranks wait for each other."""

SHOWN = 16
"""Ranks that an error shows."""

_T = TypeVar("_T")

MakeCarrier: TypeAlias = Callable[[Task, Engine, Shadows | None], Carrier]
"""Of a rank's task, the engine that would move all of it, and shadows where it is put in place at the end."""


def make_whole(task: Task, engine: Engine, shadows: Shadows | None) -> Whole:
    """What carries all bytes."""
    return Whole(task.part, engine, shadows)


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
        if _is_text(self.commit, DIRECT):
            del given["commit"]
        if _is_text(self.agree, EVERY):
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


def compile(
    plan: Plan | Transposed | Program,
    *,
    group: compat.Group | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    max_inflight_bytes: int | None = None,
    engine: str = "auto",
    thread: str | None = None,
    commit: str = DIRECT,
    agree: str = EVERY,
) -> Mover:
    """The plan or program made ready on this rank. Collective over `group` (default: all ranks).

    `timeout` is in seconds; `max_inflight_bytes` (1 GiB if not given) bounds a rank's staging memory. A program has a
    bound of its own, for the bytes of its messages; staging begins each at a multiple of 16 bytes. `engine` is
    "exchange", "broadcast" (the slow reference, on gloo, which moves a program's plan) or "auto". `thread` stands for
    the calling thread's name, by which ranks see that their calls belong together: give one where threads of different
    names move together, such as the main thread of trainers and a worker thread of engines. With `commit="all"` every
    rank receives beside its destination, in as many bytes once more (`Plan.shadow_bytes`), and all put it in place, or
    none does: a failure leaves destinations as they were. With `agree="once"` ranks vote before the first move of its
    kind alone (`acknowledge`, `check` and whether it is in a block), and what one objects to later breaks the group.
    Raises ExchangeError on every rank where ranks pass different
    plans or settings, where the group lacks a rank of the plan, where torch lacks arithmetic that the plan needs, or
    for a `max_inflight_bytes` that is not the program's own.
    """
    settings = Settings(timeout, max_inflight_bytes, engine, thread, commit, agree)
    return Mover(make_ready(plan, group, settings))


def make_ready(
    plan: Plan | Transposed | Program,
    group: compat.Group | None,
    settings: Settings,
    stages: tuple[Stage, ...] = (),
    make_carrier: MakeCarrier = make_whole,
) -> Ready:
    """What ranks agree on, for a mover of these stages. Collective over the group; raises as `compile` does."""
    settings = settings._replace(max_inflight_bytes=_read_limit(plan, settings.max_inflight_bytes))
    if _is_text(settings.engine, "auto"):
        settings = settings._replace(engine=DEFAULT_ENGINE)
    # The vote that refuses a bad time needs a time as well.
    waiting = settings._replace(timeout=DEFAULT_TIMEOUT_S)
    if is_time(settings.timeout):
        settings = settings._replace(timeout=float(settings.timeout))
        waiting = settings
    party = join(compat.group_of(group), waiting.patience, waiting.grace)
    return party.together(
        lambda: _agree(party.with_own_key(), plan, settings, stages, make_carrier),
        lambda failure, rank: describe_crossing(plan, failure.tensor, rank),
    )


def _is_text(given: object, text: str) -> bool:
    """Whether that is given; asked so that an array, too, has an answer."""
    return isinstance(given, str) and given == text


def _read_limit(plan: Plan | Transposed | Program, given: int | None) -> int:
    """The limit as an int, or as it is where it is none; that of the program or ours where it is not given."""
    number: object = given
    if isinstance(number, np.integer):
        return int(number)
    if given is not None:
        return given
    return plan.max_inflight_bytes if isinstance(plan, Program) else INFLIGHT_BYTES


def _agree(
    party: Party,
    plan: Plan | Transposed | Program,
    settings: Settings,
    stages: tuple[Stage, ...],
    make_carrier: MakeCarrier,
) -> Ready:
    """What a mover is made of, on which ranks agree by two votes or three."""
    # What fails here is an objection: the others wait for this rank's vote.
    mine, objection = _attempt(lambda: _check_and_outline(party, plan, settings))
    claim = "compile"
    peers = 0
    if mine is not None:
        # Only now is all that is worded here what it should be.
        claim = f"compile({name_given(plan)}, {settings.text}){in_thread(settings.thread)}"
        peers = mine.peers
    ballots = party.vote(Ballot(claim, objection=objection, peers=peers))
    most_peers = max(ballot.peers for ballot in ballots)
    assert mine is not None, "who objects does not get past the vote"
    # One addend after the other takes more rounds, so all ranks do it only where one has to.
    for by_addend in (False, True):
        make = functools.partial(_make, party, mine, settings, most_peers, by_addend)
        made, objection = _attempt(make)
        is_unordered = made is not None and not made[0].keeps_order
        ballots = party.vote(Ballot(claim, objection=objection, is_unordered=is_unordered))
        if not any(ballot.is_unordered for ballot in ballots):
            break
    assert made is not None, "who objects does not get past the vote"
    part, engine = made
    shadows = None
    if settings.commit == ALL:
        shadows = make_shadows(part, list_own(stages))
    task = Task(part, party.group, party.wire)
    carrier = make_carrier(task, engine, shadows)
    return Ready(plan, party, part, carrier, stages, settings.thread, settings.agree)


def _make(
    party: Party, mine: Outline, settings: Settings, peers: int, by_addend: bool
) -> tuple[Part, Engine]:
    """This rank's part, and the engine that moves it."""
    limit = settings.max_inflight_bytes
    assert limit is not None, "read before ranks vote"
    made = mine.part(peers=peers, max_inflight_bytes=limit, by_addend=by_addend)
    assert made.keeps_order or not isinstance(mine.given, Program), "phases bring addends in order"
    make_engine = transport_of(party.group).ENGINES[settings.engine]
    task = Task(made, party.group, party.wire)
    return made, make_engine(task)


def _attempt(make: Callable[[], _T]) -> tuple[_T | None, str]:
    """What is made, or why not, to be said in a vote: others wait for this rank's."""
    try:
        return make(), ""
    except Exception as error:
        return None, word_objection(error)


def _check_and_outline(
    party: Party, plan: Plan | Transposed | Program, settings: Settings
) -> Outline:
    """What this rank will do, but for the pace. Raises ShardError to object."""
    _check_plan(plan)
    _check_settings(plan, settings)
    _check_commit(party, settings)
    _check_agree(settings)
    _check_engine(party, settings)
    _check_ranks(party, plan)
    mine = outline_part(plan, party.rank)
    _check_arithmetic(mine)
    if not isinstance(plan, Program):
        # A limit without room is found here, in every rank's own words.
        limit = settings.max_inflight_bytes
        assert limit is not None, "read before ranks vote"
        set_pace(plan.ranks, peers=mine.peers, max_inflight_bytes=limit, by_addend=False)
    return mine


def _check_plan(plan: object) -> None:
    """Raise ExchangeError for what is neither a plan nor a program."""
    if not isinstance(plan, Plan | Transposed | Program):
        fix = "pass shardmath.plan(src, dst), or what shardmath.schedule makes of it"
        raise ExchangeError(f"compile takes a Plan, got {type(plan).__name__}; {fix}")


def _check_settings(plan: Plan | Transposed | Program, settings: Settings) -> None:
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


def _check_commit(party: Party, settings: Settings) -> None:
    """Raise ExchangeError for a way to commit that there is not, and where nobody could decide."""
    if not any(_is_text(settings.commit, known) for known in (DIRECT, ALL)):
        raise ExchangeError(f"commit={shown(settings.commit)}; pass {DIRECT!r} or {ALL!r}")
    if settings.commit == ALL and compat.store_of(party.group) is None:
        what = "the process group has no store in which ranks could decide"
        raise ExchangeError(f"{what}; compile with commit={DIRECT!r}")


def _check_agree(settings: Settings) -> None:
    """Raise ExchangeError for a way to agree that there is not."""
    if not any(_is_text(settings.agree, known) for known in (EVERY, ONCE)):
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


def _check_arithmetic(mine: Outline) -> None:
    """Every operation that this rank will do must exist in torch for the dtype that it is done in."""
    plan = plan_of(mine.given)
    for name, op in sorted(mine.operations):
        dtype = plan.dst[name][0].dtype
        if dtypes.missing(dtype, op):
            what = f"tensor {name!r} needs {op!r} of {dtype}, which torch does not have"
            fix = "cast it to float32 before the move and plan with dtype='float32'"
            raise ExchangeError(f"{what}; {fix}")
