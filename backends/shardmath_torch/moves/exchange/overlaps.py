"""Overlaps: whether tensors share memory.

1. A rank's source and destination may be any views, but must not share memory: arriving bytes would
   overwrite bytes that have not left.
2. Destinations must not share their own cells; holes between cells may belong to another tensor.
3. Only pairs whose extents meet are compared, where an extent goes from the first to the last byte
   that a tensor uses. One sweep over the extents in order of their starts finds all such pairs.

>>> import torch
>>> buffer = torch.zeros(4, 6)
>>> left, right = buffer[:, :3], buffer[:, 3:]
>>> list(find_meeting({"left": left, "right": right})), shares_memory(left, right)
([('left', 'right')], False)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from shardmath_torch.groups.dtypes import Seen
from shardmath_torch.moves.exchange.memory import reach

__all__ = ["cells_meet", "find_meeting", "find_meeting_sides", "overlaps_itself", "shares_memory"]

COUNTED = 1 << 20
"""Most elements of a tensor whose cells are compared one by one."""

MOST_WORK = 100_000
"""Most steps that NumPy may take to find a common byte."""


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of the tensor share memory; True also for a large tensor whose strides do not rule this out.

    The answer is exact for a small tensor. A large one counts as overlapping unless its strides nest, that is, each
    stride steps over all elements that the smaller strides reach.
    """
    return cells_meet(tensor.shape, tensor.stride())


def cells_meet(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor with this shape and these strides share memory, as `overlaps_itself`."""
    dims = []
    for step, count in zip(strides, shape, strict=True):
        if count > 1:
            dims.append((step, count))
    dims.sort()
    # The last cell that the dimensions of smaller strides reach.
    reached = 0
    for step, count in dims:
        if step <= reached:
            numel = math.prod(shape)
            return numel > COUNTED or not _are_all_apart(dims, numel)
        reached += (count - 1) * step
    return False


def _are_all_apart(dims: list[tuple[int, int]], numel: int) -> bool:
    """Whether `numel` elements, by (stride, count) per dimension, lie in as many different cells."""
    if not numel:
        return True
    cells = np.zeros(1, np.int64)
    for step, count in dims:
        offsets = step * np.arange(count)
        cells = np.add.outer(cells, offsets).reshape(-1)
    return len(np.unique(cells)) == numel


class _Span(NamedTuple):
    """The extent of tensor `key`: the addresses of its first byte, and of one past its last."""

    start: int
    end: int
    key: str


def _list_spans(tensors: Mapping[str, Tensor]) -> list[_Span]:
    """The extents of all tensors that have elements."""
    spans = []
    for key, tensor in tensors.items():
        if tensor.numel():
            start = tensor.data_ptr()
            nbytes = reach(tensor) * tensor.element_size()
            spans.append(_Span(start, start + nbytes, key))
    return spans


def find_meeting(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of keys of tensors whose extents of memory (from first to last byte) overlap."""
    active: list[_Span] = []
    for span in sorted(_list_spans(tensors)):
        # Spans come in order of their starts, so one that has ended meets no later one.
        active = [other for other in active if other.end > span.start]
        for other in active:
            yield other.key, span.key
        active.append(span)


def find_meeting_sides(
    src: Mapping[str, Tensor], dst: Mapping[str, Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield the pairs (source key, destination key) of tensors whose extents of memory (from first to last byte)
    overlap."""
    spans = [(span, True) for span in _list_spans(src)]
    spans += [(span, False) for span in _list_spans(dst)]
    sources: list[_Span] = []
    destinations: list[_Span] = []
    for span, is_source in sorted(spans):
        same_side, other_side = (sources, destinations) if is_source else (destinations, sources)
        # Only the other side's spans are compared, so only they need to be thinned out.
        other_side[:] = [other for other in other_side if other.end > span.start]
        for other in other_side:
            yield (span.key, other.key) if is_source else (other.key, span.key)
        same_side.append(span)


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the tensors have a byte in common; True if that takes too long to tell."""
    # NumPy's type annotations know only two values of max_work.
    shares: Callable[..., bool] = np.shares_memory
    # Opaque elements, since only addresses are used, and memory on a GPU cannot be read.
    arrays = [np.asarray(Seen(tensor, f"|V{tensor.element_size()}")) for tensor in (a, b)]
    try:
        return shares(*arrays, max_work=MOST_WORK)
    except np.exceptions.TooHardError:
        return True
