"""Models of transformers that its own from_pretrained loads in parts, on workers. No pytest here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.integrations import accelerate

import shardmath as sm
import shardmath_torch as smt
from shardmath.models.systems.hf_plans import hf_parallel

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 102,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 12,
    "expert_ffn_hidden_size": 12,
    "ffn_hidden_size": 48,
    "shared_expert_intermediate_size": 20,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "zero_expert_num": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "mamba_num_heads": 4,
}
"""Of these, a configuration gets the fields that it has."""
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")


def configure(kind: str) -> Any:
    """A small configuration: two layers, of two kinds if the model has several."""
    make = transformers.models.auto.configuration_auto.CONFIG_MAPPING[kind]
    usual = make()
    fields: dict[str, Any] = {}
    for name, value in SIZES.items():
        # A head has a size of its own also where it is None at first.
        if getattr(usual, name, None) is not None or (name == "head_dim" and hasattr(usual, name)):
            fields[name] = value
    for name in LISTS:
        kinds = list(dict.fromkeys(getattr(usual, name, None) or ()))
        if kinds:
            fields[name] = [kinds[0], kinds[-1]]
    return make(**fields, tie_word_embeddings=False)


def number(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters, once their elements are 1, 2, 3, and so on, through all of them."""
    start = 1
    for parameter in model.parameters():
        stop = start + parameter.numel()
        parameter.data = torch.arange(start, stop).reshape(parameter.shape).float()
        start = stop
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def compare(rank: int, kind: str, folder: Path, ep: bool) -> list[str]:
    """The parameters of which the rank has loaded another part than the layout of its plan says, or its own."""
    config = configure(kind)
    whole = number(transformers.AutoModelForCausalLM.from_config(config))
    if rank == 0:
        model = transformers.AutoModelForCausalLM.from_config(config)
        number(model)
        model.save_pretrained(folder)
    dist.barrier()
    size = dist.get_world_size()
    sizes = {"tp_size": size, **({"ep_size": size} if ep else {})}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(**sizes), dtype=torch.float32
    )
    shapes = {name: (tuple(tensor.shape), "float32") for name, tensor in whole.items()}
    experts = (loaded.ep_plan, sm.Mesh(ep=size)) if ep else None
    planned = hf_parallel(loaded.tp_plan, shapes, sm.Mesh(tp=size), experts=experts, unused=["*"])
    own = smt.layout_of(loaded)
    wrong = []
    for name, parameter in loaded.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for said, layout in (("planned", planned[name]), ("own", own[name])):
            part = whole[name].numpy()[np.ix_(*layout.indices(rank))]
            if not np.array_equal(local.detach().numpy(), part):
                wrong.append(f"{kind} {said} {name}")
    return wrong


def load(rank: int, kinds: list[str], folder: Path, ep: bool) -> list[str]:
    """What is wrong, of all these kinds of model."""
    # It asks for accelerate, of which it needs nothing here.
    accelerate.is_accelerate_available = lambda *args: True
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    wrong: list[str] = []
    for kind in kinds:
        wrong += compare(rank, kind, folder / kind, ep)
    return wrong
