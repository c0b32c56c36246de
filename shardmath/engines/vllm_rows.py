"""vLLM's rows: what each module stores, by the names of its own parameters.

1. `ENDS` are the first and last modules, `ATTENTION`, `MIXERS` and `MLP` those of every layer, under each name that
   models give them, `EXPERTS` the stacks of routed experts.
2. Fused rows are cut part by part: `(tp (gate + up))` is `[gate_r; up_r]`. A key head that is on several ranks is
   `tp/rep`; whole heads are `hd` positions.
3. Expert parallelism has axes of its own over the ranks of a stage: `ep` deals experts, `etp` cuts them. One of them
   has size 1.
4. Logical names are those of `megatron_rows`; `RENAMES` says what a kind of model calls them in vLLM.

Source: vLLM 0.33.0, `model_executor/layers` and `model_executor/models`.

>>> print(table("llama", "linear", False)[0])
model.embed_tokens.weight @pp=0 = model.embed_tokens.weight : (tp n=vocab) h
"""

from __future__ import annotations

import dataclasses
import re

from shardmath.base.memo import memo
from shardmath.storage import names, rows
from shardmath.storage.rows import Row

__all__ = ["RENAMES", "draft_table", "table"]

ENDS = """
model.embed_tokens.weight @pp=0       = model.embed_tokens.weight : (tp n=vocab) h
model.position_embeddings.* @pp=0     = model.position_embeddings.*
lm_head.* @pp=-1                      = lm_head.*                 : (tp n=vocab) h
also model.embed_tokens.weight @pp=-1 = model.embed_tokens.weight ! /lm_head.weight : (tp n=vocab) h
model.norm.* @pp=-1                   = model.norm.*
"""

ATTENTION = """
qkv_proj.*         = [q g k v]_proj.*  : (tp own (q + g) + tp/rep k hd + tp/rep v hd) h
qkv_proj.*         = [q k v]_proj.*    : (tp q hd + tp/rep k hd + tp/rep v hd) h
o_proj.*           = o_proj.*          : h (tp n)
out_proj.*         = out_proj.*        : h (tp n)
dense.*            = dense.*           : h (tp n)
fused_qkv_a_proj.* = [q_a_proj kv_a_proj_with_mqa].* : (q_a_proj + kv_a_proj_with_mqa) h
kv_a_proj_with_mqa.* = kv_a_proj_with_mqa.*
q_proj.*           = q_proj.*          : (tp n) h
q_b_proj.*         = q_b_proj.*        : (tp n) h
kv_b_proj.*        = kv_b_proj.*       : (tp n) h
q_a_layernorm.*    = q_a_layernorm.*
kv_a_layernorm.*   = kv_a_layernorm.*
q_norm.*           = q_norm.*
k_norm.*           = k_norm.*
sinks              = sinks             : (tp n)
"""
"""Self-attention, latent attention too."""

MIXERS = """
mixer.in_proj.*            = mixer.[z x B C dt].*  : (tp z + tp x + tp/shared B + tp/shared C + tp dt) h
mixer.conv1d.*             = mixer.conv_[x B C].*  : (tp x + tp/shared B + tp/shared C) ...
mixer.A                    = neg_exp(mixer.A_log)  : (tp n) ...
mixer.D                    = mixer.D               : (tp n)
mixer.dt_bias              = mixer.dt_bias         : (tp n)
mixer.norm.*               = mixer.norm.*          : (tp n)
mixer.out_proj.*           = mixer.out_proj.*      : h (tp n)
"""
"""State-space layers."""

MLP = """
gate_up_proj.*                = [gate up]_proj.*                : (tp (gate + up)) h
up_proj.*                     = up_proj.*                       : (tp n) h
down_proj.*                   = down_proj.*                     : h (tp n)
shared_experts.gate_up_proj.* = shared_experts.[gate up]_proj.* : (tp/alike (gate + up)) h
shared_experts.up_proj.*      = shared_experts.up_proj.*        : (tp/alike n) h
shared_experts.down_proj.*    = shared_experts.down_proj.*      : h (tp/alike n)
gate.*                        = gate.*
gate.e_score_correction_bias  = gate.e_score_correction_bias
"""

EXPERTS = """
experts.routed_experts.w13_weight = experts.{e}.[gate up]_proj.weight : (DEAL) GATED h
experts.routed_experts.w13_weight = experts.{e}.up_proj.weight        : (DEAL) (etp n^tile) h
experts.routed_experts.w2_weight  = experts.{e}.down_proj.weight      : (DEAL) h (etp n^tile)
experts.routed_experts.w13_bias   = experts.{e}.[gate up]_proj.bias   : (DEAL) GATED
experts.routed_experts.w13_bias   = experts.{e}.up_proj.bias          : (DEAL) (etp n^tile)
experts.routed_experts.w2_bias    = experts.{e}.down_proj.bias        : (DEAL) (etp n=wide)
"""
"""DEAL stands for which experts a rank has, GATED for how gate and up lie in one. Of biases of the output one rank has
all, the others zeros: `wide` is so many times the output that the first part is all of it."""

