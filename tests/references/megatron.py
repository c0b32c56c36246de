"""Megatron-Core, plainly: what each rank of a trainer stores of a Hugging Face checkpoint.

1. World ranks count tp fastest, then dp, then pp. Experts have a count of their own: etp fastest, then ep.
2. `linear_qkv` is, group by group, the group's query rows, its key rows and its value rows; ranks of tp take equal
   stretches of that, wherever heads begin. `linear_fc1` is the rank's part of gate, then of up.
3. Layers are numbered from 0 in each virtual stage, experts on each rank of ep.
4. Latent attention's down projections are whole on each rank under TransformerEngine's layer spec, and cut by rows
   under Megatron's own.

Source: Megatron-Core 0.16.1, `parallel_state.py`, `ssm/mamba_mixer.py`, `transformer/attention.py`, `mlp.py`, `moe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.references.checkpoint import Array, Order, Weights, count_experts, cut

__all__ = ["ORDER", "Trainer", "store"]

ORDER: Order = {
    "qkv": ("q", "k", "v"),
    "gated": ("gate", "up"),
    "mamba": ("z", "x", "B", "C", "dt"),
    "conv": ("x", "B", "C"),
}
"""In which order components are fused."""
VOCAB_MULTIPLE = 8
"""`make_vocab_size_divisible_by`, smaller than Megatron's own, so that more than one rank has words."""


@dataclass(frozen=True)
class Trainer:
    """A trainer's ranks; `te` says whose layer spec it has, `multiple` to what words are padded, times tp; names of a
    Mamba layer's convolution begin with `conv`, "conv1d_" in Megatron-Core 0.19."""

    ranks: range
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    etp: int = 1
    te: bool = True
    multiple: int = VOCAB_MULTIPLE
    conv: str = "conv1d."

    def __str__(self) -> str:
        sizes = {"PP": self.pp, "VPP": self.vpp, "TP": self.tp, "EP": self.ep, "ETP": self.etp}
        sizes["DP"] = len(self.ranks) // (self.pp * self.tp)
        words = [f"{name}{n}" for name, n in sizes.items() if n > 1]
        return "x".join(words) + ("" if self.te else "-local")


def store(
    weights: Mapping[str, Array],
    config: Mapping[str, Any],
    trainer: Trainer,
    rank: int,
    *,
    empty: float = 0,
    order: Order = ORDER,
) -> list[Weights]:
    """What the rank stores, by chunk; cells of no element have the value `empty`."""
    made = _Rank(weights, config, trainer, rank, empty, order)
    made.store()
    return made.chunks


