"""The exchange: rounds of messages over any wire.

A rank walks its rounds. In each it posts all receives, packs and posts all sends, copies what it
keeps while the wire works, unpacks messages as they arrive, and at last folds what is reduced, in
order of addend: so results do not depend on what arrives first, and are those of
`shardmath.simulate` bit for bit. All of this is done before the next round packs, so what arrived
in one may be relayed in the next. On a GPU "before" is the order of its streams: the host only says
what is to be done, and waits once, at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardmath.plans.programs.messages import Message, Round
from shardmath_torch.groups import dtypes
from shardmath_torch.groups.agreement.wire import PeerFailure, Pending
from shardmath_torch.moves.exchange.endpoints import (
    BoundRound,
    Endpoint,
    bind,
    count_staging_bytes,
    drop_sends,
    set_apart,
)
from shardmath_torch.moves.exchange.staging import Block, staging_of
from shardmath_torch.moves.exchange.task import Task
from shardmath_torch.moves.exchange.views import Fold, Staged, Views, divide, fill
from shardmath_torch.moves.observing.laps import (
    ARRIVED,
    FOLDED,
    KEPT,
    LEFT,
    PACKED,
    POSTED,
    UNPACKED,
)
from shardmath_torch.moves.observing.stopwatch import Stopwatch

__all__ = ["Exchange", "find_device"]

Tensors: TypeAlias = Mapping[str, Tensor]

_OnItsWay: TypeAlias = tuple[Endpoint, Pending]


class Exchange:
    """The engine of both transports. Pieces of at least `apart` bytes, if that is given, are messages of their own."""

    def __init__(self, task: Task, apart: int | None = None) -> None:
        self._task = task
        self._apart = apart
        self._bound_to: object = None
        self._rounds: tuple[BoundRound, ...] = ()
        self._staging = staging_of(task.group, torch.device("cpu"))
        self._needed = 0
        self._held: tuple[Tensors, Tensors] | None = None
        self._views: Views | None = None
        # Of a block that a larger one replaces nothing is kept.
        self._staged: WeakKeyDictionary[Block, Staged] = WeakKeyDictionary()
        self.begun: int | None = 0

    @functools.cached_property
    def posted(self) -> tuple[Round, ...]:
        """The part's rounds, large pieces apart."""
        return set_apart(self._task.part.rounds, self._apart)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the group's staging that a move takes."""
        return self._needed

    def prepare(self, src: Tensors, dst: Tensors, held: bool = False) -> None:
        """Find where all messages lie in these tensors, and make staging for those that need it.

        Of `held` tensors views are kept from move to move.
        """
        self._held = (src, dst) if held else None
        self._views = None
        src_strides = {key: tensor.stride() for key, tensor in src.items()}
        dst_strides = {key: tensor.stride() for key, tensor in dst.items()}
        device = find_device(src, dst)
        wanted = src_strides, dst_strides, device
        if wanted != self._bound_to:
            # Bound to nothing until all is found: an interrupt in between leaves half of it.
            self._bound_to = None
            self._rounds = bind(self.posted, src_strides, dst_strides)
            self._staging = staging_of(self._task.group, device)
            self._needed = count_staging_bytes(self._rounds)
            self._staged.clear()
            self._bound_to = wanted
        self._staging.reserve(self._needed)

    def let_go(self) -> None:
        """Keep no view of tensors, nor of staging that a larger block has replaced."""
        self._held = self._views = None

    def keep(self, task: Task, gone: Collection[int]) -> Exchange:
        """One that does the same without what goes to ranks that are gone, for tensors that lie as they did.

        Raises what torch raises where memory is short.
        """
        kept = Exchange(task, self._apart)
        kept._rounds = drop_sends(self._rounds, gone)
        kept._bound_to = self._bound_to
        kept._needed = self._needed
        kept._held = self._held
        kept._views = self._views
        kept._staging = staging_of(task.group, self._staging.device)
        kept._staging.take_over(self._staging)
        kept._staging.reserve(self._needed)
        return kept

    def move(self, src: Tensors, dst: Tensors, watch: Stopwatch) -> None:
        """Move the tensors. Raises PeerFailure."""
        part = self._task.part
        self._note_begun(0)
        # In inference mode inference tensors, too, may be written.
        with torch.inference_mode(), self._staging.lend(self._needed) as block:
            views = self._find_views(src, dst, block)
            self._note_begun(1)
            for work in part.fills:
                fill(work, dst)
                watch.lap(FOLDED)
            for number, one in enumerate(self._rounds):
                self._note_begun(number + 2)
                self._run_round(one, views, watch)
            self._note_begun(part.steps)
            for work in part.divisions:
                divide(work, dst)
                watch.lap(FOLDED)
            self._task.wire.finish()
            if self._task.wire.device.type != "cpu":
                watch.lap(ARRIVED)
            self.begun = part.steps + 1

    def _note_begun(self, steps: int) -> None:
        """So many steps have begun: not known where another device carries out what it was told."""
        self.begun = steps if self._task.wire.device.type == "cpu" else None

    def _find_views(self, src: Tensors, dst: Tensors, block: Block) -> Views:
        """The tensors and staging of a move; those of the move before where both are the same."""
        staged = self._staged.get(block)
        if staged is None:
            staged = self._staged[block] = Staged(block.memory)
        held = self._held is not None and src is self._held[0] and dst is self._held[1]
        if not held:
            return Views(src, dst, staged)
        if self._views is None or self._views.staged is not staged:
            self._views = Views(src, dst, staged, held=True)
        return self._views

    def _run_round(self, one: BoundRound, views: Views, watch: Stopwatch) -> None:
        """Move the messages of one round, all of them before the next round begins."""
        # All is posted before anything is waited for: a rank that waited first could wait for ever.
        arriving = [self._receive(endpoint, views, watch) for endpoint in one.receives]
        leaving = [self._send(endpoint, views, watch) for endpoint in one.sends]
        self._task.wire.start()
        folds: list[Fold] = []
        for source, target in one.keeps:
            folds += views.keep(source, target)
            watch.lap(KEPT, source.message)
        # Of many small pieces finding where they go takes as long as the wire does.
        unpackings = [views.find_unpacking(endpoint) for endpoint, _ in arriving]
        if unpackings:
            watch.lap(UNPACKED)
        for (endpoint, pending), unpack in zip(arriving, unpackings, strict=True):
            message = endpoint.message
            _wait(pending, message)
            watch.waited(ARRIVED, message, message.src_rank)
            if not endpoint.contiguous:
                folds += unpack()
                watch.lap(UNPACKED, message)
        # What has not left must not change: a relayed message may be sent from a destination.
        for endpoint, pending in leaving:
            message = endpoint.message
            _wait(pending, message)
            watch.waited(LEFT, message, message.dst_rank)
        # In order of addend, not of arrival: rounding depends on the order.
        for fold in sorted(folds, key=lambda fold: fold.addend):
            dtypes.fold(fold.op, fold.into, fold.piece)
        watch.lap(FOLDED, one.step)

    def _receive(self, endpoint: Endpoint, views: Views, watch: Stopwatch) -> _OnItsWay:
        """Post the receive of the message."""
        message = endpoint.message
        memory = views.find_bytes(endpoint, arriving=True)
        with _Blame(message):
            pending = self._task.wire.receive(memory, message.src_rank)
        watch.lap(POSTED, message)
        return endpoint, pending

    def _send(self, endpoint: Endpoint, views: Views, watch: Stopwatch) -> _OnItsWay:
        """Pack the message, and post the send of it."""
        message = endpoint.message
        if not endpoint.contiguous:
            views.pack(endpoint)
            watch.lap(PACKED, message)
        memory = views.find_bytes(endpoint, arriving=False)
        with _Blame(message):
            pending = self._task.wire.send(memory, message.dst_rank)
        watch.lap(POSTED, message)
        return endpoint, pending


def find_device(src: Tensors, dst: Tensors) -> torch.device:
    """Where the rank's tensors are, all of them on one device; the CPU where it has none."""
    for tensor in (*src.values(), *dst.values()):
        return tensor.device
    return torch.device("cpu")


def _wait(pending: Pending, message: Message) -> None:
    """Wait until the message has come or left."""
    with _Blame(message):
        pending.wait()


class _Blame:
    """A failure inside is one of this message's first tensor.

    A class and no generator, since every message enters it twice.
    """

    def __init__(self, message: Message) -> None:
        self._message = message

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, failure: object, trace: object) -> None:
        if isinstance(failure, PeerFailure):
            failure.tensor = self._message.pieces[0].tensor
