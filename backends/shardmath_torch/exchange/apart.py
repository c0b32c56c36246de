"""Whether tensors share memory.

1. A rank's source and destination may be any views, but must not share memory: what arrives would
   overwrite what has not left.
2. Destinations must not share cells that are theirs; holes may be another's.
3. Tensors are compared in pairs only where their extents meet, from the first to the last byte that
   each uses: one sweep over where these begin finds all such pairs.

>>> import torch
>>> buffer = torch.zeros(4, 6)
>>> left, right = buffer[:, :3], buffer[:, 3:]
>>> list(find_meeting({"left": left, "right": right})), shares_memory(left, right)
([('left', 'right')], False)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
from torch import Tensor

from shardmath_torch.exchange.memory import reach

__all__ = ["find_meeting", "find_meeting_sides", "overlaps_itself", "shares_memory"]

COUNTED = 1 << 20
"""Elements of a tensor whose cells are looked at one by one."""

MOST_WORK = 100_000
"""Steps that numpy may take to find a common byte."""


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements may lie in one cell.

    Of a small tensor it is known; a large one must nest: each stride steps over all that smaller ones reach.
    """
    dims = []
    for step, count in zip(tensor.stride(), tensor.shape, strict=True):
        if count > 1:
            dims.append((step, count))
    dims.sort()
    reached = 0
    for step, count in dims:
        if step <= reached:
            return tensor.numel() > COUNTED or not _are_all_apart(dims, tensor.numel())
        reached += (count - 1) * step
    return False


def _are_all_apart(dims: list[tuple[int, int]], numel: int) -> bool:
    """Whether so many elements of these strides and lengths lie in as many cells."""
    if not numel:
        return True
    cells = np.zeros(1, np.int64)
    for step, count in dims:
        cells = np.add.outer(cells, step * np.arange(count)).reshape(-1)
    return len(np.unique(cells)) == numel


def find_meeting(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of keys whose extents of memory meet."""
    spans = []
    for key, tensor in tensors.items():
        if tensor.numel():
            spans.append((*_find_extent(tensor), key))
    active: list[tuple[int, str]] = []
    for start, end, key in sorted(spans):
        # Spans come by their starts, so one that has ended meets none that follows.
        active = [span for span in active if span[0] > start]
        for _, other in active:
            yield other, key
        active.append((end, key))


def find_meeting_sides(
    src: Mapping[str, Tensor], dst: Mapping[str, Tensor]
) -> Iterator[tuple[str, str]]:
    """Pairs (source key, destination key) whose extents of memory meet."""
    spans = []
    for side, tensors in enumerate((src, dst)):
        for key, tensor in tensors.items():
            if tensor.numel():
                spans.append((*_find_extent(tensor), side, key))
    active: tuple[list[tuple[int, str]], list[tuple[int, str]]] = ([], [])
    for start, end, side, key in sorted(spans):
        others = active[1 - side]
        # Only the other side's list is thinned out: its spans alone are looked at here.
        others[:] = [span for span in others if span[0] > start]
        for _, other in others:
            yield (key, other) if side == 0 else (other, key)
        active[side].append((end, key))


def _find_extent(tensor: Tensor) -> tuple[int, int]:
    """First and one past the last byte of memory that the tensor uses."""
    start = tensor.data_ptr()
    return start, start + reach(tensor) * tensor.element_size()


class _Cells:
    """The tensor's addresses as numpy sees them; its memory is never read."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
        }


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the tensors have a byte in common; yes where that is too hard to tell."""
    # numpy's own types know two values of max_work only.
    shares: Callable[..., bool] = np.shares_memory
    here, there = np.asarray(_Cells(a)), np.asarray(_Cells(b))
    try:
        return shares(here, there, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True