class _Rank:
    """One rank, and what it stores so far."""

    def __init__(
        self,
        weights: Mapping[str, Array],
        config: Mapping[str, Any],
        trainer: Trainer,
        rank: int,
        empty: float,
        order: Order,
    ) -> None:
        self.weights = weights
        self.config = config
        self.trainer = trainer
        self.empty = empty
        self.order = order
        self.hybrid = config["model_type"] == "nemotron_h"
        at = trainer.ranks.index(rank)
        self.tp = at % trainer.tp
        self.pp = at // (len(trainer.ranks) // trainer.pp)
        self.etp = at % trainer.etp
        self.ep = at // trainer.etp % trainer.ep
        self.chunks: list[Weights] = [{} for _ in range(trainer.vpp)]

    def store(self) -> None:
        trainer = self.trainer
        self._store_ends()
        each = self.config["num_hidden_layers"] // (trainer.pp * trainer.vpp)
        for chunk in range(trainer.vpp):
            for number in range(each):
                # Chunk 0 of every stage comes before chunk 1 of any.
                layer = (chunk * trainer.pp + self.pp) * each + number
                native = f"decoder.layers.{number}."
                self._store_layer(self.chunks[chunk], f"model.layers.{layer}.", native)

    def _store_ends(self) -> None:
        words = self.weights[
            "model.embeddings.weight" if self.hybrid else "model.embed_tokens.weight"
        ]
        norm = self.weights["model.norm_f.weight" if self.hybrid else "model.norm.weight"]
        head = self.weights.get("lm_head.weight")
        first, last = self.pp == 0, self.pp == self.trainer.pp - 1
        if first:
            self.chunks[0]["embedding.word_embeddings.weight"] = self._cut_words(words)
        if not last:
            return
        native = "decoder.final_norm.weight" if self.hybrid else "decoder.final_layernorm.weight"
        self.chunks[-1][native] = norm
        if head is not None:
            self.chunks[-1]["output_layer.weight"] = self._cut_words(head)
        elif self.trainer.pp > 1:
            # Tied: the last stage has a copy.
            self.chunks[-1]["output_layer.weight"] = self._cut_words(words)

    def _cut_words(self, table: Array) -> Array:
        step = self.trainer.multiple * self.trainer.tp
        padded = np.full((-(-len(table) // step) * step, table.shape[1]), self.empty, table.dtype)
        padded[: len(table)] = table
        return self._cut(padded)

    def _cut(self, array: Array, dim: int = 0) -> Array:
        return cut(array, self.tp, self.trainer.tp, dim)

    def _store_layer(self, out: Weights, logical: str, native: str) -> None:
        if not self.hybrid:
            self._store_attention(out, logical + "self_attn.", native, logical + "input_layernorm.")
            self._store_mlp(out, logical + "mlp.", native, logical + "post_attention_layernorm.")
            return
        mixer, norm = logical + "mixer.", logical + "norm."
        if mixer + "in_proj.weight" in self.weights:
            self._store_mamba(out, mixer, native, norm)
        elif mixer + "q_proj.weight" in self.weights:
            self._store_attention(out, mixer, native, norm)
        else:
            self._store_mlp(out, mixer, native, norm)

    # Attention

    def _store_attention(self, out: Weights, logical: str, native: str, norm: str) -> None:
        weights = self.weights
        own = native + "self_attention."
        if logical + "q_a_proj.weight" in weights:
            out[native + "input_layernorm.weight"] = weights[norm + "weight"]
            self._store_latent(out, logical, own)
        else:
            fused = own + "linear_qkv."
            before = (
                fused + "layer_norm_weight"
                if self.trainer.te
                else native + "input_layernorm.weight"
            )
            out[before] = weights[norm + "weight"]
            out[fused + "weight"] = self._cut(self._fuse_groups(logical))
        for name in ("q", "k"):
            if f"{logical}{name}_norm.weight" in weights:
                out[f"{own}{name}_layernorm.weight"] = weights[f"{logical}{name}_norm.weight"]
        out[own + "linear_proj.weight"] = self._cut(weights[logical + "o_proj.weight"], dim=1)

    def _fuse_groups(self, logical: str) -> Array:
        groups = self.config["num_key_value_heads"]
        rows = []
        for group in range(groups):
            for name in self.order["qkv"]:
                rows.append(cut(self.weights[f"{logical}{name}_proj.weight"], group, groups))
        return np.concatenate(rows)

    def _store_latent(self, out: Weights, logical: str, own: str) -> None:
        weights = self.weights
        downs = {"q": "q_a_proj", "kv": "kv_a_proj_with_mqa"}
        for name, down in downs.items():
            whole = weights[f"{logical}{down}.weight"]
            normed = weights[f"{logical}{name}_a_layernorm.weight"]
            up = f"{own}linear_{name}_up_proj."
            local = f"{own}{name}_layernorm.weight"
            out[f"{own}linear_{name}_down_proj.weight"] = (
                whole if self.trainer.te else self._cut(whole)
            )
            out[up + "layer_norm_weight" if self.trainer.te else local] = normed
            out[up + "weight"] = self._cut(weights[f"{logical}{name}_b_proj.weight"])

    # Mamba

    def _store_mamba(self, out: Weights, logical: str, native: str, norm: str) -> None:
        weights = self.weights
        own = native + "mixer."
        out[own + "in_proj.layer_norm_weight"] = weights[norm + "weight"]
        out[own + "in_proj.weight"] = self._cut_sections(
            weights[logical + "in_proj.weight"], "mamba"
        )
        for name in ("weight", "bias"):
            conv = weights[f"{logical}conv1d.{name}"]
            out[f"{own}{self.trainer.conv}{name}"] = self._cut_sections(conv, "conv")
        for name in ("A_log", "D", "dt_bias", "norm.weight"):
            out[own + name] = self._cut(weights[logical + name])
        out[own + "out_proj.weight"] = self._cut(weights[logical + "out_proj.weight"], dim=1)

    def _cut_sections(self, rows: Array, kind: str) -> Array:
        """The rank's part of each section, one after the other."""
        config = self.config
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        state = config["n_groups"] * config["ssm_state_size"]
        sizes = {"z": inner, "x": inner, "B": state, "C": state, "dt": config["mamba_num_heads"]}
        sections = {}
        start = 0
        for name in ORDER[kind]:
            sections[name] = rows[start : start + sizes[name]]
            start += sizes[name]
        return np.concatenate([self._cut(sections[name]) for name in self.order[kind]])

    # MLP

    def _store_mlp(self, out: Weights, logical: str, native: str, norm: str) -> None:
        weights = self.weights
        own = native + "mlp."
        routed = logical + "gate.weight" in weights
        fused = self.trainer.te and not routed
        before = (
            own + "linear_fc1.layer_norm_weight" if fused else native + "pre_mlp_layernorm.weight"
        )
        out[before] = weights[norm + "weight"]
        if not routed:
            tp = self.tp, self.trainer.tp
            self._store_matrices(out, logical, own + "linear_fc{}.weight", *tp)
            return
        out[own + "router.weight"] = weights[logical + "gate.weight"]
        bias = logical + "gate.e_score_correction_bias"
        if bias in weights:
            out[own + "router.expert_bias"] = weights[bias]
        shared = logical + "shared_experts."
        if shared + "down_proj.weight" in weights:
            tp = self.tp, self.trainer.tp
            self._store_matrices(out, shared, own + "shared_experts.linear_fc{}.weight", *tp)
        self._store_experts(out, logical + "experts", own + "experts.")

    def _store_experts(self, out: Weights, logical: str, own: str) -> None:
        each = count_experts(self.weights, logical) // self.trainer.ep
        for local in range(each):
            expert = self.ep * each + local
            native = f"{own}linear_fc{{}}.weight{local}"
            if not self.trainer.te:
                native = f"{own}local_experts.{local}.linear_fc{{}}.weight"
            etp = self.etp, self.trainer.etp
            self._store_matrices(out, f"{logical}.{expert}.", native, *etp)

    def _store_matrices(
        self, out: Weights, logical: str, native: str, index: int, parts: int
    ) -> None:
        """Both matrices of an MLP; `native` has a place for 1 or 2."""
        rows = []
        for name in self.order["gated"]:
            if f"{logical}{name}_proj.weight" in self.weights:
                rows.append(cut(self.weights[f"{logical}{name}_proj.weight"], index, parts))
        out[native.format(1)] = np.concatenate(rows)
        out[native.format(2)] = cut(self.weights[f"{logical}down_proj.weight"], index, parts, dim=1)
