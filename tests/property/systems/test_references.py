"""The plain references of `tests/references` against what real trainers and engines stored."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.recorded import Recorded
from tests.references import checkpoint, megatron, vllm
from tests.references.shapes import shapes_of

REFERENCES = Path(checkpoint.__file__).parent
VECTORS = REFERENCES.parent / "vectors"

LOADED = {
    "llama": "llama",
    "llama_tied": "llama",
    "llama_pp": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "deepseek_v3": "deepseek_v3",
    "nemotron_h": "nemotron_h",
}
"""Models that vLLM has loaded, with the kind of each."""

SIZES = {
    # As many as one rank stores, which are the elements that others are told apart by.
    "vocab_size": 104,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 4,
}
TRAINED: dict[str, dict[str, Any]] = {
    "te_dense_g2_untied": {"model_type": "llama", "num_key_value_heads": 2},
    "moe_seq": {
        "model_type": "experts",
        "num_key_value_heads": 4,
        "num_experts": 8,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
    },
    "mla_local": {
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
    },
    "te_mamba_hybrid": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "full_attention", "linear_attention", "mlp"],
        "num_key_value_heads": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 4,
        "ssm_state_size": 4,
    },
}
"""Models that Megatron-Core has built, as configurations of Hugging Face."""
GATE = {"te_mamba_hybrid": {"model.layers.3.mixer.gate_proj.weight": (64, 32)}}
"""What such a model has beside what its configuration says."""


@pytest.fixture(scope="module")
def engines() -> Recorded:
    return Recorded(VECTORS / "vllm_storage.json.gz")


@pytest.fixture(scope="module")
def trainers() -> Recorded:
    return Recorded(VECTORS / "megatron_storage.json.gz")


def list_starts(sizes: Iterable[int]) -> list[int]:
    return list(itertools.accumulate(sizes, initial=0))


@pytest.mark.parametrize("model", LOADED)
def test_vllm_loads_as_its_reference_says(engines: Recorded, model: str) -> None:
    of = engines.models[model]
    shapes = {name.replace("backbone.", "model."): tuple(shape) for name, shape in of["ref"]}
    starts = list_starts(math.prod(shape) for shape in shapes.values())
    numbers = checkpoint.number(shapes)
    config = {**of["config"], "model_type": LOADED[model]}
    config.setdefault("num_hidden_layers", len(config.get("hybrid_override_pattern", "")))
    compared = 0
    for layout in of["layouts"].values():
        given = layout["layout"]
        if given["kw"]:
            continue
        world = given["tp"] * given["pp"] * given["dp"]
        sizes = {name: given[name] for name in ("tp", "pp", "dp", "ep")}
        engine = vllm.Engine(range(world), **sizes, placement=given["place"])
        for rank in range(world):
            wanted = vllm.load(numbers, config, engine, rank, compute=lambda array: array)
            entries = engines.entries(layout["ranks"][rank], starts, processed=False)
            found = {name: array for (_, name), array in entries}
            assert found.keys() == wanted.keys()
            for name, array in wanted.items():
                np.testing.assert_array_equal(found[name], array, f"{given} rank {rank}: {name}")
            compared += len(found)
    assert compared > 100


@pytest.mark.parametrize("model", TRAINED)
def test_megatron_stores_as_its_reference_says(trainers: Recorded, model: str) -> None:
    """How ranks cut what one rank stores; in which order that is fused is seen by its logits alone."""
    of = trainers.models[model]
    config = {**SIZES, **TRAINED[model]}
    numbers = checkpoint.number({**shapes_of(config), **GATE.get(model, {})})
    te = of["impl"] == "te"
    (alone,) = megatron.store(numbers, config, megatron.Trainer(range(1), te=te), 0)
    starts = list_starts(math.prod(shape) for _, shape in of["ref"])
    elements = np.concatenate([[0], *(alone[name].ravel() for name, _ in of["ref"])])
    compared = 0
    for layout in of["layouts"].values():
        given = layout["layout"]
        if given["cfg"] or given["cp"] > 1 or given["order"] != "tp-cp-ep-dp-pp":
            continue
        sizes = {name: given[name] for name in ("tp", "pp", "ep", "etp")}
        world = given["world"]
        trainer = megatron.Trainer(range(world), **sizes, vpp=given["vpp"] or 1, te=te)
        for rank in range(world):
            chunks = megatron.store(numbers, config, trainer, rank)
            wanted = {
                (i, name): array for i, own in enumerate(chunks) for name, array in own.items()
            }
            found = dict(trainers.entries(layout["ranks"][rank], starts, processed=False))
            assert found.keys() == wanted.keys()
            for name, array in wanted.items():
                np.testing.assert_array_equal(
                    elements[found[name]], array, f"{given} {rank} {name}"
                )
            compared += len(found)
    assert compared > 100


def test_references_know_nothing_of_shardmath() -> None:
    for path in REFERENCES.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules.append(node.module or "")
            for module in modules:
                assert not module.startswith("shardmath")
                assert not module.startswith("tests") or module.startswith("tests.references")
