"""Recording: what a loader stores where, read off one run of it, instead of rows that say it.

recorded = smt.record(model.load_weights, shapes, model, form="pairs")    # on each rank, without communication
side = sm.storage.RecordedSide({rank: recorded, ...})                             # in place of rows, for sm.refit

1. The loader runs without data first: each of its copies is strides on both sides (`watching`). A target that this does
   not explain is read from runs on element numbers (`numbering`), which any movement of elements carries.
2. Every run writes the same elements into the same cells, or that is an error.
3. What `into` has is as before afterwards. Cells that nothing wrote are counted in `Recorded.unwritten`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardmath.base import dtypes
from shardmath.base.errors import StoreError
from shardmath.base.text import word_error
from shardmath.models.recordings.pieces import Piece
from shardmath.models.recordings.recorded import Native, Recorded
from shardmath.models.storage.stored import Shapes
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.probes.drawing import SPECIAL, Run
from shardmath_torch.tensors.probes.patterns import as_words
from shardmath_torch.tensors.refits.before import describe, key_of
from shardmath_torch.tensors.refits.numbering import Numbering, Reading
from shardmath_torch.tensors.refits.targets import Into, KeptTargets
from shardmath_torch.tensors.refits.watching import Watch, Write

__all__ = ["Load", "record"]

Load: TypeAlias = Callable[[Any], object]
"""Copies logical tensors into its targets: takes a mapping from name to tensor, or pairs of both."""
Form: TypeAlias = Literal["mapping", "pairs"]
Ways: TypeAlias = Literal["views", "numbers"]

FORMS = "mapping", "pairs"
WAYS = "views", "numbers"
WORD = re.compile(r"\w+")
SHOWN = 8
"""Targets that an error lists."""


def record(
    load: Load,
    shapes: Shapes,
    into: Into,
    *,
    form: Form = "mapping",
    functions: Mapping[str, str] | None = None,
    ways: tuple[Ways, ...] = ("views", "numbers"),
) -> Recorded:
    """Which element of which logical tensor the loader puts into which cell of each target of `into`.

    `shapes` are global shape and dtype by logical name; `load` takes such tensors as a mapping, or as `pairs` of name
    and tensor. `into` is the module, or mutable mapping from name to tensor, that it loads into, or a list of them, one
    per virtual stage. `functions` names the function of a target that is computed: {"A": "neg_exp"}, and of another
    chunk than the first {"A of chunk 1": "neg_exp"}. Raises StoreError for what else is computed, and
    where two tensors are written into one cell, or an element comes twice in one target.
    """
    plain = {n: (tuple(shape), dtypes.canonical(dtype)) for n, (shape, dtype) in shapes.items()}
    _check_words("form", form, FORMS)
    _check_words("ways", ways, WAYS)
    recording = _Recording(load, plain, into, form, dict(functions or {}))
    return recording.record(ways)


AGAIN = "record a loader that writes the same cells each time that it is called"


class _Recording:
    """One loader, and what is known of each target so far."""

    def __init__(
        self, load: Load, shapes: Shapes, into: Into, form: Form, functions: dict[str, str]
    ) -> None:
        self.load = load
        self.shapes = shapes
        self.form = form
        self.functions = functions
        self.kept = KeptTargets(into)
        self.pieces: dict[str, list[Piece]] = {}
        self.made: dict[str, tuple[str, ...]] = {}
        self.ways: dict[str, str] = {}
        # What the run without data brought into each target, and which targets it filled with constants.
        self.seen: dict[str, list[Write]] = {}
        self.filled: set[str] = set()
        self._check_functions()

    def _check_functions(self) -> None:
        """Raise StoreError for a function of what is not a target, and for what is not the name of one."""
        targets = list(self.kept.targets)
        shown = ", ".join(targets[:SHOWN])
        more = f" and {len(targets) - SHOWN} more" if len(targets) > SHOWN else ""
        for name, function in self.functions.items():
            if name not in self.kept.targets:
                first = self.kept.aliases.get(name)
                fix = f"name {first!r}, whose memory it is" if first else f"name {shown}{more}"
                raise StoreError(f"functions= names {name!r}, which is not a target; {fix}")
            if not isinstance(function, str) or not WORD.fullmatch(function):
                raise StoreError(
                    f"functions= says {function!r} for {name!r}; give a name: 'neg_exp', or one "
                    f"that Refit.prepare(functions=) knows"
                )

    def record(self, ways: tuple[Ways, ...]) -> Recorded:
        """By each of the ways, until all targets are explained."""
        unexplained = set(self.kept.targets)
        failure: Exception | None = None
        if "views" in ways:
            try:
                unexplained = self._watch()
            except _Computed:
                raise
            # What a loader does with tensors without data is anybody's guess; it is run on real ones then.
            except Exception as error:
                failure = error
                self.pieces, self.made = {}, {}
        if unexplained and "numbers" in ways:
            is_written = self._number(sorted(unexplained))
            if failure is not None and not is_written:
                why = word_error(failure)
                raise StoreError(
                    f"the loader failed without data, and then wrote nothing: {why}; {AGAIN}"
                ) from failure
        elif unexplained:
            raise StoreError(self._word(min(unexplained), "is not explained by views")) from failure
        return self._finish()

    def _call(self, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
        """Run the loader on tensors that are made as it asks for them, if it takes pairs."""
        with torch.no_grad():
            if self.form == "pairs":
                made = self.load((name, make()) for name, make in tensors.items())
            else:
                made = self.load({name: make() for name, make in tensors.items()})
            if isinstance(made, Awaitable | AsyncIterator):
                raise _Computed("the loader returns before it has loaded; record one that waits")
            # One that yields the names that it loads has loaded once all are taken.
            if isinstance(made, Iterator):
                deque(made, maxlen=0)

    # By views

    def _watch(self) -> set[str]:
        """Note what copies took; the targets that this does not explain."""
        watch, found = self._see(())
        self._see_again(watch, found)
        unexplained = {name for name, writes in found.items() if not self._take(name, writes)}
        # A loader that stores nothing may have seen that there is no data.
        if not any(found.values()) and not watch.filled:
            self.ways.clear()
            return set(found)
        return unexplained

    def _see_again(self, watch: Watch, found: Mapping[str, list[Write]]) -> None:
        """Raise StoreError for a loader that reads in a target what it has loaded, and goes by that.

        In a run without data nothing is written into targets: what is read there is what was there before.
        """
        written = {key for key, writes in watch.writes.items() if writes}
        held = (written | watch.filled.keys()) & self.kept.before.copied
        if not held:
            return
        again, found_again = self._see(held)
        # Threads write in any order.
        same = all(set(found[name]) == set(found_again[name]) for name in found)
        if not same or again.filled != watch.filled:
            raise StoreError("the loader goes by what it reads of targets that it has loaded")

    def _see(self, spoiled: Collection[int]) -> tuple[Watch, dict[str, list[Write]]]:
        """A run without data, and what it brought into each target; memory of these keys is spoiled before."""
        sources = {}
        for name, (shape, dtype) in self.shapes.items():
            sources[name] = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
        kept = self.kept
        watch = Watch(sources, list(kept.targets.values()))
        kept.before.keep_bytes("cpu")
        try:
            kept.before.spoil(spoiled)
            versions = {name: _version_of(target) for name, target in kept.targets.items()}
            with watch:
                self._call({name: partial(watch.give, tensor) for name, tensor in sources.items()})
            if watch.failure is not None:
                raise watch.failure
            now = kept.find()
            self._check(now)
            changed = kept.before.find_written()
            found = {}
            for name, target in kept.targets.items():
                is_newer = _version_of(target) > versions[name]
                found[name] = self._list_writes(watch, name, now)
                found[name] += self._list_unseen(watch, name, found[name], is_newer, changed)
            self.seen = found
        finally:
            kept.before.put_back()
            self._keep_seen(watch)
        return watch, found

    def _keep_seen(self, watch: Watch) -> None:
        """What was seen of targets; of a run that failed, what it wrote until then."""
        for name, memory in self.kept.memory.items():
            key = key_of(memory)
            if name not in self.seen:
                self.seen[name] = _shift_all(watch.writes[key], memory)
            if key in watch.filled:
                self.filled.add(name)

    def _list_writes(self, watch: Watch, name: str, now: Mapping[str, Tensor]) -> list[Write]:
        """What was written into a target, or put in its place, where these are now."""
        target = self.kept.memory[name]
        own = now[name]
        # Other strides of the same memory are another tensor, too: a weight is stored, and then seen transposed.
        if describe(own) != describe(target):
            where = torch.empty(target.shape, dtype=target.dtype, device="meta")
            return [watch.explain(own, where)]
        return _shift_all(watch.writes[key_of(target)], target)

    def _list_unseen(
        self,
        watch: Watch,
        name: str,
        writes: Sequence[Write],
        is_newer: bool,
        changed: Collection[int],
    ) -> list[Write]:
        """What is known of a target to have been written beside these; `is_newer` is what torch says of it."""
        memory = self.kept.memory[name]
        key = key_of(memory)
        found = []
        # Modes are of one thread, and versions of all.
        if is_newer and key not in watch.noted:
            found.append(Write(None, ("another thread",), carries=True))
        if key in changed:
            found.append(Write(None, ("a write past torch",), carries=True))
        if watch.unread and _count(writes) < memory.numel():
            # Another thread may have copied out of a buffer.
            found.append(Write(None, ("what filled a buffer",)))
        return found

    def _take(self, name: str, writes: list[Write]) -> bool:
        """Whether the writes explain the target."""
        made: list[str] = []
        last: dict[Piece, bool] = {}
        for write in writes:
            last.update(dict.fromkeys(write.pieces or (), bool(write.made)))
            if write.pieces != ():
                made += write.made
        self.made[name] = tuple(made)
        if any(write.pieces is None for write in writes):
            return False
        if last:
            self._check_function(name, all(last.values()))
        # A loader that is called twice, or for an alias too, writes the same again.
        self.pieces[name] = list(last)
        self.ways[name] = "views" if last else ""
        return True

    def _check_function(self, name: str, is_made: bool) -> None:
        """Raise StoreError where a target is computed and not declared so, and the other way round."""
        function = self.functions.get(name)
        if self.made[name] and function is None:
            raise _Computed(self._word(name, "is computed"))
        if function is not None and not is_made:
            part = "in part " if self.made[name] else ""
            raise _Computed(f"{name!r} is {part}stored as it is, and functions= says {function!r}")

    # By numbers

    def _number(self, names: list[str]) -> bool:
        """Read these targets from runs on element numbers; whether any is written."""
        for name in names:
            if name in self.functions:
                raise StoreError(self._word(name, "is a function of what cannot be followed"))
        types = {name: self.kept.targets[name].dtype for name in names}
        numbering = Numbering(self.shapes, types.values())
        readings = {name: Reading(numbering, dtype) for name, dtype in types.items()}
        for run in numbering.runs:
            self._run(numbering, run, readings)
        for name, reading in readings.items():
            self._read(name, reading)
        return any(reading.is_written for reading in readings.values())

    def _read(self, name: str, reading: Reading) -> None:
        """Take the pieces of a target, or raise StoreError."""
        fault = reading.find_fault()
        if self._differs(name, reading) or (fault and reading.is_written_once):
            raise StoreError(f"{name!r} is written in one run and not in another; {AGAIN}")
        if fault:
            raise StoreError(self._word(name, f"is computed: {fault}"))
        self.pieces[name] = reading.list_pieces()
        self.ways[name] = "numbers" if self.pieces[name] else ""

    def _run(self, numbering: Numbering, run: Run, readings: Mapping[str, Reading]) -> None:
        """Note what targets have after a run of the loader."""
        kept = self.kept
        tensors = {name: partial(numbering.make, name, run) for name in self.shapes}
        try:
            left = kept.occupy(run.byte, self._list_read())
            self._call(tensors)
            now = kept.find()
            self._check(now)
            for name, reading in readings.items():
                reading.add(run, now[name])
            if run == numbering.runs[0]:
                self._compare(numbering, run, left, now)
        # A loader may refuse what is not finite.
        except Exception:
            if run.way not in SPECIAL:
                raise
        finally:
            kept.before.put_back()

    def _list_read(self) -> set[str]:
        """Targets that the loader may read, as a map of experts: without data it wrote others, and not these."""
        return {name for name, way in self.ways.items() if not way and name not in self.filled}

    def _compare(
        self,
        numbering: Numbering,
        run: Run,
        left: Mapping[str, Tensor],
        now: Mapping[str, Tensor],
    ) -> None:
        """Raise StoreError where a target explained by views is not, in a run on numbers, what it was seen to be."""
        for name in self.ways:
            if name not in left:
                fault = self._find_difference(name, numbering, run, now[name])
            elif torch.equal(as_words(now[name]), left[name]):
                continue
            else:
                fault = "it is written, too"
            if fault:
                raise StoreError(f"{name!r} differs from one run to the next: {fault}; {AGAIN}")

    def _find_difference(self, name: str, numbering: Numbering, run: Run, after: Tensor) -> str:
        """What a run on numbers has written into a target otherwise than was seen; "" if nothing."""
        pieces = self.pieces[name]
        written, changed = numbering.find_written(run, after)
        cells = np.zeros(len(written), np.bool_)
        for piece in pieces:
            cells[piece.cells] = True
        others = np.flatnonzero(changed & ~cells)
        if len(others) and name not in self.filled:
            return f"cell {others[0]} is written, too"
        if name not in self.functions:
            return numbering.find_other(pieces, run, after)
        return "nothing is written" if cells.any() and not written[cells].any() else ""

    def _differs(self, name: str, reading: Reading) -> bool:
        """Whether no run on numbers wrote what the run without data did."""
        for write in self.seen.get(name, ()):
            if write.carries and not reading.is_written:
                return True
            if any(reading.unwritten[piece.cells].any() for piece in write.pieces or ()):
                return True
        return False

    # Together

    def _check(self, now: Mapping[str, Tensor]) -> None:
        """Raise StoreError where the loader put something else in the place of a target or of its alias."""
        for name, target in self.kept.memory.items():
            if name not in now:
                raise _Computed(
                    f"{name!r} is gone once it is loaded; record a loader that keeps it"
                )
            own = now[name]
            if own.shape != target.shape:
                raise _Computed(
                    f"{name!r} has shape {list(target.shape)}, and {list(own.shape)} once it is "
                    f"loaded; record into tensors of the shapes that are stored"
                )
            if own.dtype != target.dtype:
                raise _Computed(
                    f"{name!r} is {target.dtype}, and {own.dtype} once it is loaded; record into "
                    f"tensors of the types that are stored"
                )
        self._check_aliases(now)

    def _check_aliases(self, now: Mapping[str, Tensor]) -> None:
        """Raise StoreError where the loader parted what is in one memory."""
        for alias, name in self.kept.aliases.items():
            if alias not in now or describe(now[alias])[:-1] != describe(now[name])[:-1]:
                raise _Computed(
                    f"{alias!r} is in the memory of {name!r}, and is not once it is loaded; "
                    f"record into tensors that do not share it"
                )

    def _word(self, name: str, what: str) -> str:
        """What is wrong with a target, and with which operations it was made."""
        by = f" by {', '.join(self.made[name])}" if self.made.get(name) else ""
        return f"{name!r} {what}{by}; declare it, as functions={{{name!r}: 'neg_exp'}} or by a row"

    def _finish(self) -> Recorded:
        natives = []
        for name, target in self.kept.targets.items():
            shape = tuple(target.shape)
            dtype = dtypes.canonical(target.dtype)
            pieces = tuple(self.pieces.get(name, ()))
            way = self.ways.get(name, "")
            function = self.functions.get(name, "")
            chunk, own = self.kept.natives[name]
            natives.append(Native(own, shape, dtype, pieces, way, function, chunk))
        tensors = [(name, shape, dtype) for name, (shape, dtype) in self.shapes.items()]
        aliases = tuple(self.kept.aliases.items())
        return Recorded(tuple(tensors), tuple(natives), aliases)


def _check_words(what: str, given: object, known: Sequence[str]) -> None:
    """Raise StoreError for another word than these."""
    words = list(given) if isinstance(given, list | tuple) else [given]
    if not words or any(word not in known for word in words):
        raise StoreError(f"{what}={words}; give {' or '.join(map(repr, known))}")


def _version_of(target: Tensor) -> int:
    return 0 if target.is_inference() else target._version


class _Computed(StoreError):
    """What no other way would explain either."""


def _count(writes: Sequence[Write]) -> int:
    """Cells that these pieces fill; more than there are where some are filled again."""
    pieces = {piece for write in writes for piece in write.pieces or ()}
    return sum(piece.size for piece in pieces)


def _shift_all(writes: Sequence[Write], target: Tensor) -> list[Write]:
    """The writes as the target sees them; cells of one that is not contiguous are read from numbers."""
    if target.is_contiguous():
        return [_shift(write, target) for write in writes]
    return [write._replace(pieces=None) for write in writes]


def _shift(write: Write, target: Tensor) -> Write:
    """The write as the target sees it, whose memory may be part of a larger one."""
    if write.pieces is None:
        return write
    inside = []
    for piece in write.pieces:
        cell = piece.cell - int(target.storage_offset())
        last = cell
        for count, stride, _ in piece.blocks:
            last += (count - 1) * stride
        if cell >= 0 and last < target.numel():
            inside.append(Piece(piece.tensor, cell, piece.element, piece.blocks))
        elif last >= 0 and cell < target.numel():
            # One copy into several targets at once: what of it is whose is read from numbers.
            return write._replace(pieces=None)
    return Write(tuple(inside), write.made, write.carries and bool(inside))
