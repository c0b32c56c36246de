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
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath_torch.checkpoints.files.checksums import CHUNK, count_checksums, is_same
from shardmath_torch.checkpoints.files.places import CheckpointError, Place
from shardmath_torch.checkpoints.stored import Checkpoint, StoredBox

__all__ = [
    "CheckpointChunks",
    "Marks",
    "check_chunk",
    "chunk_ends",
    "pack_marks",
    "read_chunk",
    "read_into",
    "take_share",
]

Marks: TypeAlias = NDArray[np.bool_]
"""One for every chunk."""


class CheckpointChunks:
    """The chunks of a checkpoint, numbered; none where it has no checksums."""

    def __init__(self, found: Checkpoint) -> None:
        self.total = 0
        self._first: dict[tuple[Place, int], int] = {}
        for tensor in found.tensors.values():
            for box in tensor.pieces:
                if box.sums:
                    self._first[box.file, box.start] = self.total
                    self.total += count_checksums(box.length)

    def mark_touched(self, reads: Iterable[tuple[StoredBox, int, int]]) -> Marks:
        """Which chunks have any of what is read: bytes from begin to end of a box's."""
        marks = np.zeros(self.total, bool)
        for box, begin, end in reads:
            first = self._first.get((box.file, box.start))
            if first is not None and begin < end:
                low = first + begin // CHUNK
                high = first + count_checksums(end)
                marks[low:high] = True
        return marks

    def list_marked(self, box: StoredBox, marks: Marks) -> list[int]:
        """Which chunks of a box are marked, by their numbers in the box."""
        first = self._first.get((box.file, box.start))
        if first is None:
            return []
        end = first + count_checksums(box.length)
        (numbers,) = marks[first:end].nonzero()
        return [int(number) for number in numbers]


def pack_marks(marks: Marks) -> bytes:
    """Marks as they are sent."""
    bits = np.packbits(marks)
    return zlib.compress(bits.tobytes(), 1)


def _unpack_marks(said: Iterable[bytes], total: int) -> Iterator[NDArray[np.uint8]]:
    expected = -(-total // 8)  # rounded up
    for number, packed in enumerate(said):
        unpacker = zlib.decompressobj()
        try:
            # One byte more than there are, so that longer ones show.
            raw = unpacker.decompress(packed, expected + 1)
        except zlib.error as error:
            raise CheckpointError(
                f"what rank {number} reads cannot be unpacked: {error}"
            ) from error
        if len(raw) != expected:
            what = f"rank {number} marks other chunks than the {total} of this checkpoint"
            raise CheckpointError(f"{what}; give all ranks the same checkpoint")
        bits = np.frombuffer(raw, np.uint8)
        yield np.unpackbits(bits, count=total)


def take_share(said: Sequence[bytes], rank: int, total: int) -> Marks:
    """The chunks that the rank checks, of those that all touch: of k that touch a chunk, one.

    Raises CheckpointError for marks of another number of chunks.

    >>> everybody = [pack_marks(np.array(marks, bool)) for marks in ([1, 1, 1, 0], [0, 1, 1, 1])]
    >>> [take_share(everybody, rank, 4).astype(int).tolist() for rank in range(2)]
    [[1, 0, 1, 0], [0, 1, 0, 1]]
    """
    touching = np.zeros(total, np.int32)
    before = np.zeros(total, np.int32)
    own = np.zeros(total, bool)
    for i, marks in enumerate(_unpack_marks(said, total)):
        if i == rank:
            own = marks.astype(bool)
            before = touching.copy()
        touching += marks
    # by turns along the file, so that ranks that read the same share the work evenly
    turn = np.arange(total, dtype=np.int32) % np.maximum(touching, 1)
    share: Marks = own & (turn == before)
    return share


def chunk_ends(box: StoredBox, number: int) -> tuple[int, int]:
    """Where in the file a chunk of a box begins and ends."""
    start = box.start + number * CHUNK
    return start, min(box.stop, start + CHUNK)


def read_chunk(stream: io.FileIO, box: StoredBox, number: int, room: bytearray) -> memoryview:
    """A chunk, read into some room."""
    start, stop = chunk_ends(box, number)
    stream.seek(start)
    chunk = memoryview(room)[: stop - start]
    read_into(stream, chunk)
    return chunk


def check_chunk(box: StoredBox, number: int, data: memoryview) -> None:
    """Raises CheckpointError unless the chunk is what was written."""
    if is_same(data, number, box.sums):
        return
    start, _ = chunk_ends(box, number)
    ends = f"bytes {start} to {start + len(data)}"
    what = f"{box.file} is damaged: {ends} are not what was saved, by their checksum"
    fix = "fetch it again, or load with verify=False what is left"
    raise CheckpointError(f"{what}; {fix}")


def read_into(stream: io.FileIO, room: memoryview) -> None:
    """Reads as many bytes as there is room for. Raises CheckpointError where the file has fewer."""
    while room:
        got = stream.readinto(room)
        if not got:
            what = f"{stream.name!r} ends at byte {stream.tell()}"
            raise CheckpointError(f"{what}; it was cut while it was read")
        room = room[got:]
