"""Hugging Face checkpoints as rows: the tensors that are several logical tensors, or have another name.

1. Logical names are as in `megatron_rows`. If `ROWS` has nothing for a kind of model, a checkpoint's names are the
   logical names.
2. `q=queries` is a component of `queries` positions. Components without a number have equal parts of the rest.
3. One table may have several ways to store a tensor, such as separate or stacked experts: the names of a checkpoint
   decide (`hugging_face`).

Source: transformers 5, `modeling_*.py` and `conversion_mapping.py`.

>>> print(table("gpt2").splitlines()[1])
transformer.wte.weight    = model.embed_tokens.weight
"""

from __future__ import annotations

from shardmath.models.systems.config import DRAFTS_APART, plain

__all__ = ["table"]

DRAFT = """
[model.layers.{m}. = mtp.{m}.]
shared_head.norm.* = norm.*
...                = ...
"""
"""Rows of layers behind the last one, which predict further tokens."""

DENSE = """
[model.layers.{l}. = model.layers.{l}.]
self_attn.qkv_proj.*      = self_attn.[q k v]_proj.* : (q=queries + k=keys + v=keys) h
mlp.gate_up_proj.*        = mlp.[gate up]_proj.*     : (gate + up) h
"""
FUSED = f"""
{DENSE}
mlp.experts.gate_up_proj  = mlp.experts.{{e}}.[gate up]_proj.weight : e (gate + up) h
mlp.experts.down_proj     = mlp.experts.{{e}}.down_proj.weight      : e ...
"""
"""Fused tensors that any kind may have."""

NUMBERED = """
experts.{e}.w1.*          = experts.{e}.gate_proj.*
experts.{e}.w3.*          = experts.{e}.up_proj.*
experts.{e}.w2.*          = experts.{e}.down_proj.*
"""
SPARSE = f"""
[model.layers.{{l}}.block_sparse_moe. = model.layers.{{l}}.mlp.]
{NUMBERED}
e_score_correction_bias   = gate.e_score_correction_bias
...                       = ...
"""
MAMBA2 = """
in_proj.*                 = [z x B C dt].*    : (z=inner + x=inner + B=state + C=state + dt) h
conv1d.*                  = conv_[x B C].*    : (x=inner + B=state + C=state) ...
...                       = ...
"""
MAMBA1 = """
in_proj.*                 = in_[x z].*        : (x + z) h
...                       = ...
"""
GRANITE = f"""
[model.layers.{{l}}.shared_mlp. = model.layers.{{l}}.mlp.shared_experts.]
input_linear.*            = [gate up]_proj.* : (gate + up) h
output_linear.*           = down_proj.*
[model.layers.{{l}}.mamba. = model.layers.{{l}}.mixer.]
{MAMBA2}
[model.layers.{{l}}.block_sparse_moe. = model.layers.{{l}}.mlp.]
input_linear.weight       = experts.{{e}}.[gate up]_proj.weight : e (gate + up) h
output_linear.weight      = experts.{{e}}.down_proj.weight      : e ...
experts.gate_up_proj      = experts.{{e}}.[gate up]_proj.weight : e (gate + up) h
experts.down_proj         = experts.{{e}}.down_proj.weight      : e ...
router.layer.weight       = gate.weight
router.weight             = gate.weight
...                       = ...
"""
SHARED_EXPERT = """
[model.layers.{l}.mlp.shared_expert. = model.layers.{l}.mlp.shared_experts.]
... = ...
"""
OUTPUT_GATE = """
[model.layers.{l}. = model.layers.{l}.]
self_attn.q_proj.*        = self_attn.[q g]_proj.* : (heads (q + g)) h
linear_attn.conv1d.*      = linear_attn.conv_[q k v].* : (q=linear_keys + k=linear_keys + v) ...
"""
"""Rows of queries and gates that alternate head by head."""

