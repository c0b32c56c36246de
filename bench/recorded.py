"""Recorded: what the ranks of real trainers and engines stored, beside what rows say that they store.

1. A file of vectors has, for each model, layout, rank and stored tensor, the element of a reference that lies in each
   cell. Megatron's reference is what one rank stores, vLLM's the Hugging Face checkpoint.
2. Both sides are numbered: element i of all of the reference is i + 1, a cell without a source 0. The reference read
   through its rows gives logical arrays of numbers, and these, through a layout's rows, what every rank should have.
3. Of vLLM there are two states: once weights are loaded, and for what that changes, once they are processed.
4. Names, shapes and numbers must all agree; a tensor that is on one side alone is a difference.

>>> print(Comparison(3, 4, (Difference("llama", "tp2", 1, "lm_head.weight"),)))
3 of 4 entries equal
llama tp2 rank 1: lm_head.weight
"""

from __future__ import annotations

import gzip
import io
import itertools
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from bench.systems import System, find_system
from shardmath.base.errors import ShardError, StoreError
from shardmath.models.storage.binding import Bound
from shardmath.models.storage.filling import fill, gather
from shardmath.models.storage.names import matches

__all__ = ["Comparison", "Difference", "Recorded", "compare"]

_Ids: TypeAlias = NDArray[np.int64]
_Native: TypeAlias = tuple[int, str]
_Json: TypeAlias = Mapping[str, Any]

SHOWN = 20
"""Differences that a comparison shows."""
PARAMETERS = (0, 1)
"""Kinds of entries that are there once weights are loaded: parameters and buffers."""


