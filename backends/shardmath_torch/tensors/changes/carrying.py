"""Carrying: a carrier that sends what has changed since the previous move.

1. The first move is whole, and so is the next one after a whole move that failed.
2. A snapshot equals what destinations hold, or will hold once all ranks have committed: it is updated then, and not
   earlier. If it could not be updated, or was dropped here (`let_go`), this rank objects to the next move of changes.
3. With `commit="all"`, received packets are kept until the commit, in memory proportional to the changes. Only a whole
   move has shadows, and frees them afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardmath.base.arrays import Ints
from shardmath.base.errors import ExchangeError
from shardmath.base.text import shown
from shardmath.plans.programs.messages import Round
from shardmath.plans.programs.part import RankProgram
from shardmath_torch.groups.agreement.naming import word_objection
from shardmath_torch.moves.exchange.local import Tensors, signature
from shardmath_torch.moves.exchange.memory import mark_written
from shardmath_torch.moves.exchange.task import Engine, Task
from shardmath_torch.moves.movers.carriers import Arrived, Whole
from shardmath_torch.moves.observing import laps
from shardmath_torch.moves.observing.stopwatch import Stopwatch
from shardmath_torch.tensors.changes.comparing import Changed, Snapshots, take
from shardmath_torch.tensors.changes.sorting import Sorted
from shardmath_torch.tensors.changes.walking import Ends, Put, Walker

__all__ = ["How", "Sent", "Sparse"]


class How(NamedTuple):
    """The arguments of a call of `Changes`. With `whole`, all elements are sent; otherwise, those at `positions` (by
    tensor name), or if `positions` is None, those that differ from earlier copies.
    """

    positions: Mapping[str, Tensor] | None
    whole: bool


class Sent(NamedTuple):
    """The amounts that one call sent, and the seconds of each phase. `elements` counts changed elements, `whole` counts
    messages sent with all their elements, and `nbytes` is the bytes of both.

    The phases are "comparing" sources with snapshots, "mapping" changes to messages, "agreeing", "moving".
    """

    elements: int
    whole: int
    nbytes: int
    seconds: Mapping[str, float]


class _PreparedChanges(NamedTuple):
    """Changes ready to be sent, by tensor and by message, and the seconds of each phase until `prepared_at_s`.

    `sorted` is None for a whole move.
    """

    changed: list[Changed]
    sorted: Sorted | None
    seconds: dict[str, float]
    prepared_at_s: float


class Sparse:
    """The part of a mover that moves only changed elements; another part, `whole`, makes moves of all elements."""

    def __init__(self, task: Task, whole: Whole, snapshots: bool) -> None:
        self._task = task
        self._whole = whole
        self._keeps_snapshots = snapshots
        self._snapshots: Snapshots | None = None
        # Sends changed cells of the last whole move's tensors; None before the first.
        self._walker: Walker | None = None
        # What identifies the tensors of the last whole move, and whether the tensors are known to be the same now.
        self._whole_signature: object = None
        self._are_same_tensors = False
        # Whether destinations hold what sources held at the last move; otherwise a call moves all cells.
        self._are_changes_enough = False
        self._prepared: _PreparedChanges | None = None
        # Why changes cannot be found, though destinations are current; "" if they can.
        self._objection = ""
        self.last: Sent | None = None

    @property
    def is_beside(self) -> bool:
        return self._whole.is_beside

    @property
    def posted(self) -> Sequence[Round]:
        return self._whole.posted

    @property
    def staging_bytes(self) -> int:
        return self._whole.staging_bytes

    @property
    def shadow_bytes(self) -> int:
        return self._whole.shadow_bytes

    @property
    def snapshot_bytes(self) -> int:
        """The bytes of the snapshots (earlier copies of the parts of source tensors that this rank sends)."""
        return 0 if self._snapshots is None else self._snapshots.nbytes

    def _goes_whole(self, how: object) -> bool:
        asked = isinstance(how, How) and how.whole is True
        return asked or not self._are_changes_enough

    def word(self, how: object) -> str:
        return "move" if self._goes_whole(how) else "changes"

    def prepare(self, src: Tensors, dst: Tensors, held: bool) -> None:
        """Note that the next move can have other tensors; the arguments are not used. A `load` that sends only changed
        elements then checks that its tensors are the same as in the last move of all elements."""
        self._are_same_tensors = False

    def load(self, src: Tensors, dst: Tensors, how: object, watch: Stopwatch) -> None:
        """Find the elements of `src` that changed since the last move, to send only these. If `how` (the call's
        arguments) asks for all elements, or the destination does not hold the last move's values, all are sent. Raises
        ExchangeError if `how` is invalid, or the tensors are not the same as in the last move of all elements.
        """
        watch.lap(laps.PREPARED)
        began_s = time.perf_counter()
        self._prepared = None
        assert isinstance(how, How), "callers make one"
        _check_how(how)
        if self._goes_whole(how):
            # held=False: what is cached for held tensors would keep the shadows alive.
            self._whole.prepare(src, dst, held=False)
            self._prepared = _PreparedChanges(
                [], None, {"comparing": 0.0, "mapping": 0.0}, time.perf_counter()
            )
            return
        walker = self._find_walker(src, dst)
        changed = list(self._list_changed(src, how.positions))
        compared_s = time.perf_counter()
        by_message = walker.sort(changed)
        mapped_s = time.perf_counter()
        watch.lap(laps.COMPARED)
        seconds = {"comparing": compared_s - began_s, "mapping": mapped_s - compared_s}
        self._prepared = _PreparedChanges(changed, by_message, seconds, mapped_s)

    def _find_walker(self, src: Tensors, dst: Tensors) -> Walker:
        """The walker of the last whole move. Raises ExchangeError if it was for other tensors, or there is none."""
        fault = self._objection
        # After `prepare` tensors may be new ones; otherwise they are those that were compared here before.
        self._are_same_tensors = self._are_same_tensors or self._whole_signature == _sign_tensors(
            src, dst
        )
        if not fault and not self._are_same_tensors:
            fault = (
                "the tensors differ from the last move of all elements, or lie elsewhere in memory"
            )
        # Whatever drops the walker also leaves an objection, or makes the next move whole.
        if fault or self._walker is None:
            raise ExchangeError(f"{fault}; call with whole=True on all ranks")
        return self._walker

    def _list_changed(
        self, src: Tensors, positions: Mapping[str, Tensor] | None
    ) -> Iterator[Changed]:
        """The changed cells of source tensors. Raises ExchangeError for invalid positions, or without snapshots."""
        if positions is not None:
            yield from _read_positions(src, positions)
            return
        if not self._keeps_snapshots:
            what = "positions= is not given, and snapshots=False, so changes cannot be found"
            fix = "pass positions= on every rank, {} if nothing has changed, or compile with snapshots=True"
            raise ExchangeError(f"{what}; {fix}")
        assert self._snapshots is not None, "made with the walker"
        yield from self._snapshots.list_changed(src)

    def carry(self, src: Tensors, dst: Tensors, held: bool, watch: Stopwatch) -> Arrived:
        prepared = self._prepared
        assert prepared is not None, "a rank without changes has objected"
        began_s = time.perf_counter()
        arrived = self._carry(prepared.sorted, src, dst, watch)
        seconds = {
            **prepared.seconds,
            "agreeing": began_s - prepared.prepared_at_s,
            "moving": time.perf_counter() - began_s,
        }
        self.last = self._measure(prepared.sorted, seconds)
        return arrived

    def _carry(
        self, changes: Sorted | None, src: Tensors, dst: Tensors, watch: Stopwatch
    ) -> Arrived:
        if changes is None:
            return self._carry_whole(src, dst, watch)
        return self._carry_changes(changes, Ends(src, dst, self.is_beside), watch)

    def _carry_whole(self, src: Tensors, dst: Tensors, watch: Stopwatch) -> Arrived:
        self._drop_snapshots()
        arrived = self._whole.carry(src, dst, False, watch)
        with self._deferring_failure():
            self._walker = Walker(self._task, src, dst)
            if self._keeps_snapshots:
                self._snapshots = Snapshots(src, self._walker.outgoing.hulls)
            self._whole_signature = _sign_tensors(src, dst)
            self._are_same_tensors = True
        watch.lap(laps.KEPT)
        return arrived

    @contextmanager
    def _deferring_failure(self) -> Iterator[None]:
        """Record a failure instead of raising it: this move has succeeded, and the next one reports it to all ranks."""
        try:
            yield
        except Exception as error:
            self._walker = None
            self._objection = f"snapshots could not be made: {word_objection(error)}"

    def _carry_changes(self, changes: Sorted, ends: Ends, watch: Stopwatch) -> Arrived:
        assert self._walker is not None, "the walker has sorted the changes"
        counts = self._walker.exchange_counts(changes, watch)
        watch.lap(laps.ARRIVED)  # the counts of all senders
        if not self.is_beside:
            mark_written(ends.dst.values())
        puts = self._walker.walk(changes, counts, ends, watch)
        return Arrived(ends.dst, lambda: put_all(ends.dst, puts))

    def _measure(self, changes: Sorted | None, seconds: Mapping[str, float]) -> Sent:
        """The record of what was sent: all elements if `changes` is None."""
        if changes is not None and self._walker is not None:
            return Sent(*self._walker.outgoing.measure(changes), seconds)
        sends = [message for each in self._task.part.rounds for message in each.sends]
        nbytes = sum(message.nbytes for message in sends)
        return Sent(elements=0, whole=len(sends), nbytes=nbytes, seconds=seconds)

    def keep(self, part: RankProgram, make_engine: Callable[[Engine], Engine]) -> None:
        """Return None, so that after a change of plan nothing is reused, and the next move sends all elements. The
        arguments are not used.

        Ranks that left and join again have missed changes that this rank counts as sent.
        """

    def let_go(self) -> None:
        # The other ranks may have kept theirs, and move changes next: this rank then objects.
        are_changes_enough = self._are_changes_enough
        self.forget()
        self._whole.let_go()
        # True again after `forget`: else this rank alone would move all elements, instead of objecting.
        if are_changes_enough:
            self._are_changes_enough = True
            self._objection = "let_go() has dropped what this rank kept of the last move"

    def list_torn(self) -> tuple[str, ...]:
        if self._prepared is None or self._prepared.sorted is None:
            return self._whole.list_torn()
        # None, since it is not known how far the move came.
        return self._task.part.list_torn(None)

    def end(self) -> None:
        """After a move, update the snapshots (copies of source tensors as last sent), so that later moves need to send
        only the elements changed since.
        """
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return
        self._are_changes_enough = True
        if prepared.sorted is None:
            # Frees the shadows, which only whole moves need.
            self._whole.let_go()
            return
        with self._deferring_failure():
            if self._snapshots is not None:
                self._snapshots.update(prepared.changed)

    def forget(self) -> None:
        self._prepared = None
        self._drop_snapshots()

    def _drop_snapshots(self) -> None:
        """Drop snapshots, before new ones are made: memory may not suffice for both."""
        self._are_changes_enough = False
        self._snapshots = None
        self._walker = None
        self._objection = ""


def put_all(dst: Tensors, puts: Iterable[Put]) -> None:
    """Write the received data into the destination tensors `dst` by calling all functions `puts`."""
    mark_written(dst.values())
    # Inference tensors can only be written in inference mode.
    with torch.inference_mode():
        for put in puts:
            put()


def _sign_tensors(src: Tensors, dst: Tensors) -> object:
    """A value that is equal for destinations in the same memory, and sources of equal strides, dtypes and devices."""
    forms = {}
    for key, tensor in src.items():
        forms[key] = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return signature(({}, dst)), forms


def _check_how(how: How) -> None:
    """Raise ExchangeError for arguments of wrong types."""
    if not isinstance(how.whole, bool):
        raise ExchangeError(f"whole={shown(how.whole)} is not a bool; pass True or False")
    positions: object = how.positions
    if not (positions is None or isinstance(positions, Mapping)):
        what = f"positions={shown(positions)} is not a mapping"
        fix = "pass a dict from the name of a source tensor to an int64 tensor of changed positions"
        raise ExchangeError(f"{what}; {fix}")


def _read_positions(src: Tensors, positions: Mapping[str, Tensor]) -> Iterator[Changed]:
    """The changed cells by the caller's positions. Raises ExchangeError for invalid ones."""
    for key in positions:
        if key not in src:
            sent = ", ".join(list(src)[:8]) or "none"
            what = f"positions= names {key!r}, which this rank does not send"
            raise ExchangeError(f"{what}; pass names of its {len(src)} source tensors: {sent}")
    for key, given in positions.items():
        cells = _check_positions(key, src[key], given)
        if len(cells):
            yield Changed(key, cells, take(src[key], cells))


