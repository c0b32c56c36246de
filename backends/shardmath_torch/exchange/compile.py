"""`compile` a plan, or a program made of one, once; `move` tensors many times.

1. Ranks are global ranks of torch.distributed. Every rank of the plan is in the group; ranks that the plan does not
   name take part in agreement and move nothing.
2. Both calls are collective over the group, and every rank makes those of one group in one order. Before a byte moves
   all ranks agree (`agree`): an objection of one is an ExchangeError on all, and no destination has changed.
3. `timeout` is how long a rank waits for another without progress; after that, or as soon as a connection breaks, every
   survivor raises an ExchangeError that names the rank that failed first, where that can be found out (`failure`).
   The mover is then broken, and so is the group: its pending messages had to be cancelled. So they are when a move or a
   compile is left by any other exception once it has begun to vote, as by Ctrl-C (`turns`).
4. Threads: one at a time has a group. Ranks pair calls by their order and the thread's name, so two threads that share
   a group and come in other orders on other ranks get an ExchangeError on all; a group for each thread never does.
5. A plan is cut into messages here, at a pace on which all agree; a program's messages are part of what it is.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np

from shardmath.base.errors import ExchangeError, ShardError
from shardmath.base.given import shown
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.programs.pace import set_pace
from shardmath.programs.part import INFLIGHT_BYTES, Outline, Part, outline, plan_of
from shardmath.programs.program import Program
from shardmath_torch import compat, dtypes
from shardmath_torch.agreement.agree import Ballot
from shardmath_torch.agreement.party import Party, is_time, no_time
from shardmath_torch.agreement.turns import in_thread, turns_of
from shardmath_torch.exchange.mover import Mover, called, crossing_text
from shardmath_torch.exchange.task import Engine, Task, transport_of

__all__ = ["Mover", "compile"]

DEFAULT_ENGINE = "exchange"

_T = TypeVar("_T")


class _Settings(NamedTuple):
    """What every rank must pass alike, with the plan or program."""

    timeout: float
    max_inflight_bytes: int
    engine: str
    thread: str | None

    @property
    def text(self) -> str:
        """How agreement words them; a thread stands apart, since its name need not be given."""
        return ", ".join(f"{k}={v!r}" for k, v in self._asdict().items() if k != "thread")

    @property
    def patience(self) -> float:
        """Seconds to wait for a peer; the rest of the timeout is for finding out who failed."""
        return self.timeout - 1.2 * self.grace

    @property
    def grace(self) -> float:
        """Seconds for asking the others, once something failed."""
        return min(5.0, self.timeout / 5)


def compile(
    plan: Plan | Transposed | Program,
    *,
    group: compat.Group | None = None,
    timeout: float = 60.0,
    max_inflight_bytes: int | None = None,
    engine: str = "auto",
    thread: str | None = None,
) -> Mover:
    """The plan or program made ready on this rank. Collective over `group` (default: all ranks).

    `timeout` is in seconds; `max_inflight_bytes` (1 GiB if not given) bounds a rank's staging memory. A program has a
    bound of its own, for the bytes of its messages; staging begins each at a multiple of 16 bytes. `engine` is
    "exchange", "broadcast" (the slow reference, on gloo, which moves a program's plan) or "auto". `thread` stands for
    the calling thread's name, by which ranks see that their calls belong together: give one where threads of different
    names move together, such as the main thread of trainers and a worker thread of engines. Raises ExchangeError on
    every rank where ranks pass different plans or settings, where the group lacks a rank of the plan, where torch lacks
    arithmetic that the plan needs, or for a `max_inflight_bytes` that is not the program's own.
    """
    asked: object = max_inflight_bytes
    limit = _own_limit(plan) if max_inflight_bytes is None else max_inflight_bytes
    if isinstance(asked, np.integer):
        limit = int(asked)
    settings = _Settings(timeout, limit, DEFAULT_ENGINE if _is_auto(engine) else engine, thread)
    if is_time(timeout):
        settings = settings._replace(timeout=float(timeout))
    party = _join(
        compat.group_of(group), settings if is_time(timeout) else settings._replace(timeout=60.0)
    )
    return party.together(
        lambda: _compile(party.named(), plan, settings),
        lambda failure, rank: crossing_text(plan, failure.tensor, rank),
    )


def _is_auto(engine: object) -> bool:
    return isinstance(engine, str) and engine == "auto"


def _own_limit(plan: Plan | Transposed | Program) -> int:
    return plan.max_inflight_bytes if isinstance(plan, Program) else INFLIGHT_BYTES


def _join(group: compat.Group, settings: _Settings) -> Party:
    wire = transport_of(group).open_wire(group, settings.patience)
    rank, ranks = compat.my_rank(), compat.ranks_of(group)
    return Party(group, rank, ranks, wire, turns_of(group), settings.patience, settings.grace)


def _compile(party: Party, plan: Plan | Transposed | Program, settings: _Settings) -> Mover:
    mine, objection = _attempt(lambda: _outlined(party, plan, settings))
    claim, peers = "compile", 0
    if mine is not None:  # then all that is worded here is what it should be
        claim = f"compile({called(plan)}, {settings.text}){in_thread(settings.thread)}"
        peers = mine.peers
    most = _introduce(party, Ballot(claim, peers, objection))
    assert mine is not None, "who objects does not get past the vote"
    for by_addend in (False, True):
        build = functools.partial(_make, party, mine, settings, most, by_addend)
        made, objection = _attempt(build)
        unordered = made is not None and not made[0].keeps_order
        if not any(b.number for b in party.vote(Ballot(claim, unordered, objection))):
            break
    assert made is not None, "who objects does not get past the vote"
    return Mover(plan, party, *made, settings.thread)


def _introduce(party: Party, mine: Ballot) -> int:
    """The first vote, with what ranks tell each other of themselves; gives the most peers of any."""
    hosts = compat.serves(compat.store_of(party.group))
    # A ballot has one number: the nonce in its upper half, then the peers, then whether this rank serves the store.
    nonce = secrets.randbits(30) << 32
    ballots = party.vote(mine._replace(number=nonce + 2 * mine.number + hosts))
    party.turns.nonce = party.turns.nonce or f"{ballots[0].number >> 32:x}"
    told = [ballot.number & 0xFFFFFFFF for ballot in ballots]
    serving = [rank for rank, number in zip(party.ranks, told, strict=True) if number & 1]
    party.turns.host = next(iter(serving), None)
    return max(number // 2 for number in told)


def _make(
    party: Party, mine: Outline, settings: _Settings, peers: int, by_addend: bool
) -> tuple[Part, Engine]:
    """This rank's part, and the engine that moves it."""
    limit = settings.max_inflight_bytes
    made = mine.part(peers=peers, max_inflight_bytes=limit, by_addend=by_addend)
    assert made.keeps_order or not isinstance(mine.given, Program), "phases bring addends in order"
    engine = transport_of(party.group).ENGINES[settings.engine]
    return made, engine(Task(made, party.group, party.wire))


def _attempt(make: Callable[[], _T]) -> tuple[_T | None, str]:
    """What is made, or why not, to be said in a vote: others wait for this rank's."""
    try:
        return make(), ""
    except ShardError as error:
        return None, str(error)
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"


def _outlined(party: Party, plan: Plan | Transposed | Program, settings: _Settings) -> Outline:
    """What this rank will do, but for the pace. Raises ShardError to object."""
    _check(party, plan, settings)
    mine = outline(plan, party.rank)
    _check_arithmetic(mine)
    if not isinstance(
        plan, Program
    ):  # a limit without room is found here, in every rank's own words
        limit = settings.max_inflight_bytes
        set_pace(plan.ranks, peers=mine.peers, max_inflight_bytes=limit, by_addend=False)
    return mine


def _check(party: Party, plan: object, settings: _Settings) -> None:
    if not isinstance(plan, Plan | Transposed | Program):
        fix = "pass shardmath.plan(src, dst), or what shardmath.schedule makes of it"
        raise ExchangeError(f"compile takes a Plan, got {type(plan).__name__}; {fix}")
    if not is_time(settings.timeout):
        raise ExchangeError(no_time(settings.timeout))
    if not isinstance(settings.thread, str | None):
        raise ExchangeError(
            f"thread={settings.thread!r} is not a name; pass a text, or leave it out"
        )
    most = settings.max_inflight_bytes
    if not isinstance(most, int) or not 0 < most < 1 << 63:
        raise ExchangeError(
            f"max_inflight_bytes={shown(most)} is no number of bytes; pass an int from 1 on"
        )
    if isinstance(plan, Program) and settings.max_inflight_bytes != plan.max_inflight_bytes:
        what = f"max_inflight_bytes={settings.max_inflight_bytes}, the program has {plan.max_inflight_bytes} of its own"
        raise ExchangeError(f"{what}; leave it out, or schedule the plan with it")
    engines = transport_of(party.group).ENGINES
    if not isinstance(settings.engine, str) or settings.engine not in engines:
        known = ", ".join(map(repr, ("auto", *engines)))
        raise ExchangeError(
            f"engine {settings.engine!r} is unknown on {compat.backend_of(party.group)}; use one of {known}"
        )
    outside = sorted(set(plan.ranks) - set(party.ranks))
    if outside:
        what = f"the plan has ranks {list(plan.ranks)[:16]}, the group {list(party.ranks)[:16]}"
        raise ExchangeError(
            f"{what}: {outside[:16]} are not in the group; compile on a group that has all of them"
        )


def _check_arithmetic(mine: Outline) -> None:
    """Every operation that this rank will do must exist in torch for the dtype that it is done in."""
    plan = plan_of(mine.given)
    for name, op in sorted(mine.operations):
        dtype = plan.dst[name][0].dtype
        if dtypes.missing(dtype, op):
            what = f"tensor {name!r} needs {op!r} of {dtype}, which torch does not have"
            raise ExchangeError(
                f"{what}; cast it to float32 before the move and plan with dtype='float32'"
            )
