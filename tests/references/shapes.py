"""Shapes of the tensors of a checkpoint, by the fields of its configuration.

>>> dense = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 1, "vocab_size": 9, "intermediate_size": 6}
>>> dense |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
>>> shapes_of(dense)["model.layers.0.self_attn.k_proj.weight"]
(2, 4)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from tests.references.checkpoint import Shapes

__all__ = ["shapes_of"]

Config: TypeAlias = Mapping[str, Any]
_Found: TypeAlias = dict[str, tuple[int, ...]]

CONV = 4
"""The kernel of Mamba's convolution."""


def shapes_of(config: Config) -> Shapes:
    """Every tensor of the model."""
    hybrid = config["model_type"] == "nemotron_h"
    table = config["vocab_size"], config["hidden_size"]
    words, norm = ("embeddings", "norm_f") if hybrid else ("embed_tokens", "norm")
    found: _Found = {f"model.{words}.weight": table}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        if hybrid:
            _list_mixer(found, config, prefix, config["layers_block_type"][layer])
        else:
            _list_layer(found, config, prefix, layer)
    found[f"model.{norm}.weight"] = (config["hidden_size"],)
    if not config.get("tie_word_embeddings"):
        found["lm_head.weight"] = table
    return found


def _list_layer(found: _Found, config: Config, prefix: str, layer: int) -> None:
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found[f"{prefix}{norm}.weight"] = (config["hidden_size"],)
    attention = prefix + "self_attn."
    if config["model_type"] == "deepseek_v3":
        _list_latent(found, config, attention)
    else:
        _list_attention(found, config, attention)
    experts = _count_experts(config)
    if experts and layer >= config.get("first_k_dense_replace", 0):
        _list_experts(found, config, prefix + "mlp.")
    else:
        _list_mlp(found, config, prefix + "mlp.", config["intermediate_size"])


def _count_experts(config: Config) -> int:
    return int(config.get("num_experts", config.get("n_routed_experts", 0)))


def _list_attention(found: _Found, config: Config, prefix: str) -> None:
    h, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    found[prefix + "q_proj.weight"] = (queries, h)
    found[prefix + "k_proj.weight"] = (keys, h)
    found[prefix + "v_proj.weight"] = (keys, h)
    found[prefix + "o_proj.weight"] = (h, queries)
    if config["model_type"].startswith("qwen3"):
        found[prefix + "q_norm.weight"] = (head,)
        found[prefix + "k_norm.weight"] = (head,)


def _list_latent(found: _Found, config: Config, prefix: str) -> None:
    h, heads = config["hidden_size"], config["num_attention_heads"]
    q, kv, rope = config["q_lora_rank"], config["kv_lora_rank"], config["qk_rope_head_dim"]
    nope, values = config["qk_nope_head_dim"], config["v_head_dim"]
    found[prefix + "q_a_proj.weight"] = (q, h)
    found[prefix + "q_a_layernorm.weight"] = (q,)
    found[prefix + "q_b_proj.weight"] = (heads * (nope + rope), q)
    found[prefix + "kv_a_proj_with_mqa.weight"] = (kv + rope, h)
    found[prefix + "kv_a_layernorm.weight"] = (kv,)
    found[prefix + "kv_b_proj.weight"] = (heads * (nope + values), kv)
    found[prefix + "o_proj.weight"] = (h, heads * values)


def _list_mlp(found: _Found, config: Config, prefix: str, inner: int) -> None:
    h = config["hidden_size"]
    if config["model_type"] != "nemotron_h":
        found[prefix + "gate_proj.weight"] = (inner, h)
    found[prefix + "up_proj.weight"] = (inner, h)
    found[prefix + "down_proj.weight"] = (h, inner)


def _list_experts(found: _Found, config: Config, prefix: str) -> None:
    experts = _count_experts(config)
    found[prefix + "gate.weight"] = (experts, config["hidden_size"])
    if config["model_type"] != "qwen3_moe":
        found[prefix + "gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        inner = config["moe_intermediate_size"]
        _list_mlp(found, config, f"{prefix}experts.{expert}.", inner)
    each = config["moe_intermediate_size"] * config.get("n_shared_experts", 0)
    shared = config.get("moe_shared_expert_intermediate_size", each)
    if shared:
        _list_mlp(found, config, prefix + "shared_experts.", shared)


def _list_mixer(found: _Found, config: Config, prefix: str, kind: str) -> None:
    found[prefix + "norm.weight"] = (config["hidden_size"],)
    mixer = prefix + "mixer."
    if kind == "linear_attention":
        _list_mamba(found, config, mixer)
    elif kind == "full_attention":
        _list_attention(found, config, mixer)
    elif kind == "moe":
        _list_experts(found, config, mixer)
    else:
        _list_mlp(found, config, mixer, config["intermediate_size"])


def _list_mamba(found: _Found, config: Config, prefix: str) -> None:
    h, heads = config["hidden_size"], config["mamba_num_heads"]
    inner = heads * config["mamba_head_dim"]
    state = config["n_groups"] * config["ssm_state_size"]
    for name in ("A_log", "D", "dt_bias"):
        found[prefix + name] = (heads,)
    found[prefix + "in_proj.weight"] = (2 * inner + 2 * state + heads, h)
    found[prefix + "conv1d.weight"] = (inner + 2 * state, 1, CONV)
    found[prefix + "conv1d.bias"] = (inner + 2 * state,)
    found[prefix + "norm.weight"] = (inner,)
    found[prefix + "out_proj.weight"] = (h, inner)
