"""Checksums of stored boxes, so that a bit that flips in storage is an error and never a wrong value.

1. A box has one for every CHUNK bytes, from its first on, the last one shorter: who reads a part of a box checks the
   chunks that the part is in, and no more.
2. They are XXH3 of 64 bits, as hexadecimal text, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO

from xxhash import xxh3_64

__all__ = ["CHUNK", "DIGITS", "count_checksums", "is_same", "write"]

CHUNK = 4 << 20
"""Bytes that have one checksum."""
DIGITS = 16
"""Of a checksum, as text."""


def count_checksums(nbytes: int) -> int:
    """How many checksums so many bytes have.

    >>> count_checksums(0), count_checksums(1), count_checksums(CHUNK), count_checksums(CHUNK + 1)
    (0, 1, 1, 2)
    """
    return -(-nbytes // CHUNK)


def write(stream: BinaryIO, data: memoryview, wrote: Callable[[int], object]) -> str:
    """Writes the bytes, and returns their checksums, made beside: both leave the interpreter to others.

    `wrote` is called with how many bytes have just been written.
    """
    chunks = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)]
    if len(chunks) < 2:
        # To start a thread takes longer than one checksum.
        stream.write(data)
        wrote(len(data))
        return "".join(map(_sum, chunks))
    with ThreadPoolExecutor(1) as beside:
        sums = beside.map(_sum, chunks)
        for chunk in chunks:
            stream.write(chunk)
            wrote(len(chunk))
        return "".join(sums)


def _sum(chunk: memoryview) -> str:
    """The checksum of one chunk."""
    return xxh3_64(chunk).hexdigest()


def is_same(chunk: memoryview, number: int, sums: str) -> bool:
    """Whether these are the bytes of the chunk of that number."""
    at = number * DIGITS
    return _sum(chunk) == sums[at : at + DIGITS]
