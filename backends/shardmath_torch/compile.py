"""`compile` a plan, or a program made of one, once; `move` tensors many times.

1. Ranks are global ranks of torch.distributed. Every rank of the plan is in the group; ranks that the plan does not
   name take part in agreement and move nothing.
2. Both calls are collective over the group. Before a byte moves all ranks agree (`agree`): an objection of one is an
   ExchangeError on all, and no destination has changed.
3. `timeout` is how long a rank waits for another without progress; after that, or as soon as a connection breaks, every
   survivor raises an ExchangeError that names the rank that failed first (`failure`). The mover is then broken, and so
   is the group: its pending messages had to be cancelled.
4. A plan is cut into messages here, at a pace on which all agree; a program's messages are part of what it is.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeAlias, cast

from shardmath.errors import ExchangeError, ShardError
from shardmath.given import plural
from shardmath.plan import Plan, Transfer
from shardmath.program import Program
from shardmath_torch import compat, dtypes
from shardmath_torch.agree import Ballot, vote
from shardmath_torch.cells import divisions, fills, held
from shardmath_torch.failure import Evidence, Inquest
from shardmath_torch.local import Local, Tensors, by_key, check, signature, wanted
from shardmath_torch.messages import (
    Message,
    Round,
    keeps_fold_order,
    messages,
    most_peers,
    rounds,
    scheduled,
    set_pace,
)
from shardmath_torch.wire import Engine, PeerFailure, Task, Transport, Wire

__all__ = ["Mover", "compile"]

TRANSPORTS = {"gloo": "shardmath_gloo", "nccl": "shardmath_nccl"}
"""The package that serves a backend of torch.distributed."""

DEFAULT_ENGINE = "exchange"

DEFAULT_INFLIGHT_BYTES = 1 << 30

Cut: TypeAlias = Callable[[int, bool], tuple[Message, ...]]
"""This rank's messages, given the most peers of any rank and whether one addend has to go after the other."""


class _Settings(NamedTuple):
    """What every rank must pass alike, with the plan or program."""

    timeout: float
    max_inflight_bytes: int
    engine: str

    @property
    def patience(self) -> float:
        """Seconds to wait for a peer; the rest of the timeout is for finding out who failed."""
        return self.timeout - 1.2 * self.grace

    @property
    def grace(self) -> float:
        """Seconds for asking the others, once something failed."""
        return min(5.0, self.timeout / 5)


class _Party(NamedTuple):
    """This rank in a group, and how it reaches the others."""

    group: compat.Group
    rank: int
    ranks: tuple[int, ...]
    wire: Wire
    transport: Transport
    grace: float
    key: str
    host: int | None = None


def compile(
    plan: Plan | Program,
    *,
    group: compat.Group | None = None,
    timeout: float = 60.0,
    max_inflight_bytes: int | None = None,
    engine: str = "auto",
) -> Mover:
    """The plan or program made ready on this rank. Collective over `group` (default: all ranks).

    `timeout` is in seconds; `max_inflight_bytes` (1 GiB if not given) bounds a rank's staging memory. A program has a
    bound of its own, for the bytes of its messages; staging begins each at a multiple of 16 bytes. `engine` is
    "exchange", "broadcast" (the slow reference, on gloo, which moves a program's plan) or "auto". Raises ExchangeError
    on every rank where ranks pass different plans or settings, where the group lacks a rank of the plan, where torch
    lacks arithmetic that the plan needs, or for a `max_inflight_bytes` that is not the program's own.
    """
    limit = _own_limit(plan) if max_inflight_bytes is None else max_inflight_bytes
    settings = _Settings(timeout, limit, DEFAULT_ENGINE if engine == "auto" else engine)
    party = _join(compat.group_of(group), settings if _is_time(timeout) else settings._replace(timeout=60.0))
    try:
        return _compile(party, plan, settings)
    except PeerFailure as failure:
        raise _broken(party, plan, failure) from failure


def _own_limit(plan: Plan | Program) -> int:
    return plan.max_inflight_bytes if isinstance(plan, Program) else DEFAULT_INFLIGHT_BYTES


def _is_time(timeout: object) -> bool:
    return isinstance(timeout, int | float) and timeout > 0


def _join(group: compat.Group, settings: _Settings) -> _Party:
    backend = compat.backend_of(group)
    if backend not in TRANSPORTS:
        known = " or ".join(TRANSPORTS)
        raise ExchangeError(f"the group's backend is {backend!r}; init_process_group with {known}")
    transport = cast(Transport, importlib.import_module(TRANSPORTS[backend]))
    rank, ranks = compat.my_rank(), compat.ranks_of(group)
    wire = transport.open_wire(group, settings.patience)
    return _Party(group, rank, ranks, wire, transport, settings.grace, compat.next_key(group, rank))


