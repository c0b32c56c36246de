"""Compile: `compile` a plan, or a program made of one, once; `move` tensors many times.

1. Ranks are global ranks of torch.distributed, or places in a joint group (`joint`). Every rank of
   the plan is in the group; other ranks of the group vote, and move nothing.
2. Both calls are collective over the group, and every rank makes a group's calls in the same order.
   Before a byte moves all ranks vote (`agree`): an objection of one is an ExchangeError on all, and
   no destination has changed.
3. `timeout` is how long a rank waits for another without progress; after that, or as soon as a
   connection breaks, every survivor raises an ExchangeError that names the rank that failed first,
   if that can be found out (`failure`). The mover and its group are then broken, since the messages
   in flight had to be cancelled. The same happens if any other exception, as Ctrl-C, ends a move or
   a compile after its vote has begun (`turns`).
4. Threads take turns on a group. Ranks pair calls by their order and the thread's name, so if two
   threads share a group and call in different orders on different ranks, all raise an
   ExchangeError; with a group per thread they never do.
5. A plan is cut into messages here, at a pace on which all ranks agree; a program has its messages
   already.
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
"""A ballot's `said`: the number of moves that the rank has committed, and how its part follows the previous one."""

NOT_AT_ALL, AT_ONCE, BY_ADDEND = range(3)
"""How a part follows the previous one: not; with all addends at once; or one addend after another."""

AgreeFirst: TypeAlias = Callable[[object, compat.Group | None, "Settings"], None]
"""A collective call in which ranks agree on something else before they agree on a plan."""

MakeCarrier: TypeAlias = Callable[[Task, Engine, Shadows | None], Carrier]
"""Makes a carrier of a rank's task, an engine that moves all of it, and shadows if the move is committed."""


def make_whole(task: Task, engine: Engine, shadows: Shadows | None) -> Whole:
    """Return the object that moves all bytes of `task`, this rank's part of a plan, by `engine`. The bytes are received
    into `shadows` (second buffers of the destinations, used until the move is committed) if given, else into the
    destinations."""
    return Whole(task.part, engine, shadows)


@compat.untraced
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
    """Return a Mover, which moves this rank's tensors by the plan or program whenever all ranks call it. Collective
    over `group` (default: all ranks). Options choose the implementation (`engine`), the name that pairs calls of
    different ranks (`thread`), whether a failed move leaves destinations unchanged (`commit`), and how often ranks vote
    (`agree`).

    - `timeout`: in seconds.
    - `max_inflight_bytes` (default: 1 GiB): bound of a rank's staging memory. A program has its own bound, for its
      messages' bytes; in staging each message begins at a multiple of 16 bytes.
    - `engine`: "exchange", "broadcast" (the slow reference, on gloo, which moves a program's plan) or "auto".
    - `thread`: replaces the calling thread's name in pairing calls of different ranks. Pass one if threads of different
      names move together, as the main thread of trainers and a worker thread of engines.
    - `commit="all"`: every rank receives next to its destination, in as many bytes again (`Plan.shadow_bytes`), and all
      ranks put theirs in place, or none does: a failure leaves destinations as they were.
    - `agree="once"`: ranks vote only before the first move of a kind (`acknowledge`, `check`, inside of a block), and
      a later objection breaks the group.

    Raises ExchangeError on every rank if ranks pass different plans or settings, the group lacks a rank of the plan,
    torch lacks arithmetic that the plan needs, or `max_inflight_bytes` differs from the program's.
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
    """Compile a plan with `settings`, and return the plan, connections and memory that a Mover needs. `stages` do extra
    work, such as casts, around each move, `make_carrier` makes the object that moves the bytes, and `agree_first` is a
    collective check that `Mover.replan` calls first.

    With `agree_first` ranks compare arguments other than the plan, on which they agreed before this call. Collective;
    raises ExchangeError on all ranks if the plans or settings differ among ranks.
    """
    maker = _Maker(settings, stages, make_carrier, agree_first)
    return _make_ready(group, _Request(plan, maker))


@dataclass(frozen=True, slots=True)
class _Maker:
    """The settings and functions that make a plan ready, and later plans of the same mover."""

    settings: Settings
    stages: tuple[Stage, ...]
    make_carrier: MakeCarrier
    agree_first: AgreeFirst | None

    def again(
        self,
        plan: object,
        group: compat.Group,
        timeout: float | None,
        find_former: Callable[[], Former],
        take: Callable[[Ready], None],
    ) -> None:
        """Compile another plan for the mover whose state so far is what `find_former` returns, with the same settings
        (except `timeout`, if given), and call `take` with the result."""
        settings = self.settings
        if timeout is not None:
            settings = settings._replace(timeout=timeout)
        if self.agree_first is not None:
            self.agree_first(plan, group, settings)
        maker = replace(self, settings=settings)
        request = _Request(plan, maker)  # type: ignore[arg-type]
        _make_ready(group, request, find_former, take)


class _Request(NamedTuple):
    """A plan to make ready, and how; `former` is the state of the mover that continues by this plan."""

    plan: Plan | Transposed | Program
    maker: _Maker
    former: Former | None = None
    settings: Settings = Settings()


def _make_ready(
    group: compat.Group | None,
    request: _Request,
    find_former: Callable[[], Former | None] = lambda: None,
    take: Callable[[Ready], None] = lambda ready: None,
) -> Ready:
    """Agree on the request in a turn of the group. Within the turn, call `find_former` before, and `take` with the
    result."""
    plan = request.plan
    settings = request.maker.settings
    settings = settings._replace(max_inflight_bytes=_read_limit(plan, settings.max_inflight_bytes))
    if is_text(settings.engine, "auto"):
        settings = settings._replace(engine=DEFAULT_ENGINE)
    # The vote that rejects a bad timeout needs a valid one.
    valid_settings = settings._replace(timeout=DEFAULT_TIMEOUT_S)
    if is_time(settings.timeout):
        settings = settings._replace(timeout=float(settings.timeout))
        valid_settings = settings
    party = join(compat.group_of(group), valid_settings.patience, valid_settings.grace)
    request = request._replace(settings=settings)

    def act() -> Ready:
        ready = _agree(party.with_own_key(), request._replace(former=find_former()))
        take(ready)
        return ready

    return party.together(
        act,
        # If a rank fails, the error names a tensor that was to cross to or from that rank.
        lambda failure, rank: describe_crossing(plan, failure.tensor, rank),
    )


def _read_limit(plan: Plan | Transposed | Program, given: int | None) -> int:
    """The given limit, as an int if it is an integer; if None, the program's limit or the default."""
    number: object = given
    if isinstance(number, np.integer):
        return int(number)
    if given is not None:
        return given
    return plan.max_inflight_bytes if isinstance(plan, Program) else INFLIGHT_BYTES


