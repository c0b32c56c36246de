"""Walking: the rounds of a plan, of which only what changed is sent.

1. Ranks tell each other first how many elements each message has, so that both ends know how long packets are. A packet
   of no elements is not sent. What is told of a pair's messages goes in the step of the first of them: so it is in one
   step at both ends, and a step has no more of it than messages.
2. Whole messages go as the exchange sends them: out of and into tensors, or through the group's staging. Packets have
   memory of their own.
3. Put in place later, what has come stays in memory of its own, whole messages too; so does what the rank keeps, since
   its source may change before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardmath.plans.programs.messages import Message, Round, Step
from shardmath_torch.groups.agreement.wire import Pending
from shardmath_torch.moves.exchange.endpoints import BoundRound, Endpoint, bind, count_staging_bytes
from shardmath_torch.moves.exchange.engine import find_device
from shardmath_torch.moves.exchange.staging import staging_of
from shardmath_torch.moves.exchange.task import Task
from shardmath_torch.moves.exchange.views import Staged, Views
from shardmath_torch.moves.observing import laps
from shardmath_torch.moves.observing.stopwatch import Stopwatch
from shardmath_torch.moves.observing.traffic import Traffic, count_traffic
from shardmath_torch.tensors.changes.comparing import Changed
from shardmath_torch.tensors.changes.packets import pack, unpack
from shardmath_torch.tensors.changes.parcels import Parcel, list_parcels
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


class _Call(NamedTuple):
    """What goes in one call, between which tensors, and the watch that times it."""

    given: Sorted
    counts: Sequence[Counts]
    parcels: _Parcels
    views: Views
    is_beside: bool
    watch: Stopwatch


class _Arriving(NamedTuple):
    """A message on its way here, and the packet's memory; None where it comes whole."""

    number: int
    endpoint: Endpoint
    packet: Tensor | None
    parcel: Message
    pending: Pending


class _OnItsWay(NamedTuple):
    """Memory that has to stay while it is on its way."""

    memory: Tensor
    parcel: Message
    pending: Pending


