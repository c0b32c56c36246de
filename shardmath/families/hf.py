"""Hugging Face names: what a tensor's name says of it: its layer, its expert, and how tensor parallelism divides it.

1. A linear layer's weight is (out, in). A **column** layer divides what it puts out, dimension 0; a **row** layer
   divides what it takes in, dimension 1; a **vocab** table divides its words, dimension 0.
2. A bias follows the outputs: it is divided with a column or vocab layer, and whole on every rank of a row layer,
   whose ranks each hold one addend of the output.
3. Everything else (norms, positions, routers, block scales, buffers) is **replicate**, and so is what the table does
   not know: never wrong, only not divided.
4. Not in the table, because dividing them needs more than a name: fused projections (`c_attn`, `qkv_proj`,
   `gate_up_proj`, `query_key_value`), the transposed weights (in, out) of GPT-2's Conv1D (`c_attn`, `c_fc`,
   `c_proj`) and stacked experts. Name them in rules of your own: `*.c_fc.weight h (tp n)`.
5. Experts are **numbered**, `mlp.experts.17.up_proj.weight` (I, H), or **grouped**, `mlp.experts.up_proj.weight`
   (E, I, H): then dimension 0 is the expert, and a kind's dimension is the next one.

>>> kind("model.layers.0.self_attn.q_proj.weight"), kind("encoder.layer.3.output.dense.bias")
('column', 'replicate')
>>> numbers("model.layers.3.mlp.experts.17.up_proj.weight"), dimension("mlp.experts.up_proj.weight", 3)
((3, 17), 1)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from shardmath.algebra.mesh import Mesh
from shardmath.base.errors import LayoutError, ShardError
from shardmath.base.memo import memo
from shardmath.layouts.layout import Layout

__all__ = [
    "BIAS",
    "Entry",
    "KINDS",
    "MODULES",
    "Place",
    "Shapes",
    "cell",
    "dimension",
    "expert_counts",
    "grouped",
    "is_expert",
    "kind",
    "layouts",
    "numbers",
    "tp_text",
]

Entry: TypeAlias = tuple[tuple[int, ...], str]
Shapes: TypeAlias = Mapping[str, Entry]
"""Global shape and dtype of each tensor, by name."""

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
    ("w1", "column"),  #                                the experts of Mixtral, MiniMax, Phi-MoE
    ("w3", "column"),
    ("w2", "row"),
    ("lm_head", "vocab"),
    ("lm_head.decoder", "vocab"),  #                    RoBERTa
    ("predictions.decoder", "vocab"),  #                BERT
)
"""The end of a module's dotted name (a glob; the first that matches counts) and the kind of its weight."""


TAIL = re.compile(r".*\.\d+\.")
"""All of a name up to its last number: no module in the table has one."""
LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks?)\.(\d+)\.")
EXPERT = re.compile(r"(^|\.)experts\.(\d+)\.")


def kind(name: str) -> str:
    """The kind of the tensor `name`: one of KINDS."""
    return _kind(TAIL.sub("", name))


@memo()
def _kind(tail: str) -> str:
    module, _, leaf = tail.rpartition(".")
    found = next(
        (kind for end, kind in MODULES if fnmatchcase(f".{module}", f"*.{end}")), "replicate"
    )
    return {"weight": found, "bias": BIAS.get(found, "replicate")}.get(leaf, "replicate")


@memo(1 << 17)
def numbers(name: str) -> tuple[int | None, int | None]:
    """The layer and the expert that the name numbers; None where it has no such number."""
    layer, expert = LAYER.search(name), EXPERT.search(name) if "experts." in name else None
    return (int(layer[1]) if layer else None, int(expert[2]) if expert else None)


def is_expert(name: str) -> bool:
    """Whether the tensor is a routed expert's, numbered or grouped; shared experts are not."""
    return ".experts." in f".{name}"


def dimension(name: str, ndim: int) -> int | None:
    """The dimension along which tensor parallelism divides the tensor; None for none, and for a scalar."""
    found = kind(name)
    if found == "replicate" or not ndim:
        return None
    if found == "row":
        return ndim - 1
    return 1 if is_expert(name) and ndim == 3 else 0


