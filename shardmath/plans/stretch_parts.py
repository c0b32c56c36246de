"""Parts: stretches cut at the borders of rows and tensors, all stretches at once.

1. A stretch is bytes of the content of a block: the end of a row, whole rows, the beginning of one.
2. In each row a stretch has the end of a tensor, whole tensors, the beginning of one: three **parts**
   at most, each the same elements of neighboring tensors of a batch.
3. Parts are in the order of stretches, of rows, and of tensors.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> src, dst = (Layout((8,), Mesh(x=2, ranks=ranks), "(x n)") for ranks in ((0, 1), (2, 3)))
>>> p = plan({"a": src, "b": src}, {"a": dst, "b": dst})
>>> one = Stretches(*np.array([[0], [0], [2], [4], [20]]))
>>> parts = list_parts(p.lines, one)
>>> parts.tensor.tolist(), parts.copies.tolist(), parts.lo.tolist(), parts.hi.tolist()
([0, 1], [1, 1], [1, 0], [4, 1])
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Bools, Ints, Offsets, ranges
from shardmath.base.memo import memo
from shardmath.plans.demands import Demands

__all__ = ["StretchParts", "Stretches", "list_parts"]

_Column: TypeAlias = NDArray[Any]


class Stretches(NamedTuple):
    """A table of byte ranges: in row i, bytes `lo[i]` to `hi[i]` - 1 of block `block[i]` go from `sender[i]` to
    `receiver[i]`, which can be the same rank. A block is bytes that the same ranks hold and the same ranks need."""

    block: Ints
    sender: Ints
    receiver: Ints
    lo: Ints
    hi: Ints

    def take(self, some: Ints | Bools) -> Stretches:
        """Return the byte ranges with the indices `some`, or those where `some` is true."""
        return Stretches(*(column[some] for column in self))


class StretchParts(NamedTuple):
    """Parts of byte ranges that go from rank to rank. Part i belongs to byte range number `stretch[i]`, and has
    elements `lo[i]` to `hi[i]` - 1 of each of the tensors number `tensor[i]` to `tensor[i]` + `copies[i]` - 1.

    The elements are counted in a unit (elements that move together), to which row `row[i]` of the demands belongs.
    Tensors are numbered in their batch.
    """

    stretch: Ints
    row: Ints
    tensor: Ints
    copies: Ints
    lo: Ints
    hi: Ints

    def take(self, some: Ints) -> StretchParts:
        """Return the parts with the indices `some`, in the order of `some`."""
        return StretchParts(*(column[some] for column in self))


def list_parts(demands: Demands, given: Stretches) -> StretchParts:
    """Cut the byte ranges `given` into parts, each of which is the same range of elements in one or more tensors.
    `demands` says which elements of which tensors the bytes are."""
    cut = _cut_by_row(demands, given)
    by_tensor = _cut_by_tensor(cut.lo, cut.hi, demands.each[cut.row])
    cut_index = by_tensor.which
    row = cut.row[cut_index]
    first_element = demands.lo[row]
    itemsize = demands.each[row] // (demands.hi[row] - first_element)
    return StretchParts(
        stretch=cut.stretch[cut_index],
        row=row,
        tensor=by_tensor.tensor,
        copies=by_tensor.copies,
        lo=first_element + by_tensor.lo // itemsize,
        hi=first_element + by_tensor.hi // itemsize,
    )


class _ByRow(NamedTuple):
    """Stretches cut by rows: bytes lo..hi-1 of a row."""

    stretch: Ints
    row: Ints
    lo: Ints
    hi: Ints


def _cut_by_row(demands: Demands, given: Stretches) -> _ByRow:
    """The stretches, cut at the borders of rows."""
    base, row_begin = _lay_rows(demands)
    begin = base[given.block] + given.lo
    end = base[given.block] + given.hi
    first = np.searchsorted(row_begin, begin, "right") - 1
    last = np.searchsorted(row_begin, end, "left")
    row, stretch = ranges(first, last)
    lo = np.maximum(begin[stretch], row_begin[row])
    hi = np.minimum(end[stretch], row_begin[row + 1])
    return _ByRow(stretch, row, lo - row_begin[row], hi - row_begin[row])


@memo(8)
def _lay_rows(demands: Demands) -> tuple[Ints, Ints]:
    """The first byte of each block, and of each row, if the contents of all blocks, and so their rows, are laid end to
    end: then one search serves all. Behind the last row is its end."""
    base = Offsets.of_counts(demands.nbytes).first
    begin = demands.rows.spread(base[:-1]) + demands.at
    return base, np.append(begin, base[-1])


class _ByTensor(NamedTuple):
    """Ranges cut by tensors: bytes lo..hi-1 of each of `copies` tensors from `tensor` on, in range `which`."""

    which: Ints
    tensor: Ints
    copies: Ints
    lo: Ints
    hi: Ints


def _cut_by_tensor(lo: Ints, hi: Ints, each: Ints) -> _ByTensor:
    """Bytes lo..hi-1 of rows, cut at the borders of tensors; every tensor of a row has `each` bytes.

    A range has at most three parts: a head inside tensor `first`, whole tensors, and a tail inside tensor `last`.
    """
    first, head_begin = np.divmod(lo, each)
    last, tail_end = np.divmod(hi, each)
    zero = np.zeros_like(lo)
    one = np.ones_like(lo)
    # A range inside one tensor is all head.
    inside = first == last
    has_head = head_begin > 0
    first_whole = first + has_head
    whole = last - first_whole
    has_whole = ~inside & (whole > 0)
    has_tail = ~inside & (tail_end > 0)
    is_some = _side_by_side(has_head | inside, has_whole, has_tail)
    which, _ = is_some.nonzero()
    head_end = np.where(inside, tail_end, each)
    columns = (
        (first, first_whole, last),
        (one, whole, one),
        (head_begin, zero, zero),
        (head_end, each, tail_end),
    )
    tensor, copies, begin, end = (_side_by_side(*three)[is_some] for three in columns)
    return _ByTensor(which, tensor, copies, begin, end)


def _side_by_side(head: _Column, whole: _Column, tail: _Column) -> _Column:
    """A table of three columns: by range, its head, its whole tensors and its tail."""
    return np.stack((head, whole, tail), axis=1)
