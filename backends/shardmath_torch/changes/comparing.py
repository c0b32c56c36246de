"""Comparing: which cells of a tensor differ from what it held before.

1. A snapshot is a contiguous copy of the words in a box of a tensor: of what leaves it. Words are compared, not values:
   NaN is equal to itself, and -0.0 is not 0.0.
2. Blocks are compared that fit a cache, in the order in which they lie in memory: nothing else is as large as a tensor.
3. Cells are numbered row by row, however the tensor lies in memory.

>>> weight = torch.tensor([1.0, 2.0, 3.0])
>>> snapshot = Snapshot(weight, (slice(0, 3),))
>>> weight[1] = float("nan")
>>> cells, words = snapshot.find_changed(weight, Scratch())
>>> cells, words.view(torch.float32), snapshot.nbytes
(array([1]), tensor([nan]), 12)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardmath.base.arrays import Ints
from shardmath.changes.boxes import unravel
from shardmath.changes.windows import make_window
from shardmath_torch import dtypes
from shardmath_torch.changes.differing import BLOCK_BYTES, Scratch, Words, find_different_there

__all__ = ["Different", "Snapshot", "take"]

DEVICE_BLOCK_BYTES = 1 << 26
"""Of a tensor and its snapshot each, on a device where every block is waited for."""


class Different(NamedTuple):
    """Cells of a tensor, numbered row by row, and their words."""

    cells: Ints
    words: Tensor


class Snapshot:
    """What a tensor held in a box, given as slices with both ends."""

    def __init__(self, tensor: Tensor, box: Sequence[slice]) -> None:
        # Dimensions in the order in which they lie in memory: so the tensor is read end to end.
        dims = range(tensor.ndim)
        self._order = sorted(dims, key=tensor.stride, reverse=True)
        self._box = tuple(box)
        self._window = make_window(tensor.shape, self._box, self._order)
        copy = self._view(tensor).clone(memory_format=torch.contiguous_format)
        self._words = dtypes.flat(copy)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return self._words.nbytes

    def _view(self, tensor: Tensor) -> Tensor:
        """The words of the box, in the order of the snapshot."""
        return dtypes.words(tensor)[self._box].permute(self._order)

    def find_changed(self, tensor: Tensor, scratch: Scratch) -> Different:
        """The cells of the box that the tensor, of the same shape and type, has otherwise."""
        view = self._view(tensor)
        if view.device.type == "cpu":
            places, words = _compare(view.numpy(), self._words.numpy(), scratch)
        else:
            places, words = _compare_there(view, self._words)
        return Different(self._window.number(places), words)

    def update(self, cells: Ints, words: Tensor) -> None:
        """Remember that these cells hold these words; those beyond the box are not remembered."""
        which, places = self._window.find(cells)
        if len(which) < len(cells):
            words = words[torch.from_numpy(which).to(words.device)]
        self._words.scatter_(0, torch.from_numpy(places).to(words.device), words)


def take(tensor: Tensor, cells: Ints) -> Tensor:
    """The words of these cells, numbered row by row."""
    words = dtypes.words(tensor)
    if words.is_contiguous():
        return dtypes.flat(words)[torch.from_numpy(cells).to(words.device)]
    along = unravel(cells, tuple(words.shape))
    return words[tuple(torch.from_numpy(one).to(words.device) for one in along)]


def _compare(now: Words, before: Words, scratch: Scratch) -> tuple[Ints, Tensor]:
    """Where words are others than before, row by row, and what they are now."""
    places = []
    words = []
    first = 0
    for index in _list_blocks(now.shape, BLOCK_BYTES // now.itemsize):
        block = scratch.flatten(now[index])
        past = first + len(block)
        found = scratch.find_different(block, before[first:past])
        if len(found):
            # Taken while the block is in a cache.
            words.append(block[found])
            found += first
            places.append(found)
        first = past
    if not places:
        return np.zeros(0, np.int64), torch.from_numpy(before[:0])
    if len(places) == 1:
        return places[0], torch.from_numpy(words[0])
    return np.concatenate(places), torch.from_numpy(np.concatenate(words))


def _compare_there(now: Tensor, before: Tensor) -> tuple[Ints, Tensor]:
    """As `_compare`, on the tensors' device."""
    places = [np.zeros(0, np.int64)]
    words = [before[:0]]
    first = 0
    for index in _list_blocks(now.shape, DEVICE_BLOCK_BYTES // now.element_size()):
        block = dtypes.flat(now[index].contiguous())
        past = first + len(block)
        found = find_different_there(block, before[first:past])
        words.append(block[found])
        places.append(found.numpy(force=True) + first)
        first = past
    return np.concatenate(places), torch.cat(words)


def _list_blocks(shape: Sequence[int], most: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices of blocks of at most so many cells, in order."""
    if not shape:
        yield ()
        return
    inside = math.prod(shape[1:])
    if inside <= most:
        rows = max(1, most // max(inside, 1))
        for first in range(0, shape[0], rows):
            yield (slice(first, first + rows),)
    else:
        for row in range(shape[0]):
            for rest in _list_blocks(shape[1:], most):
                yield (row, *rest)
