"""Runs: the global position at each local position of one dimension.

1. A `Runs` is a partial injection from local positions 0..len-1 into global positions, stored as
   segments (local start, global start, length).
2. Local positions that no segment covers are **holes**: padding, or another tensor's share of a
   fused buffer.
3. Segments are sorted by local start, never empty, and merged if both sides continue; so equal
   functions are equal values, and each segment is as long as it can be.
4. Order is free: a strided shard or an interleaved buffer is just more segments.

The functions are named by the mathematics: `compose(f, g)` is g after f, `invert(f, n)` is defined
on 0..n-1. The transfers of one dimension between two holders are `compose(src, invert(dst, n))`.

>>> even = Runs(((0, 0, 2), (2, 4, 2)), 4)
>>> print(even)
[0:2 4:6]
>>> compose(even, invert(Runs(((0, 4, 4),), 4), 8))
Runs(((2, 0, 2),), 4)
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arguments import as_integer, instance, listed
from shardmath.base.errors import RunsError
from shardmath.base.public import public

__all__ = [
    "Runs",
    "Segment",
    "compose",
    "concat",
    "from_ranges",
    "identity",
    "invert",
    "restrict",
    "spanning",
]

Segment: TypeAlias = tuple[int, int, int]
"""(local start, global start, length)."""


@public
@dataclass(frozen=True, slots=True, repr=False, init=False)
class Runs:
    """A map from each local position along one dimension to its global position, or to none (a hole); no global
    position occurs twice.

    `Runs(segments, length)` takes segments in any order and canonicalizes them; `length` counts
    holes and defaults to the end of the last segment. Raises RunsError if segments overlap on
    either side, are negative, or leave the length.
    """

    segments: tuple[Segment, ...]
    length: int

    def __init__(self, segments: Iterable[Segment] = (), length: int | None = None) -> None:
        given = listed(segments, "segments", RunsError)
        merged = _merge(sorted(map(_check_segment, given)))
        total = length
        if total is None:
            total = _local_end(merged)
        if type(total) is not int:  # a message with all segments is long, and rarely needed
            total = as_integer(length, f"length of Runs {merged}", RunsError)
        _check_inside(merged, total)
        _check_disjoint(merged, 0, "local")
        _check_disjoint(merged, 1, "global")
        object.__setattr__(self, "segments", merged)
        object.__setattr__(self, "length", total)

    @staticmethod
    def canonical(segments: tuple[Segment, ...], length: int) -> Runs:
        """Make a Runs with `length` local positions from `segments`, without checks. `segments` must already be sorted,
        merged and disjoint; a segment is (local start, global start, number of positions)."""
        runs = object.__new__(Runs)
        object.__setattr__(runs, "segments", segments)
        object.__setattr__(runs, "length", length)
        return runs

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Runs({self.segments}, {self.length})"

    def __str__(self) -> str:
        return f"[{spanning(self)}]"

    @property
    def size(self) -> int:
        """The number of global positions held: the length minus the holes."""
        return sum(n for _, _, n in self.segments)

    @property
    def extent(self) -> int:
        """One past the largest global position held; 0 if no position is held."""
        return max((g + n for _, g, n in self.segments), default=0)

    def indices(self) -> NDArray[np.int64]:
        """Return the global position at each local position, -1 in holes, as an int64 array."""
        out = np.full(self.length, -1, np.int64)
        for lo, g, n in self.segments:
            out[lo : lo + n] = np.arange(g, g + n)
        return out

    def __reduce__(self) -> tuple[object, ...]:
        return Runs.canonical, (self.segments, self.length)


def _check_segment(item: Segment) -> Segment:
    """The item as a tuple of three of Python's integers. Raises RunsError for anything else."""
    if (
        type(item) is tuple
        and len(item) == 3
        and type(item[0]) is type(item[1]) is type(item[2]) is int
    ):
        return item
    try:
        lo, g, n = item
    except (TypeError, ValueError):
        what = f"segment {item!r} is not (local start, global start, length)"
        raise RunsError(f"{what}; give three integers") from None
    what = f"a number of segment {item}"
    return (
        as_integer(lo, what, RunsError),
        as_integer(g, what, RunsError),
        as_integer(n, what, RunsError),
    )


