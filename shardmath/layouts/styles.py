"""Styles: how tensor parallelism divides a layer, and the style of each layer of a model.

1. A linear layer's weight is (out, in). A **column** layer divides its outputs, dimension 0; a **row** layer
   divides its inputs, dimension 1; a **vocab** table divides its words, dimension 0.
2. A bias follows the outputs: it is divided with a column or vocab layer, and whole on every rank of a row
   layer, whose ranks each hold one addend of the output.
3. Everything else (norms, positions, routers, block scales, buffers) is **replicate**, and so are tensors that
   the table does not know: never wrong, only not divided.
4. Not in the table, because dividing them takes more than a name: fused projections (`c_attn`, `qkv_proj`,
   `gate_up_proj`, `query_key_value`), the transposed weights (in, out) of GPT-2's Conv1D (`c_attn`, `c_fc`,
   `c_proj`) and stacked experts. Name them in your rules: `*.c_fc.weight h (tp n)`.

>>> kind("model.layers.0.self_attn.q_proj.weight"), kind("encoder.layer.3.output.dense.bias")
('column', 'replicate')
>>> dimension("mlp.experts.up_proj.weight", 3), dimension("mlp.experts.down_proj.weight", 3)
(1, 2)
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardmath.base.errors import LayoutError
from shardmath.base.memo import memo

__all__ = [
    "KINDS",
    "MODULES",
    "STYLES",
    "Style",
    "dimension",
    "fits",
    "is_expert",
    "kind",
    "tp_text",
]


class Style(NamedTuple):
    """A style of tensor parallelism for a layer. `divided` is the dimension in which the layer's weight is divided, or
    None; `bias` is the name of the style for the layer's bias, such as "replicate".

    `divided` is the dimension of its weight, counted from the end if negative, or None if it is not divided;
    `bias` is the style of its bias.
    """

    divided: int | None
    bias: str


STYLES: dict[str, Style] = {
    "column": Style(0, bias="column"),
    "row": Style(-1, bias="replicate"),
    "vocab": Style(0, bias="vocab"),
    "replicate": Style(None, bias="replicate"),
}

KINDS = tuple(STYLES)
"""The kinds of tensors in tensor parallelism."""

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
    ("w1", "column"),  #                                the experts of Mixtral, MiniMax, Phi-MoE
    ("w3", "column"),
    ("w2", "row"),
    ("lm_head", "vocab"),
    ("lm_head.decoder", "vocab"),  #                    RoBERTa
    ("predictions.decoder", "vocab"),  #                BERT
)
"""The end of a module's dotted name, a glob of which the first match counts, and the kind of its weight."""

TAIL = re.compile(r".*\.\d+\.")
"""A name up to its last number, which is cut off: no module in the table has a number."""


def kind(name: str) -> str:
    """Return how tensor parallelism divides the tensor `name`: "column", "row", "vocab" or "replicate" (KINDS)."""
    return _kind_of_tail(TAIL.sub("", name))


@memo()
def _kind_of_tail(tail: str) -> str:
    """The kind of a tensor by its name without numbers, so that all layers share one entry of the cache."""
    module, _, leaf = tail.rpartition(".")
    if leaf not in ("weight", "bias"):
        return "replicate"
    for end, style in MODULES:
        if fnmatchcase(f".{module}", f"*.{end}"):
            return style if leaf == "weight" else STYLES[style].bias
    return "replicate"


def fits(pattern: str, name: str) -> bool:
    """Return whether the tensor `name` matches `pattern`. The patterns "column", "row", "vocab" and "replicate" match
    tensors that tensor parallelism usually treats this way, judged by their names; any other pattern is a glob.

    None of these four is ever read as a glob.
    """
    if pattern in KINDS:
        return kind(name) == pattern
    return fnmatchcase(name, pattern)


def is_expert(name: str) -> bool:
    """Return whether the tensor `name` belongs to routed experts, either to one numbered expert or to several in one
    tensor. Shared experts do not count."""
    return ".experts." in f".{name}"


def dimension(name: str, ndim: int) -> int | None:
    """Return the dimension in which tensor parallelism divides the tensor `name`; None if the tensor stays whole."""
    divided = STYLES[kind(name)].divided
    if divided is None or not ndim:
        return None
    if divided < 0:
        return ndim + divided
    # Grouped experts are (E, out, in), the expert before the layer's own dimensions.
    return divided + 1 if is_expert(name) and ndim == 3 else divided


def tp_text(
    name: str, shape: tuple[int, ...], *, tp: int, vocab_multiple: int = 1, axis: str = "tp"
) -> str:
    """Return the layout text of the tensor `name` under tensor parallelism of size `tp` along the mesh axis `axis`; a
    vocabulary is padded to a multiple of `vocab_multiple`.

    The padding is at the end. Raises LayoutError if `tp` does not divide the dimension, as every engine does.

    >>> tp_text("mlp.experts.up_proj.weight", (8, 6, 4), tp=2)
    'd0 (tp d1) d2'
    >>> tp_text("wte.weight", (5, 4), tp=2, vocab_multiple=4)
    '(tp d0)=8 d1'
    """
    divided_dim = dimension(name, len(shape))
    if divided_dim is None:
        return "..."
    size = stored = shape[divided_dim]
    advice = f"choose a size of {axis} that divides it"
    if kind(name) == "vocab":
        stored = _pad(size, vocab_multiple)
        advice += f", or vocab_multiple={tp}"
    if stored % tp:
        raise LayoutError(
            f"{axis} of size {tp} does not divide dimension {divided_dim} of {name!r}, shape {shape}, "
            f"which is stored as {stored}; {advice}"
        )
    words = [f"d{d}" for d in range(len(shape))]
    words[divided_dim] = f"({axis} d{divided_dim})"
    if stored > size:
        words[divided_dim] += f"={stored}"
    return " ".join(words)


def _pad(n: int, multiple: int) -> int:
    """n rounded up to a multiple. Raises LayoutError for a multiple below 1."""
    if multiple < 1:
        raise LayoutError(
            f"vocab_multiple is {multiple}, but must be at least 1; give 1 to pad nothing"
        )
    return -(-n // multiple) * multiple
