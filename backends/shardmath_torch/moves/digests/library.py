"""Library: the arithmetic of digests by torch, for tensors that NumPy cannot read.

1. Tensors on the CPU are read as NumPy arrays on the same memory, without a copy.
2. Tensors on other devices stay there: the device computes the same integers, and returns one number.

>>> array, library = see(torch.arange(6, dtype=torch.bfloat16))
>>> array.dtype, library is NUMPY
(dtype('int16'), True)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmath.values.digests.weighing import NUMPY, Array, Library
from shardmath_torch.groups import dtypes

__all__ = ["TORCH", "see"]


class _Torch:
    """Torch's arithmetic, on the tensors' device."""

    def strides(self, array: Tensor) -> tuple[int, ...]:
        return array.stride()

    def transpose(self, array: Tensor, order: Sequence[int]) -> Tensor:
        return array.permute(tuple(order))

    def words(self, array: Tensor) -> Tensor:
        word = torch.int8 if array.element_size() == 1 else torch.int16
        whole = dtypes.flat(array.contiguous())
        # float64 has fast matrix products, which are exact for words this short.
        return whole.view(word).to(torch.float64)

    def products(self, rows: Tensor, weights: Tensor) -> Tensor:
        return self.integers(rows @ weights)

    def integers(self, array: Tensor) -> Tensor:
        return array.to(torch.int64)

    def join(self, arrays: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(arrays))

    def constant(self, array: NDArray[Any], like: Tensor) -> Tensor:
        # A copy, since a tensor on the array's memory could be written, and weights are cached.
        return torch.tensor(array, device=like.device)


TORCH: Library = _Torch()


def see(tensor: Tensor) -> tuple[Array, Library]:
    """Return (array of the tensor's bits, library for arithmetic on the array). For a tensor on the CPU, these are a
    NumPy array and NUMPY; on other devices, a torch tensor and TORCH."""
    words = dtypes.words(tensor)
    if tensor.device.type == "cpu":
        return dtypes.see_words(words), NUMPY
    return words, TORCH
