"""Reading: how bytes of files get into a rank's tensors.

1. Local files are mapped, and the rows that a rank needs are copied. Bytes that are stored in the wanted order are read
   straight into the tensor. From an object store, each box is fetched from the first needed byte to the last.
2. Of the chunks that have a checksum, this rank checks its share (`verifying`).
3. `Reader` is a storage reader of torch.distributed.checkpoint; it works with torch's own planners, too, for tensors.
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
from shardmath_torch.groups import compat
from shardmath_torch.groups.dtypes import dtype_of, flat
from shardmath_torch.moves.observing.bars import TELL_BYTES, Progress, Tally

__all__ = ["Reader"]

_NOTHING = Checkpoint(Path(), {}, {}, {})
"""A checkpoint without tensors."""


class Reader(storage.StorageReader):
    """A storage reader for torch.distributed.checkpoint.load. It reads checkpoints that `save` wrote, checkpoints that
    torch wrote, and safetensors files as Hugging Face keeps them.

    `share` is (i, n) if this rank compares the i-th of n shares of torch's archives with the metadata; `verify` says
    whether checksums are checked. Raises CheckpointError or WeightsError for what is missing, damaged or wrong.
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
        self._opened_checkpoint: Checkpoint | None = None
        # The tensor's place in each box that is an archive of torch.save.
        self._strided: dict[StoredBox, Strided] = {}
        # Numbers the chunks that have a checksum.
        self._chunks = CheckpointChunks(_NOTHING)
        # The chunks whose checksums this rank checks: all that it reads, until `divide_checks` leaves a share of them.
        self._marks_to_check: Marks = np.zeros(0, bool)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Make `checkpoint_id` the path that is read from now on, unless it is None."""
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self, *args: Any) -> Metadata:
        """Open the checkpoint, check it as far as possible without data, and return its tensors' metadata for torch."""
        checkpoint = self._path
        if not isinstance(checkpoint, Checkpoint):
            checkpoint = open_checkpoint(os.fspath(checkpoint))
        wanted = checkpoint.tensors if self._names is None else self._names
        names = tuple(dict.fromkeys(wanted))
        checkpoint.check(names)
        self._strided = checkpoint.check_archives(names, self._share)
        self._opened_checkpoint = checkpoint
        self._chunks = CheckpointChunks(checkpoint if self._verify else _NOTHING)
        return Metadata({name: _describe(checkpoint[name]) for name in names})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing, as `read_metadata` has prepared everything that reading needs."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note which chunks this rank's `plan` reads, and return the plan unchanged. A chunk is a range of a file's
        bytes for which a checksum is stored."""
        spans: list[tuple[StoredBox, int, int]] = []
        for reads in self._list_reads(plan).values():
            spans += [(read.box, *read.span) for read in reads]
        self._marks_to_check = self._chunks.mark_touched(spans)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans of all ranks, unchanged."""
        return plans

    @property
    def touched(self) -> bytes | None:
        """Compressed flags to send to the other ranks: for each chunk (part of the data with a checksum), whether this
        rank reads it. None if there are no checksums to check."""
        return pack_marks(self._marks_to_check) if self._chunks.total else None

    def divide_checks(self, packed: Sequence[bytes], rank: int) -> None:
        """Record for which chunks (ranges of bytes) this rank verifies checksums: a share of the chunks that it reads.
        `packed` has each rank's flags of the chunks that the rank reads, and `rank` is this rank's index in `packed`.

        Other ranks check the rest.

        From an object store each rank checks all that it fetches: to fetch takes longer than to hash.
        """
        if isinstance(self._checkpoint.path, Path):
            self._marks_to_check = take_share(packed, rank, self._chunks.total)

    def read_data(self, plan: LoadPlan, planner: theirs.LoadPlanner) -> Future[None]:
        """Read the items of `plan` from the checkpoint's files into the tensors that `planner` gives, file by file;
        return a Future that is done."""
        by_file = self._list_reads(plan)
        self._tally.begin(sum(read.nbytes for reads in by_file.values() for read in reads))
        for file, reads in by_file.items():
            if isinstance(file, Remote):
                self._fetch(file, reads, planner)
            else:
                self._read(file, reads, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @property
    def _checkpoint(self) -> Checkpoint:
        assert self._opened_checkpoint is not None, "metadata are read before data"
        return self._opened_checkpoint

    def _list_reads(self, plan: LoadPlan) -> dict[Place, list[_Read]]:
        """The reads of the plan, by file: each with its stored box, and its place and strides in the file."""
        checkpoint = self._checkpoint
        boxes = _find_boxes(checkpoint, plan.items)
        self._describe_unchecked(boxes, plan.items)
        by_file: dict[Place, list[_Read]] = {}
        for box, item in zip(boxes, plan.items, strict=True):
            strided = self._strided.get(box)
            if strided is None:  # not an archive: the box's elements, row-major
                dtype = checkpoint[item.storage_index.fqn].dtype
                strided = Strided(box.start, dtype, box.sizes, strides(box.sizes))
            read = _Read(box, item, _locate_part(strided, item))
            by_file.setdefault(box.file, []).append(read)
        return by_file

    def _describe_unchecked(self, boxes: Sequence[StoredBox], items: Sequence[ReadItem]) -> None:
        """Add the boxes that this rank reads from archives of torch.save to `_strided`, unless it has checked them."""
        new: dict[tuple[str, StoredBox], None] = {}
        for box, item in zip(boxes, items, strict=True):
            if box.archive and box not in self._strided:
                new[item.storage_index.fqn, box] = None
        self._strided |= self._checkpoint.describe(new)

    def _read(self, file: Path, reads: Sequence[_Read], planner: theirs.LoadPlanner) -> None:
        """Read from a local file, which is mapped, so that only what is needed comes from the disk."""
        memory = _map(file)
        # Numbers of the chunks of each box that are still to be checked.
        unchecked: dict[StoredBox, set[int]] = {}
        for read in reads:
            unchecked[read.box] = set(self._chunks.list_marked(read.box, self._marks_to_check))
        with opened(file, buffering=0) as stream:
            assert isinstance(stream, io.FileIO), "an unbuffered file is a FileIO"
            for read in reads:
                target = planner.resolve_tensor(read.item)
                source = _view(memory, file, read.strided, 0)  # all of the file, from byte 0 on
                if _has_same_bytes(source, target):
                    _read_straight(stream, read, target, unchecked[read.box], self._tally)
                else:
                    self._tally.copy(target, source)
                planner.commit_tensor(read.item, target)
            _check_rest(stream, unchecked, self._tally)

    def _fetch(self, file: Remote, reads: Sequence[_Read], planner: theirs.LoadPlanner) -> None:
        """Fetch each box of a remote file from the first byte that is needed to the last, and copy from that."""
        by_box: dict[StoredBox, list[_Read]] = {}
        for read in reads:
            by_box.setdefault(read.box, []).append(read)
        for box, its_reads in by_box.items():
            chunk_numbers = self._chunks.list_marked(box, self._marks_to_check)
            begin, end = _span_of_reads(box, its_reads, chunk_numbers)
            data = self._fetch_part(file, begin, end)
            _check_fetched(box, chunk_numbers, memoryview(data), begin)
            memory = _as_memory(data)
            for read in its_reads:
                target = planner.resolve_tensor(read.item)
                self._tally.copy(target, _view(memory, file, read.strided, begin))
                planner.commit_tensor(read.item, target)

    def _fetch_part(self, file: Remote, begin: int, end: int) -> bytearray:
        """Fetch the bytes from `begin` to `end` of a remote file, in steps if progress is reported."""
        step = TELL_BYTES if self._tally.is_heard else max(1, end - begin)
        data = bytearray()
        for start in range(begin, end, step):
            data += file.read_part(start, min(end, start + step))
            # Reports progress if the last report is long ago; bytes count when they are copied.
            self._tally.add(0)
        return data

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is a path, or a URL that fsspec serves."""
        try:
            place(checkpoint_id)
        except CheckpointError:
            return False
        return True


def _describe(tensor: StoredTensor) -> TensorStorageMetadata:
    """A stored tensor's entry in torch's metadata."""
    chunks = []
    for box in tensor.pieces:
        offsets = torch.Size(box.offsets)
        sizes = torch.Size(box.sizes)
        chunks.append(ChunkStorageMetadata(offsets, sizes))
    properties = TensorProperties(dtype_of(tensor.dtype))
    return TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)


# Reads


class _Read(NamedTuple):
    """A part of a stored box, the item that asks for it, and the part's strides in the file."""

    box: StoredBox
    item: ReadItem
    strided: Strided

    @property
    def nbytes(self) -> int:
        """The size in bytes of the elements to read."""
        return math.prod(self.strided.shape) * dtype_of(self.strided.dtype).itemsize

    @property
    def stop(self) -> int:
        """The position in the file after the last byte to read."""
        dtype = dtype_of(self.strided.dtype)
        return self.strided.start + self.strided.extent * dtype.itemsize

    @property
    def span(self) -> tuple[int, int]:
        """The range of bytes to read, as (first, one past the last), counted from the first byte of the stored box
        (part of a tensor in the file)."""
        base = self.box.start
        return self.strided.start - base, self.stop - base


def _find_boxes(checkpoint: Checkpoint, items: Iterable[ReadItem]) -> list[StoredBox]:
    """The stored box that each item of a load plan reads from."""
    by_name: dict[str, dict[tuple[int, ...], StoredBox]] = {}
    boxes = []
    for item in items:
        index = item.storage_index
        if index.fqn not in by_name:
            stored = checkpoint[index.fqn].pieces
            # a box without elements may begin where another one does
            by_name[index.fqn] = {box.offsets: box for box in stored if box.has_elements}
        offsets = tuple(index.offset or ())
        boxes.append(by_name[index.fqn][offsets])
    return boxes


def _locate_part(strided: Strided, item: ReadItem) -> Strided:
    """The place and strides in the file of the part of a stored box that `item` reads; `strided` is the box's."""
    first = 0
    for offset, step in zip(item.storage_offsets, strided.strides, strict=True):
        first += offset * step
    dtype = dtype_of(strided.dtype)
    start = strided.start + first * dtype.itemsize
    return strided._replace(start=start, shape=tuple(item.lengths))


def _span_of_reads(
    box: StoredBox, reads: Iterable[_Read], numbers: Iterable[int]
) -> tuple[int, int]:
    """The first byte of the file that is read, or checked in chunks of these numbers, and one past the last."""
    spans = [(read.strided.start, read.stop) for read in reads]
    spans += [chunk_ends(box, number) for number in numbers]
    starts, stops = zip(*spans, strict=True)
    return min(starts), max(stops)


# Memory


def _map(file: Path) -> Tensor:
    """A file, mapped as bytes. Raises CheckpointError if it cannot be read."""
    try:
        return torch.from_file(str(file), shared=False, size=length_of(file), dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        what = f"{file}, a file of the checkpoint, cannot be read: {error}"
        raise CheckpointError(f"{what}; fetch it again, or make it readable") from error


def _as_memory(data: bytearray) -> Tensor:
    # frombuffer refuses a buffer of no bytes
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(data, dtype=torch.uint8)


def _view(memory: Tensor, file: Place, strided: Strided, base: int) -> Tensor:
    """A view of a tensor in `memory`, bytes of a file from `base` on; a copy if it is not aligned to its elements."""
    dtype = dtype_of(strided.dtype)
    start = strided.start - base
    stop = start + strided.extent * dtype.itemsize
    if stop > len(memory):
        what = f"{file} is cut short: it ends at byte {base + len(memory)}, a tensor in it at {base + stop}"
        raise CheckpointError(f"{what}; fetch it again")
    raw = memory[start:stop]
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    view = raw.view(dtype).as_strided(strided.shape, strided.strides)
    if strided.conj:
        view = view.conj()
    return compat.negate_view(view) if strided.neg else view


def _has_same_bytes(source: Tensor, target: Tensor) -> bool:
    """Whether the target tensor needs the stored bytes as they are, in their order."""
    if source.dtype != target.dtype:
        return False
    if source.is_conj() or source.is_neg():
        return False
    return source.is_contiguous() and target.is_contiguous() and target.is_cpu


def _read_straight(
    stream: io.FileIO, read: _Read, target: Tensor, unchecked: set[int], tally: Tally
) -> None:
    """Read bytes straight into the target, in half the time of copying from a mapped file.

    Unchecked chunks that are read whole are checked while they are in the cache, and removed from `unchecked`.
    """
    box = read.box
    # Counted from the first byte of the box, as its chunks are.
    position, _ = read.span
    raw = flat(target).view(torch.uint8).numpy()
    unfilled = memoryview(raw)  # type: ignore[arg-type]
    stream.seek(read.strided.start)
    while unfilled:
        number, offset_in_chunk = divmod(position, CHUNK)
        part = unfilled[: CHUNK - offset_in_chunk]
        read_into(stream, part)
        is_whole = offset_in_chunk == 0 and len(part) == min(CHUNK, box.length - position)
        if is_whole and number in unchecked:
            check_chunk(box, number, part)
            unchecked.discard(number)
        unfilled = unfilled[len(part) :]
        position += len(part)
        tally.add(len(part))


# Checksums


def _check_rest(
    stream: io.FileIO, unchecked: Mapping[StoredBox, Iterable[int]], tally: Tally
) -> None:
    """Read and check the chunks with checksums that were not read whole."""
    room = bytearray(CHUNK)
    for box, numbers in unchecked.items():
        for number in sorted(numbers):
            chunk = read_chunk(stream, box, number, room)
            check_chunk(box, number, chunk)
            tally.add(0)  # no byte is new, but progress may be due for a report


def _check_fetched(box: StoredBox, numbers: Iterable[int], data: memoryview, base: int) -> None:
    """Check the checksums of a box's chunks in `data`, bytes of its file from `base` on."""
    for number in numbers:
        start, stop = chunk_ends(box, number)
        check_chunk(box, number, data[start - base : stop - base])
