"""Data files of checkpoints: safetensors in which every tensor is also an archive of torch.save.

1. A file is a safetensors file, header and tensors back to back. What lies between two tensors of ours are the zip
   records that make an archive of each; they are tensors of bytes by themselves, `frame/0`, `frame/1`, ...
2. So one copy of the data is read by safetensors, by torch.load at the archive's offset, which is how the readers of
   torch.distributed.checkpoint find it, and by whoever maps the file.
3. Archives begin at multiples of 64 bytes of the file, and with torch's own alignment so do the tensors in them.
4. torch makes the archive and leaves out the data (`skip_data`), which is written as it lies in memory; checksums are
   left out too, as torch does not look at them.
5. Types that safetensors has no name for are bytes to it; the checkpoint's index knows better.

    8 bytes   length of the header
    header    JSON, padded with spaces
    frame/0   zip records before the tensor: its shape, strides and type, pickled
    "w"       the tensor
    frame/1   zip records after it, padding, zip records before the next one
"""

from __future__ import annotations

import io
import itertools
import json
import pickletools
import zipfile
from collections.abc import Container, Iterable, Mapping
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.serialization import skip_data

from shardmath_torch import compat
from shardmath_torch.dtypes import flat
from shardmath_torch.files import checksums
from shardmath_torch.files.hf_sharded import SAVED, SHARDING
from shardmath_torch.files.places import CheckpointError, Place, opened, synced
from shardmath_torch.files.weights import DTYPES, Progress

__all__ = ["ALIGNMENT", "CheckpointError", "Strided", "Written", "described", "unused", "write"]

ALIGNMENT = 64
"""Bytes; torch.save aligns the data in an archive to as many."""

RESERVED = "__metadata__"
"""A key of the header that is no tensor."""

NAMES = {name: theirs for theirs, name in DTYPES.items()}


class Written(NamedTuple):
    """Where in a file a tensor went: its archive, and its first byte; and its checksums."""

    archive: int
    length: int
    start: int
    sums: str = ""


class _Frame(NamedTuple):
    """The records of an archive before and after the tensor's data."""

    before: bytes
    after: bytes


Named: TypeAlias = Mapping[str, tuple[tuple[int, ...] | None, Tensor]]
"""Tensors by name, each with the global index at which it begins, None where the name is not that of a whole tensor."""


def write(file: Place, tensors: Named, *, progress: Progress | None = None) -> dict[str, Written]:
    """Writes a file of tensors, in one pass from its beginning to its end. On disk when this returns.

    The tensors are contiguous, on the CPU, and alone in their storages.
    """
    frames = {name: _frame(tensor) for name, (_, tensor) in tensors.items()}
    places, end = _places(tensors, frames)
    header = _header(tensors, places, end)
    room = _aligned(8 + len(header))
    sums: dict[str, str] = {}
    with file.open("wb") as stream:
        stream.write((room - 8).to_bytes(8, "little") + header.ljust(room - 8))
        for name, (before, after) in frames.items():
            stream.write(before)
            data = memoryview(flat(tensors[name][1]).view(torch.uint8).numpy())  # type: ignore[arg-type]
            sums[name] = checksums.write(stream, data)
            stream.write(after + bytes(_aligned(places[name].length) - places[name].length))
            if progress:
                progress(tensors[name][1].nbytes)
        synced(stream)
    return {
        name: Written(at.archive + room, at.length, at.start + room, sums[name])
        for name, at in places.items()
    }


class _Records(io.RawIOBase):
    """What torch.save writes: where it leaves out the data, it moves on instead."""

    def __init__(self) -> None:
        self.parts: list[list[bytes]] = [[]]

    def write(self, data: Any) -> int:
        self.parts[-1].append(bytes(data))
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.parts.append([])
        return 0


def _frame(tensor: Tensor) -> _Frame:
    records = _Records()
    with skip_data():
        torch.save(tensor, records)  # type: ignore[arg-type]
    before, *after = map(b"".join, records.parts)
    assert len(after) == (tensor.nbytes > 0), "the data are left out once"
    return _Frame(before, after[0]) if after else _Frame(b"", before)


def _places(tensors: Named, frames: Mapping[str, _Frame]) -> tuple[dict[str, Written], int]:
    """Where each tensor goes, from the end of the header on, and how long all that is."""
    out, at = {}, 0
    for name, (before, after) in frames.items():
        length = len(before) + tensors[name][1].nbytes + len(after)
        out[name] = Written(at, length, at + len(before))
        at += _aligned(length)
    return out, at


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _header(tensors: Named, places: Mapping[str, Written], end: int) -> bytes:
    entries: dict[str, object] = {}
    offsets: dict[str, object] = {}
    keys, at = _keys(tensors), 0
    taken = {RESERVED, *tensors, *keys.values()}
    for i, (name, (offset, tensor)) in enumerate(tensors.items()):
        start, stop = places[name].start, places[name].start + tensor.nbytes
        frame, key = unused(f"frame/{i}", taken), keys[name]
        dtype = NAMES.get(str(tensor.dtype).removeprefix("torch."))
        known = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        entries |= {frame: _bytes(at, start), key: known if dtype else _bytes(start, stop)}
        offsets |= {frame: {SAVED: [0]}} | ({} if offset is None else {key: {SAVED: list(offset)}})
        at = stop
    last = unused(f"frame/{len(tensors)}", taken)
    sharding = json.dumps({**offsets, last: {SAVED: [0]}})
    return json.dumps({RESERVED: {SHARDING: sharding}, **entries, last: _bytes(at, end)}).encode()


