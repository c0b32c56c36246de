"""Tracing: `trace`, which writes the times of the moves inside of it.

    with smt.trace("move.json"):        # every rank writes a file: move.rank0.json, move.rank1.json, ...
        move(mine, out=theirs)

    python -m shardmath trace move.rank*.json --out move.json

1. It is not collective: each rank may trace or not. Calls in all threads are timed, and kept in memory until the end.
2. Next to the measured times are the times by the program's model (`shardmath.display.traces.model`), from the vote on.
3. The file is written at the end, not while anything moves, even if an exception ends the block: it shows how far each
   move came.
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
"""A random text that Linux draws at every boot: processes with equal texts share a clock."""


@contextmanager
@compat.untraced
def trace(
    path: str | os.PathLike[str], *, topology: Topology | None = None, model: bool = True
) -> Iterator[None]:
    """Time each message of the moves in the `with` block, and write one file per rank for the viewer Perfetto
    (ui.perfetto.dev): for `path` "move.json", rank 3 writes "move.rank3.json". If `model` is True, the file also has
    the times that a cost model predicts for the network `topology`.

    `python -m shardmath trace` merges the files of all ranks. Next to each move are the times of its program, or of its
    plan on `topology` (default: the plan's own, or `shardmath.Topology()`), by the model of `certify`, whose rounds
    tell how many ranks a node has; `model=False` leaves these out. Raises ExchangeError if the file cannot be written,
    and inside of another trace.
    """
    if topology is not None:
        checked(topology)
    if TRACERS:
        what = "smt.trace was called inside of another smt.trace of this process"
        raise ExchangeError(f"{what}; end that one first")
    file = _name_file(path)
    # Before the moves, so that an error does not come after them.
    _write_first(file)
    tracer = Tracer()
    TRACERS.append(tracer)
    cause: BaseException | None = None
    try:
        yield
    except BaseException as error:
        cause = error
        raise
    finally:
        TRACERS.remove(tracer)
        _write_last(_make_trace(tracer, topology, model), file, cause)


def _make_trace(tracer: Tracer, topology: Topology | None, with_model: bool) -> Trace:
    """The spans of all timed calls, and of their models."""
    calls = [call for call, _ in tracer.calls]
    spans = [span for call in calls for span in spell(call)]
    if with_model:
        spans += _list_modeled(tracer, topology)
    began = tracer.began_s
    shifted = [span._replace(begin_s=span.begin_s - began) for span in spans]
    rank = calls[0].rank if calls else compat.rank_or_0()
    votes = [Vote(name, at_s - began) for name, at_s in find_votes(calls)]
    clock = Clock(rank, _name_machine(), tracer.began_ns, tuple(votes))
    return Trace(tuple(shifted), clock, tracer.left_out)


def _list_modeled(tracer: Tracer, topology: Topology | None) -> Iterator[Span]:
    """The model's spans for each call that came past its vote."""
    models: dict[str, tuple[Span, ...]] = {}
    # By thread, when the models so far end.
    ends_s: dict[str, float] = {}
    for call, given in tracer.calls:
        agreed = call.agreed
        # There is no model for adjoints, whose rounds are not a program's.
        if agreed is None or given is None or isinstance(given, Transposed):
            continue
        if given.digest not in models:
            # A program has a topology; a plan has none unless it was made with one.
            plan_topology = topology or given.topology or H100
            network = given.topology if isinstance(given, Program) else plan_topology
            models[given.digest] = model(given, topology=network, ranks=[call.rank]).spans
        # A model may take longer than the move: then the next move's model comes after it.
        begin = max(agreed.at_s, ends_s.get(call.thread, 0.0))
        for span in models[given.digest]:
            track = f"{span.track} {call.thread}".rstrip()
            shifted = span._replace(begin_s=span.begin_s + begin, track=track)
            ends_s[call.thread] = max(ends_s.get(call.thread, 0.0), shifted.end_s)
            yield shifted


def _name_file(path: object) -> Path:
    """The path of this rank's file. Raises ExchangeError for an object that is not a path to a file."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise ExchangeError(f"path={shown(path)} is not a path; pass one such as 'move.json'")
    given = Path(path)
    if not given.name:
        raise ExchangeError(f"path={shown(path)} names no file; pass one such as 'move.json'")
    return given.with_name(f"{given.stem}.rank{compat.rank_or_0()}{given.suffix or '.json'}")


def _write_first(file: Path) -> None:
    try:
        write_text("", file)
    except ShardError as error:
        raise ExchangeError(message_of(error)) from error


def _write_last(trace: Trace, file: Path, cause: BaseException | None) -> None:
    """Write the trace. If that fails after an exception ended the block, only add a note to the exception."""
    try:
        write(trace, file)
    except ShardError as error:
        if cause is None:
            raise ExchangeError(message_of(error)) from error
        cause.add_note(f"smt.trace: {message_of(error)}")


def _name_machine() -> str:
    """A name that no machine with another clock has."""
    try:
        return MACHINE.read_text().strip()
    except OSError:
        return platform.node()
