"""Safetensors that torch.distributed.checkpoint has left in shards: a file a rank, and no index.

1. `HuggingFaceStorageWriter(save_distributed=True)` writes `shard-00001-model-00001-of-00001.safetensors` and so on,
   each with its rank's boxes, and in the header's metadata, as JSON in a string, at which index of the tensor each
   begins: `{"DCP_SHARDING_INFO": "{\\"w\\": {\\"saved_offsets\\": [4, 0]}}"}`.
2. Nothing there says how large a tensor is, or how many files there are: it ends where its last box does, as torch's
   own reader takes it. Boxes that overlap or leave gaps are found later, as in any checkpoint; a file that is missing
   at the end of every tensor can be noticed by nobody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardmath_torch.files.json_text import MOST, read_json, shown
from shardmath_torch.files.places import Place
from shardmath_torch.files.weights import FILE, INDEX, Entry, WeightsError, read_header

__all__ = ["SAVED", "SHARDING", "Parts", "read_sharded"]

SHARDING, SAVED = "DCP_SHARDING_INFO", "saved_offsets"
"""Where in a header's metadata torch's HuggingFaceStorageReader looks for the index at which a tensor begins."""


class Parts(NamedTuple):
    """A tensor in boxes: its shape, its dtype, and the index at which each entry begins."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[tuple[int, ...], Entry], ...]


def read_sharded(folder: Place) -> dict[str, Parts] | None:
    """The tensors of a folder of such files, by name; None for what is no such folder.

    Raises WeightsError where files are damaged, do not belong together, or do not say where their tensors begin.
    """
    if not folder.is_dir() or any((folder / name).is_file() for name in (FILE, INDEX)):
        return None
    boxes: dict[str, list[tuple[tuple[int, ...], Entry]]] = {}
    plain: list[Place] = []
    sharded: list[Place] = []
    files: list[Place] = list(folder.glob("*.safetensors"))
    for file in sorted(files, key=str):
        entries, metadata = read_header(file)
        (sharded if SHARDING in metadata else plain).append(file)
        if SHARDING in metadata:
            for name, offsets, entry in _placed(file, entries, metadata[SHARDING]):
                boxes.setdefault(name, []).append((offsets, entry))
    if not sharded:
        return None
    if plain:
        what = f"{folder}: {sharded[0].name} says where its tensors begin, {plain[0].name} does not"
        raise WeightsError(f"{what}; keep the files of one checkpoint in a folder")
    return {name: _whole(name, found) for name, found in sorted(boxes.items())}


def _placed(
    file: Place, entries: dict[str, Entry], sharding: object
) -> Iterator[tuple[str, tuple[int, ...], Entry]]:
    """Every tensor of a file, and where it begins."""
    try:
        said = read_json(sharding.encode()) if isinstance(sharding, str) else None
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{file} is damaged: its {SHARDING} is not JSON ({error}); fetch it again"
        ) from error
    for name, entry in entries.items():
        found = said.get(name) if isinstance(said, dict) else None
        offsets = found.get(SAVED) if isinstance(found, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != len(entry.shape)
            or not all(map(_is_index, offsets))
        ):
            what = f"{file} is damaged: its {SHARDING} says of {shown(name)} {shown(list(entry.shape))} {shown(found)}"
            raise WeightsError(f"{what}, not at which index it begins; fetch it again")
        yield name, tuple(offsets), entry


def _is_index(n: object) -> bool:
    return type(n) is int and 0 <= n <= MOST


def _whole(name: str, boxes: list[tuple[tuple[int, ...], Entry]]) -> Parts:
    first = boxes[0][1]
    for _, entry in boxes:
        if (entry.dtype, len(entry.shape)) != (first.dtype, len(first.shape)):
            said = [
                f"{each.dtype}{list(each.shape)} in {each.file.name}" for each in (first, entry)
            ]
            raise WeightsError(
                f"{shown(name)} is {said[0]} and {said[1]}; keep the files of one checkpoint in a folder"
            )
    ends = [
        [at + n for at, n in zip(offsets, entry.shape, strict=True)] for offsets, entry in boxes
    ]
    shape = tuple(max(column) for column in zip(*ends, strict=True))
    return Parts(shape, first.dtype, tuple(boxes))
