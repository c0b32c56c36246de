"""`compile` a plan once, `move` tensors many times.

1. Ranks are global ranks of torch.distributed. Every rank of the plan is in the group; ranks that the plan does not
   name take part in agreement and move nothing.
2. Both calls are collective over the group. Before a byte moves all ranks agree (`agree`): an objection of one is an
   ExchangeError on all, and no destination has changed.
3. `timeout` is how long a rank waits for another without progress; after that, or as soon as a connection breaks, every
   survivor raises an ExchangeError that names the rank that failed first (`failure`). The mover is then broken, and so
   is the group: its pending messages had to be cancelled.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import NamedTuple, cast

from shardmath.errors import ExchangeError, ShardError
from shardmath.plan import Plan, Transfer
from shardmath_torch import compat, dtypes
from shardmath_torch.agree import Ballot, vote
from shardmath_torch.cells import divisions, fills, held
from shardmath_torch.failure import Evidence, Inquest
from shardmath_torch.local import Local, Tensors, by_key, check, signature, wanted
from shardmath_torch.messages import Round, keeps_fold_order, messages, most_peers, rounds, set_pace
from shardmath_torch.wire import Engine, PeerFailure, Task, Transport, Wire

__all__ = ["Mover", "compile"]

TRANSPORTS = {"gloo": "shardmath_gloo", "nccl": "shardmath_nccl"}
"""The package that serves a backend of torch.distributed."""

DEFAULT_ENGINE = "exchange"


class _Settings(NamedTuple):
    """What every rank must pass alike, with the plan."""

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
    plan: Plan,
    *,
    group: compat.Group | None = None,
    timeout: float = 60.0,
    max_inflight_bytes: int = 1 << 30,
    engine: str = "auto",
) -> Mover:
    """The plan made ready on this rank. Collective over `group` (default: all ranks).

    `timeout` is in seconds; `max_inflight_bytes` bounds a rank's staging memory; `engine` is "exchange", "broadcast"
    (the slow reference, on gloo) or "auto". Raises ExchangeError on every rank where ranks pass different plans or
    settings, where the group lacks a rank of the plan, or where torch lacks arithmetic that the plan needs.
    """
    settings = _Settings(timeout, max_inflight_bytes, DEFAULT_ENGINE if engine == "auto" else engine)
    party = _join(compat.group_of(group), settings if _is_time(timeout) else settings._replace(timeout=60.0))
    try:
        return _compile(party, plan, settings)
    except PeerFailure as failure:
        raise _broken(party, plan, failure) from failure


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


def _compile(party: _Party, plan: Plan, settings: _Settings) -> Mover:
    digest = plan.digest[:24] if isinstance(plan, Plan) else f"none but a {type(plan).__name__}"
    claim = f"compile(plan {digest}, {', '.join(f'{k}={v!r}' for k, v in settings._asdict().items())})"
    objection, mine, peers = _first_look(party, plan, settings)
    peers = max(b.number for b in vote(party.wire, party.ranks, Ballot(claim, peers, objection)))
    pace = set_pace(plan.ranks, peers=peers, max_inflight_bytes=settings.max_inflight_bytes, by_addend=False)
    cut = messages(mine, pace)
    unordered = not keeps_fold_order(m for m in cut if m.dst_rank == party.rank)
    hosts = compat.serves(compat.store_of(party.group))
    ballots = vote(party.wire, party.ranks, Ballot(claim, unordered + 2 * hosts))
    if any(b.number & 1 for b in ballots):
        cut = messages(mine, pace._replace(by_addend=True))
    host = next((rank for rank, b in zip(party.ranks, ballots, strict=True) if b.number & 2), None)
    party = party._replace(host=host)
    walked = rounds(cut, party.rank)
    here = plan, party.rank
    task = Task(*here, party.wire, walked, fills(*here), divisions(*here))
    return Mover(plan, party, walked, party.transport.ENGINES[settings.engine](task))


def _first_look(party: _Party, plan: Plan, settings: _Settings) -> tuple[str, list[Transfer], int]:
    """This rank's objection ("" for none), its transfers, and how many peers it has."""
    try:
        _check(party, plan, settings)
        mine = [*plan.transfers(src=party.rank), *_from_others(plan, party.rank)]
        _check_arithmetic(plan, party.rank, mine)
        peers = most_peers(mine)
        set_pace(plan.ranks, peers=peers, max_inflight_bytes=settings.max_inflight_bytes, by_addend=False)
    except ShardError as error:
        return str(error), [], 0
    return "", mine, peers


