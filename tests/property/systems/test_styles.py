"""Styles: kinds and dimensions of names; the table."""

from __future__ import annotations

import pytest

from shardmath.layouts.styles import KINDS, MODULES, dimension, kind


@pytest.mark.parametrize(
    ("name", "ndim", "expected"),
    [
        ("self_attn.q_proj.weight", 2, 0),
        ("self_attn.q_proj.bias", 1, 0),
        ("self_attn.o_proj.weight", 2, 1),
        ("self_attn.o_proj.bias", 1, None),
        ("mlp.experts.3.up_proj.weight", 2, 0),
        ("mlp.experts.3.up_proj.weight", 3, 1),
        ("mlp.experts.up_proj.weight", 3, 1),
        ("mlp.experts.down_proj.weight", 3, 2),
        ("mlp.experts.3.w2.weight", 2, 1),
        ("norm.weight", 1, None),
        ("self_attn.q_proj.weight", 0, None),
        ("self_attn.o_proj.weight", 0, None),
    ],
)
def test_dimension(name: str, ndim: int, expected: int | None) -> None:
    assert dimension(name, ndim) == expected


def test_kinds_of_both_models() -> None:
    """DeepSeek-V3's and Qwen3's names that a shorter end might take for others."""
    layer = "model.layers.3."
    assert {
        name: kind(layer + name)
        for name in (
            "self_attn.q_a_proj.weight",
            "self_attn.q_b_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
            "self_attn.kv_b_proj.weight",
            "self_attn.q_norm.weight",
            "self_attn.kv_a_layernorm.weight",
            "mlp.gate.weight",
            "mlp.gate.e_score_correction_bias",
            "mlp.shared_experts.gate_proj.weight",
            "mlp.shared_experts.down_proj.weight",
            "mlp.experts.255.gate_proj.weight",
            "mlp.experts.255.down_proj.weight",
        )
    } == {
        "self_attn.q_a_proj.weight": "replicate",
        "self_attn.q_b_proj.weight": "column",
        "self_attn.kv_a_proj_with_mqa.weight": "replicate",
        "self_attn.kv_b_proj.weight": "column",
        "self_attn.q_norm.weight": "replicate",
        "self_attn.kv_a_layernorm.weight": "replicate",
        "mlp.gate.weight": "replicate",
        "mlp.gate.e_score_correction_bias": "replicate",
        "mlp.shared_experts.gate_proj.weight": "column",
        "mlp.shared_experts.down_proj.weight": "row",
        "mlp.experts.255.gate_proj.weight": "column",
        "mlp.experts.255.down_proj.weight": "row",
    }


def test_numbers_do_not_change_the_kind() -> None:
    for end, expected in MODULES:
        assert kind(f"a.layers.3.b.{end}.weight") == kind(f"{end}.weight") == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "column"),
        ("model.layers.0.self_attn.k_proj.bias", "column"),
        ("model.layers.0.mlp.experts.17.down_proj.weight", "row"),
        ("model.layers.0.self_attn.o_proj.bias", "replicate"),
        ("model.embed_tokens.weight", "vocab"),
        ("lm_head.weight", "vocab"),
        ("lm_head.bias", "vocab"),
        ("lm_head.dense.weight", "replicate"),
        ("bert.encoder.layer.3.attention.self.query.weight", "column"),
        ("encoder.layer.3.attention.output.dense.weight", "row"),
        ("encoder.layer.3.attention.output.LayerNorm.weight", "replicate"),
        ("encoder.layer.3.intermediate.dense.bias", "column"),
        ("encoder.layer.3.output.dense.weight", "row"),
        ("embeddings.word_embeddings.weight", "vocab"),
        ("embeddings.position_embeddings.weight", "replicate"),
        ("pooler.dense.weight", "replicate"),
        ("model.layers.0.mlp.gate.weight", "replicate"),
        ("model.layers.0.self_attn.q_norm.weight", "replicate"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "replicate"),
        ("transformer.h.0.attn.c_attn.weight", "replicate"),
        ("transformer.wte.weight", "vocab"),
        ("weight", "replicate"),
        ("", "replicate"),
    ],
)
def test_kind(name: str, expected: str) -> None:
    assert kind(name) == expected


def test_every_row_of_the_table_is_reached() -> None:
    assert {kind(f"model.{end}.weight") for end, _ in MODULES} <= set(KINDS)
    assert all(kind(f"model.{end}.weight") == expected for end, expected in MODULES)
