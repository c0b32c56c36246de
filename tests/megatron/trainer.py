"""Megatron-Core's model of a case, built and run over gloo, a rank per process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_block_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_decoder_layer_specs,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import experts
from torch import Tensor, nn

from shardmath.models.systems.megatron import pad_vocab
from tests.megatron import stand_ins, te_modules
from tests.megatron.cases import VOCAB, Case

__all__ = ["build", "forward", "own_tensors"]


def build(case: Case, config: TransformerConfig, hf: Any) -> list[Any]:
    """This rank's model, a chunk per virtual stage, with Megatron's random weights."""
    stand_ins.replace()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp if case.vpp > 1 else None,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=case.etp,
        order=case.order,
    )
    return [_build_chunk(case, config, hf, chunk) for chunk in range(case.vpp)]


def _build_chunk(case: Case, config: TransformerConfig, hf: Any, chunk: int) -> Any:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    fields = {
        "vocab_size": pad_vocab(VOCAB, case.tp),
        "max_sequence_length": hf.max_position_embeddings,
        "pre_process": (chunk, stage) == (0, 0),
        "post_process": (chunk, stage) == (case.vpp - 1, case.pp - 1),
        "parallel_output": False,
        "share_embeddings_and_output_weights": case.tied,
    }
    if case.pattern is not None:
        return _build_hybrid(case, config, fields)
    at = chunk if case.vpp > 1 else None
    block = _specify(config, case.spec, at)
    model = GPTModel(
        config,
        block,
        mtp_block_spec=_specify_further(config, case.spec, at, block) if case.further else None,
        position_embedding_type="rope",
        rotary_base=hf.rope_parameters["rope_theta"],
        rotary_percent=hf.rope_parameters.get("partial_rotary_factor", 1.0),
        vp_stage=at,
        **fields,
    )
    for module in model.modules():
        if case.legacy and isinstance(module, experts.GroupedMLP):
            # It refuses to run unless told so; its weights stay float32.
            module.config = dataclasses.replace(config, bf16=True)
    # With tp, experts refuse to train without sequence parallelism.
    return model.eval()


def _build_hybrid(case: Case, config: TransformerConfig, fields: dict[str, Any]) -> Any:
    """A model of Mamba layers and others, with Megatron's own list of their modules."""
    stand_ins.replace_for_mamba(case.stepwise)
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec
    from megatron.core.models.mamba.mamba_model import MambaModel

    return MambaModel(
        config, mamba_stack_spec, hybrid_override_pattern=case.pattern, **fields
    ).eval()


def _specify(config: TransformerConfig, spec: str, chunk: int | None) -> Any:
    """The modules of each layer, as Megatron puts them together: of its own, or of TransformerEngine's."""
    if config.experimental_attention_variant:
        return get_transformer_block_with_experimental_attention_variant_spec(config)
    block = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=spec == "te",
        normalization=config.normalization,
        vp_stage=chunk,
    )
    for layer in block.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = te_modules.Attention
    return block


def _specify_further(config: TransformerConfig, spec: str, chunk: int | None, block: Any) -> Any:
    """The modules that predict further tokens, whose layers are like the last one of all; None on other stages."""
    te = spec == "te"
    if not block.layer_specs:
        last = get_gpt_decoder_layer_specs(config, te, normalization=config.normalization)[-1]
        last.submodules.self_attention.submodules.core_attention = te_modules.Attention
        block = last
    return get_gpt_mtp_block_spec(config, block, te, vp_stage=chunk)


def _gets_further(model: Any) -> bool:
    """Whether the stage before it has all the layers that predict further tokens."""
    return bool(model.post_process and getattr(model.config, "mtp_standalone", False))


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and persistent buffers, by their own names."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    persistent = module.state_dict()
    named |= {name: buffer for name, buffer in module.named_buffers() if name in persistent}
    return named


@torch.no_grad()
def forward(chunks: Sequence[Any], tokens: Tensor) -> list[Tensor] | None:
    """Logits of the vocabulary without its padding, and of each further token, on ranks of the last stage; None on
    others."""
    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, -1)
    later = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
    logits: list[Tensor] = []
    for model in chunks:
        if not model.pre_process:
            # Megatron's order of dimensions: sequence, batch, hidden. States of further tokens come after all others.
            further = model.config.mtp_num_layers if _gets_further(model) else 0
            received = torch.empty(length * (1 + further), batch, model.config.hidden_size)
            dist.recv(received, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(received)
        if model.post_process:
            # Further tokens' logits only go into a loss, which overwrites them. It needs labels: any will do.
            model.output_layer.register_forward_hook(
                lambda module, taken, given: logits.append(given[0].transpose(0, 1).clone())
            )
        labels = tokens if model.post_process and model.config.mtp_num_layers else None
        out = model(tokens, positions, later[None, None], labels=labels)
        if not model.post_process:
            dist.send(out.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    # The head is used for the next token last.
    return [one[..., :VOCAB] for one in logits[-1:] + logits[:-1]] or None
