"""vLLM's rows: the stored tensors of each module, by the names of its parameters.

1. `ENDS` are the rows of the first and last modules, `ATTENTION`, `MIXERS` and `MLP` of the modules of every layer,
   under each name that models give them, `EXPERTS` of the stacks of routed experts.
2. Fused rows are cut part by part: `(tp (gate + up))` is `[gate_r; up_r]`. A key head on several ranks is `tp/rep`;
   whole heads are `hd` positions, and a rank has `own` query heads and `own_keys` key heads. A shared expert that each
   rank has whole is `tp/alike`, B and C of a Mamba layer that each has whole are `tp/shared`.
3. Experts have separate axes over the ranks of a stage: `ep` deals experts, `etp` cuts them. One of the two has size 1.
4. Logical names are as in `megatron_rows`; `vllm_names` has their names in vLLM by kind of model.

Source: vLLM 0.33.0, `model_executor/layers` and `model_executor/models`.

>>> print(table("llama", VLLMForm())[0])
model.embed_tokens.weight @pp=0 = model.embed_tokens.weight : (tp n=vocab) h
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from shardmath.base.memo import memo
from shardmath.models.storage import names, rows
from shardmath.models.storage.rows import Row
from shardmath.models.systems.config import DRAFTS_ALONE, plain
from shardmath.models.systems.vllm_names import everywhere, rename

__all__ = [
    "ATTENTION",
    "EXPERTS",
    "INTERLEAVES",
    "MLP",
    "NORMS",
    "OWN_BY_KIND",
    "UNKNOWN",
    "VLLMForm",
    "draft_table",
    "rename_rows",
    "table",
    "write_experts",
    "write_modules",
    "write_unknown",
]

ENDS = """
model.embed_tokens.weight @pp=0       = model.embed_tokens.weight : (tp n=vocab) h
model.position_embeddings.* @pp=0     = model.position_embeddings.*
lm_head.* @pp=-1                      = lm_head.*                 : (tp n=vocab) h
also model.embed_tokens.weight @pp=-1 = model.embed_tokens.weight ! /lm_head.weight : (tp n=vocab) h
model.norm.* @pp=-1                   = model.norm.*
transformer.word_embeddings_layernorm.* = transformer.word_embeddings_layernorm.*
"""

ATTENTION = """
qkv_proj.*         = [q g k v]_proj.*  : (tp own (q + g) + tp/rep k hd + tp/rep v hd) h
qkv_proj.*         = [q_even q_odd k_even k_odd v]_proj.* :
    (tp own (q_even + q_odd) + tp/rep own_keys (k_even + k_odd) + tp/rep v hd) h
