"""Writing: how the boxes of a save get onto the disk, all at once or not at all.

1. Every rank writes safetensors files (`archive`) under names of this save alone, with an ending that no reader looks
   for. When all have, they are renamed; then `.metadata` is replaced, from when on the new save counts; then the copy
   of the index. What the former save left is removed last (`Writer.clear`), and what a failed one wrote at once
   (`Writer.abandon`). Any number of saves may go on at once: the last to replace `.metadata` counts (`claims`).
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import planner as theirs
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.futures import Future

from shardmath_torch import compat
from shardmath_torch.checkpoints.claims import (
    DATA,
    INDEX,
    METADATA,
    OURS,
    UNFINISHED,
    Claim,
    claim,
    collect,
    count,
    counted,
    withdraw,
)
from shardmath_torch.checkpoints.stored import BLOBS, Checkpoint, Piece, Saved, to_json
from shardmath_torch.files.places import (
    CheckpointError,
    Place,
    Remote,
    content_of,
    place,
    put,
    sizes_of,
    sync,
)
from shardmath_torch.files.sealed import DIGITS, Sealed, seal, unseal
from shardmath_torch.safetensors import archive
from shardmath_torch.safetensors.archive import unused
from shardmath_torch.safetensors.slices import Progress

__all__ = ["MOST_FILES", "Writer"]

MOST_FILES = 16
"""Of a rank, however many boxes a tensor has."""


class Writer(storage.StorageWriter):
    """A folder of safetensors files, torch's `.metadata` and an index. For torch.distributed.checkpoint.save.

    `path` may be a URL that fsspec serves. Raises CheckpointError where the folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
        self._folder, self._progress = _readable(path), progress
        self._claim: Claim | None = None
        self._drafts: list[Place] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Another folder, if given."""
        self._folder = self._folder if checkpoint_id is None else _readable(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Makes the folder."""
        self.abandon()
        if any(item.type == WriteItemType.BYTE_IO for item in plan.items):
            raise CheckpointError(
                "objects are not written; save bytes with SavePlanner, or objects with torch's writer"
            )
        with _told(self._folder, BEFORE):
            if not self._folder.is_dir():
                self._folder.mkdir(parents=True, exist_ok=True)
                sync(self._folder.parent)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """One name for all files of this save, and each rank's number in it; the save begins."""
        with _told(self._folder, BEFORE):
            counted(self._folder)  # what cannot be read could not be replaced
            self._claim = claim(self._folder, uuid.uuid4().hex[:DIGITS])
        names = [f"{OURS}{self._claim.save}-{i:05d}-of-{len(plans):05d}" for i in range(len(plans))]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(
        self, plan: SavePlan, planner: theirs.SavePlanner
    ) -> Future[list[storage.WriteResult]]:
        """Writes this rank's files, all of them unfinished."""
        out: list[storage.WriteResult] = []
        for i, items in enumerate(_files(plan.items)):
            name = plan.storage_data + (f"-{i}" if i else "") + DATA
            draft = self._folder / _draft(self._folder, name)
            self._drafts.append(draft)
            with _told(self._folder / name, BEFORE):
                out += _written(draft, name, items, planner, self._progress)
        done: Future[list[storage.WriteResult]] = Future()
        done.set_result(out)
        return done

    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Makes the save the one that is found."""
        held = self._claim
        assert held is not None, "a save has begun"
        wrote = [result for each in results for result in each]
        with _told(self._folder, lambda: _state(self._folder, held.save)):
            for name in sorted({one.storage_data.file for one in wrote}):
                _rename(self._folder, name)
            sync(self._folder)
            index = to_json(_described(self._folder, metadata, wrote), held.save)
            told = replace(
                metadata, storage_data={one.index: one.storage_data.info for one in wrote}
            )
            count(held, seal(Sealed(pickle.dumps(told), index, held.save)))
        self._claim, self._drafts = None, []
        with _told(self._folder, AFTER):
            held.release()
            _copy(self._folder, index, held.save)

    def abandon(self) -> None:
        """Removes what a save that failed has written, unless it counts. For every rank.

        A rank removes its own drafts: without them the save can no longer count, whatever the others do. The files of
        all ranks are removed by the one that knows whether it counts, which is the one that would make it so.
        """
        for draft in self._drafts:
            if draft.name.endswith(UNFINISHED):
                with contextlib.suppress(OSError):
                    draft.unlink(missing_ok=True)
        held, self._claim, self._drafts = self._claim, None, []
        if held is not None:
            withdraw(held)

    def clear(self, share: tuple[int, int] = (0, 1)) -> None:
        """Removes what earlier saves of ours left, finished or not, and saves that are going on do not need: of (i, n),
        the i-th of n shares of it. For every rank, after a save.
        """
        with _told(self._folder, AFTER):
            collect(self._folder, share)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path, or a URL that is served."""
        try:
            return _readable(checkpoint_id) is not None
        except CheckpointError:
            return False

    def storage_meta(self) -> StorageMeta:
        """What torch asks for."""
        return StorageMeta()


def _readable(path: str | os.PathLike[str]) -> Place:
    """The place. Raises CheckpointError also for one that torch could write to and not map: it wants UTF-8."""
    found = place(path)
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"the path {text!r} has bytes that are not UTF-8, and what is saved there could not be loaded"
        raise CheckpointError(f"{what}; give a folder whose name is text") from error
    return found


