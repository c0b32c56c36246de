"""Drawing: the values of a type's elements in each run of a loader.

1. In the first runs an element's value is a digit of its number: one of the type's values, in an order that differs by
   run. Digits remain distinct in the types of targets that can hold them.
2. In further runs values are drawn, by the element's number, from all finite values of the type; then mirrored; large
   instead of small; from four values with zeros; from values that fit targets; and at last NaN, and infinite.
3. Types with few values have more runs.
4. A loader must not go by what it finds in its targets, so that varies, too: mostly a byte, in some runs 0, 1, -1 and
   NaN, and in others what targets had before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardmath.base.memo import memo
from shardmath_torch.tensors.probes.patterns import (
    Words,
    as_tensor,
    cast,
    is_finite,
    list_finite,
    list_infinite,
    list_nan,
    order,
    real,
    repeat,
    word_of,
)

__all__ = ["TypedElements", "SPECIAL", "Run", "list_runs"]

_Flat: TypeAlias = NDArray[np.int64]
_Truths: TypeAlias = NDArray[np.bool_]

TABLE = 1 << 16
"""The number of drawn values in a run, of which each element has one."""
BITS = 24
"""The least information about each element in further runs, in bits."""
FURTHER = 4, 8
"""The least number of further runs for many elements, and for few, where chance hides more functions."""
FEW = 1 << 20
"""The most elements that are few."""
SPECIAL = {"nan": list_nan, "infinite": list_infinite}
"""The runs in which no element is finite, if its type has such values."""
FOUND = 0.0, 1.0, -1.0, math.nan
"""The values that fill targets before further runs, one each."""
IMAGINARY = 1 << 20
"""Added to the seed of a run, for the second part of complex numbers."""


class Run(NamedTuple):
    """One trial run of a weight loader, to find out which elements it writes where. `way` and `seed` choose the values
    to load; the other fields choose the values in the destination tensors before the run.

    That is a `byte`, or a `value` instead; or, if the run `keeps` it, what these tensors had before recording.
    """

    way: str
    seed: int
    byte: int
    value: float | None = None
    keeps: bool = False

    def found(self, dtype: torch.dtype) -> int:
        """Return the bits, as an integer, that each element of a target (tensor to load into, of `dtype`) is filled
        with before the weight loader runs. Runs that keep a target's earlier values do not use this.
        """
        word = None if self.value is None else word_of(self.value, dtype)
        return repeat(self.byte, dtype) if word is None else word


class TypedElements:
    """A numbering of all elements of the checkpoint tensors of one dtype, with test values for trial runs of a weight
    loader. From the test values in a loaded tensor, the caller finds which element is at which position.

    `place` numbers the dtypes, and makes their random orders differ. `wanted` has the dtypes of targets.
    """

    def __init__(
        self,
        place: int,
        dtype: torch.dtype,
        shapes: Mapping[str, tuple[int, ...]],
        wanted: tuple[torch.dtype, ...],
    ) -> None:
        self.place = place
        self.dtype = dtype
        self.shapes = shapes
        self.names = list(shapes)
        sizes = [math.prod(shape) for shape in shapes.values()]
        self.starts: _Flat = np.cumsum([0, *sizes])
        self.size = int(self.starts[-1])
        # The first arguments of the cached functions below.
        self._digits = real(dtype), wanted
        # An element's number has `digits` digits to this base, each shown by one value of the type.
        self.base = len(_list_digits(*self._digits))
        self.digits = 1
        while self.base**self.digits < self.size:
            self.digits += 1

    def name(self, number: int) -> str:
        """Return a text for messages that names the element with this number: its index and its tensor."""
        tensor = int(np.searchsorted(self.starts, number, side="right")) - 1
        return f"element {number - self.starts[tensor]} of {self.names[tensor]!r}"

    def make(self, name: str, run: Run) -> Tensor:
        """Return the full checkpoint tensor `name`, filled with the values that the weight loader gets in the trial run
        `run`.
        """
        index = self.names.index(name)
        numbers = np.arange(self.starts[index], self.starts[index + 1])
        return as_tensor(self.draw(numbers, run), self.dtype).reshape(self.shapes[name])

    def draw(self, numbers: _Flat, run: Run) -> Words:
        """Return the values that the weight loader gets in the trial run `run` for the elements with these `numbers`,
        as words (bits as integers)."""
        real_part = self._draw_part(numbers, run)
        if not self.dtype.is_complex:
            return real_part
        # The real part's digits identify the element already.
        way = "drawn" if run.way == "digit" else run.way
        imaginary_part = self._draw_part(numbers, Run(way, run.seed + IMAGINARY, run.byte))
        return np.stack([real_part, imaginary_part], axis=1).reshape(-1)

    def _draw_part(self, numbers: _Flat, run: Run) -> Words:
        """The values of these elements, of real numbers or of one part of complex ones."""
        if run.way == "digit" and run.seed < self.digits:
            table = _permute(*self._digits, (run.seed, self.place))
            values: Words = table[numbers // self.base**run.seed % self.base]
            return values
        # A hash: the upper bits of a product with an odd number, in which neighbors are far apart. Numbers begin
        # with 1, as 0 would have the same hash in every run. 16 bits remain: a position in a table of TABLE values.
        factors = numbers.astype(np.uint64) + np.uint64(1)
        hashes = (factors * _draw_odd(run.seed, self.place)) >> np.uint64(48)
        table = _tabulate(*self._digits, run.way, (run.seed, self.place))
        drawn: Words = table[hashes]
        return drawn

    def goes_to(self, dtype: torch.dtype) -> bool:
        """Whether the values that tell the elements apart stay distinct when cast to the `dtype` of a target."""
        if self.dtype.is_complex and not dtype.is_complex:
            return False
        try:
            # Runs permute the same values, so the first run tells for all. Images ascend: equal ones are adjacent.
            images, _ = _order_images(*self._digits, (0, self.place), real(dtype))
        except (RuntimeError, TypeError):
            # torch has no such cast.
            return False
        return bool((images[1:] != images[:-1]).all())

    def find(self, words: Sequence[Words], dtype: torch.dtype) -> tuple[_Flat, _Truths]:
        """Return two arrays by position in a loaded tensor of `dtype`: the number of the checkpoint element found
        there, and whether one was found. In trial run r, each checkpoint element had a value that encodes digit r of
        its number; `words[r]` has the bits that the loader left in the tensor.
        """
        numbers = np.zeros(len(words[0]), np.int64)
        exists = np.ones(len(words[0]), np.bool_)
        for run in range(self.digits):
            images, digits = _order_images(*self._digits, (run, self.place), real(dtype))
            positions = np.searchsorted(images, words[run])
            # Words above all images are compared with the last image.
            positions = np.minimum(positions, self.base - 1)
            exists &= images[positions] == words[run]
            numbers += digits[positions] * self.base**run
        exists &= numbers < self.size
        return numbers, exists


def list_runs(kinds: Sequence[TypedElements]) -> list[Run]:
    """Return trial runs of a weight loader that identify each element by its values, and show whether the loader alters
    values on the way. `kinds` has the elements of all checkpoint tensors, one item per dtype.
    """
    digits = max((kind.digits for kind in kinds), default=1)
    is_wide = any(kind.base < len(list_finite(real(kind.dtype))) for kind in kinds)
    n_further = _count_further(kinds)
    # All seeds differ, except that one run is repeated in three ways.
    ways = [("digit", digit) for digit in range(digits)]
    ways.append(("few", digits))
    ways += [(way, digits + 1) for way in ("drawn", "mirrored", "inverse")]
    ways += [("drawn", digits + 2 + i) for i in range(n_further)]
    # Most numbers of a wide type are too large or too small for a target of few bits.
    ways += [("held", digits + 2 + n_further + i) for i in range(n_further * is_wide)]
    ways += [(way, 0) for way in _list_special(kinds)]
    # Bytes that, repeated, are ordinary positive numbers of most types.
    fill_bytes = np.random.default_rng(0).integers(0x21, 0x60, len(ways)).tolist()
    # The same byte before a run and its mirror image, so that no element has this value in both.
    fill_bytes[digits + 2] = fill_bytes[digits + 1]
    runs = [Run(*way, byte) for way, byte in zip(ways, fill_bytes, strict=True)]
    return _vary_found(runs, digits)


def _vary_found(runs: list[Run], digits: int) -> list[Run]:
    """The runs, of which some keep what targets had, or fill targets with a value. The first `digits` runs, of digits,
    stay as they are; the indices are those of `list_runs`."""
    runs = list(runs)
    # "drawn" and its mirror image, of which one at least changes what a target had.
    for i in (digits + 1, digits + 2):
        runs[i] = runs[i]._replace(keeps=True)
    # The first of the further runs, which are more than FOUND.
    for i, value in enumerate(FOUND, digits + 4):
        runs[i] = runs[i]._replace(value=value)
    return runs


def _count_further(kinds: Sequence[TypedElements]) -> int:
    """The number of further runs, enough that no position in a target has an element's values by chance."""
    least_base = min((kind.base for kind in kinds), default=TABLE)
    is_few = sum(kind.size for kind in kinds) <= FEW
    for_many, for_few = FURTHER
    bits_per_run = math.log2(least_base)
    return max(for_few if is_few else for_many, math.ceil(BITS / bits_per_run))


