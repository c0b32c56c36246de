"""Loading: which bytes of which files are a rank's, and how they get into its tensors.

1. Every rank finds out by itself: its boxes, of any layout, against the boxes that are stored. No rank plans for
   others, and nothing is sent.
2. Files are mapped, and of a stored box those rows are copied that a rank needs.
3. `LoadPlanner` and `Reader` are what torch.distributed.checkpoint calls planner and storage reader; each works with
   torch's own counterpart, for tensors.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint import planner as theirs
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from shardmath.algebra.mesh import strides
from shardmath.layouts.layout import Layout
from shardmath.layouts.store import local_tensors
from shardmath_torch import compat
from shardmath_torch.checkpoints.stored import Checkpoint, Piece, open_checkpoint
from shardmath_torch.checkpoints.verifying import Chunks, check, chunk, fill, mine, packed
from shardmath_torch.dtypes import dtype_of, flat
from shardmath_torch.files.checksums import CHUNK
from shardmath_torch.files.json_text import shown
from shardmath_torch.files.places import CheckpointError, Place, Remote, length_of, opened, place
from shardmath_torch.safetensors.slices import Progress, Slices, boxes
from shardmath_torch.safetensors.strided import Strided

__all__ = ["LoadPlanner", "Reader", "check_keys", "local_layouts"]

Windows = Layout | tuple[Layout, ...]


def local_layouts(layouts: Mapping[str, Windows], rank: int) -> Iterator[tuple[str, str, Layout]]:
    """(name, local buffer key, layout) of all that the rank holds."""
    for name, one in layouts.items():
        for key, layout in local_tensors(name, one if isinstance(one, tuple) else (one,)):
            if rank in layout.mesh:
                yield name, key, layout


def check_keys(layouts: Mapping[str, Windows]) -> None:
    """Raises CheckpointError where a window of one tensor is called like another tensor."""
    first: dict[str, str] = {}
    for name, one in layouts.items():
        for key, _ in local_tensors(name, one if isinstance(one, tuple) else (one,)):
            other = first.setdefault(key, name)
            if other != name:
                what = f"the local tensor {key!r} is of tensor {other!r} and of {name!r}"
                fix = "load one under another name, with names={wanted: stored}, or in another call"
                raise CheckpointError(f"{what}, one of them in windows; {fix}")


class LoadPlanner(theirs.LoadPlanner):
    """Which stored boxes this rank reads for tensors under these layouts. For torch.distributed.checkpoint.load.

    The state dict holds this rank's local tensors, by local buffer key; they are filled in place. `names` says under
    which name a tensor is stored, where that differs. Raises CheckpointError where the checkpoint has a tensor with
    another shape or type, or lacks it.
    """

    def __init__(
        self,
        layouts: Mapping[str, Windows],
        *,
        names: Mapping[str, str] | None = None,
        rank: int | None = None,
    ) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._metadata: Mapping[str, object] = {}
        check_keys(layouts)
        self._layouts, self._names = layouts, names or {}
        self._rank = compat.rank_or_0() if rank is None else rank

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Takes the local tensors, and what is stored."""
        assert metadata is not None, "a checkpoint has metadata"
        self._tensors, self._metadata = state_dict, metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """The stored boxes that have anything of this rank's, and what of them."""
        items: list[ReadItem] = []
        for name, each in itertools.groupby(
            local_layouts(self._layouts, self._rank), key=lambda one: one[0]
        ):
            source = self._names.get(name, name)
            stored = self._stored(source)
            table = _table(source, stored)
            for _, key, layout in each:
                _check_alike(name, layout, stored)
                items += _meeting(key, layout, self._rank, table)
        return LoadPlan(items)

    def _stored(self, name: str) -> TensorStorageMetadata:
        found = self._metadata.get(name)
        if not isinstance(found, TensorStorageMetadata):
            raise CheckpointError(
                f"the checkpoint has no tensor {name!r} among its {len(self._metadata)} names"
            )
        return found

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The same: ranks need not know of each other."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The same."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Never asked for."""
        raise CheckpointError(
            f"{read_item.dest_index.fqn!r} is no tensor; load it with the layout None"
        )

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The cells that an item goes to."""
        at = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._tensors[read_item.dest_index.fqn].detach()[
            tuple(slice(lo, lo + n) for lo, n in at)
        ]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: it is the cells themselves."""


def _check_alike(name: str, layout: Layout, stored: TensorStorageMetadata) -> None:
    dtype = str(stored.properties.dtype).removeprefix("torch.")
    if (layout.shape, layout.dtype) != (tuple(stored.size), dtype):
        here = f"{dtype}{shown(list(stored.size))}"
        what = f"tensor {name!r} is stored as {here}, its layout says {layout}"
        raise CheckpointError(f"{what}; make the layout from `open_checkpoint(path).shapes`")
    if layout.partial:
        what = f"tensor {name!r} is Partial in {layout}, a checkpoint holds whole values"
        raise CheckpointError(f"{what}; load it divided or replicated, and move it then")


class _Table(NamedTuple):
    """The stored boxes of a tensor that have elements: where each begins and ends."""

    name: str
    lo: NDArray[np.int64]
    hi: NDArray[np.int64]


def _table(name: str, stored: TensorStorageMetadata) -> _Table:
    chunks = [(chunk.offsets, chunk.sizes) for chunk in stored.chunks if 0 not in chunk.sizes]
    boxes = np.array(chunks, np.int64).reshape(len(chunks), 2, len(stored.size))
    return _Table(name, boxes[:, 0], boxes.sum(axis=1))


def _meeting(key: str, layout: Layout, rank: int, table: _Table) -> Iterator[ReadItem]:
    """What of the stored boxes the rank holds under the layout."""
    name, lo, hi = table
    for local, whole in boxes(layout, rank):
        start, stop, here = (np.array(ends, np.int64) for ends in _ends(local, whole))
        first, last = np.maximum(lo, start), np.minimum(hi, stop)
        met = (first < last).all(axis=1)
        each = (x[met].tolist() for x in (lo, first - start + here, first - lo, last - first))
        for origin, at, begin, sizes in zip(*each, strict=True):
            into, source = MetadataIndex(key, at), MetadataIndex(name, origin)
            yield ReadItem(
                LoadItemType.TENSOR,
                into,
                torch.Size(at),
                source,
                torch.Size(begin),
                torch.Size(sizes),
            )


def _ends(local: Slices, whole: Slices) -> tuple[list[int], list[int], list[int]]:
    """Where a box begins and ends in the tensor, and begins in the local tensor."""
    return [s.start for s in whole], [s.stop for s in whole], [s.start for s in local]


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
        self._path, self._names, self._share, self._progress = path, names, share, progress
        self._found: Checkpoint | None = None
        self._strided: dict[Piece, Strided] = {}
        self._verify, self._chunks, self._marks = verify, Chunks(NOTHING), np.zeros(0, bool)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another checkpoint, if given."""
        self._path = self._path if checkpoint_id is None else checkpoint_id

    def read_metadata(self, *args: Any) -> Metadata:
        """What is stored, proved as far as that is possible without data."""
        found = (
            self._path
            if isinstance(self._path, Checkpoint)
            else open_checkpoint(os.fspath(self._path))
        )
        names = tuple(dict.fromkeys(found.tensors if self._names is None else self._names))
        found.check(names)
        self._strided = found.check_archives(names, self._share)
        self._found = found
        self._chunks = Chunks(found if self._verify else NOTHING)
        return Metadata({name: _metadata(found, name) for name in names})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The same; from now on it is known which checksums are looked at."""
        assert self._found is not None, "metadata are read before data"
        reads = (
            (r.piece, *r.span) for each in self._reads(self._found, plan).values() for r in each
        )
        self._marks = self._chunks.touched(reads)
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The same."""
        return plans

    @property
    def touched(self) -> bytes | None:
        """What to tell the others of the checksums that this rank could look at; None where there are none."""
        return packed(self._marks) if self._chunks.total else None

    def share(self, said: Sequence[bytes], rank: int) -> None:
        """Takes what all ranks have said, in order, and leaves this one its part of the checksums.

        Of the files of a service each rank checks all that it fetches: to fetch takes longer than to hash.
        """
        assert self._found is not None, "metadata are read before data"
        if isinstance(self._found.path, Path):
            self._marks = mine(said, rank, self._chunks.total)

    def read_data(self, plan: LoadPlan, planner: theirs.LoadPlanner) -> Future[None]:
        """Copies what the plan's items say, file by file."""
        found = self._found
        assert found is not None, "metadata are read before data"
        for file, reads in self._reads(found, plan).items():
            read = self._fetch if isinstance(file, Remote) else self._read
            read(file, reads, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _reads(self, found: Checkpoint, plan: LoadPlan) -> dict[Place, list[_Read]]:
        """What is read, by file."""
        names = dict.fromkeys(item.storage_index.fqn for item in plan.items)
        pieces = {name: {p.offsets: p for p in found[name].pieces if p.nonempty} for name in names}
        wanted = [
            (pieces[i.storage_index.fqn][tuple(i.storage_index.offset or ())], i)
            for i in plan.items
        ]
        new = dict.fromkeys(
            (i.storage_index.fqn, p) for p, i in wanted if p.archive and p not in self._strided
        )
        self._strided |= found.described(new)
        out: dict[Place, list[_Read]] = {}
        for piece, item in wanted:
            dtype = found[item.storage_index.fqn].dtype
            whole = self._strided.get(piece) or Strided(
                piece.start, dtype, piece.sizes, strides(piece.sizes)
            )
            out.setdefault(piece.file, []).append(_Read(piece, item, _part(whole, item)))
        return out

    def _read(self, file: Place, reads: Sequence[_Read], planner: theirs.LoadPlanner) -> None:
        """A file of the system is mapped: what is not touched is not read."""
        assert isinstance(file, Path), "what is remote is fetched"
        memory = _mapped(file)
        left = {r.piece: set(self._chunks.numbers(r.piece, self._marks)) for r in reads}
        with opened(file, buffering=0) as stream:
            assert isinstance(stream, io.FileIO), "what is not buffered is the file itself"
            for read in reads:
                target = planner.resolve_tensor(read.item)
                source = _view(memory, file, read.at, 0)
                if _lies_so(source, target):
                    _straight(stream, read, target, left[read.piece])
                else:
                    target.copy_(source)
                self._done(read, target, planner)
            room = bytearray(CHUNK)
            for piece, numbers in left.items():
                for number in sorted(numbers):
                    check(piece, number, chunk(stream, piece, number, room))

    def _fetch(self, file: Place, reads: Sequence[_Read], planner: theirs.LoadPlanner) -> None:
        """Of a file of a service, as much of each box as is between the first and the last byte that is read."""
        assert isinstance(file, Remote), "other files are mapped"
        by_piece: dict[Piece, list[_Read]] = {}
        for read in reads:
            by_piece.setdefault(read.piece, []).append(read)
        for piece, each in by_piece.items():
            numbers = self._chunks.numbers(piece, self._marks)
            begin = min(
                [read.at.start for read in each] + [piece.start + n * CHUNK for n in numbers]
            )
            end = max(
                [read.end for read in each]
                + [min(piece.stop, piece.start + (n + 1) * CHUNK) for n in numbers]
            )
            data = bytearray(file.read_part(begin, end))
            for number in numbers:
                first = piece.start + number * CHUNK - begin
                check(
                    piece, number, memoryview(data)[first : min(first + CHUNK, piece.stop - begin)]
                )
            memory = (
                torch.frombuffer(data, dtype=torch.uint8)
                if data
                else torch.empty(0, dtype=torch.uint8)
            )
            for read in each:
                target = planner.resolve_tensor(read.item)
                target.copy_(_view(memory, file, read.at, begin))
                self._done(read, target, planner)

    def _done(self, read: _Read, target: Tensor, planner: theirs.LoadPlanner) -> None:
        planner.commit_tensor(read.item, target)
        if self._progress:
            self._progress(target.nbytes)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, or a URL that is served."""
        try:
            return place(checkpoint_id) is not None
        except CheckpointError:
            return False


NOTHING = Checkpoint(Path(), {}, {}, {})
"""A checkpoint of nothing."""


class _Read(NamedTuple):
    """A part of a stored box, the item that asks for it, and where it lies in the file."""

    piece: Piece
    item: ReadItem
    at: Strided

    @property
    def end(self) -> int:
        """One past its last byte in the file."""
        return self.at.start + self.at.extent * dtype_of(self.at.dtype).itemsize

    @property
    def span(self) -> tuple[int, int]:
        """From which byte of the box to which."""
        return self.at.start - self.piece.start, self.end - self.piece.start


def _part(whole: Strided, item: ReadItem) -> Strided:
    """What the item says of a stored box."""
    first = sum(at * step for at, step in zip(item.storage_offsets, whole.strides, strict=True))
    start = whole.start + first * dtype_of(whole.dtype).itemsize
    return whole._replace(start=start, shape=tuple(item.lengths))


def _view(memory: Tensor, file: Place, found: Strided, base: int) -> Tensor:
    """A tensor in bytes of a file that begin at `base`; a copy where it begins between two elements."""
    dtype = dtype_of(found.dtype)
    start, end = found.start - base, found.start - base + found.extent * dtype.itemsize
    if end > len(memory):
        raise CheckpointError(
            f"{file} ends at byte {base + len(memory)}, a tensor in it at {base + end}; fetch it again"
        )
    taken = memory[start:end]
    taken = taken if taken.data_ptr() % dtype.itemsize == 0 else taken.clone()
    view = taken.view(dtype).as_strided(found.shape, found.strides)
    view = view.conj() if found.conj else view
    return torch._neg_view(view) if found.neg else view


def _metadata(found: Checkpoint, name: str) -> TensorStorageMetadata:
    saved = found[name]
    chunks = [
        ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in saved.pieces
    ]
    return TensorStorageMetadata(
        TensorProperties(dtype_of(saved.dtype)), torch.Size(saved.shape), chunks
    )


def _mapped(file: Path) -> Tensor:
    """The bytes of a file; what is not touched is not read."""
    try:
        return torch.from_file(str(file), shared=False, size=length_of(file), dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}; it belongs to the checkpoint"
        ) from error


def _lies_so(source: Tensor, target: Tensor) -> bool:
    """Whether the same bytes in the same order are wanted as are stored."""
    if source.is_conj() or source.is_neg() or source.dtype != target.dtype:
        return False
    return source.is_contiguous() and target.is_contiguous() and target.is_cpu


def _straight(stream: io.FileIO, read: _Read, target: Tensor, numbers: set[int]) -> None:
    """Reads bytes as they lie into the target, which takes half the time of copying from a mapped file.

    Of the chunks of these numbers, those that are read whole are checked while the cache has them, and left out then.
    """
    piece, at = read.piece, read.span[0]
    left = memoryview(flat(target).view(torch.uint8).numpy())  # type: ignore[arg-type]
    stream.seek(read.at.start)
    while left:
        number, within = divmod(at, CHUNK)
        part = left[: CHUNK - within]
        fill(stream, part)
        whole = within == 0 and len(part) == min(CHUNK, piece.length - at)
        if whole and number in numbers:
            check(piece, number, part)
            numbers.discard(number)
        left, at = left[len(part) :], at + len(part)
