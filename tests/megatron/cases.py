"""Cases: a transformers model, and how a Megatron trainer divides it.

>>> Case("qwen3", tp=2, pp=2).ranks, str(Case("mixtral", ep=2))
(4, 'mixtral-ep2')
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

from packaging.version import Version

__all__ = ["MODELS", "VOCAB", "Case", "Found", "is_before"]

VOCAB = 100
"""Megatron pads it to a multiple of 128 times tp."""

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
}
"""Fields of transformers' configurations. No two numbers of rows are equal: what is swapped shows, or does not fit."""

MODELS: dict[str, Mapping[str, Any]] = {
    "llama": {},
    # Fewer groups than tp=4: ranks whose part of linear_qkv has query rows only.
    "llama-2-groups": {"model_type": "llama", "num_key_value_heads": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    # Biases, LayerNorm, and an MLP without a gate.
    "starcoder2": {"sliding_window": None, "bos_token_id": None, "eos_token_id": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
    },
    # A gated delta net, then attention with an output gate.
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 10,
        "linear_conv_kernel_dim": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    # A layer of Mamba, one of attention without positions, one of an MLP without a gate.
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "head_dim": 8,
        "ssm_state_size": 6,
        "mamba_num_heads": 4,
        "mamba_head_dim": 10,
        "n_groups": 2,
        "chunk_size": 8,
    },
    # Experts without a gate, of latent inputs; the same router as DeepSeek-V3.
    "nemotron_h-experts": {
        "model_type": "nemotron_h",
        "layers_block_type": ["linear_attention", "full_attention", "moe"],
        "head_dim": 8,
        "ssm_state_size": 6,
        "mamba_num_heads": 4,
        "mamba_head_dim": 10,
        "n_groups": 2,
        "chunk_size": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "moe_latent_size": 20,
    },
    # Mamba alone, of one group: transformers normalizes all groups together, and Megatron each on its own.
    "mamba2": {
        "state_size": 6,
        "num_heads": 4,
        "head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    # A dense layer, then experts beside shared ones; latent queries, keys and values.
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
}
"""Fields beside `SIZES`, by transformers' name of the model unless `model_type` says it."""


HYBRID = {"nemotron_h": "M*-", "nemotron_h-experts": "M*E", "mamba2": "MM"}
"""The modules of the layers of hybrid models."""

PLAIN = ("llama", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "nemotron_h")
"""Kinds that the plain reference knows."""


def is_before(version: str) -> bool:
    """Whether this Megatron-Core is older than `version`."""
    return Version(metadata.version("megatron-core")) < Version(version)


@dataclass(frozen=True)
class Case:
    """A model and a trainer.

    `first` are the layers of the first stage, `layout` says what is on each stage, `spec` whose modules layers are
    made of, `legacy` keeps all experts of a rank in one tensor. `further` tokens are predicted behind the next one, all
    by one layer if it is `repeated`; mixers of Mamba run as Megatron decodes if `stepwise`; `swap` are parts of rows
    and what to write in their places.
    """

    model: str
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    layers: int = 2
    first: int | None = None
    layout: str | None = None
    tied: bool = False
    order: str = "tp-cp-ep-dp-pp"
    spec: str = "local"
    legacy: bool = False
    further: int = 0
    repeated: bool = False
    stepwise: bool = False
    swap: tuple[str, str] | None = None

    @property
    def ranks(self) -> int:
        """The fewest that hold it: a stage is one replica of its dense tensors, or of its experts."""
        return self.pp * math.lcm(self.tp, self.ep * self.etp)

    @property
    def fields(self) -> dict[str, Any]:
        """All fields of the transformers configuration."""
        own = {"model_type": self.model, "tie_word_embeddings": self.tied}
        # Of a hybrid model, its list of layers says how many.
        if "layers_block_type" not in MODELS[self.model]:
            own["num_hidden_layers"] = self.layers
        return {**SIZES, **own, **MODELS[self.model]}

    @property
    def pattern(self) -> str | None:
        """The modules of a hybrid model's layers, and of those that predict further tokens."""
        main = HYBRID.get(self.model)
        return main and main + f"/{main[-2:]}" * self.further

    @property
    def again(self) -> list[int]:
        """The layers that those which predict a further token are like."""
        return [1, 2] if self.pattern else [self.layers - 1]

    @property
    def is_plain(self) -> bool:
        """Whether `tests/references/megatron.py` knows the model, and its layers fall to stages evenly."""
        usual = self.order == Case.order and self.first is None and self.layout is None
        usual = usual and not self.legacy and not self.further
        usual = usual and "E" not in (self.pattern or "")
        return usual and self.fields["model_type"] in PLAIN

    def __str__(self) -> str:
        words = [self.model]
        for axis in ("tp", "pp", "vpp", "ep", "etp"):
            size = getattr(self, axis)
            if size > 1:
                words.append(f"{axis}{size}")
        if self.order != Case.order:
            words.append(f"order {self.order}")
        if self.layout is not None:
            words.append(self.layout)
        if self.stepwise:
            words.append("stepwise")
        if self.further:
            words.append(f"further{self.further}" + " repeated" * self.repeated)
        if self.spec != Case.spec:
            words.append(self.spec)
        return "-".join([*words, *["tied"] * self.tied, *["legacy"] * self.legacy])


class Found(NamedTuple):
    """What a rank found; without logits the rank is of another stage than the last."""

    difference: float | None
    largest: float | None
    greedy: bool | None
    not_back: list[str]
    strange: list[str]
    """What it stores that is not as `tests/references/megatron.py` says, of the models that this knows."""
