"""Filling: conversion of logical arrays into a rank's stored tensors, and back, cell by cell in numpy.

It shows what a row means, and serves tests; nothing here is fast.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.models.storage import rows
>>> from shardmath.models.storage.binding import bind
>>> from shardmath.models.storage.stored import Stored
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

from shardmath.base.errors import StoreError
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout
from shardmath.models.storage.arranging import ARRANGEMENTS, arrange
from shardmath.models.storage.stored import KnownSide, Slot

__all__ = ["fill", "gather", "view_of"]

_Native: TypeAlias = tuple[int, str]
"""Chunk and name of a stored tensor."""


def fill(
    bound: KnownSide, arrays: Mapping[str, NDArray[Any]], rank: int, empty: float = 0
) -> dict[_Native, NDArray[Any]]:
    """Return the arrays that `rank` stores, by (virtual stage, name), filled from the logical (checkpoint) tensors
    `arrays`; elements that none of them fills, such as padding, are the number `empty`. Functions of rows that compute
    elements are not applied, those that move elements (`arranging`) are."""
    dtypes: dict[_Native, set[np.dtype[Any]]] = {}
    for name, slot, _ in bound.visit(rank):
        native = slot.chunk, slot.native
        dtypes.setdefault(native, set()).add(arrays[name].dtype)
    stored: dict[_Native, NDArray[Any]] = {}
    arranged: dict[_Native, str] = {}
    finder = _CellFinder(bound, rank)
    # Several logical tensors may share a stored one: each writes only its own cells.
    for name, slot, shape in bound.visit(rank):
        native = slot.chunk, slot.native
        if native not in stored:
            # One dtype for all of its logical tensors.
            dtype = np.result_type(*dtypes[native])
            stored[native] = np.full(shape, empty, dtype)
        view = view_of(stored[native], slot)
        cells, elements = finder.find(name)
        view[cells] = arrays[name][elements]
        if slot.function in ARRANGEMENTS:
            arranged[native] = slot.function
    for native, arrangement in arranged.items():
        stored[native] = arrange(arrangement, stored[native])
    return stored


def gather(
    bound: KnownSide, stored: Mapping[int, Mapping[_Native, NDArray[Any]]], ranks: Iterable[int]
) -> dict[str, NDArray[Any]]:
    """Return the logical (checkpoint) arrays, by name, assembled from the arrays that `ranks` store; elements that no
    rank has are 0. Raises StoreError for a tensor in another order than its row's structure says (`arranging`)."""
    arrays: dict[str, NDArray[Any]] = {}
    for rank in ranks:
        finder = _CellFinder(bound, rank)
        for name, slot, _ in bound.visit(rank):
            native = slot.chunk, slot.native
            if slot.function in ARRANGEMENTS:
                what = f"{slot.native!r} is stored as {slot.function}(...), whose cells are not read back"
                raise StoreError(f"{what}; gather it before it is arranged")
            view = view_of(stored[rank][native], slot)
            if name not in arrays:
                arrays[name] = np.zeros(bound.layouts[name].shape, view.dtype)
            cells, elements = finder.find(name)
            arrays[name][elements] = view[cells]
    return arrays


def view_of(native: NDArray[Any], slot: Slot) -> NDArray[Any]:
    """The part of the stored tensor `native` that `slot` selects, as a view with dimensions in logical order."""
    # With the dots the result is a view even if the cut has only integers.
    view = native[(*slot.cut, ...)]
    if slot.order == tuple(range(view.ndim)):
        return view
    return np.transpose(view, np.argsort(slot.order))


class _CellFinder:
    """Finds the local cells of a rank that hold elements, and these elements."""

    def __init__(self, bound: KnownSide, rank: int) -> None:
        self.bound = bound
        self.rank = rank
        self.known: dict[int, tuple[Any, Any]] = {}

    def find(self, name: str) -> tuple[Any, Any]:
        """Return two index tuples for the elements of the tensor `name` on the rank `rank`, an attribute of this
        object. The first selects them in the rank's part of a stored tensor, the second in the whole logical array."""
        layout = self.bound.layouts[name]
        # Layers and experts share one layout, which lives as long as the binding.
        key = id(layout)
        if key not in self.known:
            self.known[key] = _find_cells(layout, self.rank)
        return self.known[key]


def _find_cells(layout: Layout, rank: int) -> tuple[Any, Any]:
    """Index tuples of the rank's cells, and of the logical elements in them: of slices if every dimension holds one
    segment, otherwise of arrays."""
    runs = layout.runs(rank)
    if all(len(dim_runs.segments) == 1 for dim_runs in runs):
        return _list_slices(runs)
    cells = []
    elements = []
    for dim_runs in runs:
        positions = dim_runs.indices()  # the logical index in each cell, -1 in padding
        filled = np.flatnonzero(positions >= 0)
        cells.append(filled)
        elements.append(positions[filled])
    return np.ix_(*cells), np.ix_(*elements)


def _list_slices(runs: Iterable[Runs]) -> tuple[Any, Any]:
    """The slices of the local view and of the logical array, for runs of one segment per dimension."""
    cells = []
    elements = []
    for dim_runs in runs:
        ((local, position, n),) = dim_runs.segments
        cells.append(slice(local, local + n))
        elements.append(slice(position, position + n))
    return tuple(cells), tuple(elements)
