"""Redistribute: a DTensor, or a local tensor with its Layout, to any other layout on any mesh; differentiable.

1. The layout of a DTensor is found by `from_dtensor`, not from its placements only; the result is a
   DTensor if placements can express it, else this rank's local tensor.
2. Meshes may be the same, overlap or be disjoint. All ranks of either mesh call, and again for the
   gradient.
3. The gradient moves from the layout that it arrives in to the input's layout. A Partial input has a
   Replicate gradient, or a Partial one if it arrives Partial along the same axis of the same mesh,
   as in torch. With `grad="partial"` the gradient has the dual layout: a Replicate input has a
   Partial gradient, which saves reducing it here.
4. A gradient of another dtype than the input is moved in its dtype, and then cast.
5. The move of a gradient names the forward move that it belongs to, so that gradients of two tensors
   are never mixed if ranks differentiate different functions.
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
)

from shardmath.base.errors import LayoutError, ShardError
from shardmath.layouts.edits import cast as _of_dtype
from shardmath.layouts.edits import repartialed
from shardmath.layouts.holdings import equivalent
from shardmath.layouts.layout import Layout
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import gather
from shardmath_torch.groups.dtypes import dtype_of
from shardmath_torch.tensors.dtensors.devicemesh import group_for, mesh_of
from shardmath_torch.tensors.dtensors.dtensor import layout_among, local_of, to_dtensor
from shardmath_torch.tensors.dtensors.moves import SILENT, Said, move_between
from shardmath_torch.tensors.dtensors.placed import check_said
from shardmath_torch.tensors.dtensors.placements import Reading, layout_like, placements_of

__all__ = ["Target", "redistribute"]

Target: TypeAlias = Layout | str | Sequence[Placement]
Meshes: TypeAlias = tuple[DeviceMesh | None, DeviceMesh | None]


@compat.untraced
def redistribute(
    tensor: Tensor,
    target: Target,
    *,
    layout: Layout | None = None,
    device_mesh: DeviceMesh | None = None,
    reading: Reading | None = None,
    grad: Literal["replicate", "partial"] = "replicate",
) -> Tensor:
    """Return `tensor` (a DTensor, or a local tensor of `layout`) moved to the layout `target`: a DTensor on
    `device_mesh`, or a local tensor if DTensor has no placements for `target`. The backward moves the gradient back;
    with `grad="partial"`, a replicated input gets partial sums as its gradient. `reading` chooses how to read ambiguous
    `_StridedShard` placements: "placement" splits by mesh axes from left to right, "order" in another order, as FSDP2
    does.

    `target` is a Layout, the text of one, or DTensor placements; text and placements are on `device_mesh` (default: the
    tensor's own). `tensor` is a DTensor, whose layout is determined (`reading` decides if it has two), or this rank's
    local tensor of the Layout `layout`. `grad` is the form of a replicated input's gradient: "replicate", the same on
    all ranks, or "partial", partial sums. The result is on `device_mesh` (default: the mesh of a Layout `target`, else
    of `tensor`).

    A rank outside the source's mesh passes an empty tensor. A rank outside the target's mesh gets an
    empty tensor (for a scalar, a DTensor that holds a zero), and must take part in the backward, by
    `moved.to_local().sum().backward()` or the backward of any other function of it. All ranks
    differentiate the same moves. If gradients are differentiated again (`create_graph=True`), use
    one function on all ranks: if the gradient depends on other tensors on only some of them, ranks
    disagree, which raises ExchangeError.

    Collective over the ranks of both meshes. The first time among ranks that are neither all ranks
    nor the ranks of one of the DeviceMeshes, it is over the default group, since a process group or
    a DeviceMesh is made: give `device_mesh` to avoid that. Raises LayoutError if shapes, dtypes or
    readings do not fit, PlacementError if tensor or target have the placements of a fused weight
    (`set_device_mesh`) without being known as one, and what `plan` and `compile` raise.
    """
    _check_arguments(tensor, target, device_mesh, grad)
    tensor_mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
    if isinstance(target, str):
        target = _read_text(target, tensor, layout, device_mesh or tensor_mesh)
    if isinstance(target, Layout):
        dst = target
        src = _find_source(tensor, layout, reading, dst.mesh.ranks, device_mesh)
        if device_mesh is None and tensor_mesh is not None and mesh_of(tensor_mesh) == dst.mesh:
            device_mesh = tensor_mesh
        result = _Form(device_mesh, _try_placements(dst))
    else:
        mesh = _require_mesh(device_mesh or tensor_mesh)
        src = _find_source(tensor, layout, reading, mesh_of(mesh).ranks, mesh)
        dst = _read_placements(src, mesh, target, reading)
        result = _Form(mesh, tuple(target))
    _check_same_tensor(src, dst)
    route = _Route(src, dst, _form_of(tensor), result, grad)
    moved: Tensor = _Redistribution.apply(tensor, route)  # type: ignore[no-untyped-call]
    return moved


# Arguments


def _check_arguments(tensor: object, target: object, device_mesh: object, grad: str) -> None:
    """Raise LayoutError for an argument of a wrong type or value."""
    if grad not in ("replicate", "partial"):
        raise LayoutError(f"grad={grad!r} is unknown; pass 'replicate' or 'partial'")
    if not isinstance(tensor, Tensor):
        fix = "pass a torch.Tensor, torch.empty(0) on a rank that has no part"
        raise LayoutError(f"tensor= is {type(tensor).__name__}, which is not a tensor; {fix}")
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        fix = "pass torch's DeviceMesh, or a sm.Layout on that mesh as target"
        raise LayoutError(f"device_mesh= is {device_mesh!r}, which is not a DeviceMesh; {fix}")
    if not isinstance(target, Layout | Sequence):
        fix = "pass a sm.Layout, its text, or a sequence of torch's placements"
        raise LayoutError(f"target= is {target!r}, which is not a layout; {fix}")


def _check_same_tensor(src: Layout, dst: Layout) -> None:
    """Raise LayoutError unless both are layouts of one shape and dtype."""
    if (dst.shape, dst.dtype) == (src.shape, src.dtype):
        return
    given = f"{src.dtype}{list(src.shape)}"
    wanted = f"{dst.dtype}{list(dst.shape)}"
    fix = "pass a target of the tensor's shape and dtype"
    raise LayoutError(f"the tensor is {given}, but the target is {wanted}; {fix}")


def _require_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh for a target of text or placements. Raises LayoutError if there is none."""
    if mesh is None:
        what = "the target is text or placements without a mesh, and the tensor is not a DTensor"
        raise LayoutError(f"{what}; pass device_mesh=, or a sm.Layout as target")
    return mesh


def _read_text(text: str, tensor: Tensor, layout: Layout | None, mesh: DeviceMesh | None) -> Layout:
    """The layout that the text spells, for a tensor of this shape and dtype, or of `layout`'s."""
    if layout is not None:
        shape, dtype = layout.shape, layout.dtype
    else:
        shape, dtype = tuple(tensor.shape), _name_dtype(tensor.dtype)
    return Layout(shape, mesh_of(_require_mesh(mesh)), text, dtype=dtype)


def _find_source(
    tensor: Tensor,
    layout: Layout | None,
    reading: Reading | None,
    ranks: Iterable[int],
    mesh: DeviceMesh | None,
) -> Layout:
    """The layout of the tensor: as given, or of a DTensor, determined together with `ranks`."""
    if isinstance(tensor, DTensor):
        if layout is not None:
            what = f"layout={layout} is given with a DTensor, which has its own layout"
            raise LayoutError(f"{what}; leave layout= out, or pass tensor.to_local()")
        return layout_among(tensor, ranks, reading=reading, meshes=[mesh])
    if layout is None:
        what = f"the tensor is plain, of shape {tuple(tensor.shape)}, and its layout is not given"
        raise LayoutError(f"{what}; pass layout=, or pass a DTensor")
    return layout


def _read_placements(
    src: Layout, mesh: DeviceMesh, target: Sequence[Placement], reading: Reading | None
) -> Layout:
    """The layout that the target's placements stand for."""
    found = _list_readings(src, mesh, target, reading)
    layouts = [result for result in found if isinstance(result, Layout)]
    if not layouts:
        raise next(result for result in found if isinstance(result, ShardError))
    first = layouts[0]
    if not all(equivalent(first, other) for other in layouts[1:]):
        texts = " and ".join(layout.text for layout in layouts)
        what = f"target {tuple(target)} can mean two layouts of shape {src.shape}, {texts}"
        raise LayoutError(f"{what}; pass reading='placement' or reading='order', or a sm.Layout")
    return first


def _list_readings(
    src: Layout, mesh: DeviceMesh, target: Sequence[Placement], reading: Reading | None
) -> list[Layout | ShardError]:
    """The layouts that the target's placements may stand for, in the given reading or in both, or their errors."""
    found = layout_like(src.shape, mesh, target, src.dtype)
    if reading is None:
        check_said(mesh_of(mesh), target)  # raises for a fused weight's placements
        return list(found.values())
    if reading not in found:
        raise LayoutError(f"reading={reading!r} is unknown; pass 'placement' or 'order'")
    return [found[reading]]


def _try_placements(layout: Layout) -> tuple[Placement, ...] | None:
    """Placements that stand for the layout; None if there are none."""
    try:
        return placements_of(layout)
    except ShardError:
        return None


class _Form(NamedTuple):
    """The form of a tensor: a DTensor of these placements on a mesh, or without placements a local tensor.

    Without a DeviceMesh, one is made for the layout's mesh.
    """

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] | None


