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
from typing import Literal, NamedTuple, NoReturn, TypeAlias

from torch import Tensor

from shardmath.base.errors import ExchangeError, ShardError
from shardmath.base.public import public
from shardmath.base.text import message_of, plural, shown
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.programs.part import Part
from shardmath.programs.program import Program
from shardmath_torch import compat
from shardmath_torch.agreement.agree import Ballot
from shardmath_torch.agreement.party import Party, is_time, word_bad_time
from shardmath_torch.agreement.turns import check_thread, in_thread
from shardmath_torch.agreement.wire import PeerFailure
from shardmath_torch.exchange.local import Local, Tensors, by_key, check, signature, wanted
from shardmath_torch.exchange.memory import mark_written
from shardmath_torch.exchange.task import Engine

__all__ = [
    "Mover",
    "describe_crossing",
    "move_held",
    "move_in_autograd",
    "name_given",
    "word_objection",
]

DIGEST_SHOWN = 24
"""Hexadecimal digits of a digest that a claim has: 96 bits, by which plans are told apart."""


class _Call(NamedTuple):
    """What a mover was called with."""

    src: Local
    out: Local
    timeout: float | None = None
    acknowledge: bool = False
    label: str = ""
    records_gradient: bool = False
    objection: str = ""
    held: bool = False
    first: Callable[[], None] | None = None
    then: Callable[[], None] | None = None


class _Held(NamedTuple):
    """Mappings that a caller holds on to, and what was bound of them."""

    src: Local
    out: Local
    tensors: tuple[Tensors, Tensors]

    def is_of(self, call: _Call) -> bool:
        """Whether the call is given the same mappings."""
        return call.src is self.src and call.out is self.out


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
        self.plan = part.plan
        self.rounds = part.rounds
        self._given = given
        self._party = party
        self._engine = engine
        self._thread = thread
        self._wanted = wanted(self.plan, party.rank)
        self._moves = 0
        self._checked: object = None
        self._held: _Held | None = None

    def __repr__(self) -> str:
        broken = self._party.turns.broken
        state = f"broken: {broken}" if broken else f"{self._moves} moves"
        rounds = plural(self.rounds, "round")
        return f"<mover of {self._given!r} on rank {self._party.rank}, {rounds}, {state}>"

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
        self._run(_Call(src, out, timeout, acknowledge, label))

    def _run(self, call: _Call) -> None:
        """The move, as a turn of the group."""
        if not compat.is_registered(self._party.group):
            what = "the process group of this mover was destroyed"
            raise ExchangeError(f"{what}; compile again on a group that is there")
        self._party.together(
            lambda: self._move(call),
            lambda failure, rank: describe_crossing(self._given, failure.tensor, rank),
            "mover",
            call.timeout if is_time(call.timeout) else 0.0,
        )

    def _move(self, call: _Call) -> None:
        """Vote, and then move."""
        tensors, label, objection = self._check(call)
        claim = self._word_claim(call)
        patience = call.timeout if is_time(call.timeout) else None
        mine = Ballot(claim, label, call.records_gradient, objection)
        self._party.vote(mine, patience)
        # From here on every rank moves, so all count alike, also where the move fails.
        self._moves += 1
        if call.first is not None:
            self._guard(call.first)
        src, dst = tensors
        mark_written(dst.values())
        self._guard(lambda: self._engine.move(src, dst))
        if call.then is not None:
            self._guard(call.then)
        if call.acknowledge:
            receipt = mine._replace(claim=f"{claim}: all is there")
            self._party.vote(receipt)

    def _word_claim(self, call: _Call) -> str:
        """What this rank is about to do. Made before anything is known to be what it should be."""
        claim = f"move {self._moves + 1} of {name_given(self._given)} (mover {self._party.key})"
        if call.acknowledge is True:
            claim += ", acknowledged"
        return claim + in_thread(self._thread)

    def _check(self, call: _Call) -> tuple[tuple[Tensors, Tensors], str, str]:
        """The tensors by local buffer key, the label, and what speaks against moving them.

        Nothing is raised: the other ranks wait for this one's vote, in which it objects.
        """
        try:
            if call.objection:
                raise ExchangeError(call.objection)
            check_thread(self._party.turns, self._thread)
            if not (call.timeout is None or is_time(call.timeout)):
                raise ExchangeError(word_bad_time(call.timeout))
            if not isinstance(call.acknowledge, bool):
                raise ExchangeError(f"acknowledge={shown(call.acknowledge)}; pass True or False")
            tensors = self._prepare(call)
            label = _read_label(call.label)
        except Exception as error:
            return ({}, {}), "", word_objection(error)
        return tensors, label, ""

    def _prepare(self, call: _Call) -> tuple[Tensors, Tensors]:
        """The tensors by local buffer key, checked and bound, unless these were already."""
        if call.held and self._held is not None and self._held.is_of(call):
            return self._held.tensors
        tensors = by_key(self._wanted[0], call.src), by_key(self._wanted[1], call.out)
        signed = signature(tensors)
        if signed != self._checked or call.held or self._held is not None:
            # Forgotten first: where the check fails or is interrupted, these are not bound half-way.
            self._checked = self._held = None
            check(self._wanted, tensors, self._party.wire.device_type)
            self._engine.prepare(*tensors, held=call.held)
            self._checked = signed
            self._held = _Held(call.src, call.out, tensors) if call.held else None
        return tensors

    def _guard(self, act: Callable[[], None]) -> None:
        """What goes wrong here once others rely on this rank is this rank's failure, and they are told."""
        try:
            act()
        except PeerFailure:
            raise
        except Exception as error:
            cause = f"{type(error).__name__}: {message_of(error)}"
            raise PeerFailure(self._party.rank, cause) from error


