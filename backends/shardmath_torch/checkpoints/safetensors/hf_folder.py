"""Folders of safetensors as Hugging Face's tools write them: whole tensors in several files, and an index.

1. Files are `model-00001-of-00003.safetensors` and so on; `model.safetensors.index.json` gives the file of each tensor
   (`hf_split`).
2. The bytes depend only on tensors, names and the requested size.
3. Files are written under names that no reader looks for. When all are on disk, they are renamed, the new index
   replaces the earlier one in one step, and the earlier files are removed last: there is one whole export at any time.
4. No two exports use the same file name, so that no reader mixes headers of one with data of another: exports after the
   first are numbered, `model-2-00001-of-00003.safetensors`.
5. Only files that an export wrote are replaced; their headers mark them. A folder with other safetensors raises, since
   readers would load those too, or instead.
6. While one export to a folder runs, a second one raises.
7. A file at a draft's name is removed, never written to: it may be a link to another file. A draft that is discarded
   removes only its own file, not one that the next export has put in its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from shardmath_torch.checkpoints.files import locks
from shardmath_torch.checkpoints.files.places import (
    CheckpointError,
    content_of,
    make_folder,
    sync,
    synced,
)
from shardmath_torch.checkpoints.safetensors.archive import memory_of
from shardmath_torch.checkpoints.safetensors.headers import (
    NAMES,
    PREFIX,
    RESERVED,
    WeightsError,
    make_entry,
    read_header,
)
from shardmath_torch.checkpoints.safetensors.hf_sharded import SHARDING
from shardmath_torch.checkpoints.safetensors.hf_split import File, count_bytes, natural_order
from shardmath_torch.checkpoints.safetensors.weights import INDEX
from shardmath_torch.moves.observing.bars import TELL_BYTES, Tally

__all__ = [
    "LOCK",
    "NAME",
    "DraftFile",
    "check_folder",
    "check_tied",
    "commit",
    "discard",
    "has_export",
    "locked",
    "told",
]

UNFINISHED = ".unfinished"
LOCK = ".shardmath-export.lock"
OURS = "shardmath_export"
"""A key of a header's metadata that marks a file as an export's."""
FORMAT = "format"
"""A key of a header's metadata that transformers requires."""
TAKEN = (FORMAT, OURS, SHARDING)
"""Keys of a header's metadata with a meaning, which tied names cannot use."""
NAME = re.compile(rf"model-(?:(\d+)-)?\d{{5,}}-of-\d{{5,}}\.safetensors({re.escape(UNFINISHED)})?")
ALIGNMENT = 8
"""Tensors begin at a multiple of this many bytes, as in safetensors' own writer."""


class DraftFile:
    """A safetensors file that is being written under a temporary name; tensors are appended in the header's order. Its
    methods raise OSError if the file cannot be created, written or removed."""

    def __init__(self, folder: Path, name: str, tensors: File, tied: Mapping[str, str]) -> None:
        self._file = folder / (name + UNFINISHED)
        self._stream = _create(self._file)
        # Tells the draft's file from another one that takes its name.
        self._last_stat = os.fstat(self._stream.fileno())
        try:
            self._stream.write(_make_header(tensors, tied))
        except BaseException:
            with contextlib.suppress(OSError):
                self.discard()
            raise

    def append(self, tensor: Tensor, tally: Tally) -> None:
        """Write the bytes of `tensor`, the next one in the header's order, and count them in `tally`."""
        data = memory_of(tensor.cpu().contiguous())
        for start in range(0, len(data), TELL_BYTES):
            chunk = data[start : start + TELL_BYTES]
            self._stream.write(chunk)
            tally.add(len(chunk))

    def close(self) -> None:
        """Flush the file to disk, and close it."""
        synced(self._stream)
        self._last_stat = os.fstat(self._stream.fileno())
        self._stream.close()

    def discard(self) -> None:
        """Remove the draft's file, even after `close`, unless another file has taken its name."""
        try:
            with contextlib.suppress(FileNotFoundError):
                if self._is_this_draft(self._file.lstat()):
                    self._file.unlink()
        finally:
            self._stream.close()  # which flushes, and may fail as an earlier write did

    def _is_this_draft(self, found: os.stat_result) -> bool:
        """Whether this is the file that the draft created."""
        if not os.path.samestat(found, self._last_stat):
            return False
        # A new file may reuse the inode number of one that is closed and removed, but not its time of change.
        return not self._stream.closed or found.st_mtime_ns == self._last_stat.st_mtime_ns


