"""Worker processes that are one gloo or NCCL group, kept alive between tests.

A task is a function of a module that workers can import, called as `task(rank, *args)` on every worker at once. What a
worker raises comes back as a Failure; a worker that is gone comes back as a Lost.
"""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import secrets
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import shardmath_torch

VARIABLE = "SHARDMATH_TEST_DEVICE"
"""The environment variable that says where the tensors of a worker's tasks are."""

START_S = 120.0
PRELOADED = [
    "torch",
    "torch.distributed",
    "torch.distributed.distributed_c10d",
    # Of which the package itself imports none.
    *sorted({f"shardmath_torch.{where}" for where in shardmath_torch.LATE.values()}),
    "shardmath_gloo",
    "torch._dynamo",
]
"""Imported once, in the process that all workers are forked from. torch imports the last by itself, for a second
in each worker, when it first has a DTensor or an optimizer."""


@dataclass(frozen=True)
class Failure:
    """What a worker raised."""

    kind: str
    text: str
    trace: str


@dataclass(frozen=True)
class Lost:
    """A worker that died or did not answer in time."""

    why: str


def free_port() -> int:
    """A TCP port that nobody listens on, and that no connection takes before its user does."""
    while True:
        # Below the ports that Linux gives to connections: other tests open many.
        port = secrets.choice(range(10_000, 32_000))
        with socket.socket() as s, suppress(OSError):
            s.bind(("", port))
            return port


def _take_gpu(rank: int) -> None:
    """Give this worker a GPU, which it shares with others if there are too few.

    NCCL refuses two ranks on one GPU of one host. Ranks that say that they are on hosts of their own exchange messages
    over sockets, and may share it.
    """
    import torch

    # Tasks read it as they are imported.
    os.environ[VARIABLE] = "cuda"
    os.environ.update(NCCL_HOSTID=f"{os.getpid()}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    # Workers outlive the failures of others.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    torch.cuda.set_device(rank % torch.cuda.device_count())


def _work(
    rank: int, size: int, port: int, host: int | None, backend: str, channel: Connection
) -> None:
    """A worker's life: join the group, then do tasks until the channel closes."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # Collections would visit, and so copy, all that this process shares with the one that it was forked from.
    gc.freeze()
    # A shell has what it runs in the background ignore Ctrl-C, which some tasks press.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    torch.set_num_threads(1)
    if backend == "nccl":
        _take_gpu(rank)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=rank == host, wait_for_workers=False)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    channel.send(("ready", 1))
    while True:
        try:
            task, args = pickle.loads(channel.recv_bytes())
        except EOFError:
            return
        try:
            result = task(rank, *args)
        except Exception as error:
            result = Failure(type(error).__name__, str(error), traceback.format_exc())
        channel.send((result, len(distributed_c10d._world.pg_map)))


class Pool:
    """`size` workers, ranks 0..size-1. The store of the group is served by the parent, or by worker `host`."""

    def __init__(self, size: int, host: int | None = None, backend: str = "gloo") -> None:
        import torch.distributed as dist

        self.broken = False
        self.groups = 1
        self.size, self._store, port = size, None, free_port()
        if host is None:
            self._store = dist.TCPStore(
                "127.0.0.1", 0, None, is_master=True, wait_for_workers=False
            )
            port = self._store.port
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        pairs = [context.Pipe() for _ in range(size)]
        self.channels = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(
                target=_work, args=(rank, size, port, host, backend, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        answers = self.gather(range(size), START_S)
        assert answers == ["ready"] * size, answers

    def run(self, task: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """What each worker's task(rank, *args) returned. Raises AssertionError if any failed or was lost."""
        out = self.attempt(task, *args, timeout=timeout)
        bad = {rank: x for rank, x in enumerate(out) if isinstance(x, Failure | Lost)}
        self.broken = self.broken or bool(bad)
        if bad:
            first = min(
                bad, key=lambda rank: (getattr(bad[rank], "kind", "") == "ExchangeError", rank)
            )
            raise AssertionError(
                f"worker {first}: {getattr(bad[first], 'trace', bad[first])}; failed: {sorted(bad)}"
            )
        return out

    def attempt(
        self,
        task: Callable[..., Any],
        *args: Any,
        ranks: Sequence[int] | None = None,
        timeout: float = 60.0,
    ) -> list[Any]:
        """What each worker's task(rank, *args) returned, a Failure, or a Lost; `ranks` are those to wait for."""
        data = pickle.dumps((task, args))
        # If a time limit of pytest's interrupts it here, the next task would get this one's answers.
        was_broken, self.broken = self.broken, True
        for channel in self.channels:
            channel.send_bytes(data)
        answers = self.gather(range(self.size) if ranks is None else ranks, timeout)
        self.broken = was_broken
        return answers

    def gather(self, ranks: Sequence[int], timeout: float) -> list[Any]:
        """An answer from each of these workers."""
        deadline = time.monotonic() + timeout
        return [self._answer(rank, deadline) for rank in ranks]

    def _answer(self, rank: int, deadline: float) -> Any:
        channel = self.channels[rank]
        try:
            if not channel.poll(max(0.0, deadline - time.monotonic())):
                return Lost("no answer in time")
            answer, groups = channel.recv()
        except (EOFError, ConnectionResetError):
            return Lost("the process is gone")
        self.groups = max(self.groups, groups)
        return answer

    def close(self) -> None:
        """Ends all workers; none is left behind."""
        for channel in self.channels:
            channel.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def alone(
    size: int,
    task: Callable[..., Any],
    *args: Any,
    host: int | None = None,
    gone: Sequence[int] = (),
) -> list[Any]:
    """What workers of their own return, by rank; those who are `gone` are not waited for."""
    workers = Pool(size, host)
    try:
        ranks = [rank for rank in range(size) if rank not in gone]
        return workers.attempt(task, *args, ranks=ranks, timeout=60.0)
    finally:
        workers.close()
