"""The one place for what torch keeps to itself or changes between versions (2.11 and later)."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from typing import Literal, NamedTuple, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardmath.base.errors import ExchangeError

__all__ = [
    "Components",
    "EqualComponents",
    "Group",
    "Spec",
    "StorageInfo",
    "Store",
    "backend_of",
    "check_not_forked",
    "group_of",
    "group_of_mesh",
    "hold_nothing",
    "in_backward",
    "is_registered",
    "local_of",
    "my_rank",
    "rank_or_0",
    "ranks_of",
    "serves",
    "spec_of",
    "storage_start",
    "store_of",
]

Group: TypeAlias = dist.ProcessGroup

_forked: WeakSet[Group] = WeakSet()
"""Groups of the process that this one was forked from: their connections are that one's."""


def _note_fork() -> None:
    _forked.update(c10d._world.pg_map)


os.register_at_fork(after_in_child=_note_fork)


def check_not_forked(group: Group) -> None:
    """Raises ExchangeError for a group that this process has from the one that it was forked from."""
    if group in _forked:
        what = "this process was forked from the one whose process group this is"
        raise ExchangeError(f"{what}; start ranks as processes of their own")


def group_of(group: Group | None) -> Group:
    """The group, or the default one. Raises ExchangeError where there is none, or this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        fix = "call torch.distributed.init_process_group on every rank before compile"
        raise ExchangeError(f"torch.distributed has no process group; {fix}")
    found = dist.group.WORLD if group is None else group
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    known = found is None or found is outside
    if not known and not (isinstance(found, Group) and is_registered(found)):
        what = f"group={found!r} is not a process group that is there"
        raise ExchangeError(
            f"{what}; pass what dist.new_group() returned, and has not been destroyed"
        )
    if isinstance(found, Group):
        check_not_forked(found)
    if found is None or dist.get_rank(found) < 0:
        raise ExchangeError(
            f"rank {dist.get_rank()} is not in the group; call compile only on the ranks of the group"
        )
    return found


def ranks_of(group: Group) -> tuple[int, ...]:
    """Global ranks of the group, in the group's order."""
    return tuple(dist.get_process_group_ranks(group))


def my_rank() -> int:
    """This process's global rank. Raises ExchangeError where there is no process group."""
    group_of(None)
    return dist.get_rank()


def group_of_mesh(mesh: DeviceMesh) -> Group | None:
    """The group of all ranks of a mesh: its own if it has one axis, that of its axes flattened if it is part of a mesh
    of all ranks, which make the groups of all such parts together; None otherwise."""
    if mesh.ndim == 1:
        try:
            return mesh.get_group()
        except (RuntimeError, ValueError) as error:
            raise ExchangeError(
                f"the process group of {mesh} is gone ({error}); make the DeviceMesh anew"
            ) from error
    root = mesh._get_root_mesh()
    if root is mesh or root.size() != dist.get_world_size() or not mesh.mesh_dim_names:
        return None
    return mesh._flatten("shardmath_" + "_".join(mesh.mesh_dim_names)).get_group()


def rank_or_0() -> int:
    """This process's global rank; 0 where there is no process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def backend_of(group: Group) -> str:
    """ "nccl" or "gloo", the better of those that the group has; otherwise what torch calls it."""
    name = str(dist.get_backend(group))
    return next((known for known in ("nccl", "gloo") if known in name), name)


def store_of(group: Group) -> Store | None:
    """The group's key-value store; None where torch no longer says."""
    try:
        return c10d._get_process_group_store(group)
    except (AttributeError, KeyError):
        return None


def serves(store: Store | None) -> bool:
    """Whether this process serves the store to others: whether it listens on its port.

    torch tells only in the store's repr, which looks names up and may take seconds.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and store.port in _listened_ports()


def _listened_ports() -> set[int]:
    """TCP ports on which this process listens; none where the system has no list of open files."""
    out = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                out |= _listened_port(int(name))
    return out


def _listened_port(fd: int) -> set[int]:
    if not stat.S_ISSOCK(os.fstat(fd).st_mode):
        return set()
    with socket.fromfd(fd, socket.AF_INET6, socket.SOCK_STREAM) as found:
        listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        address = found.getsockname()
    return {address[1]} if listens and isinstance(address, tuple) else set()


def is_registered(group: Group) -> bool:
    """Whether torch still knows the group: not after `destroy_process_group`."""
    return group in c10d._world.pg_map


class EqualComponents(_StridedShard):
    """The label of a fused weight: right on the mesh it was made for, and not beside what FSDP2 adds to it."""


class Components(EqualComponents):
    """The same where components differ in size, which no placement says: it has the right local shapes alone."""


class Spec(NamedTuple):
    """What a DTensor says of itself: placements, and what may be meant by them.

    `order` are the mesh dimensions that divide, first to last, where that is not left to right; `readings` otherwise.
    """

    placements: tuple[Placement, ...]
    order: tuple[int, ...] | None
    readings: tuple[Literal["placement", "order"], ...]


def spec_of(tensor: DTensor) -> Spec:
    """The DTensor's placements and how they may be read (torch 2.13: DTensorSpec.shard_order)."""
    spec = tensor._spec
    placements = tuple(spec.placements)
    if any(isinstance(p, _StridedShard) for p in placements):
        split = getattr(spec, "use_strided_shard_as_shard_order", True) is False
        return Spec(placements, None, ("placement",) if split else ("placement", "order"))
    order = [i for entry in getattr(spec, "shard_order", None) or () for i in entry.mesh_dims]
    per_dim = sorted(order, key=lambda i: (placements[i].dim, i))  # type: ignore[attr-defined]
    return Spec(placements, tuple(order) if order != per_dim else None, ("placement", "order"))


def in_backward() -> bool:
    """Whether autograd computes gradients in this thread."""
    return torch._C._current_graph_task_id() != -1


def hold_nothing(tensor: DTensor) -> None:
    """Gives a DTensor of another rank's mesh an empty local tensor of as many dimensions as it has.

    torch's own has one dimension, and its `to_local` cannot take gradients of that (torch 2.13).
    """
    tensor._local_tensor = tensor._local_tensor.new_empty((0,) * tensor.ndim)


def local_of(tensor: DTensor) -> Tensor:
    """The local tensor, not part of the DTensor's graph."""
    return tensor._local_tensor


def storage_start(tensor: Tensor) -> int | None:
    """Where in the file that a tensor without data was read from its storage begins."""
    return tensor.untyped_storage()._checkpoint_offset
