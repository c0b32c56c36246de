"""Walking: the rounds of a plan, with only changes sent.

1. Ranks first send how many elements each message has, so that both ends know how long packets are. A packet without
   elements is not sent. The counts of all messages of a pair of ranks are one notice, sent in the step of the first of
   them: so both ends have it in the same step, and a step has no more notices than messages.
2. The exchange's loop runs both, notices and packets (`moves.exchange.rounds`). Packets have separate memory.
3. Whole messages are moved as in any exchange (`_ImmediatePlacing`): between tensors, or through the group's staging.
   If placing is deferred (`_DeferredPlacing`), received data stay in separate memory, and so do local copies, since
   their source may change before.
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
"""A function that writes received data into a destination tensor; calling it again has no further effect."""


class _NumberedStep(NamedTuple):
    """A round with each kind of message numbered over all rounds."""

    step: Step
    sends: list[tuple[int, Endpoint]]
    receives: list[tuple[int, Endpoint]]
    keeps: list[tuple[int, tuple[Endpoint, Endpoint]]]


class _Parcels(NamedTuple):
    """The parcel of each message of a rank."""

    sends: list[Parcel]
    receives: list[Parcel]
    keeps: list[Parcel]

    def count_traffic(self) -> Traffic:
        """Return the messages and bytes that are sent and received, by peer, and those kept on this rank."""
        # A parcel is None if nothing is sent for its message.
        sends, receives, keeps = (tuple(filter(None, parcels)) for parcels in self)
        return count_traffic([Round(sends, receives, keeps)])


class Ends(NamedTuple):
    """The source and destination tensors of a rank in a move. If `is_beside` is True, received data stay in separate
    memory until the end of the move, and are written to the destination only then.
    """

    src: Tensors
    dst: Tensors
    is_beside: bool = False


class _ImmediatePlacing:
    """Writes data into destinations as it arrives."""

    def __init__(self, views: MoveViews) -> None:
        self.receive = views.receive
        self.keep = views.keep
        self.puts: list[Put] = []

    def put(self, put: Put) -> list[Fold]:
        """Write into the destination now by calling `put`; return [] (no reductions to do), as changes are never
        reduced.
        """
        put()
        return []


class _DeferredPlacing:
    """Collects functions in `puts` that later write data into destinations."""

    def __init__(self, views: MoveViews) -> None:
        self._views = views
        self.puts: list[Put] = []

    def put(self, put: Put) -> list[Fold]:
        """Keep `put`, a function that writes into the destination, for the commit; return [] (no reductions to do)."""
        self.puts.append(put)
        return []

    def receive(self, endpoint: Endpoint) -> Receive:
        """Return a Receive for a message that is first received into new memory, and written into the destination only
        when the move is committed. `endpoint` has the message and the views of destination tensors to write it to.

        The message is sent whole.
        """
        views, memory = self._make_separate_views(endpoint)
        staged = _to_staged(endpoint)

        def find_unpacking() -> Unpacking:
            return partial(self.put, views.find_unpacking(staged))

        return Receive(endpoint.message, memory, find_unpacking)

    def keep(self, source: Endpoint, target: Endpoint) -> Keep:
        """Return a Keep (message, copy function) for a copy within this rank, from the tensor views in `source` to
        those in `target`. The function copies into new memory; the commit of the move then writes to `target`.

        The message is copied whole.
        """
        # Both stay alive until `copy` has run: views are cached by the id of their endpoint.
        staged_source, staged_target = _to_staged(source), _to_staged(target)

        def copy() -> list[Fold]:
            views, _ = self._make_separate_views(source)
            views.pack(staged_source)
            return self.put(views.find_unpacking(staged_target))

        return Keep(source.message, copy)

    def _make_separate_views(self, endpoint: Endpoint) -> tuple[MoveViews, Tensor]:
        """Views of the same tensors, with new staging memory for only this message."""
        memory = self._views.staged.memory.new_empty(endpoint.message.nbytes)
        return self._views.over(memory), memory


class _WalkCall(NamedTuple):
    """The state of one walk: changes, counts, parcels, views of tensors, and when to write into destinations."""

    given: Sorted
    counts: Sequence[Counts]
    parcels: _Parcels
    views: MoveViews
    placing: _ImmediatePlacing | _DeferredPlacing


class Walker:
    """A sender and receiver of changed elements, by this rank's part of a plan. It is made for given source and
    destination tensors, and can be used while they keep their memory and strides."""

    def __init__(self, task: Task, src: Tensors, dst: Tensors) -> None:
        part = task.part
        self._wire = task.wire
        self._device = find_device(src, dst)
        src_strides = {key: tensor.stride() for key, tensor in src.items()}
        dst_strides = {key: tensor.stride() for key, tensor in dst.items()}
        bound_rounds = bind(part.rounds, src_strides, dst_strides)
        self._steps = list(_number(bound_rounds))
        self._needed_bytes = count_staging_bytes(bound_rounds)
        self._staging = staging_of(task.group, self._device)
        sends = [message for round_ in part.rounds for message in round_.sends]
        receives = [message for round_ in part.rounds for message in round_.receives]
        keeps = [message for round_ in part.rounds for message in round_.keeps]
        shapes = {key: tuple(tensor.shape) for key, tensor in src.items()}
        self.outgoing = Outgoing(shapes, sends, keeps)
        self._receives = Incoming(dst, receives)
        self._keeps = Incoming(dst, keeps)
        notices = [*make_notices(sends), *make_notices(receives)]
        self._notices = gather_rounds(notices, part.rank)

    def sort(self, changed: Sequence[Changed]) -> Sorted:
        """Return the changed elements of each message to send and of each copy within this rank; None for a message or
        copy of all its elements. Also allocate the staging memory for messages of all elements, before anything is
        sent."""
        self._staging.reserve(self._needed_bytes)
        return self.outgoing.sort(changed)

    def exchange_counts(self, given: Sorted, watch: Stopwatch) -> list[Counts]:
        """Tell each receiving rank how many changed elements each message in `given` has. Return, for each message that
        this rank receives, a tuple of its numbers of changed elements, one per element size; or None for a message that
        sends every element, changed or not.

        Raises PeerFailure.
        """
        counts_to_send = self.outgoing.tell(given)
        rounds = Rounds(self._wire, watch)
        # Memory for the counts from each rank.
        arriving = {}
        for each in self._notices:
            receives = []
            for notice in each.receives:
                memory = torch.zeros(notice.nbytes, dtype=torch.uint8, device=self._device)
                arriving[notice.src_rank] = memory.view(torch.int64)
                receives.append(Receive(notice, memory, None))
            sends = []
            for notice in each.sends:
                counts = counts_to_send[notice.dst_rank]
                memory = torch.tensor(counts, dtype=torch.int64, device=self._device)
                sends.append(Send(notice, memory.view(torch.uint8), None))
            rounds.run(each.step, receives, sends)
        # The host reads the counts below.
        rounds.finish()
        return self._receives.read({rank: memory.tolist() for rank, memory in arriving.items()})

    def walk(
        self, given: Sorted, counts: Sequence[Counts], ends: Ends, watch: Stopwatch
    ) -> list[Put]:
        """Send the changes `given`, and receive those that `counts` announces; return functions that write these at the
        commit, or [] if they are already written.

        Raises PeerFailure.
        """
        parcels = self._list_parcels(given, counts)
        watch.say_traffic(parcels.count_traffic())
        rounds = Rounds(self._wire, watch)
        with torch.inference_mode(), self._staging.lend(self._needed_bytes) as block:
            views = MoveViews(ends.src, ends.dst, Staged(block.memory))
            placing = _DeferredPlacing(views) if ends.is_beside else _ImmediatePlacing(views)
            call = _WalkCall(given, counts, parcels, views, placing)
            for round_ in self._steps:
                receives = self._list_receives(round_, call)
                sends = self._list_sends(round_, call)
                keeps = self._list_keeps(round_, call)
                rounds.run(round_.step, receives, sends, keeps)
            rounds.finish()
        return placing.puts

    def _list_parcels(self, given: Sorted, counts: Sequence[Counts]) -> _Parcels:
        """The parcel of each message."""
        sends, keeps = self.outgoing.list_parcels(given)
        receives = list_parcels(self._receives.messages, self._receives.sizes, counts)
        return _Parcels(sends, receives, keeps)

    def _list_receives(self, step: _NumberedStep, call: _WalkCall) -> Iterator[Receive]:
        """The step's receives."""
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

    def _list_sends(self, step: _NumberedStep, call: _WalkCall) -> Iterator[Send]:
        """The step's sends."""
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

    def _list_keeps(self, step: _NumberedStep, call: _WalkCall) -> Iterator[Keep]:
        """The step's local copies."""
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
        """Memory for the parcel's packet."""
        return torch.empty(parcel.nbytes, dtype=torch.uint8, device=self._device)

    def _place(self, number: int, packet: Tensor, counts: Sequence[int]) -> None:
        """Write a packet's elements into destinations; the host computes their cells from the numbers in the packet."""
        # The host reads the packet, so all of it has to have arrived.
        self._wire.finish()
        self._receives.place(number, unpack(packet, self._receives.sizes[number], counts))


def _receive_packet(
    parcel: Message, packet: Tensor, placing: _ImmediatePlacing | _DeferredPlacing, place: Put
) -> Receive:
    """The receive of a packet, with the function that writes its elements."""
    return Receive(parcel, packet, lambda: partial(placing.put, place))


def _to_staged(endpoint: Endpoint) -> Endpoint:
    """The endpoint of the same message at the first byte of separate staging memory."""
    return endpoint._replace(contiguous=None, start=0)


def _number(rounds: Iterable[BoundRound]) -> Iterator[_NumberedStep]:
    """The rounds, with messages numbered over all rounds."""
    sends = receives = keeps = 0
    for each in rounds:
        yield _NumberedStep(
            each.step,
            list(enumerate(each.sends, sends)),
            list(enumerate(each.receives, receives)),
            list(enumerate(each.keeps, keeps)),
        )
        sends += len(each.sends)
        receives += len(each.receives)
        keeps += len(each.keeps)
