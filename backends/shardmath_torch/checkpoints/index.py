"""Index: the JSON text that `save` writes about a checkpoint, and that is read as untrusted input.

1. It lies sealed behind torch's metadata in `.metadata` (`sealed`), and as `shardmath.json`:

       "shardmath"  the version
       "save"       the save's digits
       "files"      [name, bytes] of each
       "tensors"    by name: dtype, shape, and of each box [number of its file, first byte, offsets, sizes, checksums]
       "blobs"      by name and rank: the stored name of what the rank saved as bytes
       "sum"        a checksum of the text before it

2. What is read is checked before it is used: counts are counts, boxes have their tensor's dimensions and as many
   checksums as their bytes need, files lie in the checkpoint's folder. The same functions check checkpoints that torch
   and others wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardmath.base.dtypes import ITEMSIZE
from shardmath.base.text import word_error
from shardmath_torch.checkpoints.files import checksums
from shardmath_torch.checkpoints.files.json_text import (
    MOST,
    MOST_DIMENSIONS,
    count_elements,
    read_json,
    shown,
)
from shardmath_torch.checkpoints.files.places import CheckpointError, Place
from shardmath_torch.checkpoints.files.sealed import sign
from shardmath_torch.checkpoints.stored import Checkpoint, StoredBox, StoredTensor

__all__ = [
    "as_blobs",
    "as_count",
    "as_counts",
    "file_in",
    "from_index",
    "read_index",
    "to_json",
]

VERSION = 2


def to_json(checkpoint: Checkpoint, save: str) -> str:
    """Return a JSON text, with a checksum of the text, that lists the files of `checkpoint`, its tensors, and the boxes
    (parts of tensors) in each file. `save`, the identifier of the save that wrote the files, is included."""
    number = {file: i for i, file in enumerate(checkpoint.sizes)}
    tensors: dict[str, list[object]] = {}
    for name, tensor in checkpoint.tensors.items():
        boxes = []
        for box in tensor.pieces:
            file = number[box.file]
            boxes.append([file, box.start, box.offsets, box.sizes, box.sums])
        tensors[name] = [tensor.dtype, tensor.shape, boxes]
    index = {
        "shardmath": VERSION,
        "save": save,
        "files": [[file.name, size] for file, size in checkpoint.sizes.items()],
        "tensors": tensors,
        "blobs": checkpoint.blobs,
    }
    text = json.dumps(index, separators=(",", ":"))
    return sign(text)


def read_index(file: Place, text: bytes) -> dict[str, Any]:
    """Parse the JSON `text` of the index in `file`, and return it as a dict. Raises CheckpointError if it is not an
    index, or is of another version."""
    try:
        index: Any = read_json(text)
        # The files, too, as other JSON may have a version under that key.
        version, _ = index["shardmath"], index["files"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        what = f"{file} is not an index that `save` wrote ({word_error(error)})"
        raise CheckpointError(f"{what}; fetch it again") from error
    if version != VERSION:
        what = f"{file} has version {shown(version)}, but this shardmath reads version {VERSION}"
        raise CheckpointError(f"{what}; load it with the version of shardmath that saved it")
    return dict(index)


def from_index(path: Place, index: dict[str, Any], digest: str) -> Checkpoint:
    """Return the checkpoint at `path` that the parsed `index` describes. `digest` is a digest of the index, kept so
    that ranks can compare whether they read the same one.

    Raises CheckpointError for files outside the folder, and whatever Python raises for other malformed entries.
    """
    files: list[Place] = []
    lengths: dict[Place, int] = {}
    for name, length in index["files"]:
        file = file_in(path, name)
        files.append(file)
        lengths[file] = as_count(length)
    tensors: dict[str, StoredTensor] = {}
    for name, (dtype, shape, boxes) in index["tensors"].items():
        tensors[name] = _read_tensor(files, dtype, shape, boxes)
    blobs = as_blobs(path, index["blobs"], tensors)
    return Checkpoint(path, tensors, blobs, lengths, digest)


def _read_tensor(
    files: list[Place], dtype: str, shape: list[int], boxes: list[Any]
) -> StoredTensor:
    """A tensor in the index, with its boxes, from the JSON values. Raises ValueError for malformed ones."""
    itemsize = ITEMSIZE[dtype]
    sizes = as_counts(shape)
    stored_boxes = [_read_box(files, itemsize, len(sizes), box) for box in boxes]
    return StoredTensor(sizes, dtype, tuple(stored_boxes))


def _read_box(files: list[Place], itemsize: int, ndim: int, box: Any) -> StoredBox:
    """A box of a tensor with `ndim` dimensions, from the JSON value `box`. Raises ValueError for a malformed one."""
    file, start, offsets, sizes, sums = box
    begins = as_counts(offsets)
    extents = as_counts(sizes)
    if len(begins) != ndim or len(extents) != ndim:
        what = (
            f"a tensor has {ndim} dimensions, but a box with offsets {begins} and sizes {extents}"
        )
        raise ValueError(f"{what}; save it again")
    length = count_elements(extents) * itemsize
    digits = checksums.count_checksums(length) * checksums.DIGITS
    if type(sums) is not str or len(sums) != digits:
        what = f"a box of {length} bytes has the checksums {shown(sums)}, not {digits} digits"
        raise ValueError(f"{what}; save it again")
    return StoredBox(begins, extents, files[as_count(file)], as_count(start), length, sums=sums)


def as_blobs(
    path: Place, found: Any, tensors: Mapping[str, StoredTensor]
) -> dict[str, dict[int, str]]:
    """Return the dict that maps each name saved as bytes to a dict from rank to the key of that rank's bytes in
    `tensors`. It is `found`, parsed from the checkpoint at `path`, with ranks converted to ints.

    Raises CheckpointError if `tensors` lacks such a key, or if a name has no rank.
    """
    blobs: dict[str, dict[int, str]] = {}
    missing: list[str] = []
    for name, by_rank in found.items():
        stored = {_as_rank(rank): _as_name(key) for rank, key in by_rank.items()}
        missing += [key for key in stored.values() if key not in tensors]
        blobs[_as_name(name)] = stored
    if missing:
        what = f"{path} is damaged: its metadata has bytes of ranks under {shown(missing[:3])}"
        raise CheckpointError(f"{what}, which are not among its tensors; fetch it again")
    empty = [name for name, stored in blobs.items() if not stored]
    if empty:
        what = f"{path} is damaged: its metadata lists bytes {shown(empty[:3])}"
        raise CheckpointError(f"{what} without a rank that saved them; fetch it again")
    return blobs


def as_count(n: object) -> int:
    """Return `n` if it is an int from 0 to 2^63 - 1, as a number of bytes or elements must be. Raises ValueError if it
    is not."""
    if type(n) is not int or not 0 <= n <= MOST:
        raise ValueError(f"{shown(n)} is not a count from 0 to {MOST}; save it again")
    return n


def as_counts(sizes: Any) -> tuple[int, ...]:
    """Return `sizes`, a shape or offsets from a file, as a tuple of ints. Raises ValueError unless `sizes` is a list or
    tuple of at most 64 ints, each from 0 to 2^63 - 1."""
    if not isinstance(sizes, list | tuple) or len(sizes) > MOST_DIMENSIONS:
        what = f"{shown(sizes)} is not a list of sizes of up to {MOST_DIMENSIONS} dimensions"
        raise ValueError(f"{what}; save it again")
    return tuple(map(as_count, sizes))


def _as_name(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{shown(name)} is not a name, which must be a str; save it again")
    return name


def _as_rank(rank: object) -> int:
    """Return a rank as an int; as a key of JSON it is text. Raises ValueError for any other value."""
    number = int(rank) if isinstance(rank, str) else rank
    return as_count(number)


def file_in(folder: Place, name: object) -> Place:
    """Return the path of the data file in `folder` whose relative path is `name`; it can be in a subfolder. Raises
    CheckpointError if `name` is not a path inside the folder."""
    if not isinstance(name, str) or not name or "\0" in name or _leads_out(Path(name)):
        what = f"{folder} is damaged: its metadata names a data file {shown(name)}"
        raise CheckpointError(f"{what} that is not in this folder; fetch it again")
    return folder / name


def _leads_out(path: Path) -> bool:
    return path.is_absolute() or ".." in path.parts
