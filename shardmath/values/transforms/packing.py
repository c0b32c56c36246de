"""Packing: a local array without holes, in ascending order of the tensor's positions.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> layout = Layout((4,), Mesh(tp=2), "(tp n)=<2:4 -1 0:2 -1>")
>>> local = np.array([2, 3, -1])
>>> pack(layout, 0, local), pack(layout, 1, np.array([0, 1, -1]))
(array([2, 3]), array([0, 1]))
>>> unpack(layout, 0, np.array([7, 8]), local)
>>> local
array([ 7,  8, -1])
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout
from shardmath.values.formats.elements import Array

__all__ = ["Cells", "find_cells", "pack", "unpack"]

Cells: TypeAlias = tuple[slice | NDArray[np.int64], ...]
"""Local positions of each dimension: a slice if they are one stretch, else an array of them."""


def find_cells(layout: Layout, rank: int) -> Cells:
    """Return, for each dimension, the local positions at which `rank` holds elements, in ascending order of their
    global positions, as a slice or an array."""
    return tuple(map(_find_positions, layout.runs(rank)))


def _find_positions(runs: Runs) -> slice | NDArray[np.int64]:
    """The local positions of a dimension that are not holes, by ascending global position."""
    segments = sorted(runs.segments, key=lambda segment: segment[1])
    if not segments:
        return slice(0, 0)
    if len(segments) == 1:
        local, _, n = segments[0]
        return slice(local, local + n)
    return np.concatenate([np.arange(local, local + n) for local, _, n in segments])


def pack(layout: Layout, rank: int, local: Array) -> Array:
    """Return `local`, the local array of `rank`, without holes (positions without an element), sorted by global
    position in each dimension; a view if possible."""
    packed: Array = local[_index(find_cells(layout, rank), local.shape)]
    return packed


def unpack(layout: Layout, rank: int, packed: Array, out: Array) -> None:
    """Write `packed`, the elements of `rank` in the order in which `pack` returns them, into the local array `out`.
    Holes of `out` (positions without an element of the global tensor) are not changed."""
    out[_index(find_cells(layout, rank), out.shape)] = packed


def _index(cells: Cells, shape: tuple[int, ...]) -> Any:
    """The numpy index of all combinations of these positions."""
    if all(isinstance(positions, slice) for positions in cells):
        return (*cells, ...)  # without the dots, a tensor without dimensions would become a scalar
    arrays = [np.arange(n)[positions] for positions, n in zip(cells, shape, strict=True)]
    return np.ix_(*arrays)
