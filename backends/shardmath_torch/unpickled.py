"""What torch.distributed.checkpoint pickled into `.metadata`, read without running anything that is not listed here.

1. A pickle may name the classes of that file and nothing else: a name outside `ALLOWED` ends the reading before it is
   looked up.
2. What it gets for a name is made for this reading, a subclass or a function that calls the real one: a pickle may set
   attributes of what it names, and torch's own classes are to stay as they are.
3. None of it opens files, starts processes or imports by name.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from shardmath_torch.archive import CheckpointError

__all__ = ["ALLOWED", "read_metadata"]

_METADATA = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"

ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_OLD, "TensorProperties"),
    (_OLD, "MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}
"""(module, name) of all that torch writes there; types of elements, `torch.float32` and so on, beside."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ALLOWED:
            return _copy(super().find_class(module, name))
        found = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _copy(found: Any) -> Any:
    """Something that does the same."""
    if isinstance(found, type) and dataclasses.is_dataclass(found):
        return type(found.__name__, (found,), {})
    return lambda *args: found(*args)


def read_metadata(text: bytes, where: object) -> Metadata:
    """The metadata of a checkpoint of torch; its parts are equal to nothing that torch makes.

    Raises CheckpointError for what is none, naming the file `where`.
    """
    try:
        found = _Unpickler(io.BytesIO(text)).load()
    except Exception as error:
        what = f"{where} is no metadata of torch.distributed.checkpoint: {error}"
        raise CheckpointError(
            f"{what}; nothing else is unpickled: save again, or convert it where you trust it"
        ) from error
    if not isinstance(found, Metadata):
        what = f"{where} holds a {type(found).__name__}, not the Metadata of torch.distributed.checkpoint"
        raise CheckpointError(f"{what}; give the folder of a checkpoint")
    return found
