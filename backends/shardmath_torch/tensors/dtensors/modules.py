"""Modules: the layout of every parameter, as it really lies.

1. After `parallelize_module` and `fully_shard` the parameters of a module are DTensors, some of
   whose placements have two readings; those that nobody divided are plain tensors, the same on
   every rank, or say themselves which part they are (`parts.checkpointable`).
2. All ranks get the same layouts. A parameter that lies on a part of the mesh of the others, as one
   that only FSDP2 divides lies on this rank's data-parallel group, is replicated along the axes
   that the part leaves out.
3. Fused weights that `set_device_mesh` has placed are as it has recorded, their parts chunked by what
   FSDP2 has divided since. Their DTensor placements may say something else.
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
from shardmath_torch.tensors.dtensors.dtensor import Ask, from_dtensors
from shardmath_torch.tensors.parts.checkpointable import from_boxes

__all__ = ["SHAPELESS", "lay_out", "layout_of", "lift"]

SHAPELESS = "has no shape yet; run its lazy module once"
"""What is wrong with a parameter or buffer of a lazy module, and what to do."""


def layout_of(module: nn.Module, *, mesh: Mesh | None = None) -> dict[str, Layout]:
    """The layout of every parameter, by the names of `named_parameters`, shared ones under each of their names.

    These are the layouts of this moment: after a forward, FSDP2 may still hold gathered parameters,
    until `module.reshard()`.

    Parameters that are not DTensors are replicated over `mesh`, by default the largest of the
    DTensors', or all ranks of the default group. Those that say which part they are, as torch's
    CheckpointableTensor does, are that part, and the call is collective over the default group.
    It is collective over the ranks of the DTensors' meshes where placements have two readings
    that differ. Raises LayoutError for a parameter whose local shape fits no reading, and for one
    of a lazy module that has not run yet, naming it.
    """
    return lay_out(module, mesh)


def lay_out(
    module: nn.Module, mesh: Mesh | None = None, ask: Ask | None = None
) -> dict[str, Layout]:
    """The same; where `ask` knows how DTensors lie, nobody else is asked."""
    parameters = _list_parameters(module)
    dtensors = {n: p for n, p in parameters.items() if isinstance(p, DTensor)}
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


def _list_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters under all of their names. Raises LayoutError for a lazy one, and for what is not a module."""
    if not isinstance(module, nn.Module):
        raise LayoutError(f"{type(module).__name__} is not a torch.nn.Module; give a module")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise LayoutError(f"parameter {name!r} {SHAPELESS}")
    return parameters


def _find_largest(layouts: Iterable[Layout]) -> Mesh | None:
    """The first of the layouts' meshes that has most ranks."""
    meshes = [layout.mesh for layout in layouts]
    return max(meshes, key=lambda mesh: mesh.size, default=None)


def _mesh_of_world() -> Mesh:
    """All ranks of the default group, or this process alone."""
    return Mesh(world=dist.get_world_size() if dist.is_initialized() else 1)


def lift(layout: Layout, mesh: Mesh) -> Layout:
    """The same on all of `mesh`, if the layout is on the part of it that has this rank; else as it is."""
    own = layout.mesh
    rank = compat.rank_or_0()
    if own == mesh or rank not in mesh or not own.axes:
        return layout
    if not set(own.axes) <= set(mesh.axes) or not _is_part(own, mesh, rank):
        return layout
    return Layout(layout.shape, mesh, layout.text, dtype=layout.dtype, rules=layout.rules)


def _is_part(own: Mesh, mesh: Mesh, rank: int) -> bool:
    """Whether `own` is the part of `mesh` along its axes through `rank`: these axes and ranks, in the mesh's order."""
    if tuple(own.shape) != tuple(name for name in mesh.shape if name in own.shape):
        return False
    coords = mesh.coords(rank)
    fixed = {name: coords[name] for name in mesh.shape if name not in own.shape}
    return own.ranks == mesh.select(**fixed).ranks
