"""Memory: resident bytes of this process, now and at their peak since they were asked for."""

from __future__ import annotations

import ctypes

__all__ = ["begin", "read_peak"]

RESET_PEAK = "5"
"""What /proc/PID/clear_refs takes for it: proc(5)."""


def begin() -> int:
    """Resident bytes now. From here on the peak counts."""
    # What the allocator keeps for itself would hide as much of what is needed next.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write(RESET_PEAK)
    return _read("VmRSS")


def read_peak() -> int:
    """The most since `begin`."""
    return _read("VmHWM")


def _read(what: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(what))
    return int(line.split()[1]) << 10
