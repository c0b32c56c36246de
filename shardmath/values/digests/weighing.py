"""The weighted sum of an array's elements, in one pass, exact.

The sum over all elements of their bits times the product of their positions' weights (`field`), modulo PRIME.

1. An element consists of **words** of 16 bits, read as signed integers; of one of 8 bits if it has no more. So only
   bits count: -0.0 is not 0.0, and NaNs differ by their payloads.
2. ROW words at a time are multiplied by weights and added up in float64, the type in which matrix products are fast. A
   weight is split into two parts, of 30 and 31 bits with their signs. Then no sum of 2^8 products of 15 and 30 bits
   exceeds 2^53, up to which float64 is exact, in any order of addition.
3. Sums of rows are few, and are added up in integers.
4. The array is processed in blocks that fit a core's caches, so that no memory of the array's size is needed.

>>> from shardmath.layouts.algebra.runs import identity
>>> ones = np.ones(3, np.int8)
>>> weigh(ones, (identity(3),)) == sum(weigh(ones[:1], (Runs(((0, i, 1),)),)) for i in range(3)) % PRIME
True
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Ints
from shardmath.base.memo import memo
from shardmath.layouts.algebra.runs import Runs
from shardmath.values.digests.field import HALF, PRIME, Numbers, add_up, double, multiply, table
from shardmath.values.digests.pieces import ROW, DimensionPart, Piece, list_pieces, weigh_part

__all__ = ["NUMPY", "Array", "Library", "weigh"]

WORDS = -1
"""The number of the dimension whose positions are the words of an element."""

WORD_BYTES = 2

BLOCK = 1 << 18
"""Words that are float64 at a time: 2 MB."""

ROWS = 1 << 22
"""Words whose row sums are kept before they are weighed: so many that the overhead of numpy calls is negligible."""

FEW = 8
"""Fewer rows than this are multiplied element by element."""

TOGETHER = 32
"""Rows that numpy multiplies at a time: OpenBLAS starts threads for more than 9,216 numbers, and on a busy machine
threads wait for each other longer than they work."""

Array: TypeAlias = Any
"""An array of numpy, or of a library with the same operators."""


class Library(Protocol):
    """The functions of an array library, such as numpy, with which `weigh` computes a weighted sum of an array's
    elements."""

    def strides(self, array: Array) -> tuple[int, ...]:
        """Return the distance in memory between neighbors along each axis of `array`, in a unit that is the same for
        all axes."""

    def transpose(self, array: Array, order: Sequence[int]) -> Array:
        """Return a view of `array` with its axes in the given `order`."""

    def words(self, array: Array) -> Array:
        """Return the bits of all elements of `array`, in row-major order, as integers in a one-dimensional float64
        array. An element of one byte gives one signed 8-bit integer; a longer element gives one or more consecutive
        signed 16-bit integers."""

    def products(self, rows: Array, weights: Array) -> Array:
        """Return the matrix product of `rows` and `weights`, computed exactly in float64 and returned as int64."""

    def integers(self, array: Array) -> Array:
        """Return the numbers in `array` as int64."""

    def join(self, arrays: Sequence[Array]) -> Array:
        """Return the one-dimensional `arrays` joined end to end."""

    def constant(self, array: NDArray[Any], like: Array) -> Array:
        """Return the numpy `array` as an array of the library, on the device of `like`."""


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
        # numpy multiplies one group of TOGETHER rows after another; the rows beyond full groups are the last call.
        even = len(rows) // TOGETHER * TOGETHER
        groups = rows[:even].reshape(-1, TOGETHER, *rows.shape[1:])
        row_sums = [(groups @ weights).reshape(-1), rows[even:] @ weights]
        return self.integers(np.concatenate(row_sums))

    def integers(self, array: Array) -> Array:
        return array.astype(np.int64)

    def join(self, arrays: Sequence[Array]) -> Array:
        return np.concatenate(arrays)

    def constant(self, array: NDArray[Any], like: Array) -> Array:
        return array


NUMPY: Library = _Numpy()


def weigh(array: Array, runs: Sequence[Runs], seed: int = 0, library: Library = NUMPY) -> int:
    """Return the sum, modulo 2^61 - 1, of the elements of a local `array` (their bits, as integers), each multiplied by
    a random weight that `seed` draws for its global position. `runs` maps each dimension's local positions to global
    ones."""
    if 0 in array.shape:
        return 0
    words = max(1, array.itemsize // WORD_BYTES)
    order = _order_by_distance(array, library)
    total = 0
    for piece in list_pieces(runs, order, words):
        total += _weigh_piece(array, piece, order, words, seed, library)
    return total % PRIME


def _order_by_distance(array: Array, library: Library) -> list[int]:
    """The dimensions, sorted by the distance between their elements in memory."""
    strides = library.strides(array)
    # The stride of a dimension of one element means nothing: it comes last.
    keys = [(array.shape[d] == 1, abs(stride), -d) for d, stride in enumerate(strides)]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _weigh_piece(
    array: Array, piece: Piece, order: list[int], words: int, seed: int, library: Library
) -> int:
    """The weighted sum of one piece of the array."""
    outward = order[::-1]
    axes = _list_axes(piece, outward)
    lengths = [axis.length for axis in axes]
    index = tuple(slice(part.start, part.stop) for part in piece)
    # This reshape only splits axes in two, which needs no copy in any library.
    values = library.transpose(array[index], outward).reshape(lengths)
    outer = _count_outer(lengths, words)  # the axes after these are a row
    weights = [library.constant(_weigh_axis(seed, axis), values) for axis in axes[:outer]]
    # The lower and the higher parts of the weights of a row.
    halves = [library.constant(half, values) for half in _weigh_row(seed, axes[outer:], words)]
    return int(_sum_rows(values, weights, halves, library))


class _PieceAxis(NamedTuple):
    """An axis of a piece: a dimension's part, or the outer (0) or inner (1) axis of a part that is split in two."""

    dimension: int
    part: DimensionPart
    number: int
    length: int


