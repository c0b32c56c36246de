"""Scales: the largest absolute value of whole parameters, for quantization to one scale per tensor.

1. The maximum is over exactly the ranks of the `weight_mesh` that `set_device_mesh` was given:
   under FSDP2 the shards of data parallelism and tensor parallelism together, without replicas,
   which hold the same.
2. Maxima are reduced as integers: the bits of non-negative floats are ordered as the floats are,
   with NaN above all. A maximum of floats may drop NaN.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardmath.base.errors import LayoutError
from shardmath.layouts.layout import Layout
from shardmath_torch.groups import compat
from shardmath_torch.tensors.dtensors.devicemesh import mesh_of
from shardmath_torch.tensors.dtensors.placed import Placed, layout_where, placed_in

__all__ = ["amax"]


@compat.untraced
def amax(module: nn.Module) -> dict[str, Tensor]:
    """Return a dict from name to the largest absolute value, a float32 scalar, of each whole parameter that
    `set_device_mesh` has divided or replicated.

    Shared parameters are listed under each of their names. Collective over the ranks of
    weight_mesh: one all-reduce for all parameters, along each of its axes. Empty shards count as 0;
    NaN anywhere gives NaN. Raises LayoutError if weight_mesh lacks ranks that hold other parts of
    a parameter, and for parameters on the meta device.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    records = placed_in(module)
    if not records:
        kind = type(module).__name__
        raise LayoutError(
            f"{kind} has no parameter that set_device_mesh has divided; call smt.set_device_mesh first"
        )
    # This rank's parts by name, for each weight_mesh.
    by_mesh: dict[DeviceMesh, dict[str, Tensor]] = {}
    for name, placed in records.items():
        local = _take_local(name, parameters.get(name), placed)
        by_mesh.setdefault(placed.weight_mesh, {})[name] = local
    maxima: dict[str, Tensor] = {}
    for mesh, tensors in by_mesh.items():
        maxima |= _reduce(mesh, tensors)
    return maxima


def _take_local(name: str, parameter: object, placed: Placed) -> Tensor:
    """This rank's part. Raises LayoutError if weight_mesh lacks ranks with other parts, or there are no values."""
    layout = layout_where(parameter, placed.axis, placed.placement)
    if layout is None or not isinstance(parameter, DTensor):
        kind = type(parameter).__name__
        what = f"parameter {name!r} is {kind}, not the one that set_device_mesh made"
        raise LayoutError(f"{what}; copy values into that one instead of replacing it")
    if parameter.is_meta:
        what = f"parameter {name!r} is on the meta device and has no values"
        raise LayoutError(f"{what}; call the module's to_empty() and fill it first")
    _check_covered(name, layout, placed.weight_mesh)
    return compat.local_of(parameter).detach()


def _check_covered(name: str, layout: Layout, weight_mesh: DeviceMesh) -> None:
    """Raise LayoutError unless weight_mesh has the ranks that hold the other parts of this rank's replica."""
    coords = layout.mesh.coords(compat.my_rank())
    replica = {axis: coords[axis] for axis in layout.free_axes}
    others = layout.mesh.select(**replica)
    missing = sorted(set(others.ranks) - set(mesh_of(weight_mesh).ranks))
    if missing:
        lack = f"ranks {missing}, which hold parts of it, are not in weight_mesh"
        fix = (
            "give set_device_mesh a weight_mesh of all axes that divide parameters, "
            "such as mesh['dp_shard', 'tp']"
        )
        raise LayoutError(f"parameter {name!r} is {layout}; {lack}, {mesh_of(weight_mesh)}; {fix}")


def _reduce(mesh: DeviceMesh, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The largest absolute value of each tensor over the ranks of the mesh."""
    mine = [_find_largest(tensor) for tensor in tensors.values()]
    # The bits of floats of one sign have the order of the floats, with NaN above all, which a MAX of floats may drop.
    words = _view_as_words(torch.stack(mine))
    for group in mesh.get_all_groups():
        dist.all_reduce(words, op=dist.ReduceOp.MAX, group=group)
    maxima = words.view(torch.float32).unbind()
    return dict(zip(tensors, maxima, strict=True))


def _view_as_words(values: Tensor) -> Tensor:
    """The bits of float32 values, without the sign bit, which a NaN may have."""
    return values.view(torch.int32) & 0x7FFFFFFF


def _find_largest(tensor: Tensor) -> Tensor:
    """The largest absolute value, as float32; 0 for an empty tensor."""
    if not tensor.numel():
        return torch.zeros((), device=tensor.device)
    # torch has no norm of integers and floats of one byte.
    is_wide_float = tensor.is_floating_point() and tensor.element_size() > 1
    if not is_wide_float and not tensor.is_complex():
        tensor = tensor.float()
    largest: Tensor = torch.linalg.vector_norm(tensor, float("inf"))
    return largest.float()