def _check_positions(key: str, tensor: Tensor, given: object) -> Ints:
    """The cells, ascending. Raises ExchangeError unless they are cells of the tensor, each given once."""
    if not isinstance(given, Tensor) or given.dtype != torch.int64 or given.ndim != 1:
        kind = f"{given.dtype}{list(given.shape)}" if isinstance(given, Tensor) else shown(given)
        fix = "pass a 1-D tensor of int64, as mask.flatten().nonzero().flatten() is"
        raise ExchangeError(f"positions of {key!r} are {kind}; {fix}")
    cells, repeated = _sort_cells(given.numpy(force=True))
    if not len(cells):
        return cells
    if cells[0] < 0 or cells[-1] >= tensor.numel():
        what = f"positions of {key!r} go from {cells[0]} to {cells[-1]}"
        raise ExchangeError(
            f"{what}, but it has {tensor.numel()} elements; pass positions from 0 to {tensor.numel() - 1}"
        )
    if len(repeated):
        raise ExchangeError(
            f"positions of {key!r} have {repeated[0]} twice; pass each position once"
        )
    return cells


def _sort_cells(cells: Ints) -> tuple[Ints, Ints]:
    """The cells, ascending, and those that were given several times."""
    if (cells[1:] > cells[:-1]).all():
        return cells, cells[:0]
    cells = np.sort(cells)
    return cells, cells[1:][cells[1:] == cells[:-1]]
