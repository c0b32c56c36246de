"""One pool of eight workers for all tests here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed.pool import Pool

MOST_GROUPS = 16
"""Process groups of a worker. gloo's thread of each looks a hundred times per second whether to stop: of dozens, in
eight processes, that takes as much as the tests do."""


@pytest.fixture(scope="session")
def pools() -> Iterator[list[Pool]]:
    """The pool that tests share, in a list so that a broken one can be replaced."""
    made = [Pool(8)]
    yield made
    made[0].close()


@pytest.fixture
def pool(pools: list[Pool]) -> Pool:
    """Eight gloo workers, ranks 0..7, whose group tests leave whole; new ones after a test that failed."""
    if pools[0].broken or pools[0].groups > MOST_GROUPS:
        pools[0].close()
        pools[0] = Pool(8)
    return pools[0]
