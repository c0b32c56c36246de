"""Digits and stages drawn at random, what they keep by definition, and rules of users."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import strategies as st

from shardmath import Runs
from shardmath.layouts.algebra.cuts import BalancedChunks, Chunks, FixedBlock
from shardmath.layouts.algebra.dimension import Dimension, Field
from shardmath.layouts.algebra.runs import from_ranges
from shardmath.layouts.algebra.stages import Digit


@dataclass(frozen=True)
class Halves:
    """Everything to part 0, in the other order; the others nothing."""

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return (from_ranges([(n // 2, n), (0, n // 2)]), *[Runs()] * (parts - 1))


@dataclass(frozen=True)
class Says:
    """A rule that answers anything, and may have meant it."""

    answer: tuple
    overlaps = True

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return self.answer


@st.composite
def digits(draw: st.DrawFn, axis: str) -> Digit:
    """A digit whose cut has as many parts as its axis, or a local one."""
    keeper = draw(st.sampled_from([(), (2,), (3,)]))
    cuts = [
        Chunks(k := (keeper or (draw(st.integers(1, 3)),))[0]),
        BalancedChunks(k),
        FixedBlock(draw(st.integers(1, 4))),
    ]
    return Digit(draw(st.sampled_from(cuts)), (axis,) if keeper else (), keeper)


@st.composite
def stage_lists(draw: st.DrawFn) -> tuple[tuple[Digit, ...], ...]:
    names = iter("abcdefgh")
    return tuple(
        tuple(draw(digits(next(names))) for _ in range(draw(st.integers(0, 3))))
        for _ in range(draw(st.integers(0, 2)))
    )


def by_definition(stage, length: int, coords) -> list[int]:
    """Cut every piece and keep, on lists."""
    pieces = [list(range(length))]
    for digit in stage:
        cut = [
            [
                piece[o : o + n]
                for o, n in (
                    digit.cut.part(len(piece), i) for i in _kept(digit, len(piece), coords)
                )
            ]
            for piece in pieces
        ]
        pieces = [part for parts in cut for part in parts]
    return [i for piece in pieces for i in piece]


def _kept(digit: Digit, length: int, coords) -> list[int]:
    return [digit.coordinate(coords)] if digit.axes else list(range(digit.cut.count(length)))


def coordinates(stages):
    axes = {
        name: n
        for stage in stages
        for digit in stage
        for name, n in zip(digit.axes, digit.sizes, strict=True)
    }
    return [
        dict(zip(axes, at, strict=True)) for at in itertools.product(*map(range, axes.values()))
    ]


def field(n: int, *stage: Digit) -> Dimension:
    return Dimension(n, (Field(n, (stage,)),))