def tp_text(
    name: str, shape: tuple[int, ...], *, tp: int, vocab_multiple: int = 1, axis: str = "tp"
) -> str:
    """The layout of the tensor on a mesh whose `axis`, of size `tp`, is for tensor parallelism.

    A vocabulary is padded at its end to a multiple of `vocab_multiple`. Raises LayoutError for a dimension that `tp`
    does not divide, as every engine does.

    >>> tp_text("mlp.experts.up_proj.weight", (8, 6, 4), tp=2), tp_text("wte.weight", (5, 4), tp=2, vocab_multiple=4)
    ('d0 (tp d1) d2', '(tp d0)=8 d1')
    """
    at = dimension(name, len(shape))
    if at is None:
        return "..."
    n = shape[at]
    vocab = kind(name) == "vocab"
    stored = _padded(n, vocab_multiple) if vocab else n
    if stored % tp:
        what = (
            f"dimension {at} of {name!r}, shape {shape}, is stored as {stored} and {axis} is {tp}"
        )
        raise LayoutError(
            f"{what}; choose {axis} to divide it{f', or vocab_multiple={tp}' if vocab else ''}"
        )
    group = f"({axis} d{at})={stored}" if stored > n else f"({axis} d{at})"
    return " ".join(group if d == at else f"d{d}" for d in range(len(shape)))


def _padded(n: int, multiple: int) -> int:
    if multiple < 1:
        raise LayoutError(
            f"vocab_multiple is {multiple}; give a multiple of at least 1, which pads nothing"
        )
    return -(-n // multiple) * multiple


def cell(expert: int, experts: int) -> str:
    """What is stored of dimension 0 by a tensor (1, ...) that is one cell of a stack of so many experts.

    >>> cell(0, 1), cell(2, 8)
    ('<0:1>', '<-2 0:1 -5>')
    """
    before, after = (
        f"-{expert} " if expert else "",
        f" -{experts - 1 - expert}" if expert < experts - 1 else "",
    )
    return f"<{before}0:1{after}>"


def expert_counts(shapes: Shapes) -> Counter[int | None]:
    """How many numbered experts each layer has."""
    counts: Counter[int | None] = Counter()
    for name in shapes:
        layer, expert = numbers(name)
        if expert is not None:
            counts[layer] = max(counts[layer], expert + 1)
    return counts


def grouped(shapes: Shapes) -> dict[str, Entry]:
    """The same with numbered experts grouped: one (E, ...) tensor a layer and projection, in the place of the first.

    Raises LayoutError where the experts of a group differ, or are not numbered 0 to E - 1.
    """
    members: dict[str, list[tuple[int | None, Entry]]] = {}
    for name, entry in shapes.items():
        members.setdefault(EXPERT.sub(r"\1experts.", name), []).append((numbers(name)[1], entry))
    return {group: _group(group, found) for group, found in members.items()}


def _group(group: str, found: list[tuple[int | None, Entry]]) -> Entry:
    (expert, (shape, dtype)), *_ = found
    if expert is None:
        return shape, dtype
    kinds = sorted({entry for _, entry in found})
    if len(kinds) > 1 or {e for e, _ in found} != set(range(len(found))):
        shown = " and ".join(f"{dtype}{list(shape)}" for shape, dtype in kinds)
        what = f"{len(found)} experts numbered {min(found)[0]} to {max(found)[0]} of {group!r}, each {shown}"
        raise LayoutError(
            f"{what}; the experts of a group are alike, and numbered from 0 without gaps"
        )
    return (len(found), *shape), dtype


class Place(NamedTuple):
    """Where and how a tensor lies: what a Layout needs beside the dtype."""

    mesh: Mesh
    text: str
    shape: tuple[int, ...]


def layouts(shapes: Shapes, place: Callable[[str, tuple[int, ...]], Place]) -> dict[str, Layout]:
    """The layout of every tensor, by name, as `place(name, shape)` says; each distinct one is made once.

    Raises LayoutError, naming the tensor, for a place that does not fit.
    """
    made: dict[tuple[Place, str], Layout] = {}
    out: dict[str, Layout] = {}
    for name, (shape, dtype) in shapes.items():
        key = place(name, shape), dtype
        if key not in made:
            made[key] = _layout(name, *key)
        out[name] = made[key]
    return out


def _layout(name: str, place: Place, dtype: str) -> Layout:
    try:
        return Layout(place.shape, place.mesh, place.text, dtype=dtype)
    except ShardError as error:
        raise LayoutError(f"tensor {name!r} of shape {place.shape}: {error}") from error
