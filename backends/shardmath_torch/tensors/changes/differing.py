"""Differing: where two rows of words differ, as fast as memory is read.

1. Words are compared eight bytes at a time. Where few of these differ, only those are looked at again; where many do,
   all words are compared one by one.
2. On the CPU by numpy, several times as fast as torch on one thread. What is compared is written into memory that is
   used again: fresh memory would have to be mapped, page by page.

>>> now, before = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int16), torch.zeros(5, dtype=torch.int16)
>>> before[:] = now
>>> now[3] = 0
>>> Scratch().find_different(now.numpy(), before.numpy())
array([3])
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmath.base.arrays import Ints

__all__ = ["BLOCK_BYTES", "Scratch", "Words", "find_different_there"]

Words: TypeAlias = NDArray[Any]

BLOCK_BYTES = 1 << 20
"""Of a tensor and its snapshot each: small enough for a cache with what is made of it, and large enough that Python's
share is small."""

MANY = 64
"""Where one of so many eight bytes differs, words are compared one by one: that takes as long as looking again."""


class Scratch:
    """Memory in which blocks are compared. Of one thread at a time."""

    def __init__(self) -> None:
        self._mask = np.empty(BLOCK_BYTES, bool)
        self._copy = np.empty(BLOCK_BYTES, np.uint8)

    def flatten(self, block: Words) -> Words:
        """The block as one row; a copy that lasts until the next one, where it is not contiguous."""
        if not block.flags.c_contiguous:
            copy = self._copy[: block.nbytes].view(block.dtype).reshape(block.shape)
            np.copyto(copy, block)
            block = copy
        return block.reshape(-1)

    def find_different(self, now: Words, before: Words) -> Ints:
        """Where two rows of words differ, of at most BLOCK_BYTES each."""
        if now.itemsize > 8:
            # Complex words would be compared as numbers.
            halves = self.find_different(now.view(np.int64), before.view(np.int64))
            words: Ints = np.unique(halves // 2)
            return words
        each = 8 // now.itemsize
        even = len(now) - len(now) % each
        wide_now = now[:even].view(np.int64)
        wide_before = before[:even].view(np.int64)
        mask = self._mask[: len(wide_now)]
        np.not_equal(wide_now, wide_before, out=mask)
        if np.count_nonzero(mask) * MANY > len(mask) or even < len(now):
            mask = self._mask[: len(now)]
            np.not_equal(now, before, out=mask)
            return mask.nonzero()[0]
        which = mask.nonzero()[0]
        bits = (wide_now[which] ^ wide_before[which]).view(now.dtype)
        within = bits.nonzero()[0]
        return which[within // each] * each + within % each


def find_different_there(now: Tensor, before: Tensor) -> Tensor:
    """Where two rows of words differ, on their device."""
    if now.element_size() > 8:
        halves = find_different_there(now.view(torch.int64), before.view(torch.int64))
        words: Tensor = torch.unique_consecutive(halves // 2)
        return words
    return (now != before).nonzero().flatten()
