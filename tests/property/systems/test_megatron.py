"""Megatron-Core: what the rows of a configuration store, against what its modules make."""

from __future__ import annotations

from shardmath.models.storage.binding import bind
from shardmath.models.systems.megatron import logical_shapes, megatron


def test_routers_have_biases_where_linear_layers_do_and_softmax_an_offset_a_head() -> None:
    """As `router.py` and `dot_product_attention.py` of Megatron-Core 0.16.1 make them, and GPT-OSS has them."""
    config = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "num_moe_experts": 2}
    config |= {"softmax_type": "learnable"}
    shapes = logical_shapes(config, vocab=8)
    bound = bind(megatron(config, ranks=range(2), tp=2, vocab=8), shapes)
    stored = {name: shape for (_, name), shape in bound.natives(1).items()}
    assert stored["decoder.layers.0.mlp.router.bias"] == (2,)
    assert stored["decoder.layers.0.self_attention.core_attention.softmax_offset"] == (2,)
