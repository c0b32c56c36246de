"""Reads: the tensors without data that a loader reads, when it runs on memory that stands in for them.

1. A tensor is read by an operation that gets it, or a view of it, unless this writes it or takes only its shape. Memory
   that Python or numpy gets is read, too.
2. Values that were written before, to any part of the tensor, are the loader's own.
3. What a loader writes into the tensors that are `replaced` is lost: it has kept them from before the run.

>>> import torch
>>> own = {"flag": torch.zeros(1), "weight": torch.zeros(2)}
>>> with Reads(own) as reads:
...     _ = own["weight"].fill_(3).max()
...     _ = own["flag"].view(1, 1).item()
>>> reads.names
{'flag'}
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardmath_torch.tensors.refits.before import key_of
from shardmath_torch.tensors.refits.operations import (
    CALLS_PYTHON,
    GIVES_MEMORY,
    find_written,
    list_tensors,
    makes_views,
)
from shardmath_torch.tensors.refits.threads import FollowingMode

__all__ = ["Reads"]


class Reads(FollowingMode):
    """A torch mode that notes each given tensor that an operation reads before any operation writes to it, in this
    thread and in those that it starts. The tensors' names are collected in `names`.

    `lost` has the names of the tensors without data, among those `replaced`, into which an operation writes.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], replaced: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.lost: set[str] = set()
        self._written: set[str] = set()
        self._tensors: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in chain(tensors.items(), (replaced or {}).items()):
            # `data` are aliases, which keep their memory if a loader gives the tensor other memory.
            self._tensors.setdefault(key_of(tensor), []).append((name, tensor.data))
        self._memory = _Memory(self)

    def __enter__(self) -> Reads:
        """Note what this thread reads, and those that it starts."""
        self.followed.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._memory.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop, and give up the tensors: threads that outlive the loader keep their modes, and these keep this one."""
        self.followed.__exit__()
        self._memory.__exit__(*raised)  # type: ignore[no-untyped-call]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._tensors.clear()

    def enter_thread(self) -> None:
        """Note what this thread reads, which a thread with this mode has started."""
        super().enter_thread()
        _Memory(self).__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note what the operation reads and writes, and run it."""
        kwargs = kwargs or {}
        # A view reads nothing until an operation uses it.
        if not makes_views(func) and not _takes_shape(func):
            written = find_written(func, args, kwargs)
            arguments = list_tensors((args, kwargs))
            self.read(one for one in arguments if not any(one is into for into in written))
            self.write(written)
        return func(*args, **kwargs)

    def read(self, given: Iterable[Tensor]) -> None:
        """Record that an operation reads the tensors `given`: add to `names` the name of each watched tensor (passed to
        the constructor) that shares memory with one of them. Watched tensors that were written earlier are skipped.
        """
        self.names |= self._find(given) - self._written

    def write(self, written: Sequence[Tensor]) -> None:
        """Record that an operation writes into these tensors: watched tensors that share memory with one of them are
        not read later, and are `lost` if it is on the meta device.
        """
        self._written |= self._find(written)
        self.lost |= self._find(into for into in written if into.is_meta)

    def _find(self, given: Iterable[Tensor]) -> set[str]:
        """The names of tensors that share memory with one of these."""
        names = set()
        for one in given:
            # A sparse tensor's memory is in its parts: operations on them are seen one by one.
            if one.layout != torch.strided:
                continue
            for name, tensor in self._tensors.get(key_of(one), ()):
                low, high = _span(tensor)
                first, last = _span(one)
                if first < high and low < last:
                    names.add(name)
        return names


class _Memory(TorchFunctionMode):
    """The mode that notes functions that give memory or elements to Python or numpy, which are no operations."""

    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note what the function reads and writes, and call it."""
        if func in GIVES_MEMORY:
            self._reads.read(list_tensors(args[:1]))
        if func in CALLS_PYTHON:
            self._reads.read(list_tensors(args))
            self._reads.write(args[:1])
        return func(*args, **(kwargs or {}))


def _takes_shape(func: Any) -> bool:
    """Whether the operation takes a tensor for its shape, type and device."""
    name: str = func.overloadpacket.__name__
    return name.startswith("new_") or name.endswith("_like")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The first byte of the tensor in its memory, and the one behind its last."""
    if not tensor.numel():
        return 0, 0
    first = int(tensor.storage_offset())
    last = first + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first * tensor.element_size(), (last + 1) * tensor.element_size()
