"""Holdings: what each rank holds, spelled in one way however the layout was.

1. Layouts are **equivalent** if every rank holds the same elements in the same order, and, where Partial
   axes wait, the same addend. An axis of size 1, and a Partial over one rank, say nothing.
2. What ranks hold is a product over dimensions: the distinct parts of each, and which part is whose.
   Parts are numbered by the lowest rank that holds them, so that mesh order does not matter.
3. A digest is kept in its parts (of a dimension, of positions, of ranks), since the tensors of a model
   share them.

>>> from shardmath.algebra.mesh import Mesh
>>> one = Layout((8, 4), Mesh(dp=2, tp=2), "(dp tp n) h")
>>> equivalent(one, Layout((8, 4), Mesh(dp=4), "(dp n) h"))
True
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from shardmath.algebra.dimension import Dimension
from shardmath.algebra.mesh import Mesh
from shardmath.algebra.partition import partition
from shardmath.algebra.runs import Runs
from shardmath.base.arguments import instance
from shardmath.base.digest import digest
from shardmath.base.errors import LayoutError
from shardmath.base.memo import memo
from shardmath.layouts.layout import Layout

__all__ = ["equivalent", "holdings_digest"]

_Order: TypeAlias = tuple[int, ...] | None
"""An order of positions; None for as they are."""


def equivalent(a: Layout, b: Layout) -> bool:
    """Whether every rank holds the same of the same tensor, in the same order, under both layouts."""
    for x in (a, b):
        instance(x, Layout, "equivalent compares two layouts", LayoutError)
    return a is b or _spell(a) == _spell(b)


def holdings_digest(layout: Layout) -> tuple[str, str]:
    """Digests of what ranks hold, addends included, and of the ranks; the same for every spelling."""
    if layout._digest is None:
        order, ranks = _digest_ranks(layout.mesh)
        held = _digest_positions(layout.form, order)
        object.__setattr__(layout, "_digest", (held, ranks))
    return layout._digest  # type: ignore[return-value]


def _spell(layout: Layout) -> tuple[object, ...]:
    """What each rank holds, in ascending order of ranks, and the ranks."""
    form = layout.form
    order, ranks = _sort_ranks(layout.mesh)
    mesh = form.mesh
    dims = tuple(_number_parts(dim, mesh, order) for dim in form.dims)
    addends = _list_addends(form, order)
    return form.shape, form.dtype, dims, addends, ranks


def _sort_ranks(mesh: Mesh) -> tuple[_Order, tuple[int, ...]]:
    """The order of positions by ascending rank, None if they are so, and the ranks."""
    ascending = tuple(sorted(mesh.ranks))
    if ascending == mesh.ranks:
        return None, ascending
    return tuple(np.argsort(mesh.ranks).tolist()), ascending


def _list_addends(form: Layout, order: _Order) -> tuple[object, ...]:
    """What the Partial axes wait for, and the addend of each position; nothing for one addend."""
    if not form.partial:
        return ()
    names = [name for name, _ in form.partial]
    addend = form.mesh.coordinate(names)
    if not addend.any():
        return ()
    if order is not None:
        addend = addend[list(order)]
    return (form.op, *addend.tolist())


_Numbered: TypeAlias = tuple[tuple[Runs, ...], tuple[int, ...]]
"""Parts, and the number of each position's part."""


@memo()
def _number_parts(dim: Dimension, mesh: Mesh, order: _Order) -> _Numbered:
    """The parts in the order of the first position that holds them, and each position's number.

    No numbers for one part, so that a dimension that nothing divides is alike on all meshes.
    """
    parts = partition(dim)
    if len(parts.parts) == 1:
        return parts.parts, ()
    part_of = parts.by_rank(mesh)
    if order is not None:
        part_of = part_of[list(order)]
    held = part_of.tolist()
    # A dict keeps the order in which its keys first came.
    number = {part: i for i, part in enumerate(dict.fromkeys(held))}
    numbered = tuple(parts.parts[part] for part in number)
    return numbered, tuple(map(number.__getitem__, held))


@memo()
def _digest_dimension(dim: Dimension, mesh: Mesh, order: _Order) -> str:
    return digest(_number_parts(dim, mesh, order))


@memo()
def _digest_positions(form: Layout, order: _Order) -> str:
    """A digest of what the positions hold, in this order."""
    mesh = form.mesh
    dims = tuple(_digest_dimension(dim, mesh, order) for dim in form.dims)
    addends = _list_addends(form, order)
    return digest((form.shape, form.dtype, mesh.size, dims, addends))


@memo()
def _digest_ranks(mesh: Mesh) -> tuple[_Order, str]:
    """The order of positions by ascending rank, None if they are so, and a digest of the ranks."""
    order, ascending = _sort_ranks(mesh)
    return order, digest(ascending)
