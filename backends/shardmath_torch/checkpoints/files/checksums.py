"""Checksums of stored boxes: a bit that flips in storage raises instead of giving a wrong value.

1. A box has a checksum for every CHUNK bytes, the last chunk may be shorter: a reader of a part of the box checks only
   the chunks that the part is in.
2. Checksums are XXH3 of 64 bits, as hexadecimal text, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from xxhash import xxh3_64

from shardmath_torch.groups.agreement.threads import NAME

__all__ = ["CHUNK", "DIGITS", "count_checksums", "is_same", "write"]

CHUNK = 4 << 20
"""How many bytes have one checksum."""
DIGITS = 16
"""How many hexadecimal digits a checksum has."""


def count_checksums(nbytes: int) -> int:
    """Return the number of checksums for `nbytes` bytes: one for each CHUNK bytes, and one for the rest, if any.

    >>> count_checksums(0), count_checksums(1), count_checksums(CHUNK), count_checksums(CHUNK + 1)
    (0, 1, 1, 2)
    """
    return -(-nbytes // CHUNK)


def write(stream: BinaryIO, data: memoryview, wrote: Callable[[int], object]) -> str:
    """Write `data` to `stream` in chunks of CHUNK bytes (4 MiB), and return the chunks' hexadecimal checksums, joined
    into one text. After each chunk, `wrote` is called with that chunk's number of bytes.

    If there are several chunks, another thread computes the checksums meanwhile.
    """
    chunks = [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)]
    if len(chunks) < 2:
        # Starting a thread takes longer than one checksum.
        stream.write(data)
        wrote(len(data))
        return "".join(map(_hash_chunk, chunks))
    # A pool with a name is not counted among the pools of the program.
    with ThreadPoolExecutor(1, thread_name_prefix=NAME) as hasher:
        sums = hasher.map(_hash_chunk, chunks)
        for chunk in chunks:
            stream.write(chunk)
            wrote(len(chunk))
        return "".join(sums)


def _hash_chunk(chunk: memoryview) -> str:
    """The checksum of one chunk."""
    return xxh3_64(chunk).hexdigest()


def is_same(chunk: memoryview, number: int, sums: str) -> bool:
    """Whether `chunk` has the checksum with index `number` among those joined in the text `sums`."""
    start = number * DIGITS
    return _hash_chunk(chunk) == sums[start : start + DIGITS]
