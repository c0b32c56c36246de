"""Data files of checkpoints: safetensors in which every tensor is also an archive of torch.save.

1. A file is a safetensors file, header and tensors back to back. What lies between two tensors of ours are the zip
   records that make an archive of each; they are tensors of bytes by themselves, `frame/0`, `frame/1`, ...
2. So one copy of the data is read by safetensors, by torch.load at the archive's offset, which is how the readers of
   torch.distributed.checkpoint find it, and by whoever maps the file.
3. Archives, and the tensors in them, begin at multiples of 64 bytes of the file.
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
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.serialization import skip_data

from shardmath.errors import ShardError
from shardmath_torch import compat
from shardmath_torch.weights import DTYPES

__all__ = ["ALIGNMENT", "CheckpointError", "Stored", "Written", "described", "write"]

ALIGNMENT = 64
"""Bytes; torch.save aligns the data in an archive to as many."""

SHARDING, SAVED = "DCP_SHARDING_INFO", "saved_offsets"
"""Where in a header's metadata torch's HuggingFaceStorageReader looks for the index at which a tensor begins."""

NAMES = {name: theirs for theirs, name in DTYPES.items()}


class CheckpointError(ShardError):
    """A checkpoint that cannot be written or read, or that does not hold what is asked of it."""


class Written(NamedTuple):
    """Where in a file a tensor went: its archive, and its first byte."""

    archive: int
    length: int
    start: int


class _Frame(NamedTuple):
    """The records of an archive before and after the tensor's data."""

    before: bytes
    after: bytes


Named: TypeAlias = Mapping[str, tuple[tuple[int, ...], Tensor]]
"""Tensors by name, each with the global index at which it begins."""


def write(file: Path, tensors: Named) -> dict[str, Written]:
    """Writes a file of tensors, in one pass from its beginning to its end. On disk when this returns.

    The tensors are contiguous, on the CPU, and alone in their storages.
    """
    frames = {name: _frame(tensor) for name, (_, tensor) in tensors.items()}
    places, end = _places(tensors, frames)
    header = _header(tensors, places, end)
    room = _aligned(8 + len(header))
    with file.open("wb") as stream:
        stream.write((room - 8).to_bytes(8, "little") + header.ljust(room - 8))
        for name, (before, after) in frames.items():
            stream.write(before)
            stream.write(memoryview(tensors[name][1].reshape(-1).view(torch.uint8).numpy()))  # type: ignore[arg-type]
            stream.write(after + bytes(_aligned(places[name].length) - places[name].length))
        stream.flush()
        os.fsync(stream.fileno())
    return {name: Written(at.archive + room, at.length, at.start + room) for name, at in places.items()}


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
    at = 0
    for i, (name, (offset, tensor)) in enumerate(tensors.items()):
        start, stop = places[name].start, places[name].start + tensor.nbytes
        frame = _unused(f"frame/{i}", tensors)
        dtype = NAMES.get(str(tensor.dtype).removeprefix("torch."))
        known = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        entries |= {frame: _bytes(at, start), name: known if dtype else _bytes(start, stop)}
        offsets |= {frame: {SAVED: [0]}, name: {SAVED: list(offset)}}
        at = stop
    last = _unused(f"frame/{len(tensors)}", tensors)
    sharding = json.dumps({**offsets, last: {SAVED: [0]}})
    return json.dumps({"__metadata__": {SHARDING: sharding}, **entries, last: _bytes(at, end)}).encode()


def _unused(name: str, tensors: Named) -> str:
    """The name, or one like it that is no tensor's."""
    return name if name not in tensors else _unused(name + "_", tensors)


def _bytes(start: int, stop: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop]}


class Stored(NamedTuple):
    """A tensor in a file: its first byte, type, shape and strides in elements."""

    start: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements from its first to its last, in memory."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.strides, strict=True)) if self.nonempty else 0

    @property
    def nonempty(self) -> bool:
        """Whether it has elements."""
        return 0 not in self.shape


def described(file: Path, archives: Iterable[tuple[int, int]]) -> list[Stored]:
    """The tensors in archives (offset, length) of torch.save; none of their data is read, nor any code run.

    Raises CheckpointError where an archive holds no single plain tensor.
    """
    with file.open("rb") as stream:
        return [_described(file, stream, offset, length) for offset, length in archives]


def _described(file: Path, stream: BinaryIO, offset: int, length: int) -> Stored:
    try:
        start, tensor = compat.skeleton(stream, offset, length)
    except Exception as error:
        what = f"{file} has no tensor of torch.save at bytes {offset}..{offset + length} ({error})"
        raise CheckpointError(f"{what}; the file is cut short or damaged: save again") from error
    begin = start + int(tensor.storage_offset()) * tensor.element_size()
    return Stored(begin, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride())
