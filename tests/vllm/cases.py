"""Cases: models whose checkpoints vLLM loads, tiny, by transformers' names.

>>> given = fields("llama-tied", num_hidden_layers=1)
>>> given["model_type"], given["tie_word_embeddings"], given["num_hidden_layers"]
('llama', True, 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["MODELS", "SIZES", "VOCAB", "fields"]

VOCAB = 100
"""vLLM pads it to a multiple of 64, and cuts it then."""

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""With TP 4 there are more ranks than key heads."""

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

MODELS: dict[str, Mapping[str, Any]] = {
    "llama": {},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "gemma": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 8, "tie_word_embeddings": True},
    "olmo2": {},
    "starcoder2": {"tie_word_embeddings": True},
    "glm4": {"head_dim": 8, "pad_token_id": 0},
    "glm": {"head_dim": 8, "pad_token_id": 0},
    "gpt2": {
        "num_key_value_heads": None,
        "n_layer": 2,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "opt": {
        "num_key_value_heads": None,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "tie_word_embeddings": True,
    },
    "falcon": {
        "num_key_value_heads": None,
        "num_kv_heads": 4,
        "new_decoder_architecture": True,
        "tie_word_embeddings": True,
    },
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "mlp_only_layers": [0]},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "glm4_moe": {
        "head_dim": 8,
        "moe_intermediate_size": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "use_qk_norm": True,
    },
    "granitemoe": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "gpt_oss": {
        "head_dim": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
    },
    # The sizes of latent attention are real: vLLM has kernels for no others.
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": 24,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    },
    "nemotron_h": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "head_dim": 8,
        "ssm_state_size": 4,
        "mamba_num_heads": 8,
        "mamba_head_dim": 4,
        "n_groups": 8,
        "conv_kernel": 4,
        "chunk_size": 8,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 24,
        "n_shared_experts": 1,
    },
    "qwen3_next": {
        **EXPERTS,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 4,
        "shared_expert_intermediate_size": 24,
    },
    "mamba2": {
        "intermediate_size": None,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 4,
        "state_size": 4,
        "expand": 2,
        "tie_word_embeddings": True,
    },
    "jamba": {
        "num_experts": 6,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_state": 4,
        "mamba_dt_rank": 8,
    },
}
"""Fields beside `SIZES`, by transformers' name of the model unless `model_type` says it."""


def fields(model: str, **more: Any) -> dict[str, Any]:
    """All fields of the transformers configuration."""
    given: dict[str, Any] = {**SIZES, "model_type": model, **MODELS[model], **more}
    # None takes a field away: vLLM would read it where the kind of model has none.
    return {name: value for name, value in given.items() if value is not None}
