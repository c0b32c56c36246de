"""Tensor parallelism for a plain module: its weights as DTensors on a mesh, for FSDP2 and for checkpoints.

1. `set_device_mesh` comes first, also on the meta device; then `fully_shard`, `to_empty`, the
   optimizer. Weights are whole and the same on all ranks of the mesh, each of which takes its part
   of them; or they are the parts already (`local=True`). Nothing is sent, and nothing has changed
   when it raises.
2. A parameter that no pattern of `styles` is about is replicated, so that all parameters are
   DTensors on one mesh, as optimizers, gradient norms and checkpoints want them. As in
   TransformerEngine, its gradient is taken to be the same on all ranks; where it is an addend, as
   that of a norm under sequence parallelism, adding up is the caller's part.
3. The module's forward sees local tensors (`placed`). Nothing communicates by itself: your forward
   has to, or results are wrong without an error. What a "row" layer or a "vocabulary" gives is an
   addend on each rank:

       y = down(up(x))                                               # up: "column", down: "row"
       torch.distributed.all_reduce(y, group=tp_mesh.get_group())    # here, and only then a bias of `down`

   For training, two autograd functions, as in Megatron-LM: here the sum forward and the identity backward; before a
   "column" layer the identity forward and the sum backward.
4. Fused weights, gate and up or Q, K and V in one matrix, are divided component by component.
   DTensor's placements can say that only where components are equal, and not beside FSDP2; what
   they show otherwise has the right local shapes alone. What is really there is in
   `layout_of(module)`, and `from_dtensor` of a parameter: plan, move and save by that. torch's own
   checkpoints refuse strided shards, and `full_tensor()` may have their rows in another order.
5. Sizes that do not divide evenly are errors: no local shape says how they were meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardmath.base.errors import LayoutError, MeshError, PlacementError
from shardmath.layouts.algebra.mesh import Mesh, strides
from shardmath.layouts.layout import Layout
from shardmath.layouts.placement import Replicate
from shardmath_torch.groups import compat
from shardmath_torch.tensors.dtensors.devicemesh import mesh_of
from shardmath_torch.tensors.dtensors.modules import SHAPELESS
from shardmath_torch.tensors.dtensors.placed import Placed, components_of, is_placed, label, place
from shardmath_torch.tensors.dtensors.styles import (
    AnyStyle,
    Asked,
    Division,
    check_styles,
    match_parameters,
)

__all__ = ["set_device_mesh"]


def set_device_mesh(
    module: nn.Module,
    tp_mesh: DeviceMesh,
    weight_mesh: DeviceMesh | None = None,
    *,
    styles: Mapping[str, AnyStyle],
    local: bool = False,
) -> None:
    """Make every parameter of the module a DTensor on `tp_mesh`, divided as the style of its name says.

    `styles` maps patterns to "column", "row", "replicate", "vocabulary", "row_norm",
    "softmax_offset" or a Fused. `weight_mesh` has the ranks over which `amax` reduces: shards of
    data parallelism and tensor parallelism, without replicas; by default `tp_mesh`. With `local`
    the weights are this rank's parts, of the same sizes on every rank. No module communicates by
    itself: after a "row" layer your forward has to all-reduce (rule 3 of this file).

    Raises MeshError for a tp_mesh that is not one named axis, a mesh without this rank, and a
    weight_mesh that lacks ranks of tp_mesh; PlacementError for styles that are unknown, about
    nothing, contradictory for a shared parameter, or do not divide evenly; LayoutError for a module
    done before, and parameters that are DTensors or have gradients.
    """
    axis = _check_tp_mesh(tp_mesh)
    if weight_mesh is None:
        weight_mesh = tp_mesh
    _check_weight_mesh(weight_mesh, tp_mesh)
    found = _find_parameters(module)
    made: dict[int, nn.Parameter] = {}
    records: dict[int, Placed] = {}
    # All are checked before any is made, and all are made before the module changes.
    divided = [
        _divide(name, parameter, said, tp_mesh, local)
        for name, parameter, said in match_parameters(module, found, check_styles(styles))
    ]
    for one in divided:
        key = id(one.parameter)
        made[key] = _make_parameter(one, tp_mesh, local)
        records[key] = Placed(axis, one.placement, weight_mesh)
    for part in list(module.modules()):
        own = {name: id(p) for name, p in part._parameters.items() if p is not None}
        for name, key in own.items():
            setattr(part, name, made[key])
        place(part, {name: records[key] for name, key in own.items()})


# Checks, before anything changes


def _check_tp_mesh(mesh: DeviceMesh) -> str:
    """The name of the one axis of tp_mesh. Raises MeshError where it has others, or no name."""
    _check_inside("tp_mesh", mesh)
    if mesh.ndim == 1 and mesh.mesh_dim_names:
        return mesh.mesh_dim_names[0]
    what = "tp_mesh's axis has no name"
    if mesh.ndim != 1:
        what = f"tp_mesh has {mesh.ndim} axes, {mesh_of(mesh)}"
    fix = "give one axis of a DeviceMesh with mesh_dim_names, such as mesh['tp']"
    raise MeshError(f"{what}; {fix}")


def _check_weight_mesh(mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
    """Raise MeshError unless amax, over the ranks of the mesh, reaches all parts of a weight."""
    _check_inside("weight_mesh", mesh)
    missing = sorted(set(mesh_of(tp_mesh).ranks) - set(mesh_of(mesh).ranks))
    if missing:
        what = f"weight_mesh, {mesh_of(mesh)}, lacks ranks {missing} of tp_mesh, {mesh_of(tp_mesh)}"
        fix = "give all ranks that hold parts of one weight, such as mesh['dp_shard', 'tp']"
        raise MeshError(f"{what}; {fix}")


def _check_inside(name: str, mesh: object) -> None:
    """Raise MeshError unless this is a DeviceMesh that has this rank."""
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(f"{name} is {mesh!r}; give a DeviceMesh, such as mesh['tp']")
    rank = compat.my_rank()
    if rank not in mesh_of(mesh):
        raise MeshError(f"rank {rank} is not in {name}, {mesh_of(mesh)}; give the one that has it")


def _find_parameters(module: object) -> dict[str, nn.Parameter]:
    """All parameters, shared ones under each of their names.

    Raises LayoutError where one cannot be placed.
    """
    if not isinstance(module, nn.Module):
        raise LayoutError(f"{type(module).__name__} is not a torch.nn.Module; give a module")
    for path, part in module.named_modules():
        if is_placed(part):
            fix = "call set_device_mesh once, on what holds it all"
            raise LayoutError(f"module {path!r} is on a mesh already; {fix}")
    found = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in found.items():
        why = _explain_refusal(parameter)
        if why:
            raise LayoutError(f"parameter {name!r} {why}")
    return found


def _explain_refusal(parameter: nn.Parameter) -> str:
    """Why a parameter cannot be placed, and what to do; "" if it can."""
    if isinstance(parameter, DTensor):
        return "is a DTensor; set_device_mesh comes before parallelize and fully_shard"
    if isinstance(parameter, nn.UninitializedParameter):
        return SHAPELESS
    if parameter.grad is not None:
        return "has a gradient, which would be lost; call zero_grad() first"
    return ""


class _Divided(NamedTuple):
    """A parameter, the shape of the whole, and what divides it."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    placement: Division


