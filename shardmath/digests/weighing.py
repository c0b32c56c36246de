"""The weighted sum of what is in an array, in one pass, exact.

The sum over all elements of the product of their positions' weights (`field`) times their bits, modulo
PRIME.

1. An element is its **words**: 16 bits each, read as signed integers; 8 bits where it has no more. So
   bits are what counts: -0.0 is not 0.0, and NaNs differ by their payloads.
2. ROW words at a time are multiplied by weights and added up in float64, which is what matrix products
   are fast in. A weight is cut in two, of 30 and 31 bits with their signs. Then no sum of 2^8 products
   of 15 and 30 bits is beyond 2^53, up to which float64 is exact, in whichever order it is added.
3. Sums of rows are few, and go on in integers.
4. Blocks of the array are worked on that fit a core's caches, so that no memory of the array's size is
   needed.

>>> from shardmath.algebra.runs import identity
>>> ones = np.ones(3, np.int8)
>>> weigh(ones, (identity(3),)) == sum(weigh(ones[:1], (Runs(((0, i, 1),)),)) for i in range(3)) % PRIME
True
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.algebra.runs import Runs
from shardmath.base.arrays import Ints
from shardmath.base.memo import memo
from shardmath.digests.field import HALF, PRIME, Numbers, add_up, double, multiply, table
from shardmath.digests.pieces import ROW, Part, Piece, list_pieces, weigh_part

__all__ = ["NUMPY", "Array", "Library", "weigh"]

WORDS = -1
"""The number of the dimension whose positions are the words of an element."""

BLOCK = 1 << 18
"""Words that are float64 at a time: 2 MB."""

ROWS = 1 << 22
"""Words whose rows' sums are kept before they are weighed: so many that a call of numpy is nothing."""

TOGETHER = 32
"""Rows that numpy multiplies at a time: OpenBLAS starts its threads for more than 9,216 numbers, and on a
machine that has other work they wait for each other longer than they work."""

Array: TypeAlias = Any
"""An array of numpy, or of a library that has its operators."""


class Library(Protocol):
    """What this needs of a library beyond operators, `shape`, `reshape`, `sum` and slices."""

    def strides(self, array: Array) -> tuple[int, ...]:
        """How far apart elements lie along each axis, in any unit."""

    def transpose(self, array: Array, order: Sequence[int]) -> Array:
        """The axes in another order, without a copy."""

    def words(self, array: Array) -> Array:
        """The words of all elements in row-major order, in float64."""

    def products(self, rows: Array, weights: Array) -> Array:
        """The products of rows and weights, which float64 is exact for, in int64."""

    def join(self, arrays: Sequence[Array]) -> Array:
        """Arrays of one axis end to end."""

    def constant(self, array: NDArray[Any], like: Array) -> Array:
        """An array of numpy as one of the library's, where `like` is."""


