"""Memory of a layer that is received: on a CPU it comes from the system, and goes back to it.

1. It is in huge pages, if the system has them: to fault in 4 KiB at a time takes longer than to receive the data.
2. It goes back as soon as nobody has the tensor. What vLLM allocates meanwhile comes from glibc's allocator, which
   keeps freed memory for later requests. These are pieces of many sizes, few of which fit where others were, so that a
   worker's memory would grow by several layers.
3. Where vLLM packs what is received into memory of a kernel, a layer's kernels are freed before. What they had is
   enough for the new ones, so the memory in which the layer was received need not go back: the next layer is received
   in it (`Lent`). To fault new memory in takes a third of the time to receive the data.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor
from vllm.platforms import current_platform

__all__ = ["Lent", "free", "take_like"]

LEAST = 4 << 20
"""Bytes from which on a tensor has whole huge pages, of mostly 2 MiB."""


class Lent:
    """Memory of the tensors of one update, by its bytes: what a tensor no longer needs, the next of its size gets."""

    def __init__(self) -> None:
        self._unused: dict[int, list[mmap.mmap]] = {}
        self._ended = False

    def take(self, nbytes: int) -> np.ndarray:
        """Return memory that comes back here once nobody has it."""
        unused = self._unused.get(nbytes)
        memory = unused.pop() if unused else _map(nbytes)
        cells = np.frombuffer(memory, dtype=np.uint8)
        weakref.finalize(cells, self._take_back, memory).atexit = False
        return cells

    def _take_back(self, memory: mmap.mmap) -> None:
        """Keep the memory for another tensor, unless the update has ended."""
        if not self._ended:
            self._unused.setdefault(len(memory), []).append(memory)

    def drop(self) -> None:
        """Return to the system what nobody has."""
        self._unused.clear()

    def end(self) -> None:
        """Return to the system what nobody has, and from now on whatever comes back."""
        self._ended = True
        self.drop()


def take_like(tensor: Tensor, lent: Lent | None = None) -> Tensor:
    """Return an empty tensor like `tensor` in separate memory, by mmap, or in memory of `lent` if given. If `tensor`
    has less than 4 MiB (LEAST) or is not on a CPU, `tensor` itself is returned.
    """
    nbytes = tensor.untyped_storage().nbytes()
    if tensor.device.type != "cpu" or nbytes < LEAST:
        return tensor
    memory = np.frombuffer(_map(nbytes), dtype=np.uint8) if lent is None else lent.take(nbytes)
    cells = torch.from_numpy(memory).view(tensor.dtype)
    return cells.as_strided(tensor.shape, tensor.stride())


def _map(nbytes: int) -> mmap.mmap:
    """Memory of the system, in huge pages if it has them."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Linux may be built without huge pages.
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def free() -> None:
    """Return unused memory to the system by malloc_trim(3), if vLLM runs on CPUs and the allocator has it."""
    if not current_platform.is_cpu():
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
