"""A process that imports the newer vLLM, in which the tests call functions of `inside`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest

from tests.vllm.contract import wheel

TIMEOUT_S = 280

Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def ask() -> Iterator[Ask]:
    """Calls a function in that process, and returns what it does."""
    folder = wheel.fetch_or_skip()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, wheel.prefer_on_cpu, (str(folder),)) as process:
        yield lambda function, *args: process.submit(function, *args).result(TIMEOUT_S)
