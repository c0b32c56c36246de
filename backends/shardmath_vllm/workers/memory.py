"""Memory of a layer that is received: on a CPU it comes from the system, and goes back to it.

1. It is in huge pages, if the system has them: to fault in 4 KiB at a time takes longer than to receive the data.
2. It goes back as soon as nobody has the tensor. What vLLM allocates meanwhile comes from glibc's allocator, which
   keeps freed memory for later requests. These are pieces of many sizes, few of which fit where others were, so that a
   worker's memory would grow by several layers.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress

import torch
from torch import Tensor
from vllm.platforms import current_platform

__all__ = ["free", "take_like"]

LEAST = 4 << 20
"""Bytes from which on a tensor has whole huge pages, of mostly 2 MiB."""


def take_like(tensor: Tensor) -> Tensor:
    """Return an empty tensor like `tensor` in separate memory, by mmap. If `tensor` has less than 4 MiB (LEAST) or is
    not on a CPU, `tensor` itself is returned.
    """
    nbytes = tensor.untyped_storage().nbytes()
    if tensor.device.type != "cpu" or nbytes < LEAST:
        return tensor
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Linux may be built without huge pages.
    with suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    cells = torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)
    return cells.as_strided(tensor.shape, tensor.stride())


def free() -> None:
    """Return unused memory to the system by malloc_trim(3), if vLLM runs on CPUs and the allocator has it."""
    if not current_platform.is_cpu():
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
