"""Reading: how bytes of files get into a rank's tensors.

1. Files are mapped, and of a stored box those rows are copied that a rank needs. What lies as it is wanted is read
   straight into the tensor. Of a service's file, as much of a box is fetched as lies around what is needed.
2. Of the chunks that have a checksum, those are checked that are this rank's to check (`verifying`).
3. `Reader` is what torch.distributed.checkpoint calls a storage reader; it works with torch's own planners, too, for
   tensors.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint import planner as theirs
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.futures import Future

from shardmath.layouts.algebra.mesh import strides
from shardmath_torch.checkpoints.files.checksums import CHUNK
from shardmath_torch.checkpoints.files.places import (
    CheckpointError,
    Place,
    Remote,
    length_of,
    opened,
    place,
)
from shardmath_torch.checkpoints.opening import open_checkpoint
from shardmath_torch.checkpoints.safetensors.strided import Strided
from shardmath_torch.checkpoints.stored import Checkpoint, StoredBox, StoredTensor
from shardmath_torch.checkpoints.verifying import (
    CheckpointChunks,
    Marks,
    check_chunk,
    chunk_ends,
    pack_marks,
    read_chunk,
    read_into,
    take_share,
)
from shardmath_torch.groups.dtypes import dtype_of, flat
from shardmath_torch.moves.observing.bars import TELL_BYTES, Progress, Tally

__all__ = ["Reader"]

_NOTHING = Checkpoint(Path(), {}, {}, {})
"""A checkpoint without tensors."""


class Reader(storage.StorageReader):
    """A checkpoint of ours, of torch, or of Hugging Face. For torch.distributed.checkpoint.load.

    `share` (i, n) is which part of a checkpoint of torch this rank looks through for wrong metadata; `verify` says
    whether checksums are looked at. Raises CheckpointError or WeightsError for what is missing, damaged or wrong.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Checkpoint,
        *,
        names: Iterable[str] | None = None,
        share: tuple[int, int] = (0, 1),
        progress: Progress | None = None,
        verify: bool = True,
    ) -> None:
        self._path = path
        self._names = None if names is None else tuple(names)
        self._share = share
        self._tally = Tally(progress)
        self._verify = verify
        self._found: Checkpoint | None = None
        self._strided: dict[StoredBox, Strided] = {}
        self._chunks = CheckpointChunks(_NOTHING)
        self._marks: Marks = np.zeros(0, bool)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another checkpoint, if given."""
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self, *args: Any) -> Metadata:
        """What is stored, proved as far as that is possible without data."""
        found = self._path
        if not isinstance(found, Checkpoint):
            found = open_checkpoint(os.fspath(found))
        asked = found.tensors if self._names is None else self._names
        names = tuple(dict.fromkeys(asked))
        found.check(names)
        self._strided = found.check_archives(names, self._share)
        self._found = found
        self._chunks = CheckpointChunks(found if self._verify else _NOTHING)
        return Metadata({name: _describe(found[name]) for name in names})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The same; from now on it is known which checksums are looked at."""
        touched: list[tuple[StoredBox, int, int]] = []
        for reads in self._list_reads(plan).values():
            touched += [(read.box, *read.span) for read in reads]
        self._marks = self._chunks.mark_touched(touched)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The same."""
        return plans

    @property
    def touched(self) -> bytes | None:
        """What to tell the others of the checksums that this rank could look at; None where there are none."""
        return pack_marks(self._marks) if self._chunks.total else None

    def divide_checks(self, said: Sequence[bytes], rank: int) -> None:
        """Takes what all ranks have said, in order, and leaves this one its part of the checksums.

        Of the files of a service each rank checks all that it fetches: to fetch takes longer than to hash.
        """
        if isinstance(self._checkpoint.path, Path):
            self._marks = take_share(said, rank, self._chunks.total)

    def read_data(self, plan: LoadPlan, planner: theirs.LoadPlanner) -> Future[None]:
        """Copies what the plan's items say, file by file."""
        reads = self._list_reads(plan)
        self._tally.begin(sum(read.nbytes for each in reads.values() for read in each))
        for file, each in reads.items():
            if isinstance(file, Remote):
                self._fetch(file, each, planner)
            else:
                self._read(file, each, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def _checkpoint(self) -> Checkpoint:
        assert self._found is not None, "metadata are read before data"
        return self._found

    def _list_reads(self, plan: LoadPlan) -> dict[Place, list[_Read]]:
        """What is read, by file."""
        found = self._checkpoint
        boxes = _find_boxes(found, plan.items)
        self._look_into(boxes, plan.items)
        by_file: dict[Place, list[_Read]] = {}
        for box, item in zip(boxes, plan.items, strict=True):
            lies = self._strided.get(box)
            if lies is None:
                dtype = found[item.storage_index.fqn].dtype
                lies = Strided(box.start, dtype, box.sizes, strides(box.sizes))
            read = _Read(box, item, _cut(lies, item))
            by_file.setdefault(box.file, []).append(read)
        return by_file

    def _look_into(self, boxes: Sequence[StoredBox], items: Sequence[ReadItem]) -> None:
        """Finds out what is in the archives that are read, of those that other ranks have looked through."""
        new: dict[tuple[str, StoredBox], None] = {}
        for box, item in zip(boxes, items, strict=True):
            if box.archive and box not in self._strided:
                new[item.storage_index.fqn, box] = None
        self._strided |= self._checkpoint.describe(new)

    def _read(self, file: Path, reads: Sequence[_Read], planner: theirs.LoadPlanner) -> None:
        """A file of the system is mapped: what is not touched is not read."""
        memory = _map(file)
        unchecked: dict[StoredBox, set[int]] = {}
        for read in reads:
            unchecked[read.box] = set(self._chunks.list_marked(read.box, self._marks))
        with opened(file, buffering=0) as stream:
            assert isinstance(stream, io.FileIO), "what is not buffered is the file itself"
            for read in reads:
                target = planner.resolve_tensor(read.item)
                source = _view(memory, file, read.lies, 0)
                if _is_alike(source, target):
                    _read_straight(stream, read, target, unchecked[read.box], self._tally)
                else:
                    self._tally.copy(target, source)
                planner.commit_tensor(read.item, target)
            _check_rest(stream, unchecked, self._tally)

    def _fetch(self, file: Remote, reads: Sequence[_Read], planner: theirs.LoadPlanner) -> None:
        """Of a file of a service, as much of each box as is between the first and the last byte that is read."""
        by_box: dict[StoredBox, list[_Read]] = {}
        for read in reads:
            by_box.setdefault(read.box, []).append(read)
        for box, each in by_box.items():
            numbers = self._chunks.list_marked(box, self._marks)
            begin, end = _find_ends(box, each, numbers)
            data = self._fetch_part(file, begin, end)
            _check_fetched(box, numbers, memoryview(data), begin)
            memory = _as_memory(data)
            for read in each:
                target = planner.resolve_tensor(read.item)
                self._tally.copy(target, _view(memory, file, read.lies, begin))
                planner.commit_tensor(read.item, target)

    def _fetch_part(self, file: Remote, begin: int, end: int) -> bytearray:
        """Bytes of a file, with one request unless somebody wants to know how many there are."""
        step = TELL_BYTES if self._tally.is_heard else max(1, end - begin)
        data = bytearray()
        for at in range(begin, end, step):
            data += file.read_part(at, min(end, at + step))
            self._tally.add(0)
        return data

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, or a URL that is served."""
        try:
            place(checkpoint_id)
        except CheckpointError:
            return False
        return True


def _describe(tensor: StoredTensor) -> TensorStorageMetadata:
    """A tensor as torch's metadata say it."""
    chunks = []
    for box in tensor.pieces:
        offsets = torch.Size(box.offsets)
        sizes = torch.Size(box.sizes)
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    properties = TensorProperties(dtype_of(tensor.dtype))
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)


