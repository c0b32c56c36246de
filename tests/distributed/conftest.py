"""One pool of eight workers for all tests here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed.pool import Pool

MOST_GROUPS = 16
"""Process groups of a worker. gloo's thread of each looks a hundred times per second whether to stop: of dozens, in
eight processes, that takes as much as the tests do."""

POOLS: list[Pool] = []
"""The pool that tests share, if there is one."""


@pytest.fixture
def pool() -> Pool:
    """Eight gloo workers, ranks 0..7, whose group tests leave whole; new ones after a test that failed."""
    if POOLS and (POOLS[0].broken or POOLS[0].groups > MOST_GROUPS):
        POOLS.pop().close()
    if not POOLS:
        POOLS.append(Pool(8))
    return POOLS[0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the pool before tests elsewhere, beside which its threads would go on looking."""
    if POOLS and not (nextitem and nextitem.nodeid.startswith("tests/distributed/")):
        POOLS.pop().close()
