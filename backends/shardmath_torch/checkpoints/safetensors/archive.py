"""Data files of checkpoints: safetensors in which every tensor is also an archive of torch.save.

1. A file is a safetensors file: a header, then tensors back to back. Between two saved tensors lie the zip records that
   make an archive of each; the header lists them as tensors of bytes, `frame/0`, `frame/1`, ...
2. So safetensors, torch.load at the archive's offset (which readers of torch.distributed.checkpoint use), and any
   program that maps the file all read the same copy of the data.
3. Archives begin at multiples of 64 bytes of the file, and with torch's own alignment so do the tensors in them.
4. torch makes the archive without the data (`skip_data`), which is written from memory; the zip's checksums are left
   out too, as torch does not check them.
5. Dtypes that safetensors has no name for appear as bytes in the header; the checkpoint's index has their dtype.

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
"""Archives begin at a multiple of this many bytes, to which torch.save aligns the data in an archive."""


class Written(NamedTuple):
    """A tensor's place in a safetensors file: the offset (`archive`) and `length` of the torch.save archive that
    contains the tensor, and the offset of its bytes (`start`). `sums` joins hexadecimal checksums, one for every 4 MiB
    of the tensor.

    Both offsets count from the start of the file.
    """

    archive: int
    length: int
    start: int
    sums: str = ""


class _ArchiveFrame(NamedTuple):
    """The bytes of a torch.save archive before and after the tensor's data."""

    before: bytes
    after: bytes


Named: TypeAlias = Mapping[str, tuple[tuple[int, ...] | None, Tensor]]
"""Local tensors by name, each with its offsets in the global tensor, or None if the name is a numbered box's."""


def write(file: Place, tensors: Named, tally: Tally) -> dict[str, Written]:
    """Write `tensors` to a safetensors `file`, the bytes of each inside an archive that torch.load can read, and return
    each tensor's place by name. `tally` counts the bytes as they are written, for progress reports.

    The tensors are contiguous, on the CPU, and fill their storages.
    """
    frames = {name: _make_frame(tensor) for name, (_, tensor) in tensors.items()}
    archives, end = _place_archives(tensors, frames)
    header = _make_header(tensors, archives, end)
    written = {}
    with file.open("wb") as stream:
        stream.write(header)
        for name, frame in frames.items():
            _, tensor = tensors[name]
            planned = archives[name]
            stream.write(frame.before)
            sums = checksums.write(stream, memory_of(tensor), tally.add)
            padding = _round_up(planned.length) - planned.length
            stream.write(frame.after + bytes(padding))
            begin = len(header) + planned.archive
            start = len(header) + planned.start
            written[name] = Written(begin, planned.length, start, sums)
        synced(stream)
    return written


