"""Strided: tensors in archives of torch.save, described without reading their data or running their code.

1. torch reads an archive with its list of allowed types (`weights_only`), into tensors without memory.
2. Before torch reads an archive, its directory and its pickle are checked: an archive that would take torch forever, or
   that it would convert while reading, raises.
3. A tensor lies within its storage, and its storage is a record of the archive, uncompressed and little-endian.
4. Archives do not overlap and each is read once, so the time for all is proportional to the file's length.
"""

from __future__ import annotations

import io
import itertools
import pickletools
import zipfile
from collections.abc import Iterable
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from shardmath_torch.checkpoints.files.places import CheckpointError, Place, opened
from shardmath_torch.groups import compat

__all__ = ["Strided", "describe_archives"]

LITTLE = b"little"
"""The content of the record `byteorder` of a little-endian archive."""
MOST_PICKLED, MOST_TUPLES = 1 << 16, 16
"""The most bytes and tuples in the pickle of a single tensor, which has some hundred bytes and six tuples."""
MOST_SHOWN = 300
"""How many characters to show of an error by torch or zipfile, which may repeat long names from the file."""
LOCAL_HEADER, LOCAL_LENGTHS = 30, 26
"""The length of a zip record's header before its name, and the offset in it of the lengths of the name and of the extra
fields, two bytes each (PKWARE APPNOTE 4.3.7)."""


class Strided(NamedTuple):
    """A tensor's place in a file: first byte, dtype, shape, strides, and whether values are conjugated or negated."""

    start: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool = False
    neg: bool = False

    @property
    def extent(self) -> int:
        """The number of elements that fit into the memory from the tensor's first element to its last, both included; 0
        for a tensor without elements."""
        if 0 in self.shape:
            return 0
        last = 0
        for n, step in zip(self.shape, self.strides, strict=True):
            last += (n - 1) * step
        return last + 1


def describe_archives(file: Place, archives: Iterable[tuple[int, int]]) -> list[Strided]:
    """Return the place and strides of the tensor in each of `archives`, which torch.save wrote. `archives` lists where
    each archive lies in `file`, as (offset, length) in bytes.

    Raises CheckpointError if an archive is not a single plain tensor within its bytes, or if archives overlap.
    """
    given = list(archives)
    distinct = sorted(set(given))
    _check_disjoint(file, distinct)
    try:
        with opened(file) as stream, compat.describe_only():
            described = {archive: _describe_archive(stream, *archive) for archive in distinct}
    except Exception as error:
        why = str(error)[:MOST_SHOWN]
        what = f"{file} has an archive that is not one tensor by torch.save ({why})"
        fix = "fetch it again, or save the checkpoint again"
        raise CheckpointError(f"{what}; the file is cut short or damaged: {fix}") from error
    return [described[archive] for archive in given]


def _check_disjoint(file: Place, archives: Iterable[tuple[int, int]]) -> None:
    """Raise CheckpointError if one of the sorted archives ends behind the beginning of the next."""
    for (start, length), (later, later_length) in itertools.pairwise(archives):
        stop = start + length
        if stop > later:
            ends = f"bytes {start} to {stop} and {later} to {later + later_length}"
            what = f"{file} has two archives that overlap, {ends}"
            fix = "fetch the checkpoint again, or save it again"
            raise CheckpointError(f"{what}; the file or the metadata is damaged: {fix}")


def _describe_archive(stream: BinaryIO, offset: int, length: int) -> Strided:
    """Describe the tensor in one archive, inside a FakeTensorMode, in which torch.load reads no data. Raises what torch
    and zipfile raise, and ValueError for other content."""
    view = io.BufferedReader(_FilePart(stream, offset, length))
    records = _read_records(view)
    _check_pickle(view)
    view.seek(0)
    tensor = torch.load(view, weights_only=True, map_location="cpu")
    if type(tensor).__name__ != "FakeTensor":
        raise ValueError(f"it holds a {type(tensor).__name__}, not a tensor")
    # Where the storage begins in the archive: torch.load records it for a tensor without memory.
    storage = compat.storage_start(tensor)
    if storage is None or storage not in records:
        raise ValueError(f"its storage begins at {storage}, but its records at {sorted(records)}")
    start = storage + int(tensor.storage_offset()) * tensor.element_size()
    found = _as_strided(tensor, start)
    stop = start + found.extent * tensor.element_size()
    inside = storage <= start and stop <= storage + records[storage]
    if found.extent and not inside:
        what = f"its {found.dtype}{list(found.shape)} with strides {found.strides}"
        raise ValueError(f"{what} lies outside its storage of {records[storage]} bytes")
    return found._replace(start=offset + start)


def _as_strided(tensor: Tensor, start: int) -> Strided:
    """The tensor as a Strided that begins at byte `start`."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return Strided(start, dtype, shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())


def _check_pickle(view: BinaryIO) -> None:
    """Raise ValueError unless the archive has one pickle, as short as a single tensor's."""
    view.seek(0)
    with zipfile.ZipFile(view) as archive:
        pickles = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError(f"it lists {len(pickles)} pickles, where a tensor has one")
        if pickles[0].file_size > MOST_PICKLED:
            what = f"its pickle has {pickles[0].file_size} bytes"
            raise ValueError(f"{what}, where a tensor's has at most {MOST_PICKLED}")
        text = archive.read(pickles[0])
    # torch hashes a storage's key from the pickle; nested tuples that share parts take 2^n steps to hash.
    tuples = sum(1 for code, _, _ in pickletools.genops(text) if "TUPLE" in code.name)
    if tuples > MOST_TUPLES:
        what = f"its pickle makes {tuples} tuples"
        raise ValueError(f"{what}, where a tensor's makes at most {MOST_TUPLES}")


class _FilePart(io.RawIOBase):
    """A range of bytes of an open file, which reads like a file."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        self._stream = stream
        self._offset = offset
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = (0, self._position, self._length)[whence]
        self._position = max(0, origin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        bytes_left = max(0, self._length - self._position)
        self._stream.seek(self._offset + self._position)
        data = self._stream.read(min(len(buffer), bytes_left))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _read_records(view: BinaryIO) -> dict[int, int]:
    """The size of each record of an archive, by its first byte. Raises ValueError for one that torch would convert.

    Records are not compressed, and numbers are little-endian: torch would swap the bytes of others in place, even of
    tensors without memory.
    """
    sizes = {}
    with zipfile.ZipFile(view) as archive:
        for info in archive.infolist():
            view.seek(info.header_offset + LOCAL_LENGTHS)
            name_and_extra = sum(int.from_bytes(view.read(2), "little") for _ in range(2))
            start = info.header_offset + LOCAL_HEADER + name_and_extra
            sizes[start] = info.file_size
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its {info.filename} is compressed, which torch.save never does")
            view.seek(start)
            if info.filename.endswith("/byteorder") and not _is_little(view, info.file_size):
                raise ValueError("its numbers are not little-endian, as only those can be read")
    return sizes


def _is_little(view: BinaryIO, size: int) -> bool:
    """Whether the record of that size is LITTLE; a longer one is not read, since a directory may list it often."""
    return size == len(LITTLE) and view.read(size) == LITTLE
