"""Cuts: the ways in which a piece of one dimension is divided into parts.

An **interval cut** (`Chunks`, `BalancedChunks`, `Sizes`, `FixedBlock`) has consecutive parts: `count(length)`
says how many a piece of that length has, `part(length, i)` where part i begins and how long it is.
A `UserCut` is a custom cut, and its parts may be any Runs.

>>> [Chunks(3).part(7, i) for i in range(3)], [BalancedChunks(3).part(7, i) for i in range(3)]
([(0, 3), (3, 3), (6, 1)], [(0, 3), (3, 2), (5, 2)])
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from shardmath.base.arguments import as_integer
from shardmath.base.errors import PlacementError, ShardError
from shardmath.base.memo import memo
from shardmath.base.text import plural
from shardmath.layouts.algebra.runs import Runs

__all__ = [
    "BalancedChunks",
    "FixedBlock",
    "Chunks",
    "Cut",
    "Interval",
    "OverlapError",
    "UserCut",
    "Sizes",
    "Splits",
    "is_trivial",
    "list_parts",
    "parts_to_visit",
]


class Splits(Hashable, Protocol):
    """The protocol of a custom cut: a hashable object that divides a length n into parts, given as Runs (positions).

    Its parts are disjoint unless it has an attribute `overlaps` that is true.
    """

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """Divide positions 0..n-1 into `parts` parts; return the positions in each part, as Runs."""
        ...


def _check_positive(cut: object, name: str) -> None:
    """Make the named field of a cut an int of at least 1; numpy's would overflow in products."""
    value = getattr(cut, name)
    if type(value) is int and value >= 1:
        return
    what = f"`{name}` of {type(cut).__name__}"
    number = as_integer(value, what, PlacementError)
    if number < 1:
        raise PlacementError(f"{what} is {number}, but must be at least 1; pass 1 or more")
    object.__setattr__(cut, name, number)


@dataclass(frozen=True, slots=True)
class _CountedCut:
    """A cut into this number of parts, whatever the length."""

    parts: int

    def __post_init__(self) -> None:
        _check_positive(self, "parts")

    def count(self, length: int) -> int:
        """The number of parts, which does not depend on `length`."""
        return self.parts


@dataclass(frozen=True, slots=True)
class Chunks(_CountedCut):
    """A cut into chunks of ceil(length / parts) positions, as by torch.chunk; the last ones may be short or empty."""

    def part(self, length: int, i: int) -> tuple[int, int]:
        """Return the offset and the length of part number `i` of a piece of `length` positions."""
        step = -(-length // self.parts)
        start = min(length, i * step)
        return start, min(length - start, step)


@dataclass(frozen=True, slots=True)
class BalancedChunks(_CountedCut):
    """A cut into parts whose sizes differ by at most one, larger ones first, as by numpy.array_split."""

    def part(self, length: int, i: int) -> tuple[int, int]:
        """Return the offset and the length of part number `i` of a piece of `length` positions."""
        step, extra = divmod(length, self.parts)
        return i * step + min(i, extra), step + (i < extra)


@dataclass(frozen=True, slots=True)
class Sizes:
    """A cut into consecutive parts of given `sizes`, which must add up to the length that is cut."""

    sizes: tuple[int, ...]
    _starts: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = tuple(as_integer(n, "a size of Sizes", PlacementError) for n in self.sizes)
        starts = tuple(itertools.accumulate(sizes, initial=0))
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "_starts", starts)

    def count(self, length: int) -> int:
        """Return the number of sizes. Raises PlacementError unless they add up to `length`."""
        total = self._starts[-1]
        if total != length:
            what = f"sizes {list(self.sizes)} add up to {total}, but divide {length} positions"
            raise PlacementError(f"{what}; give sizes that add up to {length}")
        return len(self.sizes)

    def part(self, length: int, i: int) -> tuple[int, int]:
        """Return the offset and the length of part number `i` of a piece of `length` positions."""
        return self._starts[i], self.sizes[i]


