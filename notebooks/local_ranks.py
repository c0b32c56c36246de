"""Local ranks for the notebooks: processes forked from the notebook that form one gloo group.

`on_ranks(4, act)` calls `act(rank)` in four processes and returns the four results. The group uses the loopback
interface and a file, so nothing outside this machine is reached. No process outlives the call.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

import shardmath_torch as smt

__all__ = ["on_ranks"]


def on_ranks(size: int, act: Callable[[int], Any], *, dies: int | None = None) -> list[Any]:
    """What act(rank) returns on each rank, in order, except on the rank that dies.

    Raises RuntimeError with the rank's own error if act raises.
    """
    torch.set_num_threads(1)  # a fork copies no other threads, and ranks share the cores
    import_module("torch._dynamo")  # DTensor imports it: once here, instead of on each rank
    for name in smt.__all__:
        getattr(smt, name)  # this imports it, for the same reason
    fork = mp.get_context("fork")
    results = fork.Queue()
    with tempfile.TemporaryDirectory() as folder:
        args = (size, os.path.join(folder, "store"), act, results)
        ranks = [fork.Process(target=_be_rank, args=(rank, *args)) for rank in range(size)]
        for one in ranks:
            one.start()
        try:
            returned = dict(_result(results) for rank in range(size) if rank != dies)
        finally:
            for one in ranks:
                one.kill()
                one.join()
    return [returned[rank] for rank in sorted(returned)]


def _result(results: Any) -> tuple[int, Any]:
    """The next rank that has a result, and the result."""
    rank, error, value = results.get(timeout=120)
    if error is not None:
        raise RuntimeError(f"rank {rank}: {error}")
    return rank, value


def _be_rank(rank: int, size: int, path: str, act: Callable[[int], Any], results: Any) -> None:
    """The life of a rank: join the group, act, report."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    try:
        results.put((rank, None, act(rank)))
    except Exception as error:
        results.put((rank, f"{type(error).__name__}: {error}", None))