def _form_of(tensor: Tensor) -> _Form:
    if isinstance(tensor, DTensor):
        return _Form(tensor.device_mesh, tensor.placements)
    return _Form(None, None)


# The move, and its gradient


class _Route(NamedTuple):
    """A move from layout to layout, and the forms of the tensors at its two ends.

    `said` describes the move of a gradient; `voted` makes ranks vote on it even if they only copy.
    """

    src: Layout
    dst: Layout
    source: _Form
    target: _Form
    grad: str
    said: Said = SILENT
    voted: bool = False

    @property
    def meshes(self) -> Meshes:
        """The DeviceMeshes of the source and the target, each None if unknown, in which to look for a process group of
        all ranks of the move.
        """
        return self.source.mesh, self.target.mesh


class _Redistribution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, route: _Route) -> Tensor:
        local = local_of(tensor) if isinstance(tensor, DTensor) else tensor
        moved, name = _move(local, route)
        ctx.route, ctx.name, ctx.shape, ctx.device = route, name, tensor.shape, local.device
        ctx.set_materialize_grads(False)  # zeros of a DTensor would have its global shape
        # Activation checkpointing recomputes a forward when a saved tensor is unpacked. This one is
        # collective, so all ranks must recompute it: all save something. Without checkpointing
        # nothing is saved, so that a graph may be traversed twice.
        ctx.is_made_again = compat.packs_saved_tensors()
        if ctx.is_made_again:
            ctx.save_for_backward(local.new_empty(0))
        form = route.target
        if form.placements is None:
            return moved
        return to_dtensor(moved, route.dst, device_mesh=form.mesh, placements=form.placements)

    @staticmethod
    @compat.untraced
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor, None]:
        if ctx.is_made_again:
            # Unpacks what `forward` saved, so that all ranks recompute the forward.
            _ = ctx.saved_tensors
        route: _Route = ctx.route
        given = _make_zeros(route.dst, ctx.device) if gradient is None else gradient
        arriving = _agree_on(_layout_of_gradient(given, route), route)
        dual = _of_dtype(_dual_of(route.src, arriving, route.grad), arriving.dtype)
        form = route.source._replace(placements=_dual_placements(route.source, dual))
        # The gradient's move is recorded by autograd, too, as it may be differentiated again. A rank records
        # it if its gradient depends on other tensors, so all ranks vote on whether it does.
        is_recorded = torch.is_grad_enabled()
        said = Said(f"the gradient of {ctx.name}", is_recorded and given.requires_grad)
        given_form = _form_of(given)
        if given_form.mesh is None:
            # A plain gradient moves over the given mesh's group, too.
            given_form = given_form._replace(mesh=route.target.mesh)
        back = _Route(arriving, dual, given_form, form, route.grad, said, voted=is_recorded)
        moved: Tensor = _Redistribution.apply(given, back)  # type: ignore[no-untyped-call]
        if form.placements is None and compat.my_rank() not in dual.mesh:
            # Autograd needs the shape of the empty input; adding the sum, 0, keeps the move in the graph.
            moved = moved.new_zeros(ctx.shape) + moved.sum()
        return moved.to(dtype_of(route.src.dtype)), None


