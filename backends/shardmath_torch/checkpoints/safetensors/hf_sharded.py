"""Sharded: safetensors that torch.distributed.checkpoint wrote as a file per rank, without an index.

1. `HuggingFaceStorageWriter(save_distributed=True)` writes `shard-00001-model-00001-of-00001.safetensors` and so on,
   each with its rank's boxes, and with the offsets of each box in the header's metadata, as JSON in a string:
   `{"DCP_SHARDING_INFO": "{\\"w\\": {\\"saved_offsets\\": [4, 0]}}"}`.
2. The files do not give the shape of a tensor, or their number: a tensor is assumed to end with its last box, as in
   torch's own reader. Boxes that overlap or leave gaps are found later, as in any checkpoint; a missing file that holds
   the end of every tensor cannot be noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias, TypeGuard

from shardmath_torch.checkpoints.files.json_text import MOST, read_json, shown
from shardmath_torch.checkpoints.files.places import Place
from shardmath_torch.checkpoints.safetensors.headers import HeaderEntry, WeightsError, read_header
from shardmath_torch.checkpoints.safetensors.weights import FILE, INDEX

__all__ = ["SAVED", "SHARDING", "Parts", "read_sharded"]

SHARDING, SAVED = "DCP_SHARDING_INFO", "saved_offsets"
"""The keys in a header's metadata under which torch's HuggingFaceStorageReader looks for a box's offsets."""
FIX = "keep only the files of one checkpoint in a folder"

_Entries: TypeAlias = Mapping[str, HeaderEntry]
_Box: TypeAlias = tuple[tuple[int, ...], HeaderEntry]
"""The offsets of an entry in its tensor, and the entry."""


class Parts(NamedTuple):
    """A tensor that is stored in boxes: its shape, its dtype, and for each box its offsets and its entry in a file."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[_Box, ...]


class _Shard(NamedTuple):
    """A safetensors file that torch wrote for a rank, its tensors, and their offsets as text."""

    file: Place
    entries: _Entries
    sharding: object


def read_sharded(folder: Place) -> dict[str, Parts] | None:
    """Return a dict from tensor name to stored boxes (Parts), if torch wrote a safetensors file per rank in `folder`;
    None for other folders.

    Raises WeightsError if files are damaged, do not belong together, or lack offsets of their tensors.
    """
    if not folder.is_dir() or any((folder / name).is_file() for name in (FILE, INDEX)):
        return None
    plain, shards = _read_headers(folder)
    if shards and plain:
        first = shards[0].file.name
        what = (
            f"{folder}: {first} has {SHARDING}, the offsets of shards, but {plain[0].name} has not"
        )
        raise WeightsError(f"{what}; {FIX}")
    return _join_shards(shards) if shards else None


def _read_headers(folder: Place) -> tuple[list[Place], list[_Shard]]:
    """The folder's files: those without offsets of their tensors, and those with them."""
    files: list[Place] = list(folder.glob("*.safetensors"))
    plain = []
    shards = []
    for file in sorted(files, key=str):
        entries, metadata = read_header(file)
        if SHARDING in metadata:
            shards.append(_Shard(file, entries, metadata[SHARDING]))
        else:
            plain.append(file)
    return plain, shards


def _join_shards(shards: list[_Shard]) -> dict[str, Parts]:
    """Every tensor, joined from its boxes in all files."""
    boxes: dict[str, list[_Box]] = {}
    for file, entries, sharding in shards:
        for name, box in _place_boxes(file, entries, sharding):
            boxes.setdefault(name, []).append(box)
    return {name: _join_boxes(name, boxes[name]) for name in sorted(boxes)}


def _place_boxes(file: Place, entries: _Entries, sharding: object) -> Iterator[tuple[str, _Box]]:
    """The name and the box, with its offsets in the tensor, of every tensor in a file."""
    info = _read_sharding(file, sharding)
    for name, entry in entries.items():
        record = info.get(name)
        offsets = record.get(SAVED) if isinstance(record, dict) else None
        if not _is_index(offsets, len(entry.shape)):
            shape = shown(list(entry.shape))
            what = f"its {SHARDING} says {shown(record)} of {shown(name)}, of shape {shape}"
            fix = f"not {SAVED} of as many numbers; fetch it again"
            raise WeightsError(f"{file} is damaged: {what}, {fix}")
        yield name, (tuple(offsets), entry)


def _read_sharding(file: Place, sharding: object) -> dict[str, object]:
    """The records by tensor in the text `sharding` of a file's metadata; none if it is not a text of a JSON object.
    Raises WeightsError for text that is not JSON."""
    try:
        records = read_json(sharding.encode()) if isinstance(sharding, str) else None
    except (ValueError, RecursionError) as error:
        what = f"its {SHARDING} is not JSON ({error})"
        raise WeightsError(f"{file} is damaged: {what}; fetch it again") from error
    return records if isinstance(records, dict) else {}


def _is_index(value: object, dimensions: int) -> TypeGuard[list[int]]:
    """Whether the value is an index of a tensor with that many dimensions."""
    if not isinstance(value, list) or len(value) != dimensions:
        return False
    return all(type(n) is int and 0 <= n <= MOST for n in value)


def _join_boxes(name: str, boxes: list[_Box]) -> Parts:
    """The tensor of these boxes, which ends where the last of them does."""
    first = boxes[0][1]
    ends = []
    for offsets, entry in boxes:
        if (entry.dtype, len(entry.shape)) != (first.dtype, len(first.shape)):
            what = f"{shown(name)} has a shard {_describe(first)} and a shard {_describe(entry)}"
            raise WeightsError(f"{what}, of different dtype or number of dimensions; {FIX}")
        ends.append([start + n for start, n in zip(offsets, entry.shape, strict=True)])
    shape = tuple(map(max, zip(*ends, strict=True)))
    return Parts(shape, first.dtype, tuple(boxes))


def _describe(entry: HeaderEntry) -> str:
    return f"{entry.dtype}{list(entry.shape)} in {entry.file.name}"
