"""Comparing: which cells of a tensor differ from what it held before.

1. A snapshot is a contiguous copy of a tensor's words. Words are compared, not values: NaN is equal to itself, and -0.0
   is not 0.0.
2. Blocks are compared that fit a cache, with what is made of them: nothing else is as large as a tensor.
3. Cells are numbered row by row, however the tensor lies in memory.

>>> weight = torch.tensor([1.0, 2.0, 3.0])
>>> snapshot = Snapshot(weight)
>>> weight[1] = float("nan")
>>> snapshot.find_changed(weight), snapshot.nbytes
(tensor([1]), 12)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from shardmath.changes.boxes import unravel
from shardmath_torch import dtypes

__all__ = ["Snapshot", "take"]

BLOCK_BYTES = 1 << 18
"""Of a tensor and its snapshot each, so that both and what is made of them stay in a cache."""


class Snapshot:
    """What a tensor held."""

    def __init__(self, tensor: Tensor) -> None:
        # Dimensions in the order in which they lie in memory: so the tensor is read end to end.
        dims = range(tensor.ndim)
        self._order = sorted(dims, key=tensor.stride, reverse=True)
        self._shape = tuple(tensor.shape)
        words = dtypes.words(tensor).permute(self._order)
        copy = words.clone(memory_format=torch.contiguous_format)
        self._words = dtypes.flat(copy)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._words.nbytes

    def find_changed(self, tensor: Tensor) -> Tensor:
        """The numbers of the cells that the tensor, of the same shape and type, has otherwise."""
        found = []
        first = 0
        for block in _list_blocks(dtypes.words(tensor).permute(self._order)):
            before = self._words[first : first + len(block)]
            found.append(_find_different(block, before) + first)
            first += len(block)
        changed = torch.cat(found) if found else torch.zeros(0, dtype=torch.int64)
        here = [self._shape[k] for k in self._order]
        back = [self._order.index(k) for k in range(len(here))]
        return _renumber(changed, here, back)

    def update(self, cells: Tensor, words: Tensor) -> None:
        """Remember that these cells hold these words."""
        self._words[_renumber(cells, self._shape, self._order)] = words


def _renumber(cells: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """The numbers of the cells where dimensions come in that order."""
    if list(order) == sorted(order):
        return cells
    along = torch.unravel_index(cells, tuple(shape))
    number = torch.zeros_like(cells)
    for k in order:
        number = number * shape[k] + along[k]
    return number


def take(tensor: Tensor, cells: Tensor) -> Tensor:
    """The words of these cells, numbered row by row."""
    words = dtypes.words(tensor)
    if words.is_contiguous():
        return dtypes.flat(words)[cells]
    along = unravel(cells.numpy(force=True), tuple(words.shape))
    return words[tuple(torch.from_numpy(one).to(words.device) for one in along)]


def _list_blocks(words: Tensor) -> Iterator[Tensor]:
    """The words in order, in contiguous blocks of at most about BLOCK_BYTES."""
    most = BLOCK_BYTES // words.element_size()
    if words.is_contiguous():
        yield from dtypes.flat(words).split(most)
    elif words.ndim == 1 or words.numel() <= most:
        for part in words.split(most):
            yield dtypes.flat(part.contiguous())
    else:
        rows = max(1, most * words.shape[0] // words.numel())
        for part in words.split(rows):
            # One row may still be larger than a block.
            yield from _list_blocks(part if rows > 1 else part[0])


def _find_different(now: Tensor, before: Tensor) -> Tensor:
    """Where two rows of words differ."""
    if now.element_size() == 16:
        # Complex words would be compared as numbers.
        halves = _find_different(now.view(torch.int64), before.view(torch.int64))
        words: Tensor = torch.unique_consecutive(halves // 2)
        return words
    if now.device.type == "cpu":
        # Several times as fast as torch, on one thread.
        return torch.from_numpy(np.flatnonzero(now.numpy() != before.numpy()))
    return (now != before).nonzero().flatten()