# What is read


class _Read(NamedTuple):
    """A part of a stored box, the item that asks for it, and how the part lies in the file."""

    box: StoredBox
    item: ReadItem
    lies: Strided

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.lies.shape) * dtype_of(self.lies.dtype).itemsize

    @property
    def stop(self) -> int:
        """One past its last byte in the file."""
        dtype = dtype_of(self.lies.dtype)
        return self.lies.start + self.lies.extent * dtype.itemsize

    @property
    def span(self) -> tuple[int, int]:
        """From which byte of the box to which."""
        base = self.box.start
        return self.lies.start - base, self.stop - base


def _find_boxes(found: Checkpoint, items: Iterable[ReadItem]) -> list[StoredBox]:
    """The stored box of each item."""
    by_name: dict[str, dict[tuple[int, ...], StoredBox]] = {}
    boxes = []
    for item in items:
        index = item.storage_index
        if index.fqn not in by_name:
            stored = found[index.fqn].pieces
            # one without elements may begin where another does
            by_name[index.fqn] = {box.offsets: box for box in stored if box.has_elements}
        offsets = tuple(index.offset or ())
        boxes.append(by_name[index.fqn][offsets])
    return boxes


def _cut(lies: Strided, item: ReadItem) -> Strided:
    """How the part of a stored box lies that the item asks for."""
    first = 0
    for at, step in zip(item.storage_offsets, lies.strides, strict=True):
        first += at * step
    dtype = dtype_of(lies.dtype)
    start = lies.start + first * dtype.itemsize
    return lies._replace(start=start, shape=tuple(item.lengths))


