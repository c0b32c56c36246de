"""A folder of safetensors as Hugging Face's tools keep them: whole tensors in files of a given size, and an index.

1. `model-00001-of-00003.safetensors` and so on, and `model.safetensors.index.json`, which says which file has which
   tensor. Files are filled in the tensors' natural order, as transformers fills them: a file is closed before a tensor
   that would make it longer than asked, and a tensor that is longer by itself has a file of its own.
2. Bytes depend on tensors, names and the size asked for, and on nothing else.
3. Files are written under names that no reader looks for. When all are on disk, they get their names, the new index
   takes the place of the former at once, and the former files are removed last: there is one whole export at any time.
4. No name is used by two exports, so that nobody has headers of one and data of another: those after the first are
   numbered, `model-2-00001-of-00003.safetensors`.
5. Only what an export has written is replaced: its files say so in their headers. A folder with other safetensors is
   refused, since readers would take those too, or instead.
6. Two exports to one folder: the second is refused for as long as the first one lives.
7. What is at the name of a draft is removed, never written to: it may be a link, to somebody's file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch
from torch import Tensor

from shardmath.base.dtypes import itemsize
from shardmath_torch.dtypes import flat
from shardmath_torch.files import locks
from shardmath_torch.files.archive import NAMES, RESERVED
from shardmath_torch.files.json_text import shown
from shardmath_torch.files.places import CheckpointError, content_of
from shardmath_torch.files.weights import INDEX, WeightsError, read_header

__all__ = [
    "LOCK",
    "Draft",
    "Entry",
    "File",
    "check_entries",
    "check_folder",
    "commit",
    "discard",
    "file_names",
    "locked",
]
__all__ += ["size_of", "split"]

Entry: TypeAlias = tuple[tuple[int, ...], str]
"""Global shape and dtype."""
File: TypeAlias = dict[str, Entry]
"""The tensors of a file, in the order in which they lie there."""

UNFINISHED = ".unfinished"
LOCK = ".shardmath-export.lock"
OURS = "shardmath_export"
"""A key of a header's metadata, by which a file is known to be an export's."""
NAME = re.compile(rf"model-(?:(\d+)-)?\d{{5,}}-of-\d{{5,}}\.safetensors({re.escape(UNFINISHED)})?")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def size_of(size: int | str) -> int:
    """Bytes of `5000000` or "5MB", as transformers reads it. Raises CheckpointError for anything else.

    >>> size_of("5GB"), size_of("1.5 kb")
    (5000000000, 1500)
    """
    found = re.fullmatch(r"\s*(\d{1,12}(?:\.\d{1,12})?)\s*([KMGT]B)\s*", str(size).upper())
    nbytes = int(float(found[1]) * UNITS[found[2]]) if found else size
    if type(nbytes) is not int or nbytes < 1:
        what = f"max_shard_size is {shown(size)}"
        raise CheckpointError(f"{what}; give a number of bytes, or text such as '500MB' or '5GB'")
    return nbytes


def check_entries(entries: Mapping[str, Entry]) -> None:
    """Raises CheckpointError for what safetensors cannot say: a type, or a name."""
    for name, (shape, dtype) in entries.items():
        if dtype not in NAMES:
            what = f"tensor {name!r} is {dtype}{list(shape)}, a type that safetensors does not have"
            raise CheckpointError(f"{what}; cast it, or leave it out; it has {', '.join(NAMES)}")
        if name == RESERVED or name.encode("utf-8", "replace") != name.encode(
            "utf-8", "surrogatepass"
        ):
            what = f"a tensor is called {name!r}, which no safetensors file can call it"
            raise CheckpointError(f"{what}; give it another name")


def split(entries: Mapping[str, Entry], limit: int) -> list[File]:
    """The tensors file by file, each of at most `limit` bytes unless a tensor alone has more."""
    files: list[File] = []
    current: File = {}
    room = limit
    for name in sorted(entries, key=_natural):
        nbytes = _nbytes(entries[name])
        if nbytes > limit:
            files.append({name: entries[name]})
            continue
        if nbytes > room:
            files.append(current)
            current, room = {}, limit
        current[name] = entries[name]
        room -= nbytes
    files += [current] if current or not files else []
    return [_in_order(file) for file in files]


def _natural(name: str) -> tuple[list[tuple[bool, int, str]], str]:
    """Numbers in names by size: layer 2 before layer 10."""
    parts = re.split(r"([0-9]+)", name)
    return [
        (part.isdecimal(), len(part.lstrip("0")) if part.isdecimal() else 0, part) for part in parts
    ], name


def _in_order(file: File) -> File:
    """Long elements first, so that every tensor begins at a multiple of its elements' size; else as they come."""
    return dict(sorted(file.items(), key=lambda item: -itemsize(item[1][1])))


def _nbytes(entry: Entry) -> int:
    return math.prod(entry[0]) * itemsize(entry[1])


def file_names(count: int) -> list[str]:
    """The names of so many files of a first export."""
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]


def _numbered(name: str, number: int) -> str:
    """That name of the `number`-th export to a folder.

    >>> _numbered("model-00001-of-00003.safetensors", 2)
    'model-2-00001-of-00003.safetensors'
    """
    return name if number == 1 else name.replace("-", f"-{number}-", 1)


def _number(name: str) -> int:
    found = NAME.fullmatch(name)
    return int(found[1]) if found and found[1] else 1