def _compile(party: _Party, plan: Plan | Program, settings: _Settings) -> Mover:
    claim = f"compile({_called(plan)}, {', '.join(f'{k}={v!r}' for k, v in settings._asdict().items())})"
    objection, peers, cut = _first_look(party, plan, settings)
    peers = max(b.number for b in vote(party.wire, party.ranks, Ballot(claim, peers, objection)))
    mine = cut(peers, False)
    unordered = not keeps_fold_order(m for m in mine if m.dst_rank == party.rank)
    assert not (unordered and isinstance(plan, Program)), "phases bring addends in order"
    hosts = compat.serves(compat.store_of(party.group))
    ballots = vote(party.wire, party.ranks, Ballot(claim, unordered + 2 * hosts))
    if any(b.number & 1 for b in ballots):
        mine = cut(peers, True)
    host = next((rank for rank, b in zip(party.ranks, ballots, strict=True) if b.number & 2), None)
    party = party._replace(host=host)
    walked = rounds(mine, party.rank)
    here = _plan_of(plan), party.rank
    task = Task(*here, party.wire, walked, fills(*here), divisions(*here))
    return Mover(plan, party, walked, party.transport.ENGINES[settings.engine](task))


def _called(given: object) -> str:
    """How agreement names a plan or a program, and what is neither."""
    kind = type(given).__name__
    return f"{kind.lower()} {given.digest[:24]}" if isinstance(given, Plan | Program) else f"no plan but a {kind}"


def _plan_of(plan: Plan | Program) -> Plan:
    return plan.plan if isinstance(plan, Program) else plan


def _first_look(party: _Party, plan: Plan | Program, settings: _Settings) -> tuple[str, int, Cut]:
    """This rank's objection ("" for none), how many peers it has where that sets the pace, and its messages to be."""
    try:
        _check(party, plan, settings)
        if isinstance(plan, Program):
            return "", *_scheduled(plan, party.rank)
        return "", *_paced(plan, party.rank, settings.max_inflight_bytes)
    except ShardError as error:
        return str(error), 0, lambda peers, by_addend: ()


def _paced(plan: Plan, rank: int, limit: int) -> tuple[int, Cut]:
    mine = [*plan.transfers(src=rank), *(t for t in plan.transfers(dst=rank) if t.src_rank != rank)]
    _check_arithmetic(plan, rank, mine)
    peers = most_peers(mine)
    set_pace(plan.ranks, peers=peers, max_inflight_bytes=limit, by_addend=False)

    def cut(peers: int, by_addend: bool) -> tuple[Message, ...]:
        return messages(mine, set_pace(plan.ranks, peers=peers, max_inflight_bytes=limit, by_addend=by_addend))

    return peers, cut


def _scheduled(prog: Program, rank: int) -> tuple[int, Cut]:
    mine = scheduled(prog, rank)
    _check_arithmetic(prog.plan, rank, (t for m in mine for t in m.pieces))
    return 0, lambda peers, by_addend: mine


def _check(party: _Party, plan: object, settings: _Settings) -> None:
    if not isinstance(plan, Plan | Program):
        fix = "pass shardmath.plan(src, dst), or what shardmath.scheduling makes of it"
        raise ExchangeError(f"compile takes a Plan, got {type(plan).__name__}; {fix}")
    if not _is_time(settings.timeout):
        raise ExchangeError(f"timeout={settings.timeout!r} is no time to wait; pass seconds > 0")
    if not isinstance(settings.max_inflight_bytes, int):
        raise ExchangeError(f"max_inflight_bytes={settings.max_inflight_bytes!r} is no number of bytes; pass an int")
    if isinstance(plan, Program) and settings.max_inflight_bytes != plan.max_inflight_bytes:
        what = f"max_inflight_bytes={settings.max_inflight_bytes}, the program has {plan.max_inflight_bytes} of its own"
        raise ExchangeError(f"{what}; leave it out, or schedule the plan with it")
    if settings.engine not in party.transport.ENGINES:
        known = ", ".join(map(repr, ("auto", *party.transport.ENGINES)))
        raise ExchangeError(
            f"engine {settings.engine!r} is unknown on {compat.backend_of(party.group)}; use one of {known}"
        )
    outside = sorted(set(plan.ranks) - set(party.ranks))
    if outside:
        what = f"the plan has ranks {list(plan.ranks)[:16]}, the group {list(party.ranks)[:16]}"
        raise ExchangeError(f"{what}: {outside[:16]} are not in the group; compile on a group that has all of them")


def _check_arithmetic(plan: Plan, rank: int, mine: Iterable[Transfer]) -> None:
    """Every operation that this rank will do must exist in torch for the dtype that it is done in."""
    needed = {(t.tensor, t.op) for t in mine if t.dst_rank == rank and t.op != "copy"}
    stored = {name for name, _ in held(plan.dst, rank).values()}
    needed |= {(name, "fill") for name in stored if plan.fill(name) is not None}
    needed |= {(name, "divide") for name in stored if plan.divisor(name) != 1}
    for name, op in sorted(needed):
        dtype = plan.dst[name][0].dtype
        if dtypes.missing(dtype, op):
            what = f"tensor {name!r} needs {op!r} of {dtype}, which torch does not have"
            raise ExchangeError(f"{what}; cast it to float32 before the move and plan with dtype='float32'")