def _find_ends(box: StoredBox, reads: Iterable[_Read], numbers: Iterable[int]) -> tuple[int, int]:
    """From which byte of the file to which there is anything that is read, or checked: chunks of these numbers."""
    ends = [(read.lies.start, read.stop) for read in reads]
    ends += [chunk_ends(box, number) for number in numbers]
    starts, stops = zip(*ends, strict=True)
    return min(starts), max(stops)


# Memory


def _map(file: Path) -> Tensor:
    """The bytes of a file; what is not touched is not read."""
    try:
        return torch.from_file(str(file), shared=False, size=length_of(file), dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        what = f"{file} cannot be read: {error}"
        raise CheckpointError(f"{what}; it belongs to the checkpoint") from error


def _as_memory(data: bytearray) -> Tensor:
    # frombuffer refuses a buffer of no bytes
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8)


def _view(memory: Tensor, file: Place, lies: Strided, base: int) -> Tensor:
    """A tensor in bytes of a file that begin at `base`; a copy where it begins between two elements."""
    dtype = dtype_of(lies.dtype)
    start = lies.start - base
    stop = start + lies.extent * dtype.itemsize
    if stop > len(memory):
        what = f"{file} ends at byte {base + len(memory)}, a tensor in it at {base + stop}"
        raise CheckpointError(f"{what}; fetch it again")
    taken = memory[start:stop]
    if taken.data_ptr() % dtype.itemsize:
        taken = taken.clone()
    view = taken.view(dtype).as_strided(lies.shape, lies.strides)
    if lies.conj:
        view = view.conj()
    return torch._neg_view(view) if lies.neg else view


def _is_alike(source: Tensor, target: Tensor) -> bool:
    """Whether the same bytes in the same order are wanted as are stored."""
    if source.dtype != target.dtype:
        return False
    if source.is_conj() or source.is_neg():
        return False
    return source.is_contiguous() and target.is_contiguous() and target.is_cpu


def _read_straight(
    stream: io.FileIO, read: _Read, target: Tensor, unchecked: set[int], tally: Tally
) -> None:
    """Reads bytes as they lie into the target, which takes half the time of copying from a mapped file.

    Of the chunks of these numbers, those that are read from end to end are checked while the cache has them, and left
    out then.
    """
    box = read.box
    at, _ = read.span
    raw = flat(target).view(torch.uint8).numpy()
    left = memoryview(raw)  # type: ignore[arg-type]
    stream.seek(read.lies.start)
    while left:
        number, within = divmod(at, CHUNK)
        part = left[: CHUNK - within]
        read_into(stream, part)
        is_all = within == 0 and len(part) == min(CHUNK, box.length - at)
        if is_all and number in unchecked:
            check_chunk(box, number, part)
            unchecked.discard(number)
        left = left[len(part) :]
        at += len(part)
        tally.add(len(part))


# Checksums


def _check_rest(
    stream: io.FileIO, unchecked: Mapping[StoredBox, Iterable[int]], tally: Tally
) -> None:
    """Reads and checks the chunks of which only parts were needed."""
    room = bytearray(CHUNK)
    for box, numbers in unchecked.items():
        for number in sorted(numbers):
            chunk = read_chunk(stream, box, number, room)
            check_chunk(box, number, chunk)
            tally.add(0)


def _check_fetched(box: StoredBox, numbers: Iterable[int], data: memoryview, base: int) -> None:
    """Checks chunks of a box in bytes of its file that begin at `base`."""
    for number in numbers:
        start, stop = chunk_ends(box, number)
        check_chunk(box, number, data[start - base : stop - base])
