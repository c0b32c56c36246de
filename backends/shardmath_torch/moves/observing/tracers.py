"""Tracers: what is timed inside of one `smt.trace`, call by call, until it is written.

Calls of all threads are timed, and kept in memory.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import TypeAlias

from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.plans.programs.program import Program
from shardmath_torch.moves.observing.spelling import Timed

__all__ = ["TRACERS", "Given", "Tracer", "find_tracer"]

Given: TypeAlias = Plan | Transposed | Program

MOST_MARKS = 1 << 20
"""Of a trace, 100 bytes each: calls that begin when there are so many are left out."""


class Tracer:
    """What is timed inside of one `trace`."""

    def __init__(self) -> None:
        self.calls: list[tuple[Timed, Given | None]] = []
        self._threads: dict[int, str] = {}
        self._under_way: Counter[int] = Counter()
        self._marks = 0
        self.left_out = 0
        # Both at once: one says when the trace began, the other what times are counted from.
        self.began_ns = time.time_ns()
        self.began_s = time.perf_counter()

    def begin(self, given: Given | None, rank: int, began_s: float) -> Timed | None:
        """A call that now begins; None where there is no room for it."""
        if self._marks >= MOST_MARKS:
            self.left_out += 1
            return None
        call = Timed(rank, self._name_tracks(), began_s)
        self.calls.append((call, given))
        self._under_way[threading.get_ident()] += 1
        return call

    def end(self, call: Timed) -> None:
        """The call is over, on the thread on which it began."""
        self._marks += len(call.marks)
        self._under_way[threading.get_ident()] -= 1

    def _name_tracks(self) -> str:
        """What tells the call's tracks from those of others that are under way at the same time."""
        # A callback may try to move: that is refused, and shown.
        inside = ["inside"] * self._under_way[threading.get_ident()]
        return " ".join([self._name_thread(), *inside]).strip()

    def _name_thread(self) -> str:
        """What tells the thread's tracks from those of others; "" for the main one."""
        here = threading.current_thread()
        if here is threading.main_thread():
            return ""
        number = threading.get_ident()
        if number not in self._threads:
            name = f"in {here.name}"
            # Threads may have one name.
            known = list(self._threads.values()).count(name)
            self._threads[number] = f"{name} ({known + 1})" if known else name
        return self._threads[number]


TRACERS: list[Tracer] = []
"""The one that is under way in this process, if any."""


def find_tracer() -> Tracer | None:
    """The trace that is under way in this process."""
    return TRACERS[-1] if TRACERS else None
