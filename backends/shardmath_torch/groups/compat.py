"""Compat: the one place for torch's private APIs, and for APIs that change between versions (2.12 and later)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import FunctionType
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import AllgatherOptions, FakeWork, PrefixStore, Store, TCPStore
from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
from torch.distributed import distributed_c10d as c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.nn.modules.module import _IncompatibleKeys as IncompatibleKeys
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from shardmath.base.errors import ExchangeError
from shardmath_torch.groups.forks import inherited
from shardmath_torch.groups.joint_group import JointGroup

__all__ = [
    "AllgatherOptions",
    "AsyncCollectiveTensor",
    "IncompatibleKeys",
    "StridedShard",
    "TorchDispatchMode",
    "copy_each",
    "describe_only",
    "finish_at_once",
    "is_traceable_wrapper_subclass",
    "keeps_order",
    "negate_view",
    "tensor_property",
    "without_dispatch_by_class",
    "without_torch_function",
    "Group",
    "PrefixStore",
    "Spec",
    "StorageInfo",
    "Store",
    "TCPStore",
    "allow_seconds",
    "backend_of",
    "channel_of",
    "check_not_forked",
    "check_registered",
    "check_there",
    "device_of",
    "find_flattened",
    "find_missing",
    "group_of",
    "group_of_mesh",
    "groups_of_axes",
    "hold_nothing",
    "in_backward",
    "is_alone",
    "is_inherited",
    "is_there",
    "local_of",
    "my_rank",
    "packs_saved_tensors",
    "rank_in",
    "rank_or_0",
    "ranks_of",
    "shape_of_scalar",
    "spec_of",
    "identity_of",
    "storage_start",
    "store_of",
    "time_limit_of",
    "untraced",
    "word_gone",
]

Group: TypeAlias = dist.ProcessGroup

copy_each = torch._foreach_copy_
"""Copy each tensor of the second list into the one at the same index in the first list, with few kernels."""
negate_view = torch._neg_view
"""Return a view of a tensor that reads as its negative."""
without_torch_function = torch._C.DisableTorchFunction
"""In its `with` block, no `__torch_function__` is called."""
without_dispatch_by_class = torch._C.DisableTorchFunctionSubclass
"""In its `with` block, the `__torch_function__` of tensors' classes is not called; modes are."""


def tensor_property(name: str) -> Any:
    """Return torch's property of tensors, as the class has it that Tensor is derived from."""
    return getattr(torch._C.TensorBase, name)


def describe_only() -> AbstractContextManager[Any]:
    """Return a context in which tensors have shapes and strides, but no elements."""
    # Takes most of a second to import.
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def finish_at_once() -> Any:
    """Return a Work that is done: torch's own, of its process groups without communication. Other kinds cannot be made
    in Python."""
    return FakeWork().boxed()


UNTRACED = "ranks make this call together, and torch.compile cannot trace it"
"""The reason that torch gives for a graph break."""

_F = TypeVar("_F", bound=Callable[..., object])


def untraced(function: _F) -> _F:
    """Return `function` itself, marked so that `torch.compile` does not trace it: a compiled function's graph breaks at
    a call of `function`, which then runs as it would without `torch.compile`, together with all that it calls.

    `torch.compiler.disable` does the same, but imports Dynamo at once, and slows each call down.
    """
    plain = cast(FunctionType, function)
    # For the caller's graph: Dynamo reads this before it would trace a call.
    plain._torchdynamo_disable = True  # type: ignore[attr-defined]
    plain._torchdynamo_disable_msg = UNTRACED  # type: ignore[attr-defined]
    # For the call itself: Dynamo compiles no frame of `function`, nor one below.
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(plain.__code__, skip)
    return function


def is_inherited(group: Group) -> bool:
    """Whether the group was made by the process that this one was forked from, which owns the group's connections and
    store."""
    return group in inherited


def check_not_forked(group: Group) -> None:
    """Raise ExchangeError if the group was made by the process that this one was forked from."""
    if is_inherited(group):
        what = "this process was forked from a rank, and cannot use that rank's process group"
        fix = "make the call in the rank's process, or start this process as its own rank"
        raise ExchangeError(f"{what}; {fix}")


