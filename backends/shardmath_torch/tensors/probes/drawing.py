"""Drawing: the value of each element of one type in each run of a loader.

1. In the first runs it is a digit of the element's number: one of the type's numbers, in an order that differs by run.
   They remain distinct in the types of targets, as far as these have them.
2. In further runs it is drawn by the number from all numbers of the type; negated, or else mirrored; large where it was
   small; one of four, zeros among them; of those that fit targets; and at last NaN, and infinite.
3. Types of few values have more runs.
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
)

__all__ = ["TypedElements", "SPECIAL", "Run", "list_runs"]

_Flat: TypeAlias = NDArray[np.int64]
_Truths: TypeAlias = NDArray[np.bool_]

TABLE = 1 << 16
"""Values from which elements are drawn in a run."""
BITS = 24
"""How much further runs say of each element at least."""
FURTHER = 4, 8
"""Further runs at least: of many elements, and of few, among which more functions are the identity by chance."""
FEW = 1 << 20
SPECIAL = {"nan": list_nan, "infinite": list_infinite}
"""The runs in which no element is finite, if its type has others."""
IMAGINARY = 1 << 20
"""Added to the seed of a run, for the second part of complex numbers."""


class Run(NamedTuple):
    """A way to choose values, which of its kind it is, and the byte that targets are filled with before."""

    way: str
    seed: int
    byte: int


class TypedElements:
    """The elements of all logical tensors of one type, by number; `wanted` are the types of targets."""

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
        self._digits = real(dtype), wanted
        self.base = len(_list_digits(*self._digits))
        self.digits = 1
        while self.base**self.digits < self.size:
            self.digits += 1

    def name(self, number: int) -> str:
        """The element, for people."""
        tensor = int(np.searchsorted(self.starts, number, side="right")) - 1
        return f"element {number - self.starts[tensor]} of {self.names[tensor]!r}"

    def make(self, name: str, run: Run) -> Tensor:
        """The logical tensor of a run."""
        place = self.names.index(name)
        numbers = np.arange(self.starts[place], self.starts[place + 1])
        return as_tensor(self.draw(numbers, run), self.dtype).reshape(self.shapes[name])

    def draw(self, numbers: _Flat, run: Run) -> Words:
        """The values of these elements, as a row of words."""
        first = self._draw_part(numbers, run)
        if not self.dtype.is_complex:
            return first
        again = "drawn" if run.way == "digit" else run.way
        other = Run(again, run.seed + IMAGINARY, run.byte)
        return np.stack([first, self._draw_part(numbers, other)], axis=1).reshape(-1)

    def _draw_part(self, numbers: _Flat, run: Run) -> Words:
        if run.way == "digit" and run.seed < self.digits:
            table = _permute(*self._digits, (run.seed, self.place))
            digit: Words = table[numbers // self.base**run.seed % self.base]
            return digit
        # The upper bits of a product with an odd number: neighbors are far apart.
        # From 1 on, as 0 would be in the same place in every run.
        factors = numbers.astype(np.uint64) + np.uint64(1)
        places = (factors * _draw_odd(run.seed, self.place)) >> np.uint64(48)
        drawn: Words = _tabulate(*self._digits, run.way, (run.seed, self.place))[places]
        return drawn

    def goes_to(self, dtype: torch.dtype) -> bool:
        """Whether elements can be in a target of that type."""
        if self.dtype.is_complex and not dtype.is_complex:
            return False
        try:
            images, _ = _order_images(*self._digits, (0, self.place), real(dtype))
        except (RuntimeError, TypeError):
            # torch has no such cast.
            return False
        return bool((images[1:] != images[:-1]).all())

    def find(self, seen: Sequence[Words], dtype: torch.dtype) -> tuple[_Flat, _Truths]:
        """The number whose digits cells of that type have, and in which cells there is such a number."""
        numbers = np.zeros(len(seen[0]), np.int64)
        right = np.ones(len(seen[0]), np.bool_)
        for run in range(self.digits):
            images, places = _order_images(*self._digits, (run, self.place), real(dtype))
            at = np.searchsorted(images, seen[run])
            at = np.minimum(at, self.base - 1)
            right &= images[at] == seen[run]
            numbers += places[at] * self.base**run
        right &= numbers < self.size
        return numbers, right


def list_runs(kinds: Sequence[TypedElements]) -> list[Run]:
    """The runs for elements of all these types."""
    digits = max((kind.digits for kind in kinds), default=1)
    is_wide = any(kind.base < len(list_finite(real(kind.dtype))) for kind in kinds)
    further = _count_further(kinds)
    # No seed twice, but for one run in three ways.
    ways = [("digit", digit) for digit in range(digits)]
    ways.append(("few", digits))
    ways += [(way, digits + 1) for way in ("drawn", "mirrored", "inverse")]
    ways += [("drawn", digits + 2 + i) for i in range(further)]
    # Most numbers of a wide type are too large or too small for a target of few bits.
    ways += [("held", digits + 2 + further + i) for i in range(further * is_wide)]
    ways += [(way, 0) for way in _list_special(kinds)]
    drawn = np.random.default_rng(0).integers(0x21, 0x60, len(ways)).tolist()
    # Equal before a run and its mirror image, so that no element has both.
    drawn[digits + 2] = drawn[digits + 1]
    return [Run(*way, byte) for way, byte in zip(ways, drawn, strict=True)]


def _count_further(kinds: Sequence[TypedElements]) -> int:
    """How many runs there are in which chance alone must not give a cell an element's value."""
    least = min((kind.base for kind in kinds), default=TABLE)
    few = sum(kind.size for kind in kinds) <= FEW
    return max(FURTHER[few], math.ceil(BITS / math.log2(least)))