def _copy(folder: Place, index: str, save: str) -> None:
    """Writes the copy of the index that counts, which may be another save's by now, whose own copy was before ours.

    The copy is looked at again after it was written, by whoever wrote it: so the last to write it wrote what counts.
    """
    written, current = None, Sealed(b"", index, save)
    while (counts := counted(folder)) not in (None, written):
        if counts != current.save:
            current = _sealed(folder) or current
        written = current.save if _copied(folder, current, save) else None


def _copied(folder: Place, current: Sealed, save: str) -> bool:
    """Whether the copy is written: where this save no longer counts, another may clear its draft away."""
    try:
        put(folder / INDEX, folder / f"{OURS}{save}.json{UNFINISHED}", current.json.encode())
    except FileNotFoundError:
        if isinstance(folder, Remote) or counted(folder) == save:
            raise
        return False
    return True


def _sealed(folder: Place) -> Sealed | None:
    """What the save of ours that counts has written; None if that is none of ours."""
    file = folder / METADATA
    try:
        return unseal(content_of(file), file)
    except FileNotFoundError:
        return None


def _draft(folder: Place, name: str) -> str:
    """What a data file is called until all are written. A service has no file before it is whole, and renames none."""
    return name if isinstance(folder, Remote) else name + UNFINISHED


def _rename(folder: Place, name: str) -> None:
    if not isinstance(folder, Remote):
        os.replace(folder / (name + UNFINISHED), folder / name)


class _At(NamedTuple):
    """Where an item went; `info` as torch has it."""

    file: str
    start: int
    info: Any
    sums: str


BEFORE, AFTER = (
    "what was saved there before is as it was",
    "the new save is whole, and the one that counts",
)
UNKNOWN = "whether the new save counts cannot be read either, a load tells when it can"


def _state(folder: Place, save: str) -> str:
    """Which save counts: the step that failed may be after the one that made this save count."""
    try:
        return AFTER if counted(folder) == save else BEFORE
    except OSError:
        return UNKNOWN


@contextlib.contextmanager
def _told(path: Place, state: str | Callable[[], str]) -> Iterator[None]:
    """Errors of the system as ours, naming the path, and in what state the folder is."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or path} cannot be written: {error.strerror or error}"
        raise CheckpointError(f"{what}; {state if isinstance(state, str) else state()}") from error


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
    file: Place,
    name: str,
    items: Mapping[str, WriteItem],
    planner: theirs.SavePlanner,
    progress: Progress | None,
) -> Iterator[storage.WriteResult]:
    tensors = {key: _box(key, item, planner.resolve_data(item)) for key, item in items.items()}
    places = archive.write(file, tensors, progress=progress)
    for key, item in items.items():
        at = places[key]
        info = compat.StorageInfo(name, at.archive, at.length)
        yield storage.WriteResult(
            item.index, tensors[key][1].nbytes, _At(name, at.start, info, at.sums)
        )


def _box(key: str, item: WriteItem, data: object) -> tuple[tuple[int, ...] | None, Tensor]:
    """Where a box begins, None for what has no name of its own; and its data on the CPU, alone in their storage."""
    assert isinstance(data, Tensor) and item.tensor_data is not None, "objects are refused earlier"
    here = data.detach().as_subclass(Tensor).cpu().contiguous()
    if here.shape != item.tensor_data.chunk.sizes:
        raise CheckpointError(
            f"{item.index.fqn!r}: {list(here.shape)} given, {item.tensor_data.chunk} planned"
        )
    offset = tuple(item.index.offset or (0,) * here.ndim)
    if here.untyped_storage().nbytes() != here.nbytes:
        here = here.clone(memory_format=torch.contiguous_format)
    return offset if key == item.index.fqn else None, here


def _described(path: Place, metadata: Metadata, wrote: Iterable[storage.WriteResult]) -> Checkpoint:
    """The checkpoint that was written."""
    places: dict[str, dict[tuple[int, ...], _At]] = {}
    for one in wrote:
        places.setdefault(one.index.fqn, {})[tuple(one.index.offset or ())] = one.storage_data
    tensors = {
        name: _tensor(path, md, places[name])
        for name, md in metadata.state_dict_metadata.items()
        if isinstance(md, TensorStorageMetadata)
    }
    files = sorted({piece.file for saved in tensors.values() for piece in saved.pieces})
    blobs = (metadata.planner_data or {}).get(BLOBS, {})
    size = sizes_of(files)
    return Checkpoint(path, tensors, blobs, {file: size(file) for file in files})


def _tensor(path: Place, md: TensorStorageMetadata, places: Mapping[tuple[int, ...], _At]) -> Saved:
    pieces = []
    for chunk in md.chunks:
        at, sizes = places[tuple(chunk.offsets)], tuple(chunk.sizes)
        length = md.properties.dtype.itemsize * chunk.sizes.numel()
        pieces.append(
            Piece(tuple(chunk.offsets), sizes, path / at.file, at.start, length, sums=at.sums)
        )
    return Saved(tuple(md.size), str(md.properties.dtype).removeprefix("torch."), tuple(pieces))
