"""The cells of a local tensor that are its own, and what happens to them before and after pieces arrive.

Holes (padding, or another tensor's share of a fused buffer) are never touched.

>>> from shardmath.runs import Runs
>>> own_boxes((Runs(((0, 0, 2), (2, 9, 1)), 4),))
((slice(0, 3, None),),)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from shardmath.layout import Layout
from shardmath.plan import Plan
from shardmath.store import local_name
from shardmath.runs import Runs
from shardmath_torch import dtypes

__all__ = ["divide_cells", "fill_cells", "held", "own_boxes"]


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


def fill_cells(plan: Plan, rank: int, dst: Mapping[str, Tensor]) -> None:
    """Destinations that are folded into start at the identity of their reduction."""
    for key, (name, layout) in held(plan.dst, rank).items():
        value = plan.fill(name)
        if value is not None:
            _on_own(layout, rank, dst[key], partial(dtypes.fill, value=value))


def divide_cells(plan: Plan, rank: int, dst: Mapping[str, Tensor]) -> None:
    """Averages are sums until all has arrived."""
    for key, (name, layout) in held(plan.dst, rank).items():
        by = plan.divisor(name)
        if by != 1:
            _on_own(layout, rank, dst[key], partial(dtypes.divide, by=by))


def _on_own(layout: Layout, rank: int, tensor: Tensor, act: Callable[[Tensor], None]) -> None:
    for box in own_boxes(layout.runs(rank)):
        act(tensor.detach()[box])