def group_of(group: Group | None) -> Group:
    """Return `group`, or the default one for None. Raises ExchangeError if there is none, or it lacks this process."""
    if isinstance(group, JointGroup):
        check_there(group)
        check_not_forked(group)
        return group
    if is_alone():
        fix = "call torch.distributed.init_process_group on every rank before, or pass group="
        raise ExchangeError(f"torch.distributed has no process group; {fix}")
    found = dist.group.WORLD if group is None else group
    # `dist.new_group` returns this on ranks that are not in the group.
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if found is None or found is outside:
        raise _make_outside_error()
    if not isinstance(found, Group) or not is_there(found):
        what = f"group={found!r} is not a live process group"
        fix = "pass one that dist.new_group() or smt.connect() returned, and that was not destroyed"
        raise ExchangeError(f"{what}; {fix}")
    check_not_forked(found)
    if dist.get_rank(found) < 0:
        raise _make_outside_error()
    return found


def keeps_order(mesh: DeviceMesh) -> bool:
    """Whether the groups of `mesh` have their ranks in its order (from torch 2.15 on), not sorted."""
    return bool(getattr(mesh, "_preserve_rank_order", False))


def is_alone() -> bool:
    """Whether this process has no default process group."""
    return not dist.is_available() or not dist.is_initialized()


def _make_outside_error() -> ExchangeError:
    """The error on a rank that is not in the group."""
    fix = "make this call only on ranks of the group, or pass another group="
    return ExchangeError(f"rank {dist.get_rank()} is not in the process group; {fix}")


def ranks_of(group: Group) -> tuple[int, ...]:
    """Return the numbers that plans use for the ranks of `group`, in the order of group ranks: global ranks, or for a
    JointGroup (a group across jobs) 0, 1, 2 and so on."""
    if isinstance(group, JointGroup):
        return tuple(range(group.size()))
    return tuple(dist.get_process_group_ranks(group))


def rank_in(group: Group) -> int:
    """Return this process's rank as used in plans for the group: the global rank for a torch group, or the rank within
    the group for a joint group (a group across jobs)."""
    return group.rank() if isinstance(group, JointGroup) else dist.get_rank()


def channel_of(group: Group) -> Group:
    """Return the group to pass to torch's functions: `group` itself, or the torch group inside a joint group (a group
    across jobs). Do not keep the result, since a joint group can be disconnected.

    Raises ExchangeError if a joint group is disconnected.
    """
    return group.channel if isinstance(group, JointGroup) else group


def is_there(group: Group) -> bool:
    """Whether `group` can still be used: False after `torch.distributed.destroy_process_group`, or for a JointGroup (a
    group across jobs), after its `disconnect`."""
    return group.is_open if isinstance(group, JointGroup) else group in c10d._world.pg_map


def check_there(group: Group) -> None:
    """Raise ExchangeError if the group was destroyed or disconnected."""
    if isinstance(group, JointGroup):
        group.channel  # noqa: B018
    elif not is_there(group):
        fix = "make another, as by torch.distributed.new_group, and pass it as group="
        raise ExchangeError(f"the process group was destroyed; {fix}")


def word_gone(group: Group) -> str:
    """Return "disconnected" or "destroyed", the word for how the group ended."""
    return "disconnected" if isinstance(group, JointGroup) else "destroyed"


def check_registered(group: Group | None, what: str) -> None:
    """Raise ExchangeError if `group` is a JointGroup (a group of ranks of several jobs). `what` tells in the error
    which action is impossible on it, such as "save"."""
    if isinstance(group, JointGroup):
        why = f"{group!r} has ranks of several jobs, which cannot {what} together"
        fix = "pass a group of one job as group=, or leave it out for the job's default group"
        raise ExchangeError(f"{why}; {fix}")


def my_rank() -> int:
    """Return this process's global rank. Raises ExchangeError if there is no process group."""
    group_of(None)
    return dist.get_rank()


def group_of_mesh(mesh: DeviceMesh) -> Group | None:
    """Return the process group of all ranks of `mesh`, or None if torch cannot make one. A group that does not exist
    yet is made collectively: all ranks of the default group have to make this call.

    A mesh of one axis has a group. For a part of a mesh of all ranks, its flattened axes give one:
    all ranks make the groups of all such parts together.
    """
    if mesh.ndim == 1:
        return groups_of_axes(mesh)[0]
    root = mesh._get_root_mesh()
    # Flattening is collective, so all ranks have to be in the root.
    if root is mesh or root.size() != dist.get_world_size() or not mesh.mesh_dim_names:
        return None
    name = "_".join(mesh.mesh_dim_names)
    with _converting_errors(mesh):
        flattened = mesh._flatten(f"shardmath_{name}").get_group()
    _check_ranks(flattened, mesh, mesh.mesh)
    return flattened


