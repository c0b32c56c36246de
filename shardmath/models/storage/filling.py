"""Filling: stored tensors of a rank from logical arrays, and back, cell by cell in numpy.

For people who want to see what a row means, and for tests; nothing here is fast.

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

from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.layout import Layout
from shardmath.models.storage.stored import KnownSide, Slot

__all__ = ["fill", "gather", "view_of"]

_Native: TypeAlias = tuple[int, str]
"""Chunk and name of a stored tensor."""


def fill(
    bound: KnownSide, arrays: Mapping[str, NDArray[Any]], rank: int, empty: float = 0
) -> dict[_Native, NDArray[Any]]:
    """What the rank stores of these logical arrays; cells that are no tensor's have the value `empty`."""
    kinds: dict[_Native, set[np.dtype[Any]]] = {}
    for name, slot, _ in bound.visit(rank):
        native = slot.chunk, slot.native
        kinds.setdefault(native, set()).add(arrays[name].dtype)
    stored: dict[_Native, NDArray[Any]] = {}
    held = _Held(bound, rank)
    # The tensors of one stored tensor share it, each written cell by cell between the others' cells.
    for name, slot, shape in bound.visit(rank):
        native = slot.chunk, slot.native
        if native not in stored:
            # One for all of its tensors.
            kind = np.result_type(*kinds[native])
            stored[native] = np.full(shape, empty, kind)
        view = view_of(stored[native], slot)
        logical = arrays[name]
        cells, elements = held.find(name)
        view[cells] = logical[elements]
    return stored


def gather(
    bound: KnownSide, stored: Mapping[int, Mapping[_Native, NDArray[Any]]], ranks: Iterable[int]
) -> dict[str, NDArray[Any]]:
    """The logical arrays of which these ranks store parts; elements that none of them has are 0."""
    arrays: dict[str, NDArray[Any]] = {}
    for rank in ranks:
        held = _Held(bound, rank)
        for name, slot, _ in bound.visit(rank):
            native = slot.chunk, slot.native
            view = view_of(stored[rank][native], slot)
            if name not in arrays:
                arrays[name] = np.zeros(bound.layouts[name].shape, view.dtype)
            cells, elements = held.find(name)
            arrays[name][elements] = view[cells]
    return arrays


def view_of(native: NDArray[Any], slot: Slot) -> NDArray[Any]:
    """The part of a stored tensor that is one logical tensor's, with the logical order of dimensions."""
    # The dots keep a view where every dimension is a number.
    view = native[(*slot.cut, ...)]
    if slot.order == tuple(range(view.ndim)):
        return view
    return np.transpose(view, np.argsort(slot.order))


class _Held:
    """Where local cells of a rank are that hold elements, and which elements these are."""

    def __init__(self, bound: KnownSide, rank: int) -> None:
        self.bound = bound
        self.rank = rank
        self.found: dict[int, tuple[Any, Any]] = {}

    def find(self, name: str) -> tuple[Any, Any]:
        """Indices of the local view, and of the logical array."""
        layout = self.bound.layouts[name]
        # Layers and experts share one layout, which the binding keeps.
        key = id(layout)
        if key not in self.found:
            self.found[key] = _list_held(layout, self.rank)
        return self.found[key]


def _list_held(layout: Layout, rank: int) -> tuple[Any, Any]:
    """Slices where every dimension holds one stretch, else an index of each cell."""
    runs = layout.runs(rank)
    if all(len(own.segments) == 1 for own in runs):
        return _list_slices(runs)
    cells = []
    elements = []
    for own in runs:
        positions = own.indices()
        held = np.flatnonzero(positions >= 0)
        cells.append(held)
        elements.append(positions[held])
    return np.ix_(*cells), np.ix_(*elements)


def _list_slices(runs: Iterable[Runs]) -> tuple[Any, Any]:
    """The slices of runs of one segment each."""
    cells = []
    elements = []
    for own in runs:
        ((lo, g, n),) = own.segments
        cells.append(slice(lo, lo + n))
        elements.append(slice(g, g + n))
    return tuple(cells), tuple(elements)
