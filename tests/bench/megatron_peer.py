"""The peer of the planning benchmark: the refit planner of Megatron-Core 0.16.1, in one process.

    pip install --no-deps megatron-core==0.16.1          (it needs torch, numpy and packaging)
    python tests/bench/megatron_peer.py [ranks] [tensors]

1. What is timed is Megatron's own `build_centralized_reshard_plan`, unchanged, as global rank 0 runs it: it indexes the
   metadata of all ranks and plans every transfer of every rank. All other ranks wait for it, so this is the time that
   each rank waits for its plan.
2. torch.distributed is replaced by a stand-in that hands out metadata prepared before the clock starts. So extracting
   metadata, gathering it from all ranks and broadcasting all plans to all ranks cost nothing here; in a real job they
   come on top. `wire_seconds` is the pickling part of that broadcast.
3. The model is the one of `models.tp4_to_tp8`: TP4 on ranks 0..n-1 to TP8 on ranks n..2n-1, the rest data parallel.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench.models import small

__all__ = ["plans", "prepared", "seconds", "wire_seconds"]

VERSION = "0.16.1"
INSTALL = f"pip install --no-deps megatron-core=={VERSION}"


DIVIDED: dict[str, tuple[int | None, int]] = {
    "(tp n) h": (0, 1),
    "n (tp h)": (1, 1),
    "(2 tp n) h": (0, 2),
    "n": (None, 1),
}
"""Megatron's partition_dim (None: not divided) and partition_stride, by shardmath's text."""


def planner() -> Any:
    """Megatron's planner module. Raises ImportError where megatron-core is not installed, or is another version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core import __version__
            from megatron.core.resharding import planner as module
    except ImportError as error:
        raise ImportError(
            f"megatron-core is not installed or lacks a dependency ({error}); {INSTALL}"
        ) from error
    if __version__ != VERSION:
        raise ImportError(f"megatron-core is {__version__}, this measures {VERSION}; {INSTALL}")
    return module


def metadata(tensors: int, tp: int, ranks: range) -> list[list[Any]]:
    """What each of the ranks would contribute: tp fastest, the rest data parallel."""
    make = planner().ParameterMetadata
    import torch

    def one(rank: int, name: str, shape: tuple[int, ...], text: str) -> Any:
        at, (dim, stride) = rank - ranks.start, DIVIDED[text]
        return make(
            name=name,
            shape=tuple(n // tp if d == dim else n for d, n in enumerate(shape)),
            dtype=torch.bfloat16,
            element_size=2,
            is_tp=dim is not None,
            partition_dim=dim or 0,
            partition_stride=stride,
            owner_rank=rank,
            tensor_parallel_group_ranks=None if dim is None else list(ranks[at - at % tp :][:tp]),
            data_parallel_group_ranks=list(ranks[at % tp :: tp]),
            pipeline_parallel_group_ranks=[rank],
            resolved_name=name,
        )

    return [[one(rank, name, *kind) for name, kind in small(tensors).items()] for rank in ranks]


def prepared(ranks: int, tensors: int) -> Callable[[], list[Any]]:
    """A call of Megatron's planner on rank 0 of `ranks` + `ranks`; it returns the plans of all ranks."""
    module = planner()
    nobody: list[list[Any]] = [[] for _ in range(ranks)]
    source = metadata(tensors, 4, range(ranks)) + nobody
    destination = nobody + metadata(tensors, 8, range(ranks, 2 * ranks))
    model = SimpleNamespace(
        pg_collection=(), named_parameters=lambda recurse: (), named_modules=tuple
    )

    def plan() -> list[Any]:
        rosters = iter((source, destination))
        sent: list[Any] = []
        dist = SimpleNamespace(
            get_rank=lambda: 0,
            get_world_size=lambda: 2 * ranks,
            all_gather_object=lambda out, _: out.__setitem__(slice(None), next(rosters)),
            broadcast_object_list=lambda plans, src: sent.extend(plans),
        )
        with mock.patch.multiple(module, dist=dist, torch=SimpleNamespace(distributed=dist)):
            module.build_centralized_reshard_plan(model, model)
        return sent

    return plan


def plans(ranks: int, tensors: int) -> list[Any]:
    """Megatron's ReshardPlan of each of the 2 `ranks` ranks."""
    return prepared(ranks, tensors)()


def seconds(ranks: int, tensors: int, *, rounds: int = 1) -> float:
    """How long every rank of `ranks` + `ranks` waits for Megatron to plan: the median of `rounds`.

    Raises ImportError where megatron-core is not installed.
    """
    plan = prepared(ranks, tensors)
    return statistics.median(clocked(plan) for _ in range(rounds))


def wire_seconds(ranks: int, tensors: int) -> tuple[float, int]:
    """Seconds and bytes of pickling all plans once and unpickling them once, as the broadcast does on every rank."""
    made = plans(ranks, tensors)
    size = sum(len(pickle.dumps(plan)) for plan in made)
    return clocked(lambda: [pickle.loads(pickle.dumps(plan)) for plan in made]), size


def clocked(act: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def main(ranks: int = 64, tensors: int = 400) -> None:
    """Prints the figures."""
    made = plans(ranks, tensors)
    received = sum(len(plan.recv_ops) for plan in made)
    print(f"Megatron-Core {VERSION}, {ranks} + {ranks} ranks, {tensors} tensors, TP4 -> TP8")
    print(
        f"plan: {seconds(ranks, tensors, rounds=3):.3f} s, {received} transfers of {2 * ranks} ranks"
    )
    took, size = wire_seconds(ranks, tensors)
    print(
        f"pickle and unpickle all plans: {took:.3f} s, {size} bytes; each rank does one of the two"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
