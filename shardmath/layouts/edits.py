"""Edits: layouts made from another layout, of the same local tensors or with other labels.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> layout = Layout((9, 4), Mesh(tp=2), "(tp n) h")
>>> print(window(layout, ((2, 6), (0, 4))))
float32[9, 4] (tp n)=<-2 2:6 -3> h on tp=2
>>> print(sliced(layout, ((2, 6), (0, 4))))
float32[4, 4] (tp n)=<-2 0:4 -3> h on tp=2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast as typed

from shardmath.base import dtypes
from shardmath.base.arguments import as_integer, instance, listed
from shardmath.base.errors import LayoutError
from shardmath.layouts.algebra.box import Box, shape
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.runs import Runs, identity, restrict
from shardmath.layouts.layout import Layout, intern

__all__ = ["cast", "relabeled", "repartialed", "sliced", "transposed", "window"]


def repartialed(layout: Layout, axes: Iterable[str], op: str = "sum") -> Layout:
    """Return a copy of `layout` in which `axes` are the only Partial mesh axes. Ranks along these axes each hold one
    term of every element; the tensor is the terms reduced by `op`."""
    named = set(axes)
    mesh = layout.mesh
    partial = tuple((name, op) for name in mesh.shape if name in named)
    return intern(layout.shape, layout.dtype, mesh, layout.dims, partial)


def cast(layout: Layout, dtype: object) -> Layout:
    """Return the layout with elements of another `dtype`. Raises LayoutError for an unknown dtype."""
    _check_layout(layout)
    name = dtypes.canonical(dtype)
    return intern(layout.shape, name, layout.mesh, layout.dims, layout.partial)


def relabeled(layout: Layout, ranks: Mapping[int, int]) -> Layout:
    """Return the layout with ranks renumbered by `ranks` (old -> new); other ranks keep their numbers.

    Raises MeshError if two ranks get one number.
    """
    _check_layout(layout)
    mesh = layout.mesh.relabel(ranks)
    return intern(layout.shape, layout.dtype, mesh, layout.dims, layout.partial)


def transposed(layout: Layout, order: Sequence[int]) -> Layout:
    """Return the layout of the tensor with its dimensions in the given `order`, as torch.permute reads it.

    Raises LayoutError unless each dimension is named once.
    """
    _check_layout(layout)
    given = listed(order, "dimensions", LayoutError)
    new = tuple(as_integer(d, "a dimension", LayoutError) for d in given)
    if sorted(new) != list(range(layout.ndim)):
        raise LayoutError(
            f"cannot put the dimensions of shape {layout.shape} in the order {new}; "
            f"give each of {tuple(range(layout.ndim))} once"
        )
    shape = tuple(layout.shape[d] for d in new)
    dims = tuple(layout.dims[d] for d in new)
    return intern(shape, layout.dtype, layout.mesh, dims, layout.partial)


def window(layout: Layout, box: Box) -> Layout:
    """Return `layout` with only the elements inside `box`, one (start, stop) per dimension; local tensors keep their
    shapes, with holes for other elements.

    Raises LayoutError for a box that is not inside the tensor.
    """
    box = _read_box(layout, box)
    dims = []
    for dim, (lo, hi) in zip(layout.dims, box, strict=True):
        kept = _restrict_stored(dim, lo, hi)
        dims.append(Dimension(dim.size, dim.fields, kept))
    return intern(layout.shape, layout.dtype, layout.mesh, tuple(dims), layout.partial)


def sliced(layout: Layout, box: Box) -> Layout:
    """Return the layout of a slice of the tensor, as a separate tensor of the slice's shape. `box` has a (start, stop)
    per dimension; local tensors keep their shapes, with padding (holes) outside the slice.

    Raises LayoutError for a box that is not inside the tensor.
    """
    box = _read_box(layout, box)
    dims = []
    for dim, (lo, hi) in zip(layout.dims, box, strict=True):
        kept = _restrict_stored(dim, lo, hi)
        # The slice counts positions from its beginning.
        segments = [(local, g - lo, n) for local, g, n in kept.segments]
        stored = Runs(segments, len(kept))
        length = hi - lo
        dims.append(Dimension(length, dim.fields, stored))
    sizes = shape(box)
    return intern(sizes, layout.dtype, layout.mesh, tuple(dims), layout.partial)


def _restrict_stored(dim: Dimension, lo: int, hi: int) -> Runs:
    """The stored positions of the dimension that are in [lo, hi), with holes for all others."""
    stored = identity(dim.size) if dim.stored is None else dim.stored
    return restrict(stored, lo, hi)


def _check_layout(layout: object) -> None:
    instance(layout, Layout, "give a shardmath.Layout", LayoutError)


def _read_box(layout: Layout, box: Box) -> Box:
    """The box in Python's integers. Raises LayoutError unless it is inside the layout's tensor."""
    _check_layout(layout)
    spans = []
    for span in listed(box, "spans", LayoutError):
        borders = listed(span, "the start and stop of a box", LayoutError)
        spans.append(borders)
    what = f"a border of box {spans}"
    spans_read = []
    for borders in spans:
        integers = tuple(as_integer(border, what, LayoutError) for border in borders)
        spans_read.append(integers)
    if len(spans_read) != layout.ndim or not all(map(_is_inside, spans_read, layout.shape)):
        raise LayoutError(
            f"box {box} is not inside shape {layout.shape}; give one (start, stop) in it per dimension"
        )
    return typed(Box, tuple(spans_read))


def _is_inside(span: tuple[int, ...], n: int) -> bool:
    return len(span) == 2 and 0 <= span[0] <= span[1] <= n
