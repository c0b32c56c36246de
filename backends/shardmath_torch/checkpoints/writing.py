"""Writing: how the boxes of a save get onto the disk, all at once or not at all.

1. Every rank writes safetensors files (`archive`) under names that only this save uses, with an ending that no reader
   looks for. Once all ranks have written, the files are renamed; then `.metadata` is replaced, which makes the new save
   count; then the copy of the index. Files of earlier saves are removed last (`Writer.clear`), files of a failed save
   at once (`Writer.abandon`). Saves may run concurrently: the last to replace `.metadata` counts (`commits`).
2. A file holds a tensor once, by its name, which is how torch's HuggingFaceStorageReader finds it: the second box of a
   tensor on a rank goes into the rank's second file. From box MOST_FILES on, boxes are numbered in the last file
   (`w#1`, `w#2`), for which that reader raises; others find boxes by `.metadata` and index.
3. `Writer` is a storage writer of torch.distributed.checkpoint; it works with other planners, too, as long as they save
   tensors.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.checkpoint import planner as theirs
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.futures import Future

from shardmath_torch.checkpoints.commits import (
    DATA,
    INDEX,
    METADATA,
    OURS,
    UNFINISHED,
    Claim,
    claim,
    find_counting,
    make_count,
    name_draft,
    remove_leftovers,
    withdraw,
)
from shardmath_torch.checkpoints.files.places import (
    CheckpointError,
    Place,
    Remote,
    content_of,
    make_folder,
    place,
    put,
    sizes_of,
    sync,
)
from shardmath_torch.checkpoints.files.sealed import DIGITS, Sealed, seal, unseal
from shardmath_torch.checkpoints.files.unpickled import write_metadata
from shardmath_torch.checkpoints.index import to_json
from shardmath_torch.checkpoints.opening import BLOBS
from shardmath_torch.checkpoints.safetensors import archive
from shardmath_torch.checkpoints.safetensors.archive import find_unused
from shardmath_torch.checkpoints.saving import count_bytes
from shardmath_torch.checkpoints.stored import Checkpoint, StoredBox, StoredTensor
from shardmath_torch.groups import compat
from shardmath_torch.moves.observing.bars import Progress, Tally

__all__ = ["MOST_FILES", "Writer"]

MOST_FILES = 16
"""The most data files of a rank, however many boxes a tensor has."""


class Writer(storage.StorageWriter):
    """A storage writer for torch.distributed.checkpoint.save, which writes safetensors files, torch's `.metadata`, and
    shardmath.json, an index of the stored boxes.

    `path` may be a URL that fsspec serves. Raises CheckpointError if the folder cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, progress: Progress | None = None) -> None:
        self._folder = _place_to_write(path)
        self._tally = Tally(progress)
        self._claim: Claim | None = None
        self._drafts: list[Place] = []
        self._save = ""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Make `checkpoint_id` the folder that is written to from now on, unless it is None."""
        if checkpoint_id is not None:
            self._folder = _place_to_write(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing, as `prepare_local_plan` makes the folder."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Remove what a failed save left, make the folder, and return `plan` unchanged. Raises CheckpointError if the
        plan has pickled objects."""
        self.abandon()
        objects = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if objects:
            what = f"{objects[0]!r} is a pickled object, but this writer writes only tensors"
            fix = "save it as bytes with SavePlanner, or with torch's FileSystemWriter"
            raise CheckpointError(f"{what}; {fix}")
        with _raise_as_ours(self._folder, BEFORE):
            if not self._folder.is_dir():
                make_folder(self._folder)
                sync(self._folder.parent)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save by creating a draft of the checkpoint's metadata file, and return `plans`, each with the
        prefix of its rank's file names as its `storage_data`."""
        save = uuid.uuid4().hex[:DIGITS]
        with _raise_as_ours(self._folder, BEFORE):
            find_counting(self._folder)  # raises if `.metadata` is there and cannot be read
            self._claim = claim(self._folder, save)
        named = []
        for i, plan in enumerate(plans):
            stem = f"{OURS}{save}-{i:05d}-of-{len(plans):05d}"
            named.append(replace(plan, storage_data=stem))
        return named

    def write_data(
        self, plan: SavePlan, planner: theirs.SavePlanner
    ) -> Future[list[storage.WriteResult]]:
        """Write this rank's parts of tensors into files (under temporary names, except in an object store). Returns a
        finished Future with one WriteResult per part, which tells the file, the offset in it and the length in
        bytes."""
        results: list[storage.WriteResult] = []
        # The prefix of file names that `prepare_global_plan` made: OURS, the save, and this rank's number.
        self._save = plan.storage_data.removeprefix(OURS)[:DIGITS]
        self._tally.begin(count_bytes(plan.items))
        for i, items in enumerate(_divide_into_files(plan.items)):
            number = f"-{i}" if i else ""
            name = f"{plan.storage_data}{number}{DATA}"
            draft = self._folder / _name_unfinished(self._folder, name)
            self._drafts.append(draft)
            with _raise_as_ours(self._folder / name, BEFORE):
                results += _write_file(draft, name, items, planner, self._tally)
        done: Future[list[storage.WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[storage.WriteResult]]) -> None:
        """Make this save the folder's current one: rename its data files, then replace `.metadata`, then the index
        shardmath.json."""
        running = self._claim
        assert running is not None, "a save has begun"
        all_results = [result for of_rank in results for result in of_rank]
        with _raise_as_ours(self._folder, lambda: _word_state(self._folder, running.save)):
            for name in sorted({result.storage_data.file for result in all_results}):
                _finish_file(self._folder, name)
            sync(self._folder)
            checkpoint = _describe(self._folder, metadata, all_results)
            index = to_json(checkpoint, running.save)
            pickled = _pickle(metadata, all_results)
            content = Sealed(pickled, index, running.save)
            make_count(running, seal(content))
        self._drafts = []
        with _raise_as_ours(self._folder, AFTER):
            running.release()
            # Only now: after a Ctrl-C before this line, `abandon` releases it.
            self._claim = None
            _update_copy(self._folder, index, running.save)

    def abandon(self) -> None:
        """Remove the files of a failed save, unless `finish` has made it the folder's current save. Call it on every
        rank.

        A rank removes its own drafts and the draft of `.metadata`: without them the save can no longer count, whatever
        other ranks do, and however late. The coordinator, which alone commits and so knows whether the save counts,
        removes the files of all ranks.
        """
        if self._save:
            with contextlib.suppress(OSError):
                (self._folder / name_draft(self._save)).unlink(missing_ok=True)
        self._save = ""
        for draft in self._drafts:
            # Others, in an object store, have their final names: only the coordinator knows whether they count.
            if draft.name.endswith(UNFINISHED):
                with contextlib.suppress(OSError):
                    draft.unlink(missing_ok=True)
        failed = self._claim
        self._claim = None
        self._drafts = []
        if failed is not None:
            withdraw(failed)

    def clear(self, share: tuple[int, int] = (0, 1)) -> None:
        """Remove the files of saves that crashed, failed or were replaced by a later save; call it on every rank. With
        `share` (i, n), this rank removes the i-th of n shares of the data files.

        A hash of a file's name decides which share the file is in. Unfinished metadata files are removed whatever the
        share.
        """
        with _raise_as_ours(self._folder, AFTER):
            remove_leftovers(self._folder, share)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True if `checkpoint_id` is a path, or a URL that fsspec serves, and False if it is neither. A text
        that UTF-8 cannot encode gives False, too."""
        try:
            _place_to_write(checkpoint_id)
        except CheckpointError:
            return False
        return True

    def storage_meta(self) -> StorageMeta:
        """Return empty metadata, as torch's planners need nothing from this writer."""
        return StorageMeta()


