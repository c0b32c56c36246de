"""vLLM, plainly: what each rank of an engine loads of a Hugging Face checkpoint, and the checkpoint back.

1. World ranks count tp fastest, then pp, then dp.
2. `qkv_proj` is the rank's query heads, its key heads, its value heads; with more ranks than key heads, neighbors have
   the same one. `gate_up_proj` is the rank's part of gate, then of up. Words are padded to 64, then cut.
3. Experts are stacked. Without expert parallelism each is cut over all dp * tp ranks; with it they are dealt whole, the
   first ranks having one more, or in turn. Dealing in turn is obeyed where experts have groups and dp is 1.
4. Each section of a Mamba projection is cut on its own, and A is computed of A_log.
5. The checkpoint back is what the same rules do to element numbers, read the other way.

Source: vLLM 0.33.0, `model_executor/layers`, `model_executor/models`, `distributed/utils.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.references.checkpoint import Array, Order, Shapes, Weights, count_experts, cut, number

__all__ = ["ORDER", "Engine", "load", "unload"]

ORDER: Order = {
    "qkv": ("q", "k", "v"),
    "gated": ("gate", "up"),
    "latent": ("q_a_proj", "kv_a_proj_with_mqa"),
    "mamba": ("z", "x", "B", "C", "dt"),
    "conv": ("x", "B", "C"),
}
"""In which order components are fused."""
VOCAB_MULTIPLE = 64
EVERYWHERE = ("qwen3_moe", "nemotron_h")
"""Kinds of which each stage has the first and last modules."""
WHOLE_SHARED = ("deepseek_v3", "nemotron_h")
"""Kinds whose shared experts are whole on each rank where tokens are divided over them."""
ULPS = 32
"""How far log(exp(x)) may be from a number whose exponential is the same."""


@dataclass(frozen=True)
class Engine:
    """An engine's ranks; `ep` deals experts whole, as `placement` says."""

    ranks: range
    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    placement: str = "linear"

    def __str__(self) -> str:
        sizes = {"PP": self.pp, "TP": self.tp, "DP": self.dp}
        words = [f"{name}{n}" for name, n in sizes.items() if n > 1]
        words += ["EP"] * self.ep + ["round"] * (self.placement == "round_robin")
        return "x".join(words) or "1"


def neg_exp(logarithm: Array) -> Array:
    """A of A_log."""
    return np.asarray(-torch.exp(torch.from_numpy(logarithm).float()))


def load(
    weights: Mapping[str, Array],
    config: Mapping[str, Any],
    engine: Engine,
    rank: int,
    *,
    empty: float = 0,
    order: Order = ORDER,
    compute: Callable[[Array], Array] = neg_exp,
) -> Weights:
    """What the rank stores; cells of no element have the value `empty`."""
    loader = _Rank(weights, config, engine, rank, empty, order, compute)
    loader.load()
    return loader.out


def unload(
    stored: Mapping[int, Mapping[str, Array]],
    config: Mapping[str, Any],
    engine: Engine,
    shapes: Shapes,
) -> Weights:
    """The checkpoint that these ranks have loaded."""
    numbers = number(shapes)
    flat = np.full(1 + sum(array.size for array in numbers.values()), np.nan, np.float32)
    for rank, has in stored.items():
        found = load(numbers, config, engine, rank, compute=lambda array: array)
        for name, elements in found.items():
            values = _solve(has[name]) if name.endswith(".A") else has[name]
            flat[elements] = values
    if np.isnan(flat[1:]).any():
        raise ValueError(f"element {int(np.isnan(flat[1:]).argmax())} is on no rank")
    return {name: flat[elements] for name, elements in numbers.items()}


def _solve(computed: Array) -> Array:
    """A_log of A: of the numbers about log(-A) one whose exponential is exactly this."""
    near = np.log(-computed)
    found = np.full_like(near, np.nan)
    for towards in (-np.inf, np.inf):
        tried = near
        for _ in range(ULPS):
            found = np.where(neg_exp(tried) == computed, tried, found)
            tried = np.nextafter(tried, np.float32(towards))
    return found


