"""SGLang's rows: the stored tensors of each module, by the names of its parameters.

1. SGLang's layers come from vLLM, and have vLLM's rows (`vllm_rows`), cut over other axes.
2. Attention is cut over `atp`, the part of tp without attention's data and context parallelism. Dense layers are cut
   over tp, experts over `ep` and `etp`.
3. Experts are dealt in equal parts. Fused shared experts, behind the routed ones of each rank, have no rows.
4. In some models every pipeline stage has the head; in others the last stage has a copy of a tied embedding as head.

Source: SGLang 0.5.23 (PyPI wheel), `srt/layers/linear.py`, `layers/vocab_parallel_embedding.py`,
`layers/moe/fused_moe_triton/layer.py`, `srt/models`.

>>> print(table("llama", SGLangForm())[0])
model.embed_tokens.weight @pp=0 = model.embed_tokens.weight : (tp n=in_vocab) h
"""

from __future__ import annotations

import re
from typing import NamedTuple

from shardmath.base.memo import memo
from shardmath.models.storage.rows import Row
from shardmath.models.systems.config import plain
from shardmath.models.systems.vllm_names import rename
from shardmath.models.systems.vllm_rows import (
    ATTENTION,
    EXPERTS,
    MLP,
    NORMS,
    OWN_BY_KIND,
    UNKNOWN,
    rename_rows,
    write_experts,
    write_modules,
    write_unknown,
)

__all__ = ["SGLangForm", "table"]

ENDS = """
model.embed_tokens.weight @pp=0   = model.embed_tokens.weight : (IN n=in_vocab) h
model.position_embeddings.* @pp=0 = model.position_embeddings.*
lm_head.* HEAD                    = lm_head.*                 : (OUT n=out_vocab) h
model.norm.* @pp=-1               = model.norm.*
"""
TIED = """
also lm_head.weight @pp=-1 = model.embed_tokens.weight ! /lm_head.weight : (OUT n=out_vocab) h
"""

HEADS_EVERYWHERE = "llama phi3 qwen3_moe mixtral gpt_oss"
"""Kinds of model with the head on every stage."""
HEADLESS = "llama phi3"
"""Kinds of model without a copy of a tied embedding on the last stage."""

RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "gpt_oss": ((".mlp.gate.", ".mlp.router."),),
}
"""(old, new) parts of names, for kinds of model whose names in SGLang are not vLLM's."""

CUT = re.compile(r"\btp\b(?!/alike)")
"""The axis tp, except in shared experts."""
RENAMES_BY_KIND = {plain(kind): renames for kind, renames in RENAMES.items()}


class SGLangForm(NamedTuple):
    """Options of an SGLang engine that decide how it stores a model's parameters, such as the mesh axes that divide the
    embedding.

    The axes that divide embedding (`words_in`) and head (`words_out`); whether there are several stages; whether linear
    layers have a scale per block; whether `unknown` tensors are whole on each rank instead of an error.
    """

    words_in: str = "tp"
    words_out: str = "tp"
    staged: bool = False
    scales: bool = False
    unknown: bool = False


@memo()
def table(kind: str, form: SGLangForm) -> tuple[Row, ...]:
    """Return rules for how SGLang stores a model of type `kind`, such as "qwen35moe": each Row has a pattern of stored
    names, their checkpoint names, and the sharding. `form` has the engine's options.

    `kind` is written in lower-case letters and digits only, without the suffix "text".
    """
    prefix = "model.layers.{l}."
    # Attention is cut over the part of tp that its data and context parallelism leave: `atp`.
    of_kind = CUT.sub("atp", OWN_BY_KIND.get(kind, ""))
    text = f"{_write_ends(kind, form)}{of_kind}[{prefix} = {prefix}]{NORMS}"
    attention = CUT.sub("atp", ATTENTION).replace("fused_qkv_a_proj.", "fused_qkv_a_proj_with_mqa.")
    dense = CUT.sub("tp/dense", MLP)
    experts = _write_experts(kind)
    text += write_modules(prefix, prefix, attention, dense + experts, scales=form.scales)
    if form.unknown:
        text += f"{write_unknown(prefix, prefix)}[ = ]{UNKNOWN}"
    return rename_rows(text, lambda name: _rename(kind, name))


def _write_ends(kind: str, form: SGLangForm) -> str:
    """The rows of the first and last modules."""
    is_head_everywhere = kind in map(plain, HEADS_EVERYWHERE.split())
    has_copy = form.staged and kind not in map(plain, HEADLESS.split())
    ends = ENDS + TIED if has_copy else ENDS
    ends = ends.replace("HEAD", "" if is_head_everywhere else "@pp=-1")
    return ends.replace("IN", form.words_in).replace("OUT", form.words_out)


def _write_experts(kind: str) -> str:
    """The rows of routed experts."""
    # vLLM's rows under SGLang's names: without its inner module, and with w13_weight_bias instead of w13_bias.
    text = EXPERTS.replace("experts.routed_experts.", "experts.").replace("_bias ", "_weight_bias ")
    return write_experts(text, kind, "ep e")


def _rename(kind: str, name: str) -> str:
    """The name of a kind's module in SGLang."""
    if kind not in RENAMES_BY_KIND:
        return rename(kind, name)
    for old, new in RENAMES_BY_KIND[kind]:
        name = name.replace(old, new)
    return name