qkv_proj.*         = [q k v]_proj.*    : (tp q hd + tp/rep k hd + tp/rep v hd) h
o_proj.*           = o_proj.*          : h (tp n)
out_proj.*         = out_proj.*        : h (tp n)
dense.*            = dense.*           : h (tp n)
c_proj.*           = c_proj.*          : h (tp n)
fused_qkv_a_proj.* = [q_a_proj kv_a_proj_with_mqa].* : (q_a_proj + kv_a_proj_with_mqa) h
kv_a_proj_with_mqa.* = kv_a_proj_with_mqa.*
q_proj.*           = q_proj.*          : (tp n) h
gate_proj.*        = gate_proj.*       : (tp n) h
q_b_proj.*         = q_b_proj.*        : (tp n) h
kv_b_proj.*        = kv_b_proj.*       : (tp n) h
q_a_layernorm.*    = q_a_layernorm.*
kv_a_layernorm.*   = kv_a_layernorm.*
q_norm.*           = q_norm.*
k_norm.*           = k_norm.*
q_layernorm.*      = q_layernorm.*
k_layernorm.*      = k_layernorm.*
sinks              = sinks             : (tp n)
attn.k_scale       = k_scale
attn.v_scale       = v_scale
"""
"""Rows of self-attention and latent attention. Llama 4 stores the even rows of a head before its odd ones. The scales
are for keys and values in an FP8 cache."""

MIXERS = """
mixer.in_proj.*       = mixer.[z x B C dt].*  : (tp z + tp x + tp/shared B group + tp/shared C group + tp dt) h
mixer.conv1d.*        = mixer.conv_[x B C].*  : (tp x + tp/shared B group + tp/shared C group) ...
mixer.in_proj.*       = mixer.in_[x z].*      : (tp (x + z)) h
mixer.conv1d.*        = mixer.conv1d.*        : (tp n) ...
mixer.x_proj.*        = mixer.x_proj.*        : h (tp n)
mixer.dt_proj.*       = mixer.dt_proj.*       : (tp n) h
mixer.A               = neg_exp(mixer.A_log)  : (tp n) ...
mixer.D               = mixer.D               : (tp n)
mixer.dt_bias         = mixer.dt_bias         : (tp n)
mixer.norm.*          = mixer.norm.*          : (tp n)
mixer.out_proj.*      = mixer.out_proj.*      : h (tp n)
mixer.dt_layernorm.*  = mixer.dt_layernorm.*
mixer.b_layernorm.*   = mixer.b_layernorm.*
mixer.c_layernorm.*   = mixer.c_layernorm.*
short_conv.in_proj.*  = short_conv.in_[b c x].* : (tp (b + c + x)) h
short_conv.conv.*     = short_conv.conv.*     : (tp n) ...
short_conv.out_proj.* = short_conv.out_proj.* : h (tp n)
linear_attn.in_proj_qkvz.* = linear_attn.[q k v z].* : QKVZ h
linear_attn.in_proj_ba.*   = linear_attn.[b a].*     : BA h
linear_attn.conv1d.*  = linear_attn.conv_[q k v].* : (tp (q + k + v)) ...
linear_attn.A_log     = linear_attn.A_log     : (tp n)
linear_attn.dt_bias   = linear_attn.dt_bias   : (tp n)
linear_attn.norm.*    = linear_attn.norm.*
linear_attn.out_proj.* = linear_attn.out_proj.* : h (tp n)
"""
"""Rows of Mamba 1 and 2, short convolutions and gated delta nets. QKVZ and BA stand for the structure of a delta net's
fused projections (`FUSINGS`): part by part, or by key heads as in its checkpoint."""

MIXER_SCALES = """
linear_attn.in_proj_qkvz.weight_scale_inv = linear_attn.in_proj_qkvz.weight_scale_inv : (tp n) h
"""
"""Rows of scales that a checkpoint has of tensors which are several components."""

FUSINGS = {
    "parts": ("(tp (q + k + v + z))", "(tp (b + a))"),
    "heads": ("(tp own_linear (q + k + v + z))", "(tp own_linear (b + a))"),
}

MLP = """
gate_up_proj.*                = [gate up]_proj.*                : (tp (gate + up)) h
up_proj.*                     = up_proj.*                       : (tp n) h
down_proj.*                   = down_proj.*                     : h (tp n)
gate_up_proj.*                = [w1 w3].*                       : (tp (w1 + w3)) h
w2.*                          = w2.*                            : h (tp n)
c_fc.*                        = c_fc.*                          : (tp n) h
c_proj.*                      = c_proj.*                        : h (tp n)
fc1.*                         = fc1.*                           : (tp n) h
fc2.*                         = fc2.*                           : h (tp n)
dense_h_to_4h.*               = dense_h_to_4h.*                 : (tp n) h
dense_4h_to_h.*               = dense_4h_to_h.*                 : h (tp n)
shared_experts.gate_up_proj.* = shared_experts.[gate up]_proj.* : (tp/alike (gate + up)) h
shared_experts.up_proj.*      = shared_experts.up_proj.*        : (tp/alike n) h
shared_experts.down_proj.*    = shared_experts.down_proj.*      : h (tp/alike n)
shared_expert.gate_up_proj.*  = shared_expert.[gate up]_proj.*  : (tp/alike (gate + up)) h
shared_expert.down_proj.*     = shared_expert.down_proj.*       : h (tp/alike n)
shared_expert_gate.*          = shared_expert_gate.*
shared_mlp.gate_up_proj.*     = shared_mlp.[gate up]_proj.*     : (tp (gate + up)) h
shared_mlp.down_proj.*        = shared_mlp.down_proj.*          : h (tp n)
fc1_latent_proj.*             = fc1_latent_proj.*
fc2_latent_proj.*             = fc2_latent_proj.*
gate.*                        = gate.*
gate.e_score_correction_bias  = gate.e_score_correction_bias
expert_bias                   = expert_bias
"""

EXPERTS = """
experts.routed_experts.w13_weight = experts.{e}.[gate up]_proj.weight : (DEAL) GATED h
experts.routed_experts.w13_weight = experts.{e}.up_proj.weight        : (DEAL) (etp n^tile) h
experts.routed_experts.w2_weight  = experts.{e}.down_proj.weight      : (DEAL) h (etp n^tile)
experts.routed_experts.w13_bias   = experts.{e}.[gate up]_proj.bias   : (DEAL) GATED_B
experts.routed_experts.w13_bias   = experts.{e}.up_proj.bias          : (DEAL) (etp n^tile)
experts.routed_experts.w2_bias    = experts.{e}.down_proj.bias        : (DEAL) (etp n=wide)
experts.routed_experts.w13_weight = experts.{e}.[w1 w3].weight        : (DEAL) GATED_W h
experts.routed_experts.w2_weight  = experts.{e}.w2.weight             : (DEAL) h (etp n^tile)
"""
"""DEAL stands for the division of experts among ranks, GATED for the order of gate and up in an expert, GATED_W for the
same order of w1 and w3, GATED_B for the order in a bias, which backends leave as loaded. One rank has the output bias,
the others zeros: `wide` is such a multiple of the output that the first part is all of it."""

BLOCKED = """
experts.routed_experts.w13_weight = paired_blocks(experts.{e}.[gate up]_proj.weight) : (DEAL) GATED h
experts.routed_experts.w13_weight = blocks(experts.{e}.up_proj.weight)   : (DEAL) (etp n^tile) h
experts.routed_experts.w2_weight  = blocks(experts.{e}.down_proj.weight) : (DEAL) h (etp n^tile)
experts.routed_experts.w13_weight = paired_blocks(experts.{e}.[w1 w3].weight) : (DEAL) GATED_W h
experts.routed_experts.w2_weight  = blocks(experts.{e}.w2.weight)        : (DEAL) h (etp n^tile)
"""
"""Rows of experts that FlashInfer's TRTLLM backend has arranged, before all others."""

