"""A folder of safetensors as Hugging Face's tools keep them: whole tensors in several files, and an index.

1. `model-00001-of-00003.safetensors` and so on, and `model.safetensors.index.json`, which says which file has which
   tensor (`hf_split`).
2. Bytes depend on tensors, names and the size asked for, and on nothing else.
3. Files are written under names that no reader looks for. When all are on disk, they get their names, the new index
   takes the place of the former at once, and the former files are removed last: there is one whole export at any time.
4. No name is used by two exports, so that nobody has headers of one and data of another: those after the first are
   numbered, `model-2-00001-of-00003.safetensors`.
5. Only what an export has written is replaced: its files say so in their headers. A folder with other safetensors is
   refused, since readers would take those too, or instead.
6. Two exports to one folder: the second is refused for as long as the first one lives.
7. What is at the name of a draft is removed, never written to: it may be a link, to somebody's file. Whoever gives a
   draft up removes its own, and not what the next export has put in its place.
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
from shardmath_torch.checkpoints.files.places import CheckpointError, content_of, sync, synced
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
"""A key of a header's metadata, by which a file is known to be an export's."""
FORMAT = "format"
"""A key of it that transformers asks for."""
TAKEN = (FORMAT, OURS, SHARDING)
"""Keys of it that mean something, and so no names."""
NAME = re.compile(rf"model-(?:(\d+)-)?\d{{5,}}-of-\d{{5,}}\.safetensors({re.escape(UNFINISHED)})?")
ALIGNMENT = 8
"""Bytes; tensors begin at a multiple of it, as safetensors' own writer has it."""


class DraftFile:
    """A file that is being written, its tensors in the order of its header. Raises OSError."""

    def __init__(self, folder: Path, name: str, tensors: File, tied: Mapping[str, str]) -> None:
        self._file = folder / (name + UNFINISHED)
        self._stream = _create(self._file)
        self._known = os.fstat(self._stream.fileno())
        try:
            self._stream.write(_make_header(tensors, tied))
        except BaseException:
            with contextlib.suppress(OSError):
                self.discard()
            raise

    def append(self, tensor: Tensor, tally: Tally) -> None:
        """The next tensor's bytes."""
        data = memory_of(tensor.cpu().contiguous())
        for at in range(0, len(data), TELL_BYTES):
            self._stream.write(data[at : at + TELL_BYTES])
            tally.add(len(data[at : at + TELL_BYTES]))

    def close(self) -> None:
        """All of it is on disk."""
        synced(self._stream)
        self._known = os.fstat(self._stream.fileno())
        self._stream.close()

    def discard(self) -> None:
        """None of it is there; after `close`, too."""
        try:
            with contextlib.suppress(FileNotFoundError):
                if self._is_own(self._file.lstat()):
                    self._file.unlink()
        finally:
            self._stream.close()  # which writes what is left, and may fail as what was written before

    def _is_own(self, found: os.stat_result) -> bool:
        """Whether this is the file that the draft has made."""
        if not os.path.samestat(found, self._known):
            return False
        # The number of a file that is closed and gone is given to the next one; its last change is not.
        return not self._stream.closed or found.st_mtime_ns == self._known.st_mtime_ns


def discard(drafts: Iterable[DraftFile]) -> None:
    """None of them is there."""
    for draft in drafts:
        with contextlib.suppress(OSError):
            draft.discard()


def _create(file: Path) -> BinaryIO:
    """A stream to a new file of that name."""
    file.unlink(missing_ok=True)
    return file.open("xb")


def check_tied(tied: Iterable[str]) -> None:
    """Raises CheckpointError for another name of a tensor that a header's metadata has another use for."""
    for name in tied:
        if name in TAKEN:
            what = f"{name!r} is tied, and readers of a header take it for something else"
            raise CheckpointError(f"{what}; give it another name")


def _make_header(tensors: File, tied: Mapping[str, str]) -> bytes:
    """The header and its length; `tied` names are said as safetensors' own `save_model` says them."""
    entries: dict[str, object] = {RESERVED: {**tied, FORMAT: "pt", OURS: "1"}}
    at = 0
    for name, entry in tensors.items():
        shape, dtype = entry
        stop = at + count_bytes(entry)
        entries[name] = make_entry(NAMES[dtype], shape, at, stop)
        at = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    padding = b" " * (-len(text) % ALIGNMENT)
    length = len(text) + len(padding)
    return length.to_bytes(PREFIX, "little") + text + padding


def check_folder(folder: Path) -> None:
    """Makes the folder. Raises CheckpointError where it holds weights that no export wrote, or cannot be written."""
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.glob("*.safetensors")):
            if not NAME.fullmatch(file.name) or not _is_ours(file):
                why = "which no export wrote and readers would take for part of this one"
                what = f"{folder} has {file.name}, {why}"
                raise CheckpointError(f"{what}; give another folder, or move the file away")
        for file in (*_list_exported(folder), *folder.glob(INDEX + UNFINISHED)):
            _check_replaceable(folder, file)
        index = folder / INDEX
        if index.exists() and not _is_index_of_ours(index):
            what = f"{folder} has an {INDEX} that no export wrote"
            raise CheckpointError(f"{what}; give another folder, or move it away")