class _PartCarrier(NamedTuple):
    """This rank's part, and its carrier; `keeps_bound` as in `Ready`."""

    part: RankProgram
    carrier: Carrier
    keeps_bound: bool


class _Proposal(NamedTuple):
    """This rank's part before ranks agree on a pace: an outline, or the previous part continued at its pace."""

    peers: int
    outline: Outline | None = None
    followed: _PartCarrier | None = None


class _FirstVote(NamedTuple):
    """Results of the first vote.

    `name` and `claim` are the words for this rank's plan and its vote, `peers` is the most of any rank, `version` the
    most moves that one has committed, and `all_follow` whether all parts follow their previous ones at one pace.
    """

    name: str
    claim: str
    peers: int
    version: int
    all_follow: bool


def _agree(party: Party, request: _Request) -> Ready:
    """Agree on the parts of a mover, by one to three votes."""
    proposal, first_vote = _vote_first(party, request)
    part_carrier = (
        proposal.followed
        if first_vote.all_follow
        else _make_all(party, request, proposal, first_vote)
    )
    assert part_carrier is not None, "who objects does not get past a vote"
    # A rank that has left the plan, but is in the group, has no stages.
    has_left = isinstance(request.plan, Plan) and party.rank in request.plan.left
    return Ready(
        given=request.plan,
        name=first_vote.name,
        party=party,
        part=part_carrier.part,
        carrier=part_carrier.carrier,
        stages=() if has_left else request.maker.stages,
        thread=request.settings.thread,
        agree=request.settings.agree,
        peers=first_vote.peers,
        version=first_vote.version,
        keeps_bound=part_carrier.keeps_bound,
        again=request.maker.again,
    )


def _vote_first(party: Party, request: _Request) -> tuple[_Proposal, _FirstVote]:
    """Vote on the request, and learn the other ranks' peers, versions and paces."""
    # An error here becomes an objection: the others wait for this rank's vote.
    proposal, objection = attempt(lambda: _check_and_outline(party, request))
    name = ""
    claim = "compile"
    peers = 0
    if proposal is not None:
        # Only a valid plan and valid settings can be put into words.
        settings = request.settings
        name = name_given(request.plan)
        claim = f"compile({name}, {settings.text}){in_thread(settings.thread)}"
        peers = proposal.peers
    version = 0 if request.former is None else request.former.version
    said = SAID.pack(version, _encode_follow(proposal))
    ballots = party.vote(Ballot(claim, objection=objection, peers=peers, said=said))
    assert proposal is not None, "who objects does not get past the vote"
    said_values = [SAID.unpack(ballot.said) for ballot in ballots]
    versions, follow_codes = zip(*said_values, strict=True)
    # All ranks see the same ballots, so all find the same. Previous parts continue only at one pace.
    paces = {(ballot.peers, code) for ballot, code in zip(ballots, follow_codes, strict=True)}
    all_follow = len(paces) == 1 and NOT_AT_ALL not in follow_codes
    most_peers = max(ballot.peers for ballot in ballots)
    return proposal, _FirstVote(name, claim, most_peers, max(versions), all_follow)


