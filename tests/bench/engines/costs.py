"""Costs: what this process takes of memory and of processors between two moments."""

from __future__ import annotations

import ctypes
import time
from typing import NamedTuple

__all__ = ["Cost", "Since", "begin"]

RESET_PEAK = "5"
"""What /proc/PID/clear_refs takes for it: proc(5)."""


class Cost(NamedTuple):
    """How many bytes the process rose by at its peak, and seconds of processors, of all its threads."""

    rise: int
    busy: float


class Since(NamedTuple):
    """A moment: resident bytes, and seconds of processors until then."""

    resident: int
    busy: float

    def end(self) -> Cost:
        """What was taken since then."""
        return Cost(_read("VmHWM") - self.resident, time.process_time() - self.busy)


def begin() -> Since:
    """From here on the peak counts."""
    # What the allocator keeps for itself would hide as much of what is needed next.
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write(RESET_PEAK)
    return Since(_read("VmRSS"), time.process_time())


def _read(what: str) -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(what))
    return int(line.split()[1]) << 10
