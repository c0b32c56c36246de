"""Verifying: which checksums a rank checks when ranks load together.

1. The chunks of all boxes of a checkpoint are numbered consecutively. A rank touches those that have a byte it reads.
2. Of the ranks that touch a chunk, one checks it: each byte is hashed once, however many ranks read it, and the only
   extra bytes that a rank reads are the rest of chunks that it touches.
3. All ranks read the same file, so one rank finds a bit that flipped in storage for all. An error of one machine's
   reads is found only if that machine checks the chunk.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath_torch.checkpoints.files.checksums import CHUNK, DIGITS, count_checksums, is_same
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
"""A flag for every chunk."""


class CheckpointChunks:
    """The chunks (4 MiB or less) for which a checkpoint has checksums, numbered across all files of the checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.total = 0
        # The number of each box's first chunk, by the box's file and first byte in it.
        self._first_numbers: dict[tuple[Place, int], int] = {}
        for tensor in checkpoint.tensors.values():
            for box in tensor.pieces:
                if box.sums:
                    self._first_numbers[box.file, box.start] = self.total
                    self.total += count_checksums(box.length)

    def mark_touched(self, reads: Iterable[tuple[StoredBox, int, int]]) -> Marks:
        """Return a flag per chunk: whether any of `reads` reads a byte of it. A read is (box, begin, end), in bytes
        from the box's first byte."""
        marks = np.zeros(self.total, bool)
        for box, begin, end in reads:
            first = self._first_numbers.get((box.file, box.start))
            if first is not None and begin < end:
                low = first + begin // CHUNK
                # As many chunks as the box's first `end` bytes take.
                high = first + count_checksums(end)
                marks[low:high] = True
        return marks

    def list_marked(self, box: StoredBox, marks: Marks) -> list[int]:
        """Return the numbers of the chunks of `box` that are flagged in `marks`; the box's first chunk is number 0."""
        first = self._first_numbers.get((box.file, box.start))
        if first is None:
            return []
        end = first + count_checksums(box.length)
        (numbers,) = marks[first:end].nonzero()
        return [int(number) for number in numbers]


def pack_marks(marks: Marks) -> bytes:
    """Return `marks`, a flag per chunk, as compressed bytes that can be sent to other ranks."""
    bits = np.packbits(marks)
    return zlib.compress(bits.tobytes(), 1)


def _unpack_marks(packed: Iterable[bytes], total: int) -> Iterator[NDArray[np.uint8]]:
    expected = -(-total // 8)  # rounded up
    for number, compressed in enumerate(packed):
        unpacker = zlib.decompressobj()
        try:
            # one byte more than expected, so that too many bytes show
            raw = unpacker.decompress(compressed, expected + 1)
        except zlib.error as error:
            what = f"the flags of the chunks that rank {number} reads cannot be unpacked: {error}"
            fix = "run the same version of shardmath on all ranks"
            raise CheckpointError(f"{what}; {fix}") from error
        if len(raw) != expected:
            what = f"rank {number} sent {len(raw)} bytes of flags of the chunks that it reads"
            why = f"where this rank's checkpoint of {total} chunks needs {expected}"
            raise CheckpointError(f"{what}, {why}; give all ranks the same checkpoint")
        bits = np.frombuffer(raw, np.uint8)
        yield np.unpackbits(bits, count=total)


def take_share(packed: Sequence[bytes], rank: int, total: int) -> Marks:
    """Return one flag for each of `total` chunks (ranges of bytes with a checksum): whether `rank` has to verify the
    chunk. `packed` has each rank's flags, made by `pack_marks`: which chunks the rank reads.

    Raises CheckpointError for marks of another number of chunks.

    >>> everybody = [pack_marks(np.array(marks, bool)) for marks in ([1, 1, 1, 0], [0, 1, 1, 1])]
    >>> [take_share(everybody, rank, 4).astype(int).tolist() for rank in range(2)]
    [[1, 0, 1, 0], [0, 1, 0, 1]]
    """
    touching = np.zeros(total, np.int32)
    before = np.zeros(total, np.int32)
    touched = np.zeros(total, bool)
    for i, marks in enumerate(_unpack_marks(packed, total)):
        if i == rank:
            touched = marks.astype(bool)
            before = touching.copy()
        touching += marks
    # in turn along the file, so that ranks that read the same share the work evenly:
    # of the k ranks that touch chunk i, the one with i % k of them before it checks it
    turn = np.arange(total, dtype=np.int32) % np.maximum(touching, 1)
    share: Marks = touched & (turn == before)
    return share


def chunk_ends(box: StoredBox, number: int) -> tuple[int, int]:
    """Return the begin and the end of chunk `number` of `box` (a stored part of a tensor), as byte positions in its
    file. A chunk is a range of 4 MiB, or less at the end, that has one checksum."""
    start = box.start + number * CHUNK
    return start, min(box.stop, start + CHUNK)


def read_chunk(stream: io.FileIO, box: StoredBox, number: int, room: bytearray) -> memoryview:
    """Read chunk `number` (a range of bytes with one checksum) of `box`, a stored part of a tensor in the file
    `stream`. The bytes are written to the buffer `room`, and a view of them is returned."""
    start, stop = chunk_ends(box, number)
    stream.seek(start)
    chunk = memoryview(room)[: stop - start]
    read_into(stream, chunk)
    return chunk


def check_chunk(box: StoredBox, number: int, data: memoryview) -> None:
    """Raise CheckpointError unless `data`, chunk `number` of `box`, has the checksum that was saved for it."""
    if is_same(data, number, box.sums):
        return
    start, _ = chunk_ends(box, number)
    ends = f"bytes {start} to {start + len(data)}"
    saved = box.sums[number * DIGITS : (number + 1) * DIGITS]
    what = f"{box.file} is damaged: {ends} do not have the checksum {saved} that was saved of them"
    fix = "fetch it again, or load it as it is with verify=False"
    raise CheckpointError(f"{what}; {fix}")


def read_into(stream: io.FileIO, room: memoryview) -> None:
    """Fill the buffer `room` with bytes of `stream`. Raises CheckpointError if the file ends before that."""
    while room:
        count = stream.readinto(room)
        if not count:
            what = f"{stream.name!r} ends at byte {stream.tell()}, {len(room)} bytes too early"
            fix = "fetch it again, and let nothing write to it during the load"
            raise CheckpointError(f"{what}: it was cut while it was read; {fix}")
        room = room[count:]