def _place_to_write(path: str | os.PathLike[str]) -> Place:
    """Return `path` as a Path or a Remote. Raises CheckpointError for a name that is not UTF-8, as torch could not map
    its files."""
    found = place(path)
    text = os.fspath(path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = f"the path {text!r} is not UTF-8, so torch could not load files from there"
        raise CheckpointError(f"{what}; give a folder whose name is UTF-8 text") from error
    return found


BEFORE, AFTER = (
    "what was saved there before is as it was: make it writable, with room, and save again",
    "the new save is whole, and the one that counts: load it as usual",
)
UNKNOWN = "whether the new save counts cannot be read either: load it to see, or save again"


def _word_state(folder: Place, save: str) -> str:
    """The state of the folder, in words: the step that failed may come after the one that made this save count."""
    try:
        return AFTER if find_counting(folder) == save else BEFORE
    except OSError:
        return UNKNOWN


@contextlib.contextmanager
def _raise_as_ours(path: Place, state: str | Callable[[], str]) -> Iterator[None]:
    """Raise OSErrors as CheckpointErrors that name the path and the state of the folder."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or path} cannot be written: {error.strerror or error}"
        left = state if isinstance(state, str) else state()
        raise CheckpointError(f"{what}; {left}") from error


# The copy of the index


def _update_copy(folder: Place, index: str, save: str) -> None:
    """Write the copy of the index that counts, even if that is by now the index of another save.

    Every writer reads afterwards which save counts, and writes again if that has changed. So the last copy to be
    written is of the save that counts.
    """
    written: str | None = None
    # Without torch's pickled metadata, of which the index's copy has nothing.
    current = Sealed(b"", index, save)
    while True:
        counting = find_counting(folder)
        if counting is None or counting == written:
            return
        if counting != current.save:
            # None if no sealed file is there by now: the next round finds out what counts.
            current = _read_sealed(folder) or current
        written = current.save if _write_copy(folder, current, save) else None


def _write_copy(folder: Place, current: Sealed, save: str) -> bool:
    """Write the copy of the index in `current`. Returns False if another save cleared the draft away, as it may once
    this save does not count."""
    draft = folder / f"{OURS}{save}.json{UNFINISHED}"
    try:
        put(folder / INDEX, draft, current.json.encode())
    except FileNotFoundError:
        if isinstance(folder, Remote) or find_counting(folder) == save:
            raise
        return False
    return True


def _read_sealed(folder: Place) -> Sealed | None:
    """The index that counts, and what it is sealed with; None if there is no file, or `save` did not write it."""
    file = folder / METADATA
    try:
        return unseal(content_of(file), file)
    except FileNotFoundError:
        return None


# Data files


def _name_unfinished(folder: Place, name: str) -> str:
    """A data file's name until all are written: the final one in an object store, where files appear whole."""
    return name if isinstance(folder, Remote) else name + UNFINISHED


def _finish_file(folder: Place, name: str) -> None:
    if not isinstance(folder, Remote):
        os.replace(folder / (name + UNFINISHED), folder / name)


def _divide_into_files(items: Sequence[WriteItem]) -> list[dict[str, WriteItem]]:
    """The items of each file, by the name that the file has for them."""
    files: list[dict[str, WriteItem]] = []
    counts: Counter[str] = Counter()
    names = {item.index.fqn for item in items}
    for item in items:
        name = item.index.fqn
        file_number = counts[name]
        counts[name] += 1
        if file_number >= MOST_FILES:
            name = find_unused(f"{name}#{file_number - MOST_FILES + 1}", names)
            names.add(name)
            file_number = MOST_FILES - 1
        while file_number >= len(files):
            files.append({})
        files[file_number][name] = item
    return files


class _WrittenBox(NamedTuple):
    """The place where an item was written: its file, first byte and checksums; `info` is torch's record of it."""

    file: str
    start: int
    info: Any
    sums: str


def _write_file(
    file: Place,
    name: str,
    items: Mapping[str, WriteItem],
    planner: theirs.SavePlanner,
    tally: Tally,
) -> Iterator[storage.WriteResult]:
    """Write the items to `file`, which will be renamed to `name`."""
    tensors: dict[str, tuple[tuple[int, ...] | None, Tensor]] = {}
    for key, item in items.items():
        data = planner.resolve_data(item)
        tensor = _to_contiguous(item, data, tally)
        # the file's header must not present a numbered box as a part of a tensor `w#1`
        offsets = _offsets_of(item, tensor) if key == item.index.fqn else None
        tensors[key] = (offsets, tensor)
    written = archive.write(file, tensors, tally)
    for key, item in items.items():
        span = written[key]
        _, tensor = tensors[key]
        info = compat.StorageInfo(name, span.archive, span.length)
        box = _WrittenBox(name, span.start, info, span.sums)
        yield storage.WriteResult(item.index, tensor.nbytes, box)


def _offsets_of(item: WriteItem, tensor: Tensor) -> tuple[int, ...]:
    """The offsets of an item in its tensor; torch's planners leave them out for a whole tensor."""
    return tuple(item.index.offset or (0,) * tensor.ndim)


def _to_contiguous(item: WriteItem, data: object, tally: Tally) -> Tensor:
    """Return an item's data as a contiguous tensor on the CPU that fills its storage, as `archive.write` needs it."""
    assert isinstance(data, Tensor) and item.tensor_data is not None, "objects are refused earlier"
    chunk = item.tensor_data.chunk
    plain = data.detach().as_subclass(Tensor)
    if plain.shape != chunk.sizes:
        planned = f"its save was planned for {list(chunk.sizes)}"
        what = f"{item.index.fqn!r} has shape {list(plain.shape)}, but {planned}"
        raise CheckpointError(f"{what}; do not resize it before the save has ended")
    fills_storage = plain.untyped_storage().nbytes() == plain.nbytes
    if plain.is_cpu and plain.is_contiguous() and fills_storage:
        return plain
    target = torch.empty(plain.shape, dtype=plain.dtype, device="cpu")
    # Not counted as progress: `archive.write` counts these bytes when it writes them.
    return tally.copy(target, plain, counts=False)


# What was written, as a value


_ByOffsets: TypeAlias = dict[tuple[int, ...], _WrittenBox]
"""The boxes of a tensor, by where they begin in it."""


def _pickle(metadata: Metadata, wrote: Iterable[storage.WriteResult]) -> bytes:
    """torch's metadata as bytes, with torch's record of where each box lies."""
    infos = {result.index: result.storage_data.info for result in wrote}
    return write_metadata(replace(metadata, storage_data=infos))


def _describe(path: Place, metadata: Metadata, wrote: Iterable[storage.WriteResult]) -> Checkpoint:
    """Return the checkpoint that was written, as a value."""
    boxes: dict[str, _ByOffsets] = {}
    for result in wrote:
        index = result.index
        boxes.setdefault(index.fqn, {})[tuple(index.offset or ())] = result.storage_data
    tensors: dict[str, StoredTensor] = {}
    files: set[Place] = set()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            tensor = _describe_tensor(path, entry, boxes[name])
            files.update(box.file for box in tensor.pieces)
            tensors[name] = tensor
    # other planners have no planner data, or none with blobs
    extra = metadata.planner_data or {}
    size_of = sizes_of(files)
    lengths = {file: size_of(file) for file in sorted(files)}
    return Checkpoint(path, tensors, extra.get(BLOBS, {}), lengths)


def _describe_tensor(path: Place, entry: TensorStorageMetadata, boxes: _ByOffsets) -> StoredTensor:
    """A tensor of torch's metadata as a StoredTensor, with the boxes where they were written."""
    dtype = entry.properties.dtype
    pieces = []
    for chunk in entry.chunks:
        offsets = tuple(chunk.offsets)
        box = boxes[offsets]
        size, length = tuple(chunk.sizes), dtype.itemsize * chunk.sizes.numel()
        pieces.append(StoredBox(offsets, size, path / box.file, box.start, length, sums=box.sums))
    return StoredTensor(tuple(entry.size), str(dtype).removeprefix("torch."), tuple(pieces))
