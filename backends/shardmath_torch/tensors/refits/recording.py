"""Recording: the storage of a rank, recorded from runs of its weight loader, as an alternative to rows.

recorded = smt.record(model.load_weights, shapes, model, form="pairs")    # on each rank, without communication
side = sm.storage.RecordedSide({rank: recorded, ...})                             # instead of rows, for sm.refit

1. The loader runs without data first: each of its copies is strides on both sides (`watching`). A target that this run
   does not explain is read from runs on element numbers (`numbering`), which survive any movement of elements.
2. Every run must write the same elements into the same cells (positions of a target); anything else is an error.
3. Afterwards `into` is as before. Cells that nothing wrote are counted in `Recorded.unwritten`.
4. If the loader calls collectives, all ranks make the same runs with the same values: whatever their targets, also
   without any, and after an error, which is raised after the last run.
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
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmath.base import dtypes
from shardmath.base.errors import StoreError
from shardmath.base.text import word_error
from shardmath.models.recordings.pieces import Piece
from shardmath.models.recordings.recorded import Native, Recorded
from shardmath.models.storage.stored import Shapes, Vocabulary
from shardmath_torch.groups import compat
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.probes.drawing import SPECIAL, Run
from shardmath_torch.tensors.refits.before import describe, is_plain, key_of
from shardmath_torch.tensors.refits.collectives import Barriers, Collectives
from shardmath_torch.tensors.refits.functions import FUNCTIONS, find_difference, spread
from shardmath_torch.tensors.refits.numbering import ANY, Found, Numbering, Reading, is_left
from shardmath_torch.tensors.refits.reads import Reads
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
"""The most targets that an error lists."""


@compat.untraced
def record(
    load: Load,
    shapes: Shapes,
    into: Into,
    *,
    form: Form = "mapping",
    functions: Mapping[str, str] | None = None,
    ways: tuple[Ways, ...] = ("views", "numbers"),
) -> Recorded:
    """Call the weight loader `load`, and return where in the tensors of `into` it stores each element of the checkpoint
    tensors in `shapes`. `load` takes a mapping, or pairs of name and tensor (`form`); `ways` permits calls with tensors
    without data ("views") and with data ("numbers"). `functions` maps the name of each tensor that `load` computes,
    instead of copying it, to a function's name, such as "neg_exp". With data, it is checked that the loader computes
    what a built-in function does.

    With both ways, data are used only for tensors that are still unknown. The tensors in `into` are restored after each
    run. `shapes` are global shape and dtype by logical name. `into` is the module, or mutable mapping from name to
    tensor, into which `load` loads, or a list of these, one per virtual stage. `functions` has the function of each
    target that is computed: {"A": "neg_exp"}, in another chunk than the first {"A of chunk 1": "neg_exp"}. Raises
    StoreError if another target is computed, if two tensors are written into one cell, and if an element lies twice in
    one target.
    """
    plain = Vocabulary(shapes).shapes
    _check_words("form", form, FORMS)
    _check_words("ways", ways, WAYS)
    recording = _Recording(load, plain, into, form, dict(functions or {}))
    # Not for each run: a thread that the loader starts in one of them may call barriers in the next.
    with recording.collectives.followed:
        try:
            return recording.record(ways)
        finally:
            recording.kept_targets.before.check()


AGAIN = "record a loader that writes the same positions each time it is called"


class _Recording:
    """The recording of one loader, with what is known of each target so far."""

    def __init__(
        self, load: Load, shapes: Shapes, into: Into, form: Form, functions: dict[str, str]
    ) -> None:
        self.load = load
        self.shapes = shapes
        self.form = form
        self.functions = functions
        self.kept_targets = KeptTargets(into)
        # By target: its pieces, the operations that computed it, and what recorded it: "views", "numbers", or "" for
        # a target that is not written.
        self.pieces: dict[str, list[Piece]] = {}
        self.operations: dict[str, tuple[str, ...]] = {}
        self.recorded_by: dict[str, str] = {}
        # Each target's writes in the run without data, and the targets that it filled with constants.
        self.writes: dict[str, list[Write]] = {}
        self.filled: set[str] = set()
        # By target, a mask of the cells that were written in the first runs on numbers.
        self.touched: dict[str, NDArray[np.bool_]] = {}
        # Whether the loader calls collectives; what sees these; and the first error, if others have to make their runs.
        self.is_collective = False
        self.barriers = Barriers()
        self.collectives = Collectives(self.barriers)
        self.deferred: StoreError | None = None

    def _check_functions(self) -> None:
        """Raise StoreError for a function of an unknown target, and for a function that is not a name."""
        targets = list(self.kept_targets.targets)
        shown = ", ".join(targets[:SHOWN])
        more = f" and {len(targets) - SHOWN} more" if len(targets) > SHOWN else ""
        for name, function in self.functions.items():
            if name not in self.kept_targets.targets:
                target = self.kept_targets.aliases.get(name)
                why = f"the tensors of into= are {shown}{more}; use one of these names"
                if target:
                    why = f"that is another name for the memory of {target!r}; name {target!r}"
                raise StoreError(f"functions= names {name!r}, but {why}")
            if not isinstance(function, str) or not WORD.fullmatch(function):
                raise StoreError(
                    f"functions= has {function!r} for {name!r}, where the name of a function is "
                    f"needed; write 'neg_exp', or a name that you pass to Refit.prepare(functions=)"
                )

    def _check_functions_together(self, ways: tuple[Ways, ...]) -> None:
        """Raise StoreError for functions= that do not fit; if the loader calls collectives, in which other ranks wait
        for this one, keep it until the last run."""
        try:
            self._check_functions()
        except StoreError as error:
            # Without data, the loader comes no further than to its first collective.
            with suppress(Exception):
                self._run_watched(spoiled=())
            if not self.is_collective or "numbers" not in ways:
                raise
            self.deferred = error

    def record(self, ways: tuple[Ways, ...]) -> Recorded:
        """Run the weight loader until it is known which checkpoint element it stores at each position of the model's
        tensors; return this as a Recorded. `ways` permits runs on tensors without data ("views"), with data ("numbers")
        or, in this order, both.
        """
        self._check_functions_together(ways)
        unexplained = set(self.kept_targets.targets)
        failure: Exception | None = None
        is_watched = False
        if "views" in ways:
            try:
                unexplained = self._watch()
                is_watched = True
            except _Unrecordable:
                raise
            # A loader may fail in any way on tensors without data; it is then run on real ones.
            except Exception as error:
                failure = error
                self.pieces, self.operations = {}, {}
        # Also without targets, if it may call collectives in which other ranks wait for this one.
        if (unexplained or not is_watched) and "numbers" in ways:
            is_written = self._number(sorted(unexplained), failure)
            if not is_written:
                self._check_idle(unexplained, failure)
        elif unexplained:
            raise StoreError(self._word_unexplained(min(unexplained), failure)) from failure
        if "numbers" in ways:
            self._check_computed()
        return self._finish()

    def _check_idle(self, names: Collection[str], failure: Exception | None) -> None:
        """Raise StoreError for a loader that failed without data, and writes into none of these targets with data."""
        # With collectives the failure says nothing: it comes on each rank, also on one that loads nothing.
        if names and failure is not None and not self.is_collective:
            raise StoreError(
                f"the loader raised {word_error(failure)} on tensors without data, and wrote nothing into the "
                f"tensors of into= when it got data; pass a loader that writes into them"
            ) from failure

    def _word_unexplained(self, name: str, failure: Exception | None) -> str:
        """The error for a target that views do not explain, if they are the only way of recording."""
        by = f": it is computed by {self._list_operations(name)}" if self._has_made(name) else ""
        what = f"the copies into {name!r} could not be followed{by}"
        if failure is not None:
            what = f"the loader raised {word_error(failure)} on tensors without data"
        return f"{what}, and ways= allows only 'views'; pass ways=('views', 'numbers')"

    def _call(self, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
        """Run the loader on these tensors; if it takes pairs, each is made when the loader asks for it."""
        try:
            self._call_loader(tensors)
        finally:
            self.barriers.end_call()

    def _call_loader(self, tensors: Mapping[str, Callable[[], Tensor]]) -> None:
        with torch.no_grad():
            if self.form == "pairs":
                returned = self.load((name, make()) for name, make in tensors.items())
            else:
                returned = self.load({name: make() for name, make in tensors.items()})
            if isinstance(returned, Awaitable | AsyncIterator):
                kind = type(returned).__name__
                raise _Unrecordable(
                    f"the loader returned a {kind} before it had loaded; pass a function that "
                    f"returns once all is loaded, as lambda given: asyncio.run(load(given))"
                )
            # A loader that yields the names that it loads has loaded once all are taken.
            if isinstance(returned, Iterator):
                deque(returned, maxlen=0)

    # By views

    def _watch(self) -> set[str]:
        """Record by views; return the targets that these do not explain."""
        watch, writes = self._run_watched(spoiled=())
        self._check_repeated(watch, writes)
        unexplained = {
            name for name, own_writes in writes.items() if not self._take(name, own_writes)
        }
        # A loader that neither copies nor fills with constants may have noticed that there is no data.
        if not any(writes.values()) and not watch.filled:
            self.recorded_by.clear()
            return set(writes)
        return unexplained

    def _check_repeated(self, watch: Watch, writes: Mapping[str, list[Write]]) -> None:
        """Raise StoreError for a loader that depends on the values that it has loaded into a target.

        A run without data writes nothing into targets, so the loader reads what was there before. It is run again with
        other values there, and has to write the same.
        """
        written_keys = {key for key, listed in watch.writes.items() if listed}
        spoiled_keys = (written_keys | watch.filled.keys()) & self.kept_targets.before.copied
        if not spoiled_keys:
            return
        second_watch, second_writes = self._run_watched(spoiled_keys)
        # Sets, as threads write in any order.
        differing = [name for name in writes if set(writes[name]) != set(second_writes[name])]
        if differing or second_watch.filled != watch.filled:
            where = repr(differing[0]) if differing else "its targets"
            raise StoreError(
                f"the loader writes {where} differently when the tensors of into= hold other "
                f"values before it runs; record a loader that does not read what it overwrites"
            )

    def _run_watched(self, spoiled: Collection[int]) -> tuple[Watch, dict[str, list[Write]]]:
        """Run the loader without data, after the values in memory with the keys `spoiled` were changed; return the
        Watch and each target's writes.
        """
        sources = {}
        for name, (shape, dtype) in self.shapes.items():
            sources[name] = torch.empty(shape, dtype=dtype_of(dtype), device="meta")
        kept_targets = self.kept_targets
        watch = Watch(sources, list(kept_targets.targets.values()), self.barriers)
        kept_targets.before.keep_bytes("cpu")
        try:
            kept_targets.before.spoil(spoiled)
            versions = {name: _version_of(target) for name, target in kept_targets.targets.items()}
            with watch:
                self._call({name: partial(watch.give, tensor) for name, tensor in sources.items()})
            if watch.failure is not None:
                raise watch.failure
            now = kept_targets.find()
            self._check(now)
            changed = kept_targets.before.find_written()
            writes = {}
            for name, target in kept_targets.targets.items():
                is_newer = _version_of(target) > versions[name]
                writes[name] = self._list_writes(watch, name, now)
                writes[name] += self._list_unseen(watch, name, writes[name], is_newer, changed)
            self.writes = writes
        finally:
            kept_targets.before.put_back()
            self._keep_seen(watch)
            watch.forget()
        return watch, writes

    def _keep_seen(self, watch: Watch) -> None:
        """Keep the writes into targets; for a run that failed, those before the failure."""
        self.is_collective = self.is_collective or watch.collective
        for name, memory in self.kept_targets.memory.items():
            key = key_of(memory)
            if name not in self.writes:
                self.writes[name] = _shift_all(watch.writes[key], memory)
            if key in watch.filled:
                self.filled.add(name)

    def _list_writes(self, watch: Watch, name: str, now: Mapping[str, Tensor]) -> list[Write]:
        """The writes into a target, or the one write that replaced it, if another tensor has its name now. Adds the
        name to `filled` if that tensor was filled with a constant."""
        target = self.kept_targets.memory[name]
        # The same memory with other strides is another tensor, too: a weight is stored, and then transposed.
        if describe(now[name]) != describe(target):
            # `_check` has found that the tensor that has its name now has the same shape and dtype.
            into = torch.empty(target.shape, dtype=target.dtype, device="meta")
            write = watch.explain(now[name], into)
            # No pieces, (): memory that a constant filled in place, as by zero_(). Of unknown memory, pieces are None.
            if write.pieces == ():
                self.filled.add(name)
            return [write]
        return _shift_all(watch.writes[key_of(target)], target)

    def _list_unseen(
        self,
        watch: Watch,
        name: str,
        writes: Sequence[Write],
        is_newer: bool,
        changed: Collection[int],
    ) -> list[Write]:
        """Unknown writes into a target besides these; `is_newer` is whether torch has counted any write."""
        memory = self.kept_targets.memory[name]
        key = key_of(memory)
        unseen = []
        # Modes see one thread, but versions count the writes of all.
        if is_newer and key not in watch.noted:
            unseen.append(Write(pieces=None, made=("another thread",), carries=True))
        if key in changed:
            unseen.append(Write(pieces=None, made=("a write past torch",), carries=True))
        # A buffer was filled, and no operation here has read it: another thread may have copied from it.
        if watch.unread and _count(writes) < memory.numel():
            unseen.append(Write(pieces=None, made=("what filled a buffer",)))
        return unseen

    def _take(self, name: str, writes: list[Write]) -> bool:
        """Take the writes as the pieces of a target, and return whether they explain it."""
        operations: list[str] = []
        operations_by_piece: dict[Piece, tuple[str, ...]] = {}
        for write in writes:
            # Pieces are None if they are unknown, and () if the write has no checkpoint element, as zeros have none.
            operations_by_piece.update(dict.fromkeys(write.pieces or (), write.made))
            if write.pieces != ():
                operations += write.made
        self.operations[name] = tuple(operations)
        if any(write.pieces is None for write in writes):
            return False
        if operations_by_piece:
            self._check_function(name, sorted(set(operations_by_piece.values())))
        # A loader that is called twice, or for an alias too, writes the same pieces again: the dict has each once.
        self.pieces[name] = list(operations_by_piece)
        self.recorded_by[name] = "views" if operations_by_piece else ""
        return True

    def _check_function(self, name: str, ways: Sequence[tuple[str, ...]]) -> None:
        """Raise StoreError if a target is computed without a function, or has a function and is not computed.

        `ways` are the operations that made its parts, each once; one function cannot stand for several.
        """
        function = self.functions.get(name)
        if self.operations[name] and function is None:
            raise _Unrecordable(self._word_computed(name))
        if function is not None and not all(ways):
            part = "part of " if self.operations[name] else ""
            fix = "load that part into a separate tensor" if part else "leave it out of functions="
            raise _Unrecordable(
                f"{part}{name!r} is copied unchanged, but functions= says that all of it is "
                f"computed by {function!r}; {fix}"
            )
        if function is not None and len(ways) > 1:
            one, other = (", ".join(way) for way in ways[:2])
            raise _Unrecordable(
                f"one part of {name!r} is computed by {one}, another by {other}, but functions= "
                f"has {function!r} for both; load them into separate tensors"
            )

    # By numbers

    def _number(self, names: list[str], failure: Exception | None) -> bool:
        """Record these targets from runs on element numbers, and return whether any is written. `failure` is the error
        of the run without data, if it failed.
        """
        types = {name: self.kept_targets.targets[name].dtype for name in names}
        numbering = Numbering(self.shapes, types.values())
        untouched: set[str] = set()
        try:
            with self._defer():
                untouched = self._find_untouched(numbering)
        except StoreError:
            # A rank without targets has nothing that a loader can load, which may well raise there.
            if not names:
                return False
            self._check_copied(names, failure)
            raise
        # Only now is it known whether the loader calls collectives, and other ranks wait for this one.
        with self._defer():
            self._check_copied(names, failure)
        if self.is_collective:
            # The values come from other ranks, whose targets have other dtypes.
            numbering = Numbering(self.shapes, ANY)
        elif not names:
            return False
        readings = {name: Reading(numbering, dtype) for name, dtype in types.items()}
        self._read_runs(numbering, readings, untouched)
        for name, reading in readings.items():
            self._take_reading(name, reading)
        return any(reading.is_written for reading in readings.values())

    def _read_runs(
        self, numbering: Numbering, readings: Mapping[str, Reading], untouched: Collection[str]
    ) -> None:
        """Make all runs, and add the targets' values to their readings; then raise the error that was kept, if any."""
        for run in numbering.runs:
            with self._defer():
                self._run_numbered(numbering, run, readings, untouched)
        if self.deferred is not None:
            raise self.deferred

    @contextmanager
    def _defer(self) -> Iterator[None]:
        """Keep an error of a loader that calls collectives: other ranks wait for this one in the runs that follow."""
        try:
            yield
        except StoreError as error:
            if not self.is_collective:
                raise
            self.deferred = self.deferred or error

    def _check_copied(self, names: Sequence[str], failure: Exception | None) -> None:
        """Raise StoreError if one of these targets, which views do not explain, has a function."""
        for name in names:
            if name in self.functions:
                why = "the elements that it is computed from could not be followed"
                if failure is not None:
                    why = f"the loader raised {word_error(failure)} on tensors without data"
                raise StoreError(
                    f"functions= says that {name!r} is computed by {self.functions[name]!r}, but "
                    f"{why}; load it by plain copies and that function, or describe it by a row of "
                    f"sm.storage"
                ) from failure

    def _take_reading(self, name: str, reading: Reading) -> None:
        """Take the pieces of a target. Raises StoreError if it is computed, or differs between runs."""
        fault = reading.find_fault()
        if self._differs(name, reading) or (fault and reading.is_written_at_times):
            raise StoreError(
                f"{name!r} is written in one run of the loader and not in another; {AGAIN}"
            )
        if fault:
            raise StoreError(self._word_computed(name, fault))
        self.pieces[name] = reading.list_pieces()
        self.recorded_by[name] = "numbers" if self.pieces[name] else ""

    def _find_untouched(self, numbering: Numbering) -> set[str]:
        """Find the cells that the loader writes; return the targets without any, which it may read.

        Raises StoreError if the loader reads such a target that has no data, and if it writes a target that it left
        unwritten in the run without data.
        """
        read_names = self._find_touched(numbering)
        untouched = {name for name, cells in self.touched.items() if not cells.any()}
        if read_names & untouched:
            raise StoreError(_show_read(min(read_names & untouched)))
        for name, way in self.recorded_by.items():
            was_unwritten = not way and name not in self.filled
            if was_unwritten and name not in untouched:
                place = np.flatnonzero(self.touched[name])[0]
                fault = f"position {place} is written only if there are data"
                raise StoreError(
                    f"{name!r} is loaded differently in two runs of the loader: {fault}; {AGAIN}"
                )
        # Not those that the run without data wrote, and then overwrote by what was there before.
        return {name for name in untouched if not self._is_stored(name)}

    def _is_stored(self, name: str) -> bool:
        """Whether the run without data wrote elements into the target."""
        return any(write.carries for write in self.writes.get(name, ()))

    def _find_touched(self, numbering: Numbering) -> set[str]:
        """Find the cells that the loader writes; return the targets without data that it reads before that."""
        read: set[str] = set()
        for run in numbering.runs:
            # Runs that keep what targets had are a run and its mirror image: one of them changes each written cell.
            if not run.keeps:
                continue
            with self._defer(), self._run_on(numbering, run, (), read) as (found, now):
                for name in found:
                    touched = ~is_left(found[name], now[name])
                    self.touched[name] = touched | self.touched.get(name, np.False_)
        return read

    def _run_numbered(
        self,
        numbering: Numbering,
        run: Run,
        readings: Mapping[str, Reading],
        untouched: Collection[str],
    ) -> None:
        """Run the loader on the values of a run, and add the targets' values to their readings."""
        try:
            with self._run_on(numbering, run, untouched) as (found, now):
                for name, reading in readings.items():
                    reading.add(run, found[name], now[name])
                if run == numbering.runs[0]:
                    self._check_viewed(numbering, run, found, now)
        # A loader may reject values that are not finite.
        except Exception:
            if run.way not in SPECIAL:
                raise

    @contextmanager
    def _run_on(
        self,
        numbering: Numbering,
        run: Run,
        untouched: Collection[str],
        read: set[str] | None = None,
        given: Mapping[str, Tensor] | None = None,
    ) -> Iterator[tuple[Mapping[str, Found], Mapping[str, Tensor]]]:
        """Run the loader on the values of a run, or on those that are `given`; yield, by name, what each target held
        before, and the target after.

        Adds to `read` the targets without data that the loader reads before it writes them.
        """
        kept_targets = self.kept_targets
        tensors: dict[str, Callable[[], Tensor]] = {}
        for name in self.shapes:
            tensors[name] = partial(numbering.make, name, run)
        for name, tensor in (given or {}).items():
            tensors[name] = tensor.clone
        try:
            found = kept_targets.occupy(run, untouched)
            self._call_on_data(tensors, read)
            now = kept_targets.find()
            self._check(now)
            yield found, now
        finally:
            kept_targets.before.put_back()

    def _call_on_data(
        self, tensors: Mapping[str, Callable[[], Tensor]], read: set[str] | None
    ) -> None:
        """Run the loader on these tensors, and add to `read`, if given, what `_call_reading` adds. Raises StoreError if
        the loader raises any error.
        """
        try:
            if read is not None:
                self._call_reading(tensors, read)
            else:
                with self.collectives if self.barriers.met else nullcontext():
                    self._call(tensors)
        except StoreError:
            raise
        except Exception as error:
            raise StoreError(
                f"the loader raised {word_error(error)} on tensors with data; pass a loader that loads "
                f"tensors of these shapes without an error"
            ) from error

    def _call_reading(self, tensors: Mapping[str, Callable[[], Tensor]], read: set[str]) -> None:
        """Run the loader, and add to `read` the targets without data that it reads before it writes them."""
        present = self.kept_targets.find()
        replaced = {n: target for n, target in self.kept_targets.targets.items() if target.is_meta}
        reads = Reads({name: present[name] for name in replaced}, replaced)
        try:
            with self.collectives, reads:
                self._call(tensors)
        except Exception as error:
            if reads.names:
                raise StoreError(f"{word_error(error)}; {_show_read(min(reads.names))}") from error
            raise
        finally:
            self.is_collective = self.is_collective or self.collectives.called
        if reads.lost:
            raise StoreError(
                f"{min(reads.lost)!r} is written in a tensor that the loader has kept, and has no data "
                f"on the meta device; get it from the module in each call, or record into one that has"
            )
        read |= reads.names

    def _check_viewed(
        self,
        numbering: Numbering,
        run: Run,
        found: Mapping[str, Found],
        now: Mapping[str, Tensor],
    ) -> None:
        """Raise StoreError if a run on numbers contradicts a target recorded by views."""
        for name in self.recorded_by:
            fault = self._find_difference(name, numbering, run, found[name], now[name])
            if fault:
                raise StoreError(
                    f"{name!r} is loaded differently in two runs of the loader: {fault}; {AGAIN}"
                )

    def _check_computed(self) -> None:
        """Run the loader on data, and raise StoreError if a target of a built-in function has other values."""
        names = list(filter(self._is_built_in, self.functions))
        pieces = chain.from_iterable(self.pieces.get(name, ()) for name in names)
        given = {piece.tensor: spread(*self.shapes[piece.tensor]) for piece in pieces}
        if not given:
            return
        numbering = Numbering(
            self.shapes, [self.kept_targets.targets[name].dtype for name in names]
        )
        # It keeps what targets had, such as maps of experts, which the loader may read.
        run = next(run for run in numbering.runs if run.keeps)
        with self._run_on(numbering, run, (), given=given) as (found, now):
            for name in names:
                # A loader that has kept tensors without data does not write into those with data.
                if not is_left(found[name], now[name]).all():
                    self._check_values(name, given, now[name])

    def _is_built_in(self, name: str) -> bool:
        """Whether the function of this target is built in."""
        return self.functions[name] in FUNCTIONS

    def _check_values(self, name: str, given: Mapping[str, Tensor], after: Tensor) -> None:
        """Raise StoreError if a target, `after` a run on tensors that are `given`, is another function of these."""
        function = self.functions[name]
        for piece in self.pieces[name]:
            values = given[piece.tensor].flatten()[torch.from_numpy(piece.elements)]
            stored = after.detach().flatten()[torch.from_numpy(piece.cells)]
            fault = find_difference(function, values, stored)
            if fault:
                raise StoreError(
                    f"{name!r} is not computed by {function!r}: {fault}; give the function another name, "
                    f"and pass it to Refit.prepare(functions=)"
                )

    def _find_difference(
        self, name: str, numbering: Numbering, run: Run, found: Found, after: Tensor
    ) -> str:
        """The difference between a run on numbers and the pieces recorded by views; "" if there is none."""
        pieces = self.pieces[name]
        written, nonzero = numbering.find_written(found, after)
        cells = np.zeros(len(written), np.bool_)
        for piece in pieces:
            cells[piece.cells] = True
        other_cells = np.flatnonzero(nonzero & ~cells)
        # Constants that fill a target are not in its pieces.
        if len(other_cells) and name not in self.filled:
            return f"position {other_cells[0]} is written only if there are data"
        # The values in a target that a function computes do not identify elements.
        if name not in self.functions:
            return numbering.find_other(pieces, run, after)
        is_missing = cells.any() and not written[cells].any()
        return "it is written only if there are no data" if is_missing else ""

    def _differs(self, name: str, reading: Reading) -> bool:
        """Whether runs on numbers left cells unwritten that an earlier run wrote."""
        if (self.touched[name] & reading.unwritten).any():
            return True
        for write in self.writes.get(name, ()):
            if write.carries and not reading.is_written:  # in whichever cells, which may be unknown
                return True
            if any(reading.unwritten[piece.cells].any() for piece in write.pieces or ()):
                return True
        return False

    # Together

    def _check(self, now: Mapping[str, Tensor]) -> None:
        """Raise StoreError if the loader removed a target, or replaced it by one of another shape, dtype or memory."""
        for name, target in self.kept_targets.memory.items():
            if name not in now:
                raise _Unrecordable(
                    f"the loader removed {name!r} from into=; record a loader that keeps it there"
                )
            loaded = now[name]
            if not is_plain(loaded):
                raise _Unrecordable(
                    f"the loader made {name!r} a {type(loaded).__name__} with layout {loaded.layout}, "
                    f"where a plain tensor is needed; record a loader that copies into the tensor"
                )
            if loaded.shape != target.shape:
                raise _Unrecordable(
                    f"the loader changed the shape of {name!r} from {list(target.shape)} to "
                    f"{list(loaded.shape)}; put a tensor of shape {list(loaded.shape)} into into="
                )
            if loaded.dtype != target.dtype:
                raise _Unrecordable(
                    f"the loader changed the dtype of {name!r} from {target.dtype} to "
                    f"{loaded.dtype}; put a {loaded.dtype} tensor into into="
                )
        self._check_aliases(now)

    def _check_aliases(self, now: Mapping[str, Tensor]) -> None:
        """Raise StoreError if an alias is no longer in the memory of its target."""
        for alias, name in self.kept_targets.aliases.items():
            # [:-1]: an alias may have another dtype.
            if alias not in now or describe(now[alias])[:-1] != describe(now[name])[:-1]:
                raise _Unrecordable(
                    f"{alias!r} shares memory with {name!r} before the loader runs, but not "
                    f"afterwards; put tensors that do not share memory into into="
                )

    def _has_made(self, name: str) -> bool:
        """Whether operations that computed the target are known."""
        return bool(self.operations.get(name))

    def _list_operations(self, name: str) -> str:
        """The operations that computed the target, for messages."""
        return ", ".join(self.operations[name])

    def _word_computed(self, name: str, fault: str = "") -> str:
        """The error for a target that is computed, with the operations, and the `fault` that shows it."""
        by = f" by {self._list_operations(name)}" if self._has_made(name) else ""
        seen = f": {fault}" if fault else ""
        # Functions are known from runs without data, which collectives end.
        named = f"name the function: functions={{{name!r}: 'neg_exp'}} for -exp(x), or "
        return (
            f"{name!r} is computed{by}, not copied{seen}; {'' if self.is_collective else named}"
            f"describe it by a row of sm.storage"
        )

    def _finish(self) -> Recorded:
        """The recording of all targets."""
        natives = []
        for name, target in self.kept_targets.targets.items():
            shape = tuple(target.shape)
            dtype = dtypes.canonical(target.dtype)
            pieces = tuple(self.pieces.get(name, ()))
            way = self.recorded_by.get(name, "")
            function = self.functions.get(name, "")
            chunk, name_in_chunk = self.kept_targets.natives[name]
            natives.append(Native(name_in_chunk, shape, dtype, pieces, way, function, chunk))
        tensors = [(name, shape, dtype) for name, (shape, dtype) in self.shapes.items()]
        aliases = tuple(self.kept_targets.aliases.items())
        return Recorded(tuple(tensors), tuple(natives), aliases)