def groups_of_axes(mesh: DeviceMesh) -> list[Group]:
    """Return this rank's process groups along the axes of `mesh`, in the order of the axes. Raises ExchangeError if
    groups were destroyed."""
    with _converting_errors(mesh):
        groups = mesh.get_all_groups()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        # This rank is not in the mesh.
        return groups
    for axis, group in enumerate(groups):
        # Selects all ranks that differ from this one along this axis only.
        index: list[int | slice] = list(coordinate)
        index[axis] = slice(None)
        _check_ranks(group, mesh, mesh.mesh[tuple(index)])
    return groups


@contextmanager
def _converting_errors(mesh: DeviceMesh) -> Iterator[None]:
    """Turn torch's errors for groups that no longer exist into ExchangeErrors."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        what = f"the process group of {mesh} is gone ({error})"
        raise ExchangeError(f"{what}; make the DeviceMesh again") from error


def _check_ranks(group: Group, mesh: DeviceMesh, expected: Tensor) -> Group:
    """Return the group. Raises ExchangeError if its ranks are not the expected ones of the mesh.

    A mesh finds its groups by name, and torch reuses names after `destroy_process_group`.
    """
    if sorted(ranks_of(group)) != sorted(expected.flatten().tolist()):
        what = f"the process group of {mesh} was destroyed, and another has its name"
        raise ExchangeError(f"{what}; make the DeviceMesh again")
    return group


def rank_or_0() -> int:
    """Return this process's global rank; 0 without a process group."""
    return 0 if is_alone() else dist.get_rank()


def backend_of(group: Group) -> str:
    """Return "nccl" if the group has that backend, else "gloo" if it has that one, else the name that torch gives the
    group's backend."""
    if isinstance(group, JointGroup):
        return group.backend
    name = str(dist.get_backend(group))
    return next((known for known in ("nccl", "gloo") if known in name), name)


def time_limit_of(group: Group) -> float:
    """Return the timeout of the group's collectives, in seconds."""
    device = "cuda" if backend_of(group) == "nccl" else "cpu"
    backend = channel_of(group)._get_backend(torch.device(device))
    limit: timedelta = backend.options._timeout
    return limit.total_seconds()


def device_of(group: Group) -> torch.device:
    """Return the device of the group's tensors: for NCCL a GPU, else the CPU. The GPU is the one that the group was
    bound to when it was made (`device_id`); for an unbound group, it is the current GPU."""
    if backend_of(group) != "nccl":
        return torch.device("cpu")
    bound: torch.device | None = getattr(channel_of(group), "bound_device_id", None)
    return bound or torch.device("cuda", torch.cuda.current_device())


def allow_seconds(group: Group, seconds: float) -> None:
    """Extend the time limit of the group's next work on GPUs to `seconds`, unless the group's own limit is longer;
    torch's watchdog ends the process at the limit. Does nothing if this torch version cannot extend the limit.

    Under TORCH_DISTRIBUTED_DEBUG=DETAIL this has no effect: the group's own limit holds.
    """
    extra_seconds = seconds - time_limit_of(group)
    extend = getattr(
        channel_of(group)._get_backend(torch.device("cuda")), "_add_ephemeral_timeout", None
    )
    if extra_seconds > 0 and extend is not None:
        extend(timedelta(seconds=extra_seconds))


def find_missing(group: Group) -> tuple[str, list[str]]:
    """Return the class name of the NCCL backend of `group`, and a list of the names of attributes and methods that
    shardmath uses but the backend does not have."""
    backend = channel_of(group)._get_backend(torch.device("cuda"))
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    limit = getattr(getattr(backend, "options", None), "_timeout", None)
    is_present = {
        "supports_coalescing": getattr(backend, "supports_coalescing", False),
        "options._timeout": isinstance(limit, timedelta),
        "_add_ephemeral_timeout": hasattr(backend, "_add_ephemeral_timeout"),
    }
    return type(backend).__name__, [name for name, present in is_present.items() if not present]


def store_of(group: Group) -> Store | None:
    """Return the group's key-value store; None if torch no longer knows it."""
    if isinstance(group, JointGroup):
        return group.store
    try:
        return c10d._get_process_group_store(group)
    except (AttributeError, KeyError):
        return None


