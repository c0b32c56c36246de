"""Configurations of models known without a network: the settings that determine shapes.

Sources: config.json of each model on the Hub, by its name.
"""

from __future__ import annotations

__all__ = [
    "DEEPSEEK_V3",
    "MODELS",
    "NEMOTRON_NANO",
    "NEMOTRON_SUPER",
    "QWEN3_235B",
    "QWEN3_30B",
    "QWEN3_4B",
]

DEEPSEEK_V3 = "deepseek-ai/DeepSeek-V3"
QWEN3_235B = "Qwen/Qwen3-235B-A22B"
QWEN3_30B = "Qwen/Qwen3-30B-A3B"
QWEN3_4B = "Qwen/Qwen3-4B"
NEMOTRON_NANO = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
NEMOTRON_SUPER = "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"

_NEMOTRON: dict[str, object] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_shared_experts": 1,
    "vocab_size": 131072,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""The common settings of hybrids of Mamba, experts and attention, without layers of multi-token prediction."""

MODELS: dict[str, tuple[str, dict[str, object]]] = {
    DEEPSEEK_V3: (
        "deepseek_v3",
        {
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "first_k_dense_replace": 3,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    QWEN3_235B: (
        "qwen3_moe",
        {
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_experts": 128,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    QWEN3_30B: (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        },
    ),
    QWEN3_4B: (
        "qwen3",
        {
            "hidden_size": 2560,
            "num_hidden_layers": 36,
            "intermediate_size": 9728,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
    NEMOTRON_NANO: (
        "nemotron_h",
        {
            **_NEMOTRON,
            "hidden_size": 2688,
            "mamba_num_heads": 64,
            "moe_intermediate_size": 1856,
            "n_routed_experts": 128,
            "moe_shared_expert_intermediate_size": 3712,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        },
    ),
    NEMOTRON_SUPER: (
        "nemotron_h",
        {
            **_NEMOTRON,
            "hidden_size": 4096,
            "mamba_num_heads": 128,
            "moe_intermediate_size": 2688,
            "moe_latent_size": 1024,
            "n_routed_experts": 512,
            "moe_shared_expert_intermediate_size": 5376,
            "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*"
            "EMEMEMEME",
        },
    ),
}
"""The model type and the published settings of models known without a network, by name."""