class Walker:
    """A rank's part of a plan, for tensors that lie in memory as these do."""

    def __init__(self, task: Task, src: Tensors, dst: Tensors) -> None:
        part = task.part
        self._wire = task.wire
        self._device = find_device(src, dst)
        here = {key: tensor.stride() for key, tensor in src.items()}
        there = {key: tensor.stride() for key, tensor in dst.items()}
        bound = bind(part.rounds, here, there)
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

    def sort(self, changed: Sequence[Changed]) -> Sorted:
        """These changes by message. Makes room for messages that go whole."""
        self._staging.reserve(self._needed)
        return self.outgoing.sort(changed)

    def exchange_counts(self, given: Sorted) -> list[Counts]:
        """The counts of each message that is to come. Raises PeerFailure."""
        incoming = self._receives.count_told()
        outgoing = self.outgoing.tell(given)
        sources = _find_first_steps((m.src_rank, m) for m in self._receives.messages)
        targets = _find_first_steps((m.dst_rank, m) for m in self.outgoing.sends)
        arrived = {}
        for step in sorted({*sources.values(), *targets.values()}):
            under_way = []
            for rank in _list_ranks(sources, step):
                memory = torch.zeros(incoming[rank], dtype=torch.int64, device=self._device)
                under_way.append((memory, self._wire.receive(_as_bytes(memory), rank)))
                arrived[rank] = memory
            for rank in _list_ranks(targets, step):
                memory = torch.tensor(outgoing[rank], dtype=torch.int64, device=self._device)
                under_way.append((memory, self._wire.send(_as_bytes(memory), rank)))
            self._wire.start()
            for _, pending in under_way:
                pending.wait()
        # The host reads it, so it waits itself.
        self._wire.finish()
        return self._receives.read({rank: memory.tolist() for rank, memory in arrived.items()})

    def walk(
        self, given: Sorted, counts: Sequence[Counts], ends: Ends, watch: Stopwatch
    ) -> list[Put]:
        """Send, receive and put in place; or, beside it, give what does that. Raises PeerFailure."""
        parcels = self._list_parcels(given, counts)
        watch.say_traffic(parcels.count_traffic())
        puts: list[Put] = []
        with torch.inference_mode(), self._staging.lend(self._needed) as block:
            views = Views(ends.src, ends.dst, Staged(block.memory))
            call = _Call(given, counts, parcels, views, ends.is_beside, watch)
            for step in self._steps:
                puts += self._run_step(step, call)
            self._wire.finish()
            watch.lap(laps.ARRIVED)
        return puts

    def _list_parcels(self, given: Sorted, counts: Sequence[Counts]) -> _Parcels:
        """What goes of each message."""
        sends, keeps = self.outgoing.list_parcels(given)
        receives = list_parcels(self._receives.messages, self._receives.sizes, counts)
        return _Parcels(sends, receives, keeps)

    def _run_step(self, step: _Step, call: _Call) -> list[Put]:
        """Move what goes in the round; what puts in place what is for later."""
        watch = call.watch
        # All is posted before anything is waited for: a rank that waited first could wait for ever.
        arriving = list(self._receive(step, call))
        leaving = list(self._send(step, call))
        self._wire.start()
        come: list[Put] = []
        for number, ends in step.keeps:
            come.append(self._keep(number, ends, call))
            _run_unless(call.is_beside, come)
            watch.lap(laps.KEPT, call.parcels.keeps[number])
        for one in arriving:
            one.pending.wait()
            watch.waited(laps.ARRIVED, one.parcel, one.parcel.src_rank)
            come.append(self._take_in(one, call))
            _run_unless(call.is_beside, come)
            watch.lap(laps.UNPACKED, one.parcel)
        for _, parcel, pending in leaving:
            pending.wait()
            watch.waited(laps.LEFT, parcel, parcel.dst_rank)
        watch.lap(laps.FOLDED, step.step)
        return come

    def _receive(self, step: _Step, call: _Call) -> Iterator[_Arriving]:
        """Post the receives of the step."""
        for number, endpoint in step.receives:
            parcel = call.parcels.receives[number]
            if parcel is None:
                continue
            packet: Tensor | None = None
            if call.counts[number] is None and not call.is_beside:
                memory = call.views.find_bytes(endpoint, arriving=True)
            else:
                memory = packet = self._make_packet(parcel)
            pending = self._wire.receive(memory, parcel.src_rank)
            call.watch.lap(laps.POSTED, parcel)
            yield _Arriving(number, endpoint, packet, parcel, pending)

    def _make_packet(self, parcel: Message) -> Tensor:
        """Memory for it."""
        return torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._device)

    def _send(self, step: _Step, call: _Call) -> Iterator[_OnItsWay]:
        """Post the sends of the step."""
        for number, endpoint in step.sends:
            parcel = call.parcels.sends[number]
            if parcel is None:
                continue
            elements = call.given.sends[number]
            if elements is None:
                call.views.pack(endpoint)
                memory = call.views.find_bytes(endpoint, arriving=False)
            else:
                memory = pack(elements)
            call.watch.lap(laps.PACKED, parcel)
            pending = self._wire.send(memory, parcel.dst_rank)
            call.watch.lap(laps.POSTED, parcel)
            yield _OnItsWay(memory, parcel, pending)

    def _keep(self, number: int, ends: tuple[Endpoint, Endpoint], call: _Call) -> Put:
        """What puts in place what stays on this rank."""
        elements = call.given.keeps[number]
        if elements is not None:
            return partial(self._keeps.place, number, elements)
        if not call.is_beside:
            return partial(call.views.keep, *ends)
        here, there = map(_stage, ends)
        apart = call.views.over(self._make_packet(here.message))
        apart.pack(here)
        return partial(apart.unpack, there)

    def _take_in(self, one: _Arriving, call: _Call) -> Put:
        """What puts what has arrived where it belongs."""
        told = call.counts[one.number]
        if one.packet is None:
            return partial(call.views.unpack, one.endpoint)
        if told is None:
            return partial(call.views.over(one.packet).unpack, _stage(one.endpoint))
        return partial(self._place, one.number, one.packet, told)

    def _place(self, number: int, packet: Tensor, told: Sequence[int]) -> None:
        """Put what has come where it belongs, which the host works out of the numbers that came with it."""
        self._wire.finish()
        self._receives.place(number, unpack(packet, self._receives.sizes[number], told))


def _run_unless(is_beside: bool, puts: list[Put]) -> None:
    """Put in place at once, unless that is for later."""
    if not is_beside:
        for put in puts:
            put()
        puts.clear()


def _stage(endpoint: Endpoint) -> Endpoint:
    """The same end, of a message that lies from the first byte of its own memory on."""
    return endpoint._replace(contiguous=None, start=0)


def _as_bytes(memory: Tensor) -> Tensor:
    return memory.view(torch.uint8)


def _find_first_steps(given: Iterable[tuple[int, Message]]) -> dict[int, Step]:
    """The step of the first message of each rank."""
    first: dict[int, Step] = {}
    for rank, message in given:
        first[rank] = min(message.step, first.get(rank, message.step))
    return first


def _list_ranks(first: Mapping[int, Step], step: Step) -> list[int]:
    return [rank for rank, at in first.items() if at == step]


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
