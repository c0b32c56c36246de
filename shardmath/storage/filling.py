"""Filling: stored tensors of a rank from logical arrays, and back, cell by cell in numpy.

For people who want to see what a row means, and for tests; nothing here is fast.

>>> from shardmath.algebra.mesh import Mesh
>>> from shardmath.storage import rows
>>> from shardmath.storage.binding import bind
>>> from shardmath.storage.stored import Stored
>>> side = Stored(rows.parse("qk.* = [q k].* : (tp (q + k)) h"), (Mesh(tp=2),))
>>> bound = bind(side, {"q.bias": ((4,), "int64"), "k.bias": ((2,), "int64")})
>>> arrays = {"q.bias": np.arange(4), "k.bias": np.array([10, 11])}
>>> fill(bound, arrays, rank=1)
{(0, 'qk.bias'): array([ 2,  3, 11])}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.layouts.layout import Layout
from shardmath.storage.binding import Bound
from shardmath.storage.stored import Slot

__all__ = ["fill", "gather", "view_of"]

_Native: TypeAlias = tuple[int, str]
"""Chunk and name of a stored tensor."""


def fill(
    bound: Bound, arrays: Mapping[str, NDArray[Any]], rank: int, empty: float = 0
) -> dict[_Native, NDArray[Any]]:
    """What the rank stores of these logical arrays; cells that are no tensor's have the value `empty`."""
    dtypes = {array.dtype for array in arrays.values()}
    kind = np.result_type(*dtypes) if dtypes else np.dtype(np.float64)
    stored = {native: np.full(shape, empty, kind) for native, shape in bound.natives(rank).items()}
    # The tensors of one stored tensor share it, each written cell by cell between the others' cells.
    for name, slot in bound.slots(rank).items():
        held, indices = _list_held(bound.layouts[name], rank)
        view_of(stored[slot.chunk, slot.native], slot)[held] = arrays[name][indices]
    return stored


def gather(
    bound: Bound, stored: Mapping[int, Mapping[_Native, NDArray[Any]]], ranks: Iterable[int]
) -> dict[str, NDArray[Any]]:
    """The logical arrays of which these ranks store parts; elements that none of them has are 0."""
    arrays: dict[str, NDArray[Any]] = {}
    for rank in ranks:
        for name, slot in bound.slots(rank).items():
            view = view_of(stored[rank][slot.chunk, slot.native], slot)
            layout = bound.layouts[name]
            if name not in arrays:
                arrays[name] = np.zeros(layout.shape, view.dtype)
            held, indices = _list_held(layout, rank)
            arrays[name][indices] = view[held]
    return arrays


def view_of(native: NDArray[Any], slot: Slot) -> NDArray[Any]:
    """The part of a stored tensor that is one logical tensor's, with the logical order of dimensions."""
    return np.transpose(native[slot.cut], np.argsort(slot.order))


def _list_held(layout: Layout, rank: int) -> tuple[Any, Any]:
    """Where local cells are that hold elements, and which elements these are."""
    globals_ = layout.indices(rank)
    locals_ = [np.flatnonzero(own >= 0) for own in globals_]
    elements = [own[own >= 0] for own in globals_]
    return np.ix_(*locals_), np.ix_(*elements)
