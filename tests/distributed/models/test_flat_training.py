"""Training that goes on while its optimizer's state moves between flat buffers, tensor parallelism and FSDP2.

Losses are those of one process that never stops.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.distributed import pool as workers
from tests.distributed.pool import Pool
from tests.distributed.tasks import flat_training as work

pytestmark = pytest.mark.long

workers.PRELOADED.append("transformers.models.mistral.modeling_mistral")


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    """Losses by step, once."""
    return []


def expected(pool: Pool, wanted: list[float]) -> list[float]:
    if not wanted:
        wanted += pool.run(work.alone, len(work.STAGES) * work.STEPS, timeout=60)[0]
    return wanted


def check(
    found: list[list[list[float]]], stages: tuple[work.Stage, ...], wanted: list[float]
) -> None:
    """Every rank that has a part in a stage has its losses."""
    assert wanted[-1] < wanted[0] - 0.1
    for rank, losses in enumerate(found):
        for i, (stage, some) in enumerate(zip(stages, losses, strict=True)):
            if rank < stage.dp * stage.tp:
                steps = slice(i * work.STEPS, (i + 1) * work.STEPS)
                np.testing.assert_allclose(
                    some, wanted[steps], rtol=1e-12, err_msg=f"rank {rank}, {stage}"
                )
            else:
                assert not some


@pytest.mark.parametrize(
    "stages",
    [work.STAGES[:4], pytest.param(work.STAGES, marks=pytest.mark.slow)],
    ids=["there", "and back"],
)
def test_goes_on(pool: Pool, wanted: list[float], stages: tuple[work.Stage, ...]) -> None:
    """DP8 -> DP4 -> TP2 x DP4 -> FSDP2 and back, by another rule at each stage."""
    check(pool.run(work.chained, stages, timeout=120), stages, expected(pool, wanted))


@pytest.mark.slow
def test_by_checkpoints(pool: Pool, wanted: list[float], tmp_path: Path) -> None:
    """The same, saved and loaded at each stage."""
    check(
        pool.run(work.chained, work.STAGES, str(tmp_path), timeout=120),
        work.STAGES,
        expected(pool, wanted),
    )
