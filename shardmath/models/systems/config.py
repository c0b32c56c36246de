"""Configurations: the fields of a Hugging Face configuration, by any of their names.

A configuration is a mapping of its fields, such as a read `config.json`, or an object with them as attributes.

>>> config = Config({"model_type": "gpt2", "n_embd": 32, "n_head": 8})
>>> config.hidden, config.kv_heads, config.head_dim
(32, 8, 4)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["DRAFTS_ALONE", "DRAFTS_APART", "Config", "plain"]

SYNONYMS = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "num_heads", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "num_experts": ("n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_nextn_predict_layers": ("mtp_num_hidden_layers", "num_mtp_layers"),
    "n_groups": ("mamba_n_groups",),
    "ssm_state_size": ("state_size", "mamba_d_state"),
    "mamba_num_heads": ("mamba_n_heads", "num_heads"),
    "mamba_expand": ("expand",),
    "mamba_head_dim": ("mamba_d_head", "head_dim"),
}
"""Other names of a field, in the order in which they are looked up."""


DRAFTS_ALONE = ("qwen3next", "qwen35", "qwen35moe", "exaonemoe")
DRAFTS_APART = (*DRAFTS_ALONE, "ernie45moe")
"""Kinds of model whose checkpoints number layers that predict further tokens from 0, in one module or several."""


def plain(kind: str) -> str:
    """Return the model type `kind` in normal form: lower-case letters and digits, without the suffix "text".

    >>> plain("qwen3_5_moe_text"), plain("MiniMaxM2")
    ('qwen35moe', 'minimaxm2')
    """
    letters = "".join(filter(str.isalnum, kind)).lower()
    return letters.removesuffix("text")


class Config:
    """The fields of a Hugging Face model configuration, each under any of its names, such as hidden_size or n_embd."""

    def __init__(self, given: object) -> None:
        self.given = given
        # Multimodal models keep their language model's fields separately.
        inner = self._look_up("text_config")
        self.language = None if inner is None else Config(inner)

    def _look_up(self, name: str) -> Any:
        """The value of the field or, in an object, the attribute of this name; None if there is none."""
        if isinstance(self.given, Mapping):
            return self.given.get(name)
        return getattr(self.given, name, None)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of the field `name`, under any of its names; `default` if it is missing or None.

        A multimodal model's field is looked up in its language model's, and outside of these only without `default`.
        """
        if self.language is not None:
            # The default before a field outside: musicflamingo's `head_dim` there is of audio, and not of its Qwen2.
            value = self.language.get(name, default)
            if value is not None:
                return value
        for known in (name, *SYNONYMS.get(name, ())):
            value = self._look_up(known)
            if value is not None:
                return value
        return default

    @property
    def kind(self) -> str:
        """The model type in lower-case letters and digits, such as qwen3moe, without the suffix "text"."""
        return plain(str(self.get("model_type", "")))

    @property
    def layers(self) -> int:
        """The number of layers, from the field `num_hidden_layers`. Without this field, it is the length of a hybrid
        model's layer pattern, and without a pattern the length of the list of layer types."""
        types = self.get("layers_block_type", ())
        pattern = self.get("hybrid_override_pattern", types)
        layers = self.get("num_hidden_layers", len(pattern))
        return int(layers)

    @property
    def hidden(self) -> int:
        """The size of the hidden states."""
        return int(self.get("hidden_size", 0))

    @property
    def ffn(self) -> int:
        """The inner size of the feed-forward network."""
        return int(self.get("intermediate_size", 0))

    @property
    def expert_ffn(self) -> int:
        """The inner size of a routed expert."""
        return int(self.get("moe_intermediate_size", self.ffn))

    @property
    def heads(self) -> int:
        """The number of attention (query) heads."""
        return int(self.get("num_attention_heads", 1))

    @property
    def kv_heads(self) -> int:
        """The number of key heads, which is also the number of value heads."""
        # With multi_query, which the first Falcon models have by default, there is one, whatever the field says.
        if self.get("multi_query", self.kind == "falcon") and not self.get(
            "new_decoder_architecture"
        ):
            return 1
        return int(self.get("num_key_value_heads", self.heads))

    @property
    def head_dim(self) -> int:
        """The size of one attention head."""
        return int(self.get("head_dim", self.hidden // self.heads))

    @property
    def experts(self) -> int:
        """The number of routed experts per layer; 0 for a dense model."""
        return int(self.get("num_experts", 0))

    @property
    def groups(self) -> int:
        """The number of groups of heads in a Mamba layer; each group has its own B and C."""
        return int(self.get("n_groups", 1))

    @property
    def state(self) -> int:
        """The number of rows of B in the input projection of a Mamba layer; C has as many."""
        return self.groups * int(self.get("ssm_state_size", 0))

    @property
    def inner(self) -> int:
        """The inner size of a Mamba layer: the number of rows of x in its input projection."""
        heads = self.get("mamba_num_heads")
        head = self.get("mamba_head_dim")
        if isinstance(heads, int) and isinstance(head, int):
            return heads * head
        return int(self.get("mamba_expand", 2)) * self.hidden

    @property
    def linear_key_heads(self) -> int:
        """The number of key heads in linear attention."""
        return int(self.get("linear_num_key_heads", 0))

    @property
    def linear_keys(self) -> int:
        """The number of rows that a linear attention layer's projection has for queries; keys have as many."""
        return self.linear_key_heads * int(self.get("linear_key_head_dim", 0))

    @property
    def linear_values(self) -> int:
        """The number of rows that a linear attention layer's projection has for values."""
        heads = int(self.get("linear_num_value_heads", 0))
        return heads * int(self.get("linear_value_head_dim", 0))

    @property
    def tile(self) -> tuple[int, int] | None:
        """The rows and columns of a tile, if linear layers have a scale per tile of their weights, as in DeepSeek's
        FP8."""
        quantization = self.get("quantization_config")
        size = None if quantization is None else Config(quantization).get("weight_block_size")
        return (int(size[0]), int(size[1])) if size else None

    @property
    def drafts(self) -> int:
        """The number of layers that predict further tokens (MTP). vLLM reads one if a kind of model with such layers
        does not say how many."""
        default = int(self.kind in (*DRAFTS_APART, "nemotronh"))
        return int(self.get("num_nextn_predict_layers", default))
