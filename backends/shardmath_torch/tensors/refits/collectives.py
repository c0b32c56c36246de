"""Collectives: torch's operations between ranks, which every rank has to call equally often.

1. Ranks record without communication, so one may need other runs of its loader than another. If a loader calls
   collectives, its runs depend on nothing that differs between ranks (`recording`).
2. Barriers move no elements. They are carried out in the first call of the loader that comes to one, which every rank
   makes, so that a rank may wait for a file that another one writes. In later calls they are skipped, so ranks may
   differ in the number of these.
"""

from __future__ import annotations

from typing import Any

import torch

from shardmath_torch.groups import compat
from shardmath_torch.tensors.refits.threads import FollowingMode

__all__ = ["Barriers", "Collectives", "is_barrier", "is_collective"]

NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}
"""The namespaces of torch's operations between ranks."""
BARRIER = torch.ops.c10d.barrier.default


def is_barrier(func: Any) -> bool:
    """Whether the torch operation `func` is a barrier, as `torch.distributed.barrier` calls it."""
    return bool(func == BARRIER)


def is_collective(func: Any) -> bool:
    """Whether the torch operation `func` moves elements between ranks."""
    return func.namespace in NAMESPACES and not is_barrier(func)


class Barriers:
    """The barriers of a loader. `met` is whether it has called any."""

    def __init__(self) -> None:
        self.met = False
        self._is_over = False

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry out a barrier in the first call of the loader that comes to one, and skip it in later calls."""
        self.met = True
        return _skip() if self._is_over else func(*args, **kwargs)

    def end_call(self) -> None:
        """Note that a call of the loader is over."""
        self._is_over = self.met


def _skip() -> Any:
    """Return what a barrier returns: a Work, which need not be waited for."""
    return compat.finish_at_once()


class Collectives(FollowingMode):
    """A torch mode that hands barriers to `barriers`. `called` is whether it has seen a collective."""

    def __init__(self, barriers: Barriers) -> None:
        super().__init__()
        self.called = False
        self._barriers = barriers

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note a collective, and run the operation."""
        if is_barrier(func):
            return self._barriers.call(func, args, dict(kwargs or {}))
        self.called = self.called or is_collective(func)
        return func(*args, **(kwargs or {}))
