"""The parts of parameters that transformers' from_pretrained loads are those of its plan, and those of `layout_of`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool
from tests.distributed.tasks import pretrained

pytestmark = pytest.mark.long

DENSE = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "glm",
    "glm4",
    "olmo",
    "olmo2",
    "olmo3",
    "mistral",
    "ministral",
    "granite",
    "cohere",
    "cohere2",
    "starcoder2",
    "smollm3",
    "exaone4",
    "lfm2",
    "gpt_neox",
    "helium",
]
EXPERTS = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
    "olmoe",
    "phimoe",
    "granitemoe",
    "minimax_m2",
    "ernie4_5_moe",
    "nemotron_h",
    "hunyuan_v1_moe",
]
TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Two workers, as many as there are key heads."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    ("kinds", "ep"),
    [(DENSE[:12], False), (DENSE[12:], False), (EXPERTS, False), (EXPERTS, True)],
    ids=["dense", "more dense", "experts", "expert parallelism"],
)
def test_loaded_parts_are_planned(pair: Pool, kinds: list[str], ep: bool, tmp_path: Path) -> None:
    found = pair.run(pretrained.load, kinds, tmp_path, ep, timeout=TIMEOUT_S)
    assert found == [[], []]


def test_thirty_kinds_of_model_are_loaded() -> None:
    assert len({*DENSE, *EXPERTS}) >= 30
