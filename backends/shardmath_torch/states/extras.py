"""Extra states: what a module's `get_extra_state` gives besides tensors, as bytes and back.

1. A checkpoint keeps the bytes, and a word that says what they were.
2. Whatever a module gives comes back as the same kind, but for bytearray and memoryview, which come
   back as bytes.

>>> given = pack_extra(nn.Module(), "_extra_state", io.BytesIO(b"abc"))
>>> given.kind, KINDS[given.kind].restore(given.packed).read()
('file', b'abc')
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardmath_torch.checkpoints.saving import as_tensor
from shardmath_torch.files.places import CheckpointError

__all__ = ["KINDS", "Extra", "as_bytes", "pack_extra"]


def as_bytes(tensor: Tensor) -> bytes:
    """The bytes of a 1-d tensor of uint8."""
    array = tensor.cpu().numpy()
    return array.tobytes()


class Kind(NamedTuple):
    """What an extra state may be: the types, and what makes one of a tensor of bytes again."""

    types: tuple[type, ...]
    restore: Callable[[Tensor], object]


KINDS = {
    "tensor": Kind((Tensor,), Tensor.clone),
    "file": Kind((io.BytesIO,), lambda data: io.BytesIO(as_bytes(data))),
    "bytes": Kind((bytes, bytearray, memoryview), as_bytes),
    "none": Kind((type(None),), lambda data: None),
}
"""By the word that the checkpoint keeps."""


class Extra(NamedTuple):
    """What a module's get_extra_state gave, as bytes, and which of KINDS it is."""

    module: nn.Module
    kind: str
    packed: Tensor


def pack_extra(module: nn.Module, name: str, value: object) -> Extra:
    """The module's extra state of that name. Raises CheckpointError for a value that is not bytes."""
    kind = _kind_of(value)
    if kind is None:
        what = f"extra state {name!r} is of type {type(value).__name__}"
        raise CheckpointError(f"{what}; return bytes, a BytesIO, or a 1-d tensor of uint8")
    return Extra(module, kind, as_tensor(name, b"" if value is None else value))


def _kind_of(value: object) -> str | None:
    """The word for a value, None for one that is not bytes."""
    if isinstance(value, Tensor) and (value.dtype != torch.uint8 or value.ndim != 1):
        return None
    for word, kind in KINDS.items():
        if isinstance(value, kind.types):
            return word
    return None
