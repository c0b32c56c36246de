"""Comparing: which cells of tensors differ from a snapshot.

1. Snapshots are contiguous copies of the words in a box of each tensor: the box that is sent. Words are compared, not
   values: NaN is equal to itself, and -0.0 differs from 0.0.
2. Tensors are compared in blocks that fit a cache, in memory order, so that no temporary is as large as a tensor.
3. Cells are numbered row by row, whatever the tensor's strides.

>>> weights = {"w": torch.tensor([1.0, 2.0, 3.0])}
>>> snapshots = Snapshots(weights, {"w": (slice(0, 3),)})
>>> weights["w"][1] = float("nan")
>>> (changed,) = snapshots.list_changed(weights)
>>> changed.cells, changed.words.view(torch.float32), snapshots.nbytes
(array([1]), tensor([nan]), 12)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shardmath.base.arrays import Ints
from shardmath.values.changes.boxes import unravel
from shardmath.values.changes.windows import ChangedWindow, make_window
from shardmath_torch.groups import dtypes
from shardmath_torch.tensors.changes.differing import (
    BLOCK_BYTES,
    Scratch,
    Words,
    find_different_there,
)

__all__ = ["Changed", "Snapshots", "take"]

DEVICE_BLOCK_BYTES = 1 << 26
"""Bytes of a block of a tensor, and of its snapshot, on a device, where comparing waits for every block."""


class Changed(NamedTuple):
    """The changed elements of a source tensor: their positions, numbered row by row, and their present bits.

    `places` are the positions of these words in the snapshots' row of words of that size, if known.
    """

    key: str
    cells: Ints
    words: Tensor
    places: Ints | None = None


class _Snapshot(NamedTuple):
    """The snapshot of a tensor's box: its cells, the size of a word in bytes, and where its words begin in the row of
    all words of that size."""

    window: ChangedWindow
    size: int
    first: int

    def view(self, tensor: Tensor) -> Tensor:
        """Return a view of the slice of `tensor` that this snapshot copies. Its dtype is an integer of the same size,
        and its dimensions are in order of decreasing stride.
        """
        return dtypes.words(tensor)[self.window.box].permute(self.window.order)


class Snapshots:
    """Earlier copies of tensors, to find the elements that have changed since. Of each tensor, one slice is copied."""

    def __init__(self, tensors: Mapping[str, Tensor], boxes: Mapping[str, Sequence[slice]]) -> None:
        self._scratch = Scratch()
        self._snapshots: dict[str, _Snapshot] = {}
        # By size of word, the number of words so far.
        lengths: dict[int, int] = {}
        for key, box in boxes.items():
            tensor = tensors[key]
            # Dimensions by decreasing stride, so that the tensor is read in memory order.
            order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
            window = make_window(tensor.shape, box, order)
            size = tensor.element_size()
            first = lengths.setdefault(size, 0)
            self._snapshots[key] = _Snapshot(window, size, first)
            lengths[size] += window.count
        # Words of one size are one row, so that one scatter updates all of them.
        self._words: dict[int, Tensor] = {}
        for size, length in lengths.items():
            device = next(t.device for t in tensors.values() if t.element_size() == size)
            self._words[size] = torch.empty(length, dtype=dtypes.WORDS[size], device=device)
        for key, snapshot in self._snapshots.items():
            view = snapshot.view(tensors[key])
            self._get_words(snapshot).view(view.shape).copy_(view)

    @property
    def nbytes(self) -> int:
        """The total size of the snapshots (the copies of tensors with which later values are compared), in bytes."""
        return sum(words.nbytes for words in self._words.values())

    def _get_words(self, snapshot: _Snapshot) -> Tensor:
        """The words of a snapshot, as a row."""
        stop = snapshot.first + snapshot.window.count
        return self._words[snapshot.size][snapshot.first : stop]

    def list_changed(self, tensors: Mapping[str, Tensor]) -> Iterator[Changed]:
        """Compare `tensors` with their snapshots (earlier copies of slices of them), and yield a Changed for each
        tensor that differs: the positions of its changed elements, and their current values as bits.

        The tensors need the strides of the snapshot.
        """
        for key, snapshot in self._snapshots.items():
            view = snapshot.view(tensors[key])
            before = self._get_words(snapshot)
            if view.device.type == "cpu":
                places, words = _compare(dtypes.see_words(view), before.numpy(), self._scratch)
            else:
                places, words = _compare_on_device(view, before)
            if len(places):
                cells = snapshot.window.number(places)
                yield Changed(key, cells, words, places + snapshot.first)

    def update(self, changed: Iterable[Changed]) -> None:
        """Update the snapshots (earlier copies of slices of tensors) with the present bits of the `changed` elements.
        Elements outside of the copied slices are ignored.
        """
        by_size: dict[int, list[tuple[Ints, Tensor]]] = {}
        for each in changed:
            if each.key in self._snapshots:
                size = each.words.element_size()
                by_size.setdefault(size, []).append(self._locate(each))
        for size, located in by_size.items():
            places = np.concatenate([positions for positions, _ in located])
            words = torch.cat([present for _, present in located])
            at = torch.from_numpy(places).to(words.device)
            # The snapshots are inference tensors if the whole move was made in inference mode.
            with torch.inference_mode():
                self._words[size].scatter_(0, at, words)

    def _locate(self, changed: Changed) -> tuple[Ints, Tensor]:
        """The positions of changed words in the row of their size, and the words."""
        if changed.places is not None:
            return changed.places, changed.words
        snapshot = self._snapshots[changed.key]
        # The indices of those cells that the snapshot covers, and their places in it.
        covered, places = snapshot.window.find(changed.cells)
        words = changed.words
        if len(covered) < len(words):
            words = words[torch.from_numpy(covered).to(words.device)]
        return places + snapshot.first, words


def take(tensor: Tensor, cells: Ints) -> Tensor:
    """Return the bits of the elements of `tensor` at the positions `cells`, numbered row by row, as a 1-D tensor of
    integers.
    """
    words = dtypes.words(tensor)
    if words.is_contiguous():
        at = torch.from_numpy(cells).to(words.device)
        # Several times as fast as indexing, where cells are few.
        return dtypes.flat(words).index_select(0, at)
    index = unravel(cells, tuple(words.shape))
    return words[tuple(torch.from_numpy(axis).to(words.device) for axis in index)]


def _compare(now: Words, before: Words, scratch: Scratch) -> tuple[Ints, Tensor]:
    """The positions, row by row, at which words have changed, and the present words."""
    places = []
    words = []
    start = 0
    for index in _list_blocks(now.shape, BLOCK_BYTES // now.itemsize):
        block = scratch.flatten(now[index])
        stop = start + len(block)
        different = scratch.find_different(block, before[start:stop])
        if len(different):
            # Copied while the block is in the cache.
            words.append(block[different])
            different += start
            places.append(different)
        start = stop
    if not places:
        return np.zeros(0, np.int64), torch.from_numpy(before[:0])
    if len(places) == 1:
        return places[0], torch.from_numpy(words[0])
    return np.concatenate(places), torch.from_numpy(np.concatenate(words))


def _compare_on_device(now: Tensor, before: Tensor) -> tuple[Ints, Tensor]:
    """`_compare` on the tensors' device."""
    places = [np.zeros(0, np.int64)]
    words = [before[:0]]
    start = 0
    for index in _list_blocks(now.shape, DEVICE_BLOCK_BYTES // now.element_size()):
        block = dtypes.flat(now[index].contiguous())
        stop = start + len(block)
        different = find_different_there(block, before[start:stop])
        words.append(block[different])
        places.append(different.numpy(force=True) + start)
        start = stop
    return np.concatenate(places), torch.cat(words)


def _list_blocks(shape: Sequence[int], most: int) -> Iterator[tuple[int | slice, ...]]:
    """Indices of blocks of at most `most` cells, in order: of whole rows, or if a row has more cells, of its parts."""
    if not shape:
        yield ()
        return
    row_cells = math.prod(shape[1:])
    if row_cells <= most:
        rows = max(1, most // max(row_cells, 1))
        for first in range(0, shape[0], rows):
            yield (slice(first, first + rows),)
    else:
        for row in range(shape[0]):
            for rest in _list_blocks(shape[1:], most):
                yield (row, *rest)
