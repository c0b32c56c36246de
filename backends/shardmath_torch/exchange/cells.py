"""The cells of a local tensor that are its own, and what happens to them before and after pieces arrive.

Holes (padding, or another tensor's share of a fused buffer) are never touched.

>>> from shardmath.algebra.runs import Runs
>>> own_boxes((Runs(((0, 0, 2), (2, 9, 1)), 4),))
((slice(0, 3, None),),)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from shardmath.algebra.runs import Runs
from shardmath.layouts.layout import Layout
from shardmath.layouts.store import local_name
from shardmath.plans.plan import Plan
from shardmath_torch import dtypes

__all__ = ["CellWork", "divisions", "fills", "held", "own_boxes"]


def held(side: Mapping[str, tuple[Layout, ...]], rank: int) -> dict[str, tuple[str, Layout]]:
    """Local buffer key -> (tensor, layout) of all that `rank` stores on this side of a plan."""
    return {
        local_name(name, i, len(windows)): (name, layout)
        for name, windows in side.items()
        for i, layout in enumerate(windows)
        if rank in layout.mesh
    }


def own_boxes(runs: tuple[Runs, ...]) -> tuple[tuple[slice, ...], ...]:
    """The cells that are no holes as boxes of local positions; () once for a scalar."""
    return tuple(itertools.product(*map(_own, runs)))


def _own(runs: Runs) -> list[slice]:
    """Local positions that segments cover, joined where they touch."""
    out: list[slice] = []
    for start, _, n in runs.segments:
        if out and out[-1].stop == start:
            out[-1] = slice(out[-1].start, start + n)
        else:
            out.append(slice(start, start + n))
    return out


class CellWork(NamedTuple):
    """Boxes of the tensor `key` that are all filled with `value`, or all divided by it."""

    key: str
    boxes: tuple[tuple[slice, ...], ...]
    value: complex

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """The cells hold `value`."""
        for box in self.boxes:
            dtypes.fill(tensors[self.key].detach()[box], self.value)

    def divide(self, tensors: Mapping[str, Tensor]) -> None:
        """The cells are divided by `value`."""
        for box in self.boxes:
            dtypes.divide(tensors[self.key].detach()[box], int(self.value.real))


def fills(plan: Plan, rank: int) -> tuple[CellWork, ...]:
    """Destinations that are folded into start at the identity of their reduction."""
    found = ((key, layout, plan.fill(name)) for key, (name, layout) in held(plan.dst, rank).items())
    return tuple(
        _work(key, layout, rank, value) for key, layout, value in found if value is not None
    )


def divisions(plan: Plan, rank: int) -> tuple[CellWork, ...]:
    """Averages are sums until all has arrived, and then divided."""
    found = (
        (key, layout, plan.divisor(name)) for key, (name, layout) in held(plan.dst, rank).items()
    )
    return tuple(_work(key, layout, rank, by) for key, layout, by in found if by != 1)


def _work(key: str, layout: Layout, rank: int, value: complex) -> CellWork:
    return CellWork(key, own_boxes(layout.runs(rank)), value)