DEALS = {"linear": "ep~ e", "round_robin": "e ep", "redundant": "ep~ e%slots"}
GATED = {
    "parts": "(etp (gate^tile + up^tile))",
    "swapped": "(etp (up^tile + gate^tile))",
    "blocked": "(etp (up^tile + gate^tile))",
    "interleaved": "(etp own_ffn (gate + up))",
}
"""The order of gate and up: one after the other, in reverse, or row by row alternating."""

NORMS = """
input_layernorm.*             = input_layernorm.*
post_attention_layernorm.*    = post_attention_layernorm.*
pre_feedforward_layernorm.*   = pre_feedforward_layernorm.*
post_feedforward_layernorm.*  = post_feedforward_layernorm.*
post_self_attn_layernorm.*    = post_self_attn_layernorm.*
post_mlp_layernorm.*          = post_mlp_layernorm.*
pre_mlp_layernorm.*           = pre_mlp_layernorm.*
attention_layernorm.*         = attention_layernorm.*
feedforward_layernorm.*       = feedforward_layernorm.*
ln_attn.*                     = ln_attn.*
ln_mlp.*                      = ln_mlp.*
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
"""Rows of a layer that predicts a further token, in addition to the modules of every layer."""

OWN_ENDS = """
[ = ] @pp=-1
model.embed_tokens.weight     = model.embed_tokens.weight : (tp n=vocab) h
lm_head.weight                = lm_head.weight            : (tp n=vocab) h
"""
DRAFT_FC = f"""
[model. = mtp.{{m}}.] @pp=-1
fc.*                          = eh_proj.* : (tp n) h
pre_fc_norm_embedding.*       = enorm.*
pre_fc_norm_hidden.*          = hnorm.*
norm.*                        = norm.*
{OWN_ENDS}"""
DRAFT_ERNIE = f"""
[model.layers.{{m}}. = mtp.{{m}}.] @pp=-1
mtp_emb_norm.*                = enorm.*
mtp_hidden_norm.*             = hnorm.*
mtp_linear_proj.*             = eh_proj.*
{OWN_ENDS}"""
DRAFT_HYBRID = f"""
[model.layers.{{i}}. = mtp.{{m}}.layers.{{i}}.] @pp=-1
enorm.*                       = enorm.*
hnorm.*                       = hnorm.*
eh_proj.*                     = eh_proj.* : (tp n) h
final_layernorm.*             = norm.*
{OWN_ENDS}"""


class _Draft(NamedTuple):
    """The rows of a draft besides those of its layers, and the prefixes of the layers' names."""

    text: str = DRAFT
    native: str = "model.layers.{m}.mtp_block."
    logical: str = "mtp.{m}."