def _encode_follow(proposal: _Proposal | None) -> int:
    """The code for how this rank's part follows the previous one."""
    if proposal is None or proposal.followed is None:
        return NOT_AT_ALL
    pace = proposal.followed.part.pace
    return BY_ADDEND if pace is not None and pace.by_addend else AT_ONCE


def _make_all(
    party: Party, request: _Request, proposal: _Proposal, first_vote: _FirstVote
) -> _PartCarrier | None:
    """Make this rank's part at the pace of all ranks, by one vote or two."""
    # One addend after another takes more rounds, so all ranks do it only if one has to.
    for by_addend in (False, True):
        make = functools.partial(_make, party, request, proposal, first_vote.peers, by_addend)
        part_carrier, objection = attempt(make)
        is_unordered = part_carrier is not None and not part_carrier.part.keeps_order
        ballots = party.vote(
            Ballot(first_vote.claim, objection=objection, is_unordered=is_unordered)
        )
        if not any(ballot.is_unordered for ballot in ballots):
            break
    return part_carrier


def _make(
    party: Party, request: _Request, proposal: _Proposal, peers: int, by_addend: bool
) -> _PartCarrier:
    """Make this rank's part and carrier, keeping the previous ones if they still apply."""
    followed = _follow(party, request, peers, by_addend)
    if followed is not None:
        return followed
    plan = request.plan
    # A proposal to continue the previous part has no outline.
    outline = proposal.outline or outline_part(plan, party.rank)
    limit = _limit_of(request)
    part = outline.part(peers=peers, max_inflight_bytes=limit, by_addend=by_addend)
    assert part.keeps_order or not isinstance(plan, Program), "phases bring addends in order"
    carrier = _make_carrier(party, request, part)
    return _PartCarrier(part, carrier, keeps_bound=False)


def _follow(party: Party, request: _Request, peers: int, by_addend: bool) -> _PartCarrier | None:
    """The previous part, continued by the plan at this pace; None if a new part is needed."""
    plan, former = request.plan, _find_followable(party, request)
    if former is None or isinstance(plan, Program):
        return None
    limit = _limit_of(request)
    pace = set_pace(plan.ranks, peers=peers, max_inflight_bytes=limit, by_addend=by_addend)
    part = former.follow(plan, pace)
    if part is None:
        return None
    carrier = former.keep_carrier(Task(part, party.group, party.wire))
    if carrier is not None:
        return _PartCarrier(part, carrier, keeps_bound=True)
    return _PartCarrier(part, _make_carrier(party, request, part), keeps_bound=False)


def _find_followable(party: Party, request: _Request) -> Former | None:
    """The state before a replan, if its part can be followed; None if this process had another rank, whose part it
    is."""
    former = request.former
    return former if former is not None and former.part.rank == party.rank else None


def _limit_of(request: _Request) -> int:
    limit = request.settings.max_inflight_bytes
    assert limit is not None, "read before ranks vote"
    return limit


def _make_carrier(party: Party, request: _Request, part: RankProgram) -> Carrier:
    """Make a carrier of the part, bound to no tensors yet."""
    task = Task(part, party.group, party.wire)
    engine = transport_of(party.group).ENGINES[request.settings.engine](task)
    shadows = None
    if request.settings.commit == ALL:
        shadows = make_shadows(part, list_own(request.maker.stages))
    return request.maker.make_carrier(task, engine, shadows)


def _check_and_outline(party: Party, request: _Request) -> _Proposal:
    """Check the request, and outline this rank's part. Raises ShardError to object."""
    plan, settings, former = request.plan, request.settings, request.former
    check_plan(plan)
    check_settings(party, plan, settings)
    if former is not None and former.objection:
        raise ExchangeError(former.objection)
    if former is not None and block_of(party.group) is not None:
        what = "replan was called inside of a smt.commit block of the mover's process group"
        raise ExchangeError(f"{what}; call it after the block")
    followable = _find_followable(party, request)
    if followable is not None:
        # One of them is None if the plans are unrelated, or if either is a program: then nothing is followed.
        peers = followable.count_peers(plan)
        pace = followable.part.pace
        if peers is not None and pace is not None:
            return _Proposal(peers, followed=_follow(party, request, peers, pace.by_addend))
    outline = outline_part(plan, party.rank)
    check_arithmetic(outline)
    return _Proposal(outline.peers, outline=outline)