class _Numpy:
    """numpy itself."""

    def strides(self, array: Array) -> tuple[int, ...]:
        strides: tuple[int, ...] = array.strides
        return strides

    def transpose(self, array: Array, order: Sequence[int]) -> Array:
        return array.transpose(order)

    def words(self, array: Array) -> Array:
        word = np.int8 if array.itemsize == 1 else np.int16
        # A view as words needs elements that lie end to end.
        whole = np.ascontiguousarray(array).reshape(-1)
        return whole.view(word).astype(np.float64)

    def products(self, rows: Array, weights: Array) -> Array:
        even = len(rows) // TOGETHER * TOGETHER
        groups = rows[:even].reshape(-1, TOGETHER, *rows.shape[1:])
        sums = [(groups @ weights).reshape(-1), rows[even:] @ weights]
        return np.concatenate(sums).astype(np.int64)

    def join(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate(arrays)

    def constant(self, array: NDArray[Any], like: Array) -> Array:
        return array


NUMPY: Library = _Numpy()


def weigh(array: Array, runs: Sequence[Runs], seed: int = 0, library: Library = NUMPY) -> int:
    """The weighted sum of the elements that `runs` places, one Runs for each dimension of the array."""
    if 0 in array.shape:
        return 0
    strides = library.strides(array)
    sizes = array.shape
    # A dimension of one element lies nowhere: it is taken last.
    order = sorted(range(len(runs)), key=lambda d: (sizes[d] == 1, abs(strides[d]), -d))
    count = max(1, array.itemsize // 2)
    total = 0
    for piece in list_pieces(runs, order, count):
        total += _weigh_piece(array, piece, tuple(order), count, seed, library)
    return total % PRIME


def _weigh_piece(
    array: Array,
    piece: Piece,
    order: tuple[int, ...],
    words: int,
    seed: int,
    library: Library,
) -> int:
    """The weighted sum of one piece of the array."""
    index = tuple(slice(part.start, part.stop) for part in piece)
    axes = _list_axes(piece, order)
    lengths = [length for _, _, length in axes]
    # The farthest apart first, so that rows are at the end.
    outward = list(reversed(order))
    held = library.transpose(array[index], outward).reshape(lengths)
    rows = _count_outer(lengths, words)
    factors = [_weigh_axis(seed, d, piece[d], at) for d, at, _ in axes[:rows]]
    inner = tuple((d, piece[d], at) for d, at, _ in axes[rows:])
    row = _weigh_row(seed, inner, words)
    halves = [library.constant(half, held) for half in row]
    outer = [library.constant(factor, held) for factor in factors]
    return int(_sum_rows(held, outer, halves, library))


_Axis: TypeAlias = tuple[int, int, int]
"""(dimension, which of its part's axes, length)."""


def _list_axes(piece: Piece, order: Sequence[int]) -> list[_Axis]:
    """The axes of the piece, the farthest apart first."""
    axes = []
    for d in reversed(order):
        part = piece[d]
        if part.inner:
            block = 1 << part.inner
            axes.append((d, 0, part.size // block))
            axes.append((d, 1, block))
        else:
            axes.append((d, 0, part.size))
    return axes


def _count_outer(lengths: Sequence[int], words: int) -> int:
    """How many axes are outside of rows: rows have ROW words or more, where there are as many."""
    row = words
    for outer in range(len(lengths), 0, -1):
        if row >= ROW:
            return outer
        row *= lengths[outer - 1]
    return 0


def _weigh_axis(seed: int, dimension: int, part: Part, axis: int) -> Ints:
    return weigh_part(seed, dimension, part)[axis]


@memo(256)
def _weigh_row(
    seed: int, inner: tuple[tuple[int, Part, int], ...], words: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The weights of a row's words, cut in two: 2^31 times the second, and the first."""
    row = np.ones(1, np.int64)
    for dimension, part, axis in inner:
        factor = _weigh_axis(seed, dimension, part, axis)
        row = multiply(row[:, None], factor).ravel()
    own = table(seed, WORDS, 0, (words - 1).bit_length())
    row = multiply(row[:, None], own).ravel()
    # Near 0 on both sides, which saves a bit of each part.
    centered = row - PRIME * (row > PRIME // 2)
    high = (centered + (1 << (HALF - 1))) >> HALF
    low = centered - (high << HALF)
    return low.astype(np.float64), high.astype(np.float64)


def _sum_rows(
    held: Array, outer: Sequence[Array], halves: Sequence[Array], library: Library
) -> Any:
    """The sum over the outer axes of their weights times the sums of rows."""
    size = math.prod(held.shape[: len(outer)]) * len(halves[0])
    if not outer or size <= ROWS:
        low, high = _sum_words(held, len(outer), halves, library)
        sums = (double(high % PRIME, HALF) + low % PRIME) % PRIME
        for factor in reversed(outer):
            sums = add_up(multiply(sums, factor))
        return sums
    total = 0
    first, *rest = outer
    length = held.shape[0]
    step = max(1, ROWS * length // size)
    for start in range(0, length, step):
        some = held[start : start + step]
        if step > 1:
            total += int(_sum_rows(some, [first[start : start + step], *rest], halves, library))
        else:
            inside = int(_sum_rows(some[0], rest, halves, library))
            total += inside * int(first[start])
    return total % PRIME


def _sum_words(
    held: Array, outer: int, halves: Sequence[Array], library: Library
) -> tuple[Numbers, Numbers]:
    """The sums of all rows, by the lower and the higher part of the weights."""
    lows = []
    highs = []
    row = len(halves[0])
    for block in _list_blocks(held, outer, row):
        floats = library.words(block).reshape(-1, row)
        low, high = (_multiply_rows(floats, half, library) for half in halves)
        lows.append(low)
        highs.append(high)
    shape = held.shape[:outer]
    return library.join(lows).reshape(shape), library.join(highs).reshape(shape)


def _list_blocks(held: Array, outer: int, row: int) -> Iterator[Array]:
    """The array in blocks of BLOCK words or less, or of a row, along its outer axes."""
    size = math.prod(held.shape[:outer]) * row
    if not outer or size <= BLOCK:
        yield held
        return
    length = held.shape[0]
    step = BLOCK * length // size
    for start in range(0, length, max(1, step)):
        if step > 1:
            yield held[start : start + step]
        else:
            yield from _list_blocks(held[start], outer - 1, row)


def _multiply_rows(floats: Array, weights: Array, library: Library) -> Numbers:
    """The sums of rows of words times weights, in int64: at most 2^53 for each ROW words."""
    total: Numbers = 0
    for start in range(0, len(weights), ROW):
        stop = start + ROW
        total = total + library.products(floats[:, start:stop], weights[start:stop])
    return total