def _list_axes(piece: Piece, outward: Sequence[int]) -> tuple[_PieceAxis, ...]:
    """The axes of the piece, with its dimensions in this order: one or two axes for each."""
    axes = []
    for d in outward:
        part = piece[d]
        block = 1 << part.inner  # the length of the inner axis
        axes.append(_PieceAxis(d, part, number=0, length=part.size // block))
        if part.inner:
            axes.append(_PieceAxis(d, part, number=1, length=block))
    return tuple(axes)


def _count_outer(lengths: Sequence[int], words: int) -> int:
    """The number of axes outside of rows: rows get the fewest axes with ROW words or more, or all axes."""
    row = words
    outer = len(lengths)
    while outer and row < ROW:
        outer -= 1
        row *= lengths[outer]
    return outer


def _weigh_axis(seed: int, axis: _PieceAxis) -> Ints:
    return weigh_part(seed, axis.dimension, axis.part)[axis.number]


@memo(256)
def _weigh_row(
    seed: int, axes: tuple[_PieceAxis, ...], words: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The weights of a row's words, split in two: the lower part, and the higher part, in units of 2^31."""
    row = np.ones(1, np.int64)
    factors = [_weigh_axis(seed, axis) for axis in axes]
    # The weights of all words of an element, and up to the next power of two: numbers of as many bits, from bit 0.
    factors.append(table(seed, WORDS, 0, (words - 1).bit_length()))
    for factor in factors:
        row = multiply(row[:, None], factor).ravel()
    # Representatives of both signs around 0 save a bit of each part.
    centered = row - PRIME * (row > PRIME // 2)
    high = (centered + (1 << (HALF - 1))) >> HALF
    low = centered - (high << HALF)
    return low.astype(np.float64), high.astype(np.float64)


def _sum_rows(
    values: Array, weights: Sequence[Array], halves: Sequence[Array], library: Library
) -> Numbers:
    """The sum over the outer axes of their weights times the sums of rows."""
    words = math.prod(values.shape[: len(weights)]) * len(halves[0])
    if not weights or words <= ROWS:
        sums = _sum_words(values, len(weights), halves, library)
        for factor in reversed(weights):
            sums = add_up(multiply(sums, factor))
        return sums
    # Too many row sums to keep: go through the first outer axis in parts; if it has one position, through the next.
    first, *rest = weights
    if len(first) == 1:
        inside = _sum_rows(values[0], rest, halves, library)
        return int(first[0]) * int(inside) % PRIME
    step = max(1, ROWS * len(first) // words)
    total: Numbers = 0
    for start in range(0, len(first), step):
        part = slice(start, start + step)
        total += int(_sum_rows(values[part], [first[part], *rest], halves, library))
    return total % PRIME


def _sum_words(values: Array, outer: int, halves: Sequence[Array], library: Library) -> Numbers:
    """The sums of weighted words of all rows, in the shape of the outer axes; `halves` are low and high parts of
    weights."""
    length = len(halves[0])
    lows = []
    highs = []
    for block in _list_blocks(values, outer, length):
        rows = library.words(block).reshape(-1, length)
        lows.append(_multiply_rows(rows, halves[0], library))
        highs.append(_multiply_rows(rows, halves[1], library))
    low = library.join(lows) % PRIME
    high = library.join(highs) % PRIME
    sums = (double(high, HALF) + low) % PRIME
    return sums.reshape(values.shape[:outer])


def _list_blocks(values: Array, outer: int, row: int) -> Iterator[Array]:
    """The array in blocks of at most BLOCK words, or of one row, along its outer axes."""
    size = math.prod(values.shape[:outer]) * row
    if not outer or size <= BLOCK:
        yield values
        return
    length = values.shape[0]
    step = BLOCK * length // size
    for start in range(0, length, max(1, step)):
        if step > 1:
            yield values[start : start + step]
        else:
            yield from _list_blocks(values[start], outer - 1, row)


def _multiply_rows(rows: Array, weights: Array, library: Library) -> Numbers:
    """The sums of rows of words times weights, in int64: at most 2^53 for each ROW words."""
    total: Numbers = 0
    begin = 0
    if len(rows) < FEW:
        # For so few rows, calling a matrix product would take longer than computing it.
        begin = len(weights) // ROW * ROW
        products = rows[:, :begin] * weights[:begin]
        sums = products.reshape(len(rows), -1, ROW).sum(-1)
        total = library.integers(sums).sum(-1)
    for start in range(begin, len(weights), ROW):
        columns = slice(start, start + ROW)
        total = total + library.products(rows[:, columns], weights[columns])
    return total