class _Rank:
    """One rank, and what it has loaded so far."""

    def __init__(
        self,
        weights: Mapping[str, Array],
        config: Mapping[str, Any],
        engine: Engine,
        rank: int,
        empty: float,
        order: Order,
        compute: Callable[[Array], Array],
    ) -> None:
        self.weights = weights
        self.config = config
        self.engine = engine
        self.empty = empty
        self.order = order
        self.compute = compute
        self.kind = config["model_type"]
        at = engine.ranks.index(rank)
        self.tp = at % engine.tp
        self.pp = at // engine.tp % engine.pp
        self.dp = at // (engine.tp * engine.pp)
        self.out: Weights = {}

    def load(self) -> None:
        self._load_ends()
        for layer in self._list_layers():
            prefix = f"model.layers.{layer}."
            if self.kind == "nemotron_h":
                self._load_mixer(prefix)
                continue
            for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                self._copy(prefix + name)
            self._load_attention(prefix + "self_attn.")
            self._load_mlp(prefix + "mlp.")

    def _list_layers(self) -> range:
        """The layers of the rank's stage: those before the last one take what is left over."""
        stages = self.engine.pp
        each, more = divmod(self.config["num_hidden_layers"], stages)
        counts = [each] * stages
        for back in range(2, more + 2):
            counts[-back] += 1
        start = sum(counts[: self.pp])
        return range(start, start + counts[self.pp])

    def _copy(self, name: str) -> None:
        """A tensor that is whole on each rank, if there is one."""
        if name in self.weights:
            self.out[name] = self.weights[name]

    def _cut(self, array: Array, dim: int = 0) -> Array:
        return cut(array, self.tp, self.engine.tp, dim)

    # Ends

    def _load_ends(self) -> None:
        hybrid = self.kind == "nemotron_h"
        words = self.weights["model.embeddings.weight" if hybrid else "model.embed_tokens.weight"]
        head = self.weights.get("lm_head.weight")
        both = self.kind in EVERYWHERE
        first = both or self.pp == 0
        last = both or self.pp == self.engine.pp - 1
        # Tied: one parameter with two names, which the last stage has, too.
        if first or (last and head is None):
            self.out["model.embed_tokens.weight"] = self._cut_words(words)
        if last:
            self._copy("model.norm_f.weight" if hybrid else "model.norm.weight")
        if last and head is not None:
            self.out["lm_head.weight"] = self._cut_words(head)

    def _cut_words(self, table: Array) -> Array:
        rows = -(-len(table) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        padded = np.full((rows, table.shape[1]), self.empty, table.dtype)
        padded[: len(table)] = table
        return self._cut(padded)

    # Attention

    def _load_attention(self, prefix: str) -> None:
        weights = self.weights
        if prefix + "q_a_proj.weight" in weights:
            self._load_latent(prefix)
        else:
            rows = [self._cut_heads(prefix, name) for name in self.order["qkv"]]
            self.out[prefix + "qkv_proj.weight"] = np.concatenate(rows)
        self._copy(prefix + "q_norm.weight")
        self._copy(prefix + "k_norm.weight")
        self.out[prefix + "o_proj.weight"] = self._cut(weights[prefix + "o_proj.weight"], dim=1)

    def _cut_heads(self, prefix: str, name: str) -> Array:
        """The rank's query heads, or its key or value heads, of which it has one at least."""
        rows = self.weights[f"{prefix}{name}_proj.weight"]
        heads, tp = self.config["num_key_value_heads"], self.engine.tp
        if name == "q" or heads >= tp:
            return self._cut(rows)
        return cut(rows, self.tp // (tp // heads), heads)

    def _load_latent(self, prefix: str) -> None:
        downs = [self.weights[f"{prefix}{name}.weight"] for name in self.order["latent"]]
        self.out[prefix + "fused_qkv_a_proj.weight"] = np.concatenate(downs)
        for name in ("q", "kv"):
            self._copy(f"{prefix}{name}_a_layernorm.weight")
            up = f"{prefix}{name}_b_proj.weight"
            self.out[up] = self._cut(self.weights[up])

    # Mamba

    def _load_mixer(self, prefix: str) -> None:
        """A layer of a hybrid model is one module, called mixer whatever it is."""
        self._copy(prefix + "norm.weight")
        mixer = prefix + "mixer."
        if mixer + "in_proj.weight" in self.weights:
            self._load_mamba(mixer)
        elif mixer + "q_proj.weight" in self.weights:
            self._load_attention(mixer)
        else:
            self._load_mlp(mixer)

    def _load_mamba(self, prefix: str) -> None:
        weights, out = self.weights, self.out
        out[prefix + "in_proj.weight"] = self._cut_sections(
            weights[prefix + "in_proj.weight"], "mamba"
        )
        for name in ("conv1d.weight", "conv1d.bias"):
            out[prefix + name] = self._cut_sections(weights[prefix + name], "conv")
        for name in ("D", "dt_bias", "norm.weight"):
            out[prefix + name] = self._cut(weights[prefix + name])
        out[prefix + "A"] = self.compute(self._cut(weights[prefix + "A_log"]))
        out[prefix + "out_proj.weight"] = self._cut(weights[prefix + "out_proj.weight"], dim=1)

    def _cut_sections(self, rows: Array, kind: str) -> Array:
        """The rank's part of each section; B and C of a single group are whole."""
        config = self.config
        inner = config["mamba_num_heads"] * config["mamba_head_dim"]
        state = config["n_groups"] * config["ssm_state_size"]
        sizes = {"z": inner, "x": inner, "B": state, "C": state, "dt": config["mamba_num_heads"]}
        sections = {}
        start = 0
        for name in ORDER[kind]:
            section = rows[start : start + sizes[name]]
            start += sizes[name]
            whole = name in ("B", "C") and config["n_groups"] == 1
            sections[name] = section if whole else self._cut(section)
        return np.concatenate([sections[name] for name in self.order[kind]])

    # MLP

    def _load_mlp(self, prefix: str) -> None:
        if prefix + "gate.weight" not in self.weights:
            self._load_matrices(prefix, self.tp, self.engine.tp)
            return
        self._copy(prefix + "gate.weight")
        self._copy(prefix + "gate.e_score_correction_bias")
        engine = self.engine
        if prefix + "shared_experts.down_proj.weight" in self.weights:
            whole = engine.ep and engine.dp > 1 and self.kind in WHOLE_SHARED
            index, parts = (0, 1) if whole else (self.tp, engine.tp)
            self._load_matrices(prefix + "shared_experts.", index, parts)
        self._load_experts(prefix + "experts")

    def _load_matrices(self, prefix: str, index: int, parts: int) -> None:
        gated = prefix + "gate_proj.weight" in self.weights
        name = "gate_up_proj.weight" if gated else "up_proj.weight"
        self.out[prefix + name] = self._join_rows(prefix, index, parts)
        down = self.weights[prefix + "down_proj.weight"]
        self.out[prefix + "down_proj.weight"] = cut(down, index, parts, dim=1)

    def _join_rows(self, prefix: str, index: int, parts: int) -> Array:
        rows = []
        for name in self.order["gated"]:
            if f"{prefix}{name}_proj.weight" in self.weights:
                rows.append(cut(self.weights[f"{prefix}{name}_proj.weight"], index, parts))
        return np.concatenate(rows)

    def _load_experts(self, prefix: str) -> None:
        engine = self.engine
        index, parts = self.dp * engine.tp + self.tp, engine.dp * engine.tp
        mine = range(count_experts(self.weights, prefix))
        if engine.ep:
            mine = self._deal(len(mine), index, parts)
            index, parts = 0, 1
        rows, columns = [], []
        for expert in mine:
            rows.append(self._join_rows(f"{prefix}.{expert}.", index, parts))
            down = self.weights[f"{prefix}.{expert}.down_proj.weight"]
            columns.append(cut(down, index, parts, dim=1))
        self.out[prefix + ".routed_experts.w13_weight"] = np.stack(rows)
        self.out[prefix + ".routed_experts.w2_weight"] = np.stack(columns)

    def _deal(self, experts: int, index: int, parts: int) -> range:
        """The experts of one of so many ranks."""
        engine = self.engine
        if (
            engine.placement == "round_robin"
            and self.config.get("n_group", 1) > 1
            and engine.dp == 1
        ):
            return range(index, experts, parts)
        each, more = divmod(experts, parts)
        start = index * each + min(index, more)
        return range(start, start + each + (index < more))