DRAFTS = {
    "nemotronh": _Draft(DRAFT_HYBRID, "model.layers.{i}.", "mtp.{m}.layers.{i}."),
    "ernie45moe": _Draft(DRAFT_ERNIE),
    **dict.fromkeys(DRAFTS_ALONE, _Draft(DRAFT_FC, "model.layers.{m}.")),
}
"""Drafts of kinds of model with other names. They read the model's own embedding and head."""

MODULES = {
    "attention": ("self_attn", "attn", "attention"),
    "mlp": ("mlp", "block_sparse_moe", "feed_forward", "moe"),
}
"""The names that models give their attention and their MLP."""

OWN = {
    "minimax_m2": """
[model.layers.{l}.self_attn. = model.layers.{l}.self_attn.]
q_norm.*                      = q_norm.* : (tp n)
k_norm.*                      = k_norm.* : (tp/rep n hd)
""",
    "cohere": """
[model.layers.{l}.self_attn. = model.layers.{l}.self_attn.]
q_norm.*                      = q_norm.* : (tp n) h
k_norm.*                      = k_norm.* : (tp/rep n) h
""",
}
OWN["cohere2"] = OWN["cohere"]
"""Rows of a kind of model that precede the rows of all kinds: norms over all heads, cut like heads."""

OWN_VLLM = {
    "glm": """
[model.layers.{l}.mlp. = model.layers.{l}.mlp.]
gate_up_proj.*                = [gate up]_proj.* : (gate + up | tp n) h
""",
    "minicpm3": """
[model.layers.{l}.self_attn. = model.layers.{l}.self_attn.]
q_a_proj.*                    = q_a_proj.*
kv_a_proj_with_mqa.*          = kv_a_proj_with_mqa.*
""",
}
"""The same for only vLLM, which runs glm by the modules of transformers, and so cuts gate and up as one."""

INTERLEAVES = ("gptoss",)
BY_HEADS = ("qwen3next",)
OWN_BY_KIND = {plain(kind): text for kind, text in OWN.items()}
PLACE = re.compile(r" @pp=-?\d+")
WEIGHT = re.compile(r"([._])(?:weight|\*)(?= |$)")
GRAIN = re.compile(r" hd\b|\^tile\b")
WHOLE = "=whole"
"""Instead of ^tile: as long as all parts with whole tiles, of which the last ones are padding."""


class VLLMForm(NamedTuple):
    """Options of a vLLM engine that decide how it stores a model's parameters, such as the order in which experts are
    distributed over ranks.

    The way in which experts are dealt; the order of gate and up in each; whether linear layers have a scale per block;
    whether `unknown` tensors are whole on each rank instead of an error; whether parts of experts have `whole` tiles.
    """

    deal: str = "linear"
    gated: str = "parts"
    scales: bool = False
    unknown: bool = False
    whole: bool = False


@memo()
def table(kind: str, form: VLLMForm) -> tuple[Row, ...]:
    """Return rules for how vLLM stores a model of type `kind`, such as "qwen35moe": each Row has a pattern of stored
    names, their checkpoint names, and the sharding. `form` has the engine's options.

    `kind` is written in lower-case letters and digits only, without the suffix "text".
    """
    prefix = "model.layers.{l}."
    text = _write_ends(kind) + _write_layer(prefix, prefix, kind, form)
    if form.unknown:
        text += write_unknown(prefix, prefix) + f"[ = ]{UNKNOWN}"
    return rename_rows(text, partial(rename, kind))


@memo()
def draft_table(kind: str, form: VLLMForm) -> tuple[Row, ...]:
    """Return rules, as Rows, for how vLLM stores the draft model (MTP, which predicts further tokens) that belongs to a
    main model of type `kind`. `form` has the engine's options."""
    own, native, logical = DRAFTS.get(kind, _Draft())
    text = own + _write_layer(native, logical, kind, form)
    if form.unknown:
        text += write_unknown(native, logical)
    return rename_rows(text, partial(rename, kind))


