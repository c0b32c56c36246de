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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardmath.base.errors import ExchangeError, ShardError
from shardmath.base.text import message_of, shown
from shardmath.display.traces.chrome import write, write_text
from shardmath.display.traces.model import model
from shardmath.display.traces.spans import Clock, Span, Trace, Vote
from shardmath.plans.adjoint import Transposed
from shardmath.plans.flows.topology import H100, Topology, checked
from shardmath.plans.programs.program import Program
from shardmath_torch.groups import compat
from shardmath_torch.moves.observing.spelling import find_votes, spell
from shardmath_torch.moves.observing.tracers import TRACERS, Tracer

__all__ = ["trace"]

MACHINE = Path("/proc/sys/kernel/random/boot_id")
"""Drawn by Linux at every start: processes that read the same have one clock."""


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
    if TRACERS:
        raise ExchangeError("this process is in a smt.trace; leave that one first")
    file = _name_file(path)
    # Now, and not after the moves.
    _write_first(file)
    tracer = Tracer()
    TRACERS.append(tracer)
    left: BaseException | None = None
    try:
        yield
    except BaseException as error:
        left = error
        raise
    finally:
        TRACERS.remove(tracer)
        _write_last(_make_trace(tracer, topology, model), file, left)


def _make_trace(tracer: Tracer, topology: Topology | None, with_model: bool) -> Trace:
    """All that was timed, and what models say of it."""
    calls = [call for call, _ in tracer.calls]
    spans = [span for call in calls for span in spell(call)]
    if with_model:
        spans += _list_modelled(tracer, topology)
    began = tracer.began_s
    shifted = [span._replace(begin_s=span.begin_s - began) for span in spans]
    rank = calls[0].rank if calls else compat.rank_or_0()
    votes = [Vote(name, at_s - began) for name, at_s in find_votes(calls)]
    clock = Clock(rank, _name_machine(), tracer.began_ns, tuple(votes))
    return Trace(tuple(shifted), clock, tracer.left_out)


def _list_modelled(tracer: Tracer, topology: Topology | None) -> Iterator[Span]:
    """What each call that came past its vote should have done."""
    models: dict[str, tuple[Span, ...]] = {}
    free: dict[str, float] = {}
    for call, given in tracer.calls:
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