def _check_replaceable(folder: Path, file: Path) -> None:
    """Raises CheckpointError for what an export cannot remove: what is neither a file nor a link."""
    if not file.is_symlink() and not file.is_file():
        kind = "a folder" if file.is_dir() else "something that is not a file,"
        what = f"{folder} has {kind} {file.name}, a name that exports write to"
        raise CheckpointError(f"{what}; give another folder, or move it away")


def _list_exported(folder: Path) -> list[Path]:
    """Files of exports, and drafts of them."""
    return [file for file in folder.iterdir() if NAME.fullmatch(file.name)]


def _is_draft(file: Path) -> bool:
    return file.name.endswith(UNFINISHED)


def _is_ours(file: Path) -> bool:
    """Whether an export has written the file."""
    try:
        _, metadata = read_header(file)
    except WeightsError:
        return False
    return OURS in metadata


def has_export(folder: Path) -> bool:
    """Whether an export is in the folder."""
    index = folder / INDEX
    return index.is_file() and _is_index_of_ours(index)


def _is_index_of_ours(file: Path) -> bool:
    """Whether an export has written the index."""
    try:
        found = json.loads(content_of(file))
        return OURS in found["metadata"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


@contextlib.contextmanager
def told(folder: Path) -> Iterator[None]:
    """Errors of the system as ours."""
    try:
        yield
    except OSError as error:
        what = f"{error.filename or folder} cannot be written: {error.strerror or error}"
        raise CheckpointError(f"{what}; give a folder that can be, with room") from error


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else exports to the folder meanwhile; the lock goes when the process does.

    Raises CheckpointError where somebody does.
    """
    with told(folder), locks.locked(folder / LOCK, f"export to {folder}"):
        yield


def commit(folder: Path, files: Mapping[str, File], tied: Mapping[str, str]) -> None:
    """Gives the files, all of them on disk, their names, and then removes what was exported before.

    Raises OSError, and then what was there before is there as it was. Warns of files that it could not remove.
    """
    former = [file for file in _list_exported(folder) if not _is_draft(file)]
    number = 1 + max((_read_number(file.name) for file in former), default=0)
    names = {name: _add_number(name, number) for name in files}
    _clear_drafts(folder, files)
    index = folder / INDEX
    draft = folder / (INDEX + UNFINISHED)
    text = _make_index({names[name]: file for name, file in files.items()}, tied)
    written = _write_index(draft, text)
    try:
        _rename(folder, names)
        os.replace(draft, index)
    except BaseException:
        # Where the former index is still in place, it knows none of these.
        if not _is_same(index, written):
            for name in names.values():
                (folder / name).unlink(missing_ok=True)
            draft.unlink(missing_ok=True)
        raise
    _remove(folder, former)


def _rename(folder: Path, names: Mapping[str, str]) -> None:
    """Gives drafts their names, on disk before an index says so."""
    for name, numbered in names.items():
        os.replace(folder / (name + UNFINISHED), folder / numbered)
    sync(folder)


def _read_number(name: str) -> int:
    """The number of the export that a file is of: 1 where its name has none."""
    found = NAME.fullmatch(name)
    return int(found[1]) if found and found[1] else 1


def _add_number(name: str, number: int) -> str:
    """That name of the `number`-th export to a folder.

    >>> _add_number("model-00001-of-00003.safetensors", 2)
    'model-2-00001-of-00003.safetensors'
    """
    return name if number == 1 else name.replace("-", f"-{number}-", 1)


def _clear_drafts(folder: Path, files: Iterable[str]) -> None:
    """Removes what exports that were cut off have left. Later, others' exports may have begun: it is not locked."""
    drafts = {name + UNFINISHED for name in files}
    for file in _list_exported(folder):
        if _is_draft(file) and file.name not in drafts:
            file.unlink()


def _make_index(files: Mapping[str, File], tied: Mapping[str, str]) -> bytes:
    """The index as JSON: the file of each tensor, in natural order."""
    total = 0
    places = {}
    for file, tensors in files.items():
        for name, entry in tensors.items():
            places[name] = file
            total += count_bytes(entry)
    metadata: dict[str, object] = {"total_size": total, OURS: 1}
    if tied:
        metadata["tied"] = dict(sorted(tied.items()))
    ordered = {name: places[name] for name in sorted(places, key=natural_order)}
    index = {"metadata": metadata, "weight_map": ordered}
    return json.dumps(index, indent=2).encode() + b"\n"


def _write_index(draft: Path, text: bytes) -> os.stat_result:
    """The file that has the text, on disk."""
    try:
        with _create(draft) as stream:
            stream.write(text)
            synced(stream)
            return os.fstat(stream.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _is_same(file: Path, known: os.stat_result) -> bool:
    """Whether that is the file that has this name now."""
    return file.exists() and os.path.samestat(file.stat(), known)


def _remove(folder: Path, former: Iterable[Path]) -> None:
    """The new index being on disk, the files of the one before go."""
    try:
        sync(folder)
        for file in former:
            file.unlink(missing_ok=True)
    except OSError as error:
        what = f"the new export is in {folder}, whole, but files of the one before could not be removed"
        warnings.warn(f"{what} ({error}); the next export removes them, if it can", stacklevel=2)
