"""DTensors as Layouts, and Layouts as DTensors.

1. One tuple of DTensor placements has two readings (`shardmath.Layout`): as splits, which is what `distribute_tensor`
   stores, and as an order of splits, which is what FSDP2 stores and `full_tensor` reads. Where sizes make them differ,
   the local shapes of all ranks say which one a DTensor has: `from_dtensor` asks the ranks of its mesh.
2. Where even all shapes fit both, or none, that is an error; `reading=` says it outright.
3. `to_dtensor` finds placements of which one reading is the layout, if there are any. Reading them back gives the
   layout again.
4. Local tensors are not looked into and not copied.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import placement_types as theirs

from shardmath.algebra.dimension import Chunks, Dimension
from shardmath.algebra.mesh import Mesh, strides
from shardmath.algebra.partition import partition
from shardmath.base.errors import LayoutError, PlacementError, ShardError
from shardmath.base.memo import memo
from shardmath.layouts import placement as ours
from shardmath.layouts.layout import Layout, equivalent
from shardmath_torch import compat
from shardmath_torch.agreement.gather import gather
from shardmath_torch.compat import local_of
from shardmath_torch.dtensors.devicemesh import device_mesh_of, group_for, mesh_of

__all__ = [
    "Reading",
    "from_dtensor",
    "from_dtensors",
    "layout_among",
    "layout_like",
    "local_of",
    "placements_of",
    "readings",
    "to_dtensor",
]

Reading: TypeAlias = Literal["placement", "order"]
Shape: TypeAlias = tuple[int, ...]
Placements: TypeAlias = tuple[theirs.Placement, ...]
_T = TypeVar("_T")


# DTensor -> Layout


def from_dtensor(tensor: DTensor, *, reading: Reading | None = None) -> Layout:
    """What each rank of the mesh really holds of the DTensor.

    Collective over the ranks of its mesh where its placements have two readings that differ at its sizes, unless
    `reading` ("placement" or "order") is given. Raises LayoutError where the local shape, here or on another rank, is
    not the layout's, or fits both readings; PlacementError for placements that stand for nothing of ours.
    """
    if not isinstance(tensor, DTensor):
        raise LayoutError(
            f"{type(tensor).__name__} is no DTensor; a plain tensor's layout is for you to say"
        )
    return layout_among(tensor, mesh_of(tensor.device_mesh).ranks, reading=reading)


def from_dtensors(tensors: Mapping[str, DTensor]) -> dict[str, Layout]:
    """The same of many, by name, asking all ranks of a mesh once.

    Raises what `from_dtensor` does, naming the tensor; only when everybody was asked, so that nobody waits.
    """
    made = {}
    for name, tensor in tensors.items():
        with _named(name):
            made[name] = _possible(tensor)
    everyone: dict[str, dict[int, Shape]] = {}
    for mesh in dict.fromkeys(tensors[name].device_mesh for name in made if len(made[name]) > 1):
        mine = {
            n: tuple(local_of(t).shape)
            for n, t in tensors.items()
            if t.device_mesh == mesh and len(made[n]) > 1
        }
        by_rank = _gathered(mine, mesh.get_all_groups())
        everyone |= {
            name: {rank: shapes[name] for rank, shapes in by_rank.items()} for name in mine
        }
    out = {}
    for name, tensor in tensors.items():
        with _named(name):
            known = everyone.get(name)
            out[name] = (
                _held(tensor, made[name][0])
                if known is None
                else _decided(tensor, made[name], known)
            )
    return out


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Errors that say of which tensor they are."""
    try:
        yield
    except ShardError as error:
        raise type(error)(f"tensor {name!r}: {error}") from error


def _possible(tensor: DTensor) -> list[Layout]:
    """The layouts that the DTensor's placements may stand for, one of those that are alike."""
    found = readings(tensor)
    made = [layout for layout in found.values() if isinstance(layout, Layout)]
    if not made:
        raise next(error for error in found.values() if isinstance(error, ShardError))
    return made[-1:] if all(equivalent(made[0], layout) for layout in made[1:]) else made