def _broken(party: _Party, plan: Plan | Program, failure: PeerFailure) -> ExchangeError:
    """What to tell the caller when a peer failed: asks the others who was first."""
    mine = Evidence(failure.rank, failure.tensor, failure.cause)
    inquest = Inquest(compat.store_of(party.group), party.host, party.key, party.rank, party.ranks, party.grace)
    first, evidence = inquest.hold(mine, party.wire.abandon)
    fix = "see that it calls compile and every move; start the ranks again with a new process group, and compile again"
    if first == party.rank:
        return ExchangeError(f"rank {first} (this one) failed or was given up by the others: {evidence.cause}; {fix}")
    who = "a rank" if first is None else f"rank {first}"
    what = evidence.tensor if evidence.tensor is not None else _any_tensor(plan, first)
    return ExchangeError(f"{who} failed while {_way(plan, what, first)}: {evidence.cause}; {fix}")


def _any_tensor(plan: Plan | Program, rank: int | None) -> str | None:
    """A tensor that was to come from the rank, or to go to it."""
    if rank is None or not isinstance(plan, Plan | Program):
        return None
    return next(itertools.chain(_crossing(plan, rank, "send"), _crossing(plan, rank, "receive")), None)


def _crossing(plan: Plan | Program, rank: int, way: str) -> Iterator[str]:
    """The names of what the rank sends to others ("send"), or receives from them ("receive")."""
    if isinstance(plan, Program):
        each = (m for one in plan.for_rank(rank) for m in one.messages if m.direction == way)
        return (t.tensor for m in each for t in m.pieces)
    moved = plan.transfers(src=rank) if way == "send" else plan.transfers(dst=rank)
    return (t.tensor for t in moved if t.src_rank != t.dst_rank)


def _way(plan: Plan | Program, tensor: str | None, rank: int | None) -> str:
    if tensor is None:
        return "no tensor was on its way from or to it"
    name = f"tensor {tensor!r}" if tensor else "the tensor"
    sends = rank is not None and tensor in _crossing(plan, rank, "send")
    return f"{name} was to {'come from' if sends else 'go to'} it"


class Mover:
    """A compiled plan or program: `move(src_tensors, out=dst_tensors)`, collective, as often as wanted.

    A side is a tensor for a plan of two layouts, a dict by local buffer key for a plan of mappings, None where this
    rank is not on that side. Destination cells that are not the tensor's own (padding) are left as they are.
    `plan` is the plan, of a program the one that it carries out. Raises ExchangeError.
    """

    def __init__(self, given: Plan | Program, party: _Party, walked: tuple[Round, ...], engine: Engine) -> None:
        self.plan, self.rounds = _plan_of(given), walked
        self._given, self._party, self._engine = given, party, engine
        self._wanted = wanted(self.plan, party.rank)
        self._moves = 0
        self._checked: object = None
        self._failed: str = ""

    def __repr__(self) -> str:
        state = f"broken: {self._failed}" if self._failed else f"{self._moves} moves"
        return f"<mover of {self._given!r} on rank {self._party.rank}, {plural(self.rounds, 'round')}, {state}>"

    @property
    def staging_bytes(self) -> int:
        """Bytes of memory held for messages that cannot be sent or received in place; 0 before the first move."""
        return self._engine.staging_bytes

    def __call__(self, src: Local, *, out: Local = None) -> None:
        """Moves `src`, this rank's source tensors, into `out`, its destination tensors."""
        if self._failed:
            raise ExchangeError(f"this mover is broken: {self._failed}")
        self._moves += 1
        try:
            tensors = self._agree(src, out)
            self._guarded(lambda: self._engine.move(*tensors))
        except PeerFailure as failure:
            error = _broken(self._party, self._given, failure)
            self._failed = str(error)
            raise error from failure

    def _agree(self, src: Local, out: Local) -> tuple[Tensors, Tensors]:
        tensors: tuple[Tensors, Tensors] = {}, {}
        objection = ""
        try:
            tensors = self._ready(src, out)
        except Exception as error:
            objection = str(error) if isinstance(error, ShardError) else f"{type(error).__name__}: {error}"
        claim = f"move {self._moves} of {_called(self._given)} (mover {self._party.key})"
        vote(self._party.wire, self._party.ranks, Ballot(claim, 0, objection))
        return tensors

    def _ready(self, src: Local, out: Local) -> tuple[Tensors, Tensors]:
        tensors = by_key(self._wanted[0], src), by_key(self._wanted[1], out)
        signed = signature(tensors)
        if signed != self._checked:
            self._checked = None
            check(self._wanted, tensors, self._party.wire.device_type)
            self._engine.prepare(*tensors)
            self._checked = signed
        return tensors

    def _guarded(self, act: Callable[[], None]) -> None:
        """What goes wrong here once others rely on this rank is this rank's failure, and they are told."""
        try:
            act()
        except PeerFailure:
            raise
        except Exception as error:
            raise PeerFailure(self._party.rank, f"{type(error).__name__}: {error}") from error
