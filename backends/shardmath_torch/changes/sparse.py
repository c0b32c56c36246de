"""Sparse: what a rank sends and receives of changed elements.

1. Changed cells are routed to messages, and each message goes as a packet of numbered elements, or whole where that is
   fewer bytes.
2. How many elements each message has is told first, pair by pair, so that both ends know how long packets are.
3. What arrives is put where it belongs by arithmetic on numbers, at once in all tensors that share memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardmath.base.arrays import Ints, begins
from shardmath.changes.routing import Receivers, Senders, count_elements
from shardmath.programs.messages import Message
from shardmath_torch import dtypes
from shardmath_torch.changes.packets import MOST_ELEMENTS, Some, count_bytes, list_sizes

__all__ = ["Changed", "Counts", "Elements", "Incoming", "Outgoing"]

WHOLE = -1
"""Told in the place of counts where a message goes whole."""

Tensors: TypeAlias = Mapping[str, Tensor]
Elements: TypeAlias = list[Some]
"""Elements of a message, those of each size together."""
Counts: TypeAlias = tuple[int, ...] | None
"""Of a packet, the elements of each size; None where the message goes whole."""


class Changed(NamedTuple):
    """Cells of a source tensor, numbered row by row, and the words that they hold now."""

    key: str
    cells: Tensor
    words: Tensor


class Outgoing:
    """The messages that a rank sends, or keeps, of source tensors of these shapes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], messages: Sequence[Message]) -> None:
        self.messages = messages
        self.sizes = [list_sizes(message) for message in messages]
        self._senders = Senders(shapes, messages)

    def sort(self, changed: Iterable[Changed]) -> list[Elements | None]:
        """What is to be sent in each message; None where it goes whole."""
        parts: list[dict[int, list[Some]]] = [{} for _ in self.messages]
        for key, cells, words in changed:
            routed = self._senders.route(key, cells.numpy(force=True))
            size = words.element_size()
            for number, here in _list_groups(routed.message):
                element = torch.from_numpy(routed.element[here])
                taken = words[torch.from_numpy(routed.cell[here]).to(words.device)]
                some = Some(size, element.to(words.device), taken)
                parts[number].setdefault(size, []).append(some)
        found = []
        for message, sizes, by_size in zip(self.messages, self.sizes, parts, strict=True):
            elements = [_join(size, by_size.get(size, [])) for size in sizes]
            found.append(None if _is_larger(message, sizes, elements) else elements)
        return found

    def tell(self, given: Sequence[Elements | None]) -> dict[int, list[int]]:
        """What each receiver is told: the counts of all messages to it, end to end."""
        told: dict[int, list[int]] = {}
        for message, elements, sizes in zip(self.messages, given, self.sizes, strict=True):
            counts = [WHOLE] * len(sizes)
            if elements is not None:
                counts = [len(some.numbers) for some in elements]
            all_counts = told.setdefault(message.dst_rank, [])
            all_counts += counts
        return told


def _list_groups(numbers: Ints) -> Iterator[tuple[int, Ints]]:
    """Each different number, and where it stands."""
    if not len(numbers):
        return
    if bool((numbers == numbers[0]).all()):
        yield int(numbers[0]), np.arange(len(numbers))
        return
    # Numbers of messages are few: of small integers numpy sorts digits, in time in proportion to their number.
    order = numbers.astype(np.uint16 if numbers.max() < 1 << 16 else np.int64).argsort(
        kind="stable"
    )
    sorted_ = numbers[order]
    for first, past in itertools.pairwise([*begins(sorted_).tolist(), len(order)]):
        yield int(sorted_[first]), order[first:past]


def _join(size: int, parts: Sequence[Some]) -> Some:
    """All elements of one size."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        nothing = torch.zeros(0, dtype=torch.int64)
        return Some(size, nothing, torch.zeros(0, dtype=dtypes.WORDS[size]))
    numbers = torch.cat([some.numbers for some in parts])
    return Some(size, numbers, torch.cat([some.words for some in parts]))


def _is_larger(message: Message, sizes: Sequence[int], elements: Sequence[Some]) -> bool:
    """Whether the elements take as many bytes as the message whole, or cannot be numbered."""
    counts = [len(some.numbers) for some in elements]
    return count_bytes(sizes, counts) >= message.nbytes or count_elements(message) > MOST_ELEMENTS


class Incoming:
    """The messages that a rank receives, or keeps, for these destination tensors."""

    def __init__(self, dst: Tensors, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.sizes = [list_sizes(message) for message in messages]
        strides = {key: tensor.stride() for key, tensor in dst.items()}
        self._receivers = Receivers(strides, messages)
        self._memory = _Memory(dst.values())

    def count_told(self) -> dict[int, int]:
        """How many counts each sender tells."""
        told: dict[int, int] = {}
        for message, sizes in zip(self.messages, self.sizes, strict=True):
            told[message.src_rank] = told.get(message.src_rank, 0) + len(sizes)
        return told

    def read(self, told: Mapping[int, Sequence[int]]) -> list[Counts]:
        """The counts of each message, of what each sender has told."""
        rest = {rank: iter(counts) for rank, counts in told.items()}
        found: list[Counts] = []
        for message, sizes in zip(self.messages, self.sizes, strict=True):
            following = rest[message.src_rank]
            counts = tuple(itertools.islice(following, len(sizes)))
            found.append(None if WHOLE in counts else counts)
        return found

    def place(self, number: int, elements: Iterable[Some]) -> None:
        """Put elements of a message where they belong."""
        for some in elements:
            placed = self._receivers.place(number, some.numbers.numpy(force=True))
            self._memory.scatter(placed.tensor, placed.cell, some.words)


class _Memory:
    """Tensors as rows of words: those that share memory, as views of one fused tensor do, are one row."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._rows: list[Tensor] = []
        numbers: dict[tuple[int, int], int] = {}
        row_of, start_of = [], []
        for tensor in tensors:
            words = dtypes.words(tensor)
            storage = words.untyped_storage()
            size = words.element_size()
            where = storage.data_ptr(), size
            if where not in numbers:
                numbers[where] = len(self._rows)
                row = words.as_strided((storage.nbytes() // size,), (1,), 0)
                self._rows.append(row)
            row_of.append(numbers[where])
            start_of.append(words.storage_offset())
        self._row_of = np.array(row_of, np.int64)
        self._start_of = np.array(start_of, np.int64)

    def scatter(self, tensors: Ints, cells: Ints, words: Tensor) -> None:
        """Put words into cells, counted from the first of the tensor that is named beside each."""
        rows = self._row_of[tensors]
        places = self._start_of[tensors] + cells
        for row, here in _list_groups(rows):
            at = torch.from_numpy(places[here]).to(words.device)
            taken = words
            if len(here) < len(words):
                taken = words[torch.from_numpy(here).to(words.device)]
            self._rows[row][at] = taken
