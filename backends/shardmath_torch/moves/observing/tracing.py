"""Tracing: `trace`, which writes what is timed of the moves inside it.

    with smt.trace("move.json"):        # every rank writes a file: move.rank0.json, move.rank1.json, ...
        move(mine, out=theirs)

    python -m shardmath trace move.rank*.json --out move.json

1. It is no collective: a rank traces or does not. Its calls in all threads are timed, and kept in memory until the end.
2. Beside what was measured stands what the program's model says (`shardmath.display.traces.model`), from the vote on.
3. The file is made at the end, not while anything moves; also where the block is left by an exception: it shows how
   far each move came.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from shardmath.base.errors import ExchangeError, ShardError
from shardmath.base.text import message_of, shown
from shardmath.display.traces.chrome import write, write_text
from shardmath.display.traces.model import model
from shardmath.display.traces.spans import Clock, Span, Trace, Vote
from shardmath.plans.adjoint import Transposed
from shardmath.plans.flows.topology import H100, Topology, checked
from shardmath.plans.plan import Plan
from shardmath.plans.programs.program import Program
from shardmath_torch.groups import compat
from shardmath_torch.moves.observing.spelling import Timed, find_votes, spell

__all__ = ["Tracer", "find_tracer", "trace"]

Given: TypeAlias = Plan | Transposed | Program

MOST_MARKS = 1 << 20
"""Of a trace, 100 bytes each: calls that begin when there are so many are left out."""

MACHINE = Path("/proc/sys/kernel/random/boot_id")
"""Drawn by Linux at every start: processes that read the same have one clock."""


class Tracer:
    """What is timed inside of one `trace`."""

    def __init__(self) -> None:
        self._calls: list[tuple[Timed, Given | None]] = []
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
        self._calls.append((call, given))
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

    def make_trace(self, topology: Topology | None, with_model: bool) -> Trace:
        """All that was timed, and what models say of it."""
        calls = [call for call, _ in self._calls]
        spans = [span for call in calls for span in spell(call)]
        if with_model:
            spans += self._list_modelled(topology)
        began = self.began_s
        shifted = [span._replace(begin_s=span.begin_s - began) for span in spans]
        rank = calls[0].rank if calls else compat.rank_or_0()
        votes = [Vote(name, at_s - began) for name, at_s in find_votes(calls)]
        clock = Clock(rank, _name_machine(), self.began_ns, tuple(votes))
        return Trace(tuple(shifted), clock, self.left_out)

    def _list_modelled(self, topology: Topology | None) -> Iterator[Span]:
        """What each call that came past its vote should have done."""
        models: dict[str, tuple[Span, ...]] = {}
        free: dict[str, float] = {}
        for call, given in self._calls:
            agreed = call.agreed
            # An adjoint's rounds are no program's.
            if agreed is None or given is None or isinstance(given, Transposed):
                continue
            if given.digest not in models:
                own = isinstance(given, Program)
                where = given.topology if own else topology or given.topology or H100
                models[given.digest] = model(given, topology=where, ranks=[call.rank]).spans
            # A model may take longer than the move, and the next one's stands behind it.
            begin = max(agreed.at_s, free.get(call.thread, 0.0))
            for span in models[given.digest]:
                track = f"{span.track} {call.thread}".rstrip()
                moved = span._replace(begin_s=span.begin_s + begin, track=track)
                free[call.thread] = max(free.get(call.thread, 0.0), moved.end_s)
                yield moved


_tracers: list[Tracer] = []
"""The one that is under way in this process, if any."""


def find_tracer() -> Tracer | None:
    """The trace that is under way in this process."""
    return _tracers[-1] if _tracers else None


@contextmanager
def trace(
    path: str | os.PathLike[str], *, topology: Topology | None = None, model: bool = True
) -> Iterator[None]:
    """Times the moves inside, message by message, and writes a file that Perfetto (ui.perfetto.dev) opens.

    Of "move.json" rank 3 writes "move.rank3.json"; `python -m shardmath trace` merges those of all ranks. Beside each
    move stands what its program, or its plan on `topology` (default: the plan's own, or `shardmath.Topology()`), does
    in the model that `certify` has, whose rounds say how many ranks a node has; `model=False` leaves that out.
    Raises ExchangeError where the file cannot be written, and inside another one.
    """
    if topology is not None:
        checked(topology)
    if _tracers:
        raise ExchangeError("this process is in a smt.trace; leave that one first")
    file = _name_file(path)
    # Now, and not after the moves.
    _write_first(file)
    tracer = Tracer()
    _tracers.append(tracer)
    left: BaseException | None = None
    try:
        yield
    except BaseException as error:
        left = error
        raise
    finally:
        _tracers.remove(tracer)
        _write_last(tracer.make_trace(topology, model), file, left)


def _name_file(path: object) -> Path:
    """The path of this rank's file. Raises ExchangeError for what is no path."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ExchangeError(f"{shown(path)} is no path; give one such as 'move.json'")
    given = Path(path)
    if not given.name:
        raise ExchangeError(f"{shown(path)} names no file; give a path such as 'move.json'")
    return given.with_name(f"{given.stem}.rank{compat.rank_or_0()}{given.suffix or '.json'}")


def _write_first(file: Path) -> None:
    try:
        write_text("", file)
    except ShardError as error:
        raise ExchangeError(
            f"{message_of(error)}; give a path in a folder that is there"
        ) from error


def _write_last(trace: Trace, file: Path, left: BaseException | None) -> None:
    """Write the trace. What the block was left by says more than that this cannot be done."""
    try:
        write(trace, file)
    except ShardError as error:
        if left is None:
            raise ExchangeError(message_of(error)) from error
        left.add_note(f"smt.trace: {message_of(error)}")


def _name_machine() -> str:
    """A name that machines with other clocks do not have."""
    try:
        return MACHINE.read_text().strip()
    except OSError:
        return platform.node()
