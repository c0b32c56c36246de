"""Megatron-Core 0.16.1 on processors: the model of a case, built and run over gloo by each rank.

Some things of Megatron want a GPU, TransformerEngine or flash-linear-attention where a model of its local layer spec
needs none of them; they are replaced below. All else is Megatron's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

with warnings.catch_warnings():
    # Apex and TransformerEngine are not installed, which is said once for each module that would use them.
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import (
        MLATransformerConfig,
        TransformerConfig,
        multi_latent_attention,
    )
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

from shardmath.families.megatron_core import pad_vocab
from tests.megatron.cases import VOCAB, Case

__all__ = ["build", "configure", "forward", "own_tensors"]

CPU = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "moe_token_dispatcher_type": "allgather",
}
"""Fields by which Megatron runs without kernels of its own."""


@contextlib.contextmanager
def _fork(self: Any, name: str = "") -> Iterator[None]:
    yield


def _l2norm(x: Tensor) -> Tensor:
    """That of flash-linear-attention."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _replace() -> None:
    """Dropout is off, so no state of a GPU's random numbers is needed; devices are the processor."""
    CudaRNGStatesTracker.fork = _fork
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment]
    # Without TransformerEngine the router looks for this name all the same.
    moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False
    # The deterministic gated delta net is written in torch, but for this norm.
    gated_delta_net.HAVE_FLA = True
    gated_delta_net.l2norm = _l2norm
    # Small functions are compiled on first use, which would take a C++ compiler.
    torch.compiler.set_stance("force_eager")


class _Attention(DotProductAttention):  # type: ignore[misc]
    """Takes the sizes of heads that latent attention gives, and that only TransformerEngine's attention asks for."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **named: Any) -> None:
        super().__init__(*args, **named)


def configure(case: Case, hf: Any) -> TransformerConfig:
    """Megatron's configuration of a transformers model (`hf` is its configuration)."""
    fields = {
        "num_layers": case.layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": getattr(hf, "head_dim", None),
        "ffn_hidden_size": hf.intermediate_size,
        "layernorm_epsilon": hf.rms_norm_eps,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": hf.model_type in ("qwen2", "qwen2_moe"),
        "qk_layernorm": hf.model_type in ("qwen3", "qwen3_moe", "qwen3_next", "deepseek_v3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp if case.vpp > 1 else None,
        "expert_model_parallel_size": case.ep,
        "expert_tensor_parallel_size": case.etp,
        "num_layers_in_first_pipeline_stage": case.first,
        "pipeline_dtype": torch.float32,
    }
    fields |= _configure_experts(case, hf) | CPU
    make = TransformerConfig
    if hf.model_type == "qwen3_next":
        fields |= _configure_linear(hf)
    if hf.model_type == "deepseek_v3":
        make = MLATransformerConfig
        fields |= _configure_latent(hf)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(**fields)


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


def _configure_linear(hf: Any) -> dict[str, Any]:
    """What linear attention adds, and the gate of other attention beside it."""
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


def _configure_experts(case: Case, hf: Any) -> dict[str, Any]:
    """What routed experts add."""
    experts = getattr(hf, "num_local_experts", None) or getattr(hf, "num_experts", None)
    if not experts:
        return {}
    fields = {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
        "moe_shared_expert_intermediate_size": getattr(hf, "shared_expert_intermediate_size", None),
        "moe_shared_expert_gate": hf.model_type in ("qwen2_moe", "qwen3_next"),
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        # Probabilities of all experts, or of the chosen ones, which is the same as normalising them afterwards.
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
    }
    if hf.model_type == "deepseek_v3":
        dense = hf.first_k_dense_replace
        fields |= {
            "moe_layer_freq": [0] * dense + [1] * (case.layers - dense),
            "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_num_groups": hf.n_group,
            "moe_router_group_topk": hf.topk_group,
            "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        }
    return fields


def build(case: Case, config: TransformerConfig, hf: Any) -> list[GPTModel]:
    """This rank's model, a chunk for each virtual stage, with Megatron's random weights."""
    _replace()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [_build_chunk(case, config, hf, chunk) for chunk in range(case.vpp)]


def _build_chunk(case: Case, config: TransformerConfig, hf: Any, chunk: int) -> GPTModel:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    at = chunk if case.vpp > 1 else None
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=at
    )
    for number, layer in enumerate(spec.layer_specs):
        layer.submodules.self_attention.submodules.core_attention = _Attention
        if config.linear_attention_freq and config.linear_attention_freq[number]:
            spec.layer_specs[number] = _with_delta_net(layer)
    model = GPTModel(
        config,
        spec,
        vocab_size=pad_vocab(VOCAB, case.tp),
        max_sequence_length=hf.max_position_embeddings,
        pre_process=(chunk, stage) == (0, 0),
        post_process=(chunk, stage) == (case.vpp - 1, case.pp - 1),
        parallel_output=False,
        share_embeddings_and_output_weights=case.tied,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
        rotary_percent=hf.rope_parameters.get("partial_rotary_factor", 1.0),
        vp_stage=at,
    )
    # With tp, experts refuse to train without sequence parallelism.
    return model.eval()


def _with_delta_net(layer: ModuleSpec) -> ModuleSpec:
    """The layer with a gated delta net, which Megatron puts together for TransformerEngine only."""
    parts = gated_delta_net.GatedDeltaNetSubmodules(
        in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear
    )
    mixer = ModuleSpec(module=gated_delta_net.GatedDeltaNet, submodules=parts)
    submodules = dataclasses.replace(layer.submodules, self_attention=mixer)
    return dataclasses.replace(layer, submodules=submodules)


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers, by their own names."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    persistent = module.state_dict()
    named |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return named


@torch.no_grad()
def forward(chunks: Sequence[GPTModel], tokens: Tensor) -> Tensor | None:
    """Logits of the vocabulary without its padding, on ranks of the last stage; None on others."""
    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, -1)
    hidden_by_mask = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
    out = None
    for model in chunks:
        if not model.pre_process:
            # Megatron's order of dimensions: sequence, batch, hidden.
            received = torch.empty(length, batch, model.config.hidden_size)
            dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(received)
        out = model(tokens, positions, hidden_by_mask[None, None])
        if not model.post_process:
            dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return out[..., :VOCAB] if chunks[-1].post_process else None
