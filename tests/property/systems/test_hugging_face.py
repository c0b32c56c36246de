"""Checkpoints read backwards, and forwards again."""

from __future__ import annotations

from typing import Any

import pytest

from shardmath import StoreError
from shardmath.models.storage.binding import bind
from shardmath.models.systems.config import Config
from shardmath.models.systems.hugging_face import hugging_face, logical_shapes

LAYER = "model.layers.0."
SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 6,
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "ssm_state_size": 3,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 4,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 4,
}
KINDS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]] = {
    # of a checkpoint, and of what is logical, without the layer's prefix
    "phi3": (
        {"self_attn.qkv_proj.weight": (32, 8), "mlp.gate_up_proj.weight": (12, 8)},
        {
            "self_attn.q_proj.weight": (16, 8),
            "self_attn.k_proj.weight": (8, 8),
            "self_attn.v_proj.weight": (8, 8),
            "mlp.gate_proj.weight": (6, 8),
            "mlp.up_proj.weight": (6, 8),
        },
    ),
    "gpt_oss": (
        {"mlp.experts.gate_up_proj": (1, 8, 12), "mlp.experts.down_proj_bias": (1, 8)},
        {
            "mlp.experts.0.gate_proj.weight": (6, 8),
            "mlp.experts.0.up_proj.weight": (6, 8),
            "mlp.experts.0.down_proj.bias": (8,),
        },
    ),
    "granitemoe": (
        {
            "block_sparse_moe.input_linear.weight": (1, 12, 8),
            "block_sparse_moe.router.layer.weight": (1, 8),
        },
        {
            "mlp.experts.0.gate_proj.weight": (6, 8),
            "mlp.experts.0.up_proj.weight": (6, 8),
            "mlp.gate.weight": (1, 8),
        },
    ),
    "qwen3_next": (
        {"self_attn.q_proj.weight": (32, 8), "linear_attn.in_proj_qkvz.weight": (48, 8)},
        {
            "self_attn.q_proj.weight": (16, 8),
            "self_attn.g_proj.weight": (16, 8),
            "linear_attn.q.weight": (8, 8),
            "linear_attn.k.weight": (8, 8),
            "linear_attn.v.weight": (16, 8),
            "linear_attn.z.weight": (16, 8),
        },
    ),
    "unheard_of": (
        {"mlp.experts.gate_up_proj": (2, 12, 8), "mlp.experts.down_proj": (2, 8, 6)},
        {
            f"mlp.experts.{e}.{word}_proj.weight": (8, 6) if word == "down" else (6, 8)
            for e in range(2)
            for word in ("gate", "up", "down")
        },
    ),
    "lfm2_moe": (
        {"conv.in_proj.weight": (24, 8), "feed_forward.expert_bias": (2,), "ffn_norm.weight": (8,)},
        {
            "short_conv.in_b.weight": (8, 8),
            "short_conv.in_c.weight": (8, 8),
            "short_conv.in_x.weight": (8, 8),
            "mlp.gate.e_score_correction_bias": (2,),
            "post_attention_layernorm.weight": (8,),
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_read_backwards_and_forwards(kind: str) -> None:
    own, expected = KINDS[kind]
    config = {**SIZES, "model_type": kind}
    checkpoint = {f"{LAYER}{name}": (shape, "bfloat16") for name, shape in own.items()}
    logical = logical_shapes(config, checkpoint)
    assert logical == {f"{LAYER}{name}": (shape, "bfloat16") for name, shape in expected.items()}
    forwards = bind(hugging_face(config, checkpoint), logical).natives(0)
    assert forwards == {(0, name): shape for name, (shape, _) in checkpoint.items()}


def test_a_hybrid_layers_norm_is_before_what_the_layer_has() -> None:
    """Nemotron-H calls every norm `norm`."""
    config = {**SIZES, "model_type": "nemotron_h", "num_hidden_layers": 2}
    names = ("0.norm", "0.mixer.o_proj", "1.norm", "1.mixer.down_proj")
    checkpoint = {f"backbone.layers.{name}.weight": ((8,), "float32") for name in names}
    assert list(logical_shapes(config, checkpoint)) == [
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
    ]


def test_layers_behind_the_last_predict_further_tokens() -> None:
    config = {**SIZES, "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    names = ("model.layers.0.norm.weight", "model.layers.1.shared_head.norm.weight")
    logical = logical_shapes(config, dict.fromkeys(names, ((8,), "float32")))
    assert set(logical) == {"model.layers.0.norm.weight", "mtp.0.norm.weight"}


def test_sizes_that_do_not_fit() -> None:
    config = {**SIZES, "model_type": "phi3"}
    with pytest.raises(
        StoreError, match="30 positions cannot be divided into q, k, v with q=16, k=8, v=8"
    ):
        logical_shapes(config, {f"{LAYER}self_attn.qkv_proj.weight": ((30, 8), "float32")})


class Attributes:
    """A configuration as transformers makes it: with attributes, some of them computed."""

    model_type = "llama"
    n_layer = 3

    @property
    def num_attention_heads(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (Attributes(), (3, 4, 4)),
        ({"n_layer": 3, "n_head": 4}, (3, 4, 4)),
        ({"text_config": {"num_hidden_layers": 3, "num_attention_heads": 4}}, (3, 4, 4)),
        (
            {"hybrid_override_pattern": "M*E", "num_attention_heads": 4, "num_kv_heads": 2},
            (3, 4, 2),
        ),
        ({"layers_block_type": ["linear_attention", "mlp", "moe"], "n_head": 4}, (3, 4, 4)),
        ({"n_layer": 3, "num_attention_heads": 4, "multi_query": True}, (3, 4, 1)),
        ({"n_layer": 3, "n_head": 4, "model_type": "falcon"}, (3, 4, 1)),
    ],
)
def test_fields_by_any_of_their_names(given: Any, found: tuple[int, int, int]) -> None:
    config = Config(given)
    assert (config.layers, config.heads, config.kv_heads) == found


def test_fields_outside_of_the_language_model_are_not_its_own() -> None:
    """As in transformers' MusicFlamingoConfig, whose head_dim is the size of its audio model."""
    language = {"hidden_size": 64, "num_attention_heads": 4}
    quantization = {"weight_block_size": [128, 128]}
    config = Config(
        {"text_config": language, "head_dim": 1280, "quantization_config": quantization}
    )
    assert (config.head_dim, config.tile) == (16, (128, 128))