def layout_among(
    tensor: DTensor,
    ranks: Iterable[int],
    *,
    reading: Reading | None = None,
    meshes: Iterable[DeviceMesh | None] = (),
) -> Layout:
    """The same, collective over `ranks`, some of which may be outside the DTensor's mesh, where it has to ask.

    One of `meshes` may have the group of all of them. A rank outside asks nobody, and gets one of the two readings.
    """
    if reading is not None:
        return _held(tensor, _chosen(readings(tensor), reading))
    made = _possible(tensor)
    if len(made) == 1:
        return _held(tensor, made[0])
    mesh = tensor.device_mesh
    everyone = {*ranks, *made[0].mesh.ranks}
    apart = None if everyone == set(made[0].mesh.ranks) else [group_for(everyone, meshes)]
    if compat.my_rank() not in everyone:
        return made[0]
    groups = mesh.get_all_groups() if apart is None else apart
    return _decided(tensor, made, _gathered(tuple(local_of(tensor).shape), groups))


def readings(tensor: DTensor) -> dict[Reading, Layout | ShardError]:
    """The layouts that the DTensor's placements may stand for, and why one of them stands for none."""
    spec = compat.spec_of(tensor)
    mesh = mesh_of(tensor.device_mesh)
    _check_said(spec.placements)
    shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if spec.order is not None:
        return {
            "order": _made(
                shape, mesh, _in_order(spec.placements, mesh, spec.order), dtype, "placement"
            )
        }
    return {
        reading: _layout(shape, mesh, spec.placements, dtype, reading) for reading in spec.readings
    }


def _check_said(placements: Placements) -> None:
    """Placements of fused weights that `set_device_mesh` has divided do not say all."""
    for p in placements:
        if isinstance(p, compat.Components) or (
            isinstance(p, compat.EqualComponents) and len(placements) > 1
        ):
            what = f"{placements} are those of a fused weight, whose components no placements say"
            raise PlacementError(
                f"{what}; take layout_of(module), and move the local tensor with layout= and device_mesh="
            )


def layout_like(
    shape: Sequence[int],
    device_mesh: DeviceMesh,
    placements: Iterable[theirs.Placement],
    dtype: object,
) -> dict[Reading, Layout | ShardError]:
    """The layouts of a tensor that `placements` on a DeviceMesh may stand for."""
    mesh, given = mesh_of(device_mesh), tuple(placements)
    name = str(dtype).removeprefix("torch.")
    return {
        reading: _layout(tuple(shape), mesh, given, name, reading) for reading in get_args(Reading)
    }


@memo()
def _layout(
    shape: Shape, mesh: Mesh, placements: Placements, dtype: str, reading: Reading
) -> Layout | ShardError:
    try:
        return _made(shape, mesh, tuple(map(_ours, placements)), dtype, reading)
    except PlacementError as error:
        return error.with_traceback(None)


def _made(shape: Shape, mesh: Mesh, spec: Any, dtype: str, reading: Reading) -> Layout | ShardError:
    try:
        return Layout(shape, mesh, spec, dtype=dtype, reading=reading)
    except ShardError as error:
        return error.with_traceback(None)


def _ours(placement: theirs.Placement) -> ours.Spec:
    """Our placement for one of DTensor's. Raises PlacementError where there is none."""
    match placement:
        case theirs._StridedShard():
            return ours.StridedShard(placement.dim, int(placement.split_factor))
        case theirs.Shard():
            return ours.Shard(placement.dim)
        case theirs.Replicate():
            return ours.Replicate()
        case theirs.Partial() if (
            type(placement) is theirs.Partial and placement.reduce_op in ours.OPS
        ):
            return ours.Partial(placement.reduce_op)
    if isinstance(placement, ours.BuiltIn | ours.Replicate | ours.Partial):
        raise PlacementError(
            f"{placement!r} is shardmath's; give torch's placements, or a Layout of these"
        )
    known = "Shard, _StridedShard, Replicate, and Partial of " + ", ".join(ours.OPS)
    raise PlacementError(
        f"{placement!r} is no placement of ours, which are {known}; redistribute it to one of these"
    )


