"""A refit fills vLLM's own parameters, bit for bit as vLLM's own loader does from the same checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.vllm import checkpoints
from tests.vllm.cases import fields
from tests.vllm.tasks import refit

RANKS = 6
STEPS = 3
TIMEOUT_S = 200.0


@pytest.mark.parametrize("model", ["llama", "qwen3_moe", "deepseek_v3"])
def test_parameters_are_those_that_vllm_loads(model: str, tmp_path: Path) -> None:
    folders = []
    for seed in range(STEPS):
        folders.append(checkpoints.save(fields(model), tmp_path / str(seed), seed))
    pool = Pool(RANKS)
    try:
        wrong = pool.run(refit, folders, timeout=TIMEOUT_S)
    finally:
        pool.close()
    assert wrong == [[[]] * STEPS] * RANKS
