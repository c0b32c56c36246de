"""A mover: a plan or program made ready on this rank, which moves tensors as often as wanted.

1. Every call is a turn of the group: ranks vote on it, and then move. A rank's wrong tensor is an
   objection, hence an error on all ranks, and no destination has changed.
2. That a sender's call returns says that its bytes have left, not that they arrived. With
   `acknowledge=True` ranks vote once more at the end, so whose call returns knows that every
   destination has all its bytes.
3. A plan's failures are told in its own words: which tensor was to come from whom, or to go to whom.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NoReturn

from shardmath.base.errors import ExchangeError, ShardError
from shardmath.base.given import plural, shown
from shardmath.base.public import public
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.programs.part import Part
from shardmath.programs.program import Program
from shardmath_torch import compat
from shardmath_torch.agreement.agree import Ballot
from shardmath_torch.agreement.party import Party, is_time, no_time
from shardmath_torch.agreement.turns import check_thread, in_thread
from shardmath_torch.agreement.wire import PeerFailure
from shardmath_torch.exchange.local import Local, Tensors, by_key, check, signature, wanted
from shardmath_torch.exchange.memory import mark_written
from shardmath_torch.exchange.task import Engine

__all__ = ["Mover", "called", "crossing_text"]


@public
class Mover:
    """A compiled plan or program: `move(src_tensors, out=dst_tensors)`, collective, as often as wanted.

    A side is a tensor for a plan of two layouts, a dict by local buffer key for a plan of mappings,
    None where this rank is not on that side. Destination cells that are not the tensor's own
    (padding) are left as they are. `plan` is the plan, of a program the one that it carries out.
    Raises ExchangeError.
    """

    def __init__(
        self,
        given: Plan | Transposed | Program,
        party: Party,
        part: Part,
        engine: Engine,
        thread: str | None,
    ) -> None:
        self.plan, self.rounds = part.plan, part.rounds
        self._given, self._party, self._engine = given, party, engine
        self._thread = thread
        self._wanted = wanted(self.plan, party.rank)
        self._moves = 0
        self._checked: object = None

    def __repr__(self) -> str:
        broken = self._party.turns.broken
        state = f"broken: {broken}" if broken else f"{self._moves} moves"
        return f"<mover of {self._given!r} on rank {self._party.rank}, {plural(self.rounds, 'round')}, {state}>"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises ExchangeError: what copies would share, and not know of each other, is how tensors lie in memory."""
        what = "a mover belongs to its process group on this rank, and cannot be copied or pickled"
        raise ExchangeError(f"{what}; use this one, or compile the plan where another is needed")

    @property
    def staging_bytes(self) -> int:
        """Bytes that its messages take which cannot be sent or received in place; 0 before the first move.

        The memory is the group's: all its movers use the same.
        """
        return self._engine.staging_bytes

    def __call__(
        self,
        src: Local,
        *,
        out: Local = None,
        timeout: float | None = None,
        acknowledge: bool = False,
        label: str = "",
    ) -> None:
        """Moves `src`, this rank's source tensors, into `out`, its destination tensors.

        `timeout`: seconds to wait for all ranks to make this call, where that may be longer than
        what `compile` was given, as when an engine waits for the next refit; each rank may pass its
        own. `acknowledge`, on all ranks alike: return only once every rank has all its bytes.
        `label` says what the move is for: ranks that say otherwise disagree.
        """
        if not compat.is_registered(self._party.group):
            what = "the process group of this mover was destroyed"
            raise ExchangeError(f"{what}; compile again on a group that is there")
        self._party.together(
            lambda: self._move(src, out, timeout, acknowledge, label),
            lambda failure, rank: crossing_text(self._given, failure.tensor, rank),
            "mover",
            timeout if is_time(timeout) else 0.0,
        )

    def _move(
        self, src: Local, out: Local, timeout: float | None, acknowledge: bool, label: str
    ) -> None:
        claim = f"move {self._moves + 1} of {called(self._given)} (mover {self._party.key})"
        claim += f", {label!r}" if isinstance(label, str) and label else ""
        claim += ", acknowledged" * (acknowledge is True)
        claim += in_thread(self._thread)
        tensors, objection = self._look(src, out, timeout, acknowledge)
        objection = objection or _mislabelled(label)
        patience = timeout if is_time(timeout) else None
        self._party.vote(Ballot(claim, 0, objection), patience)
        self._moves += 1
        mark_written(tensors[1].values())
        self._guarded(lambda: self._engine.move(*tensors))
        if acknowledge:
            self._party.vote(Ballot(f"{claim}: all is there"))

    def _look(
        self, src: Local, out: Local, timeout: float | None, acknowledge: bool
    ) -> tuple[tuple[Tensors, Tensors], str]:
        """The tensors by local buffer key, and what speaks against moving them."""
        try:
            check_thread(self._party.turns, self._thread)
            if not (timeout is None or is_time(timeout)):
                raise ExchangeError(no_time(timeout))
            if not isinstance(acknowledge, bool):
                raise ExchangeError(f"acknowledge={shown(acknowledge)}; pass True or False")
            return self._ready(src, out), ""
        except ShardError as error:
            return ({}, {}), str(error)
        except Exception as error:
            return ({}, {}), f"{type(error).__name__}: {error}"

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


def _mislabelled(label: object) -> str:
    """What speaks against the label, if anything does."""
    if isinstance(label, str):
        return ""
    return f"label={shown(label)} is not a text; pass one, or leave it out"


def called(given: object) -> str:
    """How agreement names a plan or a program, and what is neither."""
    if isinstance(given, Program):
        return f"program {given.digest[:24]}"
    if isinstance(given, Plan | Transposed):
        return f"plan {given.digest[:24]}"
    return f"no plan but a {type(given).__name__}"


def crossing_text(given: object, tensor: str | None, rank: int | None) -> str:
    """What was on its way from or to that rank; a tensor of the plan that crosses there where none is named."""
    if not isinstance(given, Plan | Transposed | Program):
        return "ranks were to agree"
    if tensor is None and rank is not None:
        crossing = itertools.chain(
            _crossing(given, rank, "send"), _crossing(given, rank, "receive")
        )
        tensor = next(crossing, None)
    if tensor is None:
        return "no tensor was on its way from or to it"
    name = f"tensor {tensor!r}" if tensor else "the tensor"
    sends = rank is not None and tensor in _crossing(given, rank, "send")
    return f"{name} was to {'come from' if sends else 'go to'} it"


def _crossing(given: Plan | Transposed | Program, rank: int, way: str) -> Iterator[str]:
    """The names of what the rank sends to others ("send"), or receives from them ("receive")."""
    if isinstance(given, Program):
        rounds = given.for_rank(rank)
        each = (m for one in rounds for m in (one.sends if way == "send" else one.receives))
        return (t.tensor for m in each for t in m.pieces)
    moved = given.transfers(src=rank) if way == "send" else given.transfers(dst=rank)
    return (t.tensor for t in moved if t.src_rank != t.dst_rank)
