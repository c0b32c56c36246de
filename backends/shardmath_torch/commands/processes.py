"""Processes: the ranks of one job as processes on this machine, joined by gloo over the loopback.

1. Each process runs `task(argument, rank, report)`: a function that children can import, and values
   that pickle. `run` returns the results by rank; `report(phase, done, total)` reports progress.
2. torch is imported once: the processes are forked from a server that has it (or spawned, if fork is
   not available, or not safe).
3. The first failure ends the job: a rank that raised, died silently, or stalled for `timeout`
   seconds. It is raised once, with the rank and the phase; errors of other ranks that follow from
   it are dropped.
4. No process outlives `run`, or the process that called it.
5. Ranks connect through a store in this process, on a port that the system chose, so that no other
   process can take the port in between.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Generic, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from shardmath import ExchangeError, ShardError
from shardmath.base.text import word_error
from shardmath_torch.groups.agreement.threads import NAME
from shardmath_torch.groups.compat import TCPStore

__all__ = ["Progress", "Report", "Task", "run"]

A = TypeVar("A")
R = TypeVar("R")
Report: TypeAlias = Callable[[str, float, float], None]
"""A function that takes a phase, how much of it is done, and how much there is to do."""
Task: TypeAlias = Callable[[A, int, Report], R]
"""A function that takes the argument, the rank, and a Report."""

Context: TypeAlias = ForkServerContext | SpawnContext

HOST = "127.0.0.1"
LOOPBACKS = ("lo", "lo0")
"""The network interface of `HOST` on Linux, and on macOS."""
QUIET = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""The environment of children: one thread each, as they share the cores, and no log of gloo's, as lost peers raise."""
REPORT_EVERY = 0.1
"""Seconds between reports of one phase."""
PATIENCE = 5.0
"""Seconds of waiting beyond `timeout`, as ranks that give up on a lost peer have better errors. Also seconds to wait
for other ranks' errors after a first failure, which may follow from one of them."""
STARTING = 60.0
"""Additional seconds until all processes have started, as many that import torch at once are slow."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a rank: its phase, and how much of the phase is done."""

    phase: str = "start"
    done: float = 0.0
    total: float = 0.0


class PeerLost(ExchangeError):
    """The error of a rank whose exchange with another rank broke in gloo, so that the cause is probably at another
    rank."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """A failure of one rank; the job's cause is the first by `order`.

    A silent death comes first, as other failures follow from it; then the earliest that is not the loss of a peer.
    """

    reported: bool
    when: float
    rank: int
    error: ShardError

    @property
    def order(self) -> tuple[bool, bool, float]:
        """A key that sorts the ranks' failures, the likeliest cause of the others first: deaths without a report, then
        errors other than the loss of another rank, then such losses. Among equals, the earliest is first."""
        return self.reported, isinstance(self.error, PeerLost), self.when


@dataclass(frozen=True, slots=True)
class _ChildOrder(Generic[A, R]):
    """The arguments of every child; `port` is the store's, through which ranks connect."""

    task: Task[A, R]
    argument: A
    world: int
    port: int
    timeout: float


@dataclass(frozen=True, slots=True)
class _Child:
    """One rank's process, and the parent's end of its pipe."""

    rank: int
    process: BaseProcess
    pipe: Connection


@dataclass(slots=True)
class _Job(Generic[R]):
    """The children, and their progress, results and failures so far."""

    children: list[_Child]
    progress: dict[int, Progress]
    results: dict[int, R] = field(default_factory=dict)
    failures: list[_Failure] = field(default_factory=list)


def run(
    task: Task[A, R],
    argument: A,
    world: int,
    *,
    timeout: float,
    watch: Callable[[Mapping[int, Progress]], None] = lambda progress: None,
) -> list[R]:
    """Run `task` with `argument` on ranks 0 to world-1, each in a process, and return a list of their results in the
    order of ranks. `watch` is called with every rank's progress, and `timeout` limits, in seconds, each wait of a rank
    for other ranks.

    `timeout` also limits how long all ranks may be silent, that is, report no progress and no result. Raises the first
    failing rank's ShardError, or ExchangeError for any other failure.
    """
    job: _Job[R] = _Job([], {rank: Progress() for rank in range(world)})
    limit = timedelta(seconds=timeout)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
    try:
        with _quiet_environment():
            context = _choose_context(task)
            order = _ChildOrder(task, argument, world, store.port, timeout)
            for rank in range(world):
                job.children.append(_start(context, order, rank))
        _await_results(job, timeout, watch)
        return [job.results[rank] for rank in range(world)]
    finally:
        _end_processes([child.process for child in job.children])


