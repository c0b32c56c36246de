"""Hugging Face checkpoints as rows: where a checkpoint's tensor is several logical tensors, or has another name.

1. Logical names are those of `megatron_rows`. Where `ROWS` has nothing for a kind of model, a checkpoint's names are
   the logical names.
2. `q=queries` is a component of so many positions. Components without a number have equal parts of what is left.

Source: transformers 5, `modeling_*.py` and `conversion_mapping.py`.

>>> print(table("gpt2").splitlines()[1])
transformer.wte.weight = model.embed_tokens.weight
"""

from __future__ import annotations

__all__ = ["table"]

FUSED = """
[model.layers.{l}. = model.layers.{l}.]
self_attn.qkv_proj.* = self_attn.[q k v]_proj.* : (q=queries + k=keys + v=keys) h
mlp.gate_up_proj.*   = mlp.[gate up]_proj.*     : (gate + up) h
"""

ROWS = {
    "phi3": FUSED,
    "mixtral": """
[model.layers.{l}.block_sparse_moe. = model.layers.{l}.mlp.]
experts.{e}.w1.* = experts.{e}.gate_proj.*
experts.{e}.w3.* = experts.{e}.up_proj.*
experts.{e}.w2.* = experts.{e}.down_proj.*
...              = ...
""",
    "gpt_oss": """
[model.layers.{l}.mlp. = model.layers.{l}.mlp.]
experts.gate_up_proj      = experts.{e}.[gate up]_proj.weight.T : e h (ffn (gate + up))
experts.gate_up_proj_bias = experts.{e}.[gate up]_proj.bias     : e (ffn (gate + up))
experts.down_proj         = experts.{e}.down_proj.weight.T      : e ...
experts.down_proj_bias    = experts.{e}.down_proj.bias          : e ...
router.*                  = gate.*
""",
    "deepseek_v3": """
[model.layers.{m}. = mtp.{m}.]
shared_head.norm.* = norm.*
...                = ...
""",
    "nemotron_h": """
backbone.embeddings.* = model.embed_tokens.*
backbone.norm_f.*     = model.norm.*
[backbone.layers.{l}. = model.layers.{l}.]
norm.*                = input_layernorm.*          ? self_attn.o_proj.weight
norm.*                = input_layernorm.*          ? mixer.out_proj.weight
norm.*                = post_attention_layernorm.* ? mlp.down_proj.weight
norm.*                = post_attention_layernorm.* ? mlp.gate.weight
mixer.q_proj.*        = self_attn.q_proj.*
mixer.k_proj.*        = self_attn.k_proj.*
mixer.v_proj.*        = self_attn.v_proj.*
mixer.o_proj.*        = self_attn.o_proj.*
mixer.in_proj.*       = mixer.[z x B C dt].*       : (z=inner + x=inner + B=state + C=state + dt) h
mixer.conv1d.*        = mixer.conv_[x B C].*       : (x=inner + B=state + C=state) ...
mixer.up_proj.*       = mlp.up_proj.*
mixer.down_proj.*     = mlp.down_proj.*
mixer.gate....        = mlp.gate....
mixer.experts....     = mlp.experts....
mixer.shared_experts.... = mlp.shared_experts....
...                   = ...
""",
    "gpt2": """
transformer.wte.weight = model.embed_tokens.weight
transformer.wpe.weight = model.position_embeddings.weight
transformer.ln_f.*     = model.norm.*
[transformer.h.{l}. = model.layers.{l}.]
ln_1.*                 = input_layernorm.*
ln_2.*                 = post_attention_layernorm.*
attn.c_attn.weight     = self_attn.[q k v]_proj.weight.T : h (q + k + v)
attn.c_attn.bias       = self_attn.[q k v]_proj.bias     : (q + k + v)
attn.c_proj.weight     = self_attn.o_proj.weight.T
attn.c_proj.bias       = self_attn.o_proj.bias
mlp.c_fc.weight        = mlp.up_proj.weight.T
mlp.c_fc.bias          = mlp.up_proj.bias
mlp.c_proj.weight      = mlp.down_proj.weight.T
mlp.c_proj.bias        = mlp.down_proj.bias
""",
}
"""Rows of a kind of model, by its `model_type`."""

LAST = """
[ = ]
... = ...
"""
"""Every other tensor has its own name."""


def table(kind: str) -> str:
    """The rows of a kind of model, and the last one, which stores all else under its own name."""
    return ROWS.get(kind, "") + LAST