def _list_special(kinds: Sequence[TypedElements]) -> list[str]:
    """The special runs for which at least one of these types has values."""
    types = {real(kind.dtype) for kind in kinds}
    return [
        way for way, list_all in SPECIAL.items() if any(len(list_all(dtype)) for dtype in types)
    ]


@memo()
def _list_digits(dtype: torch.dtype, wanted: tuple[torch.dtype, ...]) -> Words:
    """The finite values of a type that remain distinct in each wanted type that can hold several of them."""
    words = list_finite(dtype)
    for target_dtype in wanted:
        try:
            images = cast(words, dtype, target_dtype)
        except (RuntimeError, TypeError):
            continue
        finite = is_finite(images, target_dtype)
        _, first_of_each = np.unique(images[finite], return_index=True)
        distinct = words[finite][first_of_each]
        # With one value left there are no digits, and no element can be in a target of that type.
        if len(distinct) > 1:
            words = distinct
    return words


@memo()
def _permute(dtype: torch.dtype, wanted: tuple[torch.dtype, ...], seed: tuple[int, int]) -> Words:
    """The values of each digit in a run, in an order that the seed of run and type decides."""
    return np.random.default_rng(seed).permutation(_list_digits(dtype, wanted))


@memo()
def _order_images(
    dtype: torch.dtype, wanted: tuple[torch.dtype, ...], seed: tuple[int, int], to: torch.dtype
) -> tuple[Words, _Flat]:
    """The values that stand for digits, in a run, after a cast to the dtype `to`: ascending, and the digit of each."""
    value_of_digit = _permute(dtype, wanted, seed)
    images = cast(value_of_digit, dtype, to)
    digits = np.argsort(images, kind="stable")
    return images[digits], digits


