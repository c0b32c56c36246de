"""Megatron-Core's rows: the stored tensors of each module, by the names of its parameters.

1. `ENDS` are the rows of the first and last modules, `LAYERS` of the modules of every layer, `SPECS` of norms and of
   latent attention's down projections, which depend on the layer spec, `EXPERTS` of routed experts.
2. Logical tensors have Hugging Face's names, or new names if one of Hugging Face's tensors is several of Megatron's
   components: `mixer.[z x B C dt]`, `linear_attn.[q k v z b a]`.
3. The model's tensors decide which rows apply: gates, biases, norms and tied embeddings need no flags.

Source: Megatron-Core 0.16.1, `models/gpt`, `models/mamba`, `transformer`, `ssm`.

>>> from shardmath.models.storage import rows
>>> len(rows.parse(table("te", "grouped")))
158
"""

from __future__ import annotations

from shardmath.base.arguments import known
from shardmath.base.errors import StoreError

__all__ = ["EXPERTS", "SPECS", "table"]

ENDS = """
embedding.word_embeddings.weight @pp=0          = model.embed_tokens.weight : (tp n=vocab) h
embedding.position_embeddings.weight @pp=0      = model.position_embeddings.weight
output_layer.weight @pp=-1                      = lm_head.weight            : (tp n=vocab) h
also embedding.word_embeddings.weight @m=-1     = model.embed_tokens.weight ? /mtp.0.enorm.weight : (tp n=vocab) h
also embedding.word_embeddings.weight @m=-1  = model.embed_tokens.weight ? /mtp.0.layers.0.enorm.weight : (tp n=vocab) h
also embedding.position_embeddings.weight @m=-1 = model.position_embeddings.weight ? /mtp.0.enorm.weight
also embedding.position_embeddings.weight @m=-1 = model.position_embeddings.weight ? /mtp.0.layers.0.enorm.weight
also output_layer.weight @pp=-1                 = model.embed_tokens.weight ! /lm_head.weight     : (tp n=vocab) h
decoder.final_layernorm.* @pp=-1              = model.norm.*
[mtp.layers.{m}. = mtp.{m}.]
enorm.*                                         = enorm.*
hnorm.*                                         = hnorm.*
eh_proj.*                                       = eh_proj.* : (tp n) h
final_layernorm.*                               = norm.*
enorm.*                                         = layers.{i}.enorm.*
hnorm.*                                         = layers.{i}.hnorm.*
eh_proj.*                                       = layers.{i}.eh_proj.* : (tp n) h
final_layernorm.*                               = layers.{i}.norm.*
"""
"""A hybrid model predicts each further token by several layers {i}: the first has the projection, the last the norm.
The stage of layers {m} has a copy of the embedding, from which it also computes logits, if it is the last stage."""

HEADS = """
[decoder.layers.{l}. = model.layers.{l}.]
[mtp.layers.{m}.transformer_layer. = mtp.{m}.]
[mtp.layers.{m}.transformer_layer.layers.{i}. = mtp.{m}.layers.{i}.]
"""

