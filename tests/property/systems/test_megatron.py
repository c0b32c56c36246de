"""Megatron-Core: what the rows of a configuration store, against what its modules make."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({}, ("conv1d.weight", "conv1d.bias")),
        ({"mamba_training_ssm_states_dtype": None}, ("conv1d_weight", "conv1d_bias")),
    ],
    ids=["0.16", "0.19"],
)
def test_the_convolution_of_mamba_has_the_name_of_the_version(more: dict, names: tuple) -> None:
    """A module until 0.18, two parameters of the mixer from 0.19 on, whose configuration has a field for them."""
    config = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 4, "is_hybrid_model": True}
    shapes = logical_shapes(config | more, vocab=8, pattern="M")
    bound = bind(megatron(config | more, ranks=range(2), tp=2, vocab=8), shapes)
    stored = {name.rpartition("mixer.")[2] for (_, name), _ in bound.natives(1).items()}
    assert {name for name in stored if name.startswith("conv1d")} == set(names)
