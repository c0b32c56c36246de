"""An engine whose weights a refit replaced while it was up goes on as one that was started with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.distributed.pool import Pool
from tests.vllm import checkpoints
from tests.vllm.cases import fields
from tests.vllm.tasks import generate, load_again, reload

TIMEOUT_S = 200.0


def run_alone(task: Any, *args: Any) -> Any:
    """What the task gives in a process of its own, since an engine does not go before its process does."""
    pool = Pool(1)
    try:
        return pool.run(task, *args, timeout=TIMEOUT_S)[0]
    finally:
        pool.close()


def save_two(model: str, folder: Path) -> tuple[Path, Path]:
    """Two checkpoints of one shape. A head is 32 wide at least, which vLLM's attention on a CPU asks for."""
    wide = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 32}
    if "moe" in model:
        wide["moe_intermediate_size"] = 64
    one, other = (
        checkpoints.save(fields(model, **wide), folder / str(seed), seed) for seed in range(2)
    )
    return one, other


def test_tokens_are_those_of_an_engine_started_on_the_checkpoint(tmp_path: Path) -> None:
    first, then = save_two("llama", tmp_path)
    before, after = run_alone(reload, first, then)
    assert after == run_alone(generate, then)
    assert after != before
    print(f"llama: {before} before, {after} after the refit")


def test_tokens_are_those_that_vllm_gives_once_it_has_loaded_the_checkpoint(tmp_path: Path) -> None:
    """Of a model with experts, vLLM 0.32 on a CPU gives other tokens after its own reload than when it is started on
    the checkpoint. So what is compared is its own reload: the refit hands over what vLLM's loader does."""
    first, then = save_two("qwen3_moe", tmp_path)
    before, after = run_alone(reload, first, then)
    assert after == run_alone(load_again, first, then)
    assert after != before
