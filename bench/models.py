"""Models: the shapes of real ones, as Megatron-Core's and Hugging Face's configurations say them.

1. A model is the fields of its TransformerConfig that say shapes, its vocabulary, and what Hugging Face calls its
   kind. An engine's configuration follows from these (`hf_config`).
2. Sizes are those of the published checkpoints, without layers that predict further tokens.
3. A model with tiles is trained in bfloat16 and served with FP8 data and scales of tiles in its linear layers, as its
   checkpoint has it, and a cache of keys and values that has scales too.

>>> model = MODELS["qwen3-4b"]
>>> count_parameters(model)
4022468096
>>> hf_config(model)["num_key_value_heads"]
8
"""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from shardmath.models.storage.stored import Shapes
from shardmath.models.systems.megatron_shapes import MegatronConfig, logical_shapes
from shardmath.values.formats.fp8 import FP8Blocks
from shardmath.values.transforms.components import Transform
from shardmath.values.transforms.quantizing import Quantize

__all__ = [
    "MODELS",
    "Model",
    "count_parameters",
    "hf_config",
    "rules_of",
    "served_shapes",
    "shapes_of",
]

GATED = {"gated_linear_unit": True, "add_bias_linear": False, "normalization": "RMSNorm"}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "qk_layernorm": True,
}
"""DeepSeek's attention; Kimi-K2 has it too."""


class Model(NamedTuple):
    """Hugging Face's kind of model, the fields of its TransformerConfig, and what these do not say."""

    kind: str
    config: dict[str, Any]
    vocab: int
    tied: bool = False
    pattern: str | None = None
    tiles: FP8Blocks | None = None


def _dense(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, **more: Any
) -> dict[str, Any]:
    """A TransformerConfig of gated layers with grouped queries."""
    return {
        **GATED,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": 128,
        "ffn_hidden_size": ffn,
        **more,
    }


def _experts(count: int, ffn: int, **more: Any) -> dict[str, Any]:
    """Fields of routed experts."""
    return {
        "num_moe_experts": count,
        "moe_ffn_hidden_size": ffn,
        "moe_grouped_gemm": True,
        **more,
    }


def _deepseek(layers: int, dense: int, heads: int, experts: int) -> dict[str, Any]:
    """DeepSeek-V3's layers, of which the first are dense."""
    return {
        **_dense(layers, 7168, heads, heads, 18432),
        **LATENT,
        **_experts(experts, 2048),
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_shared_expert_intermediate_size": 2048,
        "moe_router_enable_expert_bias": True,
    }


def _glm_experts(layers: int, dense: int, count: int, ffn: int) -> dict[str, Any]:
    """Fields of GLM's layers, of which the first are dense: routed experts, and one that is shared and as large."""
    return {
        **_experts(count, ffn),
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_shared_expert_intermediate_size": ffn,
        "moe_router_enable_expert_bias": True,
    }


def _nemotron(pattern: str, hidden: int, heads: int, experts: dict[str, Any]) -> dict[str, Any]:
    """A hybrid of Mamba, attention and experts that are not gated."""
    return {
        **_dense(len(pattern), hidden, 32, 2, hidden),
        "gated_linear_unit": False,
        "is_hybrid_model": True,
        "mamba_num_heads": heads,
        "mamba_head_dim": 64,
        "mamba_state_dim": 128,
        "mamba_num_groups": 8,
        "moe_router_enable_expert_bias": True,
        **experts,
    }


NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"

