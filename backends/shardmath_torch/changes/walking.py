"""Walking: the rounds of a plan, of which only what changed is sent.

1. Ranks tell each other first how many elements each message has, so that both ends know how long packets are. A packet
   of no elements is not sent.
2. Whole messages go as the exchange sends them: out of and into tensors, or through the group's staging. Packets have
   memory of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from shardmath.programs.messages import Message, Round, Step
from shardmath.programs.part import Part
from shardmath_torch import compat
from shardmath_torch.agreement.wire import Pending, Wire
from shardmath_torch.changes.packets import count_bytes, pack, unpack
from shardmath_torch.changes.parcels import Parcel, list_parcels
from shardmath_torch.changes.sparse import Changed, Counts, Elements, Incoming, Outgoing
from shardmath_torch.exchange.endpoints import BoundRound, Endpoint, bind, count_staging_bytes
from shardmath_torch.exchange.engine import find_device
from shardmath_torch.exchange.staging import Fence, staging_of
from shardmath_torch.exchange.views import Views
from shardmath_torch.observing import laps
from shardmath_torch.observing.stopwatch import Stopwatch
from shardmath_torch.observing.traffic import Traffic, count_traffic

__all__ = ["Sorted", "Volume", "Walker"]

Tensors: TypeAlias = Mapping[str, Tensor]


class Sorted(NamedTuple):
    """The elements that each message of a rank takes; None where it goes whole."""

    sends: list[Elements | None]
    keeps: list[Elements | None]


class Volume(NamedTuple):
    """What a rank sends to others: changed elements, messages that go whole, and bytes of both together."""

    elements: int
    whole: int
    nbytes: int


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


class _Call(NamedTuple):
    """What goes in one call, between which tensors, and the watch that times it."""

    given: Sorted
    counts: Sequence[Counts]
    parcels: _Parcels
    views: Views
    watch: Stopwatch


class _Arriving(NamedTuple):
    """A message on its way here, and the packet's memory; None where it comes whole."""

    number: int
    endpoint: Endpoint
    packet: Tensor | None
    parcel: Message
    pending: Pending


class _Leaving(NamedTuple):
    """Memory that has to stay while it is on its way."""

    memory: Tensor
    parcel: Message
    pending: Pending