class Draft:
    """A file that is being written, its tensors in the order of its header. Raises OSError."""

    def __init__(self, folder: Path, name: str, tensors: File, tied: Mapping[str, str]) -> None:
        self._file = folder / (name + UNFINISHED)
        self._stream = _anew(self._file)
        try:
            self._stream.write(_header(tensors, tied))
        except BaseException:
            with contextlib.suppress(OSError):
                self.discard()
            raise

    def append(self, tensor: Tensor) -> None:
        """The next tensor's bytes."""
        self._stream.write(memoryview(flat(tensor.cpu().contiguous()).view(torch.uint8).numpy()))  # type: ignore[arg-type]

    def close(self) -> None:
        """All of it is on disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def discard(self) -> None:
        """None of it is there; after `close`, too."""
        try:
            self._stream.close()  # which writes what is left, and may fail as what was written before
        finally:
            self._file.unlink(missing_ok=True)


def _anew(file: Path) -> BinaryIO:
    """A stream to a new file of that name."""
    file.unlink(missing_ok=True)
    return file.open("xb")


def _header(tensors: File, tied: Mapping[str, str]) -> bytes:
    """The header and its length; `tied` names are said as safetensors' own `save_model` says them."""
    entries: dict[str, object] = {RESERVED: {**tied, "format": "pt", OURS: "1"}}
    at = 0
    for name, entry in tensors.items():
        stop = at + _nbytes(entry)
        entries[name] = {
            "dtype": NAMES[entry[1]],
            "shape": list(entry[0]),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def check_folder(folder: Path) -> None:
    """Makes the folder. Raises CheckpointError where it holds weights that no export wrote, or cannot be written."""
    with told(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.glob("*.safetensors")):
            if not NAME.fullmatch(file.name) or not _is_ours(file):
                what = f"{folder} has {file.name}, which no export wrote and readers would take for part of this one"
                raise CheckpointError(f"{what}; give another folder, or move the file away")
        for file in (*_named(folder), *folder.glob(INDEX + UNFINISHED)):
            if not file.is_symlink() and not file.is_file():
                kind = "a folder" if file.is_dir() else "something that is no file,"
                what = f"{folder} has {kind} {file.name}, a name that exports write to"
                raise CheckpointError(f"{what}; give another folder, or move it away")
        if (folder / INDEX).exists() and not _is_index_of_ours(folder / INDEX):
            raise CheckpointError(
                f"{folder} has an {INDEX} that no export wrote; give another folder, or move it away"
            )


def _named(folder: Path) -> list[Path]:
    """Files of exports, and drafts of them."""
    return [file for file in folder.iterdir() if NAME.fullmatch(file.name)]


def _is_ours(file: Path) -> bool:
    try:
        return OURS in read_header(file)[1]
    except WeightsError:
        return False


def _is_index_of_ours(file: Path) -> bool:
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


def _is(file: Path, known: os.stat_result) -> bool:
    """Whether that is the file that has this name now."""
    return file.exists() and os.path.samestat(file.stat(), known)


def commit(folder: Path, files: Mapping[str, File], tied: Mapping[str, str]) -> None:
    """Gives the files, all of them on disk, their names, and then removes what was exported before.

    Raises OSError, and then what was there before is there as it was. Warns of files that it could not remove.
    """
    former = [file for file in _named(folder) if not file.name.endswith(UNFINISHED)]
    number = 1 + max((_number(file.name) for file in former), default=0)
    names = {name: _numbered(name, number) for name in files}
    _clear_drafts(folder, files)
    draft = folder / (INDEX + UNFINISHED)
    written = _write_index(draft, _index({names[n]: file for n, file in files.items()}, tied))
    try:
        for name in files:
            os.replace(folder / (name + UNFINISHED), folder / names[name])
        _sync(folder)
        os.replace(draft, folder / INDEX)
    except BaseException:
        if not _is(
            folder / INDEX, written
        ):  # the former index is in place, which knows none of these
            for name in names.values():
                (folder / name).unlink(missing_ok=True)
            draft.unlink(missing_ok=True)
        raise
    _remove(folder, former)


def _clear_drafts(folder: Path, files: Iterable[str]) -> None:
    """Removes what exports that were cut off have left. Later, others' exports may have begun: it is not locked."""
    drafts = {name + UNFINISHED for name in files}
    for file in _named(folder):
        if file.name.endswith(UNFINISHED) and file.name not in drafts:
            file.unlink()


def _write_index(draft: Path, text: bytes) -> os.stat_result:
    """The file that has the text, on disk."""
    try:
        with _anew(draft) as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
            return os.fstat(stream.fileno())
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def _remove(folder: Path, former: Iterable[Path]) -> None:
    """The new index being on disk, the files of the one before go."""
    try:
        _sync(folder)
        for file in former:
            file.unlink(missing_ok=True)
    except OSError as error:
        what = f"the new export is in {folder}, whole, but files of the one before could not be removed"
        warnings.warn(f"{what} ({error}); the next export removes them, if it can", stacklevel=2)


def _index(files: Mapping[str, File], tied: Mapping[str, str]) -> bytes:
    total = sum(_nbytes(entry) for file in files.values() for entry in file.values())
    places = {tensor: name for name, file in files.items() for tensor in file}
    metadata: dict[str, object] = {"total_size": total, OURS: 1}
    metadata |= {"tied": dict(sorted(tied.items()))} if tied else {}
    ordered = {name: places[name] for name in sorted(places, key=_natural)}
    return json.dumps({"metadata": metadata, "weight_map": ordered}, indent=2).encode() + b"\n"


def discard(drafts: Iterable[Draft]) -> None:
    """None of them is there."""
    for draft in drafts:
        with contextlib.suppress(OSError):
            draft.discard()


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
