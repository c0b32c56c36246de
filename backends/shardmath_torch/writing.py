"""Writing: how the boxes of a save get onto the disk, all at once or not at all.

1. Every rank writes safetensors files (`archive`) under names of this save alone, with an ending that no reader looks
   for. When all have, they are renamed; then `.metadata` is replaced, from when on the new save counts; then the index.
   What the former save left is removed last (`Writer.clear`).
2. A file holds a tensor once, by its name, which is how torch's HuggingFaceStorageReader finds it: the second box of a
   tensor on a rank goes into the rank's second file. What is in more than MOST_FILES boxes is numbered in the last file
   (`w#1`, `w#2`), for which that reader raises; others find boxes by `.metadata` and index.
3. `Writer` is what torch.distributed.checkpoint calls a storage writer; it works with other planners, too, as long as
   they save tensors.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import planner as theirs
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.futures import Future

from shardmath_torch import archive, compat
from shardmath_torch.archive import CheckpointError, unused
from shardmath_torch.stored import (
    BLOBS,
    DATA,
    DIGITS,
    FILE,
    INDEX,
    METADATA,
    OURS,
    UNFINISHED,
    Checkpoint,
    Piece,
    Saved,
    to_json,
)
from shardmath_torch.weights import Progress

__all__ = ["MOST_FILES", "Writer"]

MOST_FILES = 16
"""Of a rank, however many boxes a tensor has."""


class Writer(storage.StorageWriter):
    """A folder of safetensors files, torch's `.metadata` and an index. For torch.distributed.checkpoint.save.

    Raises CheckpointError where the folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
        self._path, self._save, self._progress = Path(path), OURS, progress

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another folder, if given."""
        self._path = self._path if checkpoint_id is None else Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder."""
        if any(item.type == WriteItemType.BYTE_IO for item in plan.items):
            raise CheckpointError(
                "objects are not written; save bytes with SavePlanner, or objects with torch's writer"
            )
        with _told(self._path, BEFORE):
            if not self._path.is_dir():
                self._path.mkdir(parents=True, exist_ok=True)
                _sync(self._path.parent)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """One name for all files of this save, and each rank's number in it."""
        save = uuid.uuid4().hex[:DIGITS]
        names = [f"{OURS}{save}-{i:05d}-of-{len(plans):05d}" for i in range(len(plans))]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: theirs.SavePlanner) -> Future[list[storage.WriteResult]]:
        """Writes this rank's files, all of them unfinished."""
        self._save = plan.storage_data[: len(OURS) + DIGITS]
        out: list[storage.WriteResult] = []
        for i, items in enumerate(_files(plan.items)):
            name = plan.storage_data + (f"-{i}" if i else "") + DATA
            with _told(self._path / name, BEFORE):
                out += _written(self._path / (name + UNFINISHED), name, items, planner, self._progress)
        done: Future[list[storage.WriteResult]] = Future()
        done.set_result(out)
        return done

    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Makes the save the one that is found."""
        wrote = [result for each in results for result in each]
        with _told(self._path, BEFORE):
            for name in sorted({one.storage_data.file for one in wrote}):
                os.replace(self._path / (name + UNFINISHED), self._path / name)
            _sync(self._path)
            index = _described(self._path, metadata, wrote)
            text = pickle.dumps(replace(metadata, storage_data={one.index: one.storage_data.info for one in wrote}))
            _replace(self._path / METADATA, text)
        with _told(self._path, AFTER):
            _replace(self._path / INDEX, to_json(index, text).encode())

    def clear(self, share: tuple[int, int] = (0, 1)) -> None:
        """Removes data files that earlier saves of ours left, finished or not: every n-th, from the i-th on, of (i, n).

        For every rank, after a save.
        """
        with _told(self._path, AFTER):
            files = [f for f in self._path.glob(f"{OURS}*") if FILE.fullmatch(f.name) and f.is_file()]
            old = [file for file in files if not file.name.startswith(self._save)]
            for file in sorted(old)[share[0] :: share[1]]:
                file.unlink(missing_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        """What torch asks for."""
        return StorageMeta()


class _Place(NamedTuple):
    """Where an item went; `info` as torch has it."""

    file: str
    start: int
    info: Any


BEFORE, AFTER = "what was saved there before is as it was", "the new save is whole, and the one that counts"


@contextlib.contextmanager
def _told(path: Path, state: str) -> Iterator[None]:
    """Errors of the system as ours, naming the path, and in what state the folder is."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or path} cannot be written: {error.strerror or error}"
        raise CheckpointError(f"{what}; {state}") from error


