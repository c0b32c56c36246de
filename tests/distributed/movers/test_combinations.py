"""Whatever a mover is made of and however it is called, what arrives is what a plain move brings."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.distributed.tasks import combined


@pytest.mark.parametrize(
    ("seeds", "steps"),
    [
        (range(4), 5),
        pytest.param(range(100, 160), 8, marks=pytest.mark.slow),
    ],
)
def test_random_programs(pool: Pool, seeds: range, steps: int) -> None:
    """Plain, changed and transformed; committed or not; agreed on once or always; compared, beside, in blocks."""
    for rank, found in enumerate(pool.run(combined.run_programs, seeds, steps, timeout=500)):
        for seed, wrong in zip(seeds, found, strict=True):
            assert not wrong, f"seed {seed} on rank {rank}: {wrong}"
