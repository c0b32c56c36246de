"""Layers that predict further tokens, which transformers leaves out: their tensors in a checkpoint, and their logits.

1. Depth k is as in DeepSeek-V3's report: position i has its hidden state of depth k - 1 (depth 0: of the model before
   its head) and the embedding of the token k positions later. Both are normalized, joined and projected; a layer like
   one of the model's follows, then a norm, and the model's head.
2. The embedding has the first columns of the projection: the report writes it second, but checkpoints have it first.
3. The layer and the norms are transformers' own classes; all else is written here in plain torch.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tests.references.checkpoint import unstack

__all__ = ["add_further", "list_published", "predict"]

BEHIND = {
    "inner.layers.0.": "model.layers.{behind}.",
    "inner.norm.": "model.layers.{behind}.shared_head.norm.",
    "enorm.": "model.layers.{behind}.enorm.",
    "hnorm.": "model.layers.{behind}.hnorm.",
    "eh_proj.": "model.layers.{behind}.eh_proj.",
}
"""Beginnings of names, and what checkpoints have for them: DeepSeek-V3 numbers these layers after all others."""

PUBLISHED = {
    "qwen3_next": {
        "inner.layers.0.": "mtp.layers.0.",
        "inner.norm.": "mtp.norm.",
        "enorm.": "mtp.pre_fc_norm_embedding.",
        "hnorm.": "mtp.pre_fc_norm_hidden.",
        "eh_proj.": "mtp.fc.",
    },
    # Several layers predict a token: the first has the projection, the last the norm.
    "nemotron_h": {
        "inner.layers.": "mtp.layers.",
        "inner.norm_f.": "mtp.layers.{last}.final_layernorm.",
        "enorm.": "mtp.layers.0.enorm.",
        "hnorm.": "mtp.layers.0.hnorm.",
        "eh_proj.": "mtp.layers.0.eh_proj.",
    },
}
"""The same for other kinds of model."""


class Further(nn.Module):
    """What one depth adds to a model: some of its layers once more, with tensors of their own."""

    def __init__(self, model: Any, layers: list[int]) -> None:
        super().__init__()
        inner = copy.deepcopy(model.base_model)
        inner.set_input_embeddings(None)
        inner.layers = nn.ModuleList(inner.layers[layer] for layer in layers)
        if model.config.model_type == "qwen3_next":
            inner.config.layer_types = [inner.config.layer_types[layer] for layer in layers]
        if model.config.model_type != "nemotron_h":
            inner.config.num_hidden_layers = len(layers)
        self.inner = inner
        norm = inner.norm_f if hasattr(inner, "norm_f") else inner.norm
        self.enorm = copy.deepcopy(norm)
        self.hnorm = copy.deepcopy(norm)
        hidden = model.config.hidden_size
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """The hidden states of this depth, before the head."""
        joined = torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1)
        behind: Tensor = self.inner(
            inputs_embeds=self.eh_proj(joined), use_cache=False
        ).last_hidden_state
        return behind


def add_further(model: Any, depths: int, layers: list[int]) -> None:
    """Give the model what so many depths need, each with layers like these of the model's."""
    model.further = nn.ModuleList(Further(model, layers) for _ in range(depths))


def predict(model: Any, tokens: Tensor, depths: int) -> list[Tensor]:
    """The logits of each depth from 1; those of depth k are of k positions less. A single one may serve all depths."""
    state = model.base_model(tokens).last_hidden_state
    embedding = model.get_input_embeddings()
    logits = []
    for depth in range(depths):
        further = model.further[min(depth, len(model.further) - 1)]
        state = further(state[:, :-1], embedding(tokens[:, depth + 1 :]))
        logits.append(model.lm_head(state))
    return logits


def list_published(stored: dict[str, Tensor], hf: Any) -> dict[str, Tensor]:
    """The tensors of further layers, of those that a model stores, under the names of checkpoints."""
    published = {}
    starts = PUBLISHED.get(hf.model_type, BEHIND)
    last = sum(name.startswith("further.0.inner.layers.") and ".norm." in name for name in stored)
    for name, tensor in stored.items():
        prefix, _, rest = name.partition(".")
        depth, _, own = rest.partition(".")
        if prefix != "further":
            continue
        start = next(start for start in starts if own.startswith(start))
        numbers = {"behind": hf.num_hidden_layers + int(depth), "last": last - 1}
        published[starts[start].format(**numbers) + own.removeprefix(start)] = tensor
    # An expert at a time.
    return unstack(published)
