"""Carrying: a carrier of what has changed since the move before.

1. The first move is a whole one, and so is the next after a whole one that came to nothing.
2. A snapshot is of what is in place at destinations, or of what will be once all ranks have promised: then it is
   brought up to date, and not before. One that could not be is this rank's objection to the next move of changes.
3. Beside the destination (`commit="all"`) what has come is kept as it came, packet by packet: memory in proportion to
   what changed. Only a whole move has shadows, and lets go of them.
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
    """How changes are asked for: which cells have changed, by local key (None: those that differ), or all of them."""

    positions: Mapping[str, Tensor] | None
    whole: bool


class Sent(NamedTuple):
    """What a rank has sent to others.

    `elements` have changed, `whole` messages went whole, `nbytes` are all bytes. `seconds` are of each phase:
    "comparing" sources with snapshots, "mapping" what changed to messages, "agreeing", "moving".
    """

    elements: int
    whole: int
    nbytes: int
    seconds: Mapping[str, float]


class _Load(NamedTuple):
    """What is ready to be sent: changes by tensor and by message; None of these where all goes."""

    changed: list[Changed]
    sorted: Sorted | None
    seconds: dict[str, float]
    until: float


class Sparse:
    """Carries what has changed, by a plan without reductions; `whole` carries the rest."""

    def __init__(self, task: Task, whole: Whole, snapshots: bool) -> None:
        self._task = task
        self._whole = whole
        self._keeps_snapshots = snapshots
        self._snapshots: Snapshots | None = None
        self._walker: Walker | None = None
        self._signed: object = None
        self._is_known = False
        self._is_fresh = False
        self._load: _Load | None = None
        self._lacks = ""
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
        """Bytes of snapshots: those of what is sent of source tensors, once it was."""
        return 0 if self._snapshots is None else self._snapshots.nbytes

    def _goes_whole(self, how: object) -> bool:
        asked = isinstance(how, How) and how.whole is True
        return asked or not self._is_fresh

    def word(self, how: object) -> str:
        return "move" if self._goes_whole(how) else "changes"

    def prepare(self, src: Tensors, dst: Tensors, held: bool) -> None:
        """Whole moves, which alone need something, are few: it is enough to know that these may be others."""
        self._is_known = False

    def load(self, src: Tensors, dst: Tensors, how: object, watch: Stopwatch) -> None:
        """Find what has changed. Raises ExchangeError where that cannot be told."""
        watch.lap(laps.PREPARED)
        since = time.perf_counter()
        self._load = None
        assert isinstance(how, How), "made by those who call"
        _check_how(how)
        if self._goes_whole(how):
            # Not held: what is kept of held tensors would keep the shadows.
            self._whole.prepare(src, dst, held=False)
            self._load = _Load([], None, {"comparing": 0.0, "mapping": 0.0}, time.perf_counter())
            return
        walker = self._find_walker(src, dst)
        changed = list(self._list_changed(src, how.positions))
        compared = time.perf_counter()
        found = walker.sort(changed)
        mapped = time.perf_counter()
        watch.lap(laps.COMPARED)
        seconds = {"comparing": compared - since, "mapping": mapped - compared}
        self._load = _Load(changed, found, seconds, mapped)

    def _find_walker(self, src: Tensors, dst: Tensors) -> Walker:
        """What brings changes to these tensors. Raises ExchangeError where nothing can."""
        what = self._lacks
        # Tensors that are prepared for again may be others; all else are those that were compared here before.
        self._is_known = self._is_known or self._signed == _sign(src, dst)
        if not what and not self._is_known:
            what = "these are not the tensors, in the same memory, of the last whole move"
        if what or self._walker is None:
            raise ExchangeError(f"{what}; call with whole=True on all ranks")
        return self._walker

    def _list_changed(
        self, src: Tensors, positions: Mapping[str, Tensor] | None
    ) -> Iterator[Changed]:
        """The changed cells of source tensors. Raises ExchangeError for positions that cannot be."""
        if positions is not None:
            yield from _read_positions(src, positions)
            return
        if not self._keeps_snapshots:
            fix = "pass positions= on every rank, {} where nothing has changed, or compile with snapshots"
            raise ExchangeError(f"no snapshots are kept; {fix}")
        assert self._snapshots is not None, "made with the walker"
        yield from self._snapshots.list_changed(src)

    def carry(self, src: Tensors, dst: Tensors, held: bool, watch: Stopwatch) -> Arrived:
        load = self._load
        assert load is not None, "who has none objects"
        began = time.perf_counter()
        arrived = self._carry(load.sorted, src, dst, watch)
        seconds = {
            **load.seconds,
            "agreeing": began - load.until,
            "moving": time.perf_counter() - began,
        }
        self.last = self._measure(load.sorted, seconds)
        return arrived

    def _carry(self, found: Sorted | None, src: Tensors, dst: Tensors, watch: Stopwatch) -> Arrived:
        if found is None:
            return self._carry_whole(src, dst, watch)
        return self._carry_changes(found, Ends(src, dst, self.is_beside), watch)

    def _carry_whole(self, src: Tensors, dst: Tensors, watch: Stopwatch) -> Arrived:
        self._drop()
        arrived = self._whole.carry(src, dst, False, watch)
        with self._deferring_failure():
            self._walker = Walker(self._task, src, dst)
            if self._keeps_snapshots:
                self._snapshots = Snapshots(src, self._walker.outgoing.hulls)
            self._signed = _sign(src, dst)
            self._is_known = True
        watch.lap(laps.KEPT)
        return arrived

    @contextmanager
    def _deferring_failure(self) -> Iterator[None]:
        """Keep a failure within, not raised: this move has gone well, and the next one reports it to all ranks."""
        try:
            yield
        except Exception as error:
            self._walker = None
            self._lacks = f"snapshots could not be made: {word_objection(error)}"

    def _carry_changes(self, found: Sorted, ends: Ends, watch: Stopwatch) -> Arrived:
        assert self._walker is not None, "found by it"
        counts = self._walker.exchange_counts(found, watch)
        watch.lap(laps.ARRIVED)
        if not self.is_beside:
            mark_written(ends.dst.values())
        puts = self._walker.walk(found, counts, ends, watch)
        return Arrived(ends.dst, lambda: put_all(ends.dst, puts))

    def _measure(self, found: Sorted | None, seconds: Mapping[str, float]) -> Sent:
        """What was sent."""
        if found is not None and self._walker is not None:
            return Sent(*self._walker.outgoing.measure(found), seconds)
        sends = [m for one in self._task.part.rounds for m in one.sends]
        return Sent(0, len(sends), sum(message.nbytes for message in sends), seconds)

    def keep(self, part: RankProgram, make_engine: Callable[[Engine], Engine]) -> None:
        """None: whoever has come back has nothing of what snapshots are of."""

    def let_go(self) -> None:
        self.forget()
        self._whole.let_go()

    def list_torn(self) -> tuple[str, ...]:
        if self._load is None or self._load.sorted is None:
            return self._whole.list_torn()
        return self._task.part.list_torn(None)

    def end(self) -> None:
        """Remember what destinations now hold."""
        load, self._load = self._load, None
        if load is None:
            return
        self._is_fresh = True
        if load.sorted is None:
            self._whole.let_go()
            return
        with self._deferring_failure():
            if self._snapshots is not None:
                self._snapshots.update(load.changed)

    def forget(self) -> None:
        self._load = None
        self._drop()

    def _drop(self) -> None:
        """Let go of what is remembered: before other snapshots are made, since both need not fit."""
        self._is_fresh = False
        self._snapshots = None
        self._walker = None
        self._lacks = ""


def put_all(dst: Tensors, puts: Iterable[Put]) -> None:
    """Put in place what has come for these."""
    mark_written(dst.values())
    # In inference mode inference tensors, too, may be written.
    with torch.inference_mode():
        for put in puts:
            put()


def _sign(src: Tensors, dst: Tensors) -> object:
    """Equal where destinations are in the same memory, and sources lie alike in theirs."""
    lying = {}
    for key, tensor in src.items():
        lying[key] = tensor.shape, tensor.stride(), tensor.dtype, tensor.device
    return signature(({}, dst)), lying


def _check_how(how: How) -> None:
    """Raise ExchangeError for arguments that mean nothing."""
    if not isinstance(how.whole, bool):
        raise ExchangeError(f"whole={shown(how.whole)}; pass True or False")
    positions: object = how.positions
    if not (positions is None or isinstance(positions, Mapping)):
        what = f"positions={shown(positions)}"
        raise ExchangeError(f"{what}; pass int64 tensors of cells by local key")


def _read_positions(src: Tensors, positions: Mapping[str, Tensor]) -> Iterator[Changed]:
    """The cells that the caller says have changed. Raises ExchangeError for what cannot be."""
    for key in positions:
        if key not in src:
            raise ExchangeError(f"positions of {key!r}, which is no source tensor of this rank")
    for key, given in positions.items():
        cells = _check_positions(key, src[key], given)
        if len(cells):
            yield Changed(key, cells, take(src[key], cells))


def _check_positions(key: str, tensor: Tensor, given: object) -> Ints:
    """The cells, ascending, where they are some of the tensor's, each once. Raises ExchangeError."""
    if not isinstance(given, Tensor) or given.dtype != torch.int64 or given.ndim != 1:
        raise ExchangeError(f"positions of {key!r} are {shown(given)}; pass a row of int64")
    cells = given.numpy(force=True)
    if (cells[1:] <= cells[:-1]).any():
        cells = np.sort(cells)
    if not len(cells):
        return cells
    if cells[0] < 0 or cells[-1] >= tensor.numel():
        what = f"positions of {key!r} go from {cells[0]} to {cells[-1]}"
        raise ExchangeError(f"{what}; the tensor has cells 0 to {tensor.numel() - 1}")
    if (cells[1:] == cells[:-1]).any():
        raise ExchangeError(f"positions of {key!r} have a cell twice; pass each once")
    return cells
