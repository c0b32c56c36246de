"""Processes: the ranks of one job as processes on this machine, joined by gloo over the loopback.

1. Each process runs `task(argument, rank, say)`: a function that children can import, and values
   that pickle. What it returns comes back by rank; `say(phase, done, total)` is its progress.
2. torch is imported once: the processes are forked from a server that has it (spawned where there
   is no fork).
3. The first failure ends the job: a rank that raised, that died without a word, or that stalled for
   `timeout` seconds. It is raised here once, with the rank and the phase; what the other ranks made
   of it is dropped.
4. No process outlives `run`, and none outlives the process that called it.
5. They meet at a store in this process, on a port that the system chose, so that nobody can take
   the port in between.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
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
from torch._C._distributed_c10d import TCPStore

from shardmath import ExchangeError, ShardError

__all__ = ["Progress", "Say", "Task", "run"]

A = TypeVar("A")
R = TypeVar("R")
Say: TypeAlias = Callable[[str, float, float], None]
Task: TypeAlias = Callable[[A, int, Say], R]

Context: TypeAlias = ForkServerContext | SpawnContext

HOST = "127.0.0.1"
QUIET = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Many processes share the cores: one thread each. Gloo's log of a lost peer is our error, said once."""
SAY_EVERY = 0.1
"""Seconds."""
PATIENCE = 5.0
"""Seconds beyond `timeout`: ranks give up on a lost peer by themselves, and their word is better than ours. Also the
time for the others' words after a first failure, so that a cause may overtake its echo."""
STARTING = 60.0
"""Seconds more until all have started: many processes that import torch at once are slow."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where one rank is: its phase, and how much of it is done."""

    phase: str = "start"
    done: float = 0.0
    total: float = 0.0


class Lost(ExchangeError):
    """What a rank raises whose peer has gone: the cause lies elsewhere."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """Why the job ends.

    A silent death comes first, for all else is its echo; then the earliest that is no echo.
    """

    spoken: bool
    when: float
    rank: int
    error: ShardError

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Smaller is nearer to the cause."""
        return self.spoken, isinstance(self.error, Lost), self.when


@dataclass(frozen=True, slots=True)
class _Rank:
    """One child, and our end of its pipe."""

    rank: int
    process: BaseProcess
    pipe: Connection


@dataclass(slots=True)
class _Job(Generic[R]):
    """What is known of the ranks so far."""

    ranks: list[_Rank]
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
    """Run the task on ranks 0..world-1 and return what each returned.

    `timeout`, in seconds, bounds every wait inside the group and the silence of all ranks together;
    `watch` is called with every rank's progress. Raises the first rank's ShardError, or
    ExchangeError for any other end.
    """
    job: _Job[R] = _Job([], {rank: Progress() for rank in range(world)})
    limit = timedelta(seconds=timeout)
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=limit)
    try:
        with _quiet():
            context = _choose_context(task)
            for rank in range(world):
                job.ranks.append(_start(context, task, argument, rank, world, store.port, timeout))
        _listen(job, timeout, watch)
        return [job.results[rank] for rank in range(world)]
    finally:
        _end([child.process for child in job.ranks])


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The environment that children inherit."""
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
    """A server that has imported torch and the task, to fork from; a fresh start where there is no fork."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, task.__module__])
    return context


def _start(
    context: Context,
    task: Task[A, R],
    argument: A,
    rank: int,
    world: int,
    port: int,
    timeout: float,
) -> _Rank:
    """One child, started."""
    ours, theirs = mp.Pipe()
    child = (task, argument, rank, world, port, timeout, theirs)
    process = context.Process(target=_child, args=child, daemon=True, name=f"rank {rank}")
    process.start()
    theirs.close()
    return _Rank(rank, process, ours)


