"""Packing: a rank's positions of a tensor, without holes and in ascending order, as in `shardmath.transforms`.

>>> from shardmath import Layout, Mesh
>>> held = Packing(Layout((4,), Mesh(), "(n)=<2:4 -1 0:2>", dtype="int64"), 0, torch.device("cpu"))
>>> local = torch.tensor([2, 3, -1, 0, 1])
>>> held.read(local)
tensor([0, 1, 2, 3])
>>> held.write(local, torch.tensor([10, 11, 12, 13]))
>>> local
tensor([12, 13, -1, 10, 11])
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from shardmath.layouts.layout import Layout
from shardmath.values.transforms.packing import find_cells
from shardmath_torch.groups.dtypes import words

__all__ = ["Packing"]


class Packing:
    """An index that selects a rank's elements, without padding, from its local tensor. `is_view` is True if the index
    consists of slices, so that `read` returns a view instead of a copy.
    """

    def __init__(self, layout: Layout, rank: int, device: torch.device) -> None:
        cells = find_cells(layout, rank)
        self.is_view = all(isinstance(dim_cells, slice) for dim_cells in cells)
        self.shape = tuple(runs.size for runs in layout.runs(rank))
        sizes = layout.local_shape(rank)
        index: tuple[object, ...] = (*cells, ...)
        if not self.is_view:
            numbers = [np.arange(n)[dim_cells] for dim_cells, n in zip(cells, sizes, strict=True)]
            # Cached between moves: an open mesh, with as many numbers as the sum of the sizes, not their product.
            index = tuple(torch.from_numpy(axis).to(device) for axis in np.ix_(*numbers))
        self._index = index

    def read(self, local: Tensor) -> Tensor:
        """Return the rank's elements of the local tensor without padding (packed): a view, or a copy."""
        if self.is_view:
            return local[self._index]  # type: ignore[index]
        # as words, since torch cannot index all dtypes
        return words(local)[self._index].view(local.dtype)  # type: ignore[index]

    def write(self, local: Tensor, packed: Tensor) -> None:
        """Write the `packed` elements back into the local tensor, and leave its padding unchanged."""
        words(local)[self._index] = words(packed)  # type: ignore[index]
