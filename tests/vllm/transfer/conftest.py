"""Trainers and engines as jobs of their own: pools of trainers' ranks, and engines in hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.distributed import pool
from tests.vllm.transfer.engines import Engines

# Engines and trainers have two cores for up to ten processes.
os.environ["OMP_NUM_THREADS"] = "1"

pool.PRELOADED += [
    "vllm.entrypoints.llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
]


@pytest.fixture
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Engines that are started where they are asked for."""
    made = Engines(tmp_path_factory.mktemp("checkpoints"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def engines_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Such as the tests of a file share."""
    made = Engines(tmp_path_factory.mktemp("checkpoints"))
    yield made
    made.close()
