"""DeviceMesh and Mesh: the same axes over the same ranks, with process groups and without.

1. A DeviceMesh without names has the axes `dim0`, `dim1`, ...
2. Making a DeviceMesh, or a group, is collective over the default group, so each is made once per
   default group and cached. If a process destroys its groups and makes others, the cache starts
   again.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardmath.base.errors import MeshError
from shardmath.layouts.algebra.mesh import Mesh
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import gather, shared

__all__ = ["World", "device_mesh_of", "find_unsorted", "group_for", "mesh_of", "world"]

_T = TypeVar("_T")


@dataclass
class World:
    """A cache of the DeviceMeshes and process groups that were made while `group` is torch's default group.

    Groups are by their ranks; `kept` is for other modules' values.
    """

    group: object
    meshes: dict[tuple[Mesh, str], DeviceMesh] = field(default_factory=dict)
    groups: dict[tuple[int, ...], dist.ProcessGroup | None] = field(default_factory=dict)
    kept: dict[object, Any] = field(default_factory=dict)


_latest = World(None)


def world() -> World:
    """Return the World (a cache of process groups) for torch's present default group; drop an earlier group's World."""
    global _latest
    group = dist.group.WORLD
    if _latest.group is not group:
        _latest = World(group)
    return _latest


_meshes: WeakKeyDictionary[DeviceMesh, Mesh] = WeakKeyDictionary()
"""Meshes by DeviceMesh. Weak, since a DeviceMesh keeps its process groups alive."""


def mesh_of(device_mesh: DeviceMesh) -> Mesh:
    """Return the Mesh with the axes and ranks of a DeviceMesh."""
    mesh = _meshes.get(device_mesh)
    if mesh is None:
        ranks = device_mesh.mesh
        names = device_mesh.mesh_dim_names or tuple(f"dim{i}" for i in range(ranks.ndim))
        sizes = dict(zip(names, ranks.shape, strict=True))
        mesh = Mesh(sizes, ranks=ranks.flatten().tolist())
        _meshes[device_mesh] = mesh
    return mesh


def find_unsorted(mesh: Mesh, axes: Iterable[int]) -> list[int] | None:
    """Return ranks along one of `axes` (positions) of `mesh` that do not ascend; None if all do.

    torch sorts the ranks of an axis's process group. So its collectives, and FSDP2, divide a tensor among these ranks
    in ascending order, but its redistribute and torch.distributed.checkpoint divide it in the mesh's order.
    """
    array = mesh.array()
    for axis in axes:
        lines = np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])
        for line in lines:
            if (np.diff(line) < 0).any():
                return [int(rank) for rank in line]
    return None


def device_mesh_of(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Return a DeviceMesh with the axes and ranks of `mesh`.

    Collective over the default group on first use, as `group_for` is.
    """
    if not dist.is_initialized():
        raise MeshError(
            f"a DeviceMesh for {mesh} needs process groups, but torch.distributed is not "
            f"initialized; call torch.distributed.init_process_group first"
        )
    size = dist.get_world_size()
    outside = sorted(set(mesh.ranks) - set(range(size)))
    if outside:
        what = f"{mesh} has ranks {outside[:8]}, but the default group has ranks 0..{size - 1}"
        raise MeshError(f"{what}; make the Mesh of ranks of the group")
    device_meshes = world().meshes
    # `shared` keeps other threads from making groups in between: all ranks must make them in one order.
    if (mesh, device_type) not in device_meshes:
        with shared(None):
            for each in _gather_requests((mesh, device_type), device_meshes, "make a DeviceMesh"):
                device_meshes[each] = _make_device_mesh(*each)
    return device_meshes[mesh, device_type]


def _make_device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Make a DeviceMesh. Collective over the default group, as torch makes a group per axis."""
    ranks = torch.from_numpy(mesh.array())
    return DeviceMesh(device_type, ranks, mesh_dim_names=tuple(mesh.shape))


def _gather_requests(own_request: _T, existing: Container[_T], what: str) -> list[_T]:
    """The requests of all ranks that are not made yet, each once, in the same order on all ranks."""
    requests = set(gather(own_request, None, what))
    return sorted((request for request in requests if request not in existing), key=repr)


def group_for(
    ranks: Iterable[int], meshes: Iterable[DeviceMesh | None] = ()
) -> dist.ProcessGroup | None:
    """Return a process group of `ranks`, from one of `meshes` if it has such a group, else made by a collective call
    and kept for later calls. Return None if `ranks` are all ranks, or this rank is not among them.

    None stands for the default group, if these are all ranks. Otherwise the group is made on
    first use, collectively over the default group: all ranks call at once, also for different groups that were not made
    before, and all make all of them in one order. torch names groups by the number that a rank has seen, so ranks that
    make one without the others may deadlock (`use_local_synchronization`, torch 2.13).
    """
    members = tuple(sorted(set(ranks)))
    if len(members) == dist.get_world_size():
        return None
    for mesh in meshes:
        if mesh is None or set(mesh_of(mesh).ranks) != set(members):
            continue
        # A mesh of one axis has its group already: the members need no help to make one.
        if mesh.ndim == 1 and compat.my_rank() not in members:
            return None
        group = compat.group_of_mesh(mesh)
        if group is not None:
            return group
    groups = world().groups
    if members not in groups:
        with shared(None):
            for each in _gather_requests(members, groups, "make a process group"):
                groups[each] = _make_group(each)
    return groups[members]


def _make_group(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Make a group, collectively over the default group. None on a rank outside, where torch returns a marker."""
    made = dist.new_group(list(ranks))
    return made if isinstance(made, dist.ProcessGroup) else None
