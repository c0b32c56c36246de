"""What workers do with mixture-of-experts models of transformers. Imported by workers, so no pytest here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import shardmath_torch as smt
from shardmath_torch.tensors.dtensors.dtensor import local_of
from tests.distributed.tasks.checkpoints import same
from tests.distributed.tasks.dtensors import device_mesh, part
from tests.distributed.tasks.fine_grained import divide

SIZES = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
SIZES |= {"num_experts_per_tok": 2, "eos_token_id": 2}
LATENT = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": 3, "moe_intermediate_size": 6, "mlp_only_layers": [0]},
    "Mixtral": {"num_local_experts": 3},
    "Olmoe": {"num_experts": 3},
    "DeepseekV3": {
        **LATENT,
        "n_routed_experts": 4,
        "moe_intermediate_size": 6,
        "n_group": 2,
        "topk_group": 1,
        "v_head_dim": 4,
        "first_k_dense_replace": 1,
    },
}
"""The fields that each family adds."""
TENSOR_PARALLEL = {
    r"\.experts\.gate_up_proj": "R S1",
    r"\.experts\.down_proj": "R S2",
    r"(q|k|v|gate|up)_proj": "S0 S0",
    "": "R R",
}


def make_model(family: str, **fields: Any) -> Any:
    """The model, with weights that count from 0."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | fields)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    at = 0
    for tensor in model.state_dict().values():
        numbers = torch.arange(at, at + tensor.numel(), dtype=tensor.dtype)
        tensor.copy_(numbers.view(tensor.shape))
        at += tensor.numel()
    return model


def divided(family: str, how: str) -> nn.Module:
    """The model without weights, under FSDP2 or tensor parallelism."""
    from torch.distributed.fsdp import fully_shard

    module: nn.Module = make_model(family)
    for tensor in module.state_dict().values():
        tensor.zero_()
    if how == "FSDP2":
        fully_shard(module, mesh=device_mesh(range(2), (2,)))
    else:
        divide(module, TENSOR_PARALLEL, (1, 2))
    return module


def filled_and_exported(
    rank: int, family: str, saved: str, exported: dict[str, str]
) -> dict[str, list[str]]:
    """Loads what transformers saved, and exports it, under each kind of parallelism; names of what is not its slice."""
    whole = make_model(family).state_dict()
    wrong = {}
    for how, folder in exported.items():
        module = divided(family, how)
        smt.load_weights(saved, module)
        layouts = smt.layout_of(module)
        wrong[how] = []
        for name, tensor in module.state_dict(keep_vars=True).items():
            lies = layouts.get(name)
            wanted = whole[name] if lies is None else part(lies, rank, whole[name])
            if not same(local_of(tensor) if lies is not None else tensor, wanted):
                wrong[how].append(name)
        smt.export(folder, module)
    return wrong
