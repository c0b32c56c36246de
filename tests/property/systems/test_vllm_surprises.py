"""More of what surprises in how vLLM stores weights: names that vanish, faults of loaders, scales in a block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import shardmath as sm
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill, gather
from shardmath.models.systems.hugging_face import hugging_face, logical_shapes
from shardmath.models.systems.vllm import vllm
from tests.refits.carrying import LAYER, Arrays, number

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 100,
    "num_experts": 6,
    "num_local_experts": 6,
    "intermediate_size": 4,
}
STACKED = f"{LAYER}mlp.experts.routed_experts.w2_weight"


def experts(kind: str = "weight") -> Arrays:
    names = [f"{LAYER}mlp.experts.{e}.down_proj.{kind}" for e in range(6)]
    return number(dict.fromkeys(names, ((4, 4), "int64")))


def store(kind: str, arrays: Mapping[str, Any], rank: int, tp: int, ep: bool = False) -> Arrays:
    """What a rank stores of the logical arrays."""
    side = vllm({**CONFIG, "model_type": kind}, ranks=range(tp), tp=tp, ep=ep)
    bound = bind(side, {name: (array.shape, "int64") for name, array in arrays.items()})
    return {name: array for (_, name), array in fill(bound, arrays, rank).items()}


def test_names_of_experts_vanish() -> None:
    """Rule 3: a rank has one tensor of its experts, in the order of their numbers in the model."""
    arrays = experts()
    held = store("qwen3_moe", arrays, 1, tp=2, ep=True)
    assert list(held) == [STACKED]
    assert np.array_equal(held[STACKED], np.stack(list(arrays.values())[3:]))


def test_every_expert_of_an_uneven_gpt_oss_is_somewhere() -> None:
    """Rule 12: vLLM's loader begins each rank at rank * (experts // ep), so experts 4 and 5 are nowhere."""
    arrays = list(experts().values())
    begins = [rank * (6 // 4) for rank in range(4)]
    counts = [2, 2, 1, 1]
    loaded = [begin + n for begin, count in zip(begins, counts, strict=True) for n in range(count)]
    assert 1 in loaded and not {4, 5} & set(loaded)
    found = [store("gpt_oss", experts(), rank, tp=4, ep=True)[STACKED] for rank in range(4)]
    assert [len(stack) for stack in found] == counts
    assert np.array_equal(np.concatenate(found), np.stack(arrays))


def test_the_bias_of_a_router_is_one_tensor() -> None:
    """Rules 16 and 30: one parameter with two names is stored once, whole, under the name of the gate."""
    arrays = number({f"{LAYER}mlp.gate.e_score_correction_bias": ((6,), "int64")})
    (held,) = store("deepseek_v3", arrays, 1, tp=2).items()
    (array,) = arrays.values()
    assert held[0] == f"{LAYER}mlp.gate.e_score_correction_bias"
    assert np.array_equal(held[1], array)


def test_what_is_fused_on_disk_is_split_and_then_cut() -> None:
    """Rule 23: equal rows of a fused projection are queries alone on the first of two ranks."""
    natives = number({f"{LAYER}self_attn.qkv_proj.weight": ((24, 4), "int64")})
    (fused,) = natives.values()
    config = {**CONFIG, "model_type": "phi3"}
    shapes = logical_shapes(
        config, {name: (array.shape, "int64") for name, array in natives.items()}
    )
    disk = bind(hugging_face(config, natives), shapes)
    logical = gather(disk, {0: {(0, name): array for name, array in natives.items()}}, [0])
    (held,) = store("phi3", logical, 0, tp=2).values()
    q, k, v = np.split(fused, [16, 20])
    assert np.array_equal(held, np.concatenate([q[:8], k[:2], v[:2]]))
    assert np.isin(fused[:12], q).all()


def test_scales_that_are_cut_inside_a_block_are_refused() -> None:
    """Rules 26 and 27: vLLM repeats such scales, or deals whole blocks; no row says either yet."""
    config = {
        **CONFIG,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    names = [f"{LAYER}mlp.experts.{e}.up_proj.weight_scale_inv" for e in range(6)]
    # 384 rows are 3 blocks: on two ranks 1.5 each, on four ranks whole blocks leave nothing for the last.
    for tp in (2, 4):
        side = vllm(config, ranks=range(tp), tp=tp)
        with pytest.raises(sm.StoreError, match=f"'n' has 3 .* into {tp} equal parts"):
            bind(side, dict.fromkeys(names, ((3, 2), "float32")))
