"""Redistribute: a DTensor, or a local tensor with its Layout, to any other layout on any mesh; differentiable.

1. What a DTensor has is asked of it (`from_dtensor`), not of its placements alone; what comes out is a DTensor where
   placements can say it, and else this rank's local tensor.
2. Meshes may be the same, overlap or be disjoint. All ranks of either mesh call, and again for the gradient.
3. The gradient goes from the layout that it arrives in to that of the input, where a Partial input has a Replicate
   gradient, or a Partial one where it arrives so along the same axis of the same mesh, as in torch. With
   `grad="partial"` it is the dual layout: a Replicate input has a Partial gradient, which saves reducing it here.
4. A gradient of another dtype than the input is moved as it is, and cast where it arrives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

from shardmath.base.errors import LayoutError, ShardError
from shardmath.layouts.layout import Layout, equivalent, repartialed
from shardmath.layouts.layout import cast as _of_dtype
from shardmath_torch import compat
from shardmath_torch.agreement.gather import gather
from shardmath_torch.dtensors.devicemesh import group_for, mesh_of
from shardmath_torch.dtensors.dtensor import (
    Reading,
    layout_among,
    layout_like,
    local_of,
    placements_of,
    to_dtensor,
)
from shardmath_torch.dtensors.moves import move_between
from shardmath_torch.dtypes import dtype_of

__all__ = ["Target", "redistribute"]

Target: TypeAlias = Layout | str | Sequence[Placement]
Meshes: TypeAlias = tuple[DeviceMesh | None, DeviceMesh | None]


def redistribute(
    tensor: Tensor,
    target: Target,
    *,
    layout: Layout | None = None,
    device_mesh: DeviceMesh | None = None,
    reading: Reading | None = None,
    grad: Literal["replicate", "partial"] = "replicate",
) -> Tensor:
    """The same tensor under the target: a Layout; or text of one, or DTensor placements, on `device_mesh` (default: the
    tensor's own).

    `layout` says what a plain local tensor is part of; of a DTensor it is found out, where `reading` may help. Returns
    a DTensor if placements of DTensor can stand for the target, otherwise the local tensor.

    A rank that is not on the source's mesh passes an empty tensor, one that is not on the target's gets one, and takes
    part in the backward: `moved.to_local().sum().backward()` does, or that of any other function of it.

    Collective over the ranks of both meshes. The first time among ranks that are neither all nor those of one of the
    DeviceMeshes, it is over the default group, since a process group or a DeviceMesh is made: give `device_mesh` to
    avoid that. Raises LayoutError where shapes, dtypes or readings do not fit, and what `plan` and `compile` raise.
    """
    if grad not in ("replicate", "partial"):
        raise LayoutError(f"grad={grad!r} is unknown; use 'replicate' or 'partial'")
    if not isinstance(tensor, Tensor):
        raise LayoutError(
            f"{type(tensor).__name__} is no tensor; a rank that has no part of it passes torch.empty(0)"
        )
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise LayoutError(
            f"device_mesh is {device_mesh!r}; give torch's DeviceMesh, or a Layout on that mesh as target"
        )
    own = tensor.device_mesh if isinstance(tensor, DTensor) else None
    if not isinstance(target, Layout | Sequence):
        raise LayoutError(
            f"the target is {target!r}; give a Layout, text of one, or a sequence of placements"
        )
    if isinstance(target, str):
        shape, dtype = (
            (layout.shape, layout.dtype)
            if layout is not None
            else (tensor.shape, _name(tensor.dtype))
        )
        target = Layout(shape, mesh_of(_given(device_mesh or own)), target, dtype=dtype)
    if isinstance(target, Layout):
        mesh = device_mesh or (own if own is not None and mesh_of(own) == target.mesh else None)
        src, dst = _source(tensor, layout, reading, target.mesh.ranks, device_mesh), target
        face = _Face(mesh, _placements(dst))
    else:
        mesh = _given(device_mesh or own)
        src = _source(tensor, layout, reading, mesh_of(mesh).ranks, mesh)
        dst, face = _read(src, mesh, target, reading), _Face(mesh, tuple(target))
    if (dst.shape, dst.dtype) != (src.shape, src.dtype):
        here, there = (f"{x.dtype}{list(x.shape)}" for x in (src, dst))
        raise LayoutError(
            f"the tensor is {here}, the target {there}; a move changes neither shape nor dtype"
        )
    route = _Route(src, dst, _face(tensor), face, grad)
    moved: Tensor = _Moved.apply(tensor, route)  # type: ignore[no-untyped-call]
    return moved


def _given(mesh: DeviceMesh | None) -> DeviceMesh:
    if mesh is None:
        raise LayoutError(
            "placements are on a mesh; pass device_mesh= with them, or a Layout as the target"
        )
    return mesh


def _source(
    tensor: Tensor,
    layout: Layout | None,
    reading: Reading | None,
    ranks: Iterable[int],
    mesh: DeviceMesh | None,
) -> Layout:
    if isinstance(tensor, DTensor):
        if layout is not None:
            raise LayoutError(
                "layout= is for plain tensors, a DTensor has its own; leave it out, or pass to_local()"
            )
        return layout_among(tensor, ranks, reading=reading, meshes=[mesh])
    if layout is None:
        raise LayoutError("a plain tensor is part of what? pass layout=, or a DTensor")
    return layout


def _read(
    src: Layout, mesh: DeviceMesh, target: Sequence[Placement], reading: Reading | None
) -> Layout:
    """The layout that the target's placements stand for."""
    found = layout_like(src.shape, mesh, target, src.dtype)
    if reading is not None:
        found = {name: one for name, one in found.items() if name == reading}
    layouts = [one for one in found.values() if isinstance(one, Layout)]
    if not layouts:
        raise next(
            (e for e in found.values() if isinstance(e, ShardError)),
            LayoutError(f"reading={reading!r}"),
        )
    if not all(equivalent(layouts[0], one) for one in layouts[1:]):
        shown = " and ".join(one.text for one in layouts)
        raise LayoutError(
            f"{tuple(target)} has two readings at {src.shape}, {shown}; pass reading=, or a Layout"
        )
    return layouts[0]


class _Face(NamedTuple):
    """How a tensor shows itself: as a DTensor of these placements on a mesh, or as a local tensor where there are none.

    Without a mesh one is made of the layout's.
    """

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] | None