def discard(drafts: Iterable[DraftFile]) -> None:
    """Remove the files of all `drafts`, ignoring errors."""
    for draft in drafts:
        with contextlib.suppress(OSError):
            draft.discard()


def _create(file: Path) -> BinaryIO:
    """Create a file of that name in place of any file there, and return the open stream."""
    file.unlink(missing_ok=True)
    return file.open("xb")


def check_tied(tied: Iterable[str]) -> None:
    """Raise CheckpointError if a name in `tied` equals a reserved metadata key of the safetensors header, such as
    "format". `tied` has additional names of saved tensors, which the header stores as metadata keys."""
    for name in tied:
        if name in TAKEN:
            what = (
                f"tied= has the name {name!r}, but {', '.join(TAKEN)} are reserved in safetensors"
            )
            raise CheckpointError(f"{what}; tie it under another name")


def _make_header(tensors: File, tied: Mapping[str, str]) -> bytes:
    """The header, after its length; `tied` names are in its metadata, as by safetensors' own `save_model`."""
    entries: dict[str, object] = {RESERVED: {**tied, FORMAT: "pt", OURS: "1"}}
    start = 0
    for name, entry in tensors.items():
        shape, dtype = entry
        stop = start + count_bytes(entry)
        entries[name] = make_entry(NAMES[dtype], shape, start, stop)
        start = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    padding = b" " * (-len(text) % ALIGNMENT)
    length = len(text) + len(padding)
    return length.to_bytes(PREFIX, "little") + text + padding


def check_folder(folder: Path) -> None:
    """Make `folder` unless it exists. Raises CheckpointError if that fails, or if the folder has files that `export`
    did not write: safetensors files, or their index."""
    with told(folder):
        make_folder(folder)
        for file in sorted(folder.glob("*.safetensors")):
            if not NAME.fullmatch(file.name) or not _is_export_file(file):
                why = "which `export` did not write, and readers would load as part of this model"
                what = f"{folder} has {file.name}, {why}"
                raise CheckpointError(f"{what}; give another folder, or move the file away")
        for file in (*_list_exported(folder), *folder.glob(INDEX + UNFINISHED)):
            _check_replaceable(folder, file)
        index = folder / INDEX
        if index.exists() and not _is_export_index(index):
            what = f"{folder} has an {INDEX} that `export` did not write and would have to replace"
            raise CheckpointError(f"{what}; give another folder, or move the index away")


def _check_replaceable(folder: Path, file: Path) -> None:
    """Raise CheckpointError for anything but a file or a link, which an export cannot replace."""
    if not file.is_symlink() and not file.is_file():
        kind = "a folder" if file.is_dir() else "something else than a file,"
        what = f"{folder} has {kind} {file.name}, but exports write a file of that name"
        raise CheckpointError(f"{what}; give another folder, or move it away")


def _list_exported(folder: Path) -> list[Path]:
    """The files of exports in the folder, and their drafts."""
    return [file for file in folder.iterdir() if NAME.fullmatch(file.name)]


def _is_draft(file: Path) -> bool:
    return file.name.endswith(UNFINISHED)


def _is_export_file(file: Path) -> bool:
    """Whether an export wrote the file."""
    try:
        _, metadata = read_header(file)
    except WeightsError:
        return False
    return OURS in metadata


def has_export(folder: Path) -> bool:
    """Whether `folder` holds a model that `export` wrote."""
    index = folder / INDEX
    return index.is_file() and _is_export_index(index)


