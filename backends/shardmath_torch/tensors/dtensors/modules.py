"""Modules: the layout of every parameter, as ranks actually hold it.

1. After `parallelize_module` and `fully_shard` the parameters of a module are DTensors, some of
   whose placements have two readings; undivided ones are plain tensors, the same on every rank,
   unless they say which part they are (`parts.checkpointable`).
2. All ranks get the same layouts. If a parameter is on a part of the others' mesh, as one that only
   FSDP2 divides is on this rank's data-parallel group, it is replicated along the remaining axes.
3. Fused weights that `set_device_mesh` has placed have their recorded layout, with parts chunked by
   later FSDP2 sharding. Their DTensor placements may contradict it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardmath.base.errors import LayoutError
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.layout import Layout
from shardmath_torch.groups import compat
from shardmath_torch.tensors.dtensors.devicemesh import find_unsorted, mesh_of
from shardmath_torch.tensors.dtensors.dtensor import Ask, from_dtensors
from shardmath_torch.tensors.parts.checkpointable import from_boxes

__all__ = ["SHAPELESS", "lay_out", "layout_of", "lift"]

SHAPELESS = "has no shape yet; run its lazy module once"
"""The words of an error about a parameter or buffer of a lazy module, after its name."""


@compat.untraced
def layout_of(module: nn.Module, *, mesh: Mesh | None = None) -> dict[str, Layout]:
    """Return a dict with the layout of every parameter of `module`, by the names of `named_parameters`; plain
    parameters are replicated over `mesh`.

    A shared parameter has an entry under each of its names.

    These are the present layouts: after a forward, FSDP2 may still hold gathered parameters, until
    `module.reshard()`.

    Parameters that are not DTensors are replicated over `mesh`, by default the largest of the
    DTensors', or all ranks of the default group. Those that say which part they are, as torch's
    CheckpointableTensor and what spmd_types has typed do, are that part, and then the call is
    collective over the default group. It is collective over the ranks of the DTensors' meshes if
    placements have two readings that differ. Raises LayoutError, naming the parameter, for a local
    shape that fits no reading, for a lazy module that has not run yet, for parameters that FSDP1
    holds as parts (it holds them whole with NO_SHARD, and inside `summon_full_params`), and for a
    parameter that is divided along a mesh dimension whose ranks do not ascend: there torch's
    collectives, and FSDP2, have another order of parts.
    """
    return lay_out(module, mesh)


def lay_out(
    module: nn.Module, mesh: Mesh | None = None, ask: Ask | None = None
) -> dict[str, Layout]:
    """Return the layout of each parameter of `module`, by name. Plain parameters are replicated over `mesh` (default:
    the largest mesh of the other parameters, or all ranks). If `ask` is given, ranks do not communicate: `ask(tensors)`
    returns what all ranks hold, by name and rank (the local shape of a DTensor, the slices of a CheckpointableTensor).
    """
    parameters = _list_parameters(module)
    dtensors = {n: p for n, p in parameters.items() if isinstance(p, DTensor)}
    for name, dtensor in dtensors.items():
        _check_ascending(name, dtensor)
    divided = from_dtensors(dtensors, ask) | from_boxes(parameters, ask)
    if mesh is None:
        mesh = _find_largest(divided.values()) or _mesh_of_world()
    layouts = {}
    for name, parameter in parameters.items():
        if name in divided:
            layouts[name] = lift(divided[name], mesh)
        else:
            dtype = str(parameter.dtype).removeprefix("torch.")
            layouts[name] = Layout(tuple(parameter.shape), mesh, {}, dtype=dtype)
    return layouts


def _check_ascending(name: str, dtensor: DTensor) -> None:
    """Raise LayoutError for a parameter that is divided along a mesh axis whose ranks do not ascend, unless the
    DeviceMesh keeps that order in its groups."""
    if compat.keeps_order(dtensor.device_mesh):
        return
    placements = enumerate(dtensor.placements)
    axes = [axis for axis, placement in placements if not placement.is_replicate()]
    line = find_unsorted(mesh_of(dtensor.device_mesh), axes)
    if line is not None:
        what = (
            f"parameter {name!r} is divided among ranks {line[:8]} of a DeviceMesh, in this order"
        )
        why = (
            "but torch's groups, and so FSDP2 and full_tensor, have these ranks in ascending order"
        )
        fix = "make the DeviceMesh with ranks that ascend along each dimension, or, from torch 2.15 on,"
        fix += " with preserve_rank_order=True"
        raise LayoutError(f"{what}, {why}; {fix}")


def _list_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters under all their names. Raises LayoutError for one that is lazy or a part under FSDP1, and for
    a value that is not a module."""
    if not isinstance(module, nn.Module):
        raise LayoutError(
            f"{type(module).__name__} is not a torch.nn.Module; pass the module with the parameters"
        )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    flattened = compat.find_flattened(module)
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise LayoutError(f"parameter {name!r} {SHAPELESS}")
        if name in flattened:
            raise LayoutError(
                f"parameter {name!r} is under FSDP1 (FullyShardedDataParallel), which joins parameters and shards "
                f"them together; use FSDP2 (torch.distributed.fsdp.fully_shard), or pass FSDP1's module itself inside "
                f"its summon_full_params"
            )
    return parameters


def _find_largest(layouts: Iterable[Layout]) -> Mesh | None:
    """The first largest of the layouts' meshes; None without layouts."""
    meshes = [layout.mesh for layout in layouts]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


def _mesh_of_world() -> Mesh:
    """The mesh of all ranks of the default group, or of only this process."""
    return Mesh(world=dist.get_world_size() if dist.is_initialized() else 1)


def lift(layout: Layout, mesh: Mesh) -> Layout:
    """Return `layout` on `mesh`, replicated along the axes that the layout's mesh lacks. `layout` is returned unchanged
    if its mesh is not a submesh of `mesh`, or does not contain this rank.
    """
    part = layout.mesh
    rank = compat.rank_or_0()
    if part == mesh or rank not in mesh or not part.axes:
        return layout
    if not set(part.axes) <= set(mesh.axes) or not _is_part(part, mesh, rank):
        return layout
    return Layout(layout.shape, mesh, layout.text, dtype=layout.dtype, rules=layout.rules)


def _is_part(part: Mesh, mesh: Mesh, rank: int) -> bool:
    """Whether `part` is the submesh of `mesh` through `rank` along some of its axes, in the mesh's order."""
    if tuple(part.shape) != tuple(name for name in mesh.shape if name in part.shape):
        return False
    coords = mesh.coords(rank)
    fixed = {name: coords[name] for name in mesh.shape if name not in part.shape}
    return part.ranks == mesh.select(**fixed).ranks