class _Route(NamedTuple):
    src: Layout
    dst: Layout
    source: _Face
    target: _Face
    grad: str

    @property
    def meshes(self) -> Meshes:
        """DeviceMeshes that may have the group of all ranks."""
        return self.source.mesh, self.target.mesh


def _face(tensor: Tensor) -> _Face:
    return (
        _Face(tensor.device_mesh, tensor.placements)
        if isinstance(tensor, DTensor)
        else _Face(None, None)
    )


def _placements(layout: Layout) -> tuple[Placement, ...] | None:
    try:
        return placements_of(layout)
    except ShardError:
        return None


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, route: _Route) -> Tensor:
        ctx.route = route
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        return _shown(_moved(local, route.src, route.dst, route.meshes), route.dst, route.target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        route: _Route = ctx.route
        here = _agreed(_cotangent(gradient, route), route)
        there = _of_dtype(_dual(route.src, here, route.grad), here.dtype)
        face = route.source._replace(placements=_dual_placements(route.source, there))
        # The gradient is a move as well, and recorded as one: it may be differentiated in turn.
        back = _Route(here, there, _face(gradient), face, route.grad)
        moved: Tensor = _Moved.apply(gradient, back)  # type: ignore[no-untyped-call]
        return moved.to(dtype_of(route.src.dtype)), None


def _cotangent(gradient: Tensor, route: _Route) -> Layout | None:
    """The layout that a gradient arrives in; None on a rank that has none of it."""
    if compat.my_rank() not in route.dst.mesh:
        return None
    if isinstance(gradient, DTensor):
        return layout_among(gradient, mesh_of(gradient.device_mesh).ranks)
    return _of_dtype(repartialed(route.dst, ()), _name(gradient.dtype))


def _agreed(mine: Layout | None, route: _Route) -> Layout:
    """The gradient's layout, told to the ranks that have none of it."""
    everyone = {*route.src.mesh.ranks, *route.dst.mesh.ranks}
    if compat.my_rank() not in everyone:
        return route.dst
    if everyone == set(route.dst.mesh.ranks) and mine is not None:
        return mine
    group = group_for(everyone, route.meshes)
    return next(one for one in gather(mine, group) if one is not None)


def _shown(local: Tensor, layout: Layout, face: _Face) -> Tensor:
    if face.placements is None:
        return local
    return to_dtensor(local, layout, device_mesh=face.mesh, placements=face.placements)


def _dual(layout: Layout, gradient: Layout, grad: str) -> Layout:
    """The layout of the gradient of a tensor of this layout, of which it arrives as `gradient`.

    Addends of the gradient that the tensor has, too, are left unreduced: what they go on to may sum them, or need not.
    """
    free = layout.free_axes if grad == "partial" else ()
    op = gradient.op or "sum"
    if layout.mesh != gradient.mesh or (free and op != "sum"):
        return repartialed(layout, free)
    kept = {name for name, _ in layout.partial} & {name for name, _ in gradient.partial}
    return repartialed(layout, {*free, *kept}, op)


def _dual_placements(face: _Face, dual: Layout) -> tuple[Placement, ...] | None:
    """The input's placements, but that its Partial and Replicate ones are what they are in the dual."""
    if face.placements is None:
        return None
    waiting = dict(dual.partial)
    whole = (Partial(waiting[name]) if name in waiting else Replicate() for name in dual.mesh.shape)
    return tuple(
        p if isinstance(p, Shard | _StridedShard) else other
        for p, other in zip(face.placements, whole, strict=True)
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _moved(local: Tensor, src: Layout, dst: Layout, meshes: Meshes) -> Tensor:
    """What this rank holds under `dst` of a tensor of which it holds `local` under `src`."""
    rank = compat.my_rank()
    here, there = rank in src.mesh, rank in dst.mesh
    out = torch.empty(
        dst.local_shape(rank) if there else (0,) * len(dst.shape),
        dtype=dtype_of(dst.dtype),
        device=local.device,
    )
    if there and dst.holes(rank):
        out.zero_()
    move = move_between(src, dst, meshes)
    if move is not None:
        move(local if here else None, out=out if there else None)
    return out
