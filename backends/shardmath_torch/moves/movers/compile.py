"""`compile` a plan, or a program made of one, once; `move` tensors many times.

1. Ranks are global ranks of torch.distributed, or places in a joint group (`joint`). Every rank of
   the plan is in the group; ranks that the plan does not name take part in agreement and move nothing.
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
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.errors import ExchangeError
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.plans.programs.cutting import set_pace
from shardmath.plans.programs.part import INFLIGHT_BYTES, Outline, RankProgram, outline_part
from shardmath.plans.programs.program import Program
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.agree import Ballot
from shardmath_torch.groups.agreement.naming import attempt, describe_crossing, name_given
from shardmath_torch.groups.agreement.party import Party, is_time
from shardmath_torch.groups.agreement.transport import join
from shardmath_torch.groups.agreement.turns import in_thread
from shardmath_torch.moves.commits.blocks import block_of
from shardmath_torch.moves.commits.shadows import Shadows
from shardmath_torch.moves.exchange.task import Engine, Task, transport_of
from shardmath_torch.moves.movers.calls import EVERY
from shardmath_torch.moves.movers.carriers import Carrier, Whole, make_shadows
from shardmath_torch.moves.movers.mover import Mover
from shardmath_torch.moves.movers.ready import Former, Ready
from shardmath_torch.moves.movers.settings import (
    ALL,
    DEFAULT_ENGINE,
    DEFAULT_TIMEOUT_S,
    DIRECT,
    Settings,
    check_arithmetic,
    check_plan,
    check_settings,
    is_text,
)
from shardmath_torch.moves.movers.stages import Stage, list_own

__all__ = ["AgreeFirst", "MakeCarrier", "Mover", "compile", "make_ready", "make_whole"]

SAID = struct.Struct("<QB")
"""What a rank tells the others: how many moves it has committed, and how its part follows the former one."""

NOT_AT_ALL, AT_ONCE, BY_ADDEND = range(3)
"""How a part follows the former one: not; all addends at once; or one after the other."""

AgreeFirst: TypeAlias = Callable[[object, compat.Group | None, "Settings"], None]
"""What else ranks agree on before they agree on a plan. Collective."""

MakeCarrier: TypeAlias = Callable[[Task, Engine, Shadows | None], Carrier]
"""Of a rank's task, the engine that would move all of it, and shadows where it is put in place at the end."""


def make_whole(task: Task, engine: Engine, shadows: Shadows | None) -> Whole:
    """What carries all bytes."""
    return Whole(task.part, engine, shadows)


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
    agree_first: AgreeFirst | None = None,
) -> Ready:
    """What ranks agree on, for a mover of these stages. Collective over the group; raises as `compile` does.

    Whoever has agreed on something else before gives that as `agree_first`, for the plans that follow.
    """
    maker = _Maker(settings, stages, make_carrier, agree_first)
    return _make_ready(group, _Asked(plan, maker))


@dataclass(frozen=True, slots=True)
class _Maker:
    """How plans are made ready, this one and those that follow."""

    settings: Settings
    stages: tuple[Stage, ...]
    make_carrier: MakeCarrier
    agree_first: AgreeFirst | None

    def again(
        self,
        plan: object,
        group: compat.Group,
        timeout: float | None,
        former: Former,
        take: Callable[[Ready], None],
    ) -> None:
        """As `Again` has it."""
        settings = self.settings
        if timeout is not None:
            settings = settings._replace(timeout=timeout)
        if self.agree_first is not None:
            self.agree_first(plan, group, settings)
        maker = replace(self, settings=settings)
        _make_ready(group, _Asked(plan, maker, former), take)  # type: ignore[arg-type]


class _Asked(NamedTuple):
    """What is to be made ready, and how; `former` is what a mover was, which goes on by this plan."""

    plan: Plan | Transposed | Program
    maker: _Maker
    former: Former | None = None
    settings: Settings = Settings()


