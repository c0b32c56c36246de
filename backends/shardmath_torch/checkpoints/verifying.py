"""Which checksums a rank looks at when ranks load together.

1. The chunks of all boxes of a checkpoint are numbered through. A rank touches those that have anything it reads.
2. Of the ranks that touch a chunk, one checks it: each byte is hashed once, however many ranks read it, and nobody
   reads more for it than the rest of the chunks that it touches.
3. It is the same file that all read, so a bit that flipped in storage is found by one for all. What a single machine
   reads wrong is found where that machine happens to be the one that checks.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from shardmath_torch.checkpoints.stored import Checkpoint, Piece
from shardmath_torch.files.checksums import CHUNK, count, same
from shardmath_torch.files.places import CheckpointError

__all__ = ["Chunks", "check", "chunk", "fill", "mine", "packed"]

Marks = NDArray[np.bool_]
"""One for every chunk."""


class Chunks:
    """The chunks of a checkpoint, numbered; none where it has no checksums."""

    def __init__(self, found: Checkpoint) -> None:
        pieces = [p for saved in found.tensors.values() for p in saved.pieces if p.sums]
        *firsts, self.total = accumulate((count(p.length) for p in pieces), initial=0)
        self._first = {(p.file, p.start): first for p, first in zip(pieces, firsts, strict=True)}

    def touched(self, reads: Iterable[tuple[Piece, int, int]]) -> Marks:
        """Which chunks have any of what is read: bytes from begin to end of a box's."""
        out = np.zeros(self.total, bool)
        for piece, begin, end in reads:
            first = self._first.get((piece.file, piece.start))
            if first is not None and begin < end:
                out[first + begin // CHUNK : first + count(end)] = True
        return out

    def numbers(self, piece: Piece, marks: Marks) -> list[int]:
        """Which chunks of a box are marked, by their numbers in the box."""
        first = self._first.get((piece.file, piece.start))
        if first is None:
            return []
        found: list[int] = marks[first : first + count(piece.length)].nonzero()[0].tolist()
        return found


def packed(marks: Marks) -> bytes:
    """Marks as they are sent."""
    return zlib.compress(np.packbits(marks).tobytes(), 1)


def _unpacked(said: Sequence[bytes], total: int) -> Iterator[NDArray[np.uint8]]:
    for one in said:
        yield np.unpackbits(np.frombuffer(zlib.decompress(one), np.uint8), count=total)


def mine(said: Sequence[bytes], rank: int, total: int) -> Marks:
    """The chunks that the rank checks, of those that all touch: of k that touch a chunk, one.

    >>> everybody = [packed(np.array(marks, bool)) for marks in ([1, 1, 1, 0], [0, 1, 1, 1])]
    >>> [mine(everybody, rank, 4).astype(int).tolist() for rank in range(2)]
    [[1, 0, 1, 0], [0, 1, 0, 1]]
    """
    before, all_of_them = np.zeros(total, np.int32), np.zeros(total, np.int32)
    own = np.zeros(total, bool)
    for i, marks in enumerate(_unpacked(said, total)):
        if i == rank:
            own, before = marks.astype(bool), all_of_them.copy()
        all_of_them += marks
    turn = np.arange(total, dtype=np.int32) % np.maximum(all_of_them, 1)
    out: Marks = own & (turn == before)
    return out


def chunk(stream: io.FileIO, piece: Piece, number: int, room: bytearray) -> memoryview:
    """A chunk, read into some room."""
    begin = number * CHUNK
    stream.seek(piece.start + begin)
    out = memoryview(room)[: min(CHUNK, piece.length - begin)]
    fill(stream, out)
    return out


def check(piece: Piece, number: int, data: memoryview) -> None:
    """Raises CheckpointError unless the chunk is what was written."""
    if not same(data, number, piece.sums):
        first = piece.start + number * CHUNK
        what = (
            f"{piece.file} is damaged: bytes {first} to {first + len(data)} are not what was saved"
        )
        raise CheckpointError(
            f"{what}, by their checksum; fetch it again, or load with verify=False what is left"
        )


def fill(stream: io.FileIO, left: memoryview) -> None:
    """Reads as many bytes as there is room for."""
    while left:
        count = stream.readinto(left)
        if not count:
            raise CheckpointError(
                f"{stream.name!r} ends at byte {stream.tell()}; it was cut while it was read"
            )
        left = left[count:]
