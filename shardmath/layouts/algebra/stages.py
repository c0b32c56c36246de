"""Stages: sequences of digits, each of which cuts every current piece and names the ranks that keep the parts.

1. A **digit** is how every current piece is cut and who keeps the parts: the ranks at coordinate r
   of a mesh axis keep the r-th part. In a **local** digit, without an axis, every rank keeps all parts.
2. Digits of a **stage** act inside each other's pieces. The end of a stage concatenates the pieces
   and forgets their borders; the next stage divides what is left as one piece.
3. Stages are canonical: no digit that changes nothing, no border without an effect.

>>> strided = (Digit(Chunks(2)), Digit(Chunks(2), ("tp",), (2,)))
>>> print(stage_runs(strided, 8, {"tp": 1}))
[2:4 6:8]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.errors import PlacementError
from shardmath.layouts.algebra.cuts import (
    BalancedChunks,
    Chunks,
    Cut,
    FixedBlock,
    Interval,
    Sizes,
    UserCut,
    is_trivial,
    list_parts,
    parts_to_visit,
)
from shardmath.layouts.algebra.runs import Runs, Segment, compose, concat, identity

__all__ = [
    "Coords",
    "Digit",
    "Stage",
    "canonical_stages",
    "check_stage",
    "cut_lengths",
    "is_counted",
    "list_coordinates",
    "pieces_runs",
    "stage_axes",
    "stage_cells",
    "stage_runs",
]

StartSize: TypeAlias = tuple[int, int]
"""Start and size of a piece of consecutive positions."""


@dataclass(frozen=True, slots=True)
class Digit:
    """One division of a tensor dimension into parts, which the field `cut` describes. Each rank keeps the part at its
    coordinate on the mesh axes `axes`, or all parts if `axes` is empty."""

    cut: Cut
    axes: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()

    def coordinate(self, coords: Mapping[str, int]) -> int:
        """Return the index of the part that the rank at mesh coordinates `coords` takes: its coordinates on the axes of
        this object, flattened into one in row-major order."""
        at = 0
        for name, n in zip(self.axes, self.sizes, strict=True):
            at = at * n + coords[name]
        return at


Stage: TypeAlias = tuple[Digit, ...]
Coords: TypeAlias = Mapping[str, int]


def stage_axes(stage: Stage) -> dict[str, int]:
    """Return the mesh axes, name -> size, that occur in `stage`, a sequence of cuts that divide a tensor dimension
    among ranks. The axes are in the order of the cuts."""
    out: dict[str, int] = {}
    for digit in stage:
        out.update(zip(digit.axes, digit.sizes, strict=True))
    return out


def list_coordinates(axes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield every combination of coordinates on `axes` (name -> size), with the last axis fastest."""
    along = map(range, axes.values())
    for point in itertools.product(*along):
        yield dict(zip(axes, point, strict=True))


# What a rank keeps


def stage_runs(stage: Stage, length: int, coords: Coords) -> Runs:
    """Return the ranges of positions in 0..length-1 that a rank keeps after all cuts of a dimension. `stage` is the
    sequence of cuts, and `coords` has the rank's coordinate on each mesh axis."""
    pieces = [(0, length)]
    for digit in stage:
        cut = digit.cut
        if isinstance(cut, UserCut):
            return pieces_runs(stage, length, coords)
        if digit.axes:
            i = digit.coordinate(coords)
            pieces = _keep_part(cut, pieces, i)
        else:
            pieces = _keep_all(cut, pieces, length)
    return _join(pieces)


MOST_PIECES = 1 << 24
"""The most pieces that a rank keeps, all in memory at once: some gigabytes."""


def _keep_all(cut: Interval, pieces: list[StartSize], length: int) -> list[StartSize]:
    """All parts of every piece. Raises PlacementError for more than memory holds."""
    count = sum(parts_to_visit(cut, size) for _, size in pieces)
    if count > MOST_PIECES:
        what = f"a length of {length} is cut into {count} pieces, more than {MOST_PIECES}"
        fix = "give larger blocks, or write the tensor with a dimension more: n tp for (n tp)"
        raise PlacementError(f"{what}; {fix}")
    out: list[StartSize] = []
    for start, size in pieces:
        out += list_parts(cut, start, size)
    return out


def _keep_part(cut: Interval, pieces: list[StartSize], i: int) -> list[StartSize]:
    """Part i of every piece."""
    if isinstance(cut, Chunks):
        return _keep_chunk(cut.parts, pieces, i)
    out = []
    for start, size in pieces:
        offset, n = cut.part(size, i)
        out.append((start + offset, n))
    return out


