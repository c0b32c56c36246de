"""Settling: from which length on the parts of a dimension grow linearly, period by period.

Let a dimension of any length n be divided by `Chunks` and `BalancedChunks`, M the product of the parts of all cuts.
There is a length N from which on, among lengths that are equal modulo M, each rank keeps the same number of ranges, and
their borders are linear functions of n. So two borders, of one layout or of two, that are equal at two such lengths are
equal at all greater ones, and the lengths below N + 2 M decide for all n. docs/every-size.md has the theorem's proof;
`grow` computes M and N along it.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> grow(Layout((8,), Mesh(dp=4, tp=2), "(tp dp n)").dims[0].fields[0].stages)
Growth(period=8, settled=26)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from shardmath.layouts.algebra.cuts import BalancedChunks, Chunks
from shardmath.layouts.algebra.stages import Digit, Stage

__all__ = ["Growth", "grow"]


class Growth(NamedTuple):
    """How parts grow with the length n of their dimension: from n = `settled` on, each `period` of n moves every border
    by the same number of positions."""

    period: int
    settled: int

    @property
    def deciding(self) -> int:
        """The number of lengths, 0, 1, 2, ..., that decide for all lengths."""
        return self.settled + 2 * self.period

    def join(self, other: Growth) -> Growth:
        """Return the growth of two dimensions, or of two divisions of one, looked at together."""
        return Growth(math.lcm(self.period, other.period), max(self.settled, other.settled))


class _Held(NamedTuple):
    """What a rank holds after some stages: `n / share` positions, up to `slack`.

    The borders of its ranges, in its own positions, are multiples of `n / grid`, up to `shift`.
    """

    share: int = 1
    slack: int = 0
    grid: int = 1
    shift: int = 0


def grow(stages: Iterable[Stage]) -> Growth:
    """Return from which length on, and with which period, the parts of a dimension divided by `stages` grow linearly.
    All cuts must be `Chunks` or `BalancedChunks`."""
    period = 1
    settled = 1  # of length 0, ranks keep no range
    held = _Held()
    for number, stage in enumerate(stages):
        cut, held = _settle_stage(stage, held, is_first=number == 0)
        settled = max(settled, cut)
        period *= math.prod(_count_parts(digit) for digit in stage)
    return Growth(period, settled)


def _settle_stage(stage: Stage, held: _Held, *, is_first: bool) -> tuple[int, _Held]:
    """The length from which on a stage is settled that divides what is held, and what is held after it."""
    settled = 0
    share, slack = held.share, held.slack
    kept = 1  # pieces that a rank keeps
    rounding = held.slack  # by how much a border may be off
    for digit in stage:
        parts = _count_parts(digit)
        settled = max(settled, share * (_least(digit, parts) + slack))
        share *= parts
        slack = -(-slack // parts) + parts - 1
        rounding += parts - 1
        if not digit.axes:
            kept *= parts
    grid = math.lcm(held.grid, share)
    shift = kept * slack
    if not is_first:
        # The stage's own borders against those of the ranges that it divides: unless they stand in the same proportion
        # to n, they are n / grid apart or more, up to what each is off.
        settled = max(settled, grid * (rounding + held.shift) + 1)
        shift += rounding + held.shift
    return settled, _Held(share // kept, kept * slack, grid, shift)


def _count_parts(digit: Digit) -> int:
    """The number of parts of a cut that has the same number for every length."""
    cut = digit.cut
    assert isinstance(cut, Chunks | BalancedChunks), "other cuts have no growth"
    return cut.parts


def _least(digit: Digit, parts: int) -> int:
    """The length of a piece from which on no part is empty, and the parts are in the same order of sizes."""
    return parts * (parts - 1) if isinstance(digit.cut, Chunks) else parts