@memo()
def _draw_odd(seed: int, place: int) -> np.uint64:
    """The odd factor of the hash in a run, for the type at this place."""
    number = np.random.default_rng((seed, place)).integers(1 << 63, dtype=np.uint64)
    return np.uint64(number * 2 + 1)


@memo()
def _tabulate(
    dtype: torch.dtype, wanted: tuple[torch.dtype, ...], way: str, seed: tuple[int, int]
) -> Words:
    """The value of each hash in a run, in an order that the seed of run and type decides."""
    # Digits remain distinct in targets, which therefore hold them.
    pool = _list_digits(dtype, wanted) if way == "held" else list_finite(dtype)
    if way in SPECIAL:
        special = SPECIAL[way](dtype)
        pool = special if len(special) else pool
    elif way == "few":
        # The two zeros, which have the least magnitudes, and any two other values.
        zeros = order(pool, dtype)[:2]
        pool = pool[[*zeros, len(pool) // 3, len(pool) // 2 + len(pool) // 7]]
    indices = np.random.default_rng(seed).integers(0, len(pool), TABLE)
    if way == "mirrored":
        indices = len(pool) - 1 - indices
    elif way == "inverse":
        # The value whose rank by magnitude is as far from the end as the drawn value's is from the start.
        by_size = order(pool, dtype)
        size_rank = np.argsort(by_size)
        indices = by_size[len(pool) - 1 - size_rank[indices]]
    return pool[indices]