def _move(local: Tensor, route: _Route) -> tuple[Tensor, str]:
    """Move `local` along the route. Returns this rank's local tensor at its end, and the move's name."""
    src, dst = route.src, route.dst
    rank = compat.my_rank()
    receives = rank in dst.mesh
    # A move leaves holes, such as padding, as they are: only then zeros have to be written before.
    out = _make_zeros(dst, local.device, filled=receives and bool(dst.holes(rank)))
    move = move_between(src, dst, route.meshes, voted=route.voted)
    if move is None:
        return out, ""
    given = local if rank in src.mesh else None
    name = move(given, out=out if receives else None, said=route.said)
    return out, name


def _make_zeros(layout: Layout, device: torch.device, *, filled: bool = True) -> Tensor:
    """A local tensor of the layout on this rank; outside the mesh an empty one, even for a scalar. Its memory is
    uninitialized unless it is to be `filled` with zeros."""
    rank = compat.my_rank()
    outside = (0,) * max(1, len(layout.shape))
    shape = layout.local_shape(rank) if rank in layout.mesh else outside
    make = torch.zeros if filled else torch.empty
    return make(shape, dtype=dtype_of(layout.dtype), device=device)


def _layout_of_gradient(gradient: Tensor, route: _Route) -> Layout | None:
    """The layout that a gradient arrives in; None on a rank outside its mesh."""
    if compat.my_rank() not in route.dst.mesh:
        return None
    if isinstance(gradient, DTensor):
        # The layout of the target's placements is known from the forward.
        if _form_of(gradient) == route.target:
            return _of_dtype(route.dst, _name_dtype(gradient.dtype))
        return layout_among(gradient, mesh_of(gradient.device_mesh).ranks)
    # A plain gradient is whole on every rank, even if the tensor was a partial sum.
    reduced = repartialed(route.dst, ())
    return _of_dtype(reduced, _name_dtype(gradient.dtype))


