"""Packets: some elements of a message as bytes, each with its number in the message.

1. A number takes 4 bytes, so an element of 2 bytes takes 6. Elements of one size are stored together.
2. Words of 4 bytes and more come first, then numbers, then smaller words: so all are aligned without padding.
3. The counts of elements of each size are sent beforehand. If a packet would not be smaller than the message, the
   message is sent whole instead.

>>> packet = torch.empty(count_bytes((2,), (2,)), dtype=torch.uint8)
>>> pack([Some(2, np.array([3, 7]), torch.tensor([1, -1], dtype=torch.int16))], packet)
>>> packet.nbytes, unpack(packet, (2,), (2,))[0].numbers
(12, array([3, 7]))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardmath.base.arrays import Ints
from shardmath.plans.programs.messages import Message, itemsize_of
from shardmath_torch.groups import dtypes

__all__ = ["MOST_ELEMENTS", "Some", "count_bytes", "list_sizes", "pack", "unpack"]

NUMBER_BYTES = 4
MOST_ELEMENTS = 1 << 31
"""The most elements of a message whose elements are numbered with 4 bytes."""


class Some(NamedTuple):
    """Some elements of a message, of `itemsize` bytes each. `numbers` has their positions in the message, ascending,
    and `words` their bits as integers.
    """

    itemsize: int
    numbers: Ints
    words: Tensor


def list_sizes(message: Message) -> tuple[int, ...]:
    """Return the different sizes of a message's elements in bytes, largest first."""
    sizes = {itemsize_of(piece) for piece in message.pieces}
    return tuple(sorted(sizes, reverse=True))


def count_bytes(sizes: Sequence[int], counts: Sequence[int]) -> int:
    """Return the size in bytes of a packet, which has a message's changed elements and their positions in the message.
    The packet has `counts[i]` elements of `sizes[i]` bytes each.
    """
    nbytes = 0
    for size, count in zip(sizes, counts, strict=True):
        nbytes += (NUMBER_BYTES + size) * count
    return nbytes


def pack(given: Sequence[Some], packet: Tensor) -> None:
    """Write changed elements of a message, and the position of each in the message, into the byte tensor `packet`.
    `given` has one Some (elements and positions) per element size."""
    sizes = [some.itemsize for some in given]
    counts = [len(some.numbers) for some in given]
    for some, (numbers, words) in zip(given, _split_packet(packet, sizes, counts), strict=True):
        numbers.copy_(torch.from_numpy(some.numbers))
        words.copy_(some.words)


def unpack(packet: Tensor, sizes: Sequence[int], counts: Sequence[int]) -> list[Some]:
    """Return a Some per element size: the `counts[i]` elements of `sizes[i]` bytes that `pack` wrote to `packet`.

    Their bits are views of `packet`.
    """
    parts = _split_packet(packet, sizes, counts)
    elements = []
    for size, (numbers, words) in zip(sizes, parts, strict=True):
        wide_numbers = numbers.numpy(force=True).astype(np.int64)
        elements.append(Some(size, wide_numbers, words))
    return elements


def _split_packet(
    packet: Tensor, sizes: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The numbers and the words of each size, as views of the packet."""
    reader = _PacketReader(packet)
    words = {}
    # Numbers lie between larger and smaller words, so that all are aligned.
    for size, count in zip(sizes, counts, strict=True):
        if size >= NUMBER_BYTES:
            words[size] = reader.take(dtypes.WORDS[size], count)
    numbers = [reader.take(torch.int32, count) for count in counts]
    for size, count in zip(sizes, counts, strict=True):
        if size < NUMBER_BYTES:
            words[size] = reader.take(dtypes.WORDS[size], count)
    for size, its_numbers in zip(sizes, numbers, strict=True):
        yield its_numbers, words[size]


class _PacketReader:
    """Takes consecutive parts of a packet, from its first byte on."""

    def __init__(self, packet: Tensor) -> None:
        self._bytes = packet

    def take(self, dtype: torch.dtype, count: int) -> Tensor:
        """Return the next `count` elements of the packet, as elements of `dtype`, and advance past them."""
        nbytes = dtype.itemsize * count
        part = self._bytes[:nbytes]
        self._bytes = self._bytes[nbytes:]
        return part.view(dtype)
