"""Megatron's configuration of a transformers model: what it computes, not how it stores it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch.nn import functional

from tests.megatron.cases import Case

__all__ = ["configure"]

CPU = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "moe_token_dispatcher_type": "allgather",
}
"""Fields by which Megatron runs without kernels of its own."""

gelu = functools.partial(functional.gelu, approximate="tanh")


def configure(case: Case, hf: Any) -> TransformerConfig:
    """Megatron's configuration of the case's model; `hf` is that of transformers."""
    fields = _configure_layers(case, hf) | _configure_parallel(case) | CPU
    if case.further:
        fields["mtp_num_layers"] = case.further
    if case.repeated:
        fields["mtp_use_repeated_layer"] = True
    make = TransformerConfig
    if hf.model_type == "starcoder2":
        fields |= _configure_gelu(hf)
    if case.pattern is not None:
        fields |= _configure_mamba(hf)
    if "E" in (case.pattern or "E") and getattr(hf, "num_experts_per_tok", None):
        fields |= _configure_experts(case, hf)
    if hf.model_type == "qwen3_next":
        fields |= _configure_linear(hf)
    if hf.model_type == "deepseek_v3":
        make = MLATransformerConfig
        fields |= _configure_latent(hf) | _configure_sigmoid(hf)
        dense = hf.first_k_dense_replace
        fields["moe_layer_freq"] = [0] * dense + [1] * (case.layers - dense)
    if "E" in (case.pattern or ""):
        fields |= _configure_sigmoid(hf)
        fields["moe_latent_size"] = hf.moe_latent_size
    return make(**fields)


def _configure_layers(case: Case, hf: Any) -> dict[str, Any]:
    """What all models have."""
    return {
        "num_layers": case.layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None),
        "ffn_hidden_size": hf.intermediate_size,
        "layernorm_epsilon": _find_epsilon(hf),
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type in ("qwen2", "qwen2_moe"),
        "qk_layernorm": hf.model_type in ("qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3"),
    }


def _find_epsilon(hf: Any) -> float:
    names = ("rms_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    return next(float(getattr(hf, name)) for name in names if hasattr(hf, name))


def _configure_parallel(case: Case) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp if case.vpp > 1 else None,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "num_layers_in_first_pipeline_stage": case.first,
        "pipeline_model_parallel_layout": case.layout,
        "pipeline_dtype": torch.float32,
    }


def _configure_gelu(hf: Any) -> dict[str, Any]:
    """Biases everywhere, and no gate."""
    return {
        "normalization": "LayerNorm",
        "gated_linear_unit": False,
        "activation_func": gelu,
        "add_bias_linear": True,
    }


def _configure_mamba(hf: Any) -> dict[str, Any]:
    """What Mamba adds, and an MLP of squares without a gate."""
    return {
        "is_hybrid_model": True,
        "gated_linear_unit": False,
        "activation_func": squared_relu,
        "mamba_state_dim": getattr(hf, "ssm_state_size", None) or hf.state_size,
        "mamba_head_dim": getattr(hf, "mamba_head_dim", None) or hf.head_dim,
        "mamba_num_groups": hf.n_groups,
        "mamba_num_heads": getattr(hf, "mamba_num_heads", None) or hf.num_heads,
        # The other path is one kernel, which would cut z, x, B, C and dt apart itself.
        "use_mamba_mem_eff_path": False,
    }


def _configure_experts(case: Case, hf: Any) -> dict[str, Any]:
    """What routed experts add."""
    return {
        "num_moe_experts": getattr(hf, "num_local_experts", None) or hf.num_experts,
        "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
        "moe_shared_expert_intermediate_size": getattr(hf, "shared_expert_intermediate_size", None),
        "moe_shared_expert_gate": hf.model_type in ("qwen2_moe", "qwen3_next"),
        "moe_grouped_gemm": case.legacy or case.spec == "te",
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        # Probabilities of all experts, or of the chosen ones, which is the same as normalizing them afterwards.
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
        # Megatron-Core 0.17 and later have no such field.
        **({"moe_use_legacy_grouped_gemm": True} if case.legacy else {}),
    }


def _configure_sigmoid(hf: Any) -> dict[str, Any]:
    """DeepSeek-V3's router, and its shared experts."""
    shared = hf.moe_intermediate_size * hf.n_shared_experts
    return {
        "moe_shared_expert_intermediate_size": getattr(
            hf, "moe_shared_expert_intermediate_size", shared
        ),
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": hf.n_group,
        "moe_router_group_topk": hf.topk_group,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
    }


def _configure_linear(hf: Any) -> dict[str, Any]:
    """What linear attention adds, and the gate of the other attention beside it."""
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(one == "linear_attention") for one in hf.layer_types],
        "linear_num_key_heads": hf.linear_num_key_heads,
        "linear_num_value_heads": hf.linear_num_value_heads,
        "linear_key_head_dim": hf.linear_key_head_dim,
        "linear_value_head_dim": hf.linear_value_head_dim,
        "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
        "attention_output_gate": True,
        "deterministic_mode": True,
    }


def _configure_latent(hf: Any) -> dict[str, Any]:
    """What latent attention adds."""
    return {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        # Of the values, by which Megatron's own attention sizes its output.
        "kv_channels": hf.v_head_dim,
        "rope_type": "rope",
        "rotary_base": hf.rope_parameters["rope_theta"],
    }