def memory_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of `tensor`, which must be contiguous and on the CPU."""
    return memoryview(see_words(flat(tensor).view(torch.uint8)))  # type: ignore[arg-type]


class _Records(io.RawIOBase):
    """A file that collects what torch.save writes, in parts: torch seeks past the data that it leaves out."""

    def __init__(self) -> None:
        self.parts: list[list[bytes]] = [[]]

    def write(self, data: Any) -> int:
        self.parts[-1].append(bytes(data))
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        self.parts.append([])
        return 0


def _make_frame(tensor: Tensor) -> _ArchiveFrame:
    """The archive that torch makes of the tensor, without the data."""
    records = _Records()
    try:
        with skip_data():
            torch.save(tensor, records)  # type: ignore[arg-type]
    except RuntimeError as error:
        # After Ctrl-C torch still ends the archive, which fails, as a part of it is missing.
        if isinstance(error.__context__, KeyboardInterrupt):
            raise error.__context__ from None
        raise
    before, *after = map(b"".join, records.parts)
    has_data = tensor.nbytes > 0
    assert len(after) == has_data, "the data are left out once"
    # An empty tensor has no data to leave out; its whole frame is placed behind it.
    return _ArchiveFrame(before, after[0]) if after else _ArchiveFrame(b"", before)


def _place_archives(
    tensors: Named, frames: Mapping[str, _ArchiveFrame]
) -> tuple[dict[str, Written], int]:
    """The place of each tensor in the file, counted from the end of the header, and the length of all archives."""
    archives = {}
    end = 0
    for name, (before, after) in frames.items():
        _, tensor = tensors[name]
        length = len(before) + tensor.nbytes + len(after)
        archives[name] = Written(end, length, end + len(before))
        end += _round_up(length)
    return archives, end


def _round_up(n: int) -> int:
    """`n` rounded up to a multiple of ALIGNMENT."""
    return -(-n // ALIGNMENT) * ALIGNMENT


def _make_header(tensors: Named, archives: Mapping[str, Written], end: int) -> bytes:
    """The file's header: entries of all tensors, and of the bytes between them as `frame/0` and so on."""
    keys = _choose_keys(tensors)
    taken = {RESERVED, *tensors, *keys.values()}
    frames = [find_unused(f"frame/{i}", taken) for i in range(len(tensors) + 1)]
    entries: dict[str, object] = {}
    previous_stop = 0
    for frame, name in zip(frames[:-1], tensors, strict=True):
        _, tensor = tensors[name]
        start = archives[name].start
        stop = start + tensor.nbytes
        entries[frame] = _make_bytes_entry(previous_stop, start)
        entries[keys[name]] = _make_tensor_entry(tensor, start, stop)
        previous_stop = stop
    entries[frames[-1]] = _make_bytes_entry(previous_stop, end)
    return _encode_header(tensors, keys, frames, entries)


def _encode_header(
    tensors: Named, keys: Mapping[str, str], frames: Sequence[str], entries: Mapping[str, object]
) -> bytes:
    """The header in safetensors' format: its length, then metadata and entries as JSON, padded."""
    metadata = {SHARDING: json.dumps(_make_offsets(tensors, keys, frames))}
    text = json.dumps({RESERVED: metadata, **entries}).encode()
    length = _round_up(PREFIX + len(text)) - PREFIX
    return length.to_bytes(PREFIX, "little") + text.ljust(length)


def _make_offsets(
    tensors: Named, keys: Mapping[str, str], frames: Sequence[str]
) -> dict[str, object]:
    """The offsets of each tensor in its global one, for torch's reader of shards, which needs 0 for frames, too."""
    offsets: dict[str, object] = {}
    # A frame lies before each tensor, and one behind the last.
    for frame, (name, (index, _)) in zip(frames[:-1], tensors.items(), strict=True):
        offsets[frame] = {SAVED: [0]}
        if index is not None:
            offsets[keys[name]] = {SAVED: list(index)}
    offsets[frames[-1]] = {SAVED: [0]}
    return offsets


def _make_tensor_entry(tensor: Tensor, start: int, stop: int) -> dict[str, object]:
    """A tensor's entry in the header, as bytes if safetensors lacks its dtype."""
    dtype = NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        return _make_bytes_entry(start, stop)
    return make_entry(dtype, tensor.shape, start, stop)


def _make_bytes_entry(start: int, stop: int) -> dict[str, object]:
    return make_entry("U8", [stop - start], start, stop)


def _choose_keys(names: Iterable[str]) -> dict[str, str]:
    """The key of each name in the header: the name, or an unused one like it if the format does not allow the name."""
    taken = {RESERVED, *names}
    keys: dict[str, str] = {}
    for name in names:
        # A lone surrogate, which a Python str may hold, is not allowed in JSON.
        text = name.encode("utf-8", "backslashreplace").decode()
        keys[name] = name if text == name != RESERVED else find_unused(text, taken)
        taken.add(keys[name])
    return keys


def find_unused(name: str, taken: Container[str]) -> str:
    """Return `name`, with underscores appended until it is not in `taken`.

    >>> find_unused("w", {"v"}), find_unused("w", {"w", "w_"})
    ('w', 'w__')
    """
    while name in taken:
        name += "_"
    return name
