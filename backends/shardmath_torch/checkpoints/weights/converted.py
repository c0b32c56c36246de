"""Converted: stored tensors joined into the larger ones that transformers makes of them, such as stacked experts.

1. A tensor of a checkpoint is stored in boxes. So a stack is an additional tensor, in the boxes of all its parts. It is
   loaded under any layout, and each rank reads only its bytes.
2. Scales are joined as their data are, if parts of the data meet at boundaries of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from hashlib import sha256

from torch import nn

from shardmath.models.systems.hf import Shapes
from shardmath.values.formats.format import Format
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.stored import Checkpoint, StoredBox, StoredTensor
from shardmath_torch.checkpoints.weights.quantized import find_scales
from shardmath_torch.tensors.conversions.saved import SavedPart, find_parts, record_conversion

__all__ = ["add_converted"]


def add_converted(
    checkpoint: Checkpoint, module: nn.Module, shapes: Shapes, format: Format | None
) -> Checkpoint:
    """Return `checkpoint` with further entries for tensors of `module` that the checkpoint has only in parts, such as
    single experts that the module stacks. `shapes` has the module's tensors, name -> (shape, dtype); `format` is the
    format of quantized parts.

    Raises CheckpointError for parts that are missing, have another shape or dtype, or are archives of torch.save;
    StoreError if transformers computes with parts; FormatError if two parts share a block of the format.
    """
    recorded = record_conversion(module, shapes)
    if recorded is None:
        return checkpoint
    by_tensor: dict[str, list[SavedPart]] = {}
    for part in find_parts(recorded):
        by_tensor.setdefault(part.tensor, []).append(part)
    tensors = dict(checkpoint.tensors)
    for name, parts in by_tensor.items():
        if name not in checkpoint and any(part.name in checkpoint for part in parts):
            tensors |= _join_tensor_and_scales(checkpoint, name, parts, format)
    digest = sha256(f"{checkpoint.digest} {recorded.digest}".encode()).hexdigest()
    return replace(checkpoint, tensors=tensors, digest=digest)


def _join_tensor_and_scales(
    checkpoint: Checkpoint, name: str, parts: Sequence[SavedPart], format: Format | None
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensor, and if the parts have scales its scales in that format, by stored name."""
    tensor = _join_parts(checkpoint, name, parts)
    yield name, tensor
    for part in parts:
        scales = find_scales(checkpoint, part.name)
        if scales is None:
            continue
        key = name + scales.removeprefix(part.name)
        if format is None:
            # It only matters that there are scales.
            yield key, checkpoint[scales]
        else:
            yield key, _join_scales(checkpoint, tensor, key, parts, format)
        return


def _join_parts(checkpoint: Checkpoint, name: str, parts: Sequence[SavedPart]) -> StoredTensor:
    """The tensor `name` that is stored in the boxes of its parts, such as the experts of a stack."""
    first = checkpoint[parts[0].name]
    boxes: list[StoredBox] = []
    for part in parts:
        stored = checkpoint[part.name]
        if (stored.shape, stored.dtype) != (part.shape, first.dtype):
            what = f"{part.name!r} is stored as {stored.dtype}{list(stored.shape)}"
            wanted = f"as a part of {name!r} it must be {first.dtype}{list(part.shape)}"
            raise CheckpointError(f"{what}, but {wanted}; give the checkpoint of this model")
        boxes += _to_larger(checkpoint, part, stored.pieces)
    shape = tuple(max(part.box[d][1] for part in parts) for d in range(len(parts[0].box)))
    return StoredTensor(shape, first.dtype, tuple(boxes))


def _to_larger(
    checkpoint: Checkpoint, part: SavedPart, pieces: Iterable[StoredBox]
) -> Iterator[StoredBox]:
    """The stored boxes of a part as boxes of the larger tensor, with the same bytes."""
    for piece in pieces:
        if piece.archive:
            what = f"{checkpoint.path} has {part.name!r}, a part of {part.tensor!r}, in archives"
            why = "of torch.save, but only parts in safetensors can be joined"
            raise CheckpointError(f"{what} {why}; save the checkpoint as safetensors")
        offsets = [start for start, _ in part.box]
        sizes = [1] * len(part.box)
        for d, offset, n in zip(part.kept, piece.offsets, piece.sizes, strict=True):
            offsets[d] += offset
            sizes[d] = n
        yield piece._replace(offsets=tuple(offsets), sizes=tuple(sizes))


def _join_scales(
    checkpoint: Checkpoint,
    tensor: StoredTensor,
    name: str,
    parts: Sequence[SavedPart],
    format: Format,
) -> StoredTensor:
    """The tensor's scales, joined from its parts' scales. Raises FormatError if two parts share a block."""
    scale_parts = []
    for part in parts:
        scales = find_scales(checkpoint, part.name)
        if scales is None:
            what = f"{part.name!r} has no scales, but other parts of {part.tensor!r} have"
            raise CheckpointError(f"{what}; give a checkpoint with the scales of all parts")
        index = tuple(slice(start, stop) for start, stop in part.box)
        block_slices = format.blocks.scale_slice(index, tensor.shape, part.name)
        box = tuple((cut.start, cut.stop) for cut in block_slices if isinstance(cut, slice))
        # Saved scales have the dimensions that the saved part has.
        shape = tuple(box[d][1] - box[d][0] for d in part.kept)
        scale_parts.append(SavedPart(scales, shape, name, box, part.kept))
    return _join_parts(checkpoint, name, scale_parts)
