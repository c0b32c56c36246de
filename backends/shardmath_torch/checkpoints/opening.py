"""Opening: what a folder holds, read from indices and headers only.

1. Three kinds open: what `save` wrote, what torch.distributed.checkpoint wrote, and safetensors files (Hugging Face's,
   or torch's shards of them).
2. `save` writes torch's own `.metadata`, with its index at the end of the same file (`sealed`). `shardmath.json` is a
   copy of the index: one that differs and is of the same save raises, one of another save is older and is ignored. It
   is used only if there is no `.metadata`. If torch has saved over a checkpoint, its `.metadata` has no index and names
   no file of `save`'s: one that does name such a file has been cut.
3. Whatever error an untrusted file makes Python raise becomes a CheckpointError that names the path.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardmath.base.errors import ShardError
from shardmath.base.text import word_error
from shardmath_torch.checkpoints.commits import FILE, INDEX, METADATA, OURS
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError, Place, content_of, place
from shardmath_torch.checkpoints.files.sealed import Sealed, holds, unseal
from shardmath_torch.checkpoints.files.unpickled import read_metadata
from shardmath_torch.checkpoints.index import (
    as_blobs,
    as_count,
    as_counts,
    file_in,
    from_index,
    read_index,
)
from shardmath_torch.checkpoints.safetensors.hf_sharded import Parts, read_sharded
from shardmath_torch.checkpoints.safetensors.weights import FILE as MODEL_FILE
from shardmath_torch.checkpoints.safetensors.weights import INDEX as MODEL_INDEX
from shardmath_torch.checkpoints.safetensors.weights import open_weights
from shardmath_torch.checkpoints.stored import Checkpoint, StoredBox, StoredTensor
from shardmath_torch.groups import compat

__all__ = ["BLOBS", "check_one_model", "open_checkpoint"]

BLOBS = ("shardmath.blobs",)
"""The key of per-rank bytes' stored names in torch's planner data; a tuple, as other keys there are tensor names."""

_DAMAGE = (
    AttributeError,
    LookupError,
    OSError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)
"""The errors that reading a malformed file may raise."""


@compat.untraced
def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint at `path`, and return a Checkpoint: the shapes, dtypes and places (file and bytes) of its
    tensors, without their data.

    It may be one by `save` or torch.distributed.checkpoint, or safetensors as in `weights` and `hf_sharded`; a URL is
    one that fsspec serves.

    Reads indices and headers only. Raises CheckpointError or WeightsError, naming the file.
    """
    try:
        return _open(_make_absolute(place(path)))
    except ShardError:
        raise
    except _DAMAGE as error:
        fault = word_error(error)[:200]
        what = f"{path} is not a checkpoint, or a damaged one ({fault})"
        fix = "give the folder that `save` wrote, or fetch the checkpoint again"
        raise CheckpointError(f"{what}; {fix}") from error


def check_one_model(path: str | os.PathLike[str]) -> None:
    """Raise CheckpointError if the folder `path` has a checkpoint by `save` or torch and also a model in Hugging Face's
    files, so that it is not known whose weights are meant."""
    folder = place(path)
    models = [name for name in (MODEL_FILE, MODEL_INDEX) if (folder / name).is_file()]
    indices = [name for name in (METADATA, INDEX) if (folder / name).is_file()]
    if models and indices:
        what = f"{folder} has a checkpoint, by its {indices[0]}, and another model, in {models[0]}"
        fix = f"give the path {folder / models[0]} to load that model, or move one of the two to another folder"
        raise CheckpointError(f"{what}; {fix}")


def _make_absolute(path: Place) -> Place:
    """Return the path as an absolute one, which stays valid after a change of directory."""
    return path.absolute() if isinstance(path, Path) else path


def _open(path: Place) -> Checkpoint:
    """Open a checkpoint by the first of these that exists: `.metadata`, the copy of the index, safetensors files."""
    metadata = _read_if_there(path / METADATA)
    copy = _read_if_there(path / INDEX)
    if metadata is None and copy is None:
        return _open_weights(path)
    if metadata is None:
        assert copy is not None, "one of the two is there"
        return _open_by_copy(path, copy)
    sealed = unseal(metadata, path / METADATA)
    if sealed is None:
        return _open_torch(path, metadata)
    index = read_index(path / METADATA, sealed.json.encode())
    _check_copy(path / INDEX, copy, sealed)
    return from_index(path, index, _digest(metadata))


def _open_by_copy(path: Place, copy: bytes) -> Checkpoint:
    """Open a checkpoint by the copy of its index, whose own checksum is checked, as there is no `.metadata`."""
    index = read_index(path / INDEX, copy)
    if not holds(copy.decode()):
        what = f"{path / INDEX} is damaged: its text does not have the checksum at its end"
        raise CheckpointError(f"{what}; fetch it and {METADATA} again")
    return from_index(path, index, _digest(copy))