def _is_export_index(file: Path) -> bool:
    """Whether an export wrote the index."""
    try:
        found = json.loads(content_of(file))
        return OURS in found["metadata"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


@contextlib.contextmanager
def told(folder: Path) -> Iterator[None]:
    """Turn any OSError in the `with` block into a CheckpointError that says why `folder` cannot be written."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or folder} cannot be written: {error.strerror or error}"
        raise CheckpointError(f"{what}; give a folder that is writable and has room") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` during the `with` block, so that no other export writes there.

    Raises CheckpointError if another export to the folder is running.
    """
    with told(folder), locks.locked(folder / LOCK, f"export to {folder}"):
        yield


def commit(folder: Path, files: Mapping[str, File], tied: Mapping[str, str]) -> None:
    """Make the written `files` the current export of `folder`: rename them, write an index, and remove the earlier
    export. `files` maps each file's name to a dict of the tensors in the file; `tied` maps additional names to names of
    tensors, for the index.

    Raises OSError, and then the earlier export is as it was. Warns of files that could not be removed.
    """
    earlier = [file for file in _list_exported(folder) if not _is_draft(file)]
    export_number = 1 + max((_read_number(file.name) for file in earlier), default=0)
    numbered = {name: _add_number(name, export_number) for name in files}
    _clear_drafts(folder, files)
    index = folder / INDEX
    draft = folder / (INDEX + UNFINISHED)
    text = _make_index({numbered[name]: file for name, file in files.items()}, tied)
    draft_stat = _write_index(draft, text)
    try:
        _rename(folder, numbered)
        os.replace(draft, index)
    except BaseException:
        # Unless the index was replaced, it names none of the renamed files.
        if not _has_this_name(index, draft_stat):
            for name in numbered.values():
                (folder / name).unlink(missing_ok=True)
            draft.unlink(missing_ok=True)
        raise
    _remove(folder, earlier)


def _rename(folder: Path, names: Mapping[str, str]) -> None:
    """Rename the drafts of these files to new names, and flush that to disk before an index has the names."""
    for name, new_name in names.items():
        os.replace(folder / (name + UNFINISHED), folder / new_name)
    sync(folder)


def _read_number(name: str) -> int:
    """The number of the export that wrote the file `name`; 1 if the name has none."""
    match = NAME.fullmatch(name)
    return int(match[1]) if match and match[1] else 1


def _add_number(name: str, number: int) -> str:
    """The file name with the number of its export, which the first export leaves out.

    >>> _add_number("model-00001-of-00003.safetensors", 2)
    'model-2-00001-of-00003.safetensors'
    """
    return name if number == 1 else name.replace("-", f"-{number}-", 1)


def _clear_drafts(folder: Path, files: Iterable[str]) -> None:
    """Remove drafts of interrupted exports, but not of `files`, which this export has written. For use under the lock:
    else they may be of an export that is running."""
    own_drafts = {name + UNFINISHED for name in files}
    for file in _list_exported(folder):
        if _is_draft(file) and file.name not in own_drafts:
            file.unlink()


def _make_index(files: Mapping[str, File], tied: Mapping[str, str]) -> bytes:
    """The index as JSON: the file of each tensor, in the names' natural order."""
    total = 0
    file_of = {}
    for file, tensors in files.items():
        for name, entry in tensors.items():
            file_of[name] = file
            total += count_bytes(entry)
    metadata: dict[str, object] = {"total_size": total, OURS: 1}
    if tied:
        metadata["tied"] = dict(sorted(tied.items()))
    ordered = {name: file_of[name] for name in sorted(file_of, key=natural_order)}
    index = {"metadata": metadata, "weight_map": ordered}
    return json.dumps(index, indent=2).encode() + b"\n"


def _write_index(draft: Path, text: bytes) -> os.stat_result:
    """Write the draft of the index to disk, and return its stat."""
    try:
        with _create(draft) as stream:
            stream.write(text)
            synced(stream)
            return os.fstat(stream.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _has_this_name(file: Path, known: os.stat_result) -> bool:
    """Whether the file now at this name is the known one."""
    return file.exists() and os.path.samestat(file.stat(), known)


def _remove(folder: Path, earlier: Iterable[Path]) -> None:
    """Flush the new index to disk, then remove the earlier export's files. Warns if that fails."""
    try:
        sync(folder)
        for file in earlier:
            file.unlink(missing_ok=True)
    except OSError as error:
        what = f"the new export is in {folder}, whole, but files of the one before could not be removed"
        warnings.warn(f"{what} ({error}); the next export removes them, if it can", stacklevel=2)