LAYERS = """
self_attention.linear_qkv.*            = self_attn.[q g k v]_proj.* : (groups (q + g + k + v) | tp n) h
self_attention.linear_qkv.*            = self_attn.[q k v]_proj.*   : (groups (q + k + v) | tp n) h
self_attention.linear_proj.*           = self_attn.o_proj.*         : h (tp n)
self_attention.core_attention.softmax_offset = self_attn.sinks      : (tp n)
self_attention.linear_q_proj.*         = self_attn.q_proj.*         : (tp n) h
self_attention.linear_q_up_proj.*      = self_attn.q_b_proj.*       : (tp n) h
self_attention.linear_kv_up_proj.*     = self_attn.kv_b_proj.*      : (tp n) h
self_attention.in_proj.*               = linear_attn.[q k v z b a].* : (tp (q + k + v + z + b + a)) h
self_attention.conv1d.*                = linear_attn.conv_[q k v].* : (tp (q + k + v)) ...
self_attention.A_log                   = linear_attn.A_log          : (tp n)
self_attention.dt_bias                 = linear_attn.dt_bias        : (tp n)
self_attention.out_norm.*              = linear_attn.norm.*
self_attention.out_proj.*              = linear_attn.out_proj.*     : h (tp n)
mixer.in_proj.*                        = mixer.[z x B C dt].*       : (tp (z + x + B + C + dt)) h
mixer.conv1d.*                         = mixer.conv_[x B C].*       : (tp (x + B + C)) ...
mixer.A_log                            = mixer.A_log                : (tp n)
mixer.D                                = mixer.D                    : (tp n)
mixer.dt_bias                          = mixer.dt_bias              : (tp n)
mixer.norm.*                           = mixer.norm.*               : (tp n)
mixer.out_proj.*                       = mixer.out_proj.*           : h (tp n)
mlp.linear_fc1.*                       = mlp.[gate up]_proj.*       : (tp (gate + up)) h
mlp.linear_fc1.*                       = mlp.up_proj.*              : (tp n) h
mlp.linear_fc2.*                       = mlp.down_proj.*            : h (tp n)
mlp.router.*                           = mlp.gate.*
mlp.router.expert_bias                 = mlp.gate.e_score_correction_bias
mlp.shared_experts.linear_fc1.*        = mlp.shared_experts.[gate up]_proj.* : (tp (gate + up)) h
mlp.shared_experts.linear_fc1.*        = mlp.shared_experts.up_proj.* : (tp n) h
mlp.shared_experts.linear_fc2.*        = mlp.shared_experts.down_proj.* : h (tp n)
mlp.shared_experts.gate_weight         = mlp.shared_expert_gate.weight
mlp.fc1_latent_proj.*                  = mlp.fc1_latent_proj.*
mlp.fc2_latent_proj.*                  = mlp.fc2_latent_proj.*
"""

SPECS = {
    "te": """
self_attention.linear_qkv.layer_norm_* = input_layernorm.*          ? self_attn.k_proj.weight
self_attention.in_proj.layer_norm_*    = input_layernorm.*          ? linear_attn.q.weight
mixer.in_proj.layer_norm_*             = input_layernorm.*          ? mixer.z.weight
mlp.linear_fc1.layer_norm_*            = post_attention_layernorm.* ? mlp.up_proj.weight
self_attention.linear_q_proj.layer_norm_*     = self_attn.q_a_layernorm.* ? self_attn.q_proj.weight
self_attention.linear_q_up_proj.layer_norm_*  = self_attn.q_a_layernorm.*
self_attention.linear_kv_up_proj.layer_norm_* = self_attn.kv_a_layernorm.*
self_attention.linear_q_down_proj.*    = self_attn.q_a_proj.*
self_attention.linear_kv_down_proj.*   = self_attn.kv_a_proj_with_mqa.*
""",
    "local": """
self_attention.q_layernorm.*           = self_attn.q_a_layernorm.*
self_attention.kv_layernorm.*          = self_attn.kv_a_layernorm.*
self_attention.linear_q_down_proj.*    = self_attn.q_a_proj.*       : (tp n) h
self_attention.linear_kv_down_proj.*   = self_attn.kv_a_proj_with_mqa.* : (tp n) h
""",
}
"""Rows by layer spec: TransformerEngine's modules, or Megatron's own."""

FUSED_DOWN = """
self_attention.linear_qkv_down_proj.layer_norm_* = input_layernorm.* ? self_attn.q_a_proj.weight
self_attention.linear_qkv_down_proj.* = self_attn.[q_a_proj kv_a_proj_with_mqa].* :
    (tp (q_a_proj + kv_a_proj_with_mqa)) h
"""
"""Rows of latent attention whose down projections are one module, with `mla_down_proj_fusion` in the configuration."""

NORMS = """
self_attention.q_layernorm.*           = self_attn.q_norm.*
self_attention.k_layernorm.*           = self_attn.k_norm.*
input_layernorm.*                      = input_layernorm.*
pre_mlp_layernorm.*                    = post_attention_layernorm.*
"""

