"""Sorting: a rank's changed cells, divided into messages.

1. Changed cells are routed to messages, and each message is sent as a packet of numbered elements, or whole if that is
   fewer bytes.
2. Elements of a message ascend in number, as receivers require.
3. The counts of elements are sent first, pair by pair, so that both ends know how long packets are.
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
"""Sent instead of a message's counts if it is sent whole."""

Elements: TypeAlias = list[Some]
"""The elements of a message, grouped by size."""


class Sorted(NamedTuple):
    """The changed elements in each message that a rank sends, and in each local copy; None for those sent whole."""

    sends: list[Elements | None]
    keeps: list[Elements | None]


class Volume(NamedTuple):
    """The amounts that a rank sends to others: changed elements, messages sent whole, and the bytes of both."""

    elements: int
    whole: int
    nbytes: int


class _Run(NamedTuple):
    """Changed elements of one piece of a message: their numbers, and the indices of their words among the changed."""

    numbers: Ints
    which: Ints


class Outgoing:
    """The messages that a rank sends, and its local copies; methods sort changed elements by message. Pieces of
    messages are numbered over all messages.

    `hulls` are the boxes of source tensors that bound everything that is sent or copied.
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
        """Return two lists: the changed elements of each message to send, and of each copy within this rank, with their
        positions in the message. An entry is None if all elements are to be sent or copied.
        """
        by_size: dict[int, list[Changed]] = {}
        for each in changed:
            size = each.words.element_size()
            by_size.setdefault(size, []).append(each)
        by_message_of_size = {
            size: self._sort_alike(size, of_size) for size, of_size in by_size.items()
        }
        sorted_messages: list[Elements | None] = []
        for number, message in enumerate(self._messages):
            elements = []
            for size in self._sizes[number]:
                by_message = by_message_of_size.get(size, {})
                elements.append(by_message.get(number) or _make_empty(size))
            # A message is sent whole if changes would not be fewer bytes, or it has too many elements to number.
            is_smaller = _count_packet(elements) < message.nbytes
            sorted_messages.append(elements if is_smaller and self._is_numbered[number] else None)
        sends = len(self.sends)
        return Sorted(sorted_messages[:sends], sorted_messages[sends:])

    def _sort_alike(self, size: int, changed: Sequence[Changed]) -> dict[int, Some]:
        """The changed elements of each message that has some, for words of one size."""
        runs = self._list_runs(changed)
        words = torch.cat([each.words for each in changed])
        by_message = {}
        for number, pieces in enumerate(self._senders.pieces):
            runs_of_message: list[_Run] = []
            for piece in pieces:
                runs_of_message += runs.get(piece, ())
            if runs_of_message:
                by_message[number] = _join_runs(size, runs_of_message, words)
        return by_message

    def _list_runs(self, changed: Sequence[Changed]) -> dict[int, list[_Run]]:
        """The runs of changed elements by piece."""
        runs: dict[int, list[_Run]] = {}
        cells_by_key = [AskedCells(each.key, each.cells) for each in changed]
        # Parallel arrays: the index of a word among the changed, a piece that carries it, its number in the message.
        for which, pieces, elements in self._senders.route(cells_by_key):
            # Consecutive items of one piece are a run.
            firsts = begins(pieces)
            piece_of_run = pieces[firsts].tolist()
            borders = itertools.pairwise([*firsts.tolist(), len(pieces)])
            for piece, (low, high) in zip(piece_of_run, borders, strict=True):
                run = _Run(elements[low:high], which[low:high])
                runs.setdefault(piece, []).append(run)
        return runs

    def tell(self, given: Sorted) -> dict[int, list[int]]:
        """Return a dict from receiving rank to a list of how many elements in `given` changed: for each message, one
        number per element size. If all elements of a message are sent, each of its numbers is WHOLE (-1).

        Messages are in the order of sending.
        """
        counts_of: dict[int, list[int]] = {}
        for number, (message, elements) in enumerate(zip(self.sends, given.sends, strict=True)):
            counts = [WHOLE] * len(self._sizes[number])
            if elements is not None:
                counts = [len(some.numbers) for some in elements]
            counts_of.setdefault(message.dst_rank, []).extend(counts)
        return counts_of

    def list_parcels(self, given: Sorted) -> tuple[list[Parcel], list[Parcel]]:
        """Return two lists of Parcels, for messages to send and for local copies: the whole message, a Packet of its
        changed elements, or None if nothing changed.
        """
        counts = [_count_elements(elements) for elements in [*given.sends, *given.keeps]]
        parcels = list_parcels(self._messages, self._sizes, counts)
        sends = len(self.sends)
        return parcels[:sends], parcels[sends:]

    def measure(self, given: Sorted) -> Volume:
        """Return the Volume that this rank sends to other ranks: changed elements, messages sent whole, and the bytes
        of both.
        """
        elements = whole = nbytes = 0
        for message, some in zip(self.sends, given.sends, strict=True):
            if some is None:
                whole += 1
                nbytes += message.nbytes
            else:
                elements += sum(len(part.numbers) for part in some)
                nbytes += _count_packet(some)
        return Volume(elements, whole, nbytes)


def _make_empty(size: int) -> Some:
    """No elements of that size."""
    numbers = np.zeros(0, np.int64)
    words = torch.zeros(0, dtype=dtypes.WORDS[size], device="cpu")
    return Some(size, numbers, words)


def _join_runs(size: int, runs: Sequence[_Run], words: Tensor) -> Some:
    """Join the changed elements of one message and size, ordered by number."""
    numbers = np.concatenate([run.numbers for run in runs])
    indices = np.concatenate([run.which for run in runs])
    # Already in order if tensors lie in memory as they are numbered.
    if (numbers[1:] < numbers[:-1]).any():
        order = numbers.argsort()
        numbers = numbers[order]
        indices = indices[order]
    changed_words = words.index_select(0, torch.from_numpy(indices).to(words.device))
    return Some(size, numbers, changed_words)


def _count_elements(elements: Elements | None) -> Sequence[int] | None:
    """The number of elements of each size; None for a message that is sent whole."""
    return None if elements is None else [len(some.numbers) for some in elements]


def _count_packet(elements: Elements) -> int:
    """The size in bytes of the packet of these elements."""
    sizes = [some.itemsize for some in elements]
    counts = [len(some.numbers) for some in elements]
    return count_bytes(sizes, counts)