def _files(items: Sequence[WriteItem]) -> list[dict[str, WriteItem]]:
    """The items, file by file, each by its name there."""
    out: list[dict[str, WriteItem]] = []
    seen: Counter[str] = Counter()
    taken = {item.index.fqn for item in items}
    for item in items:
        name, at = item.index.fqn, seen[item.index.fqn]
        seen[name] += 1
        if at >= MOST_FILES:
            name, at = unused(f"{name}#{at - MOST_FILES + 1}", taken), MOST_FILES - 1
            taken.add(name)
        while at >= len(out):
            out.append({})
        out[at][name] = item
    return out


def _written(
    file: Path, name: str, items: Mapping[str, WriteItem], planner: theirs.SavePlanner, progress: Progress | None
) -> Iterator[storage.WriteResult]:
    tensors = {key: _box(key, item, planner.resolve_data(item)) for key, item in items.items()}
    places = archive.write(file, tensors, progress=progress)
    for key, item in items.items():
        at = places[key]
        info = compat.StorageInfo(name, at.archive, at.length)
        yield storage.WriteResult(item.index, tensors[key][1].nbytes, _Place(name, at.start, info))


def _box(key: str, item: WriteItem, data: object) -> tuple[tuple[int, ...] | None, Tensor]:
    """Where a box begins, None for what has no name of its own; and its data on the CPU, alone in their storage."""
    assert isinstance(data, Tensor) and item.tensor_data is not None, "objects are refused earlier"
    here = data.detach().as_subclass(Tensor).cpu().contiguous()
    if here.shape != item.tensor_data.chunk.sizes:
        raise CheckpointError(f"{item.index.fqn!r}: {list(here.shape)} given, {item.tensor_data.chunk} planned")
    offset = tuple(item.index.offset or (0,) * here.ndim)
    if here.untyped_storage().nbytes() != here.nbytes:
        here = here.clone(memory_format=torch.contiguous_format)
    return offset if key == item.index.fqn else None, here


def _described(path: Path, metadata: Metadata, wrote: Iterable[storage.WriteResult]) -> Checkpoint:
    """The checkpoint that was written."""
    places: dict[str, dict[tuple[int, ...], _Place]] = {}
    for one in wrote:
        places.setdefault(one.index.fqn, {})[tuple(one.index.offset or ())] = one.storage_data
    tensors = {
        name: _tensor(path, md, places[name])
        for name, md in metadata.state_dict_metadata.items()
        if isinstance(md, TensorStorageMetadata)
    }
    files = sorted({piece.file for saved in tensors.values() for piece in saved.pieces})
    blobs = (metadata.planner_data or {}).get(BLOBS, {})
    return Checkpoint(path, tensors, blobs, {file: file.stat().st_size for file in files})


def _tensor(path: Path, md: TensorStorageMetadata, places: Mapping[tuple[int, ...], _Place]) -> Saved:
    pieces = []
    for chunk in md.chunks:
        place, sizes = places[tuple(chunk.offsets)], tuple(chunk.sizes)
        length = md.properties.dtype.itemsize * chunk.sizes.numel()
        pieces.append(Piece(tuple(chunk.offsets), sizes, path / place.file, place.start, length))
    return Saved(tuple(md.size), str(md.properties.dtype).removeprefix("torch."), tuple(pieces))


def _replace(file: Path, text: bytes) -> None:
    """The file with this text, at once, on disk when this returns."""
    draft = file.with_name(file.name + UNFINISHED)
    with draft.open("wb") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, file)
    _sync(file.parent)


def _sync(folder: Path) -> None:
    """The folder's names are on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