def _make_ready(
    group: compat.Group | None, asked: _Asked, take: Callable[[Ready], None] | None = None
) -> Ready:
    """As `make_ready` has it; `take` is called under the group's turn."""
    plan = asked.plan
    settings = asked.maker.settings
    settings = settings._replace(max_inflight_bytes=_read_limit(plan, settings.max_inflight_bytes))
    if is_text(settings.engine, "auto"):
        settings = settings._replace(engine=DEFAULT_ENGINE)
    # The vote that refuses a bad time needs a time as well.
    waiting = settings._replace(timeout=DEFAULT_TIMEOUT_S)
    if is_time(settings.timeout):
        settings = settings._replace(timeout=float(settings.timeout))
        waiting = settings
    party = join(compat.group_of(group), waiting.patience, waiting.grace)
    asked = asked._replace(settings=settings)

    def act() -> Ready:
        ready = _agree(party.with_own_key(), asked)
        if take is not None:
            take(ready)
        return ready

    return party.together(
        act,
        lambda failure, rank: describe_crossing(plan, failure.tensor, rank),
    )


def _read_limit(plan: Plan | Transposed | Program, given: int | None) -> int:
    """The limit as an int, or as it is where it is none; that of the program or ours where it is not given."""
    number: object = given
    if isinstance(number, np.integer):
        return int(number)
    if given is not None:
        return given
    return plan.max_inflight_bytes if isinstance(plan, Program) else INFLIGHT_BYTES


class _Made(NamedTuple):
    """What this rank does, and what carries it; `keeps_bound` is that of `Ready`."""

    part: RankProgram
    carrier: Carrier
    keeps_bound: bool


class _Mine(NamedTuple):
    """What this rank will do, but for the pace: an outline, or what follows the former part at the former pace."""

    peers: int
    outline: Outline | None = None
    followed: _Made | None = None


class _Told(NamedTuple):
    """What ranks have told each other.

    The most peers of any rank, the most moves that one has committed, and whether all follow at their former pace.
    """

    claim: str
    peers: int
    version: int
    all_follow: bool


def _agree(party: Party, asked: _Asked) -> Ready:
    """What a mover is made of, on which ranks agree by one vote, two or three."""
    mine, told = _tell(party, asked)
    made = mine.followed if told.all_follow else _make_all(party, asked, mine, told)
    assert made is not None, "who objects does not get past a vote"
    # Who has left has nothing to do at its ends, as long as it is in the group.
    has_left = isinstance(asked.plan, Plan) and party.rank in asked.plan.left
    return Ready(
        given=asked.plan,
        party=party,
        part=made.part,
        carrier=made.carrier,
        stages=() if has_left else asked.maker.stages,
        thread=asked.settings.thread,
        agree=asked.settings.agree,
        peers=told.peers,
        version=told.version,
        keeps_bound=made.keeps_bound,
        again=asked.maker.again,
    )


def _tell(party: Party, asked: _Asked) -> tuple[_Mine, _Told]:
    """The first vote: what this rank will do, and what is to be known of all."""
    # What fails here is an objection: the others wait for this rank's vote.
    mine, objection = attempt(lambda: _check_and_outline(party, asked))
    claim = "compile"
    peers = 0
    if mine is not None:
        # Only now is all that is worded here what it should be.
        settings = asked.settings
        claim = f"compile({name_given(asked.plan)}, {settings.text}){in_thread(settings.thread)}"
        peers = mine.peers
    version = 0 if asked.former is None else asked.former.version
    said = SAID.pack(version, _tell_follow(mine))
    ballots = party.vote(Ballot(claim, objection=objection, peers=peers, said=said))
    assert mine is not None, "who objects does not get past the vote"
    versions, follow = zip(*(SAID.unpack(ballot.said) for ballot in ballots), strict=True)
    # All find the same. Whose former pace is another one cannot go on at it.
    paces = {(ballot.peers, how) for ballot, how in zip(ballots, follow, strict=True)}
    all_follow = len(paces) == 1 and NOT_AT_ALL not in follow
    most_peers = max(ballot.peers for ballot in ballots)
    return mine, _Told(claim, most_peers, max(versions), all_follow)


