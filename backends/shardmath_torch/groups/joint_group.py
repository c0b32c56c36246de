"""Joint groups: process groups of several jobs, which torch's registry does not know.

1. Ranks are places in the group, 0 to size - 1, whatever ranks its processes have elsewhere.
2. What callers and movers hold is a shell around the group that has the connections. gloo gives those back only once
   nobody holds its group, whatever `abort` and `shutdown` say (torch 2.13): `close` lets go of it, and of the store.
3. Whoever uses a shell that was closed gets an ExchangeError.

All that is torch's own about such groups is here; `compat` treats them and registered groups alike.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
from torch._C._distributed_c10d import ProcessGroup, Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from shardmath.base.errors import ExchangeError

__all__ = ["BACKENDS", "JointGroup", "list_joint", "make_channel"]

DELEGATED = (
    "_allgather_base",
    "_end_coalescing",
    "_get_backend",
    "_reduce_scatter_base",
    "_start_coalescing",
    "abort",
    "allgather",
    "allreduce",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
"""What torch's own collectives call, and callers may."""

_alive: WeakSet[JointGroup] = WeakSet()


class JointGroup(ProcessGroup):
    """A process group of several jobs, in a run that they share.

    `leave` has the store forget this rank; `serves_store`: this process serves the store, None where that is not known;
    `origin`: what is kept as long as the group, as the store's server may end with it.
    """

    def __init__(
        self,
        channel: ProcessGroup,
        store: Store,
        backend: str,
        name: str,
        run: str,
        leave: Callable[[], None],
        serves_store: bool | None = None,
        origin: object = None,
    ) -> None:
        # Without a store, which this would keep for as long as itself.
        super().__init__(channel.rank(), channel.size())  # type: ignore[call-arg]
        self.backend = backend
        self.label = name
        self.run = run
        self.serves_store = serves_store
        self.store: Store | None = store
        self._origin = origin
        self._open: ProcessGroup | None = channel
        self._leave: Callable[[], None] | None = leave
        _alive.add(self)

    def __repr__(self) -> str:
        state = "" if self.is_open else ", disconnected"
        return f"<joint group {self.label!r}: rank {self.rank()} of {self.size()} over {self.backend}{state}>"

    @property
    def is_open(self) -> bool:
        """Whether it has its connections."""
        return self._open is not None

    @property
    def channel(self) -> ProcessGroup:
        """The group that has the connections. Raises ExchangeError once it is closed; hold it for one call."""
        if self._open is None:
            what = f"the joint group {self.label!r} was disconnected"
            raise ExchangeError(f"{what}; make another by smt.connect")
        return self._open

    def close(self) -> None:
        """Give connections and store back, on this rank alone. What is on its way is cancelled."""
        channel, self._open = self._open, None
        leave, self._leave = self._leave, None
        if channel is not None and self.backend == "nccl":
            # Not `shutdown`, which may wait for the other ranks.
            with suppress(Exception):
                channel.abort()
        if leave is not None:
            leave()
        self.store = self._origin = None


def _delegate(name: str) -> Callable[..., Any]:
    """The method of that name, as the group that has the connections does it."""

    def call(self: JointGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self.channel, name)(*arguments, **named)

    call.__name__ = name
    return call


for _name in DELEGATED:
    setattr(JointGroup, _name, _delegate(_name))


def list_joint() -> list[JointGroup]:
    """The joint groups of this process that anybody holds."""
    return list(_alive)


def make_channel(
    backend: str, store: Store, rank: int, size: int, seconds: float, name: str
) -> ProcessGroup:
    """A group that torch's registry does not know; connecting takes at most so many seconds.

    Raises RuntimeError where ranks cannot be reached.
    """
    channel = ProcessGroup(store, rank, size)
    BACKENDS[backend](channel, store, timedelta(seconds=seconds))
    channel._set_group_name(GroupName(name))
    return channel


def _add_gloo(channel: ProcessGroup, store: Store, limit: timedelta) -> None:
    kind = ProcessGroup.BackendType.GLOO
    made = c10d.ProcessGroupGloo(store, channel.rank(), channel.size(), timeout=limit)
    made._set_sequence_number_for_group()
    channel._set_default_backend(kind)
    channel._register_backend(torch.device("cpu"), kind, made)


def _add_nccl(channel: ProcessGroup, store: Store, limit: timedelta) -> None:
    kind = ProcessGroup.BackendType.NCCL
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = limit
    # As torch's own groups say it: without, the first one of a process is taken for the default group.
    options.global_ranks_in_group = list(range(channel.size()))
    made = c10d.ProcessGroupNCCL(store, channel.rank(), channel.size(), options)
    made._set_sequence_number_for_group()
    channel._set_default_backend(kind)
    channel._register_backend(torch.device("cuda"), kind, made)


BACKENDS: dict[str, Callable[[ProcessGroup, Store, timedelta], None]] = {
    "gloo": _add_gloo,
    "nccl": _add_nccl,
}
"""How a group gets its connections, by the name of its backend."""
