"""Placements of DTensors as Layouts, and Layouts as placements, from shapes and meshes, without tensors.

1. `layout_of_placements` reads placements in one of the two readings of `shardmath.Layout`: as
   splits, or as an order of splits.
2. `placements_of` finds placements of which one reading is the layout, if there are any. Reading
   them back gives the layout again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import placement_types as theirs

from shardmath.base.errors import PlacementError, ShardError
from shardmath.base.memo import memo
from shardmath.layouts import placement as ours
from shardmath.layouts.algebra.cuts import Chunks, FixedBlock
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.algebra.partition import partition
from shardmath.layouts.layout import Layout
from shardmath_torch.tensors.dtensors.devicemesh import mesh_of

__all__ = [
    "Placements",
    "Reading",
    "Shape",
    "layout_in_order",
    "layout_like",
    "layout_of_placements",
    "placements_of",
]

Reading: TypeAlias = Literal["placement", "order"]
Shape: TypeAlias = tuple[int, ...]
Placements: TypeAlias = tuple[theirs.Placement, ...]


# Placements -> Layout


def layout_like(
    shape: Sequence[int],
    device_mesh: DeviceMesh,
    placements: Iterable[theirs.Placement],
    dtype: object,
) -> dict[Reading, Layout | ShardError]:
    """Return a dict from both ways to read `_StridedShard` in `placements` to the resulting layout, or to the error.
    "placement" splits by mesh axes from left to right, "order" in another order of axes, as FSDP2 does.
    """
    size = tuple(shape)
    mesh = mesh_of(device_mesh)
    given = tuple(placements)
    name = str(dtype).removeprefix("torch.")
    both: tuple[Reading, ...] = get_args(Reading)
    return {reading: layout_of_placements(size, mesh, given, name, reading) for reading in both}


@memo()
def layout_of_placements(
    shape: Shape, mesh: Mesh, placements: Placements, dtype: str, reading: Reading
) -> Layout | ShardError:
    """Return the layout that `placements` mean, or the error instead of raising it. With `reading="placement"` they are
    applied as written, with "order" in FSDP2's order.
    """
    try:
        spec = tuple(_translate(placement) for placement in placements)
    except PlacementError as error:
        return error.with_traceback(None)  # as in `_try_layout`
    return _try_layout(shape, mesh, spec, dtype, reading)


def layout_in_order(
    shape: Shape, mesh: Mesh, placements: Placements, dtype: str, order: Sequence[int]
) -> Layout | ShardError:
    """Return the layout of `placements` if the mesh dimensions divide the tensor in this `order`, or the error if they
    then mean no layout.

    Raises PlacementError for a placement that shardmath lacks.
    """
    names = list(mesh.shape)
    idle = [
        i for i in range(len(names)) if i not in order
    ]  # these divide nothing, so they come first
    spec = {names[i]: _translate(placements[i]) for i in (*idle, *order)}
    return _try_layout(shape, mesh, spec, dtype, "placement")


def _try_layout(
    shape: Shape, mesh: Mesh, spec: Any, dtype: str, reading: Reading
) -> Layout | ShardError:
    """The layout, or its error without the traceback, whose frames would keep objects alive in the cache."""
    try:
        return Layout(shape, mesh, spec, dtype=dtype, reading=reading)
    except ShardError as error:
        return error.with_traceback(None)


def _translate(placement: theirs.Placement) -> ours.Spec:
    """The shardmath placement for one of DTensor's. Raises PlacementError if there is none."""
    match placement:
        case theirs._StridedShard():
            return ours.StridedShard(placement.dim, int(placement.split_factor))
        case theirs.Shard():
            return ours.Shard(placement.dim)
        case theirs.Replicate():
            return ours.Replicate()
        case theirs.Partial() if _is_plain_partial(placement):
            return ours.Partial(placement.reduce_op)
    if isinstance(placement, ours.BuiltIn | ours.Replicate | ours.Partial):
        what = f"{placement!r} is a placement of shardmath, where one of torch is needed"
        fix = "pass torch.distributed.tensor's Shard, Replicate or Partial, or a sm.Layout"
        raise PlacementError(f"{what}; {fix}")
    known = "Shard, _StridedShard, Replicate, and Partial of " + ", ".join(ours.OPS)
    what = f"{placement!r} has no counterpart in shardmath, which has {known}"
    raise PlacementError(f"{what}; redistribute the DTensor to one of these first")


def _is_plain_partial(placement: theirs.Partial) -> bool:
    """Whether only the operation defines it, and shardmath has that: torch's subclasses (masked sums) hold more."""
    return type(placement) is theirs.Partial and placement.reduce_op in ours.OPS


# Layout -> placements