def _check_copy(file: Place, copy: bytes | None, sealed: Sealed) -> None:
    """Raise CheckpointError if the copy of the index is of the same save and differs from the sealed one."""
    if copy is None or copy == sealed.json.encode():
        return
    try:
        save = read_index(file, copy)["save"]
    except CheckpointError:
        return  # it does not pass for an index
    if save == sealed.save:
        what = f"{file} is damaged: its index is not that in {METADATA}, of the same save {save}"
        fix = f"remove it, as {METADATA} has the right checksum, or fetch both again"
        raise CheckpointError(f"{what}; {fix}")


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _read_if_there(file: Place) -> bytes | None:
    """The bytes of the file; None if it does not exist. Raises CheckpointError if it cannot be read."""
    if not file.is_file():
        return None
    try:
        return content_of(file)
    except OSError as error:
        what = f"{file} cannot be read: {error.strerror or error}"
        raise CheckpointError(f"{what}; make it readable, or fetch it again") from error


# torch.distributed.checkpoint


_BoxKey: TypeAlias = tuple[str, tuple[int, ...] | None]
"""The name of a tensor and the offsets of one of its boxes; None for an object, which has no boxes."""
_Infos: TypeAlias = Mapping[_BoxKey, Any]
"""torch's record of where each box lies."""


def _open_torch(path: Place, text: bytes) -> Checkpoint:
    """Open a checkpoint by a `.metadata` without an index, as torch writes it."""
    file = path / METADATA
    metadata = read_metadata(text, file)
    _check_box_count(file, metadata, len(text))
    infos = _list_infos(file, metadata)
    files = _Files(path)
    tensors: dict[str, StoredTensor] = {}
    for name, entry in metadata.state_dict_metadata.items():
        tensors[name] = _read_entry(files, name, entry, infos)
    blobs = as_blobs(path, _find_blobs(metadata), tensors)
    found = Checkpoint(path, tensors, blobs, {}, _digest(text))
    _check_not_cut(file, found)
    return found


def _list_infos(file: Place, metadata: Metadata) -> _Infos:
    """torch's record of the file and bytes of each box. Raises CheckpointError for metadata without such records."""
    if not isinstance(metadata.storage_data, dict):
        kind = type(metadata.storage_data).__name__
        what = f"{file} does not say where tensors are stored: its storage_data is a {kind}, not a dict"
        raise CheckpointError(f"{what}; save again with torch's FileSystemWriter")
    infos: dict[_BoxKey, Any] = {}
    for index, info in metadata.storage_data.items():
        offsets = None if index.offset is None else as_counts(index.offset)
        infos[index.fqn, offsets] = info
    return infos


def _check_box_count(file: Place, metadata: Metadata, most: int) -> None:
    """Raise CheckpointError for more boxes than the file has bytes, as a pickle has if names share a list of boxes."""
    count = sum(map(len, _find_blobs(metadata).values()))
    for entry in metadata.state_dict_metadata.values():
        if isinstance(entry, TensorStorageMetadata):
            count += len(entry.chunks)
    if count > most:
        what = f"{file} of {most} bytes lists {count} boxes of tensors, where torch needs a byte for each"
        raise CheckpointError(f"{what}; save the checkpoint again with torch")


def _check_not_cut(file: Place, found: Checkpoint) -> None:
    """Raise CheckpointError for metadata without an index that name a data file of `save`'s: they have been cut.

    torch never gives a file such a name, even if its storage writer is used with SavePlanner.
    """
    named: dict[Place, None] = {}
    for tensor in found.tensors.values():
        named |= dict.fromkeys(box.file for box in tensor.pieces)
    ours = next((data for data in named if FILE.fullmatch(data.name)), None)
    if ours is not None:
        what = f"{file} is cut short: it names {ours.name}, which `save` wrote"
        why = "but ends before the index that `save` writes at its end"
        fix = f"fetch it again, or remove it to load by {INDEX}"
        raise CheckpointError(f"{what}, {why}; {fix}")


def _find_blobs(metadata: Metadata) -> dict[Any, Any]:
    """The stored names of per-rank bytes in `.metadata`, under the key that `save` writes, or the one it once wrote."""
    extra = metadata.planner_data
    if isinstance(extra, dict):
        for key in (BLOBS, BLOBS[0]):
            found = extra.get(key)
            if isinstance(found, dict):
                return found
    return {}