EXPERTS = {
    "grouped": """
mlp.experts.linear_fc1.*{ep e}         = mlp.experts.{e}.[gate up]_proj.* : (etp (gate + up)) h
mlp.experts.linear_fc1.*{ep e}         = mlp.experts.{e}.up_proj.*  : (etp n) h
mlp.experts.linear_fc2.*{ep e}         = mlp.experts.{e}.down_proj.* : h (etp n)
""",
    "sequential": """
mlp.experts.local_experts.{ep e}.linear_fc1.* = mlp.experts.{e}.[gate up]_proj.* : (etp (gate + up)) h
mlp.experts.local_experts.{ep e}.linear_fc1.* = mlp.experts.{e}.up_proj.* : (etp n) h
mlp.experts.local_experts.{ep e}.linear_fc2.* = mlp.experts.{e}.down_proj.* : h (etp n)
""",
    "legacy": """
mlp.experts.weight1                    = mlp.experts.{e}.[gate up]_proj.weight.T : (ep e) h (etp (gate + up))
mlp.experts.weight1                    = mlp.experts.{e}.up_proj.weight.T : (ep e) h (etp n)
mlp.experts.weight2                    = mlp.experts.{e}.down_proj.weight.T : (ep e) (etp n) h
""",
    "stacked": """
mlp.experts.linear_fc1.*               = mlp.experts.{e}.[gate up]_proj.* : (ep e) (etp (gate + up)) h
mlp.experts.linear_fc1.*               = mlp.experts.{e}.up_proj.* : (ep e) (etp n) h
mlp.experts.linear_fc2.*               = mlp.experts.{e}.down_proj.* : (ep e) h (etp n)
""",
}
"""Rows of routed experts: a tensor per expert, a module per expert, one tensor for all, or TransformerEngine's stack
(of weights and biases, or of only one of the two).

Legacy experts are declared flat, (h, e n), and multiplied as the stack that the rows describe: a trainer passes
`weight1.view(e, h, -1)` and `weight2.view(e, -1, h)`.
"""


def _mix(weights: str, biases: str) -> str:
    """The rows of experts whose weights are stored in one form, and whose biases in another."""
    return EXPERTS[weights].replace(".*", ".weight") + EXPERTS[biases].replace(".*", ".bias")


EXPERTS |= {
    "stacked weights": _mix("stacked", "grouped"),
    "stacked biases": _mix("grouped", "stacked"),
}

UNKNOWN = """
[decoder.layers.{l}.self_attention. = model.layers.{l}.self_attn.]
[mtp.layers.{m}.transformer_layer.self_attention. = mtp.{m}.self_attn.]
[mtp.layers.{m}.transformer_layer.layers.{i}.self_attention. = mtp.{m}.layers.{i}.self_attn.]
...                                    = ...
[decoder.layers.{l}. = model.layers.{l}.]
[mtp.layers.{m}.transformer_layer. = mtp.{m}.]
...                                    = ...
[ = ]
...                                    = ...
"""
"""Every other tensor is whole on each rank that has its layer, under its own name."""


def table(
    spec: str = "te",
    experts: str = "sequential",
    *,
    unknown: bool = False,
    fused_down: bool = False,
) -> str:
    """Return, as text, Megatron's storage rows (rules) for the layer `spec`, "te" or "local". `experts` says how routed
    experts are stored: "grouped", "sequential", "stacked", "stacked weights", "stacked biases" or "legacy"; `unknown`
    adds rows that store all remaining tensors undivided, `fused_down` rows of fused down projections.

    Raises StoreError for an unknown spec or form.
    """
    known_spec = known(spec, tuple(SPECS))
    known_experts = known(experts, tuple(EXPERTS))
    if known_spec is None or known_experts is None:
        raise StoreError(
            f"spec={spec!r}, experts={experts!r} are not both known; use one of {', '.join(SPECS)} "
            f"for spec, and one of {', '.join(EXPERTS)} for experts"
        )
    # Join rows that are written over several lines above: a table has one line per row.
    down = FUSED_DOWN.replace(":\n    (", ": (") * fused_down
    layers = HEADS + down + SPECS[known_spec] + LAYERS + NORMS + EXPERTS[known_experts]
    return ENDS + layers + UNKNOWN * unknown