def _list_special(kinds: Sequence[TypedElements]) -> list[str]:
    """The runs that some of these types have values for."""
    types = {real(kind.dtype) for kind in kinds}
    return [way for way, list_some in SPECIAL.items() if any(len(list_some(one)) for one in types)]


@memo()
def _list_digits(dtype: torch.dtype, wanted: tuple[torch.dtype, ...]) -> Words:
    """Numbers that remain distinct in each of the types that can have some of them."""
    words = list_finite(dtype)
    for to in wanted:
        try:
            images = cast(words, dtype, to)
        except (RuntimeError, TypeError):
            continue
        finite = is_finite(images, to)
        _, first = np.unique(images[finite], return_index=True)
        kept = words[finite][first]
        # A digit of one number says nothing, and no element is in a target of that type.
        if len(kept) > 1:
            words = kept
    return words


@memo()
def _permute(dtype: torch.dtype, wanted: tuple[torch.dtype, ...], seed: tuple[int, int]) -> Words:
    """The numbers for a digit, of elements of the type at a place."""
    return np.random.default_rng(seed).permutation(_list_digits(dtype, wanted))


@memo()
def _order_images(
    dtype: torch.dtype, wanted: tuple[torch.dtype, ...], seed: tuple[int, int], to: torch.dtype
) -> tuple[Words, _Flat]:
    """What a cast makes of the numbers for a digit, in order, and the digit of each."""
    images = cast(_permute(dtype, wanted, seed), dtype, to)
    places = np.argsort(images, kind="stable")
    return images[places], places


@memo()
def _draw_odd(seed: int, place: int) -> np.uint64:
    """The factor of a run's numbers, of elements of the type at that place."""
    drawn = np.random.default_rng((seed, place)).integers(1 << 63, dtype=np.uint64)
    return np.uint64(drawn * 2 + 1)


@memo()
def _tabulate(
    dtype: torch.dtype, wanted: tuple[torch.dtype, ...], way: str, seed: tuple[int, int]
) -> Words:
    """The values from which a run draws, for elements of the type at a place."""
    pool = _list_digits(dtype, wanted) if way == "held" else list_finite(dtype)
    if way in SPECIAL:
        special = SPECIAL[way](dtype)
        pool = special if len(special) else pool
    elif way == "few":
        # Zeros, and two others.
        zeros = order(pool, dtype)[:2]
        pool = pool[[*zeros, len(pool) // 3, len(pool) // 2 + len(pool) // 7]]
    drawn = np.random.default_rng(seed).integers(0, len(pool), TABLE)
    if way == "mirrored":
        drawn = len(pool) - 1 - drawn
    elif way == "inverse":
        by_size = order(pool, dtype)
        rank = np.argsort(by_size)
        drawn = by_size[len(pool) - 1 - rank[drawn]]
    return pool[drawn]
