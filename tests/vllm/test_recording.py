"""What `smt.record` sees vLLM's own `load_weights` store is, cell by cell, what rows say of an engine.

1. Every rank of every size of tensor parallelism records the model that vLLM builds for it, without data.
2. Rows are of vLLM 0.33, and the package is of 0.32: `DIFFERENT` has what differs, and `REFUSED` what this build for
   CPUs does not build. Nothing else may differ.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardmath as sm
import shardmath_torch as smt
from shardmath.models.systems.hugging_face import hugging_face, logical_shapes
from shardmath.models.systems.vllm import vllm
from shardmath.storage import bind, fill, gather
from tests.vllm import checkpoints, engine
from tests.vllm.cases import MODELS, fields

SIZES = (1, 2, 4)
PARALLEL = [("qwen3_moe", 2), ("qwen3_moe", 4), ("mixtral", 4), ("deepseek_v3", 2)]
"""Experts dealt whole; 6 over 4 ranks are unequally many."""

DIFFERENT: dict[tuple[str, str], str] = {}
"""(Model, stored tensor) of what 0.32 stores otherwise than 0.33, and why."""

REFUSED = {
    "experts without a gate": (
        "nemotron_h",
        {
            "num_hidden_layers": 2,
            "layers_block_type": ["full_attention", "moe"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
        },
        "is_act_and_mul=False is supported only for CUDA",
    ),
    "experts with biases, of few columns": (
        "gpt_oss",
        {"intermediate_size": 24},
        "No Unquantized MoE backend supports the deployment configuration",
    ),
}
"""What vLLM for CPUs has no kernel for, and says so when a model is built: it cannot be compared here."""

FUNCTIONS = (".mixer.A", ".mamba.A")


def record(
    folder: Path, shapes: checkpoints.Shapes, rank: int, tp: int, **more: Any
) -> sm.storage.Recorded:
    """What vLLM's loader stores on a rank."""
    with engine.built(folder, rank, tp, **more) as model:
        names = [name for name, _ in model.named_parameters()]
        functions = {name: "neg_exp" for name in names if name.endswith(FUNCTIONS)}
        return smt.record(model.load_weights, shapes, model, form="pairs", functions=functions)


def number(shapes: checkpoints.Shapes) -> dict[str, Any]:
    """The checkpoint's elements by numbers from 1 on."""
    arrays = {}
    start = 1
    for name, (shape, _) in shapes.items():
        arrays[name] = np.arange(start, start + math.prod(shape)).reshape(shape)
        start += math.prod(shape)
    return arrays


def compare(folder: Path, tp: int, **more: Any) -> list[str]:
    """What is recorded and declared otherwise, of all ranks."""
    config = json.loads((folder / "config.json").read_text())
    shapes = checkpoints.shapes_of(folder)
    numbers = number(shapes)
    logical = logical_shapes(config, shapes)
    stored = {0: {(0, name): array for name, array in numbers.items()}}
    arrays = gather(bind(hugging_face(config, shapes), logical), stored, [0])
    ep = bool(more.get("enable_expert_parallel"))
    declared = bind(vllm(config, ranks=range(tp), tp=tp, ep=ep), logical)
    wrong = []
    for rank in range(tp):
        found = record(folder, shapes, rank, tp, **more).fill(numbers)
        wanted = {name: array for (_, name), array in fill(declared, arrays, rank).items()}
        wrong += [f"rank {rank}: {fault}" for fault in list_faults(found, wanted)]
    return wrong


def list_faults(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Which tensors are not the same: shape, elements and padding."""
    faults = [f"{name} is not there" for name in wanted.keys() - found.keys()]
    for name, array in found.items():
        if name not in wanted:
            # Scales of the cache are vLLM's own, and no checkpoint here has any.
            faults += [f"{name} is not declared"] * bool(array.any())
        elif array.shape != wanted[name].shape:
            faults.append(f"{name} has shape {array.shape}, declared {wanted[name].shape}")
        elif not np.array_equal(array, wanted[name]):
            faults.append(f"{name} has other elements")
    return faults


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that were made, by model."""
    return {}


def saved(folders: dict[str, Path], model: str, factory: pytest.TempPathFactory) -> Path:
    if model not in folders:
        folders[model] = checkpoints.save(fields(model), factory.mktemp(model))
    return folders[model]


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_recorded_is_declared(
    model: str, tp: int, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    wrong = compare(saved(folders, model, tmp_path_factory), tp)
    known = [name for kind, name in DIFFERENT if kind == model]
    assert [fault for fault in wrong if not any(name in fault for name in known)] == []


@pytest.mark.parametrize(("model", "tp"), PARALLEL)
def test_recorded_experts_are_dealt_as_declared(
    model: str, tp: int, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = saved(folders, model, tmp_path_factory)
    # Not without data: vLLM asks where each expert is while it builds them.
    assert compare(folder, tp, device="cpu", enable_expert_parallel=True) == []


@pytest.mark.parametrize("what", REFUSED)
def test_what_this_build_does_not_build(what: str, tmp_path: Path) -> None:
    model, changed, why = REFUSED[what]
    folder = checkpoints.save(fields(model, **changed), tmp_path)
    with pytest.raises(NotImplementedError, match=why), engine.built(folder):
        pass


def describe_qwen3_30b() -> tuple[Any, checkpoints.Shapes]:
    """Its configuration, and the tensors of its checkpoint."""
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )
    ends = {"model.embed_tokens": (151936, 2048), "lm_head": (151936, 2048), "model.norm": (2048,)}
    layer = {
        "self_attn.q_proj": (4096, 2048),
        "self_attn.k_proj": (512, 2048),
        "self_attn.v_proj": (512, 2048),
        "self_attn.o_proj": (2048, 4096),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "input_layernorm": (2048,),
        "post_attention_layernorm": (2048,),
        "mlp.gate": (128, 2048),
    }
    for e in range(128):
        layer |= {f"mlp.experts.{e}.{half}_proj": (768, 2048) for half in ("gate", "up")}
        layer[f"mlp.experts.{e}.down_proj"] = (2048, 768)
    shapes = dict(ends)
    for number_ in range(48):
        shapes |= {f"model.layers.{number_}.{name}": shape for name, shape in layer.items()}
    return config, {f"{name}.weight": (shape, "bfloat16") for name, shape in shapes.items()}


def test_a_rank_of_qwen3_30b_is_recorded_by_views(tmp_path: Path) -> None:
    config, shapes = describe_qwen3_30b()
    config.save_pretrained(tmp_path)
    with engine.built(tmp_path, 1, 4) as model:
        start = time.process_time()
        found = smt.record(model.load_weights, shapes, model, form="pairs")
    recorded = time.process_time()
    seen = sm.storage.RecordedSide({0: found}).bind(shapes)
    bound = time.process_time()
    print(
        f"Qwen3-30B-A3B, rank 1 of TP 4, {len(shapes)} tensors: "
        f"recorded in {recorded - start:.1f} s, bound in {bound - recorded:.1f} s"
    )
    assert {native.way for native in found.natives} == {"views", ""}
    assert len(seen.slots(0)) == len(shapes)
