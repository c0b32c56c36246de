"""Placing: what a rank receives of changed elements, put where it belongs.

1. How many elements each message has is told first, so that memory for packets is there.
2. Tensors that share memory, as views of one fused tensor do, are one row of words, into which elements are put at
   once.
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
"""Of a packet, the elements of each size; None where the message goes whole."""


class Incoming:
    """The messages that a rank receives, or keeps, for these destination tensors."""

    def __init__(self, dst: Tensors, messages: Sequence[Message]) -> None:
        self.messages = messages
        self.sizes = [list_sizes(message) for message in messages]
        self._rows: list[Tensor] = []
        self._receivers = Receivers(self._find_rows(dst), messages)

    def _find_rows(self, dst: Tensors) -> dict[str, Lying]:
        """How each tensor lies, in rows of words that are all of a storage."""
        numbers: dict[tuple[int, int], int] = {}
        lying = {}
        for key, tensor in dst.items():
            words = dtypes.words(tensor)
            storage = words.untyped_storage()
            size = words.element_size()
            where = storage.data_ptr(), size
            if where not in numbers:
                numbers[where] = len(self._rows)
                row = words.as_strided((storage.nbytes() // size,), (1,), 0)
                self._rows.append(row)
            lying[key] = Lying(numbers[where], int(words.storage_offset()), words.stride())
        return lying

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
        for _, numbers, words in elements:
            # Some at once: what is made of them stays in a cache.
            for first in range(0, len(numbers), BATCH):
                past = first + BATCH
                self._put(number, numbers[first:past], words[first:past])

    def _put(self, number: int, numbers: Ints, words: Tensor) -> None:
        """Put words of a message, which ascend in number, where they belong."""
        for row, which, cells in self._receivers.place(number, numbers):
            some = torch.from_numpy(which).to(words.device)
            at = torch.from_numpy(cells).to(words.device)
            taken = words.index_select(0, some)
            self._rows[row].scatter_(0, at, taken)
