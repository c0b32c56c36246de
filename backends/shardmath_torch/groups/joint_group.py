"""Joint groups: process groups of several jobs, which torch's registry does not know.

1. Ranks are places in the group, 0 to size - 1, whatever ranks its processes have elsewhere.
2. Callers and movers hold a shell around torch's group, which has the connections. gloo closes connections only when
   nothing refers to its group any more, whatever `abort` and `shutdown` promise (torch 2.13): so `close` drops the
   shell's references to the group and the store.
3. Using a closed shell raises ExchangeError.

All code for such groups that depends on torch's internals is here; `compat` treats them like registered groups.
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
    "all_gather_single",
    "all_gather_single_coalesced",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
)
"""Methods that torch's collectives and callers use."""

_alive: WeakSet[JointGroup] = WeakSet()


class JointGroup(ProcessGroup):
    """A process group over processes of several jobs, as `smt.connect` returns it.

    - `leave`: removes this rank's notes from the store.
    - `serves_store`: whether this process serves the store; None if not known.
    - `origin`: an object to keep alive with the group, as the store whose server it may be.
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
        # Without the store, which torch would keep alive with this object.
        super().__init__(channel.rank(), channel.size())  # type: ignore[call-arg]
        self.backend = backend
        self.label = name
        self.run = run
        self.serves_store = serves_store
        self.store: Store | None = store
        self._origin = origin
        self._channel: ProcessGroup | None = channel
        self._leave: Callable[[], None] | None = leave
        _alive.add(self)

    def __repr__(self) -> str:
        state = "" if self.is_open else ", disconnected"
        return f"<joint group {self.label!r}: rank {self.rank()} of {self.size()} over {self.backend}{state}>"

    @property
    def is_open(self) -> bool:
        """Whether the group still has its connections, which `close` releases."""
        return self._channel is not None

    @property
    def channel(self) -> ProcessGroup:
        """The torch group that has the connections. Read this property again for each call, instead of keeping its
        value. Raises ExchangeError after `close`."""
        if self._channel is None:
            what = f"the joint group {self.label!r} was disconnected"
            raise ExchangeError(f"{what}; make another by smt.connect")
        return self._channel

    def close(self) -> None:
        """Announce in the store that this rank leaves, and drop its connections and store; on NCCL, cancel messages in
        flight. Does not wait for other ranks."""
        channel, self._channel = self._channel, None
        leave, self._leave = self._leave, None
        if channel is not None and self.backend == "nccl":
            # Not `shutdown`, which may wait for the other ranks.
            with suppress(Exception):
                channel.abort()
        try:
            if leave is not None:
                leave()
        finally:
            # Also after a Ctrl-C: to close again does nothing.
            self.store = self._origin = None


def _delegate(name: str) -> Callable[..., Any]:
    """Make a method that calls the channel's method of that name."""

    def call(self: JointGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self.channel, name)(*arguments, **named)

    call.__name__ = name
    return call


for _name in DELEGATED:
    setattr(JointGroup, _name, _delegate(_name))


def list_joint() -> list[JointGroup]:
    """Return a list of the joint groups (groups across jobs) of this process that still exist as objects, even
    disconnected ones."""
    return list(_alive)


def make_channel(
    backend: str, store: Store, rank: int, size: int, seconds: float, name: str
) -> ProcessGroup:
    """Return a new process group of `size` ranks, this process as `rank`, that is connected through `store` and not
    registered with torch. `seconds` is its time limit, and `name` becomes its `group_name`.

    Raises RuntimeError if ranks cannot be reached.
    """
    channel = ProcessGroup(store, rank, size)
    BACKENDS[backend](channel, store, timedelta(seconds=seconds))
    channel._set_group_name(GroupName(name))
    return channel


def _add_gloo(channel: ProcessGroup, store: Store, limit: timedelta) -> None:
    """Connect the channel's ranks by gloo, as torch's `new_group` does."""
    kind = ProcessGroup.BackendType.GLOO
    backend = c10d.ProcessGroupGloo(store, channel.rank(), channel.size(), timeout=limit)
    backend._set_sequence_number_for_group()
    channel._set_default_backend(kind)
    channel._register_backend(torch.device("cpu"), kind, backend)


def _add_nccl(channel: ProcessGroup, store: Store, limit: timedelta) -> None:
    """Connect the channel's ranks by NCCL, as torch's `new_group` does."""
    kind = ProcessGroup.BackendType.NCCL
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = limit
    # As torch's own groups do: without, torch takes a process's first group for the default one.
    options.global_ranks_in_group = list(range(channel.size()))
    backend = c10d.ProcessGroupNCCL(store, channel.rank(), channel.size(), options)
    backend._set_sequence_number_for_group()
    channel._set_default_backend(kind)
    channel._register_backend(torch.device("cuda"), kind, backend)


BACKENDS: dict[str, Callable[[ProcessGroup, Store, timedelta], None]] = {
    "gloo": _add_gloo,
    "nccl": _add_nccl,
}
"""Functions that connect a group, by the name of its backend."""