def packs_saved_tensors() -> bool:
    """Whether hooks that pack autograd's saved tensors, such as activation checkpointing's, are active now.

    Asks torch's private API, as of torch 2.13.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def has_own_connections(group: Group) -> bool:
    """Whether the group is not the default process group; the default group's connections also carry a job's other
    collectives."""
    return group is not dist.group.WORLD


class Spec(NamedTuple):
    """A DTensor's placements, and the order in which mesh dimensions divide the tensor.

    `order` lists the dividing mesh dimensions, first to last, None if they divide left to right; `readings` are the
    possible meanings of the placements: splits from left to right ("placement"), or an order of splits ("order"), which
    FSDP2 writes as strided shards.
    """

    placements: tuple[Placement, ...]
    order: tuple[int, ...] | None
    readings: tuple[Literal["placement", "order"], ...]


def spec_of(tensor: DTensor) -> Spec:
    """Return the DTensor's placements and the order in which they divide it (torch 2.13: DTensorSpec.shard_order)."""
    spec = tensor._spec
    placements = tuple(spec.placements)
    if any(isinstance(p, StridedShard) for p in placements):
        # False if torch itself knows that its strided shards do not stand for an order.
        may_be_order = getattr(spec, "use_strided_shard_as_shard_order", True) is not False
        if may_be_order:
            return Spec(placements, order=None, readings=("placement", "order"))
        return Spec(placements, order=None, readings=("placement",))
    order: list[int] = []
    for entry in getattr(spec, "shard_order", None) or ():
        order += entry.mesh_dims
    # Placements already imply left to right, separately for each tensor dimension.
    implied = sorted(order, key=lambda i: (placements[i].dim, i))  # type: ignore[attr-defined]
    stated_order = tuple(order) if order != implied else None
    # Without strided shards both readings are the same.
    return Spec(placements, stated_order, readings=("placement", "order"))


def in_backward() -> bool:
    """Whether this thread is now running a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1


def hold_nothing(tensor: DTensor) -> None:
    """Set the local tensor of the DTensor `tensor` to an empty tensor with the DTensor's number of dimensions. Call it
    on a rank outside of the DTensor's mesh.

    Torch makes a local tensor of one dimension, with which `to_local` fails in the backward pass (torch 2.13).
    """
    tensor._local_tensor = tensor._local_tensor.new_zeros((0,) * tensor.ndim)


def shape_of_scalar(local: Tensor) -> Tensor:
    """Return a zero of shape (), with the dtype and device of the empty tensor `local`. It replaces `local` on a rank
    outside of the mesh of a scalar DTensor.

    `DTensor.from_local` ignores `shape=()`, and takes the local tensor's shape (torch 2.13).
    """
    # The sum of no elements is 0, and keeps the tensor's place in autograd's graph.
    return local.sum() if local.requires_grad else local.new_zeros(())


def local_of(tensor: DTensor) -> Tensor:
    """Return the DTensor's local tensor itself, not a copy. Unlike `to_local`, the call is not recorded by autograd."""
    return tensor._local_tensor


def identity_of(storage: torch.UntypedStorage) -> int:
    """Return a number that identifies the storage object as long as that object exists. Unlike the address of the
    storage's memory, the number stays unique even if the memory is released earlier, as by a resize to 0."""
    return int(storage._cdata)


def storage_start(tensor: Tensor) -> int | None:
    """Return the offset of a fake tensor's storage in the checkpoint file that it was loaded from; None if unknown. For
    fake tensors, torch.load records this offset instead of reading the data."""
    return tensor.untyped_storage()._checkpoint_offset


def find_flattened(module: nn.Module) -> set[str]:
    """Return the names of parameters of `module` that FSDP1 (FullyShardedDataParallel) holds as parts now: its flat
    parameters, and those that it keeps in flat ones.

    A unit has whole parameters inside `summon_full_params`, and always if it does not shard. A module inside a unit
    does not say whether they are whole, so that its parameters count as parts.
    """
    flattened = {
        name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if getattr(parameter, "_fsdp_flattened", False)
    }
    whole = _list_whole(module) if flattened else set()
    return {name for name, parameter in flattened.items() if id(parameter) not in whole}


def _list_whole(module: nn.Module) -> set[int]:
    """The ids of the parameters that units of FSDP1 in `module` hold whole now."""
    # Takes a second to import, and is imported already if a module has units.
    from torch.distributed.fsdp import FullyShardedDataParallel

    whole: set[int] = set()
    for unit in FullyShardedDataParallel.fsdp_modules(module):
        handle = unit._handle
        # A unit has no handle if all its parameters belong to other units.
        if handle is not None and not handle.is_sharded(handle.flat_param):
            flat = handle.flat_param
            parameters = (flat, *(flat._params or ()), *(flat._shared_params or ()))
            whole.update(map(id, parameters))
    return whole
