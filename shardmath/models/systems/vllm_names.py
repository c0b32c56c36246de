"""vLLM's names: a kind of model's names for its modules, and the modules on every pipeline stage.

Renamed parts of names include their dots, so that `.mlp.` does not match `.shared_mlp.`.

>>> rename("mixtral", "model.layers.{l}.mlp.gate.*")
'model.layers.{l}.block_sparse_moe.gate.*'
>>> everywhere("mixtral"), everywhere("lfm2"), everywhere("llama")
(['embed_tokens', 'lm_head', 'norm', 'position_embeddings'], ['embed_tokens'], [])
"""

from __future__ import annotations

from shardmath.models.systems.config import plain

__all__ = ["everywhere", "rename"]

WHOLE_STAGES = """
bloom cohere cohere2 falcon falcon_mamba gemma gemma2 gemma3 gpt2 gpt_oss gptj granitemoe granitemoeshared
granitemoehybrid jamba mamba mamba2 mixtral nemotron_h olmoe opt phimoe qwen2_moe qwen3_moe stablelm
"""
"""Kinds of model with the first and the last modules on every pipeline stage, needed or not."""

FIRST_EVERYWHERE = "lfm2 lfm2_moe qwen3_5 qwen3_5_moe qwen3_next"
"""Kinds of model with the embedding on every stage."""

LAST_EVERYWHERE = "qwen3_next"
"""Kinds of which each stage has the head."""

SPARSE = ((".mlp.", ".block_sparse_moe."),)
GRANITE = (
    (".mlp.shared_experts.gate_up_proj.", ".shared_mlp.input_linear."),
    (".mlp.shared_experts.down_proj.", ".shared_mlp.output_linear."),
    (".mlp.", ".block_sparse_moe."),
    (".mixer.", ".mamba."),
)
SHARED_EXPERT = ((".mlp.shared_experts.", ".mlp.shared_expert."),)
BACKBONE = (
    ("model.embed_tokens.", "backbone.embeddings."),
    ("model.norm.", "backbone.norm_f."),
    ("model.layers.", "backbone.layers."),
    (".input_layernorm.", ".norm."),
)
FEED_FORWARD = (
    ("model.norm.", "model.final_layernorm."),
    (".post_attention_layernorm.", ".pre_ff_layernorm."),
    (".mlp.gate.", ".feed_forward.router."),
    (".mlp.", ".feed_forward."),
)
LFM2 = (
    ("model.norm.", "model.embedding_norm."),
    (".input_layernorm.", ".operator_norm."),
    (".post_attention_layernorm.", ".ffn_norm."),
    (".self_attn.o_proj.", ".self_attn.out_proj."),
    (".mlp.gate_up_proj.", ".feed_forward.w13."),
    (".mlp.down_proj.", ".feed_forward.w2."),
    (".mlp.", ".feed_forward."),
)
GROUPED = (
    ("model.embed_tokens.", "transformer.word_embeddings."),
    ("model.norm.", "transformer.ln_f."),
    ("model.layers.", "transformer.h."),
    (".self_attn.qkv_proj.", ".self_attention.query_key_value."),
    (".self_attn.o_proj.", ".self_attention.dense."),
    (".mlp.up_proj.", ".mlp.dense_h_to_4h."),
    (".mlp.down_proj.", ".mlp.dense_4h_to_h."),
)

RENAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "mixtral": SPARSE,
    "phimoe": SPARSE,
    "minimax_m2": ((".mlp.gate.e_score_", ".block_sparse_moe.e_score_"), *SPARSE),
    "granitemoe": GRANITE,
    "granitemoeshared": GRANITE,
    "granitemoe_swa": GRANITE,
    "granitemoehybrid": GRANITE,
    "mellum": ((".mlp.gate.", ".mlp.experts.gate."),),
    "qwen2_moe": SHARED_EXPERT,
    "qwen3_next": SHARED_EXPERT,
    "qwen3_5": SHARED_EXPERT,
    "qwen3_5_moe": SHARED_EXPERT,
    "llama4": (
        (".mlp.gate.", ".feed_forward.router."),
        (".mlp.shared_experts.", ".feed_forward.shared_expert."),
        (".mlp.", ".feed_forward."),
    ),
    "gpt_oss": (
        (".self_attn.", ".attn."),
        ("model.embed_tokens.", "model.embedding."),
        (".mlp.gate.", ".mlp.router."),
    ),
    "nemotron_h": (
        ("model.norm.", "model.norm_f."),
        (".input_layernorm.", ".norm."),
        (".post_attention_layernorm.", ".norm."),
        (".self_attn.", ".mixer."),
        (".mlp.", ".mixer."),
    ),
    "mamba": BACKBONE,
    "falcon_mamba": BACKBONE,
    "mamba2": BACKBONE,
    "jamba": ((".self_attn.", "."), (".mixer.", ".mamba."), *FEED_FORWARD),
    "falcon_h1": ((".mixer.", ".mamba.mamba."), *FEED_FORWARD),
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "falcon": GROUPED,
    "bloom": GROUPED,
    "gpt2": (
        ("model.embed_tokens.", "transformer.wte."),
        ("model.position_embeddings.", "transformer.wpe."),
        ("model.norm.", "transformer.ln_f."),
        ("model.layers.", "transformer.h."),
        (".input_layernorm.", ".ln_1."),
        (".post_attention_layernorm.", ".ln_2."),
        (".self_attn.qkv_proj.", ".attn.c_attn."),
        (".self_attn.o_proj.", ".attn.c_proj."),
        (".mlp.up_proj.", ".mlp.c_fc."),
        (".mlp.down_proj.", ".mlp.c_proj."),
    ),
    "gptj": (
        ("model.embed_tokens.", "transformer.wte."),
        ("model.norm.", "transformer.ln_f."),
        ("model.layers.", "transformer.h."),
        (".input_layernorm.", ".ln_1."),
        (".self_attn.o_proj.", ".attn.out_proj."),
        (".self_attn.", ".attn."),
        (".mlp.up_proj.", ".mlp.fc_in."),
        (".mlp.down_proj.", ".mlp.fc_out."),
    ),
    "opt": (
        ("model.embed_tokens.", "model.decoder.embed_tokens."),
        ("model.position_embeddings.", "model.decoder.embed_positions."),
        ("model.norm.", "model.decoder.final_layer_norm."),
        ("model.layers.", "model.decoder.layers."),
        (".input_layernorm.", ".self_attn_layer_norm."),
        (".post_attention_layernorm.", ".final_layer_norm."),
        (".self_attn.o_proj.", ".self_attn.out_proj."),
        (".mlp.up_proj.", ".fc1."),
        (".mlp.down_proj.", ".fc2."),
    ),
}
"""(old, new) parts of names by kind of model, replaced in this order."""

BY_KIND = {plain(kind): renames for kind, renames in RENAMES.items()}
EVERYWHERE: dict[str, set[str]] = {
    "embed_tokens": {plain(kind) for kind in f"{WHOLE_STAGES} {FIRST_EVERYWHERE}".split()},
    "position_embeddings": {plain(kind) for kind in WHOLE_STAGES.split()},
    "norm": {plain(kind) for kind in WHOLE_STAGES.split()},
    "lm_head": {plain(kind) for kind in f"{WHOLE_STAGES} {LAST_EVERYWHERE}".split()},
}
"""The kinds of model with a module on every stage, by the module's name."""


def rename(kind: str, name: str) -> str:
    """Return how vLLM's models of type `kind` name the module or tensor that most vLLM models call `name`, such as
    model.norm.weight."""
    for old, new in BY_KIND.get(plain(kind), ()):
        name = name.replace(old, new)
    return name


def everywhere(kind: str) -> list[str]:
    """List, sorted, the modules before and after all layers, such as lm_head, that vLLM puts on every pipeline stage.

    `kind` is the model type.
    """
    return sorted(name for name, kinds in EVERYWHERE.items() if plain(kind) in kinds)
