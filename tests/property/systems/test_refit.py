"""What a Megatron trainer stores is moved to what a vLLM engine stores: both sides speak of the same tensors."""

from __future__ import annotations

import numpy as np
import pytest

from shardmath import plan, verify
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill, gather
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.megatron_shapes import logical_shapes
from shardmath.models.systems.vllm import vllm

TRAINER = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 2,
    "ffn_hidden_size": 8,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "qk_layernorm": True,
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
}
ENGINE = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 100,
    "num_experts": 4,
    "intermediate_size": 8,
}


@pytest.mark.parametrize("ep", [False, True])
def test_a_trainer_is_moved_to_an_engine(ep: bool) -> None:
    """Fused by groups, padded to 256 words and split in stages on one side; repeated heads and stacks on the other."""
    shapes = logical_shapes(TRAINER, vocab=100, dtype="int64")
    trainer = megatron(TRAINER, ranks=range(4), tp=2, pp=2, ep=2, etp=1, vocab=100)
    engine = vllm(ENGINE, ranks=range(4, 8), tp=4, ep=ep)
    src, dst = bind(trainer, shapes), bind(engine, shapes)
    moved = plan(src.layouts, dst.layouts)
    verify(moved)

    arrays = {}
    start = 1
    for name, (shape, _) in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = np.arange(start, start + size).reshape(shape)
        start += size
    stored = {rank: fill(src, arrays, rank) for rank in range(4)}
    back = gather(src, stored, range(4))
    assert all(np.array_equal(back[name], array) for name, array in arrays.items())
    there = {rank: fill(dst, back, rank) for rank in range(4, 8)}
    again = gather(dst, there, range(4, 8))
    assert all(np.array_equal(again[name], array) for name, array in arrays.items())