FURTHER = """
mtp.fc.*                  = mtp.{m}.eh_proj.*
mtp.pre_fc_norm_embedding.* = mtp.{m}.enorm.*
mtp.pre_fc_norm_hidden.*  = mtp.{m}.hnorm.*
mtp.norm.*                = mtp.{m}.norm.*
"""
"""Rows of layers that predict further tokens, where they are a module apart."""

FURTHER_GATED = f"""
{FURTHER}
[mtp.layers.{{m}}. = mtp.{{m}}.]
self_attn.q_proj.*        = self_attn.[q g]_proj.* : (heads (q + g)) h
mlp.experts.gate_up_proj  = mlp.experts.{{e}}.[gate up]_proj.weight : e (gate + up) h
mlp.experts.down_proj     = mlp.experts.{{e}}.down_proj.weight      : e ...
[mtp.layers.{{m}}.mlp.shared_expert. = mtp.{{m}}.mlp.shared_experts.]
...                       = ...
[mtp.layers.{{m}}. = mtp.{{m}}.]
...                       = ...
"""

BACKBONE = """
backbone.embeddings.*     = model.embed_tokens.*
backbone.norm_f.*         = model.norm.*
[backbone.layers.{l}. = model.layers.{l}.]
"""
FEED_FORWARD = """
pre_ff_layernorm.*        = post_attention_layernorm.*
[ = ]
model.final_layernorm.*   = model.norm.*
[model.layers.{l}.feed_forward. = model.layers.{l}.mlp.]
router.*                  = gate.*
...                       = ...
"""
LFM2 = f"""
model.embedding_norm.*    = model.norm.*
[model.layers.{{l}}. = model.layers.{{l}}.]
operator_norm.*           = input_layernorm.*
ffn_norm.*                = post_attention_layernorm.*
self_attn.out_proj.*      = self_attn.o_proj.*
conv.in_proj.*            = short_conv.in_[b c x].* : (b + c + x) h
conv....                  = short_conv....
[model.layers.{{l}}.feed_forward. = model.layers.{{l}}.mlp.]
w1.*                      = gate_proj.*
w3.*                      = up_proj.*
w2.*                      = down_proj.*
{NUMBERED}
expert_bias               = gate.e_score_correction_bias
...                       = ...
"""
GROUPED = """
transformer.word_embeddings.* = model.embed_tokens.*
transformer.ln_f.*        = model.norm.*
[transformer.h.{l}. = model.layers.{l}.]
self_attention.query_key_value.* = self_attn.[q k v]_proj.* : (groups (q=queries + k=keys + v=keys)) h
self_attention.dense.*    = self_attn.o_proj.*
mlp.dense_h_to_4h.*       = mlp.up_proj.*
mlp.dense_4h_to_h.*       = mlp.down_proj.*
...                       = ...
"""
"""Rows of groups: query heads, then a key and a value head."""

GLM = """
[model.layers.{l}. = model.layers.{l}.]
mlp.gate_up_proj.*        = mlp.[gate up]_proj.*     : (gate + up) h
"""

