"""Split: tensors divided into the files of a folder of safetensors, as by Hugging Face's tools.

1. Files are filled in the tensors' natural order, as by transformers: a file is closed before a tensor that would make
   it exceed the limit, and a tensor that exceeds the limit by itself has a separate file.
2. In a file, dtypes with large elements come first, so that every tensor begins at a multiple of its elements' size.
3. The division depends only on names, shapes, dtypes and the limit.

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
    """Return the number of bytes in `size`, an int or text such as "5GB", as transformers reads it. Raises
    CheckpointError for other values.

    >>> size_of("5GB"), size_of("1.5 kb")
    (5000000000, 1500)
    """
    nbytes: object = size
    if isinstance(size, str):
        # Not "5" without a unit: a number of bytes is given as an int.
        nbytes = None if size.strip().isdecimal() else read_bytes(size)
    if type(nbytes) is not int or nbytes < 1:
        what = f"max_shard_size is {shown(size)}, not a size of at least 1 byte"
        raise CheckpointError(f"{what}; give a number of bytes, or text such as '500MB' or '5GB'")
    return nbytes


def check_entries(entries: Mapping[str, Entry]) -> None:
    """Raise CheckpointError if safetensors cannot hold a tensor in `entries`, because of its name or its dtype."""
    for name, (shape, dtype) in entries.items():
        if dtype not in NAMES:
            what = f"tensor {name!r} is {dtype}{list(shape)}, a type that safetensors does not have"
            raise CheckpointError(f"{what}; leave it out, or cast it to one of {', '.join(NAMES)}")
        if name == RESERVED or not _is_text(name):
            rule = f"names must be UTF-8 text other than {RESERVED!r}"
            what = f"safetensors cannot hold a tensor of the name {name!r}: {rule}"
            raise CheckpointError(f"{what}; give it another name")


def _is_text(name: str) -> bool:
    """Whether the name can be encoded in UTF-8: a lone surrogate, which a Python str may hold, cannot."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def split(entries: Mapping[str, Entry], limit: int) -> list[File]:
    """Divide the tensors in `entries` into files with at most `limit` bytes of data; return a list of dicts, one per
    file, from name to entry (shape and dtype). A tensor larger than `limit` has a separate file."""
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
    if current or not files:  # without tensors, one empty file
        files.append(current)
    return [_put_long_elements_first(file) for file in files]


def natural_order(name: str) -> tuple[list[tuple[bool, int, str]], str]:
    """Return a key to sort `name` by, with numbers in names in order of their value: layer 2 before layer 10."""
    parts = []
    for part in NUMBER.split(name):
        # Compared by length, then as text: a number in a name may have too many digits for an int.
        digits = len(part.lstrip("0")) if part.isdecimal() else 0
        parts.append((part.isdecimal(), digits, part))
    return parts, name


def _put_long_elements_first(file: File) -> File:
    """The tensors, ordered by decreasing element size; the sort is stable."""
    by_size = sorted(file.items(), key=lambda item: -itemsize(item[1][1]))
    return dict(by_size)


def count_bytes(entry: Entry) -> int:
    """Return the size in bytes of a tensor, given as its shape and dtype."""
    shape, dtype = entry
    return math.prod(shape) * itemsize(dtype)


def file_names(count: int) -> list[str]:
    """Return the names of the files of a model in `count` files: model-00001-of-00003.safetensors and so on."""
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