@dataclass(frozen=True, slots=True)
class FixedBlock:
    """A cut into consecutive blocks of `size` positions, the last of which may be short.

    A part with a number beyond the last block is empty.
    """

    size: int

    def __post_init__(self) -> None:
        _check_positive(self, "size")

    def count(self, length: int) -> int:
        """Return the number of blocks, including a short one, into which a piece of `length` positions is cut."""
        return -(-length // self.size)

    def part(self, length: int, i: int) -> tuple[int, int]:
        """Return the offset and the length of part number `i` of a piece of `length` positions."""
        start = min(length, i * self.size)
        return start, min(length - start, self.size)


@dataclass(frozen=True, slots=True)
class UserCut:
    """A cut of a length into `parts` parts by a custom placement, `by`, which returns each part as Runs (positions)."""

    by: Splits
    parts: int

    def count(self, length: int) -> int:
        """Check that the custom placement `by` divides positions 0..length-1 into `parts` valid parts, and return
        `parts`; both are fields of this object. Raises PlacementError otherwise."""
        return len(self.split(length))

    def split(self, length: int) -> tuple[Runs, ...]:
        """Return the parts into which the custom placement `by`, a field of this object, divides positions 0..length-1.
        Each part is a Runs (ranges of positions).

        Raises PlacementError if they are invalid.
        """
        return _split(self.by, length, self.parts)


Interval: TypeAlias = Chunks | BalancedChunks | Sizes | FixedBlock
Cut: TypeAlias = Interval | UserCut


# Cached outside the value: a value that grew with use would be pickled with its cache.
@memo()
def _split(by: Splits, length: int, parts: int) -> tuple[Runs, ...]:
    """The parts of the rule. Raises PlacementError unless they are `parts` disjoint Runs in the length."""
    call = f"{_shorten(by)}.split({length}, {parts})"
    try:
        out = tuple(by.split(length, parts))
    except PlacementError:
        raise
    except ShardError as error:
        raise PlacementError(f"{call}: {error}") from error
    except Exception as error:
        raise PlacementError(f"{call} raised {error!r}; make it return {parts} Runs") from error
    if len(out) != parts:
        what = f"{call} returned {plural(out, 'part')} instead of {parts}"
        raise PlacementError(f"{what}; return one Runs per coordinate, even if it is empty")
    for i, part in enumerate(out):
        if not isinstance(part, Runs):
            raise PlacementError(
                f"{call} returned {_shorten(part)} as part {i}, not Runs; "
                f"return Runs, such as shardmath.from_ranges([(0, 2)])"
            )
        if part.extent > length:
            what = f"{call} returned {part} as part {i}, which reaches position {part.extent - 1}"
            raise PlacementError(f"{what}; return only positions below {length}")
    if not getattr(by, "overlaps", False):
        _check_disjoint(out, by, call)
    return out


class OverlapError(PlacementError):
    """Error for two parts of a custom placement that hold the same position.

    `word` returns the message with other names for the parts.
    """

    def __init__(self, by: Splits, call: str, parts: tuple[int, int], position: int) -> None:
        """`call` is the call of `by.split`, as text."""
        super().__init__(by, call, parts, position)
        self.by = by
        self.call = call
        self.parts = parts
        self.position = position

    def __str__(self) -> str:
        one, other = self.parts
        return self.word(f"parts {one} and {other}")

    def word(self, both: str) -> str:
        """Return the error message, in which the text `both` names the two overlapping parts."""
        what = f"{self.call}: {both} both hold position {self.position}"
        fix = "make the parts disjoint, or set `overlaps = True` in the class if copies are meant"
        return f"{what}; {fix}"


def _check_disjoint(parts: tuple[Runs, ...], by: Splits, call: str) -> None:
    """Raise OverlapError if two parts hold one position: plans would take one for a replica."""
    spans = []
    for i, part in enumerate(parts):
        spans += [(start, start + n, i) for _, start, n in part.segments]
    spans.sort()
    for (_, stop, one), (start, _, other) in itertools.pairwise(spans):
        if start < stop:
            raise OverlapError(by, call, (min(one, other), max(one, other)), start)


MOST_SHOWN = 120
"""Characters of a value that a message shows."""


def _shorten(value: object) -> str:
    """The value's repr, or the beginning of a long one."""
    text = repr(value)
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[:MOST_SHOWN]}..."


def parts_to_visit(cut: Cut, size: int) -> int:
    """Return how many parts, counted from the first, a caller has to visit when `cut` divides `size` positions: all
    parts after these are empty."""
    count = cut.count(size)
    if isinstance(cut, Chunks | BalancedChunks):
        return min(count, size)
    return count


def list_parts(cut: Interval, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of the parts into which `cut` divides `size` positions that begin at `start`.

    Empty parts at the end may be left out.
    """
    if isinstance(cut, Sizes):
        cut.count(size)  # raises if the sizes do not add up
        starts_and_end = itertools.accumulate(cut.sizes, initial=start)
        yield from zip(starts_and_end, cut.sizes, strict=False)
        return
    for i in range(parts_to_visit(cut, size)):
        offset, length = cut.part(size, i)
        yield start + offset, length


def is_trivial(cut: Cut) -> bool:
    """Return whether `cut` is a Chunks or Sizes with one part: it leaves every piece whole and can be left out."""
    if isinstance(cut, Chunks):
        return cut.parts == 1
    return isinstance(cut, Sizes) and len(cut.sizes) == 1