DEALS = {"linear": "ep~ e", "round_robin": "e ep", "redundant": "ep~ e%slots"}
GATED = "(etp (gate^tile + up^tile))"
INTERLEAVED = "(etp own_ffn (gate + up))"
"""Gate and up in turn, row by row."""

NORMS = """
input_layernorm.*             = input_layernorm.*
post_attention_layernorm.*    = post_attention_layernorm.*
"""

UNKNOWN = """
... = ...
"""
"""Every other tensor is whole on each rank, under its own name."""

DRAFT = """
[model. = mtp.{m}.] @pp=-1
embed_tokens.*                = embed_tokens.*     : (tp n=vocab) h
[model.layers.{m}. = mtp.{m}.] @pp=-1
enorm.*                       = enorm.*
hnorm.*                       = hnorm.*
eh_proj.*                     = eh_proj.*
shared_head.norm.*            = norm.*
shared_head.head.*            = shared_head.head.* : (tp n=vocab) h
"""
"""What a layer that predicts a further token has beside the modules of every layer."""

MODULES = {
    "attention": ("self_attn", "attn", "attention"),
    "mlp": ("mlp", "block_sparse_moe", "feed_forward", "moe"),
}
"""What models call their attention and their MLP."""

EVERYWHERE = {
    "mixtral": ("embed_tokens", "norm", "lm_head"),
    "qwen2_moe": ("embed_tokens", "norm", "lm_head"),
    "qwen3_moe": ("embed_tokens", "norm", "lm_head"),
}
"""What each pipeline stage of a kind of model has, though the first or last one alone needs it."""

RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "mixtral": (("mlp.", "block_sparse_moe."),),
    "gpt_oss": (
        ("self_attn.", "attn."),
        ("embed_tokens", "embedding"),
        ("mlp.gate.", "mlp.router."),
    ),
    "nemotron_h": (
        ("model.norm.", "model.norm_f."),
        ("input_layernorm.", "norm."),
        ("post_attention_layernorm.", "norm."),
        ("self_attn.", "mixer."),
        ("mlp.", "mixer."),
    ),
    "gpt2": (
        ("model.embed_tokens.", "transformer.wte."),
        ("model.position_embeddings.", "transformer.wpe."),
        ("model.norm.", "transformer.ln_f."),
        ("model.layers.", "transformer.h."),
        ("input_layernorm.", "ln_1."),
        ("post_attention_layernorm.", "ln_2."),
        ("self_attn.qkv_proj.", "attn.c_attn."),
        ("self_attn.o_proj.", "attn.c_proj."),
        ("mlp.up_proj.", "mlp.c_fc."),
        ("mlp.down_proj.", "mlp.c_proj."),
    ),
}
"""What stands in vLLM's names for what, of a kind of model, in this order."""


PLACE = re.compile(r" @pp=-?\d+")


@memo()
def table(kind: str, deal: str, unknown: bool) -> tuple[Row, ...]:
    """The rows of a kind of model whose experts are dealt so; `unknown` tensors are whole on each rank, or refused."""
    prefix = "model.layers.{l}."
    text = _write_ends(kind) + _write_layer(prefix, prefix, kind, deal)
    if unknown:
        text += f"[{prefix} = {prefix}]{UNKNOWN}[ = ]{UNKNOWN}"
    return _rename(text, kind)


@memo()
def draft_table(kind: str, deal: str, unknown: bool) -> tuple[Row, ...]:
    """The rows of the model that predicts further tokens."""
    head = "[model.layers.{m}.mtp_block. = mtp.{m}.]"
    text = DRAFT + _write_layer("model.layers.{m}.mtp_block.", "mtp.{m}.", kind, deal)
    if unknown:
        text += f"{head}{UNKNOWN}"
    return _rename(text, kind)


def _write_ends(kind: str) -> str:
    """The rows of the first and last modules."""
    lines = ENDS.splitlines(keepends=True)
    for i, line in enumerate(lines):
        for name in EVERYWHERE.get(kind, ()):
            if line.startswith((f"{name}.", f"model.{name}.")):
                lines[i] = PLACE.sub("", line)
    return "".join(lines)


def _write_layer(native: str, logical: str, kind: str, deal: str) -> str:
    """The rows of every layer, under these prefixes."""
    experts = EXPERTS.replace("DEAL", DEALS[deal])
    experts = experts.replace("GATED", INTERLEAVED if kind == "gpt_oss" else GATED)
    text = f"[{native} = {logical}]{NORMS}{MIXERS}"
    for modules, own in ((MODULES["attention"], ATTENTION), (MODULES["mlp"], MLP + experts)):
        heads = [f"[{native}{name}. = {logical}{name}.]" for name in modules]
        text += "\n".join(heads) + own
    return text


def _rename(text: str, kind: str) -> tuple[Row, ...]:
    """The rows with the kind's names for what ranks store."""
    renamed = []
    # Once heads and rows are one name, so that mlp.gate can be told from other gates.
    for row in rows.parse(text):
        name = str(row.native)
        for old, new in RENAMES.get(kind, ()):
            name = name.replace(old, new)
        renamed.append(dataclasses.replace(row, native=names.parse(name)))
    return tuple(renamed)
