"""One pool of eight workers for all tests here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Eight gloo workers, ranks 0..7, whose group tests leave whole."""
    made = Pool(8)
    yield made
    made.close()