@memo()
def placements_of(layout: Layout) -> Placements:
    """Return DTensor placements for `layout`, one per mesh axis. `_StridedShard` can be read in two ways ("placement"
    and "order" of `from_dtensor`); at least one of them gives `layout`.

    Raises PlacementError, with the reason, if there are none.
    """
    by_axis: dict[str, theirs.Placement] = {}
    for name in layout.mesh.shape:
        by_axis[name] = theirs.Replicate()
    for name, op in layout.partial:
        by_axis[name] = theirs.Partial(op)
    readings: set[Reading] = set(get_args(Reading))
    for d, dim in enumerate(layout.dims):
        if dim.axes:
            factors, readings = _find_factors(layout, d, dim, readings)
            for name, factor in factors.items():
                by_axis[name] = _write_shard(d, factor)
        elif dim.stored is not None:
            raise _inexpressible(layout, d, "it stores padding or less than the dimension")
    return tuple(by_axis.values())


def _find_factors(
    layout: Layout, d: int, dim: Dimension, readings: set[Reading]
) -> tuple[dict[str, int], set[Reading]]:
    """Split factors of the axes that divide a dimension, and the readings in which they give the layout.

    The first factors that do so in most of `readings`. Raises PlacementError if none do.
    """
    best: dict[str, int] = {}
    best_readings: set[Reading] = set()
    for factors in _list_factors(layout.mesh, dim):
        right_readings = {
            reading for reading in readings if _gives_layout(layout, dim, factors, reading)
        }
        if len(right_readings) > len(best_readings):
            best, best_readings = factors, right_readings
        if right_readings == readings:
            break
    if not best_readings:
        raise _inexpressible(layout, d, "no Shard or _StridedShard of its axes cuts it so")
    return best, best_readings


def _gives_layout(
    layout: Layout, dim: Dimension, factors: Mapping[str, int], reading: Reading
) -> bool:
    """Whether shards of these factors, in that reading, divide the dimension as the layout does."""
    # The placements of a tensor that has only this dimension.
    spec: list[ours.Spec] = []
    for name in layout.mesh.shape:
        factor = factors.get(name)
        if factor is None:
            spec.append(ours.Replicate())
        elif factor == 1:
            spec.append(ours.Shard(0))
        else:
            spec.append(ours.StridedShard(0, factor))
    made = _try_layout((dim.size,), layout.mesh, tuple(spec), layout.dtype, reading)
    return isinstance(made, Layout) and _holds_same(made.dims[0], dim, layout.mesh)


def _list_factors(mesh: Mesh, dim: Dimension) -> Iterator[dict[str, int]]:
    """Candidate split factors of the axes that divide a dimension: products of digits' sizes, few and small first.

    A digit is one cut of the dimension into parts, of which a rank keeps one, by its coordinate on an axis, or all.
    """
    # A split factor counts parts cut before the axis's own: by other axes, or by digits that ranks keep.
    names = [name for name in mesh.shape if name in dim.axes]
    sizes = [dim.axes[name] for name in names] + _list_local_parts(dim)
    products: set[int] = set()
    for n in range(len(sizes) + 1):
        products.update(math.prod(some) for some in itertools.combinations(sizes, n))
    candidates = itertools.product(sorted(products), repeat=len(names))

    def few_and_small(factors: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        strided = sum(factor > 1 for factor in factors)
        return strided, factors

    for factors in sorted(candidates, key=few_and_small):
        yield dict(zip(names, factors, strict=True))


def _list_local_parts(dim: Dimension) -> list[int]:
    """The numbers of parts of the digits (cuts) that no axis divides: every rank keeps all these parts."""
    parts: list[int] = []
    for field in dim.fields:
        for digit in itertools.chain.from_iterable(field.stages):
            # DTensor splits as torch.chunk does, which blocks of equal lengths may do, too. Other cuts are not tried,
            # nor blocks dealt to several axes: torch's `full_tensor` is wrong for many of those placements.
            cuts = Chunks | FixedBlock if len(dim.axes) == 1 else Chunks
            if not digit.axes and isinstance(digit.cut, cuts):
                parts.append(digit.cut.count(dim.size))
    return parts


def _holds_same(a: Dimension, b: Dimension, mesh: Mesh) -> bool:
    """Whether every rank holds the same positions of both dimensions."""
    first, second = partition(a), partition(b)
    parts_of_ranks = zip(first.by_rank(mesh).tolist(), second.by_rank(mesh).tolist(), strict=True)
    return all(first.parts[i] == second.parts[j] for i, j in set(parts_of_ranks))


def _write_shard(d: int, factor: int) -> theirs.Placement:
    """DTensor's shard of dimension d with that split factor; a plain one for 1."""
    if factor == 1:
        return theirs.Shard(d)
    return theirs._StridedShard(d, split_factor=factor)


def _inexpressible(layout: Layout, d: int, why: str) -> PlacementError:
    fix = "keep the local tensor with its Layout, or move it to a layout of Shard"
    return PlacementError(f"DTensor cannot express dimension {d} of {layout}: {why}; {fix}")
