"""Tracers: the calls timed inside of one `smt.trace`, of all threads, kept in memory until they are written."""

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
"""Most marks of a trace, at 100 bytes each: once there are this many, further calls are left out."""


class Tracer:
    """The record of the calls inside one `trace` block, kept in memory until the block ends."""

    def __init__(self) -> None:
        self.calls: list[tuple[Timed, Given | None]] = []
        self._thread_names: dict[int, str] = {}
        # The number of calls that have begun and not ended, by thread.
        self._open_calls: Counter[int] = Counter()
        self._mark_count = 0
        self.left_out = 0
        # Read together: the first is the trace's start by the wall clock, the second the zero of its times.
        self.began_ns = time.time_ns()
        self.began_s = time.perf_counter()

    def begin(self, given: Given | None, rank: int, began_s: float) -> Timed | None:
        """Record that a call of `given` (a plan or program) began on `rank` at `began_s`; return the record, or None if
        the trace is full.
        """
        if self._mark_count >= MOST_MARKS:
            self.left_out += 1
            return None
        call = Timed(rank, self._name_tracks(), began_s)
        self.calls.append((call, given))
        self._open_calls[threading.get_ident()] += 1
        return call

    def end(self, call: Timed) -> None:
        """Record that `call` has ended; must run in the thread in which the call began."""
        self._mark_count += len(call.marks)
        self._open_calls[threading.get_ident()] -= 1

    def _name_tracks(self) -> str:
        """The suffix by which the call's tracks differ from tracks of calls at the same time."""
        # Calls nest if a callback tries to move: that raises, and is in the trace. Each level adds a word.
        inside = ["inside"] * self._open_calls[threading.get_ident()]
        return " ".join([self._name_thread(), *inside]).strip()

    def _name_thread(self) -> str:
        """The suffix of the thread's tracks; "" for the main thread."""
        current = threading.current_thread()
        if current is threading.main_thread():
            return ""
        number = threading.get_ident()
        if number not in self._thread_names:
            name = f"in {current.name}"
            # Several threads may have the same name.
            namesakes = list(self._thread_names.values()).count(name)
            self._thread_names[number] = f"{name} ({namesakes + 1})" if namesakes else name
        return self._thread_names[number]


TRACERS: list[Tracer] = []
"""The process's open trace, if any."""


def find_tracer() -> Tracer | None:
    """Return the tracer of the process's open `trace`, None if there is none."""
    return TRACERS[-1] if TRACERS else None