ROWS = {
    "phi3": DENSE,
    "glm": GLM,
    "glm4": GLM,
    "mixtral": SPARSE,
    "phimoe": SPARSE,
    "minimax_m2": SPARSE,
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "granitemoe_swa": GRANITE,
    "granitemoehybrid": GRANITE,
    "qwen2_moe": SHARED_EXPERT,
    "qwen3_next": f"""
{FURTHER_GATED}
{OUTPUT_GATE}
linear_attn.in_proj_qkvz.* = linear_attn.[q k v z].* :
    (key_heads (q=linear_keys + k=linear_keys + v=linear_values + z=linear_values)) h
linear_attn.in_proj_ba.*  = linear_attn.[b a].* : (key_heads (b + a)) h
{SHARED_EXPERT}
""",
    "qwen3_5": f"""
{FURTHER_GATED}
{OUTPUT_GATE}
linear_attn.in_proj_qkv.* = linear_attn.[q k v].* : (q=linear_keys + k=linear_keys + v) h
linear_attn.in_proj_z.*   = linear_attn.z.*
linear_attn.in_proj_b.*   = linear_attn.b.*
linear_attn.in_proj_a.*   = linear_attn.a.*
{SHARED_EXPERT}
""",
    "llama4": """
[model.layers.{l}. = model.layers.{l}.]
self_attn.q_proj.weight   = self_attn.[q_even q_odd]_proj.weight : (query_pairs (q_even + q_odd)) h
self_attn.k_proj.weight   = self_attn.[k_even k_odd]_proj.weight : (key_pairs (k_even + k_odd)) h
[model.layers.{l}.feed_forward. = model.layers.{l}.mlp.]
experts.gate_up_proj      = experts.{e}.[gate up]_proj.weight.T : e h (gate + up)
experts.down_proj         = experts.{e}.down_proj.weight.T      : e ...
router.*                  = gate.*
shared_expert....         = shared_experts....
...                       = ...
""",
    "afmoe": """
[model.layers.{l}.mlp. = model.layers.{l}.mlp.]
router.gate.*             = gate.*
""",
    "ernie4_5_moe": """
[model.layers.{l}.mlp. = model.layers.{l}.mlp.]
moe_statics.e_score_correction_bias = gate.e_score_correction_bias
[ = ]
model.mtp_emb_norm.{m}.*  = mtp.{m}.enorm.*
model.mtp_hidden_norm.{m}.* = mtp.{m}.hnorm.*
model.mtp_linear_proj.{m}.* = mtp.{m}.eh_proj.*
[model.mtp_block.{m}. = mtp.{m}.]
...                       = ...
""",
    "exaone_moe": f"""
{FURTHER}
[mtp.layers.{{m}}. = mtp.{{m}}.]
...                       = ...
""",
    "gpt_oss": """
[model.layers.{l}.mlp. = model.layers.{l}.mlp.]
experts.gate_up_proj      = experts.{e}.[gate up]_proj.weight.T : e h (ffn (gate + up))
experts.gate_up_proj_bias = experts.{e}.[gate up]_proj.bias     : e (ffn (gate + up))
experts.down_proj         = experts.{e}.down_proj.weight.T      : e ...
experts.down_proj_bias    = experts.{e}.down_proj.bias          : e ...
router.*                  = gate.*
""",
    "nemotron_h": f"""
{BACKBONE}
[mtp.layers.{{i}}. = mtp.{{m}}.layers.{{i}}.]
final_layernorm.*         = norm.*
norm.*                    = input_layernorm.*          ? self_attn.o_proj.weight
norm.*                    = input_layernorm.*          ? mixer.out_proj.weight
norm.*                    = post_attention_layernorm.* ? mlp.down_proj.weight
norm.*                    = post_attention_layernorm.* ? mlp.gate.weight
mixer.q_proj.*            = self_attn.q_proj.*
mixer.k_proj.*            = self_attn.k_proj.*
mixer.v_proj.*            = self_attn.v_proj.*
mixer.o_proj.*            = self_attn.o_proj.*
mixer.up_proj.*           = mlp.up_proj.*
mixer.down_proj.*         = mlp.down_proj.*
mixer.gate....            = mlp.gate....
mixer.experts....         = mlp.experts....
mixer.shared_experts....  = mlp.shared_experts....
mixer.fc1_latent_proj.... = mlp.fc1_latent_proj....
mixer.fc2_latent_proj.... = mlp.fc2_latent_proj....
enorm.*                   = enorm.*
hnorm.*                   = hnorm.*
eh_proj.*                 = eh_proj.*
[backbone.layers.{{l}}.mixer. = model.layers.{{l}}.mixer.]
{MAMBA2}
""",
    "mamba": f"""
{BACKBONE}
norm.*                    = input_layernorm.*
[backbone.layers.{{l}}.mixer. = model.layers.{{l}}.mixer.]
{MAMBA1}
""",
    "mamba2": f"""
{BACKBONE}
norm.*                    = input_layernorm.*
[backbone.layers.{{l}}.mixer. = model.layers.{{l}}.mixer.]
{MAMBA2}
""",
    "jamba": f"""
[model.layers.{{l}}.mamba. = model.layers.{{l}}.mixer.]
{MAMBA1}
[model.layers.{{l}}. = model.layers.{{l}}.]
{FEED_FORWARD}
""",
    "falcon_h1": f"""
[model.layers.{{l}}.mamba. = model.layers.{{l}}.mixer.]
{MAMBA2}
[model.layers.{{l}}. = model.layers.{{l}}.]
{FEED_FORWARD}
""",
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "falcon": GROUPED,
    "bloom": GROUPED,
    "gpt2": """
transformer.wte.weight    = model.embed_tokens.weight
transformer.wpe.weight    = model.position_embeddings.weight
transformer.ln_f.*        = model.norm.*
[transformer.h.{l}. = model.layers.{l}.]
ln_1.*                    = input_layernorm.*
ln_2.*                    = post_attention_layernorm.*
attn.c_attn.weight        = self_attn.[q k v]_proj.weight.T : h (q + k + v)
attn.c_attn.bias          = self_attn.[q k v]_proj.bias     : (q + k + v)
attn.c_proj.weight        = self_attn.o_proj.weight.T
attn.c_proj.bias          = self_attn.o_proj.bias
mlp.c_fc.weight           = mlp.up_proj.weight.T
mlp.c_fc.bias             = mlp.up_proj.bias
mlp.c_proj.weight         = mlp.down_proj.weight.T
mlp.c_proj.bias           = mlp.down_proj.bias
""",
    "gptj": """
transformer.wte.*         = model.embed_tokens.*
transformer.ln_f.*        = model.norm.*
[transformer.h.{l}. = model.layers.{l}.]
ln_1.*                    = input_layernorm.*
attn.out_proj.*           = self_attn.o_proj.*
attn....                  = self_attn....
mlp.fc_in.*               = mlp.up_proj.*
mlp.fc_out.*              = mlp.down_proj.*
""",
    "opt": """
model.decoder.embed_tokens.*     = model.embed_tokens.*
model.decoder.embed_positions.*  = model.position_embeddings.*
model.decoder.final_layer_norm.* = model.norm.*
[model.decoder.layers.{l}. = model.layers.{l}.]
self_attn_layer_norm.*    = input_layernorm.*
final_layer_norm.*        = post_attention_layernorm.*
self_attn.out_proj.*      = self_attn.o_proj.*
fc1.*                     = mlp.up_proj.*
fc2.*                     = mlp.down_proj.*
...                       = ...
""",
}
"""Rows of a kind of model, by its `model_type`."""

SAME = {"falcon_mamba": "mamba", "qwen3_5_moe": "qwen3_5"}
"""Kinds of model that store their tensors like another kind."""

LAST = """
[ = ]
... = ...
"""
"""Every other tensor has its own name."""

BY_KIND = {plain(kind): text for kind, text in ROWS.items()}
BY_KIND |= {plain(kind): ROWS[other] for kind, other in SAME.items()}


def table(kind: str, *, fused: bool = False) -> str:
    """Return, as text, the rules for how a Hugging Face checkpoint stores a model of type `kind`, such as "qwen3moe".
    With `fused`, add rules for fused tensors that can occur in any model, such as experts.gate_up_proj.

    `kind` is written as `plain` returns it. The last row stores all other tensors under their own names.
    """
    # Join rows that are written over several lines above: a table has one line per row.
    of_kind = BY_KIND.get(kind, "").replace(":\n    (", ": (")
    draft = "" if kind in DRAFTS_APART else DRAFT
    return f"{of_kind}{draft}{FUSED * fused}{LAST}"
