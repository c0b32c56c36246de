"""DeviceMesh and Mesh: the same axes over the same ranks, with process groups and without.

1. A DeviceMesh without names has the axes `dim0`, `dim1`, ...
2. Making a DeviceMesh, or a group, is for all ranks of the default group to do together; what was made here is kept,
   and made once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardmath.errors import MeshError
from shardmath.mesh import Mesh
from shardmath_torch import compat

__all__ = ["device_mesh_of", "group_for", "mesh_of"]

_T = TypeVar("_T")


@functools.lru_cache(maxsize=256)
def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """The axes and ranks of a DeviceMesh."""
    ranks = device_mesh.mesh
    names = device_mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(ranks.ndim))
    return Mesh(dict(zip(names, ranks.shape, strict=True)), ranks=ranks.flatten().tolist())


def device_mesh_of(mesh: Mesh, device_type: str) -> DeviceMesh:
    """A DeviceMesh of these axes and ranks. Collective over the default group on first use, as `group_for` is."""
    if not dist.is_initialized():
        raise MeshError(f"{mesh} has no process groups; call torch.distributed.init_process_group first")
    outside = sorted(set(mesh.ranks) - set(range(dist.get_world_size())))
    if outside:
        what = f"{mesh} has ranks {outside[:8]}, the default group has ranks 0..{dist.get_world_size() - 1}"
        raise MeshError(f"{what}; use ranks of the group")
    if (mesh, device_type) not in _meshes:
        for each in (one for one in _asked_for((mesh, device_type)) if one not in _meshes):
            _meshes[each] = _device_mesh(*each)
    return _meshes[mesh, device_type]


_meshes: dict[tuple[Mesh, str], DeviceMesh] = {}
"""DeviceMeshes made so far."""


def _device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    return DeviceMesh(device_type, torch.from_numpy(mesh.array()), mesh_dim_names=tuple(mesh.shape))


def _asked_for(mine: _T) -> list[_T]:
    """What all ranks ask for, each thing once and in one order."""
    asked: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(asked, mine)
    return sorted(set(asked), key=repr)


def group_for(ranks: Iterable[int], meshes: Iterable[DeviceMesh | None] = ()) -> dist.ProcessGroup | None:
    """A group of exactly these ranks: None, the default one, where they are all; that of a mesh that has them.

    A rank outside gets None, and has nothing to say in it.

    Otherwise one is made, collectively over the default group, on first use: all ranks ask at once, also for different
    groups, of which none has been made before, and all make all of them in one order. torch names groups by how many a
    rank has seen, so that ranks which make one without the others may wait for ever (`use_local_synchronization`,
    torch 2.13).
    """
    among = tuple(sorted(set(ranks)))
    if len(among) == dist.get_world_size():
        return None
    for mesh in (mesh for mesh in meshes if mesh is not None and set(mesh_of(mesh).ranks) == set(among)):
        if mesh.ndim == 1 and compat.my_rank() not in among:
            return None
        found = compat.group_of_mesh(mesh)
        if found is not None:
            return found
    if among not in _made:
        _make(among)
    return _made[among]


_made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
"""Groups made so far, by their ranks."""


def _make(ranks: tuple[int, ...]) -> None:
    """Make the groups that ranks ask for."""
    for each in (one for one in _asked_for(ranks) if one not in _made):
        found = dist.new_group(list(each))
        _made[each] = found if isinstance(found, dist.ProcessGroup) else None
