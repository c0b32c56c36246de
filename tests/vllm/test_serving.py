"""An engine whose weights a refit replaced while it was up goes on as one that was started with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import Pool
from tests.vllm import checkpoints
from tests.vllm.cases import fields
from tests.vllm.tasks import generate, reload

TIMEOUT_S = 200.0


def run_alone(task: Any, *args: Any) -> Any:
    """What the task gives in a process of its own, since an engine does not go before its process does."""
    pool = Pool(1)
    try:
        return pool.run(task, *args, timeout=TIMEOUT_S)[0]
    finally:
        pool.close()


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_tokens_are_those_of_an_engine_started_on_the_checkpoint(
    model: str, tmp_path: Path
) -> None:
    # A head is 32 wide at least, which vLLM's attention on a CPU asks for.
    wide = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 32}
    if "moe" in model:
        wide["moe_intermediate_size"] = 64
    first, then = (
        checkpoints.save(fields(model, **wide), tmp_path / str(seed), seed) for seed in range(2)
    )
    before, after = run_alone(reload, first, then)
    wanted = run_alone(generate, then)
    assert after == wanted
    assert after != before
    print(f"{model}: {before} before, {after} after the refit")