def _tell_follow(mine: _Mine | None) -> int:
    """How this rank's part follows the former one."""
    if mine is None or mine.followed is None:
        return NOT_AT_ALL
    pace = mine.followed.part.pace
    return BY_ADDEND if pace is not None and pace.by_addend else AT_ONCE


def _make_all(party: Party, asked: _Asked, mine: _Mine, told: _Told) -> _Made | None:
    """What this rank does, as all do at one pace; by one vote or two."""
    # One addend after the other takes more rounds, so all ranks do it only where one has to.
    for by_addend in (False, True):
        make = functools.partial(_make, party, asked, mine, told.peers, by_addend)
        made, objection = attempt(make)
        is_unordered = made is not None and not made.part.keeps_order
        ballots = party.vote(Ballot(told.claim, objection=objection, is_unordered=is_unordered))
        if not any(ballot.is_unordered for ballot in ballots):
            break
    return made


def _make(party: Party, asked: _Asked, mine: _Mine, peers: int, by_addend: bool) -> _Made:
    """This rank's part, and what carries it: the former ones, as far as they go on."""
    followed = _follow(party, asked, peers, by_addend)
    if followed is not None:
        return followed
    plan = asked.plan
    outline = mine.outline or outline_part(plan, party.rank)
    limit = _limit_of(asked)
    part = outline.part(peers=peers, max_inflight_bytes=limit, by_addend=by_addend)
    assert part.keeps_order or not isinstance(plan, Program), "phases bring addends in order"
    return _Made(part, _make_carrier(party, asked, part), keeps_bound=False)


def _follow(party: Party, asked: _Asked, peers: int, by_addend: bool) -> _Made | None:
    """What this rank did, as it goes on by the plan at this pace; None where it has to be made anew."""
    plan, former = asked.plan, asked.former
    if former is None or isinstance(plan, Program):
        return None
    limit = _limit_of(asked)
    pace = set_pace(plan.ranks, peers=peers, max_inflight_bytes=limit, by_addend=by_addend)
    part = former.follow(plan, pace)
    if part is None:
        return None
    carrier = former.keep_carrier(Task(part, party.group, party.wire))
    if carrier is not None:
        return _Made(part, carrier, keeps_bound=True)
    return _Made(part, _make_carrier(party, asked, part), keeps_bound=False)


def _limit_of(asked: _Asked) -> int:
    limit = asked.settings.max_inflight_bytes
    assert limit is not None, "read before ranks vote"
    return limit


def _make_carrier(party: Party, asked: _Asked, part: RankProgram) -> Carrier:
    """What carries the part, on tensors of which nothing is known."""
    task = Task(part, party.group, party.wire)
    engine = transport_of(party.group).ENGINES[asked.settings.engine](task)
    shadows = None
    if asked.settings.commit == ALL:
        shadows = make_shadows(part, list_own(asked.maker.stages))
    return asked.maker.make_carrier(task, engine, shadows)


def _check_and_outline(party: Party, asked: _Asked) -> _Mine:
    """What this rank will do, but for the pace. Raises ShardError to object."""
    plan, settings, former = asked.plan, asked.settings, asked.former
    check_plan(plan)
    check_settings(party, plan, settings)
    if former is not None and former.objection:
        raise ExchangeError(former.objection)
    if former is not None and block_of(party.group) is not None:
        raise ExchangeError("in smt.commit movers go on as they are; leave it, and replan then")
    if former is not None:
        peers = former.count_peers(plan)
        pace = former.part.pace
        if peers is not None and pace is not None:
            return _Mine(peers, followed=_follow(party, asked, peers, pace.by_addend))
    mine = outline_part(plan, party.rank)
    check_arithmetic(mine)
    if not isinstance(plan, Program):
        # A limit without room is found here, in every rank's own words.
        limit = _limit_of(asked)
        set_pace(plan.ranks, peers=mine.peers, max_inflight_bytes=limit, by_addend=False)
    return _Mine(mine.peers, outline=mine)
