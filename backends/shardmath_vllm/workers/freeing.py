"""Freeing: on a CPU, memory that was freed goes back to the system.

glibc's allocator keeps what is freed for whoever asks next. Layers come in pieces of many sizes, few of which fit where
others were, so that a worker's memory would grow by several layers.
"""

from __future__ import annotations

import ctypes

from vllm.platforms import current_platform

__all__ = ["free"]


def free() -> None:
    """Give back what is kept, where the allocator can: malloc_trim(3)."""
    if not current_platform.is_cpu():
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
