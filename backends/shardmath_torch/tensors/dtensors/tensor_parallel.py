"""Tensor parallelism for a plain module: its weights as DTensors on a mesh, for FSDP2 and for checkpoints.

1. `set_device_mesh` comes first, also on the meta device; then `fully_shard`, `to_empty`, the
   optimizer. Weights are whole and the same on all ranks of the mesh, each of which takes its part;
   or they are the parts already (`local=True`). Nothing is sent, and if it raises, nothing has
   changed.
2. A parameter that no pattern of `styles` matches is replicated, so that all parameters are DTensors
   on one mesh, as optimizers, gradient norms and checkpoints need. As in TransformerEngine, its
   gradient is assumed the same on all ranks; if it is a partial sum, as for a norm under sequence
   parallelism, the caller must reduce it.
3. The module's forward sees local tensors (`placed`). Nothing communicates by itself: your forward
   has to, or results are wrong without an error. The output of a "row" layer or a "vocabulary" is a
   partial sum on each rank:

       y = down(up(x))                                               # up: "column", down: "row"
       torch.distributed.all_reduce(y, group=tp_mesh.get_group())    # here, and only then a bias of `down`

   For training use two autograd functions, as in Megatron-LM: here the sum forward and the identity backward; before a
   "column" layer the identity forward and the sum backward.
4. Fused weights (gate and up, or Q, K and V, in one matrix) are divided component by component.
   DTensor's placements can express that only if components are equal, and not together with FSDP2;
   otherwise only their local shapes are right. The actual layout is in `layout_of(module)`, and in
   `from_dtensor` of a parameter: plan, move and save by that. torch's own checkpoints raise for
   strided shards, and `full_tensor()` may have their rows in another order.
5. Sizes that do not divide evenly raise: local shapes would not show how they are divided.
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


@compat.untraced
def set_device_mesh(
    module: nn.Module,
    tp_mesh: DeviceMesh,
    weight_mesh: DeviceMesh | None = None,
    *,
    styles: Mapping[str, AnyStyle],
    local: bool = False,
) -> None:
    """Make every parameter of `module` a DTensor on `tp_mesh`, divided by the style, such as "column", whose pattern in
    `styles` matches its name, or else replicated. If `local` is True, parameters are this rank's parts already.
    `weight_mesh` is recorded for a later quantization, which reduces the largest magnitudes (amax) over its ranks.

    During a forward, modules see local tensors instead. `styles` maps patterns to "column", "row", "replicate",
    "vocabulary", "row_norm", "softmax_offset" or a Fused. `weight_mesh` has the shards of data
    parallelism and tensor parallelism, without replicas; by default it is `tp_mesh`. With `local`, parts have the
    same sizes on every rank. No module communicates by itself: after a "row" layer your forward has to all-reduce (rule
    3 of this file).

    Raises MeshError for a tp_mesh that is not one named axis, a mesh without this rank, and a
    weight_mesh that lacks ranks of tp_mesh; PlacementError for styles that are unknown, match no
    parameter, contradict each other for a shared parameter, or do not divide evenly; LayoutError
    for a second call on a module, and for parameters that are DTensors or have gradients.
    """
    axis = _check_tp_mesh(tp_mesh)
    if weight_mesh is None:
        weight_mesh = tp_mesh
    _check_weight_mesh(weight_mesh, tp_mesh)
    parameters = _find_parameters(module)
    new_parameters: dict[int, nn.Parameter] = {}
    records: dict[int, Placed] = {}
    # All are checked before any is made, and all are made before the module changes.
    divided = [
        _divide(name, parameter, asked, tp_mesh, local)
        for name, parameter, asked in match_parameters(module, parameters, check_styles(styles))
    ]
    for each in divided:
        key = id(each.parameter)
        new_parameters[key] = _make_parameter(each, tp_mesh, local)
        records[key] = Placed(axis, each.placement, weight_mesh)
    for part in list(module.modules()):
        keys = {name: id(p) for name, p in part._parameters.items() if p is not None}
        for name, key in keys.items():
            setattr(part, name, new_parameters[key])
        place(part, {name: records[key] for name, key in keys.items()})


# Checks, before anything changes


def _check_tp_mesh(mesh: DeviceMesh) -> str:
    """The name of the only axis of tp_mesh. Raises MeshError for several axes, or an axis without a name."""
    _check_inside("tp_mesh", mesh)
    if mesh.ndim == 1 and mesh.mesh_dim_names:
        return mesh.mesh_dim_names[0]
    what = "tp_mesh's axis has no name"
    if mesh.ndim != 1:
        what = f"tp_mesh has {mesh.ndim} axes, {mesh_of(mesh)}"
    fix = "pass one axis of a DeviceMesh with mesh_dim_names, such as mesh['tp']"
    raise MeshError(f"{what}; {fix}")


def _check_weight_mesh(mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
    """Raise MeshError unless the mesh has all ranks of tp_mesh, so that `amax` reaches all parts of a weight."""
    _check_inside("weight_mesh", mesh)
    missing = sorted(set(mesh_of(tp_mesh).ranks) - set(mesh_of(mesh).ranks))
    if missing:
        what = f"weight_mesh, {mesh_of(mesh)}, lacks ranks {missing} of tp_mesh, {mesh_of(tp_mesh)}"
        fix = "pass all ranks that hold parts of one weight, such as mesh['dp_shard', 'tp']"
        raise MeshError(f"{what}; {fix}")


def _check_inside(name: str, mesh: object) -> None:
    """Raise MeshError unless `mesh` is a DeviceMesh with this rank."""
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"{name} is {mesh!r}, which is not a DeviceMesh; pass one, such as mesh['tp']"
        )
    rank = compat.my_rank()
    if rank not in mesh_of(mesh):
        fix = "pass the mesh that has this rank, such as mesh['tp']"
        raise MeshError(f"rank {rank} is not in {name}, {mesh_of(mesh)}; {fix}")


def _find_parameters(module: object) -> dict[str, nn.Parameter]:
    """All parameters, shared ones under each of their names. Raises LayoutError if one cannot be placed."""
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise LayoutError(f"{kind} is not a torch.nn.Module; pass the module to divide")
    for path, part in module.named_modules():
        if is_placed(part):
            what = f"set_device_mesh was already called on {f'submodule {path!r}' if path else 'this module'}"
            raise LayoutError(f"{what}; call it once, on the outermost module")
    found = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in found.items():
        why = _explain_unplaceable(parameter)
        if why:
            raise LayoutError(f"parameter {name!r} {why}")
    return found


def _explain_unplaceable(parameter: nn.Parameter) -> str:
    """Why a parameter cannot be placed, and the fix, as words after its name; "" if it can."""
    if isinstance(parameter, DTensor):
        return "is a DTensor; call set_device_mesh before parallelize and fully_shard"
    if isinstance(parameter, nn.UninitializedParameter):
        return SHAPELESS
    if parameter.grad is not None:
        return "has a gradient, which would be lost; call zero_grad() first"
    return ""


class _Divided(NamedTuple):
    """A parameter, the shape of the whole weight, and its division."""

    parameter: nn.Parameter
    shape: tuple[int, ...]
    placement: Division


def _divide(
    name: str, parameter: nn.Parameter, asked: Asked | None, mesh: DeviceMesh, local: bool
) -> _Divided:
    """The division of a parameter in its style. Raises PlacementError if it does not divide so, or not evenly."""
    shape = list(parameter.shape)
    if asked is None or asked.dim is None:
        return _Divided(parameter, tuple(shape), Replicate())
    d = asked.dim
    parts = mesh.size()
    axis = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "tp"
    tp = f"{axis}={parts}"
    kind = "local" if local else "whole"
    what = f"parameter {name!r} {kind} {tuple(shape)} as {asked.style!r} on {tp}"
    if d >= len(shape):
        fix = "match it by another style, such as 'replicate'"
        raise PlacementError(f"{what}: it has no dimension {d} to divide; {fix}")
    if local:
        shape[d] *= parts
    try:
        placement = asked.placement(shape[d])
        _check_even(placement, shape[d], tp, parts)
    except PlacementError as error:
        raise PlacementError(f"{what}: dimension {d}: {error}") from None
    return _Divided(parameter, tuple(shape), placement)


def _check_even(placement: Division, n: int, tp: str, parts: int) -> None:
    """Raise PlacementError unless every component of a dimension of length n has equal parts."""
    for size in components_of(placement, n):
        remainder = size % parts
        if remainder:
            padded = size + parts - remainder
            what = f"a component of {size} of {n}" if size != n else f"length {n}"
            fix = f"pad it to {padded}, or use the style 'replicate'"
            raise PlacementError(f"{what} does not divide by {tp}; {fix}")


# Making parameters


def _make_parameter(divided: _Divided, mesh: DeviceMesh, local: bool) -> nn.Parameter:
    """The parameter as a DTensor, with its attributes."""
    local_part = divided.parameter.detach() if local else _take_part(divided, mesh_of(mesh))
    # In the mode of the given parameter, not the caller's: a step cannot update a parameter made in inference mode.
    with torch.inference_mode(divided.parameter.is_inference()), torch.no_grad():
        tensor = DTensor.from_local(
            local_part.contiguous(),
            mesh,
            (label(divided.placement),),
            run_check=False,
            shape=torch.Size(divided.shape),
            stride=strides(divided.shape),
        )
        made_parameter = nn.Parameter(tensor, requires_grad=divided.parameter.requires_grad)
    vars(made_parameter).update(vars(divided.parameter))
    return made_parameter


def _take_part(divided: _Divided, mesh: Mesh) -> Tensor:
    """A copy of this rank's part of the whole weight; a replicated weight itself."""
    whole = divided.parameter.detach()
    if isinstance(divided.placement, Replicate):
        return whole
    d = divided.placement.dim
    layout = Layout(divided.shape, mesh, (divided.placement,))
    runs = layout.runs(compat.my_rank())[d]
    # A segment is its start in the part, its start in the whole, and its length.
    pieces = [whole.narrow(d, start, length) for _, start, length in runs.segments]
    return torch.cat(pieces, dim=d)