def _merge(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Join neighbors that continue on both sides and drop empty ones; sorted by local start."""
    out: list[Segment] = []
    local_end: int | None = None
    global_end = 0
    for lo, g, n in segments:
        if lo == local_end and g == global_end:
            first_lo, first_g, length = out[-1]
            out[-1] = (first_lo, first_g, length + n)
        elif n:
            out.append((lo, g, n))
        else:
            continue
        local_end = lo + n
        global_end = g + n
    return tuple(out)


def _local_end(segments: tuple[Segment, ...]) -> int:
    """The end of the last segment in local positions; 0 without segments."""
    if not segments:
        return 0
    lo, _, n = segments[-1]
    return lo + n


MOST_POSITIONS = (1 << 63) - 1
"""Positions are counted in numpy's int64."""


def _check_inside(segments: tuple[Segment, ...], length: int) -> None:
    """Raise RunsError for a negative number, a large one, or a segment that leaves the length."""
    if length < 0:
        what = f"length {length} of segments {segments} is negative"
        raise RunsError(f"{what}; give a length of 0 or more")
    end = length
    for lo, g, n in segments:
        end = max(end, g + n)
        if lo < 0 or g < 0 or n < 0 or lo + n > length:
            what = f"segment {(lo, g, n)} does not fit a local length of {length}"
            fix = f"give (local start, global start, n) >= 0 with local start + n <= {length}"
            raise RunsError(f"{what}; {fix}")
    if end > MOST_POSITIONS:
        what = f"position {end - 1} has more than 63 bits"
        raise RunsError(f"{what}; give positions below {MOST_POSITIONS}")


def _check_disjoint(segments: tuple[Segment, ...], side: int, name: str) -> None:
    """Raise RunsError if two segments overlap on one side: 0 is the local, 1 the global side."""
    order = sorted(segments, key=lambda segment: segment[side])
    for a, b in itertools.pairwise(order):
        if a[side] + a[2] > b[side]:
            ranges = f"{_write_range(a, side)} and {_write_range(b, side)}"
            what = f"{name} ranges {ranges} share position {b[side]}"
            raise RunsError(f"{what}; give each {name} position once")


def _write_range(segment: Segment, side: int) -> str:
    """The positions of a segment on one side as text, such as 0:4."""
    return f"{segment[side]}:{segment[side] + segment[2]}"


def spanning(runs: Runs) -> str:
    """Return `runs` as text in local order, such as `0:2 -1 4:6`: `start:stop` for a range, `-n` for a hole of n."""
    words = []
    at = 0
    for lo, g, n in runs.segments:
        if lo > at:
            words.append(f"-{lo - at}")
        words.append(f"{g}:{g + n}")
        at = lo + n
    if runs.length > at:
        words.append(f"-{runs.length - at}")
    return " ".join(words)


def identity(n: int) -> Runs:
    """Return the Runs (map from local to global positions) of length `n` in which local position i is global position
    i. Raises RunsError for a negative `n`."""
    length = as_integer(n, "the length of an identity", RunsError)
    if length < 0:
        raise RunsError(f"the length of an identity is {length}; give 0 or more")
    if not length:
        return Runs.canonical((), 0)
    return Runs.canonical(((0, 0, length),), length)


def from_ranges(ranges: Iterable[tuple[int, int] | int]) -> Runs:
    """Make a Runs that holds the global ranges [start, stop) one after the other; an integer n is a hole: n local
    positions that hold nothing.

    >>> print(from_ranges([(4, 6), 2, (0, 1)]))
    [4:6 -2 0:1]

    Raises RunsError for a malformed range.
    """
    segments = []
    at = 0
    for item in listed(ranges, "ranges", RunsError):
        start, stop = _check_range(item)
        if isinstance(item, tuple):
            segments.append((at, start, stop - start))
        at += stop - start
    return Runs(segments, at)


def _check_range(item: tuple[int, int] | int) -> tuple[int, int]:
    """(start, stop) of a range, or of a hole as if it began at 0. Raises RunsError."""
    try:
        start, stop = item if isinstance(item, tuple) else (0, item)
    except ValueError:
        what = f"range {item!r} is not (start, stop)"
        raise RunsError(f"{what}; give two integers, or one integer for a hole") from None
    lo = as_integer(start, f"the start of {item!r}", RunsError)
    hi = as_integer(stop, f"the stop of {item!r}", RunsError)
    if hi < lo or lo < 0:
        raise RunsError(f"{start}:{stop} is not a range; give 0 <= start <= stop")
    return lo, hi


def _check_runs(value: object) -> None:
    """Raise RunsError for anything but a Runs."""
    instance(value, Runs, "give Runs, for example shardmath.from_ranges([(0, 5)])", RunsError)


def concat(parts: Iterable[Runs]) -> Runs:
    """Lay `parts` one after the other in local positions; return them as one Runs.

    Raises RunsError if two parts hold the same global position.
    """
    segments: list[Segment] = []
    at = 0
    for part in parts:
        _check_runs(part)
        segments += [(at + lo, g, n) for lo, g, n in part.segments]
        at += part.length
    return Runs(segments, at)


def invert(runs: Runs, n: int) -> Runs:
    """Return the inverse of `runs`: the local position of each global position 0..n-1, a hole if it is not held.

    Raises RunsError if a global position is n or more.
    """
    _check_runs(runs)
    length = as_integer(n, "the length of the dimension", RunsError)
    if runs.extent > length:
        what = f"{runs} reaches position {runs.extent - 1}, but the dimension has {n}"
        raise RunsError(f"{what}; give n >= {runs.extent}")
    swapped = sorted((g, lo, k) for lo, g, k in runs.segments)
    return Runs.canonical(_merge(swapped), length)


def compose(f: Runs, g: Runs) -> Runs:
    """Return the Runs that takes local position i to g(f(i)); a hole if f or g has one there.

    Raises RunsError if f reaches a position that g does not have.
    """
    _check_runs(f)
    _check_runs(g)
    if f.extent > g.length:
        what = f"{f} reaches position {f.extent - 1}, but {g} has a length of {g.length}"
        raise RunsError(f"{what}; compose it with a Runs of length {f.extent} or more")
    if len(g.segments) == 1 and g.segments[0] == (0, 0, g.length):
        return f
    starts = [lo for lo, _, _ in g.segments]
    out: list[Segment] = []
    for lo, mid, n in f.segments:
        # The first segment of g that can overlap [mid, mid + n) is the last one up to mid.
        first = max(0, bisect.bisect_right(starts, mid) - 1)
        for j in range(first, len(starts)):
            start, g_start, k = g.segments[j]
            if start >= mid + n:
                break
            left = max(start, mid)
            right = min(start + k, mid + n)
            if left < right:
                local = lo + left - mid
                position = g_start + left - start
                out.append((local, position, right - left))
    return Runs.canonical(_merge(out), f.length)


def restrict(runs: Runs, lo: int, hi: int) -> Runs:
    """Return `runs` with a hole in place of each local position whose global one is outside [lo, hi)."""
    _check_runs(runs)
    lo = as_integer(lo, "a border", RunsError)
    hi = as_integer(hi, "a border", RunsError)
    kept = []
    for start, g, n in runs.segments:
        left = max(g, lo)
        right = min(g + n, hi)
        if left < right:
            kept.append((start + left - g, left, right - left))
    return Runs.canonical(_merge(kept), runs.length)
