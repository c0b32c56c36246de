"""Engines that divide their layers into stages, and deal out whole experts, take weights as they run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.transfer.checking import check_refits
from tests.vllm.transfer.engines import Engines, ask, save


@pytest.mark.parametrize(
    ("model", "fields", "sizes"),
    [
        # Its last stage has the embedding, too.
        ("llama-tied", {}, {"tp": 1, "pp": 2}),
        ("deepseek_v3", {}, {"tp": 2, "enable_expert_parallel": True}),
        # vLLM wants experts in each stage.
        (
            "qwen3_moe",
            {"mlp_only_layers": []},
            {"tp": 2, "pp": 2, "enable_expert_parallel": True},
        ),
    ],
    ids=["stages", "experts", "both"],
)
def test_refitted_engines_are_as_those_started_on_the_checkpoint(
    model: str, fields: dict[str, Any], sizes: dict[str, Any], engines: Engines
) -> None:
    folders = [save(model, engines.folder, seed, **fields) for seed in range(3)]
    hosts = engines.start(*folders[:2], **sizes)
    check_refits(engines.pool(2), ask(hosts, folders[0], "fsdp", 2), hosts, folders)
