"""Walking: the rounds of a plan, of which only what changed is sent.

1. Ranks tell each other first how many elements each message has, so that both ends know how long packets are. A packet
   of no elements is not sent. What is told of a pair's messages is one notice, which goes in the step of the first of
   them: so it is in one step at both ends, and a step has no more notices than messages.
2. The exchange's loop runs both, notices and packets (`moves.exchange.rounds`). Packets have memory of their own.
3. Whole messages go as the exchange sends them (`_InPlace`): out of and into tensors, or through the group's staging.
   Put in place later (`_Beside`), what has come stays in memory of its own, whole messages too; so does what the rank
   keeps, since its source may change before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardmath.plans.programs.messages import Message, Round, Step, gather_rounds
from shardmath_torch.moves.exchange.endpoints import BoundRound, Endpoint, bind, count_staging_bytes
from shardmath_torch.moves.exchange.engine import find_device
from shardmath_torch.moves.exchange.rounds import Fold, Keep, Receive, Rounds, Send, Unpacking
from shardmath_torch.moves.exchange.staging import staging_of
from shardmath_torch.moves.exchange.task import Task
from shardmath_torch.moves.exchange.views import MoveViews, Staged
from shardmath_torch.moves.observing.stopwatch import Stopwatch
from shardmath_torch.moves.observing.traffic import Traffic, count_traffic
from shardmath_torch.tensors.changes.comparing import Changed
from shardmath_torch.tensors.changes.packets import pack, unpack
from shardmath_torch.tensors.changes.parcels import Parcel, list_parcels, make_notices
from shardmath_torch.tensors.changes.placing import Counts, Incoming
from shardmath_torch.tensors.changes.sorting import Outgoing, Sorted

__all__ = ["Ends", "Put", "Walker"]

Tensors: TypeAlias = Mapping[str, Tensor]
Put: TypeAlias = Callable[[], object]
"""Puts something in place, however often it is called."""


class _Step(NamedTuple):
    """A round of which each kind of message is numbered, over all rounds."""

    step: Step
    sends: list[tuple[int, Endpoint]]
    receives: list[tuple[int, Endpoint]]
    keeps: list[tuple[int, tuple[Endpoint, Endpoint]]]


class _Parcels(NamedTuple):
    """What goes of each message of a rank."""

    sends: list[Parcel]
    receives: list[Parcel]
    keeps: list[Parcel]

    def count_traffic(self) -> Traffic:
        """All of it, by peer."""
        sends, receives, keeps = (tuple(filter(None, parcels)) for parcels in self)
        return count_traffic([Round(sends, receives, keeps)])


class Ends(NamedTuple):
    """The tensors at both ends; `is_beside`: what comes is put in place later."""

    src: Tensors
    dst: Tensors
    is_beside: bool = False


class _InPlace:
    """What comes is put in place as it comes."""

    def __init__(self, views: MoveViews) -> None:
        self.receive = views.receive
        self.keep = views.keep
        self.puts: list[Put] = []

    def put(self, put: Put) -> list[Fold]:
        """Put it in place now; of what has changed nothing is to be folded."""
        put()
        return []


class _Beside:
    """What comes is put in place later, by `puts`."""

    def __init__(self, views: MoveViews) -> None:
        self._views = views
        self.puts: list[Put] = []

    def put(self, put: Put) -> list[Fold]:
        """Put it in place later."""
        self.puts.append(put)
        return []

    def receive(self, endpoint: Endpoint) -> Receive:
        """The whole message, into memory of its own."""
        apart, memory = self._set_apart(endpoint)
        staged = _stage(endpoint)

        def find_unpacking() -> Unpacking:
            return partial(self.put, apart.find_unpacking(staged))

        return Receive(endpoint.message, memory, find_unpacking)

    def keep(self, source: Endpoint, target: Endpoint) -> Keep:
        """The whole message, copied as it is now."""
        # Both live until views of both are found: staging knows endpoints by their identities.
        here, there = _stage(source), _stage(target)

        def copy() -> list[Fold]:
            apart, _ = self._set_apart(source)
            apart.pack(here)
            return self.put(apart.find_unpacking(there))

        return Keep(source.message, copy)

    def _set_apart(self, endpoint: Endpoint) -> tuple[MoveViews, Tensor]:
        """The same tensors, with staging of the message alone."""
        memory = self._views.staged.memory.new_empty(endpoint.message.nbytes)
        return self._views.over(memory), memory


class _Call(NamedTuple):
    """What goes in one call, between which tensors, and how it is put in place."""

    given: Sorted
    counts: Sequence[Counts]
    parcels: _Parcels
    views: MoveViews
    placing: _InPlace | _Beside


class Walker:
    """A rank's part of a plan, for tensors that lie in memory as these do."""

    def __init__(self, task: Task, src: Tensors, dst: Tensors) -> None:
        part = task.part
        self._wire = task.wire
        self._device = find_device(src, dst)
        src_strides = {key: tensor.stride() for key, tensor in src.items()}
        dst_strides = {key: tensor.stride() for key, tensor in dst.items()}
        bound = bind(part.rounds, src_strides, dst_strides)
        self._steps = list(_number(bound))
        self._needed = count_staging_bytes(bound)
        self._staging = staging_of(task.group, self._device)
        sends = [m for one in part.rounds for m in one.sends]
        receives = [m for one in part.rounds for m in one.receives]
        keeps = [m for one in part.rounds for m in one.keeps]
        shapes = {key: tuple(tensor.shape) for key, tensor in src.items()}
        self.outgoing = Outgoing(shapes, sends, keeps)
        self._receives = Incoming(dst, receives)
        self._keeps = Incoming(dst, keeps)
        notices = [*make_notices(sends), *make_notices(receives)]
        self._notices = gather_rounds(notices, part.rank)

    def sort(self, changed: Sequence[Changed]) -> Sorted:
        """These changes by message. Makes room for messages that go whole."""
        self._staging.reserve(self._needed)
        return self.outgoing.sort(changed)

    def exchange_counts(self, given: Sorted, watch: Stopwatch) -> list[Counts]:
        """The counts of each message that is to come. Raises PeerFailure."""
        told = self.outgoing.tell(given)
        rounds = Rounds(self._wire, watch)
        arriving = {}
        for one in self._notices:
            receives = []
            for notice in one.receives:
                memory = torch.zeros(notice.nbytes, dtype=torch.uint8, device=self._device)
                arriving[notice.src_rank] = memory.view(torch.int64)
                receives.append(Receive(notice, memory, None))
            sends = []
            for notice in one.sends:
                counts = told[notice.dst_rank]
                memory = torch.tensor(counts, dtype=torch.int64, device=self._device)
                sends.append(Send(notice, memory.view(torch.uint8), None))
            rounds.run(one.step, receives, sends)
        # The host reads what has come.
        rounds.finish()
        return self._receives.read({rank: memory.tolist() for rank, memory in arriving.items()})

    def walk(
        self, given: Sorted, counts: Sequence[Counts], ends: Ends, watch: Stopwatch
    ) -> list[Put]:
        """Send, receive and put in place; or, beside it, give what does that. Raises PeerFailure."""
        parcels = self._list_parcels(given, counts)
        watch.say_traffic(parcels.count_traffic())
        rounds = Rounds(self._wire, watch)
        with torch.inference_mode(), self._staging.lend(self._needed) as block:
            views = MoveViews(ends.src, ends.dst, Staged(block.memory))
            placing = _Beside(views) if ends.is_beside else _InPlace(views)
            call = _Call(given, counts, parcels, views, placing)
            for one in self._steps:
                receives = self._list_receives(one, call)
                sends = self._list_sends(one, call)
                keeps = self._list_keeps(one, call)
                rounds.run(one.step, receives, sends, keeps)
            rounds.finish()
        return placing.puts

    def _list_parcels(self, given: Sorted, counts: Sequence[Counts]) -> _Parcels:
        """What goes of each message."""
        sends, keeps = self.outgoing.list_parcels(given)
        receives = list_parcels(self._receives.messages, self._receives.sizes, counts)
        return _Parcels(sends, receives, keeps)

    def _list_receives(self, step: _Step, call: _Call) -> Iterator[Receive]:
        """What comes in the step."""
        for number, endpoint in step.receives:
            parcel = call.parcels.receives[number]
            counts = call.counts[number]
            if parcel is None:
                continue
            if counts is None:
                yield call.placing.receive(endpoint)
                continue
            packet = self._make_packet(parcel)
            place = partial(self._place, number, packet, counts)
            yield _receive_packet(parcel, packet, call.placing, place)

    def _list_sends(self, step: _Step, call: _Call) -> Iterator[Send]:
        """What leaves in the step."""
        for number, endpoint in step.sends:
            parcel = call.parcels.sends[number]
            elements = call.given.sends[number]
            if parcel is None:
                continue
            if elements is None:
                yield call.views.send(endpoint)
                continue
            packet = self._make_packet(parcel)
            yield Send(parcel, packet, partial(pack, elements, packet))

    def _list_keeps(self, step: _Step, call: _Call) -> Iterator[Keep]:
        """What stays on this rank in the step."""
        for number, ends in step.keeps:
            parcel = call.parcels.keeps[number]
            elements = call.given.keeps[number]
            if parcel is None:
                continue
            if elements is None:
                yield call.placing.keep(*ends)
                continue
            place = partial(self._keeps.place, number, elements)
            yield Keep(parcel, partial(call.placing.put, place))

    def _make_packet(self, parcel: Message) -> Tensor:
        """Memory for it."""
        return torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._device)

    def _place(self, number: int, packet: Tensor, told: Sequence[int]) -> None:
        """Put what has come where it belongs, which the host works out of the numbers that came with it."""
        self._wire.finish()
        self._receives.place(number, unpack(packet, self._receives.sizes[number], told))


def _receive_packet(
    parcel: Message, packet: Tensor, placing: _InPlace | _Beside, place: Put
) -> Receive:
    """A packet that comes, and what puts its elements in place."""
    return Receive(parcel, packet, lambda: partial(placing.put, place))


def _stage(endpoint: Endpoint) -> Endpoint:
    """The same end, of a message that lies from the first byte of its own memory on."""
    return endpoint._replace(contiguous=None, start=0)


def _number(rounds: Iterable[BoundRound]) -> Iterator[_Step]:
    """The rounds, with numbers that go on from round to round."""
    sends = receives = keeps = 0
    for one in rounds:
        numbered = enumerate(one.sends, sends)
        coming = enumerate(one.receives, receives)
        staying = enumerate(one.keeps, keeps)
        yield _Step(one.step, list(numbered), list(coming), list(staying))
        sends += len(one.sends)
        receives += len(one.receives)
        keeps += len(one.keeps)
