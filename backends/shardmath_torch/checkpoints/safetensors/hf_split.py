"""Which tensors go into which file of a folder of safetensors, as Hugging Face's tools divide them.

1. Files are filled in the tensors' natural order, as transformers fills them: a file is closed before a tensor that
   would make it longer than asked, and a tensor that is longer by itself has a file of its own.
2. In a file, long elements lie first, so that every tensor begins at a multiple of its elements' size.
3. All that depends on names, shapes, types and the size asked for, and on nothing else.

>>> rows = {f"layers.{i}": ((4,), "float32") for i in (10, 2, 1)}
>>> [list(file) for file in split(rows, 32)], file_names(2)[0]
([['layers.1', 'layers.2'], ['layers.10']], 'model-00001-of-00002.safetensors')
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TypeAlias

from shardmath.base.dtypes import itemsize
from shardmath.base.text import read_bytes
from shardmath.models.systems.hf import Entry
from shardmath_torch.checkpoints.files.json_text import shown
from shardmath_torch.checkpoints.files.places import CheckpointError
from shardmath_torch.checkpoints.safetensors.headers import NAMES, RESERVED

__all__ = [
    "File",
    "check_entries",
    "count_bytes",
    "file_names",
    "natural_order",
    "size_of",
    "split",
]

File: TypeAlias = dict[str, Entry]
"""The tensors of a file, in the order in which they lie there."""

NUMBER = re.compile(r"([0-9]+)")


def size_of(size: int | str) -> int:
    """Bytes of `5000000` or "5MB", as transformers reads it. Raises CheckpointError for anything else.

    >>> size_of("5GB"), size_of("1.5 kb")
    (5000000000, 1500)
    """
    nbytes: object = size
    if isinstance(size, str):
        # "5" without a unit is five of what? A number of bytes is given as an int.
        nbytes = None if size.strip().isdecimal() else read_bytes(size)
    if type(nbytes) is not int or nbytes < 1:
        what = f"max_shard_size is {shown(size)}"
        raise CheckpointError(f"{what}; give a number of bytes, or text such as '500MB' or '5GB'")
    return nbytes


def check_entries(entries: Mapping[str, Entry]) -> None:
    """Raises CheckpointError for what safetensors cannot say: a type, or a name."""
    for name, (shape, dtype) in entries.items():
        if dtype not in NAMES:
            what = f"tensor {name!r} is {dtype}{list(shape)}, a type that safetensors does not have"
            raise CheckpointError(f"{what}; cast it, or leave it out; it has {', '.join(NAMES)}")
        if name == RESERVED or not _is_text(name):
            what = f"a tensor is called {name!r}, which no safetensors file can call it"
            raise CheckpointError(f"{what}; give it another name")


def _is_text(name: str) -> bool:
    """Whether UTF-8 can say it: half a surrogate pair, which a Python text may hold, it cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def split(entries: Mapping[str, Entry], limit: int) -> list[File]:
    """The tensors file by file, each of at most `limit` bytes unless a tensor alone has more."""
    files: list[File] = []
    current: File = {}
    room = limit
    for name in sorted(entries, key=natural_order):
        nbytes = count_bytes(entries[name])
        if nbytes > limit:
            files.append({name: entries[name]})
            continue
        if nbytes > room:
            files.append(current)
            current = {}
            room = limit
        current[name] = entries[name]
        room -= nbytes
    if current or not files:
        files.append(current)
    return [_put_long_elements_first(file) for file in files]


def natural_order(name: str) -> tuple[list[tuple[bool, int, str]], str]:
    """A key to sort names by, with the numbers in them by size: layer 2 before layer 10."""
    parts = []
    for part in NUMBER.split(name):
        # By digits, not as int: a name may have a number of any length.
        digits = len(part.lstrip("0")) if part.isdecimal() else 0
        parts.append((part.isdecimal(), digits, part))
    return parts, name


def _put_long_elements_first(file: File) -> File:
    """The same tensors by their elements' size, those of one size as they come."""
    by_size = sorted(file.items(), key=lambda item: -itemsize(item[1][1]))
    return dict(by_size)


def count_bytes(entry: Entry) -> int:
    """Bytes of a tensor of that shape and type."""
    shape, dtype = entry
    return math.prod(shape) * itemsize(dtype)


def file_names(count: int) -> list[str]:
    """The names of so many files of a first export."""
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
