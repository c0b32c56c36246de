"""Packets: some elements of a message as bytes, each its number in the message and its words.

1. A number takes 4 bytes, so an element of 2 bytes takes 6. Elements of one size stand together.
2. Words of 4 bytes and more come first, then numbers, then smaller words: so all lie where their type may begin, and
   nothing is padded.
3. How many elements of each size there are is told beforehand. A packet that would not be smaller than the message is
   not made: the message goes whole.

>>> packet = pack([Some(2, torch.tensor([3, 7]), torch.tensor([1, -1], dtype=torch.int16))])
>>> packet.nbytes, unpack(packet, (2,), (2,))[0].numbers
(12, tensor([3, 7]))
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shardmath.programs.messages import Message, itemsize_of
from shardmath_torch import dtypes

__all__ = ["MOST_ELEMENTS", "Some", "count_bytes", "list_sizes", "pack", "unpack"]

NUMBER_BYTES = 4
MOST_ELEMENTS = 1 << 31
"""Of a message whose elements have numbers of 4 bytes."""


class Some(NamedTuple):
    """Elements of so many bytes each: their numbers in the message, and their words."""

    itemsize: int
    numbers: Tensor
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


def pack(given: Sequence[Some]) -> Tensor:
    """The elements as bytes; sizes descend."""
    sizes = [some.itemsize for some in given]
    counts = [len(some.numbers) for some in given]
    # None of a size are on the CPU, wherever the others are.
    device = max(given, key=lambda some: len(some.numbers)).words.device
    packet = torch.empty(count_bytes(sizes, counts), dtype=torch.uint8, device=device)
    for some, (numbers, words) in zip(given, _divide(packet, sizes, counts), strict=True):
        numbers.copy_(some.numbers)
        words.copy_(some.words)
    return packet


def unpack(packet: Tensor, sizes: Sequence[int], counts: Sequence[int]) -> list[Some]:
    """The elements of a packet; words are views of it."""
    parts = _divide(packet, sizes, counts)
    found = []
    for size, (numbers, words) in zip(sizes, parts, strict=True):
        wide = numbers.to(torch.int64)
        found.append(Some(size, wide, words))
    return found


def _divide(
    packet: Tensor, sizes: Sequence[int], counts: Sequence[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each size the numbers and the words, as views of the packet."""
    large = [size for size in sizes if size >= NUMBER_BYTES]
    small = sizes[len(large) :]
    types = [dtypes.WORDS[size] for size in large]
    types += [torch.int32] * len(sizes)
    types += [dtypes.WORDS[size] for size in small]
    lengths = [*counts[: len(large)], *counts, *counts[len(large) :]]
    parts = list(_view_parts(packet, types, lengths))
    words = parts[: len(large)] + parts[len(large) + len(sizes) :]
    numbers = parts[len(large) : len(large) + len(sizes)]
    return zip(numbers, words, strict=True)


def _view_parts(
    packet: Tensor, types: Iterable[torch.dtype], lengths: Iterable[int]
) -> Iterator[Tensor]:
    """Parts of the packet, one behind the other, each of its type."""
    start = 0
    for dtype, length in zip(types, lengths, strict=True):
        end = start + dtype.itemsize * length
        yield packet[start:end].view(dtype)
        start = end
