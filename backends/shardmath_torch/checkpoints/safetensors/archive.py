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
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.serialization import skip_data

from shardmath_torch.checkpoints.files import checksums
from shardmath_torch.checkpoints.files.places import Place, synced
from shardmath_torch.checkpoints.safetensors.headers import NAMES, PREFIX, RESERVED, make_entry
from shardmath_torch.checkpoints.safetensors.hf_sharded import SAVED, SHARDING
from shardmath_torch.groups.dtypes import flat, see_words
from shardmath_torch.moves.observing.bars import Tally

__all__ = ["ALIGNMENT", "Written", "find_unused", "memory_of", "write"]

ALIGNMENT = 64
"""Bytes; torch.save aligns the data in an archive to as many."""


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


def write(file: Place, tensors: Named, tally: Tally) -> dict[str, Written]:
    """Writes a file of tensors, in one pass from its beginning to its end. On disk when this returns.

    The tensors are contiguous, on the CPU, and alone in their storages.
    """
    frames = {name: _make_frame(tensor) for name, (_, tensor) in tensors.items()}
    archives, end = _place_archives(tensors, frames)
    header = _make_header(tensors, archives, end)
    out = {}
    with file.open("wb") as stream:
        stream.write(header)
        for name, frame in frames.items():
            _, tensor = tensors[name]
            at = archives[name]
            stream.write(frame.before)
            sums = checksums.write(stream, memory_of(tensor), tally.add)
            padding = _align(at.length) - at.length
            stream.write(frame.after + bytes(padding))
            begin = len(header) + at.archive
            start = len(header) + at.start
            out[name] = Written(begin, at.length, start, sums)
        synced(stream)
    return out


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, as they lie in memory."""
    return memoryview(see_words(flat(tensor).view(torch.uint8)))  # type: ignore[arg-type]


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


def _make_frame(tensor: Tensor) -> _Frame:
    """The archive that torch makes of the tensor, without the data."""
    records = _Records()
    with skip_data():
        torch.save(tensor, records)  # type: ignore[arg-type]
    before, *after = map(b"".join, records.parts)
    assert len(after) == (tensor.nbytes > 0), "the data are left out once"
    # An empty tensor has no data to leave out; its frame lies behind it, all in one.
    return _Frame(before, after[0]) if after else _Frame(b"", before)


def _place_archives(tensors: Named, frames: Mapping[str, _Frame]) -> tuple[dict[str, Written], int]:
    """Where each tensor goes, from the end of the header on, and how long all that is."""
    out = {}
    at = 0
    for name, (before, after) in frames.items():
        _, tensor = tensors[name]
        length = len(before) + tensor.nbytes + len(after)
        out[name] = Written(at, length, at + len(before))
        at += _align(length)
    return out, at


def _align(n: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def _make_header(tensors: Named, archives: Mapping[str, Written], end: int) -> bytes:
    """The header and its length: each tensor, and what lies before, between and behind them as tensors of bytes."""
    keys = _choose_keys(tensors)
    taken = {RESERVED, *tensors, *keys.values()}
    frames = [find_unused(f"frame/{i}", taken) for i in range(len(tensors) + 1)]
    entries: dict[str, object] = {}
    at = 0
    for frame, name in zip(frames[:-1], tensors, strict=True):
        _, tensor = tensors[name]
        start = archives[name].start
        stop = start + tensor.nbytes
        entries[frame] = _make_bytes_entry(at, start)
        entries[keys[name]] = _make_tensor_entry(tensor, start, stop)
        at = stop
    entries[frames[-1]] = _make_bytes_entry(at, end)
    return _encode_header(tensors, keys, frames, entries)


def _encode_header(
    tensors: Named, keys: Mapping[str, str], frames: Sequence[str], entries: Mapping[str, object]
) -> bytes:
    """The entries and their metadata as safetensors has them: the length first, then JSON, padded."""
    metadata = {SHARDING: json.dumps(_make_offsets(tensors, keys, frames))}
    text = json.dumps({RESERVED: metadata, **entries}).encode()
    length = _align(PREFIX + len(text)) - PREFIX
    return length.to_bytes(PREFIX, "little") + text.ljust(length)


def _make_offsets(
    tensors: Named, keys: Mapping[str, str], frames: Sequence[str]
) -> dict[str, object]:
    """Where each tensor begins, as torch's reader of shards asks: frames begin at 0, which it asks of them, too."""
    offsets: dict[str, object] = {}
    for frame, (name, (index, _)) in zip(frames[:-1], tensors.items(), strict=True):
        offsets[frame] = {SAVED: [0]}
        if index is not None:
            offsets[keys[name]] = {SAVED: list(index)}
    offsets[frames[-1]] = {SAVED: [0]}
    return offsets


def _make_tensor_entry(tensor: Tensor, start: int, stop: int) -> dict[str, object]:
    """A tensor by its type and shape, or as bytes where safetensors has no such type."""
    dtype = NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        return _make_bytes_entry(start, stop)
    return make_entry(dtype, tensor.shape, start, stop)


def _make_bytes_entry(start: int, stop: int) -> dict[str, object]:
    return make_entry("U8", [stop - start], start, stop)


def _choose_keys(names: Iterable[str]) -> dict[str, str]:
    """The key of each name in the header: itself, or one like it where that is not a key of the format, and no name."""
    taken = {RESERVED, *names}
    keys: dict[str, str] = {}
    for name in names:
        # Half a surrogate pair, which a Python text may hold, is not text in JSON.
        text = name.encode("utf-8", "backslashreplace").decode()
        keys[name] = name if text == name != RESERVED else find_unused(text, taken)
        taken.add(keys[name])
    return keys


def find_unused(name: str, taken: Container[str]) -> str:
    """The name, or one like it that is not taken.

    >>> find_unused("w", {"v"}), find_unused("w", {"w", "w_"})
    ('w', 'w__')
    """
    while name in taken:
        name += "_"
    return name