def _keep_chunk(parts: int, pieces: list[StartSize], i: int) -> list[StartSize]:
    """Part i of every piece by `Chunks(parts)`, empty ones left out.

    Repeats the code of `Chunks.part`, because a call per piece takes most of the time of large
    block-cyclic layouts.
    """
    out = []
    for start, size in pieces:
        step = -(-size // parts)
        at = i * step
        if at < size:
            out.append((start + at, step if at + step <= size else size - at))
    return out


def _join(pieces: list[StartSize]) -> Runs:
    """Disjoint pieces one after the other."""
    if len(pieces) == 1:
        return _piece_runs(*pieces[0])
    segments: list[Segment] = []
    at = 0
    end = -1
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
    return Runs.canonical(tuple(segments), at)


def _piece_runs(start: int, n: int) -> Runs:
    """The Runs of a single piece."""
    if not n:
        return Runs.canonical((), 0)
    return Runs.canonical(((0, start, n),), n)


def pieces_runs(stage: Stage, length: int, coords: Coords) -> Runs:
    """Return the ranges of positions in 0..length-1 that the rank at mesh coordinates `coords` keeps after the sequence
    of cuts `stage`. `stage_runs` returns the same faster, and calls this function only if a user's placement defines a
    cut."""
    pieces = [identity(length)]
    for digit in stage:
        kept_part = None
        if digit.axes:
            kept_part = digit.coordinate(coords)
        cut_pieces: list[Runs] = []
        for piece in pieces:
            cut_pieces += _cut_piece(digit.cut, piece, kept_part)
        pieces = cut_pieces
    return concat(pieces)


def _cut_piece(cut: Cut, piece: Runs, kept_part: int | None) -> Iterator[Runs]:
    """The part of the piece with this number, or all parts in order if `kept_part` is None."""
    size = len(piece)
    parts = range(parts_to_visit(cut, size)) if kept_part is None else (kept_part,)
    for i in parts:
        if isinstance(cut, UserCut):
            part = cut.split(size)[i]
        else:
            start, n = cut.part(size, i)
            part = Runs([(0, start, n)], n)
        yield compose(part, piece)


def stage_cells(stage: Stage, length: int) -> list[Runs]:
    """Return the positions, out of 0..length-1, that ranks have after `stage` (a sequence of cuts) divides these
    positions among them. The list has one Runs (ranges) for each combination of coordinates on the mesh axes of the
    cuts, in row-major order."""
    if len(stage) == 1:
        digit = stage[0]
        cut = digit.cut
        # One cut into ranges gives the parts of all coordinates at once, which is faster.
        if digit.axes and isinstance(cut, Chunks | BalancedChunks | Sizes):
            count = math.prod(digit.sizes)
            return _single_digit_cells(cut, length, count)
    elif stage and is_counted(stage) and all(digit.axes for digit in stage):
        # Every rank keeps one piece, and arrays give the pieces of all ranks at once.
        starts, sizes = cut_lengths(stage, np.array([length]))
        return list(map(_piece_runs, starts.ravel().tolist(), sizes.ravel().tolist()))
    axes = stage_axes(stage)
    points = list_coordinates(axes)
    return [stage_runs(stage, length, coords) for coords in points]


def is_counted(stage: Stage) -> bool:
    """Return whether each digit of `stage` cuts every piece into the same number of ranges, whatever its length: only
    `cut_lengths` of such a stage is defined."""
    return all(isinstance(digit.cut, Chunks | BalancedChunks) for digit in stage)


def cut_lengths(stage: Stage, lengths: Ints) -> tuple[Ints, Ints]:
    """Return the starts and the sizes of the pieces that ranks keep of each of `lengths` after all cuts of `stage`, as
    two arrays of shape (lengths, coordinates, pieces). Coordinates on the mesh axes of the cuts are in row-major order,
    and so are a rank's pieces, which may be empty.

    `stage_runs` returns the same for one rank and one length. The stage must be counted (`is_counted`).

    >>> fsdp = (Digit(Chunks(2), ("tp",), (2,)), Digit(Chunks(4), ("dp",), (4,)))
    >>> cut_lengths(fsdp, np.array([9]))[1][0, :, 0].tolist()
    [2, 2, 1, 0, 1, 1, 1, 1]
    """
    sizes = lengths[:, None, None]
    starts = np.zeros_like(sizes)
    for digit in stage:
        cut = cast(Chunks | BalancedChunks, digit.cut)
        offsets, sizes = _cut_sizes(cut, sizes[..., None])
        starts = starts[..., None] + offsets
        n, coordinates, pieces, parts = sizes.shape
        if digit.axes:
            # Which part a rank keeps is its coordinate, so the last dimension goes before the pieces.
            shape = n, coordinates * parts, pieces
            starts = starts.swapaxes(2, 3).reshape(shape)
            sizes = sizes.swapaxes(2, 3).reshape(shape)
        else:
            shape = n, coordinates, pieces * parts
            starts = starts.reshape(shape)
            sizes = sizes.reshape(shape)
    return starts, sizes


def _cut_sizes(cut: Chunks | BalancedChunks, sizes: Ints) -> tuple[Ints, Ints]:
    """The offsets and sizes of all parts of pieces of these sizes, along the last dimension."""
    number = np.arange(cut.parts)
    if isinstance(cut, BalancedChunks):
        step, extra = np.divmod(sizes, cut.parts)
        return number * step + np.minimum(number, extra), step + (number < extra)
    step = -(-sizes // cut.parts)
    offsets = np.minimum(sizes, number * step)
    return offsets, np.minimum(sizes - offsets, step)


def _single_digit_cells(cut: Interval, length: int, count: int) -> list[Runs]:
    """What each of `count` coordinates keeps if one cut divides the whole length: one part each, the last nothing."""
    nothing = Runs.canonical((), 0)
    held = []
    for start, n in list_parts(cut, 0, length):
        held.append(_piece_runs(start, n) if n else nothing)
    return held + [nothing] * (count - len(held))


# Canonical stages


def canonical_stages(stages: Iterable[Stage]) -> tuple[Stage, ...]:
    """Return `stages` (sequences of cuts) in a simpler form: cuts without effect are left out, and successive stages
    are merged into one where possible.

    The parts stay the same.
    """
    out: list[Stage] = []
    for given in stages:
        stage = _canonical_stage(given)
        if not stage:
            continue
        # If every digit has axes, a rank keeps a single piece, and the end of the stage forgets no border inside it.
        if out and all(digit.axes for digit in out[-1]):
            out[-1] += stage
        else:
            out.append(stage)
    return tuple(out)


def _canonical_stage(stage: Stage) -> Stage:
    """The stage without local digits that have no effect."""
    digits = [digit for digit in stage if digit.axes or not is_trivial(digit.cut)]
    # A stage joins its pieces at its end, so a local digit has no effect unless a later digit divides its pieces.
    while digits and not digits[-1].axes:
        digits.pop()
    out = []
    for i, digit in enumerate(digits):
        last = i == len(digits) - 1
        if last or not _is_hidden(digit, digits[i + 1]):
            out.append(digit)
    return tuple(out)


def _is_hidden(digit: Digit, after: Digit) -> bool:
    """Whether the borders of a local digit are all borders of the local digit after it."""
    if digit.axes or after.axes:
        return False
    a = digit.cut
    b = after.cut
    return isinstance(a, FixedBlock) and isinstance(b, FixedBlock) and a.size % b.size == 0


# Whether cuts fit


def check_stage(stage: Stage, length: int) -> None:
    """Raise PlacementError if `length` positions cannot be divided by the cuts of `stage`, one after another. For
    example, a cut into given sizes needs a range whose length is the sum of the sizes."""
    sizes = {length}
    for digit in stage:
        parts: set[int] = set()
        for size in sizes:
            parts |= _part_sizes(digit, size)
        sizes = parts


def _part_sizes(digit: Digit, size: int) -> set[int]:
    """The sizes that the parts of a piece have. Raises PlacementError, by the cut, if it does not fit the piece."""
    cut = digit.cut
    count = cut.count(size)
    if isinstance(cut, UserCut):
        return set(map(len, cut.split(size)))
    if isinstance(cut, Sizes):
        return set(cut.sizes)
    # Ranks may be more than parts, or fewer: only parts up to the number of ranks are kept, and the rest are empty.
    kept = math.prod(digit.sizes) if digit.axes else count
    # Sizes never grow from part to part. Chunks and FixedBlock have one shorter part, the last that is
    # not empty; Balanced ends with its shorter ones. So these few parts have all the sizes.
    _, longest = cut.part(size, 0)
    last_not_empty = (size - 1) // max(1, longest)
    last_given = min(kept, count) - 1
    found = set()
    for i in {0, last_given, last_not_empty, kept - 1}:
        if 0 <= i < kept:
            _, n = cut.part(size, i)
            found.add(n)
    return found