def _in_order(placements: Placements, mesh: Mesh, order: Sequence[int]) -> dict[str, ours.Spec]:
    """Plain shards by axis, in the order in which they divide; what divides nothing comes first."""
    names = list(mesh.shape)
    rest = [i for i in range(len(names)) if i not in order]
    return {names[i]: _ours(placements[i]) for i in (*rest, *order)}


def _chosen(found: dict[Reading, Layout | ShardError], reading: str) -> Layout:
    if reading not in get_args(Reading):
        raise LayoutError(f"reading={reading!r} is not a reading; use 'placement' or 'order'")
    layout = next((made for name, made in found.items() if name == reading), None)
    if layout is None:
        raise LayoutError(
            f"the DTensor is read by {', '.join(map(repr, found))}, not {reading!r}; leave reading= out"
        )
    if isinstance(layout, ShardError):
        raise layout
    return layout


def _held(tensor: DTensor, layout: Layout) -> Layout:
    """The layout, if this rank's shape is as it says."""
    rank = compat.my_rank()
    if rank in layout.mesh and tuple(local_of(tensor).shape) != layout.local_shape(rank):
        what = f"rank {rank} holds {tuple(local_of(tensor).shape)}, {layout} has {layout.local_shape(rank)} there"
        raise LayoutError(f"{what}; the DTensor was made with another shape or other placements")
    return layout


def _decided(tensor: DTensor, made: list[Layout], shapes: dict[int, Shape]) -> Layout:
    """The one of the layouts that all shapes fit."""
    wrong = {
        layout: next(
            (rank for rank in layout.mesh.ranks if shapes[rank] != layout.local_shape(rank)), None
        )
        for layout in made
    }
    fits = [layout for layout, rank in wrong.items() if rank is None]
    if len(fits) == 1:
        return fits[0]
    placed = f"{tuple(tensor.placements)} of shape {tuple(tensor.shape)}"
    if fits:
        what = f"{placed} has two readings, {' and '.join(layout.text for layout in made)}; all local shapes fit both"
        raise LayoutError(
            f"{what}: pass reading='placement' (distribute_tensor) or 'order' (FSDP2)"
        )
    each = ((x, rank) for x, rank in wrong.items() if rank is not None)
    shown = "; ".join(
        f"rank {rank} holds {shapes[rank]}, {x.text} has {x.local_shape(rank)}" for x, rank in each
    )
    raise LayoutError(
        f"{placed}: {shown}; the DTensor was made with another shape or other placements"
    )


def _gathered(mine: _T, groups: Sequence[dist.ProcessGroup | None]) -> dict[int, _T]:
    """What every rank gives, gathered in one group after the other: those of a mesh's axes reach all of its ranks."""
    found = [(compat.my_rank(), mine)]
    for group in groups:
        found = list(itertools.chain.from_iterable(gather(found, group)))
    return dict(found)


# Layout -> DTensor


def to_dtensor(
    local: Tensor,
    layout: Layout,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[theirs.Placement] | None = None,
) -> DTensor:
    """This rank's part of a tensor as a DTensor of that layout; `local` is part of the graph.

    Without a `device_mesh` one is made of the layout's mesh, which is collective over the default group the first time;
    without `placements` those of `placements_of`. Raises LayoutError for a local shape or dtype that is not the
    layout's, or for another mesh; PlacementError where no placements of DTensor stand for the layout, saying why.
    """
    placements = placements_of(layout) if placements is None else tuple(placements)
    mesh = device_mesh_of(layout.mesh, local.device.type) if device_mesh is None else device_mesh
    if mesh_of(mesh).array().tolist() != layout.mesh.array().tolist():
        raise LayoutError(
            f"the layout is on {layout.mesh}, device_mesh= is {mesh_of(mesh)}; pass one mesh"
        )
    _check_local(local, layout)
    shape = torch.Size(layout.shape)
    made = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=strides(layout.shape)
    )
    if compat.my_rank() not in layout.mesh:
        compat.hold_nothing(made)
    return made


