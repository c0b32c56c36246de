"""Placing: received elements, written into destination tensors.

1. The counts of elements of each message are received first, so that packets' memory can be allocated.
2. Tensors that share memory, such as views of one fused tensor, are one row of words, into which one scatter writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from shardmath.base.arrays import Ints
from shardmath.plans.programs.messages import Message
from shardmath.values.changes.placing import Lying, Receivers
from shardmath.values.changes.routing import BATCH
from shardmath_torch.groups import dtypes
from shardmath_torch.tensors.changes.packets import Some, list_sizes
from shardmath_torch.tensors.changes.sorting import WHOLE

__all__ = ["Counts", "Incoming"]

Tensors: TypeAlias = Mapping[str, Tensor]
Counts: TypeAlias = tuple[int, ...] | None
"""The counts of a packet's elements of each size; None if the message is sent whole."""


class Incoming:
    """The messages that a rank receives, or copies locally, and the destination tensors that they are for."""

    def __init__(self, dst: Tensors, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.sizes = [list_sizes(message) for message in messages]
        # A row of words for each storage of destinations, which `_find_rows` appends.
        self._rows: list[Tensor] = []
        self._receivers = Receivers(self._find_rows(dst), messages)

    def _find_rows(self, dst: Tensors) -> dict[str, Lying]:
        """The position of each tensor in its row: its whole storage, viewed as words of the tensor's element size. Adds
        the rows, one per storage and size of words, to `self._rows`."""
        # By the address and the size of words of each row.
        row_numbers: dict[tuple[int, int], int] = {}
        locations = {}
        for key, tensor in dst.items():
            words = dtypes.words(tensor)
            storage = words.untyped_storage()
            size = words.element_size()
            where = storage.data_ptr(), size
            if where not in row_numbers:
                row_numbers[where] = len(self._rows)
                row = words.as_strided((storage.nbytes() // size,), (1,), 0)
                self._rows.append(row)
            offset = int(words.storage_offset())
            locations[key] = Lying(row_numbers[where], offset, words.stride())
        return locations

    def read(self, received: Mapping[int, Sequence[int]]) -> list[Counts]:
        """Return for each message a tuple of its numbers of changed elements, one per element size; None if all its
        elements are sent. `received[r]` lists these numbers, message by message, for all messages from rank r; a
        message of which all elements are sent has WHOLE (-1) for each."""
        # Iterators, so that each message's counts begin where those of the sender's previous message ended.
        unread = {rank: iter(counts) for rank, counts in received.items()}
        by_message: list[Counts] = []
        for message, sizes in zip(self.messages, self.sizes, strict=True):
            counts = tuple(itertools.islice(unread[message.src_rank], len(sizes)))
            by_message.append(None if WHOLE in counts else counts)
        return by_message

    def place(self, number: int, elements: Iterable[Some]) -> None:
        """Write `elements` of the message `messages[number]` into the destination tensors."""
        for _, numbers, words in elements:
            # In batches, so that temporaries stay in a cache.
            for first in range(0, len(numbers), BATCH):
                past = first + BATCH
                self._put(number, numbers[first:past], words[first:past])

    def _put(self, number: int, numbers: Ints, words: Tensor) -> None:
        """Write words of a message, in ascending order of their numbers."""
        for row_number, indices, cells in self._receivers.place(number, numbers):
            sources = torch.from_numpy(indices).to(words.device)
            targets = torch.from_numpy(cells).to(words.device)
            self._rows[row_number].scatter_(0, targets, words.index_select(0, sources))
