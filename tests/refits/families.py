"""Families of models at tiny sizes: transformers' configuration, and Megatron's of the same model.

No two numbers of rows are equal, so that what is swapped shows, or does not fit.

>>> FAMILIES["nemotron_h"].pattern, FAMILIES["qwen3"].tied
('M*E-', True)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardmath.models.storage.stored import Shapes
from shardmath.models.systems.megatron_shapes import logical_shapes

__all__ = ["FAMILIES", "Family"]

VOCAB = 100


@dataclass(frozen=True)
class Family:
    """A model. `pattern` is a hybrid's, a letter per layer."""

    hf: dict[str, Any]
    megatron: dict[str, Any]
    pattern: str | None = None

    @property
    def tied(self) -> bool:
        return bool(self.hf.get("tie_word_embeddings"))

    def shapes(self, dtype: str = "float32") -> Shapes:
        """The logical tensors."""
        return logical_shapes(
            self.megatron, vocab=VOCAB, tied=self.tied, pattern=self.pattern, dtype=dtype
        )


SIZES = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "num_key_value_heads": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
    "scoring_func": "sigmoid",
}
MAMBA = {
    "head_dim": 8,
    "ssm_state_size": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "n_groups": 4,
    "chunk_size": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 40,
}

DENSE = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "kv_channels": 4,
    "ffn_hidden_size": 48,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "gated_linear_unit": True,
}
"""Megatron's fields, of which configurations of other families differ in some."""
ROUTED = {"num_moe_experts": 8, "moe_ffn_hidden_size": 24, "moe_grouped_gemm": True}
MLA = {
    "multi_latent_attention": True,
    "num_query_groups": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "qk_layernorm": True,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 24,
    "moe_router_enable_expert_bias": True,
}
HYBRID = {
    "is_hybrid_model": True,
    "gated_linear_unit": False,
    "kv_channels": 8,
    "mamba_state_dim": 6,
    "mamba_head_dim": 10,
    "mamba_num_heads": 8,
    "mamba_num_groups": 4,
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_enable_expert_bias": True,
}
PATTERN = "M*E-"
WORDS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}


def _make_hybrid(groups: int) -> Family:
    """Nemotron-H: Mamba, attention without positions, experts without a gate, an MLP of the same kind."""
    own = {"model_type": "nemotron_h", "layers_block_type": [WORDS[one] for one in PATTERN]}
    hf = {**SIZES, **EXPERTS, **MAMBA, **own, "n_groups": groups}
    megatron = {**DENSE, **ROUTED, **HYBRID, "mamba_num_groups": groups}
    return Family(hf, megatron, PATTERN)


FAMILIES = {
    "llama": Family({**SIZES, "model_type": "llama"}, DENSE),
    "qwen3": Family(
        {**SIZES, "model_type": "qwen3", "tie_word_embeddings": True},
        {**DENSE, "qk_layernorm": True},
    ),
    "qwen3_moe": Family(
        {
            **SIZES,
            **EXPERTS,
            "model_type": "qwen3_moe",
            "num_key_value_heads": 4,
            "num_experts": 8,
            "norm_topk_prob": True,
        },
        {**DENSE, **ROUTED, "num_query_groups": 4, "qk_layernorm": True},
    ),
    # A dense layer, then experts beside shared ones; latent queries, keys and values.
    "deepseek_v3": Family(
        {**SIZES, **EXPERTS, **LATENT, "model_type": "deepseek_v3"}, {**DENSE, **ROUTED, **MLA}
    ),
    "nemotron_h": _make_hybrid(4),
    "nemotron_h_1_group": _make_hybrid(1),
}
"""Grouped queries, tied and not; experts; latent attention and experts; a hybrid with Mamba."""
