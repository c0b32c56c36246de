"""The one place for what torch keeps to itself or changes between versions (2.11 and later)."""

from __future__ import annotations

import os
from typing import TypeAlias

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from shardmath.errors import ExchangeError

__all__ = ["Group", "Store", "backend_of", "group_of", "my_rank", "next_key", "ranks_of", "store_host", "store_of"]

Group: TypeAlias = dist.ProcessGroup


def group_of(group: Group | None) -> Group:
    """The group, or the default one. Raises ExchangeError where there is none, or this process is not in it."""
    if not dist.is_available() or not dist.is_initialized():
        raise ExchangeError(
            "torch.distributed has no process group; call torch.distributed.init_process_group on every rank before compile"
        )
    found = dist.group.WORLD if group is None else group
    if found is None or dist.get_rank(found) < 0:
        raise ExchangeError(f"rank {dist.get_rank()} is not in the group; call compile only on the ranks of the group")
    return found


def ranks_of(group: Group) -> tuple[int, ...]:
    """Global ranks of the group, in the group's order."""
    return tuple(dist.get_process_group_ranks(group))


def my_rank() -> int:
    """This process's global rank."""
    return dist.get_rank()


def backend_of(group: Group) -> str:
    """"nccl" or "gloo", the better of those that the group has; otherwise what torch calls it."""
    name = str(dist.get_backend(group))
    return next((known for known in ("nccl", "gloo") if known in name), name)


def store_of(group: Group) -> Store | None:
    """The group's key-value store; None where torch no longer says."""
    try:
        return c10d._get_process_group_store(group)
    except (AttributeError, KeyError):
        return None


def store_host(store: Store | None) -> int | None:
    """The global rank whose process serves the store; None where that is no rank (torchrun's agent, a file)."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore) or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    return 0


def next_key(group: Group, rank: int) -> str:
    """A name for this rank's next collective object on the group: the same on all ranks that make as many."""
    store = store_of(group)
    return str(store.add(f"shardmath/made/{rank}", 1)) if store is not None else "0"
