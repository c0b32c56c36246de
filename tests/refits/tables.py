"""Tables: an engine's rows written by hand, and a trainer's configuration, shared by tests of refits.

>>> from shardmath.storage import parse
>>> print(parse(ENGINE)[0])
model.embed_tokens.weight = model.embed_tokens.weight : (tp n=vocab) h
"""

from __future__ import annotations

__all__ = ["CONFIG", "ENGINE"]

CONFIG = {
    "num_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 16,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 4,
    "moe_layer_freq": [0, 1],
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
}

ENGINE = """
model.embed_tokens.weight     = model.embed_tokens.weight     : (tp n=vocab) h
lm_head.weight                = lm_head.weight                : (tp n=vocab) h
model.norm.*                  = model.norm.*
[model.layers.{l}. = model.layers.{l}.]
input_layernorm.*             = input_layernorm.*
post_attention_layernorm.*    = post_attention_layernorm.*
self_attn.qkv_proj.*          = self_attn.[q k v]_proj.*      : (tp q hd + tp/rep k hd + tp/rep v hd) h
self_attn.o_proj.*            = self_attn.o_proj.*            : h (tp n hd)
self_attn.fused_qkv_a_proj.*  = self_attn.[q_a_proj kv_a_proj_with_mqa].* : (q_a_proj + kv_a_proj_with_mqa) h
self_attn.q_a_layernorm.*     = self_attn.q_a_layernorm.*
self_attn.kv_a_layernorm.*    = self_attn.kv_a_layernorm.*
self_attn.q_b_proj.*          = self_attn.q_b_proj.*          : (tp n) h
self_attn.kv_b_proj.*         = self_attn.kv_b_proj.*         : (tp n) h
mlp.gate_up_proj.*            = mlp.[gate up]_proj.*          : (tp (gate + up)) h
mlp.down_proj.*               = mlp.down_proj.*               : h (tp n)
mlp.gate.*                    = mlp.gate.*
mlp.gate.e_score_correction_bias  = mlp.gate.e_score_correction_bias
mlp.shared_experts.gate_up_proj.* = mlp.shared_experts.[gate up]_proj.* : (tp (gate + up)) h
mlp.shared_experts.down_proj.*    = mlp.shared_experts.down_proj.*      : h (tp n)
mlp.experts.w13_weight        = mlp.experts.{e}.[gate up]_proj.weight : e (tp (gate + up)) h
mlp.experts.w2_weight         = mlp.experts.{e}.down_proj.weight : e h (tp n)
"""
"""Dense or latent attention, dense or routed MLPs: what a model has decides which rows apply."""
