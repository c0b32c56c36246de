"""Collectives: torch's operations between ranks, which every rank has to call equally often.

1. Ranks record without communication, so one may need other runs of its loader than another. If a loader calls
   collectives, its runs depend on nothing that differs between ranks (`recording`).
2. Barriers move no elements. They are not carried out, so ranks may call them in any number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Collectives", "is_barrier", "is_collective", "skip_barrier"]

NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
"""The namespaces of torch's operations between ranks."""
BARRIER = torch.ops.c10d.barrier.default


def is_barrier(func: Any) -> bool:
    """Whether the torch operation `func` is a barrier, as `torch.distributed.barrier` calls it."""
    return bool(func == BARRIER)


def is_collective(func: Any) -> bool:
    """Whether the torch operation `func` moves elements between ranks."""
    return func.namespace in NAMESPACES and not is_barrier(func)


def skip_barrier() -> Any:
    """Return what a barrier returns: a Work, which need not be waited for."""
    # torch's own, of its process groups without communication: other kinds cannot be made in Python.
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


class Collectives(TorchDispatchMode):
    """A torch mode that skips barriers in this thread. `called` is whether it has seen a collective, and `skipped`
    whether it has seen a barrier.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called = False
        self.skipped = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note a collective, and run the operation unless it is a barrier."""
        if is_barrier(func):
            self.skipped = True
            return skip_barrier()
        self.called = self.called or is_collective(func)
        return func(*args, **(kwargs or {}))
