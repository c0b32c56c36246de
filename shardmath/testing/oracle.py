"""Oracle: the value of local arrays, by global arrays and index lists, without plans."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from shardmath.layouts.layout import Layout
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.proofs.simulate import FOLD, simulate

__all__ = ["Array", "addends", "distribute", "run", "value"]

Array: TypeAlias = NDArray[Any]


def addends(layout: Layout, seed: int = 0) -> list[Array]:
    """Return a list of random global arrays, one per addend (partial value) of the layout, made from `seed`: small
    integers as floats, so that sums are exact."""
    rng = np.random.default_rng(seed)
    count = _count_addends(layout)
    out = []
    for _ in range(count):
        drawn = rng.integers(-8, 9, layout.shape)
        out.append(drawn.astype(float))
    return out


def _count_addends(layout: Layout) -> int:
    """The number of addends of a global value."""
    sizes = [layout.mesh.axis_size(name) for name, _ in layout.partial]
    return math.prod(sizes)


def _list_addends(layout: Layout) -> list[tuple[int, int]]:
    """(rank, the addend that it holds), in mesh order."""
    axes = [name for name, _ in layout.partial]
    held = layout.mesh.coordinate(axes).tolist()
    pairs = zip(layout.mesh.ranks, held, strict=True)
    return list(pairs)


def _index_both(layout: Layout, rank: int) -> tuple[Any, Any]:
    """The local and the global index of the elements that the rank holds."""
    local_index = []
    global_index = []
    for index in layout.indices(rank):
        is_held = index >= 0
        local_index.append(np.flatnonzero(is_held))
        global_index.append(index[is_held])
    return np.ix_(*local_index), np.ix_(*global_index)


def distribute(layout: Layout, values: list[Array], hole: float = 0.0) -> dict[int, Array]:
    """Return a dict, by rank, of local arrays cut by `layout` from `values` (one global array per addend), with `hole`
    at positions without an element."""
    out = {}
    for rank, addend in _list_addends(layout):
        local = np.full(layout.local_shape(rank), hole)
        local_index, global_index = _index_both(layout, rank)
        local[local_index] = values[addend][global_index]
        out[rank] = local
    return out


def value(layout: Layout, shards: Mapping[int, Array]) -> Array:
    """Return the global array that the local arrays `shards` stand for under `layout`. Partial values are reduced in
    mesh order; for an average, their sum is divided by their number."""
    count = _count_addends(layout)
    values = [np.zeros(layout.shape) for _ in range(count)]
    for rank, addend in _list_addends(layout):
        local_index, global_index = _index_both(layout, rank)
        local = shards[rank]
        values[addend][global_index] = local[local_index]
    averaged = layout.op == "avg"
    # Without an operation there is one addend, and nothing is folded.
    op = layout.op or "copy"
    fold = FOLD["sum" if averaged else op]
    out = values[0]
    for other in values[1:]:
        out = fold(out, other)
    return out / count if averaged else out


def run(plan: Plan | Transposed, shards: Mapping[int, Array]) -> dict[int, Array]:
    """Run `simulate` on a plan between two Layouts, with the source's local arrays `shards` by rank; return the
    destination's by rank."""
    return cast(dict[int, Array], simulate(plan, shards))