def move_held(
    mover: Mover,
    src: Local,
    *,
    out: Local,
    objection: str,
    timeout: float | None,
    acknowledge: bool,
    label: str,
    first: Callable[[], None] | None = None,
    then: Callable[[], None] | None = None,
) -> None:
    """A move of tensors that the caller holds and answers for: the same mappings mean the same memory.

    What speaks against the move, if anything does, is an error on all ranks. `first` is done once all ranks have agreed
    on the move, and `then` once all has arrived here. Both belong to the move: where one fails, this rank has failed.
    """
    call = _Call(src, out, timeout, acknowledge, label, objection=objection, held=True)
    mover._run(call._replace(first=first, then=then))


def move_in_autograd(
    mover: Mover,
    src: Tensor | None,
    *,
    out: Tensor | None,
    label: str = "",
    records_gradient: bool = False,
) -> None:
    """A move in a forward or a backward; all ranks say alike whether autograd records it as one of a gradient."""
    mover._run(_Call(src, out, label=label, records_gradient=records_gradient))


def _read_label(label: object) -> str:
    """The label as a plain str: a subclass may say anything of itself. Raises ExchangeError for what is no text."""
    if not isinstance(label, str):
        raise ExchangeError(f"label={shown(label)} is not a text; pass one, or leave it out")
    return str.__str__(label)


def word_objection(error: Exception) -> str:
    """What a rank says of its error to the others: that of ours as it is, another by its kind."""
    if isinstance(error, ShardError):
        return message_of(error)
    return f"{type(error).__name__}: {message_of(error)}"


def name_given(given: Plan | Transposed | Program) -> str:
    """How agreement names a plan or a program."""
    kind = "program" if isinstance(given, Program) else "plan"
    return f"{kind} {given.digest[:DIGEST_SHOWN]}"


_Way: TypeAlias = Literal["send", "receive"]


def describe_crossing(given: object, tensor: str | None, rank: int | None) -> str:
    """What was on its way from or to that rank; a tensor of the plan that crosses there where none is named."""
    if not isinstance(given, Plan | Transposed | Program):
        return "ranks were to agree"
    if tensor is None and rank is not None:
        sent = _list_crossing(given, rank, "send")
        received = _list_crossing(given, rank, "receive")
        tensor = next(itertools.chain(sent, received), None)
    if tensor is None:
        return "no tensor was on its way from or to it"
    name = f"tensor {tensor!r}" if tensor else "the tensor"
    sends = rank is not None and tensor in _list_crossing(given, rank, "send")
    return f"{name} was to {'come from' if sends else 'go to'} it"


def _list_crossing(given: Plan | Transposed | Program, rank: int, way: _Way) -> Iterator[str]:
    """The names of what the rank sends to others, or receives from them."""
    if isinstance(given, Program):
        for one in given.for_rank(rank):
            for message in one.sends if way == "send" else one.receives:
                yield from (piece.tensor for piece in message.pieces)
        return
    moved = given.transfers(src=rank) if way == "send" else given.transfers(dst=rank)
    for transfer in moved:
        if transfer.src_rank != transfer.dst_rank:
            yield transfer.tensor