class Difference(NamedTuple):
    """One stored tensor that is not as recorded; `why` where the whole layout cannot be laid."""

    model: str
    layout: str
    rank: int
    name: str
    why: str = ""

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.model} {self.layout} rank {self.rank}: {self.name}{why}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many entries are as recorded, of how many, and which are not."""

    equal: int
    total: int
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        shown = [str(difference) for difference in self.differences[:SHOWN]]
        more = len(self.differences) - len(shown)
        if more:
            shown.append(f"and {more} more")
        return "\n".join([f"{self.equal} of {self.total} entries equal", *shown])


class Recorded:
    """A file of vectors (see its own `meta.doc`)."""

    def __init__(self, path: str | Path) -> None:
        self.json: _Json = _read(path)
        self.expanded: dict[int, _Ids] = {}
        self.room = MOST_CELLS

    @property
    def models(self) -> _Json:
        """The models by name."""
        models: _Json = self.json["models"]
        return models

    def entries(
        self, rank: _Json, starts: Sequence[int], processed: bool
    ) -> Iterator[tuple[_Native, _Ids]]:
        """Chunk, name and numbers of what a rank stores; the reference's tensors begin at `starts`.

        It is what is loaded, or of that what is `processed` afterwards, as it is then.
        """
        for chunk, listed in enumerate(rank["chunks"]):
            for name, kind, shape, _, _, segments, post, *_ in listed:
                native = chunk, self.json["strings"][name]
                if kind in PARAMETERS and not processed:
                    yield native, self._number(segments, starts).reshape(shape)
                elif kind in PARAMETERS and "posts" in self.json and post >= 0:
                    after, moved, _ = self.json["posts"][post]
                    # Without sources, the processed tensor is computed, and no element of it can be compared.
                    if moved is not None:
                        yield native, self._number(moved, starts).reshape(after)

    def _number(self, segments: Sequence[tuple[int, int]], starts: Sequence[int]) -> _Ids:
        """The numbers of these segments, one after the other."""
        parts = [np.zeros(0, np.int64)]
        for tensor, runs in segments:
            flat = self._expand(runs)
            # Cells without a source are negative, or of tensor -1.
            has_source = (flat >= 0) & (tensor >= 0)
            parts.append(np.where(has_source, flat + starts[tensor] + 1, 0))
        return np.concatenate(parts)

    def _expand(self, runs: int) -> _Ids:
        """The flat indices of a list of blocks."""
        if runs not in self.expanded:
            given = self.json["runs"][runs]
            self.room -= _count_cells(given)
            if self.room < 0:
                raise ValueError(f"its blocks have more than {MOST_CELLS} cells")
            blocks = [_expand_block(block) for block in given]
            self.expanded[runs] = np.concatenate(blocks) if blocks else np.zeros(0, np.int64)
        return self.expanded[runs]


MOST_CELLS = 1 << 26
"""Of all blocks of a file, and of a reference, in 0.5 GiB: recorded storage has up to 4 million."""
MOST_TIMES = 64
"""What is unpacked of a file at most, in its lengths: recorded storage has 7 to 14."""


def _unpack(raw: bytes) -> bytes:
    """The gzipped bytes. Raises ValueError for what is far longer than any recorded storage."""
    most = MOST_TIMES * len(raw)
    with gzip.GzipFile(fileobj=io.BytesIO(raw)) as file:
        text = file.read(most + 1)
    if len(text) > most:
        raise ValueError(f"unpacked it is longer than {MOST_TIMES} times its {len(raw)} bytes")
    return text


def _read(path: str | Path) -> _Json:
    """The file's JSON. Raises StoreError for a file that has no recorded storage."""
    try:
        raw = Path(path).read_bytes()
        # By its first bytes, since a file may have lost its .gz on the way.
        text = _unpack(raw) if raw.startswith(b"\x1f\x8b") else raw
        read: _Json = json.loads(text)
    except (OSError, EOFError, ValueError, zlib.error, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    has_both = isinstance(read, dict) and {"meta", "models"} <= read.keys()
    if not has_both or not all(isinstance(read[key], dict) for key in ("meta", "models")):
        raise StoreError(f"{path} has no recorded storage; give a file with meta and models")
    return read


def _count_cells(blocks: Iterable[Sequence[int]]) -> int:
    """How many cells the blocks have, before any is made."""
    sizes = [[length, *repeats[::2]] for _, length, *repeats in blocks]
    if any(size < 0 for each in sizes for size in each):
        raise ValueError("a block has a negative length")
    return sum(map(math.prod, sizes))


def _expand_block(block: Sequence[int]) -> _Ids:
    """Start, length, and perhaps twice how often and how far apart; a negative start is no source."""
    start, length, *repeats = block
    if start < 0:
        return np.full(length, start, np.int64)
    indices = np.arange(start, start + length)
    for count, stride in zip(repeats[::2], repeats[1::2], strict=True):
        offsets = stride * np.arange(count)
        indices = offsets.reshape(-1, *[1] * indices.ndim) + indices
    return indices.ravel()


def compare(
    path: str | Path,
    models: Sequence[str] = (),
    *,
    started: Callable[[int, int, str], object] = lambda *_: None,
) -> Comparison:
    """All entries of these models of a file, or of all its models, beside what rows say.

    `started` is told of each model: its number from 1, of how many, and its name. Raises StoreError for a file that
    has no recorded storage, or not of these models.
    """
    recorded = Recorded(path)
    make = find_system(recorded.json["meta"])
    chosen = models or list(recorded.models)
    absent = [name for name in chosen if name not in recorded.models]
    if absent:
        known = ", ".join(recorded.models) or "none"
        raise StoreError(f"{path} has no model {absent[0]!r}; its models are {known}")
    compared: list[Comparison] = []
    for number, name in enumerate(chosen, 1):
        started(number, len(chosen), name)
        try:
            compared += _Model(recorded, name, make).compare()
        except (*UNREADABLE, AttributeError) as error:
            what = f"{path} has no recorded storage of model {name!r}: {_name_fault(error)}"
            raise StoreError(f"{what}; record it again") from error
    found = _sum(compared)
    if not found.total:
        raise StoreError(
            f"{path} has no entries to compare; give a file with ranks that store some"
        )
    return found


def _sum(comparisons: Iterable[Comparison]) -> Comparison:
    """All of them as one."""
    equal = total = 0
    differences: list[Difference] = []
    for one in comparisons:
        equal += one.equal
        total += one.total
        differences += one.differences
    return Comparison(equal, total, tuple(differences))


class _Model:
    """A model of the file, and its logical arrays of numbers."""

    def __init__(self, recorded: Recorded, name: str, make: Callable[[_Json], System]) -> None:
        self.recorded = recorded
        self.name = name
        self.json: _Json = recorded.models[name]
        self.system = make(self.json)
        ref = {tensor: tuple(shape) for tensor, shape in self.json["ref"]}
        sizes = [math.prod(shape) for shape in ref.values()]
        self.starts = [0, *itertools.accumulate(sizes)]
        if not 0 <= self.starts[-1] <= MOST_CELLS:
            raise ValueError(f"its reference has {self.starts[-1]} cells; at most {MOST_CELLS}")
        self.arrays: dict[str, _Ids] = {}
        self.fault = ""
        try:
            self.arrays = _number_logical(self.system.reference(ref), ref, self.starts)
        except UNREADABLE as error:
            # A model that cannot be read is all different, and the others are still compared.
            self.fault = _name_fault(error)

    def compare(self) -> Iterator[Comparison]:
        """All layouts, each in both states."""
        for layout in self.json["layouts"]:
            yield from self._compare_layout(layout, processed=False)
            yield from self._compare_layout(layout, processed=True)

    def _compare_layout(self, layout: str, processed: bool) -> Iterator[Comparison]:
        """All ranks of a layout in one state."""
        given = self.json["layouts"][layout]
        found = self.recorded.entries
        listed = [dict(found(rank, self.starts, processed)) for rank in given["ranks"]]
        if not any(listed):
            return
        # A layout is bound once for all of its ranks.
        filled = _Filled(self, given, processed)
        for rank, entries in enumerate(listed):
            wrong = filled.list_wrong(rank, entries)
            equal = len(entries.keys() - wrong.keys())
            state = f"{layout} processed" if processed else layout
            differences = _list_differences((self.name, state, rank), wrong)
            yield Comparison(equal, len(entries), differences)


def _list_differences(
    where: tuple[str, str, int], wrong: Mapping[_Native, str]
) -> tuple[Difference, ...]:
    """What is wrong on a rank, in the order of names."""
    return tuple(Difference(*where, native, why) for (_, native), why in sorted(wrong.items()))


def _number_logical(
    reference: Bound, ref: Mapping[str, tuple[int, ...]], starts: Sequence[int]
) -> dict[str, _Ids]:
    """The logical arrays of a reference of which element i is numbered i + 1."""
    stored: dict[_Native, _Ids] = {}
    laid = reference.natives(0)
    for (name, shape), start in zip(ref.items(), starts, strict=False):
        flat = np.arange(start + 1, start + 1 + math.prod(shape))
        # A tensor may be declared in another shape than it is laid in, with as many cells.
        own = laid.get((0, name), shape)
        stored[0, name] = flat.reshape(own if math.prod(own) == len(flat) else shape)
    return gather(reference, {0: stored}, [0])


UNREADABLE = (ShardError, LookupError, TypeError, ValueError, ArithmeticError)
"""What a model's configuration may lead to: files may have models of any kind, which nobody has looked at before."""


def _name_fault(error: Exception) -> str:
    """The first line of what is wrong."""
    line = str(error).partition("\n")[0]
    return line if isinstance(error, ShardError) else f"{type(error).__name__}: {line}"


def _is_shaped(own: tuple[int, ...], recorded: tuple[int, ...], system: System) -> bool:
    """Whether the shapes are equal, but for dimensions of size 1, which checkpoints and engines add and drop."""
    if system.reshapes:
        return math.prod(own) == math.prod(recorded)
    return [n for n in own if n != 1] == [n for n in recorded if n != 1]


class _Filled:
    """What the ranks of one layout should store."""

    def __init__(self, model: _Model, layout: _Json, processed: bool) -> None:
        self.system = model.system
        self.layout = layout
        self.arrays = model.arrays
        self.processed = processed
        self.bound: Bound | None = None
        self.fault = model.fault
        shapes = {name: (array.shape, "int64") for name, array in self.arrays.items()}
        if self.fault:
            return
        try:
            self.bound = self.system.bind(layout, shapes, processed)
        except UNREADABLE as error:
            self.fault = _name_fault(error)

    def list_wrong(self, rank: int, entries: Mapping[_Native, _Ids]) -> dict[_Native, str]:
        """The tensors that are not as recorded, and why."""
        if self.bound is None:
            return dict.fromkeys(entries, self.fault)
        arrays = self.system.load(self.layout, rank, self.arrays)
        stored = fill(self.bound, arrays, rank)
        # Of processed tensors only those that changed are listed.
        more = set() if self.processed else stored.keys() - entries.keys()
        wrong = dict.fromkeys(more, "not recorded")
        for native, ids in entries.items():
            if native not in stored:
                if ids.any() or not matches(native[1], self.system.own):
                    wrong[native] = "no row stores it"
            elif not _is_shaped(stored[native].shape, ids.shape, self.system):
                wrong[native] = f"shape {stored[native].shape}, recorded {ids.shape}"
            elif not np.array_equal(stored[native].ravel(), ids.ravel()):
                wrong[native] = "other elements"
        return wrong