def _from_others(plan: Plan, rank: int) -> list[Transfer]:
    return [t for t in plan.transfers(dst=rank) if t.src_rank != rank]


def _check(party: _Party, plan: Plan, settings: _Settings) -> None:
    if not isinstance(plan, Plan):
        raise ExchangeError(f"compile takes a Plan, got {type(plan).__name__}; pass shardmath.plan(src, dst)")
    if not _is_time(settings.timeout):
        raise ExchangeError(f"timeout={settings.timeout!r} is no time to wait; pass seconds > 0")
    if not isinstance(settings.max_inflight_bytes, int):
        raise ExchangeError(f"max_inflight_bytes={settings.max_inflight_bytes!r} is no number of bytes; pass an int")
    if settings.engine not in party.transport.ENGINES:
        known = ", ".join(map(repr, ("auto", *party.transport.ENGINES)))
        raise ExchangeError(
            f"engine {settings.engine!r} is unknown on {compat.backend_of(party.group)}; use one of {known}"
        )
    outside = sorted(set(plan.ranks) - set(party.ranks))
    if outside:
        what = f"the plan has ranks {list(plan.ranks)[:16]}, the group {list(party.ranks)[:16]}"
        raise ExchangeError(f"{what}: {outside[:16]} are not in the group; compile on a group that has all of them")


def _check_arithmetic(plan: Plan, rank: int, mine: list[Transfer]) -> None:
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


def _broken(party: _Party, plan: Plan, failure: PeerFailure) -> ExchangeError:
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


def _any_tensor(plan: Plan, rank: int | None) -> str | None:
    """A tensor that was to come from the rank, or to go to it."""
    if rank is None or not isinstance(plan, Plan):
        return None
    both = (t for moved in (plan.transfers(src=rank), plan.transfers(dst=rank)) for t in moved)
    return next((t.tensor for t in both if t.src_rank != t.dst_rank), None)


def _way(plan: Plan, tensor: str | None, rank: int | None) -> str:
    if tensor is None:
        return "no tensor was on its way from or to it"
    name = f"tensor {tensor!r}" if tensor else "the tensor"
    sends = any(t.tensor == tensor and t.dst_rank != rank for t in plan.transfers(src=rank))
    return f"{name} was to {'come from' if sends else 'go to'} it"


class Mover:
    """A compiled plan: `move(src_tensors, out=dst_tensors)`, collective, as often as wanted.

    A side is a tensor for a plan of two layouts, a dict by local buffer key for a plan of mappings, None where this
    rank is not on that side. Destination cells that are not the tensor's own (padding) are left as they are.
    Raises ExchangeError.
    """

    def __init__(self, plan: Plan, party: _Party, walked: tuple[Round, ...], engine: Engine) -> None:
        self.plan, self.rounds = plan, walked
        self._party, self._engine = party, engine
        self._wanted = wanted(plan, party.rank)
        self._moves = 0
        self._checked: object = None
        self._failed: str = ""

    def __repr__(self) -> str:
        state = f"broken: {self._failed}" if self._failed else f"{self._moves} moves"
        return f"<mover of {self.plan!r} on rank {self._party.rank}, {len(self.rounds)} rounds, {state}>"

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
            error = _broken(self._party, self.plan, failure)
            self._failed = str(error)
            raise error from failure

    def _agree(self, src: Local, out: Local) -> tuple[Tensors, Tensors]:
        tensors: tuple[Tensors, Tensors] = {}, {}
        objection = ""
        try:
            tensors = self._ready(src, out)
        except Exception as error:
            objection = str(error) if isinstance(error, ShardError) else f"{type(error).__name__}: {error}"
        claim = f"move {self._moves} of plan {self.plan.digest[:24]} (mover {self._party.key})"
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
