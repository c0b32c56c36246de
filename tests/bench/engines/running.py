"""Running: the processes of a case, and what they say. None is left behind, whatever happens."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from queue import Empty
from typing import Any

from tests.bench.engines.costs import Cost
from tests.bench.engines.jobs import ENVIRONMENT, Case, Update, train
from tests.distributed import pool

__all__ = ["Found", "run"]

PRELOADED = [
    *pool.PRELOADED,
    "vllm.engine.arg_utils",
    "vllm.distributed.weight_transfer.base",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "transformers.models.llama.modeling_llama",
]
"""Imported once, as in tests/vllm: of five processes that import vLLM each takes a minute on two cores."""

ROOT = Path(__file__).parents[3]
LOOK_S = 1.0
END_S = 60.0


@dataclass(frozen=True)
class Found:
    """All updates, and by way what each process of the trainer took for each."""

    updates: list[Update]
    trainers: dict[str, list[Cost]]


def run(case: Case, patience_s: float = 280.0) -> Found:
    """What the case gives. Raises RuntimeError where a process fails, or says nothing for so long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    said: Any = context.Queue()
    ports = [pool.free_port() for _ in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = []
        for rank in range(case.trainers):
            given = (rank, case, Path(folder), ports, said)
            processes.append(context.Process(target=_train, args=given))
        try:
            for process in processes:
                process.start()
            return _listen(case, said, processes, patience_s)
        finally:
            _end(processes)


def _train(rank: int, case: Case, folder: Path, ports: Sequence[int], said: Any) -> None:
    """A process of the trainer, which says None once it is done."""
    # Of this process and of those that vLLM starts: others that the server of forks starts have other environments.
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "backends")])
    os.environ.update(ENVIRONMENT)
    train(rank, case, folder, ports, said.put)
    said.put(None)


def _listen(case: Case, said: Any, processes: Sequence[BaseProcess], patience_s: float) -> Found:
    """All that the processes say."""
    found = Found([], {way: [] for way in case.ways})
    done = 0
    until = time.monotonic() + patience_s
    while done < len(processes):
        try:
            one = said.get(timeout=LOOK_S)
        except Empty:
            _check(processes, until)
            continue
        until = time.monotonic() + patience_s
        if one is None:
            done += 1
            continue
        way, cost, update = one
        found.trainers.setdefault(way, []).append(cost)
        if update is not None:
            found.updates.append(update)
    return found


def _check(processes: Sequence[BaseProcess], until: float) -> None:
    """Raise RuntimeError where one has failed, or none has said anything until then."""
    for rank, process in enumerate(processes):
        if process.exitcode:
            raise RuntimeError(f"rank {rank} of the trainer ended with {process.exitcode}")
    if time.monotonic() > until:
        raise RuntimeError("the trainer has said nothing for too long")


def _end(processes: Sequence[BaseProcess]) -> None:
    """Wait for them, and end what does not end by itself."""
    acts: list[Callable[[BaseProcess], None]] = [
        lambda process: process.join(END_S),
        BaseProcess.terminate,
        lambda process: process.join(END_S / 4),
        BaseProcess.kill,
        BaseProcess.join,
    ]
    for process in processes:
        for act in acts:
            if process.is_alive():
                act(process)