@contextlib.contextmanager
def _quiet_environment() -> Iterator[None]:
    """Set the environment that children inherit, and restore it afterwards."""
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _choose_context(task: Task[A, R]) -> Context:
    """A fork server that has imported torch and the task; or spawning, if a process cannot be forked safely: macOS ends
    forked processes that use some of its libraries, which torch loads."""
    if sys.platform == "darwin" or "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, task.__module__])
    return context


def _start(context: Context, order: _ChildOrder[A, R], rank: int) -> _Child:
    """Start the process of one rank."""
    parent_end, child_end = mp.Pipe()
    args = (order, rank, child_end)
    process = context.Process(target=_run_child, args=args, daemon=True, name=f"rank {rank}")
    process.start()
    # Else this copy of the child's end would keep the pipe open after the child has died.
    child_end.close()
    return _Child(rank, process, parent_end)


def _end_processes(processes: list[BaseProcess]) -> None:
    """Terminate all processes, and kill those that do not end."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(2.0)
        if process.is_alive():
            process.kill()
            process.join()


def _await_results(
    job: _Job[R], timeout: float, watch: Callable[[Mapping[int, Progress]], None]
) -> None:
    """Receive the children's messages until all have returned. Raises the first failure."""
    waiting = {child.pipe: child for child in job.children}
    last_message = time.monotonic()
    while waiting and not job.failures:
        if _receive_all(job, waiting, 0.5):
            last_message = time.monotonic()
        watch(job.progress)
        patience = _choose_patience(job, timeout)
        if time.monotonic() - last_message > patience:
            raise _describe_silence(job, patience, _list_ranks(waiting))
    if job.failures:
        _collect_later_failures(job, waiting)
        raise _find_cause(job, _list_ranks(waiting))


def _list_ranks(waiting: Mapping[Connection, _Child]) -> list[int]:
    return [child.rank for child in waiting.values()]


def _receive_all(job: _Job[R], waiting: dict[Connection, _Child], seconds: float) -> bool:
    """Receive one message of each child that has one within that time. Returns whether any had.

    Children that have ended are removed from `waiting`.
    """
    ready = wait(list(waiting), timeout=seconds)
    for pipe in ready:
        if isinstance(pipe, Connection) and _receive(job, waiting[pipe]):
            del waiting[pipe]
    return bool(ready)


def _choose_patience(job: _Job[R], timeout: float) -> float:
    """Seconds of silence after which the job fails."""
    starting = any(each.phase == "start" for each in job.progress.values())
    patience = timeout + PATIENCE
    return patience + STARTING if starting else patience


def _collect_later_failures(job: _Job[R], waiting: dict[Connection, _Child]) -> None:
    """Collect other failures, for a while, unless a rank died silently, which is the cause."""
    until = time.monotonic() + PATIENCE
    while waiting and all(failure.reported for failure in job.failures):
        seconds_left = until - time.monotonic()
        if seconds_left <= 0:
            return
        _receive_all(job, waiting, seconds_left)


def _find_cause(job: _Job[R], silent: list[int]) -> ShardError:
    """The failure nearest to the cause; if all have lost a peer, the silent ranks are the cause."""
    nearest = min(job.failures, key=lambda failure: failure.order).error
    if not silent or not isinstance(nearest, PeerLost):
        return nearest
    phases = {rank: job.progress[rank].phase for rank in silent}
    stalled = ", ".join(f"rank {rank} stalled in phase {phase!r}" for rank, phase in phases.items())
    fix = "give a longer timeout if it was only slow"
    return ExchangeError(f"{stalled} until the others gave up ({nearest}); {fix}")


