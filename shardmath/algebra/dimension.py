"""Digits: every way of dividing one dimension is a sequence of cuts and keepers.

1. A **digit** is how every current piece is cut (`Chunks`, `Balanced`, `Sizes`, `Block`, or a user's `Rule`)
   and who keeps the parts: a mesh axis, whose coordinate r keeps the r-th part, or everybody, in order.
2. Digits of a **stage** act inside each other's pieces. The end of a stage concatenates the pieces and
   forgets their borders; the next stage divides what is left as one piece.
3. A **field** is a number of stored positions with its stages; a **dimension** is its fields one after the
   other, seen through `stored`, the Runs from stored to logical positions.
4. Stages are canonical: no digit that changes nothing, no border that nobody could see.

Placements, text, DTensor's shard order and the grammar are all made of these.

>>> strided = ((Digit(Chunks(2)), Digit(Chunks(2), ("tp",), (2,))),)
>>> print(stage_runs(strided[0], 8, {"tp": 1}))
[2:4 6:8]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from shardmath.algebra.runs import Runs, Segment, _make, compose, concat, identity
from shardmath.base.errors import PlacementError, ShardError
from shardmath.base.given import plural
from shardmath.base.integers import whole
from shardmath.base.memo import memo

__all__ = [
    "Balanced",
    "Block",
    "Chunks",
    "Cut",
    "Digit",
    "Dimension",
    "Field",
    "Rule",
    "Sizes",
    "Splits",
    "Stage",
    "canonical_stages",
    "cells",
    "divided",
    "lengths_at",
    "pieces_runs",
    "stage_runs",
]


class Splits(Hashable, Protocol):
    """Anything hashable that divides a length: `split(n, parts)` gives the Runs of each part over 0..n-1."""

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        """The `parts` parts of a length `n`."""
        ...


def _count_of(cut: object, name: str) -> None:
    """The named field of a cut is a number of at least 1, and Python's own: numpy's run over in products."""
    value = getattr(cut, name)
    if type(value) is not int or value < 1:
        number = whole(value, f"the {name} of {type(cut).__name__}", PlacementError)
        if number < 1:
            raise PlacementError(f"the {name} of {type(cut).__name__} is {number}; give 1 or more")
        object.__setattr__(cut, name, number)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Ceil-chunks, as torch.chunk: all parts as long as the first, the trailing ones short or empty."""

    parts: int

    def __post_init__(self) -> None:
        _count_of(self, "parts")

    def count(self, length: int) -> int:
        """Parts of a piece of this length."""
        return self.parts

    def part(self, length: int, i: int) -> tuple[int, int]:
        """(offset, length) of part i of a piece of this length."""
        step = -(-length // self.parts)
        start = min(length, i * step)
        return start, min(length - start, step)


@dataclass(frozen=True, slots=True)
class Balanced:
    """Sizes that differ by at most one, larger first, as numpy.array_split."""

    parts: int

    def __post_init__(self) -> None:
        _count_of(self, "parts")

    def count(self, length: int) -> int:
        """Parts of a piece of this length."""
        return self.parts

    def part(self, length: int, i: int) -> tuple[int, int]:
        """(offset, length) of part i of a piece of this length."""
        step, extra = divmod(length, self.parts)
        return i * step + min(i, extra), step + (i < extra)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Consecutive parts of given sizes, which must add up to the piece."""

    sizes: tuple[int, ...]
    _starts: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = tuple(whole(n, "a size of Sizes", PlacementError) for n in self.sizes)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "_starts", tuple(itertools.accumulate(sizes, initial=0)))

    def count(self, length: int) -> int:
        """Parts of a piece of this length. Raises PlacementError if the sizes do not add up to it."""
        if self._starts[-1] != length:
            what = f"sizes {list(self.sizes)} add up to {self._starts[-1]}, the piece has {length}"
            raise PlacementError(f"{what}; make them add up")
        return len(self.sizes)

    def part(self, length: int, i: int) -> tuple[int, int]:
        """(offset, length) of part i of a piece of this length."""
        return self._starts[i], self.sizes[i]


@dataclass(frozen=True, slots=True)
class Block:
    """Blocks of a fixed size, the last one short; a part that lies beyond the piece is empty."""

    size: int

    def __post_init__(self) -> None:
        _count_of(self, "size")

    def count(self, length: int) -> int:
        """Parts of a piece of this length."""
        return -(-length // self.size)

    def part(self, length: int, i: int) -> tuple[int, int]:
        """(offset, length) of part i of a piece of this length."""
        start = min(length, i * self.size)
        return start, min(length - start, self.size)


@dataclass(frozen=True, slots=True)
class Rule:
    """A user's way of splitting a length; its parts may be any Runs. Each length is split once and kept."""

    by: Splits
    parts: int
    _split: dict[int, tuple[Runs, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def count(self, length: int) -> int:
        """Parts of a piece of this length. Raises PlacementError if the rule does not give as many as the axis has."""
        return len(self.split(length))

    def split(self, length: int) -> tuple[Runs, ...]:
        """All parts of a piece of this length, checked. Raises PlacementError."""
        if length not in self._split:
            self._split[length] = _checked_split(self.by, length, self.parts)
        return self._split[length]


Interval: TypeAlias = Chunks | Balanced | Sizes | Block
Cut: TypeAlias = Interval | Rule


def _checked_split(by: Splits, length: int, parts: int) -> tuple[Runs, ...]:
    """What the rule answers: that many Runs within the length."""
    call = f"{_short(by)}.split({length}, {parts})"
    try:
        out = tuple(by.split(length, parts))
    except ShardError:
        raise
    except Exception as error:
        raise PlacementError(f"{call} raised {error!r}; it is to give {parts} Runs") from error
    if len(out) != parts:
        raise PlacementError(
            f"{call} gave {plural(out, 'part')}; give {parts}, empty ones included"
        )
    for i, part in enumerate(out):
        if not isinstance(part, Runs):
            raise PlacementError(f"{call} gave {_short(part)} as part {i}; give Runs")
        if part.extent > length:
            raise PlacementError(
                f"{call}: part {i} is {part}, beyond the length; stay below {length}"
            )
    return out


def _short(value: object, most: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."


@dataclass(frozen=True, slots=True)
class Digit:
    """A cut and its keeper: the flattened mesh axes `axes` of these `sizes`, or everybody if there are none."""

    cut: Cut
    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def coordinate(self, coords: Mapping[str, int]) -> int:
        """The flattened coordinate on the digit's axes, first slowest."""
        at = 0
        for name, n in zip(self.axes, self.sizes, strict=True):
            at = at * n + coords[name]
        return at


Stage: TypeAlias = tuple[Digit, ...]
Coords: TypeAlias = Mapping[str, int]


def stage_runs(stage: Stage, length: int, coords: Coords) -> Runs:
    """What the rank at `coords` keeps of 0..length-1 after one stage."""
    pieces = [(0, length)]
    for digit in stage:
        cut = digit.cut
        if isinstance(cut, Rule):
            return pieces_runs(stage, length, coords)
        if not digit.axes:
            _check_count(sum(_kept(cut, size) for _, size in pieces), length)
            pieces = [piece for start, size in pieces for piece in _parts(cut, start, size)]
        elif isinstance(cut, Chunks):
            pieces = _chunks(pieces, cut.parts, digit.coordinate(coords))
        else:
            i = digit.coordinate(coords)
            pieces = [(start + o, n) for start, size in pieces for o, n in (cut.part(size, i),)]
    return _joined(pieces)


MOST_PIECES = 1 << 24
"""Of what a rank keeps, all in memory at once: some gigabytes."""


def _check_count(count: int, length: int) -> None:
    if count > MOST_PIECES:
        what = f"a length of {length} is cut into {count} pieces, more than {MOST_PIECES}"
        raise PlacementError(
            f"{what}; give larger blocks, or write the tensor with a dimension more: n tp for (n tp)"
        )


def _chunks(pieces: list[tuple[int, int]], parts: int, i: int) -> list[tuple[int, int]]:
    """Part i of every piece by `Chunks(parts)`, without a call a piece; empty ones are left out."""
    out = []
    for start, size in pieces:
        step = -(-size // parts)
        at = i * step
        if at < size:
            out.append((start + at, step if at + step <= size else size - at))
    return out


def _parts(cut: Interval, start: int, size: int) -> Iterator[tuple[int, int]]:
    """All parts of the piece, as (start, length)."""
    if isinstance(cut, Sizes):
        cut.count(size)
        yield from zip(itertools.accumulate(cut.sizes, initial=start), cut.sizes, strict=False)
        return
    for i in range(_kept(cut, size)):
        o, n = cut.part(size, i)
        yield start + o, n


def _kept(cut: Cut, size: int) -> int:
    """How many parts of a piece need a look: all but those that are empty because there are more than positions."""
    count = cut.count(size)
    return min(count, size) if isinstance(cut, Chunks | Balanced) else count


def _joined(pieces: list[tuple[int, int]]) -> Runs:
    """Disjoint pieces (start, length) one after the other."""
    if len(pieces) == 1:
        start, n = pieces[0]
        return _make(((0, start, n),) if n else (), n)
    segments: list[Segment] = []
    at, end = 0, -1
    for start, n in pieces:
        if start == end:
            lo, g, k = segments[-1]
            segments[-1] = (lo, g, k + n)
        elif n:
            segments.append((at, start, n))
        else:
            continue
        at += n
        end = start + n
    return _make(tuple(segments), at)


def pieces_runs(stage: Stage, length: int, coords: Coords) -> Runs:
    """The same as `stage_runs` by its definition: pieces are Runs, so that cuts may be any rule."""
    pieces = [identity(length)]
    for digit in stage:
        kept = [digit.coordinate(coords)] if digit.axes else None
        pieces = [part for piece in pieces for part in _cut_piece(digit.cut, piece, kept)]
    return concat(pieces)


def _cut_piece(cut: Cut, piece: Runs, kept: list[int] | None) -> list[Runs]:
    size = len(piece)
    parts = range(_kept(cut, size)) if kept is None else kept
    if isinstance(cut, Rule):
        return [compose(cut.split(size)[i], piece) for i in parts]
    bounds = [cut.part(size, i) for i in parts]
    return [compose(Runs([(0, o, n)], n), piece) for o, n in bounds]


def divided(size: int, stages: Iterable[Stage]) -> Field:
    """The field of these stages, made canonical.

    Raises PlacementError where a cut of given sizes, or a user's rule, meets a piece that it does not fit.
    """
    return Field(size, canonical_stages(Field(size, tuple(stages)).stages))


def canonical_stages(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """The stages without digits that change nothing, joined where the first leaves one piece a rank."""
    out: list[Stage] = []
    for stage in map(_canonical_stage, stages):
        if stage and out and all(digit.axes for digit in out[-1]):
            out[-1] += stage
        elif stage:
            out.append(stage)
    return tuple(out)


def _canonical_stage(stage: Stage) -> Stage:
    digits = [digit for digit in stage if digit.axes or not _whole(digit.cut)]
    while digits and not digits[-1].axes:
        digits.pop()
    return tuple(
        d
        for d, after in itertools.zip_longest(digits, digits[1:])
        if after is None or not _hidden(d, after)
    )


def _whole(cut: Cut) -> bool:
    """Whether everybody keeping the cut's parts in order is no cut at all because there is one part."""
    return (isinstance(cut, Chunks) and cut.parts == 1) or (
        isinstance(cut, Sizes) and len(cut.sizes) == 1
    )


def _hidden(digit: Digit, after: Digit) -> bool:
    """Whether the borders of a local digit are all borders of the local digit after it."""
    a, b = digit.cut, after.cut
    local = not digit.axes and not after.axes
    return local and isinstance(a, Block) and isinstance(b, Block) and a.size % b.size == 0


@dataclass(frozen=True, slots=True)
class Field:
    """`size` consecutive stored positions and the stages that divide them.

    Raises PlacementError where a cut of given sizes, or a user's rule, meets a piece that it does not fit.
    """

    size: int
    stages: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        _check_lengths(self)

    def runs(self, coords: Coords) -> Runs:
        """What the rank at `coords` keeps of 0..size-1."""
        kept: Runs | None = None
        for stage in self.stages:
            part = stage_runs(stage, self.size if kept is None else len(kept), coords)
            kept = part if kept is None else compose(part, kept)
        return identity(self.size) if kept is None else kept


@dataclass(frozen=True, slots=True)
class Dimension:
    """One dimension of a layout: `size` logical positions, how the stored ones are divided, and which is which.

    `stored` is the Runs from stored to logical positions, None for the identity; `fields` cover the stored
    positions one after the other. Raises PlacementError where sizes do not fit.
    """

    size: int
    fields: tuple[Field, ...]
    stored: Runs | None = None
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        total = sum(f.size for f in self.fields)
        if total != self.stored_size:
            fix = "make the fields add up to the stored size"
            raise PlacementError(
                f"fields {[f.size for f in self.fields]} add up to {total}, the dimension stores "
                f"{self.stored_size}; {fix}"
            )
        if self.stored is not None and self.stored.extent > self.size:
            raise PlacementError(
                f"stored {self.stored} reaches position {self.stored.extent - 1} of a dimension of {self.size}; "
                f"stay inside"
            )
        if self.stored == identity(self.size):
            object.__setattr__(self, "stored", None)
        object.__setattr__(self, "_hash", hash((self.size, self.fields, self.stored)))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return Dimension, (self.size, self.fields, self.stored)

    @property
    def stored_size(self) -> int:
        """Positions that are stored, holes included."""
        return self.size if self.stored is None else len(self.stored)

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes that divide this dimension and their sizes, in order of appearance."""
        return {
            name: n for f in self.fields for stage in f.stages for name, n in _axes(stage).items()
        }

    def runs(self, coords: Coords) -> Runs:
        """Local to logical positions of the rank at `coords`."""
        kept = [f.runs(coords) for f in self.fields]
        stored = (
            kept[0] if len(kept) == 1 else concat(_shifted(kept, [f.size for f in self.fields]))
        )
        return stored if self.stored is None else compose(stored, self.stored)


def _shifted(parts: list[Runs], sizes: list[int]) -> Iterator[Runs]:
    """Each part's positions moved behind the fields before it."""
    for part, at in zip(parts, itertools.accumulate(sizes, initial=0), strict=False):
        yield _make(tuple((lo, g + at, n) for lo, g, n in part.segments), len(part))


@memo()
def cells(dimension: Dimension) -> tuple[Runs, ...]:
    """The Runs at every coordinate of the dimension's axes, row-major in `dimension.axes`."""
    if len(dimension.fields) == 1:
        stored = dimension.stored
        held = _field_cells(dimension.fields[0].size, dimension.fields[0].stages)
        return tuple(held if stored is None else (compose(runs, stored) for runs in held))
    axes = dimension.axes
    return tuple(dimension.runs(coords) for coords in _points(axes))


def _points(axes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Every coordinate, the last axis fastest."""
    return (
        dict(zip(axes, point, strict=True))
        for point in itertools.product(*map(range, axes.values()))
    )


def _axes(stage: Stage) -> dict[str, int]:
    return {name: n for digit in stage for name, n in zip(digit.axes, digit.sizes, strict=True)}


def _stage_cells(stage: Stage, length: int) -> list[Runs]:
    """What every coordinate of the stage's axes keeps; where one digit does it all, its parts in order."""
    if (
        len(stage) != 1
        or not stage[0].axes
        or not isinstance(stage[0].cut, Chunks | Balanced | Sizes)
    ):
        return [stage_runs(stage, length, coords) for coords in _points(_axes(stage))]
    nothing = _joined([])
    held = [_joined([piece]) if piece[1] else nothing for piece in _parts(stage[0].cut, 0, length)]
    return held + [nothing] * (math.prod(stage[0].sizes) - len(held))


def _field_cells(size: int, stages: tuple[Stage, ...]) -> list[Runs]:
    """The Runs at every coordinate of the stages' axes; a stage is divided once for each length that reaches it."""
    first, *rest = stages or ((),)
    held = _stage_cells(first, size)
    for stage in rest:
        parts = {n: _stage_cells(stage, n) for n in {len(runs) for runs in held}}
        held = [compose(part, runs) for runs in held for part in parts[len(runs)]]
    return held


def _check_lengths(f: Field) -> None:
    """Raise PlacementError where a cut of given sizes, or a user's rule, meets a piece that it does not fit."""
    for s, stage in enumerate(f.stages):
        if not any(isinstance(digit.cut, Sizes | Rule) for digit in stage):
            continue
        for length in lengths_at(f, s):
            _check_stage(stage, length)


def _check_stage(stage: Stage, length: int) -> None:
    sizes = {length}
    for digit in stage:
        sizes = {n for size in sizes for n in _part_sizes(digit, size)}


def _part_sizes(digit: Digit, size: int) -> set[int]:
    """The sizes of the parts of a piece; of long runs of equal parts, the first and the last ones."""
    cut, count = digit.cut, digit.cut.count(size)
    if isinstance(cut, Rule):
        return set(map(len, cut.split(size)))
    if isinstance(cut, Sizes):
        return set(cut.sizes)
    last = math.prod(digit.sizes) if digit.axes else count
    some = {0, min(last, count) - 1, -(-size // max(1, cut.part(size, 0)[1])) - 1, last - 1}
    return {cut.part(size, i)[1] for i in some if 0 <= i < last}


def lengths_at(f: Field, stage: int) -> set[int]:
    """The lengths of what ranks hold when the given stage of the field begins."""
    return {len(runs) for runs in _field_cells(f.size, f.stages[:stage])}