class Walker:
    """A rank's part of a plan, for tensors that lie in memory as these do."""

    def __init__(
        self, part: Part, group: compat.Group, wire: Wire, src: Tensors, dst: Tensors
    ) -> None:
        self._wire = wire
        self._device = find_device(src, dst)
        here = {key: tensor.stride() for key, tensor in src.items()}
        there = {key: tensor.stride() for key, tensor in dst.items()}
        bound = bind(part.rounds, here, there)
        self._steps = list(_number(bound))
        self._needed = count_staging_bytes(bound)
        self._staging = staging_of(group, self._device)
        sends = [m for one in part.rounds for m in one.sends]
        receives = [m for one in part.rounds for m in one.receives]
        keeps = [m for one in part.rounds for m in one.keeps]
        shapes = {key: tuple(tensor.shape) for key, tensor in src.items()}
        self._sends = Outgoing(shapes, sends)
        self._receives = Incoming(dst, receives)
        self._kept = Outgoing(shapes, keeps)
        self._keeps = Incoming(dst, keeps)

    def sort(self, changed: Sequence[Changed]) -> Sorted:
        """These changes by message. Makes room for messages that go whole."""
        self._staging.reserve(self._needed)
        sends = self._sends.sort(changed)
        return Sorted(sends, self._kept.sort(changed))

    def measure(self, given: Sorted) -> Volume:
        """What goes to others."""
        elements = whole = nbytes = 0
        for message, some in zip(self._sends.messages, given.sends, strict=True):
            if some is None:
                whole += 1
                nbytes += message.nbytes
            else:
                counts = [len(one.numbers) for one in some]
                elements += sum(counts)
                nbytes += count_bytes([one.itemsize for one in some], counts)
        return Volume(elements, whole, nbytes)

    def exchange_counts(self, given: Sorted) -> list[Counts]:
        """The counts of each message that is to come. Raises PeerFailure."""
        arriving = {}
        for rank, count in self._receives.count_told().items():
            memory = torch.zeros(count, dtype=torch.int64, device=self._device)
            arriving[rank] = memory, self._wire.receive(memory.view(torch.uint8), rank)
        leaving = []
        for rank, counts in self._sends.tell(given.sends).items():
            memory = torch.tensor(counts, dtype=torch.int64, device=self._device)
            leaving.append((memory, self._wire.send(memory.view(torch.uint8), rank)))
        self._wire.start()
        for _, pending in (*arriving.values(), *leaving):
            pending.wait()
        told = {rank: memory.tolist() for rank, (memory, _) in arriving.items()}
        return self._receives.read(told)

    def walk(
        self, given: Sorted, counts: Sequence[Counts], src: Tensors, dst: Tensors, watch: Stopwatch
    ) -> None:
        """Send, receive and put in place. Raises PeerFailure."""
        parcels = self._list_parcels(given, counts)
        watch.say_traffic(parcels.count_traffic())
        with torch.inference_mode(), self._staging.lend(self._needed, Fence()) as block:
            call = _Call(given, counts, parcels, Views(src, dst, block), watch)
            for step in self._steps:
                self._run_step(step, call)

    def _list_parcels(self, given: Sorted, counts: Sequence[Counts]) -> _Parcels:
        """What goes of each message."""
        sends, keeps = (list(map(_count_elements, some)) for some in given)
        return _Parcels(
            list_parcels(self._sends.messages, self._sends.sizes, sends),
            list_parcels(self._receives.messages, self._receives.sizes, counts),
            list_parcels(self._kept.messages, self._kept.sizes, keeps),
        )

    def _run_step(self, step: _Step, call: _Call) -> None:
        """Move what goes in the round."""
        watch = call.watch
        # All is posted before anything is waited for: a rank that waited first could wait for ever.
        arriving = list(self._receive(step, call))
        leaving = list(self._send(step, call))
        self._wire.start()
        self._keep(step, call)
        for one in arriving:
            one.pending.wait()
            watch.waited(laps.ARRIVED, one.parcel, one.parcel.src_rank)
            self._take_in(one, call)
            watch.lap(laps.UNPACKED, one.parcel)
        for _, parcel, pending in leaving:
            pending.wait()
            watch.waited(laps.LEFT, parcel, parcel.dst_rank)
        watch.lap(laps.FOLDED, step.step)

    def _receive(self, step: _Step, call: _Call) -> Iterator[_Arriving]:
        """Post the receives of the step."""
        for number, endpoint in step.receives:
            parcel = call.parcels.receives[number]
            if parcel is None:
                continue
            packet: Tensor | None = None
            if call.counts[number] is None:
                memory = call.views.find_bytes(endpoint, arriving=True)
            else:
                memory = packet = torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._device)
            pending = self._wire.receive(memory, parcel.src_rank)
            call.watch.lap(laps.POSTED, parcel)
            yield _Arriving(number, endpoint, packet, parcel, pending)

    def _send(self, step: _Step, call: _Call) -> Iterator[_Leaving]:
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
            yield _Leaving(memory, parcel, pending)

    def _keep(self, step: _Step, call: _Call) -> None:
        """What stays on this rank."""
        for number, ends in step.keeps:
            elements = call.given.keeps[number]
            if elements is None:
                call.views.keep(*ends)
            else:
                self._keeps.place(number, elements)
            call.watch.lap(laps.KEPT, call.parcels.keeps[number])

    def _take_in(self, one: _Arriving, call: _Call) -> None:
        """Put what has arrived where it belongs."""
        told = call.counts[one.number]
        if one.packet is None or told is None:
            call.views.unpack(one.endpoint)
            return
        sizes = self._receives.sizes[one.number]
        self._receives.place(one.number, unpack(one.packet, sizes, told))


def _count_elements(elements: Elements | None) -> Counts:
    """How many elements there are of each size; None where the message goes whole."""
    return None if elements is None else tuple(len(some.numbers) for some in elements)


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