def _check_local(local: Tensor, layout: Layout) -> None:
    rank = compat.my_rank()
    dtype = str(local.dtype).removeprefix("torch.")
    if dtype != layout.dtype:
        raise LayoutError(f"the local tensor is {dtype}, the layout {layout}; cast one of them")
    if rank in layout.mesh and tuple(local.shape) != layout.local_shape(rank):
        raise LayoutError(
            f"rank {rank} gives {tuple(local.shape)}, {layout} has {layout.local_shape(rank)} there"
        )


@memo()
def placements_of(layout: Layout) -> Placements:
    """DTensor placements, one a mesh axis, of which one reading is the layout.

    Raises PlacementError where there are none, saying why.
    """
    out: dict[str, theirs.Placement] = {name: theirs.Replicate() for name in layout.mesh.shape}
    out |= {name: theirs.Partial(op) for name, op in layout.partial}
    readings: set[Reading] = set(get_args(Reading))
    for d, dim in enumerate(layout.dims):
        if dim.axes:
            found, readings = _spelled(layout, d, dim, readings)
            out |= found
        elif dim.stored is not None:
            raise _inexpressible(layout, d, "it stores padding or less than the dimension")
    return tuple(out.values())


def _spelled(
    layout: Layout, d: int, dim: Dimension, readings: set[Reading]
) -> tuple[dict[str, theirs.Placement], set[Reading]]:
    """Placements of the axes that divide a dimension, and the readings by which they say what the layout does."""
    best: tuple[dict[str, theirs.Placement], set[Reading]] = {}, set()
    for factors in _factors(layout.mesh, dim):
        spec = {
            name: ours.Shard(0) if f == 1 else ours.StridedShard(0, f)
            for name, f in factors.items()
        }
        given = tuple(spec.get(name, ours.Replicate()) for name in layout.mesh.shape)
        made = {r: _made((dim.size,), layout.mesh, given, layout.dtype, r) for r in readings}
        right = {
            r
            for r, one in made.items()
            if isinstance(one, Layout) and _alike(one.dims[0], dim, layout.mesh)
        }
        if len(right) > len(best[1]):
            best = {name: _theirs(d, f) for name, f in factors.items()}, right
        if right == readings:
            break
    if not best[1]:
        raise _inexpressible(layout, d, "no Shard or _StridedShard of its axes cuts it so")
    return best


def _theirs(d: int, factor: int) -> theirs.Placement:
    return theirs.Shard(d) if factor == 1 else theirs._StridedShard(d, split_factor=factor)


def _factors(mesh: Mesh, dim: Dimension) -> Iterator[dict[str, int]]:
    """Split factors to try for the axes that divide a dimension: products of digits' sizes, few and small first."""
    names = [name for name in mesh.shape if name in dim.axes]
    local = [
        digit.cut.parts
        for field in dim.fields
        for stage in field.stages
        for digit in stage
        if not digit.axes and isinstance(digit.cut, Chunks)
    ]
    every = [dim.axes[name] for name in names] + local
    products = sorted(
        {
            math.prod(some)
            for n in range(len(every) + 1)
            for some in itertools.combinations(every, n)
        }
    )
    for chosen in sorted(
        itertools.product(products, repeat=len(names)), key=lambda f: (sum(x > 1 for x in f), f)
    ):
        yield dict(zip(names, chosen, strict=True))


def _alike(a: Dimension, b: Dimension, mesh: Mesh) -> bool:
    """Whether every rank holds the same of both."""
    x, y = partition(a), partition(b)
    held = zip(x.by_rank(mesh).tolist(), y.by_rank(mesh).tolist(), strict=True)
    return all(x.parts[i] == y.parts[j] for i, j in set(held))


def _inexpressible(layout: Layout, d: int, why: str) -> PlacementError:
    fix = "keep the local tensor with its Layout, or move it to a layout of Shard"
    return PlacementError(f"DTensor cannot express dimension {d} of {layout}: {why}; {fix}")
