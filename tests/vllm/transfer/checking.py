"""Checking: engines that take weights as they run are as one that was started on a checkpoint of these.

1. Two engines run, on checkpoints 0 and 1: each says what the other has to, once it has the weights of that.
2. All that arrives is compared with what vLLM's own loader stores of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.distributed.pool import Failure, Pool
from tests.vllm.transfer import inside, trainers
from tests.vllm.transfer.hosts import Host

__all__ = ["TIMEOUT_S", "check_arrivals", "check_refits", "describe", "fails", "generate"]

TIMEOUT_S = 150.0
"""For tasks of trainers: above the time that these give each other."""


def generate(hosts: Sequence[Host]) -> list[Any]:
    """What each engine generates."""
    return [host.ask(inside.generate) for host in hosts]


def describe(host: Host) -> tuple[Any, Any]:
    """What the engine generates, and what its workers have."""
    return host.ask(inside.generate), host.ask(inside.ask_workers, inside.digest)


def check_refits(
    pool: Pool,
    asked: trainers.Asked,
    hosts: Sequence[Host],
    folders: Sequence[Path],
    trainer: Any = trainers,
) -> None:
    """Three refits in a row, of engines that were started on checkpoints 0 and 1; by what `trainer` has as tasks."""
    expected = [describe(host) for host in hosts]
    assert expected[0] != expected[1]
    pool.run(trainer.join, asked, timeout=TIMEOUT_S)
    for seed in (1, 0, 2):
        check_arrivals(pool, hosts, folders[seed], trainer)
        first, second = [describe(host) for host in hosts]
        assert first == second
        if seed < 2:
            assert first == expected[seed]
        else:
            assert first not in expected


def check_arrivals(
    pool: Pool, hosts: Sequence[Host], folder: Path, trainer: Any = trainers
) -> None:
    """One refit, of whose tensors each is what vLLM's own loader stores."""
    for host in hosts:
        host.ask(inside.ask_workers, inside.watch, folder)
    pool.run(trainer.send, folder, timeout=TIMEOUT_S)
    for host in hosts:
        assert host.ask(inside.ask_workers, inside.compare) == [([], [])] * host.workers


def fails(pool: Pool, task: Any, *args: Any, ranks: Sequence[int] | None = None) -> list[str]:
    """What each rank says of the ExchangeError that the task ends in."""
    said = []
    for answer in pool.attempt(task, *args, ranks=ranks, timeout=TIMEOUT_S):
        assert isinstance(answer, Failure), answer
        assert answer.kind == "ExchangeError", answer.trace
        said.append(answer.text)
    return said
