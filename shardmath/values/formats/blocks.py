"""Blocks: the positions of a tensor that share one scale, and what of the scales belongs to a slice of the tensor.

1. A block has so many positions in each of the last dimensions, and one in those before; None stands for the whole
   dimension. The last block of a dimension may be shorter.
2. A tensor has scales of as many dimensions, one scale per block.
3. A slice may begin and end between blocks, and where the dimension ends. Inside a block it is an error, and so is a
   step. A whole dimension may be cut anywhere: every slice of it has the one scale.
4. Indices mean what numpy has them mean: negative ones, None, integers, steps, Ellipsis, and fewer than dimensions.

>>> import numpy as np
>>> rows = Blocks((32,))
>>> rows.count((6, 70)), rows.cuts((6, 70))[1]
((6, 3), (0, 32, 64, 70))
>>> rows.scale_slice(np.s_[-2:, 32:], (6, 70)), rows.data_slice(np.s_[..., 1:], (6, 70))
((slice(4, 6, 1), slice(1, 3, 1)), (slice(0, 6, 1), slice(32, 70, 1)))
>>> rows.scale_slice(np.s_[:, 40:], (6, 70), "w")
Traceback (most recent call last):
shardmath.FormatError: tensor 'w': slice 40:70 of dimension 1 (70 positions) cuts a block of 32; \
the nearest cuts to 40 are 32 and 64
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
"""Positions of a block in the last dimensions, None for the whole of one."""
_Item: TypeAlias = SupportsIndex | slice | EllipsisType | None
Index: TypeAlias = _Item | tuple[_Item, ...]
"""What numpy takes in brackets, without arrays."""
Sliced: TypeAlias = tuple[int | slice | None, ...]
"""An index with an item for each dimension, and None for each new one."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many positions a block has in each of the last dimensions, and in all `others` before them.

    Raises FormatError for less than 1.
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
        """The sizes of so many dimensions. Raises FormatError where the block has more."""
        if len(self.sizes) > ndim:
            what = f"{label(name)}blocks of {self} have {plural(self.sizes, 'dimension')}"
            raise FormatError(f"{what}, the tensor {ndim}; give it {len(self.sizes)} or more")
        return (self.others,) * (ndim - len(self.sizes)) + self.sizes

    def positions(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Positions of a whole block in each dimension of a tensor of that shape."""
        sizes = self.per_dimension(len(shape))
        measured = map(_measure, sizes, shape)
        return tuple(measured)

    def count(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Blocks in each dimension, which is the shape of the scales."""
        sizes = self.per_dimension(len(shape))
        counts = []
        for size, n in zip(sizes, shape, strict=True):
            counts.append(1 if size is None else -(-n // size))
        return tuple(counts)

    def cuts(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Where each dimension may be cut so that no block is, both ends included."""
        blocks = self.positions(shape)
        both = zip(blocks, shape, strict=True)
        cuts = [(*range(0, n, block), n) for block, n in both]
        return tuple(cuts)

    def scale_slice(self, data_slice: Index, shape: tuple[int, ...], name: str = "") -> Sliced:
        """The index that takes of the scales what belongs to an index of the tensor.

        Raises FormatError, with the tensor's `name`, where a block is cut, and for what is no index.
        """
        sizes = self.per_dimension(len(shape), name)
        out: list[int | slice | None] = []
        for d, item in _list_items(data_slice, shape, name):
            if d is None:
                out.append(None)
            elif isinstance(item, slice):
                out.append(_count_slice(item, shape, sizes[d], d, name))
            else:
                out.append(_count_position(item, shape, sizes[d], d, name))
        return tuple(out)

    def data_slice(self, scale_slice: Index, shape: tuple[int, ...], name: str = "") -> Sliced:
        """The index that takes of the tensor what belongs to an index of the scales; `shape` is the tensor's.

        One scale, by its number, stands for the slice of its block. Raises FormatError as `scale_slice` does.
        """
        sizes = self.per_dimension(len(shape), name)
        out: list[int | slice | None] = []
        for d, item in _list_items(scale_slice, self.count(shape), name):
            if d is None:
                out.append(None)
            elif sizes[d] == 1:
                out.append(item)
            else:
                out.append(_spread(item, shape[d], sizes[d], d, name))
        return tuple(out)


def _read_size(size: object) -> int | None:
    """The size as Python's integer. Raises FormatError for one below 1."""
    if size is None:
        return None
    number = as_integer(size, "a size of a block", FormatError)
    if number < 1:
        raise FormatError(f"a size of a block is {number}; a block has 1 position at least")
    return number


def _measure(size: int | None, n: int) -> int:
    """Positions of a block of a dimension of n."""
    return max(n, 1) if size is None else size


def label(name: str) -> str:
    """How messages about a tensor begin."""
    return f"tensor {name!r}: " if name else ""


def read_shape(shape: object) -> tuple[int, ...]:
    """The sizes as Python's integers. Raises FormatError for what are none."""
    given = listed(shape, "sizes", FormatError)
    sizes = tuple(as_integer(n, f"a size of shape {given}", FormatError) for n in given)
    if min(sizes, default=0) < 0:
        raise FormatError(f"shape {sizes} has {min(sizes)}; sizes are >= 0")
    return sizes


def find_cuts(position: int, block: int, n: int) -> tuple[int, int]:
    """The nearest cuts before and after a position inside a block."""
    below = position - position % block
    return below, min(below + block, n)


# Indices


def _list_items(
    index: Index, shape: tuple[int, ...], name: str
) -> Iterator[tuple[int | None, int | slice]]:
    """Each dimension and what is taken of it, an integer or a normal slice; (None, 0) for each new dimension."""
    items = list(index) if isinstance(index, tuple) else [index]
    # By identity: an array, which is refused below, compares element by element.
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    named = sum(item is not None for item in items) - len(dots)
    if len(dots) > 1 or named > len(shape):
        what = f"{label(name)}index {shown(index)} of {plural(shape, 'dimension')}"
        raise FormatError(f"{what} has too many items; write one for each, and ... once")
    # A short index goes on as if it ended with an Ellipsis.
    at = dots[0] if dots else len(items)
    items[at : at + 1] = [slice(None)] * (len(shape) - named)
    d = 0
    for item in items:
        if item is None:
            yield None, 0
            continue
        yield d, _read_item(item, shape[d], d, name)
        d += 1


def _read_item(item: _Item, n: int, d: int, name: str) -> int | slice:
    """The item of a dimension of n positions, none of its numbers negative or left out."""
    where = f"{label(name)}dimension {d}"
    if not isinstance(item, slice):
        number = as_integer(item, f"{where}: an index", FormatError)
        if not -n <= number < n:
            raise FormatError(f"{where} has {n} positions, and none at {number}; stay inside")
        return number % n
    try:
        start, stop, step = item.indices(n)
    except (TypeError, ValueError):
        fix = "give integers, and a step other than 0"
        raise FormatError(f"{where}: {shown(item)} is no slice; {fix}") from None
    taken = range(start, stop, step)
    if not taken:
        return slice(start, start, 1)
    # A single position has no step.
    if len(taken) == 1:
        return slice(start, start + 1, 1)
    return slice(start, None if stop < 0 else stop, step)


def _count_slice(item: slice, shape: tuple[int, ...], size: int | None, d: int, name: str) -> slice:
    """The scales of a slice of a dimension."""
    if size == 1:
        return item
    if size is None:
        return slice(0, 1, 1)
    n = shape[d]
    if item.start == item.stop:
        first = item.start // size
        return slice(first, first, 1)
    what = f"{label(name)}slice {_write(item)} of dimension {d} ({n} positions)"
    if item.step != 1:
        fix = "take consecutive positions"
        raise FormatError(f"{what} has a step inside blocks of {size}; {fix}")
    for end in (item.start, item.stop):
        if end % size and end != n:
            below, above = find_cuts(end, size, n)
            cuts = f"the nearest cuts to {end} are {below} and {above}"
            raise FormatError(f"{what} cuts a block of {size}; {cuts}")
    return slice(item.start // size, -(-item.stop // size), 1)


def _write(item: slice) -> str:
    """The slice as people write it."""
    stop = "" if item.stop is None else item.stop
    step = "" if item.step == 1 else f":{item.step}"
    return f"{item.start}:{stop}{step}"


def _count_position(at: int, shape: tuple[int, ...], size: int | None, d: int, name: str) -> int:
    """The number of the scale of one position, which has to be a block of its own."""
    if size is None:
        return 0
    if size == 1:
        return at
    one = slice(at, at + 1, 1)
    found = _count_slice(one, shape, size, d, name)
    return cast(int, found.start)


def _spread(item: int | slice, n: int, size: int | None, d: int, name: str) -> slice:
    """The positions of the scales that are taken of a dimension of n positions."""
    block = _measure(size, n)
    if not isinstance(item, slice):
        item = slice(item, item + 1, 1)
    if item.step != 1:
        what = f"{label(name)}slice {_write(item)} of the scales of dimension {d}"
        raise FormatError(f"{what} has a step over blocks of {block}; take consecutive scales")
    start = min(n, item.start * block)
    stop = min(n, item.stop * block)
    return slice(start, stop, 1)