def _end(processes: list[BaseProcess]) -> None:
    """Ask all to end, and make those that do not."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(2.0)
        if process.is_alive():
            process.kill()
            process.join()


def _listen(job: _Job[R], timeout: float, watch: Callable[[Mapping[int, Progress]], None]) -> None:
    """Hear the ranks out until all have returned. Raises the first failure."""
    waiting = {child.pipe: child for child in job.ranks}
    heard = time.monotonic()
    while waiting and not job.failures:
        if _receive_all(job, waiting, 0.5):
            heard = time.monotonic()
        watch(job.progress)
        patience = _choose_patience(job, timeout)
        if time.monotonic() - heard > patience:
            raise _describe_silence(job, patience, _ranks_of(waiting))
    if job.failures:
        _collect_echoes(job, waiting)
        raise _find_cause(job, _ranks_of(waiting))


def _ranks_of(waiting: Mapping[Connection, _Rank]) -> list[int]:
    return [child.rank for child in waiting.values()]


def _receive_all(job: _Job[R], waiting: dict[Connection, _Rank], seconds: float) -> bool:
    """One message of each child that has one within that time; whether any had.

    Who has ended waits no more.
    """
    ready = wait(list(waiting), timeout=seconds)
    for pipe in ready:
        if isinstance(pipe, Connection) and _receive(job, waiting[pipe]):
            del waiting[pipe]
    return bool(ready)


def _choose_patience(job: _Job[R], timeout: float) -> float:
    """Seconds of silence before the job is given up."""
    starting = any(at.phase == "start" for at in job.progress.values())
    patience = timeout + PATIENCE
    return patience + STARTING if starting else patience


def _collect_echoes(job: _Job[R], waiting: dict[Connection, _Rank]) -> None:
    """Collect what else fails, for a while, unless the cause is plain: a rank that died without a word."""
    until = time.monotonic() + PATIENCE
    while waiting and all(failure.spoken for failure in job.failures):
        left = until - time.monotonic()
        if left <= 0:
            return
        _receive_all(job, waiting, left)


def _find_cause(job: _Job[R], silent: list[int]) -> ShardError:
    """The failure nearest to the cause; where all are echoes, the ranks that say nothing are the cause."""
    nearest = min(job.failures, key=lambda failure: failure.order).error
    if not silent or not isinstance(nearest, Lost):
        return nearest
    at = ", ".join(f"rank {rank} stalled in {job.progress[rank].phase!r}" for rank in silent)
    fix = "give a longer timeout if it was only slow"
    return ExchangeError(f"{at} until the others gave up ({nearest}); {fix}")


def _receive(job: _Job[R], child: _Rank) -> bool:
    """One message of the child; whether it was the last."""
    rank = child.rank
    try:
        word, *values = child.pipe.recv()
    except (EOFError, OSError):
        error = _describe_death(job, child)
        job.failures.append(_Failure(False, time.monotonic(), rank, error))
        return True
    if word == "progress":
        job.progress[rank] = Progress(*values)
        return False
    if word == "result":
        job.results[rank] = values[0]
        job.progress[rank] = Progress("done", 1.0, 1.0)
    else:
        when, error = values
        job.failures.append(_Failure(True, when, rank, error))
    return True


def _describe_death(job: _Job[R], child: _Rank) -> ShardError:
    """The error of a process that ended without a word."""
    child.process.join(1.0)
    code = child.process.exitcode
    cause = f"exit code {code}"
    if code is not None and code < 0:
        cause = f"signal {signal.Signals(-code).name}"
    hint = "see what it printed above"
    if code == -signal.SIGKILL:
        hint = "it may have run out of memory"
    phase = job.progress[child.rank].phase
    what = f"rank {child.rank} ended with {cause} while in {phase!r}, without a word"
    return ExchangeError(f"{what}; {hint}")


def _describe_silence(job: _Job[R], seconds: float, ranks: list[int]) -> ShardError:
    """The error of a job of which nothing is heard."""
    at = ", ".join(f"rank {rank} in {job.progress[rank].phase!r}" for rank in ranks)
    what = f"no rank was heard of for {seconds:.0f} s: {at}"
    return ExchangeError(f"{what}; give a longer timeout, or fewer ranks")


def _child(
    task: Task[A, R],
    argument: A,
    rank: int,
    world: int,
    port: int,
    timeout: float,
    pipe: Connection,
) -> None:
    """What a process does: join the group, run the task, say how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    try:
        _join(rank, world, port, timeout)
        say = _make_say(pipe)
        result = task(argument, rank, say)
        pipe.send(("result", result))
        dist.destroy_process_group()
    except Exception as error:
        pipe.send(("failure", time.monotonic(), _make_readable(error, rank)))


def _leave_with_parent() -> None:
    """End this process when its parent has ended."""
    parent = mp.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _join(rank: int, world: int, port: int, timeout: float) -> None:
    """Join the group of all ranks, over the loopback."""
    if os.path.isdir("/sys/class/net/lo"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=timeout)
    store = TCPStore(HOST, port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


def _make_say(pipe: Connection) -> Say:
    """`say` for one child: at once where the phase changes, else every SAY_EVERY seconds."""
    last = Progress()
    said = 0.0

    def say(phase: str, done: float, total: float) -> None:
        nonlocal last, said
        now = time.monotonic()
        due = now - said > SAY_EVERY
        if due or phase != last.phase or done >= total:
            last, said = Progress(phase, done, total), now
            pipe.send(("progress", phase, done, total))

    return say


def _make_readable(error: Exception, rank: int) -> ShardError:
    """The error as the caller shall see it: ours as it is, gloo's in one line, any other with its traceback."""
    if isinstance(error, ShardError):
        return error
    if isinstance(error, RuntimeError) and "gloo" in str(error):
        return Lost(f"rank {rank} lost a peer: {str(error).splitlines()[0]}")
    shown = "".join(traceback.format_exception(error)).rstrip()
    what = f"rank {rank} failed: {type(error).__name__}: {error}"
    return ExchangeError(f"{what}; its traceback:\n{shown}")
