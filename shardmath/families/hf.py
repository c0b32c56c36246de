"""Hugging Face names: which tensors tensor parallelism divides, and along which dimension.

1. A linear layer's weight is (out, in). A **column** layer divides what it puts out, dimension 0; a **row** layer
   divides what it takes in, dimension 1; a **vocab** table divides its words, dimension 0.
2. A bias follows the outputs: it is divided with a column or vocab layer, and whole on every rank of a row layer,
   whose ranks each hold one addend of the output.
3. Everything else (norms, positions, routers, block scales, buffers) is **replicate**, and so is what the table does
   not know: never wrong, only not divided.
4. Not in the table, because dividing them needs more than a name: fused projections (`c_attn`, `qkv_proj`,
   `gate_up_proj`, `query_key_value`), the transposed weights (in, out) of GPT-2's Conv1D (`c_attn`, `c_fc`,
   `c_proj`) and stacked experts. Name them in rules of your own: `*.c_fc.weight h (tp n)`.

>>> kind("model.layers.0.self_attn.q_proj.weight"), kind("encoder.layer.3.output.dense.bias")
('column', 'replicate')
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache

__all__ = ["BIAS", "KINDS", "MODULES", "kind"]

KINDS = ("column", "row", "vocab", "replicate")
"""What a tensor can be to tensor parallelism."""

BIAS: dict[str, str] = {"column": "column", "row": "replicate", "vocab": "vocab"}
"""The kind of a layer's bias, by the kind of its weight."""

MODULES: tuple[tuple[str, str], ...] = (
    # module's name ends in            its weight is    found in
    ("q_proj", "column"),  #                            Llama, Qwen, Mistral, Gemma, OPT, Whisper
    ("k_proj", "column"),
    ("v_proj", "column"),
    ("gate_proj", "column"),
    ("up_proj", "column"),
    ("o_proj", "row"),
    ("down_proj", "row"),
    ("out_proj", "row"),  #                             OPT, Whisper, CLIP
    ("q_b_proj", "column"),  #                          DeepSeek's latent attention
    ("kv_b_proj", "column"),
    ("attention.self.query", "column"),  #              BERT, RoBERTa, MiniLM
    ("attention.self.key", "column"),
    ("attention.self.value", "column"),
    ("attention.output.dense", "row"),
    ("intermediate.dense", "column"),
    ("output.dense", "row"),
    ("attention.attention.query", "column"),  #         ViT
    ("attention.attention.key", "column"),
    ("attention.attention.value", "column"),
    ("attention.q_lin", "column"),  #                   DistilBERT
    ("attention.k_lin", "column"),
    ("attention.v_lin", "column"),
    ("attention.out_lin", "row"),
    ("ffn.lin1", "column"),
    ("ffn.lin2", "row"),
    ("fc1", "column"),  #                               OPT, Whisper, CLIP
    ("fc2", "row"),
    ("embed_tokens", "vocab"),
    ("word_embeddings", "vocab"),
    ("wte", "vocab"),  #                                GPT-2
    ("lm_head", "vocab"),
    ("lm_head.decoder", "vocab"),  #                    RoBERTa
    ("predictions.decoder", "vocab"),  #                BERT
)
"""The end of a module's dotted name (a glob; the first that matches counts) and the kind of its weight."""


@cache
def kind(name: str) -> str:
    """The kind of the tensor `name`: one of KINDS."""
    module, _, leaf = name.rpartition(".")
    found = next((kind for end, kind in MODULES if fnmatchcase(f".{module}", f"*.{end}")), "replicate")
    return {"weight": found, "bias": BIAS.get(found, "replicate")}.get(leaf, "replicate")