def _agree_on(mine: Layout | None, route: _Route) -> Layout:
    """The gradient's layout, sent to the ranks outside its mesh."""
    receivers = set(route.dst.mesh.ranks)
    everyone = receivers.union(route.src.mesh.ranks)
    if compat.my_rank() not in everyone:
        return route.dst  # any layout: this rank moves nothing
    if everyone == receivers and mine is not None:
        return mine
    group = group_for(everyone, route.meshes)
    return next(
        layout for layout in gather(mine, group, "redistribute a tensor") if layout is not None
    )


def _dual_of(layout: Layout, gradient: Layout, grad: str) -> Layout:
    """The layout of the gradient of a tensor of this layout, if it arrives in the layout `gradient`.

    Axes along which both are Partial are left unreduced: a later step may sum them, or need not.
    """
    # Axes along which the tensor is replicated, if their gradient is to be partial sums.
    free = set(layout.free_axes) if grad == "partial" else set()
    op = gradient.op or "sum"
    # A layout has one operation, and the free axes need a sum.
    if layout.mesh != gradient.mesh or (free and op != "sum"):
        return repartialed(layout, free)
    ours = {name for name, _ in layout.partial}
    theirs = {name for name, _ in gradient.partial}
    return repartialed(layout, free | (ours & theirs), op)


def _dual_placements(form: _Form, dual: Layout) -> tuple[Placement, ...] | None:
    """The input's placements, with its Partial and Replicate ones replaced by the dual layout's."""
    if form.placements is None:
        return None
    ops = dict(dual.partial)
    placements: list[Placement] = []
    for name, placement in zip(dual.mesh.shape, form.placements, strict=True):
        if isinstance(placement, Shard | compat.StridedShard):
            placements.append(placement)
        elif name in ops:
            placements.append(Partial(ops[name]))
        else:
            placements.append(Replicate())
    return tuple(placements)


def _name_dtype(dtype: torch.dtype) -> str:
    """The name of a dtype in layouts."""
    return str(dtype).removeprefix("torch.")