def _show_read(name: str) -> str:
    """The error for a target without data that a loader reads."""
    return f"{name!r} is read by the loader, and has no data on the meta device; record into one that has"


def _check_words(argument: str, given: object, known: Sequence[str]) -> None:
    """Raise StoreError unless the argument `given` is one of the `known` words, or a list or tuple of them that is not
    empty."""
    words = list(given) if isinstance(given, list | tuple) else [given]
    if not words or any(word not in known for word in words):
        choices = " or ".join(map(repr, known))
        raise StoreError(f"{argument}={given!r} is unknown; pass {choices}")


def _version_of(target: Tensor) -> int:
    """torch's count of writes into the tensor; inference tensors have none."""
    return 0 if target.is_inference() else target._version


class _Unrecordable(StoreError):
    """A fault of the loader or its targets that no other way of recording avoids."""


def _count(writes: Sequence[Write]) -> int:
    """The number of cells that these pieces fill; cells that two pieces fill count twice."""
    pieces = {piece for write in writes for piece in write.pieces or ()}
    return sum(piece.size for piece in pieces)


def _shift_all(writes: Sequence[Write], target: Tensor) -> list[Write]:
    """The writes, whose pieces count cells of the storage, by cells of the target. Their pieces are None (unknown) if
    it is not contiguous: runs on numbers then find them.
    """
    if target.is_contiguous():
        return [_shift(write, target) for write in writes]
    return [write._replace(pieces=None) for write in writes]


def _shift(write: Write, target: Tensor) -> Write:
    """The write by cells of the target, which may be part of a larger storage: only pieces inside the target."""
    if write.pieces is None:
        return write
    inside = []
    for piece in write.pieces:
        cell = piece.cell - int(target.storage_offset())
        last_cell = cell
        for count, stride, _ in piece.blocks:
            last_cell += (count - 1) * stride
        if cell >= 0 and last_cell < target.numel():
            inside.append(Piece(piece.tensor, cell, piece.element, piece.blocks))
        elif last_cell >= 0 and cell < target.numel():
            # One copy into several targets at once: runs on numbers tell which cells belong to which.
            return write._replace(pieces=None)
    return Write(tuple(inside), write.made, write.carries and bool(inside))