def _divide(
    name: str, parameter: nn.Parameter, said: Asked | None, mesh: DeviceMesh, local: bool
) -> _Divided:
    """Raises PlacementError where it cannot be divided so, or not evenly."""
    shape = list(parameter.shape)
    if said is None or said.dim is None:
        return _Divided(parameter, tuple(shape), Replicate())
    d = said.dim
    parts = mesh.size()
    axis = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "tp"
    tp = f"{axis}={parts}"
    kind = "local" if local else "whole"
    what = f"parameter {name!r} {kind} {tuple(shape)} as {said.style!r} on {tp}"
    if d >= len(shape):
        raise PlacementError(f"{what}: it has no dimension {d}; give it another style")
    if local:
        shape[d] *= parts
    try:
        placement = said.placement(shape[d])
        _check_even(placement, shape[d], tp, parts)
    except PlacementError as error:
        raise PlacementError(f"{what}: dimension {d}: {error}") from None
    return _Divided(parameter, tuple(shape), placement)


def _check_even(placement: Division, n: int, tp: str, parts: int) -> None:
    """Raise PlacementError unless every component of a dimension of length n has equal parts."""
    for size in components_of(placement, n):
        left = size % parts
        if left:
            padded = size + parts - left
            what = f"a component of {size} of {n}" if size != n else f"{n}"
            fix = f"pad to {padded}, or replicate it"
            raise PlacementError(f"{what} does not divide by {tp}; {fix}")


# What is made


def _make_parameter(one: _Divided, mesh: DeviceMesh, local: bool) -> nn.Parameter:
    """The parameter as a DTensor, with the attributes that it had."""
    held = one.parameter.detach() if local else _take_part(one, mesh_of(mesh))
    # Not in the caller's inference mode, which would make a parameter that takes no step.
    with torch.inference_mode(one.parameter.is_inference()), torch.no_grad():
        tensor = DTensor.from_local(
            held.contiguous(),
            mesh,
            (label(one.placement),),
            run_check=False,
            shape=torch.Size(one.shape),
            stride=strides(one.shape),
        )
        made = nn.Parameter(tensor, requires_grad=one.parameter.requires_grad)
    vars(made).update(vars(one.parameter))
    return made


def _take_part(one: _Divided, mesh: Mesh) -> Tensor:
    """This rank's part of the whole weight, a copy; a replicated one as it is."""
    whole = one.parameter.detach()
    if isinstance(one.placement, Replicate):
        return whole
    d = one.placement.dim
    layout = Layout(one.shape, mesh, (one.placement,))
    runs = layout.runs(compat.my_rank())[d]
    pieces = [whole.narrow(d, start, length) for _, start, length in runs.segments]
    return torch.cat(pieces, dim=d)
