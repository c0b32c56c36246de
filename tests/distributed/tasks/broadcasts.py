"""Loaders that call collectives, or barriers, on ranks with different targets."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt

RANKS = 8
SHAPES = {f"{rank}.w": ((4, 3), "float32") for rank in range(RANKS)}
Pairs = Iterable[tuple[str, Tensor]]
Seen = tuple[int, str]
"""How often a rank's loader was called, and the recording or the error as text."""


def _record(load: Any, own: dict[str, Tensor], ways: Any, functions: Any = None) -> Seen:
    """Record a loader that takes pairs."""
    calls = 0

    def load_counted(given: Pairs) -> None:
        nonlocal calls
        calls += 1
        load(given)

    try:
        recorded = smt.record(
            load_counted, SHAPES, own, form="pairs", functions=functions, ways=ways
        )
        said = str(recorded)
    except sm.StoreError as error:
        said = str(error)
    return calls, said


def load_by_broadcasts(rank: int, case: str, ways: Any) -> Seen:
    """Every tensor comes from rank 0, as of a checkpoint that only this can read."""
    own = {f"{rank}.w": torch.zeros(4, 3)}
    if case == "dtypes" and rank % 2:
        own[f"{rank}.w"] = own[f"{rank}.w"].to(torch.float8_e4m3fn)
    if case == "bool" and rank % 2:
        own[f"{rank}.w"] = own[f"{rank}.w"].bool()
    if case in ("none", "thread") and not rank:
        own = {}
    if case == "map" and rank % 2:
        own["map"] = torch.arange(4)

    def load(given: Pairs) -> None:
        for name, tensor in given:
            received = tensor.contiguous()
            if case == "thread":
                with ThreadPoolExecutor(1) as made:
                    made.submit(dist.broadcast, received, 0).result()
            else:
                dist.broadcast(received, 0)
            if name in own:
                own[name].copy_(received)
        if case == "removed" and rank == 1:
            del own["1.w"]

    # As all ranks pass them, though only one has this target.
    functions = {"1.w": "neg_exp"} if case == "functions" else None
    return _record(load, own, ways, functions)


def load_with_barriers(rank: int, in_pool: bool, ways: Any) -> Seen:
    """Views explain the loaders of even ranks. If `in_pool`, a thread that the first call starts waits for the others,
    in all calls."""
    own = {f"{rank}.w": torch.zeros(4, 3)}
    made: list[ThreadPoolExecutor] = []

    def wait() -> None:
        dist.barrier()
        dist.barrier(async_op=True).wait()

    def load(given: Pairs) -> None:
        for name, tensor in given:
            if name in own:
                own[name].copy_(torch.cat([tensor[2:], tensor[:2]]) if rank % 2 else tensor)
        if in_pool and not made:
            made.append(ThreadPoolExecutor(1))
        if made:
            made[0].submit(wait).result()
        else:
            wait()

    found = _record(load, own, ways)
    for pool in made:
        pool.shutdown()
    dist.barrier()
    return found


def load_after_a_barrier(rank: int, folder: str, ways: Any) -> Seen:
    """Rank 0 writes a file for which the others wait, as a download."""
    own = {f"{rank}.w": torch.zeros(4, 3)}
    file = Path(folder) / "downloaded"

    def load(given: Pairs) -> None:
        if rank == 0 and not file.exists():
            time.sleep(0.5)
            file.write_text("here")
        dist.barrier()
        file.read_text()
        for name, tensor in given:
            if name in own:
                own[name].copy_(tensor)

    found = _record(load, own, ways)
    dist.barrier()
    return found
