"""Packets: some elements of a message as bytes, each its number in the message and its words.

1. A number takes 4 bytes, so an element of 2 bytes takes 6. Elements of one size stand together.
2. Words of 4 bytes and more come first, then numbers, then smaller words: so all lie where their type may begin, and
   nothing is padded.
3. How many elements of each size there are is told beforehand. A packet that would not be smaller than the message is
   not made: the message goes whole.

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
"""Of a message whose elements have numbers of 4 bytes."""


class Some(NamedTuple):
    """Elements of so many bytes each: their numbers in the message, ascending, and their words."""

    itemsize: int
    numbers: Ints
    words: Tensor


def list_sizes(message: Message) -> tuple[int, ...]:
    """The sizes of the message's elements, largest first."""
    sizes = {itemsize_of(piece) for piece in message.pieces}
    return tuple(sorted(sizes, reverse=True))


def count_bytes(sizes: Sequence[int], counts: Sequence[int]) -> int:
    """Bytes of a packet with so many elements of each size."""
    nbytes = 0
    for size, count in zip(sizes, counts, strict=True):
        nbytes += (NUMBER_BYTES + size) * count
    return nbytes


def pack(given: Sequence[Some], packet: Tensor) -> None:
    """Write the elements, whose sizes descend, into a packet of `count_bytes` bytes."""
    sizes = [some.itemsize for some in given]
    counts = [len(some.numbers) for some in given]
    for some, (numbers, words) in zip(given, _divide(packet, sizes, counts), strict=True):
        numbers.copy_(torch.from_numpy(some.numbers))
        words.copy_(some.words)


def unpack(packet: Tensor, sizes: Sequence[int], counts: Sequence[int]) -> list[Some]:
    """The elements of a packet; words are views of it."""
    parts = _divide(packet, sizes, counts)
    found = []
    for size, (numbers, words) in zip(sizes, parts, strict=True):
        wide = numbers.numpy(force=True).astype(np.int64)
        found.append(Some(size, wide, words))
    return found


def _divide(
    packet: Tensor, sizes: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each size the numbers and the words, as views of the packet."""
    rest = _Rest(packet)
    words = {}
    for size, count in zip(sizes, counts, strict=True):
        if size >= NUMBER_BYTES:
            words[size] = rest.cut(dtypes.WORDS[size], count)
    numbers = [rest.cut(torch.int32, count) for count in counts]
    for size, count in zip(sizes, counts, strict=True):
        if size < NUMBER_BYTES:
            words[size] = rest.cut(dtypes.WORDS[size], count)
    for size, here in zip(sizes, numbers, strict=True):
        yield here, words[size]


class _Rest:
    """What is left of a packet of which parts are cut off, from its first byte on."""

    def __init__(self, packet: Tensor) -> None:
        self._bytes = packet

    def cut(self, dtype: torch.dtype, count: int) -> Tensor:
        """The next so many elements of a type."""
        nbytes = dtype.itemsize * count
        part = self._bytes[:nbytes]
        self._bytes = self._bytes[nbytes:]
        return part.view(dtype)