def _keys(names: Iterable[str]) -> dict[str, str]:
    """The key of each name in the header: itself, or one like it where that is no key of the format, and no name."""
    taken = {RESERVED, *names}
    keys: dict[str, str] = {}
    for name in names:
        text = name.encode(
            "utf-8", "backslashreplace"
        ).decode()  # half a surrogate pair is no text in JSON
        keys[name] = name if text == name != RESERVED else unused(text, taken)
        taken.add(keys[name])
    return keys


def unused(name: str, taken: Container[str]) -> str:
    """The name, or one like it that is not taken.

    >>> unused("w", {"v"}), unused("w", {"w", "w_"})
    ('w', 'w__')
    """
    while name in taken:
        name += "_"
    return name


def _bytes(start: int, stop: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}


class Strided(NamedTuple):
    """A tensor in a file: its first byte, type, shape, strides in elements, and whether its values are conjugated or
    negated when they are read."""

    start: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    conj: bool = False
    neg: bool = False

    @property
    def extent(self) -> int:
        """Elements from its first to its last, in memory."""
        reach = sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True))
        return 1 + reach if 0 not in self.shape else 0


def described(file: Place, archives: Iterable[tuple[int, int]]) -> list[Strided]:
    """The tensors in archives (offset, length) of torch.save; none of their data is read, nor any code run.

    torch reads them with its list of allowed types (`weights_only`). Raises CheckpointError where an archive holds no
    single plain tensor within its bytes, and where archives overlap: each is read once, whoever names it, so that all
    take no longer than the file is long.
    """
    named = list(archives)
    each = sorted(set(named))
    for one, other in itertools.pairwise(each):
        if sum(one) > other[0]:
            ends = f"bytes {one[0]} to {sum(one)} and {other[0]} to {sum(other)}"
            what = f"{file} has two archives that overlap, {ends}"
            raise CheckpointError(f"{what}; the metadata or it is damaged: save again")
    from torch._subclasses.fake_tensor import FakeTensorMode  # takes most of a second to import

    try:
        with opened(file) as stream, FakeTensorMode():
            found = {archive: _described(stream, *archive) for archive in each}
    except Exception as error:
        what = f"{file} has an archive that is no tensor of torch.save ({error})"
        raise CheckpointError(f"{what}; the file is cut short or damaged: save again") from error
    return [found[archive] for archive in named]


def _described(stream: BinaryIO, offset: int, length: int) -> Strided:
    """Raises what torch and zipfile raise, and ValueError for what does not lie there as it is."""
    view = io.BufferedReader(_Part(stream, offset, length))
    records = _records(view)
    _check_pickle(view)
    view.seek(0)
    tensor = torch.load(view, weights_only=True, map_location="cpu")
    if type(tensor).__name__ != "FakeTensor":
        raise ValueError(f"it holds a {type(tensor).__name__}")
    storage = compat.storage_start(tensor)
    if storage is None or storage not in records:
        raise ValueError(f"its storage begins at {storage}, its records at {sorted(records)}")
    each, dtype = tensor.element_size(), str(tensor.dtype).removeprefix("torch.")
    begin = storage + int(tensor.storage_offset()) * each
    found = Strided(
        offset + begin,
        dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
    if (
        found.extent
        and not storage <= begin <= begin + found.extent * each <= storage + records[storage]
    ):
        raise ValueError(
            f"its {dtype}{list(found.shape)} with strides {found.strides} lies outside its storage"
        )
    return found


LITTLE = b"little"
MOST_PICKLED, MOST_TUPLES = 1 << 16, 16
"""Of the pickle of a single tensor, which has some hundred bytes and six tuples."""


def _check_pickle(view: BinaryIO) -> None:
    """torch's reader hashes what a pickle calls a storage's key; tuples of tuples that share parts take 2^n steps."""
    view.seek(0)
    with zipfile.ZipFile(view) as archive:
        found = [info for info in archive.infolist() if info.filename.endswith("/data.pkl")]
        if len(found) != 1:
            raise ValueError(f"it lists {len(found)} pickles, where a tensor has one")
        if found[0].file_size > MOST_PICKLED:
            raise ValueError("its pickle is too long for a tensor's")
        text = archive.read(found[0])
    tuples = sum(1 for code, _, _ in pickletools.genops(text) if "TUPLE" in code.name)
    if tuples > MOST_TUPLES:
        raise ValueError(f"its pickle makes {tuples} tuples, which no tensor does")


class _Part(io.RawIOBase):
    """Some bytes of a file as a file."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._at = stream, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._offset + self._at)
        data = self._stream.read(min(len(buffer), max(0, self._length - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _is_little(view: BinaryIO, size: int) -> bool:
    return size == len(LITTLE) and view.read(size) == LITTLE


def _records(view: BinaryIO) -> dict[int, int]:
    """Where the records of an archive begin, and their sizes; nothing is compressed, and numbers are little-endian.

    torch would swap the bytes of others in place, also where there are none.
    """
    out = {}
    with zipfile.ZipFile(view) as archive:
        for info in archive.infolist():
            view.seek(info.header_offset + 26)
            names = sum(int.from_bytes(view.read(2), "little") for _ in range(2))
            start = info.header_offset + 30 + names
            out[start] = info.file_size
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{info.filename} is compressed")
            view.seek(start)
            if info.filename.endswith("/byteorder") and not _is_little(view, info.file_size):
                raise ValueError("its numbers are not little-endian")
    return out