def _receive(job: _Job[R], child: _Child) -> bool:
    """Receive one message of the child. Returns whether it was the last."""
    rank = child.rank
    try:
        # ("progress", phase, done, total), ("result", result), or ("failure", time, error).
        word, *values = child.pipe.recv()
    except (EOFError, OSError):
        error = _describe_death(job, child)
        now = time.monotonic()
        job.failures.append(_Failure(reported=False, when=now, rank=rank, error=error))
        return True
    if word == "progress":
        job.progress[rank] = Progress(*values)
        return False
    if word == "result":
        job.results[rank] = values[0]
        job.progress[rank] = Progress("done", 1.0, 1.0)
    else:
        when, error = values
        job.failures.append(_Failure(reported=True, when=when, rank=rank, error=error))
    return True


def _describe_death(job: _Job[R], child: _Child) -> ShardError:
    """The error for a process that ended without a message."""
    child.process.join(1.0)
    code = child.process.exitcode
    cause = f"exit code {code}"
    if code is not None and code < 0:
        cause = f"signal {signal.Signals(-code).name}"
    hint = "read the cause in what it printed above"
    if code == -signal.SIGKILL:
        hint = "it may have run out of memory: give fewer ranks, or a smaller model"
    phase = job.progress[child.rank].phase
    what = f"rank {child.rank} ended with {cause} in phase {phase!r}, without reporting an error"
    return ExchangeError(f"{what}; {hint}")


def _describe_silence(job: _Job[R], seconds: float, ranks: list[int]) -> ShardError:
    """The error for a job whose ranks are all silent."""
    phases = {rank: job.progress[rank].phase for rank in ranks}
    where = ", ".join(f"rank {rank} in phase {phase!r}" for rank, phase in phases.items())
    what = f"no rank sent a message for {seconds:.0f} s: {where}"
    return ExchangeError(f"{what}; give a longer timeout, or fewer ranks")


def _run_child(order: _ChildOrder[A, R], rank: int, pipe: Connection) -> None:
    """The main function of a child: join the group, run the task, send the result or the failure."""
    # Ctrl-C reaches every process of a terminal; the caller of `run` ends the children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_parent, name=NAME, daemon=True).start()
    torch.set_num_threads(1)
    try:
        _join_group(order, rank)
        result = order.task(order.argument, rank, _make_report(pipe))
        pipe.send(("result", result))
        dist.destroy_process_group()
    except Exception as error:
        pipe.send(("failure", time.monotonic(), _make_readable(error, rank)))


def _exit_with_parent() -> None:
    """Exit this process when its parent has ended."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _join_group(order: _ChildOrder[A, R], rank: int) -> None:
    """Join the group of all ranks, over the loopback."""
    # Gloo would use the address of the host's name, which may be a network's, or unreachable.
    for _, name in socket.if_nameindex():
        if name in LOOPBACKS:
            os.environ["GLOO_SOCKET_IFNAME"] = name
    limit = timedelta(seconds=order.timeout)
    store = TCPStore(HOST, order.port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=order.world, timeout=limit)


def _make_report(pipe: Connection) -> Report:
    """`report` for one child: it sends at once if the phase changes or is done, else every REPORT_EVERY seconds."""
    last_progress = Progress()
    sent_at_s = 0.0

    def report(phase: str, done: float, total: float) -> None:
        nonlocal last_progress, sent_at_s
        now = time.monotonic()
        is_due = now - sent_at_s > REPORT_EVERY
        if is_due or phase != last_progress.phase or done >= total:
            last_progress = Progress(phase, done, total)
            sent_at_s = now
            pipe.send(("progress", phase, done, total))

    return report


def _make_readable(error: Exception, rank: int) -> ShardError:
    """The error that the caller gets: a ShardError as it is, gloo's in one line, others with their traceback."""
    if isinstance(error, ShardError):
        return error
    if isinstance(error, RuntimeError) and "gloo" in str(error):
        first_line = str(error).splitlines()[0]
        return PeerLost(f"rank {rank} lost a peer: {first_line}")
    shown = "".join(traceback.format_exception(error)).rstrip()
    what = f"rank {rank} failed: {word_error(error)}"
    return ExchangeError(f"{what}; its traceback:\n{shown}")
