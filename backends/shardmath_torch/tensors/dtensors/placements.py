"""Placements of DTensors as Layouts, and Layouts as placements, from shapes and meshes, without tensors.

1. `layout_of_placements` reads placements in one of the two readings of `shardmath.Layout`: as
   splits, or as an order of splits.
2. `placements_of` finds placements of which one reading is the layout, if there are any. Reading
   them back gives the layout again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias, get_args

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import placement_types as theirs

from shardmath.base.errors import PlacementError, ShardError
from shardmath.base.memo import memo
from shardmath.layouts import placement as ours
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath.layouts.per_axis import find_placements
from shardmath_torch.groups import compat
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
        case compat.StridedShard():
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
    found, _ = find_placements(layout)
    return tuple(map(_translate_back, found))


def _translate_back(placement: ours.Spec) -> theirs.Placement:
    """DTensor's placement for one that `find_placements` returns."""
    match placement:
        case ours.StridedShard():
            return compat.StridedShard(placement.dim, split_factor=placement.split_factor)
        case ours.Shard():
            return theirs.Shard(placement.dim)
        case ours.Partial():
            return theirs.Partial(placement.op)
    return theirs.Replicate()