MODELS: dict[str, Model] = {
    "qwen3-4b": Model("qwen3", _dense(36, 2560, 32, 8, 9728, qk_layernorm=True), 151936, tied=True),
    "qwen3-30b-a3b": Model(
        "qwen3_moe",
        _dense(48, 2048, 32, 4, 6144, qk_layernorm=True, **_experts(128, 768)),
        151936,
    ),
    "qwen3-235b-a22b": Model(
        "qwen3_moe",
        _dense(94, 4096, 64, 4, 12288, qk_layernorm=True, **_experts(128, 1536)),
        151936,
    ),
    "deepseek-v3": Model("deepseek_v3", _deepseek(61, 3, 128, 256), 129280),
    "kimi-k2": Model("deepseek_v3", _deepseek(61, 1, 64, 384), 163840),
    "nemotron-3-nano": Model(
        "nemotron_h",
        _nemotron(NANO, 2688, 64, _experts(128, 1856, moe_shared_expert_intermediate_size=3712)),
        131072,
        pattern=NANO,
    ),
    "nemotron-3-super": Model(
        "nemotron_h",
        _nemotron(
            SUPER,
            4096,
            128,
            _experts(512, 2688, moe_shared_expert_intermediate_size=5376, moe_latent_size=1024),
        ),
        131072,
        pattern=SUPER,
    ),
    "gpt-oss-120b": Model(
        "gpt_oss",
        _dense(
            36,
            2880,
            64,
            8,
            2880,
            add_bias_linear=True,
            softmax_type="learnable",
            **_experts(128, 2880),
        )
        | {"kv_channels": 64},
        201088,
    ),
    "llama-3-70b": Model("llama", _dense(80, 8192, 64, 8, 28672), 128256),
    "glm-4.5": Model(
        "glm4_moe",
        _dense(
            92,
            5120,
            96,
            8,
            12288,
            add_qkv_bias=True,
            qk_layernorm=True,
            **_glm_experts(92, 3, 160, 1536),
        ),
        151552,
    ),
    "glm-4.5-air": Model(
        "glm4_moe",
        _dense(46, 4096, 96, 8, 10944, add_qkv_bias=True, **_glm_experts(46, 1, 128, 1408)),
        151552,
    ),
    "glm-4.7-flash": Model(
        "glm4_moe_lite",
        _dense(47, 2048, 20, 20, 10240, **_glm_experts(47, 1, 64, 1536))
        | LATENT
        | {"q_lora_rank": 768, "qk_head_dim": 192, "v_head_dim": 256},
        154880,
    ),
}


for _name in ("qwen3-4b", "qwen3-30b-a3b"):
    MODELS[f"{_name}-fp8"] = MODELS[_name]._replace(tiles=FP8Blocks())
MODELS["kimi-k2-fp8"] = MODELS["kimi-k2"]._replace(tiles=FP8Blocks((64, 64)))

QUANTIZED = "*_proj*.weight"
"""Linear layers, `kv_a_proj_with_mqa` too. Embedding, head and router stay as they are."""


def shapes_of(model: Model, dtype: str = "bfloat16") -> Shapes:
    """The model's logical tensors, as a trainer has them; with tiles also a scale of keys and one of values a layer.

    Latent attention has none of these: it keeps neither keys nor values.
    """
    shapes = dict(_list_weights(model, dtype))
    config = MegatronConfig(model.config)
    if model.tiles and not config.latent:
        for layer in range(config.layers):
            for which in "kv":
                shapes[f"model.layers.{layer}.self_attn.{which}_scale"] = (1,), "float32"
    return shapes


def _list_weights(model: Model, dtype: str) -> Shapes:
    return logical_shapes(
        model.config, vocab=model.vocab, tied=model.tied, pattern=model.pattern, dtype=dtype
    )


def rules_of(tiles: FP8Blocks) -> dict[str, Transform]:
    """What is made of a trainer's tensors for an engine in FP8."""
    return {QUANTIZED: Quantize(tiles)}


def served_shapes(shapes: Shapes, tiles: FP8Blocks) -> Shapes:
    """The same tensors as an engine in FP8 has them: linear layers as data and scales."""
    served = {}
    for name, (shape, dtype) in shapes.items():
        served[name] = shape, dtype
        if fnmatchcase(name, QUANTIZED):
            served[name] = shape, "float8_e4m3fn"
            served[f"{name}_scale_inv"] = tiles.scale_shape(shape), "float32"
    return served


def count_parameters(model: Model) -> int:
    """Elements of all tensors of the model; of a router's bias, too."""
    return sum(math.prod(shape) for shape, _ in _list_weights(model, "bfloat16").values())


def hf_config(model: Model) -> dict[str, Any]:
    """The fields of Hugging Face's configuration that say how an engine stores the model."""
    config = MegatronConfig(model.config)
    quantized = None
    if model.tiles:
        quantized = {"quant_method": "fp8", "weight_block_size": list(model.tiles.block)}
    return {
        "quantization_config": quantized,
        "model_type": model.kind,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.groups,
        "head_dim": config.head_dim,
        "intermediate_size": config.get("moe_ffn_hidden_size", config.ffn),
        "num_experts": config.experts,
        "vocab_size": model.vocab,
        "n_groups": config.get("mamba_num_groups"),
        "ssm_state_size": config.get("mamba_state_dim"),
        "mamba_num_heads": config.get("mamba_num_heads"),
        "mamba_head_dim": config.get("mamba_head_dim"),
    }
