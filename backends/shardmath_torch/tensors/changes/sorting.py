"""Sorting: what a rank sends of changed cells, message by message.

1. Changed cells are routed to messages, and each message goes as a packet of numbered elements, or whole where that is
   fewer bytes.
2. Elements of a message ascend in number: whoever receives them counts on it.
3. How many elements each message has is told first, pair by pair, so that both ends know how long packets are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardmath.base.arrays import Ints, begins
from shardmath.plans.programs.messages import Message
from shardmath.values.changes.routing import AskedCells, Senders, count_elements, find_hulls
from shardmath_torch.groups import dtypes
from shardmath_torch.tensors.changes.comparing import Changed
from shardmath_torch.tensors.changes.packets import MOST_ELEMENTS, Some, count_bytes, list_sizes
from shardmath_torch.tensors.changes.parcels import Parcel, list_parcels

__all__ = ["WHOLE", "Elements", "Outgoing", "Sorted", "Volume"]

WHOLE = -1
"""Told in the place of counts where a message goes whole."""

Elements: TypeAlias = list[Some]
"""Elements of a message, those of each size together."""


class Sorted(NamedTuple):
    """The elements that each message of a rank takes; None where it goes whole."""

    sends: list[Elements | None]
    keeps: list[Elements | None]


class Volume(NamedTuple):
    """What a rank sends to others: changed elements, messages that go whole, and bytes of both together."""

    elements: int
    whole: int
    nbytes: int


class _Run(NamedTuple):
    """Elements of one piece: their numbers, and which of the changed words they hold."""

    numbers: Ints
    which: Ints


class Outgoing:
    """The messages that a rank sends, and those that it keeps, of source tensors of these shapes.

    `hulls` are the boxes of these tensors from which something goes anywhere.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        sends: Sequence[Message],
        keeps: Sequence[Message],
    ) -> None:
        self.sends = sends
        self._messages = [*sends, *keeps]
        self._sizes = [list_sizes(message) for message in self._messages]
        self._is_numbered = [count_elements(m) <= MOST_ELEMENTS for m in self._messages]
        self._senders = Senders(shapes, self._messages)
        self.hulls = find_hulls(self._messages)

    def sort(self, changed: Iterable[Changed]) -> Sorted:
        """These changes by message."""
        by_size: dict[int, list[Changed]] = {}
        for one in changed:
            size = one.words.element_size()
            by_size.setdefault(size, []).append(one)
        parts = {size: self._sort_alike(size, alike) for size, alike in by_size.items()}
        found: list[Elements | None] = []
        for number, message in enumerate(self._messages):
            elements = []
            for size in self._sizes[number]:
                here = parts.get(size, {})
                elements.append(here.get(number) or _nothing(size))
            is_smaller = _count_packet(elements) < message.nbytes
            found.append(elements if is_smaller and self._is_numbered[number] else None)
        sends = len(self.sends)
        return Sorted(found[:sends], found[sends:])

    def _sort_alike(self, size: int, changed: Sequence[Changed]) -> dict[int, Some]:
        """The elements of each message that has some, of words of one size."""
        runs = self._list_runs(changed)
        words = torch.cat([one.words for one in changed])
        found = {}
        for number, pieces in enumerate(self._senders.pieces):
            here: list[_Run] = []
            for piece in pieces:
                here += runs.get(piece, ())
            if here:
                found[number] = _join(size, here, words)
        return found

    def _list_runs(self, changed: Sequence[Changed]) -> dict[int, list[_Run]]:
        """The elements of each piece that has some."""
        runs: dict[int, list[_Run]] = {}
        asked = [AskedCells(one.key, one.cells) for one in changed]
        for cell, piece, element in self._senders.route(asked):
            first = begins(piece)
            numbers = piece[first].tolist()
            borders = itertools.pairwise([*first.tolist(), len(piece)])
            for number, (low, high) in zip(numbers, borders, strict=True):
                run = _Run(element[low:high], cell[low:high])
                runs.setdefault(number, []).append(run)
        return runs

    def tell(self, given: Sorted) -> dict[int, list[int]]:
        """What each receiver is told: the counts of all messages to it, end to end."""
        told: dict[int, list[int]] = {}
        for number, (message, elements) in enumerate(zip(self.sends, given.sends, strict=True)):
            counts = [WHOLE] * len(self._sizes[number])
            if elements is not None:
                counts = [len(some.numbers) for some in elements]
            all_counts = told.setdefault(message.dst_rank, [])
            all_counts += counts
        return told

    def list_parcels(self, given: Sorted) -> tuple[list[Parcel], list[Parcel]]:
        """What goes of each message to others, and of each that is kept."""
        counts = [_count_elements(elements) for elements in [*given.sends, *given.keeps]]
        parcels = list_parcels(self._messages, self._sizes, counts)
        sends = len(self.sends)
        return parcels[:sends], parcels[sends:]

    def measure(self, given: Sorted) -> Volume:
        """What goes to others."""
        elements = whole = nbytes = 0
        for message, some in zip(self.sends, given.sends, strict=True):
            if some is None:
                whole += 1
                nbytes += message.nbytes
            else:
                elements += sum(len(one.numbers) for one in some)
                nbytes += _count_packet(some)
        return Volume(elements, whole, nbytes)


def _nothing(size: int) -> Some:
    """No elements of that size."""
    numbers = np.zeros(0, np.int64)
    words = torch.zeros(0, dtype=dtypes.WORDS[size], device="cpu")
    return Some(size, numbers, words)


def _join(size: int, runs: Sequence[_Run], words: Tensor) -> Some:
    """All elements of one message and size."""
    numbers = np.concatenate([run.numbers for run in runs])
    which = np.concatenate([run.which for run in runs])
    # As they are where tensors lie in memory as they are numbered.
    if (numbers[1:] < numbers[:-1]).any():
        order = numbers.argsort()
        numbers = numbers[order]
        which = which[order]
    taken = words.index_select(0, torch.from_numpy(which).to(words.device))
    return Some(size, numbers, taken)


def _count_elements(elements: Elements | None) -> Sequence[int] | None:
    """How many elements there are of each size; None where the message goes whole."""
    return None if elements is None else [len(some.numbers) for some in elements]


def _count_packet(elements: Elements) -> int:
    """Bytes of the packet of these elements."""
    sizes = [some.itemsize for some in elements]
    counts = [len(some.numbers) for some in elements]
    return count_bytes(sizes, counts)
