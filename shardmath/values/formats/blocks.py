"""Blocks: the positions of a tensor that share one scale, and the scales that belong to a slice of the tensor.

1. A block has a size in each of the last dimensions, and one position in earlier ones; the size None stands for the
   whole dimension. The last block of a dimension may be shorter.
2. Scales have as many dimensions as the tensor, one scale per block.
3. A slice may begin and end between blocks, and at the end of the dimension. FormatError is raised for a slice that
   ends inside a block, or has a step there. If the block is a whole dimension, every slice has its one scale.
4. Indices mean the same as in numpy: negative numbers, None, integers, steps, Ellipsis, and fewer than dimensions.

>>> import numpy as np
>>> rows = Blocks((32,))
>>> rows.count((6, 70)), rows.cuts((6, 70))[1]
((6, 3), (0, 32, 64, 70))
>>> rows.scale_slice(np.s_[-2:, 32:], (6, 70)), rows.data_slice(np.s_[..., 1:], (6, 70))
((slice(4, 6, 1), slice(1, 3, 1)), (slice(0, 6, 1), slice(32, 70, 1)))
>>> rows.scale_slice(np.s_[:, 40:], (6, 70), "w")
Traceback (most recent call last):
shardmath.FormatError: tensor 'w': slice 40:70 of dimension 1 (70 positions) cuts a block of 32; \
use 32 or 64 instead of 40
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import EllipsisType
from typing import SupportsIndex, TypeAlias, cast

from shardmath.base.arguments import as_integer, listed
from shardmath.base.errors import FormatError
from shardmath.base.text import plural, shown

__all__ = ["Blocks", "Index", "Sizes", "find_cuts", "label", "read_shape"]

Sizes: TypeAlias = tuple[int | None, ...]
"""Positions of a block in the last dimensions, None for a whole dimension."""
_Item: TypeAlias = SupportsIndex | slice | EllipsisType | None
Index: TypeAlias = _Item | tuple[_Item, ...]
"""Any index that numpy accepts in brackets, except arrays."""
Sliced: TypeAlias = tuple[int | slice | None, ...]
"""An index with an item for each dimension, and None for each new one."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """The size of blocks (positions of a tensor that share a scale): `sizes` along the last dimensions, `others` along
    each dimension before them. None means the whole dimension.

    Raises FormatError for sizes below 1.
    """

    sizes: Sizes
    others: int | None = 1

    def __post_init__(self) -> None:
        given = listed(self.sizes, "the sizes of a block", FormatError)
        object.__setattr__(self, "sizes", tuple(map(_read_size, given)))
        object.__setattr__(self, "others", _read_size(self.others))

    def __str__(self) -> str:
        if self.others is None:
            return "the tensor"
        return " x ".join("all" if n is None else str(n) for n in self.sizes) or "1"

    def per_dimension(self, ndim: int, name: str = "") -> Sizes:
        """Return a tuple of the block's size in each of `ndim` dimensions, None for the whole dimension. Error messages
        give the tensor's `name`.

        Raises FormatError if the block has more dimensions.
        """
        if len(self.sizes) > ndim:
            what = f"{label(name)}blocks of {self} have {plural(self.sizes, 'dimension')}"
            fix = f"give a tensor of {len(self.sizes)} or more"
            raise FormatError(f"{what}, but the tensor has {ndim}; {fix}")
        return (self.others,) * (ndim - len(self.sizes)) + self.sizes

    def positions(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return, for each dimension, how many positions a full block spans in a tensor of this `shape`."""
        return tuple(map(_resolve_size, self.per_dimension(len(shape)), shape))

    def count(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the number of blocks in each dimension of a tensor of this `shape`: the shape of its scales."""
        sizes = self.per_dimension(len(shape))
        counts = []
        for size, n in zip(sizes, shape, strict=True):
            counts.append(1 if size is None else -(-n // size))
        return tuple(counts)

    def cuts(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return, for each dimension, a tuple of the positions at which a tensor of this `shape` can be cut without
        cutting a block.

        Both ends are included.
        """
        pairs = zip(self.positions(shape), shape, strict=True)
        return tuple((*range(0, n, block), n) for block, n in pairs)

    def scale_slice(self, data_slice: Index, shape: tuple[int, ...], name: str = "") -> Sliced:
        """Convert `data_slice`, an index into a tensor of this `shape`, into an index into its scales, which gives the
        scales of the selected blocks. The result is a tuple of integers, slices, and None for new axes; error messages
        give the tensor's `name`.

        Raises FormatError, with the tensor's `name`, for a cut block, and for an invalid index.
        """
        sizes = self.per_dimension(len(shape), name)
        out: list[int | slice | None] = []
        for d, item in _list_items(data_slice, shape, name):
            if d is None:
                out.append(None)
            elif isinstance(item, slice):
                out.append(_slice_scales(item, shape, sizes[d], d, name))
            else:
                out.append(_find_scale(item, shape, sizes[d], d, name))
        return tuple(out)

    def data_slice(self, scale_slice: Index, shape: tuple[int, ...], name: str = "") -> Sliced:
        """Convert `scale_slice`, an index into the scales of a tensor of this `shape`, into an index into the tensor,
        which gives all positions that have these scales. The result is a tuple of integers, slices, and None for new
        axes; error messages give the tensor's `name`.

        An integer becomes the slice of its block. Raises FormatError, with the tensor's `name`, for an invalid index,
        and for a slice with another step than 1.
        """
        sizes = self.per_dimension(len(shape), name)
        out: list[int | slice | None] = []
        for d, item in _list_items(scale_slice, self.count(shape), name):
            if d is None:
                out.append(None)
            elif sizes[d] == 1:
                out.append(item)
            else:
                out.append(_slice_positions(item, shape[d], sizes[d], d, name))
        return tuple(out)


def _read_size(size: object) -> int | None:
    """The size as Python's integer. Raises FormatError for one below 1."""
    if size is None:
        return None
    number = as_integer(size, "a size of a block", FormatError)
    if number < 1:
        raise FormatError(f"a size of a block is {number}, but must be at least 1; give 1 or more")
    return number


def _resolve_size(size: int | None, n: int) -> int:
    """Positions of a block in a dimension of n positions."""
    return max(n, 1) if size is None else size


def label(name: str) -> str:
    """Return the beginning of error messages about the tensor `name`: "tensor 'w': ", or "" without a name."""
    return f"tensor {name!r}: " if name else ""


def read_shape(shape: object) -> tuple[int, ...]:
    """Return the `shape` as a tuple of ints. Raises FormatError unless it lists integers of 0 or more."""
    given = listed(shape, "sizes", FormatError)
    sizes = tuple(as_integer(n, f"a size of shape {given}", FormatError) for n in given)
    if min(sizes, default=0) < 0:
        raise FormatError(f"shape {sizes} has a size of {min(sizes)}; give sizes of 0 or more")
    return sizes


def find_cuts(position: int, block: int, n: int) -> tuple[int, int]:
    """Return (start, stop) of the block that contains `position` (less than `n`), in a dimension of length `n` that is
    divided into blocks of `block` positions. The last block can be shorter."""
    start = position - position % block
    return start, min(start + block, n)


# Indices


def _list_items(
    index: Index, shape: tuple[int, ...], name: str
) -> Iterator[tuple[int | None, int | slice]]:
    """Each dimension with its item, an integer or a normalized slice; (None, 0) for each new dimension."""
    items = list(index) if isinstance(index, tuple) else [index]
    # `is`, not ==: an array, which raises below, would compare element by element.
    dots = [i for i, item in enumerate(items) if item is Ellipsis]
    # The dimensions that have an item of their own: None makes a new dimension, and ... stands for the rest.
    indexed = sum(item is not None for item in items) - len(dots)
    if len(dots) > 1 or indexed > len(shape):
        what = f"{label(name)}index {shown(index)} has too many items for shape {shape}"
        raise FormatError(f"{what}; give at most one per dimension, and ... once")
    # A short index goes on as if it ended with an Ellipsis.
    insert = dots[0] if dots else len(items)
    items[insert : insert + 1] = [slice(None)] * (len(shape) - indexed)
    d = 0
    for item in items:
        if item is None:
            yield None, 0
            continue
        yield d, _read_item(item, shape[d], d, name)
        d += 1


def _read_item(item: _Item, n: int, d: int, name: str) -> int | slice:
    """The item normalized for a dimension of n positions: no number is negative or left out."""
    where = f"{label(name)}dimension {d}"
    if not isinstance(item, slice):
        number = as_integer(item, f"{where}: an index", FormatError)
        if not -n <= number < n:
            what = f"{where} has {n} positions, and none at {number}"
            raise FormatError(f"{what}; give an index from {-n} to {n - 1}")
        return number % n
    try:
        start, stop, step = item.indices(n)
    except (TypeError, ValueError):
        fix = "give a slice of integers, with a step other than 0"
        raise FormatError(f"{where}: {shown(item)} is not a slice; {fix}") from None
    positions = range(start, stop, step)
    if not positions:
        return slice(start, start, 1)
    # A single position has no step.
    if len(positions) == 1:
        return slice(start, start + 1, 1)
    # A negative step may stop before position 0, which a slice cannot say by a number: -1 is the last position.
    return slice(start, None if stop < 0 else stop, step)


def _slice_scales(
    item: slice, shape: tuple[int, ...], size: int | None, d: int, name: str
) -> slice:
    """The slice of the scales that belong to a slice of dimension d. Raises FormatError if it cuts a block."""
    if size == 1:
        return item
    if size is None:
        return slice(0, 1, 1)
    n = shape[d]
    if item.start == item.stop:
        first = item.start // size
        return slice(first, first, 1)
    what = f"{label(name)}slice {_write_slice(item)} of dimension {d} ({n} positions)"
    if item.step != 1:
        what = f"{what} has step {item.step} inside blocks of {size}"
        raise FormatError(f"{what}; give a slice with step 1")
    for end in (item.start, item.stop):
        if end % size and end != n:
            below, above = find_cuts(end, size, n)
            fix = f"use {below} or {above} instead of {end}"
            raise FormatError(f"{what} cuts a block of {size}; {fix}")
    return slice(item.start // size, -(-item.stop // size), 1)


def _write_slice(item: slice) -> str:
    """The slice as text, such as 0:4."""
    stop = "" if item.stop is None else item.stop
    step = "" if item.step == 1 else f":{item.step}"
    return f"{item.start}:{stop}{step}"


def _find_scale(position: int, shape: tuple[int, ...], size: int | None, d: int, name: str) -> int:
    """The number of the scale of one position of dimension d. Raises FormatError unless the position is a whole block,
    or blocks span the dimension."""
    if size is None:
        return 0
    if size == 1:
        return position
    scales = _slice_scales(slice(position, position + 1, 1), shape, size, d, name)
    return cast(int, scales.start)


def _slice_positions(item: int | slice, n: int, size: int | None, d: int, name: str) -> slice:
    """The positions that belong to an item of the scales, in a dimension of n positions."""
    block = _resolve_size(size, n)
    if not isinstance(item, slice):
        item = slice(item, item + 1, 1)
    if item.step != 1:
        what = f"{label(name)}slice {_write_slice(item)} of the scales of dimension {d}"
        what = f"{what} has step {item.step} over blocks of {block}"
        raise FormatError(f"{what}; give a slice with step 1")
    start = min(n, item.start * block)
    stop = min(n, item.stop * block)
    return slice(start, stop, 1)
