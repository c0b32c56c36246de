"""Megatron's models as a trainer's source, without Megatron: modules with its names, shapes and configuration."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import shardmath_vllm as sv
from shardmath import StoreError
from shardmath.models.systems.megatron import logical_shapes, megatron
from shardmath.storage import bind

__all__ = ["CONFIG", "SIZES", "VOCAB", "Seen", "read", "read_norms", "read_wrong"]

SIZES = {"tp": 2, "pp": 2, "ep": 2, "etp": 1, "vpp": 2}
CONFIG = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "num_moe_experts": 4,
    "moe_router_enable_expert_bias": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 2,
    "expert_tensor_parallel_size": 1,
    "params_dtype": torch.bfloat16,
}
VOCAB = 10
HF = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "vocab_size": VOCAB,
}


class Seen(NamedTuple):
    """What a rank has of a source: names by chunk, what all plan by, and whether tensors are the model's own."""

    chunks: list[list[str]]
    told: Any
    own: bool


class Model(nn.Module):
    """With parameters and buffers under names with dots, which torch's own do not have."""

    def __init__(self, natives: dict[str, tuple[int, ...]], last: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(**CONFIG)
        self.share_embeddings_and_output_weights = False
        for name, shape in natives.items():
            *path, own = name.split(".")
            module: nn.Module = self
            for step in path:
                if not hasattr(module, step):
                    module.add_module(step, nn.Module())
                module = getattr(module, step)
            if own == "expert_bias":
                module.register_buffer(own, torch.zeros(shape))
                continue
            # Norms of the last stage alone are float32: the others hear of it.
            dtype = torch.float32 if last and "norm" in name else torch.bfloat16
            module.register_parameter(own, nn.Parameter(torch.zeros(shape, dtype=dtype)))


def read(
    rank: int,
    kind: str,
    dtype: str | None,
    changes: Mapping[str, Any] = MappingProxyType({}),
    norms: str = "check",
    pattern: str | None = None,
) -> Seen:
    """The source of this rank's chunks, one of which is wrapped. `changes` are fields of the trainer's configuration
    that differ, and a hybrid model has a pattern and learned positions."""
    fields = CONFIG | dict(changes)
    positions = 8 * bool(pattern)
    shapes = logical_shapes(fields, vocab=VOCAB, pattern=pattern, positions=positions)
    ranks = range(dist.get_world_size())
    side = megatron(fields, ranks=ranks, vocab=VOCAB, **SIZES, pattern=pattern, norms="keep")
    by_chunk: list[dict[str, tuple[int, ...]]] = [{}, {}]
    for (chunk, name), shape in bind(side, shapes).natives(rank).items():
        by_chunk[chunk][name] = shape
    last = rank >= dist.get_world_size() // 2
    models = [Model(natives, last) for natives in by_chunk]
    models[0].config = SimpleNamespace(**fields)
    if pattern:
        models[0].hybrid_layer_pattern = pattern
        models[0].position_embedding_type = "learned_absolute"
        models[0].max_sequence_length = positions
    wrapped = nn.Module()
    wrapped.module = models[0]
    config = HF | {"model_type": kind}
    source = sv.read_megatron([wrapped, models[1]], config, dtype=dtype, norms=norms)
    assert isinstance(source.tensors, list)
    own = all(
        named[name] is tensor
        for named, model in zip(source.tensors, models, strict=True)
        for name, tensor in model.named_parameters()
    )
    return Seen([list(named) for named in source.tensors], source.tell(), own)


def read_norms(rank: int, kind: str, changes: Mapping[str, Any], norms: str) -> str:
    """What is said of norms that checkpoints of this kind may store otherwise; empty if nothing is."""
    try:
        read(rank, kind, None, changes, norms)
    except StoreError as error:
        return str(error)
    return ""


def read_wrong(rank: int) -> list[str]:
    """What is said of what is no model of Megatron's."""
    whole = Model({"embedding.word_embeddings.weight": (128, 16)}, False)
    wrong: list[tuple[Any, Any]] = [
        ([], HF),
        ([1], HF),
        (nn.Linear(2, 2), HF),
        (whole, {}),
    ]
    said = []
    for chunks, config in wrong:
        try:
            sv.read_megatron(chunks, config)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said