def _write_ends(kind: str) -> str:
    """The rows of the first and last modules; modules that are on every pipeline stage lose their place, as @pp=0."""
    lines = ENDS.splitlines(keepends=True)
    for i, line in enumerate(lines):
        for name in everywhere(kind):
            if line.startswith((f"{name}.", f"model.{name}.")):
                lines[i] = PLACE.sub("", line)
    return "".join(lines)


def _write_layer(native: str, logical: str, kind: str, form: VLLMForm) -> str:
    """The rows of every layer, under these prefixes."""
    qkvz, ba = FUSINGS["heads" if kind in BY_HEADS else "parts"]
    mixers = MIXERS.replace("QKVZ", qkvz).replace("BA", ba)
    own_experts = BLOCKED + EXPERTS if form.gated == "blocked" else EXPERTS
    experts = write_experts(own_experts, kind, DEALS[form.deal], form.gated)
    if form.whole:
        experts = experts.replace("^tile", WHOLE)
    own = OWN_BY_KIND.get(kind, "") + OWN_VLLM.get(kind, "")
    text = f"{own}[{native} = {logical}]{NORMS}{mixers}"
    if form.scales:
        text += _write_scales(mixers) + MIXER_SCALES
    return text + write_modules(native, logical, ATTENTION, MLP + experts, scales=form.scales)


def write_experts(text: str, kind: str, deal: str, gated: str = "parts") -> str:
    """Return the storage rules `text` of the experts of models of type `kind`, with the division `deal` among ranks,
    such as "ep e", and the order `gated` of gate and up."""
    order = GATED["interleaved" if kind in INTERLEAVES else gated]
    renamed = order.replace("gate", "w1").replace("up", "w3")
    loaded = GATED["interleaved" if kind in INTERLEAVES else "parts"]
    texts = {"DEAL": deal, "GATED_W": renamed, "GATED_B": loaded, "GATED": order}
    for mark, structure in texts.items():
        text = text.replace(mark, structure)
    return text


def write_modules(native: str, logical: str, attention: str, mlp: str, *, scales: bool) -> str:
    """Return a text with the storage rules `attention` and `mlp`, each under headings for the usual names of such
    modules, like self_attn. A heading puts the prefixes `native` (stored names) and `logical` (checkpoint names) before
    a name; `scales` adds rules for block scales."""
    text = ""
    for modules, module_rows in ((MODULES["attention"], attention), (MODULES["mlp"], mlp)):
        heads = [f"[{native}{name}. = {logical}{name}.]" for name in modules]
        # Join rows that are written over several lines above: a table has one line per row.
        joined = module_rows.replace(":\n    (", ": (")
        text += "\n".join(heads) + joined
        if scales:
            text += _write_scales(joined)
    return text


def _write_scales(text: str) -> str:
    """The rows of a weight's block scales: cut like the weight, without grains and tiles, which count elements."""
    scaled = []
    for line in text.splitlines():
        if WEIGHT.search(line):
            scale_row = GRAIN.sub("", WEIGHT.sub(r"\1weight_scale_inv", line))
            scaled.append(scale_row.replace(WHOLE, f"{WHOLE}_scales"))
    return "\n".join(scaled) + "\n"


def write_unknown(native: str, logical: str) -> str:
    """Return, as text, storage rows (rules) for all tensors of a layer that have no other row: they are stored whole on
    each rank, under the same name. Stored names begin with `native`, logical names with `logical`."""
    modules = ("self_attn.", "mlp.", "mixer.", "")
    return "".join(f"[{native}{name} = {logical}{name}]{UNKNOWN}" for name in modules)


def rename_rows(text: str, rename: Callable[[str], str]) -> tuple[Row, ...]:
    """Parse `text`, which has a storage rule per line, such as `w1.* = up_proj.* : (tp n) h`, into Rows. The function
    `rename` is applied to each stored name, which is left of the equal sign."""
    renamed = []
    # Renamed after heads and rows are joined, so that mlp.gate differs from other gates.
    for row in rows.parse(text):
        name = rename(str(row.native))
        renamed.append(dataclasses.replace(row, native=names.parse(name)))
    return tuple(renamed)
