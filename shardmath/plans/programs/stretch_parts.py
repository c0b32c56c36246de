"""Parts: what stretches have of the tensors of rows, all stretches at once.

1. A stretch is bytes of the content of a block: the end of a row, whole rows, the beginning of one.
2. What it has of a row is the end of a tensor, whole tensors, the beginning of one: three **parts**
   at most, each the same elements of neighbouring tensors of a batch.
3. Parts stand in the order of stretches, of rows, and of tensors.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> src, dst = (Layout((8,), Mesh(x=2, ranks=ranks), "(x n)") for ranks in ((0, 1), (2, 3)))
>>> p = plan({"a": src, "b": src}, {"a": dst, "b": dst})
>>> one = Stretches(*np.array([[0], [0], [2], [4], [20]]))
>>> parts = list_parts(p.lines, p.batches, one)
>>> parts.tensor.tolist(), parts.copies.tolist(), parts.lo.tolist(), parts.hi.tolist()
([0, 1], [1, 1], [1, 0], [4, 1])
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Ints, ranges
from shardmath.plans.balance import Grid, make_grid
from shardmath.plans.demands import Batch, Demands

__all__ = ["StretchParts", "Stretches", "list_parts"]

_Column: TypeAlias = NDArray[Any]


class Stretches(NamedTuple):
    """Stretches in columns: bytes lo..hi-1 of the content of a block, from one rank to another (or the same)."""

    block: Ints
    sender: Ints
    receiver: Ints
    lo: Ints
    hi: Ints


class StretchParts(NamedTuple):
    """Part i is of stretch number `stretch[i]`, and of `copies[i]` tensors from number `tensor[i]` of a batch on.

    Of each it is elements lo..hi-1 of the unit of row `row[i]`.
    """

    stretch: Ints
    row: Ints
    tensor: Ints
    copies: Ints
    lo: Ints
    hi: Ints

    def take(self, some: Ints) -> StretchParts:
        """Some of the parts, in this order."""
        return StretchParts(*(column[some] for column in self))


def list_parts(demands: Demands, batches: tuple[Batch, ...], given: Stretches) -> StretchParts:
    """The parts of stretches of these lines, stretch by stretch."""
    grid = make_grid(demands, batches)
    cut = _cut_by_row(grid, given)
    by_tensor = _cut_by_tensor(cut.lo, cut.hi, demands.each[cut.row])
    which = by_tensor.which
    row = cut.row[which]
    begin = demands.lo[row]
    item = grid.item[row]
    return StretchParts(
        stretch=cut.stretch[which],
        row=row,
        tensor=by_tensor.tensor,
        copies=by_tensor.copies,
        lo=begin + by_tensor.lo // item,
        hi=begin + by_tensor.hi // item,
    )


class _ByRow(NamedTuple):
    """What stretches have of rows: bytes lo..hi-1 of a row."""

    stretch: Ints
    row: Ints
    lo: Ints
    hi: Ints


def _cut_by_row(grid: Grid, given: Stretches) -> _ByRow:
    """All rows that stretches have a part of."""
    # Contents laid end to end, and so their rows, so that one search serves all.
    base = grid.base[given.block]
    begin = base + given.lo
    end = base + given.hi
    first = np.searchsorted(grid.begin, begin, "right") - 1
    last = np.searchsorted(grid.begin, end, "left")
    row, stretch = ranges(first, last)
    begins = grid.begin[row]
    after = np.append(grid.begin[1:], grid.base[-1])
    lo = np.maximum(begin[stretch], begins)
    hi = np.minimum(end[stretch], after[row])
    return _ByRow(stretch, row, lo - begins, hi - begins)


class _ByTensor(NamedTuple):
    """What is had of tensors: bytes lo..hi-1 of each of `copies` ones, of range number `which`."""

    which: Ints
    tensor: Ints
    copies: Ints
    lo: Ints
    hi: Ints


def _cut_by_tensor(lo: Ints, hi: Ints, each: Ints) -> _ByTensor:
    """Ranges of bytes lo..hi-1 of rows in which every tensor has `each` bytes.

    Of each range the rest of a tensor, then whole ones, then the beginning of one.
    """
    first, a = np.divmod(lo, each)
    last, b = np.divmod(hi, each)
    none = np.zeros_like(lo)
    one = np.ones_like(lo)
    inside = first == last
    begun = a > 0
    second = first + begun
    between = last - second
    has_whole = ~inside & (between > 0)
    has_tail = ~inside & (b > 0)
    is_some = _side_by_side(begun | inside, has_whole, has_tail)
    which, _ = is_some.nonzero()
    head_end = np.where(inside, b, each)
    columns = (
        (first, second, last),
        (one, between, one),
        (a, none, none),
        (head_end, each, b),
    )
    chosen = (_side_by_side(*three)[is_some] for three in columns)
    tensor, copies, begin, end = chosen
    return _ByTensor(which, tensor, copies, begin, end)


def _side_by_side(head: _Column, whole: _Column, tail: _Column) -> _Column:
    """Of each range the three."""
    return np.stack((head, whole, tail), axis=1)