class _Files:
    """Files of a folder by the names in torch's records, each path checked and made once, as many boxes share it."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._places: dict[object, Place] = {}

    def find(self, name: str, info: Any) -> Place:
        """Return the path of the file that holds a part of tensor `name`. `info`, from torch's metadata, has the file's
        path relative to the checkpoint's folder.

        Raises CheckpointError if the path leads out of the folder, or if the data were saved through torch's stream
        extensions, such as compression.
        """
        if getattr(info, "transform_descriptors", None):
            through = shown(info.transform_descriptors)
            what = f"tensor {shown(name)} was saved through torch's extensions {through}"
            fix = "only plain data can be read; save it again without _extensions="
            raise CheckpointError(f"{self._folder}: {what}, but {fix}")
        path = info.relative_path
        # What is not a str, and may not be hashable, raises in `file_in`.
        if not isinstance(path, str) or path not in self._places:
            self._places[path] = file_in(self._folder, path)
        return self._places[path]


def _read_entry(files: _Files, name: str, entry: object, infos: _Infos) -> StoredTensor:
    """A tensor of torch's metadata with its boxes; for a pickled object, the bytes of its pickle as a tensor."""
    if isinstance(entry, TensorStorageMetadata):
        shape = as_counts(entry.size)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        boxes = _list_boxes(files, name, entry, infos)
        return StoredTensor(shape, dtype, tuple(boxes))
    info = infos[name, None]
    file = files.find(name, info)
    start, length = as_count(info.offset), as_count(info.length)
    shape = (length,)
    box = StoredBox((0,), shape, file, start, length)
    return StoredTensor(shape, "uint8", (box,))


def _list_boxes(
    files: _Files, name: str, entry: TensorStorageMetadata, infos: _Infos
) -> Iterator[StoredBox]:
    """The boxes in which a tensor is stored. If an empty box has the offsets of another, torch keeps only the other."""
    ndim = len(entry.size)
    chunks = []
    for chunk in entry.chunks:
        chunks.append((as_counts(chunk.offsets), as_counts(chunk.sizes)))
    full = {offsets for offsets, sizes in chunks if 0 not in sizes}
    for offsets, sizes in chunks:
        if not len(offsets) == len(sizes) == ndim:
            what = f"{name!r} has {ndim} dimensions, but a box with offsets {offsets} and sizes {sizes}"
            raise ValueError(f"{what}; save it again")
        if 0 in sizes and offsets in full:
            continue
        info = infos[name, offsets]
        file = files.find(name, info)
        start, length = as_count(info.offset), as_count(info.length)
        yield StoredBox(offsets, sizes, file, start, length, archive=True)


# Hugging Face


def _open_weights(path: Place) -> Checkpoint:
    """Open a checkpoint of safetensors files by their headers."""
    if _is_unfinished(path):
        what = f"{path} has files of a save that did not end, but neither {METADATA} nor {INDEX}"
        raise CheckpointError(f"{what}; save again, or give the folder of a whole checkpoint")
    sharded = read_sharded(path)
    if sharded is None:
        sharded = _read_whole(path)
    tensors = {name: _to_stored(parts) for name, parts in sharded.items()}
    identity = repr(sorted(map(_identify, tensors, tensors.values())))
    return Checkpoint(path, tensors, {}, {}, _digest(identity.encode()))


def _identify(name: str, tensor: StoredTensor) -> tuple[object, ...]:
    """The facts about a tensor that are the same on all ranks that open the same files, wherever these are mounted."""
    boxes = [(box.offsets, box.sizes, box.file.name, box.start) for box in tensor.pieces]
    return (name, tensor.shape, tensor.dtype, *boxes)


def _is_unfinished(path: Place) -> bool:
    """Whether a folder, known to have no index, has data files of `save`'s and no model."""
    if not path.is_dir():
        return False
    if not any(FILE.fullmatch(file.name) for file in path.glob(f"{OURS}*")):
        return False
    return next(iter(path.glob("model.safetensors*")), None) is None


def _read_whole(path: Place) -> dict[str, Parts]:
    """The tensors in Hugging Face's files, each as one box."""
    found: dict[str, Parts] = {}
    for name, entry in open_weights(path).entries.items():
        origin = (0,) * len(entry.shape)
        boxes = ((origin, entry),)
        found[name] = Parts(entry.shape, entry.dtype, boxes)
    return found


def _to_stored(parts: Parts) -> StoredTensor:
    """A tensor of safetensors files as a StoredTensor."""
    boxes = []
    for offsets, entry in parts.boxes:
        box = StoredBox(offsets, entry.shape, entry.file, entry.start, entry.nbytes)
        boxes.append(box)
    return StoredTensor(parts.shape, parts.dtype, tuple(boxes))
