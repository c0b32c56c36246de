"""What a rank says that it holds of Megatron's model: every virtual stage, each tensor's own dtype, and its names."""

from __future__ import annotations

from typing import Any

import pytest

import shardmath_vllm as sv
from shardmath.models.systems.megatron import logical_shapes, megatron
from shardmath_vllm.source import read_source
from tests.distributed.pool import Pool
from tests.distributed.tasks.sources import CONFIG, SIZES, VOCAB, read, read_norms, read_wrong

BIAS = "model.layers.3.mlp.gate.e_score_correction_bias"
NORM = "model.layers.{}.input_layernorm.weight"
UP = "model.layers.0.mlp.experts.3.up_proj.weight"


def test_each_virtual_stage_has_its_own_tensors(pool: Pool) -> None:
    seen = pool.run(read, "qwen3_moe", None)
    side = megatron(CONFIG, ranks=range(8), vocab=VOCAB, **SIZES)
    shapes = logical_shapes(CONFIG, vocab=VOCAB)
    for rank, one in enumerate(seen):
        assert one.own
        assert one.told.side == side
        assert {name: shape for name, (shape, _) in one.told.shapes.items()} == {
            name: shape for name, (shape, _) in shapes.items()
        }
        first, last = rank < 4, rank >= 4
        assert ("embedding.word_embeddings.weight" in one.chunks[0]) == first
        assert ("output_layer.weight" in one.chunks[1]) == last
        assert "decoder.layers.0.mlp.router.expert_bias" in one.chunks[0]


def test_ranks_say_of_which_dtypes_their_tensors_are(pool: Pool) -> None:
    for dtype in (None, "float16"):
        seen = pool.run(read, "qwen3_moe", dtype)
        # Layers fall to stages in turn: 0 and 2 to the first.
        held = [seen[0].told.shapes[NORM.format(layer)][1] for layer in range(4)]
        assert held == ["bfloat16", "float32", "bfloat16", "float32"]
        assert seen[0].told.shapes[BIAS][1] == seen[0].told.served[BIAS][1] == "float32"
        assert seen[0].told.served[UP][1] == (dtype or "bfloat16")
        assert seen[0].told.served[NORM.format(1)][1] == (dtype or "float32")
        assert all(one.told == seen[0].told for one in seen)


def test_loaders_get_a_checkpoints_names(pool: Pool) -> None:
    assert pool.run(read, "qwen3_moe", None)[0].told.checkpoint is None
    recorded = pool.run(read, "mixtral", "float16")[0].told.checkpoint
    names = {native.pieces[0].tensor: native for native in recorded.natives}
    assert names[UP].name == "model.layers.0.block_sparse_moe.experts.3.w3.weight"
    assert names[UP].dtype == "float16"


def test_a_source_says_itself_what_engines_get() -> None:
    source = sv.Source({}, {}, {})
    assert read_source(source) is source
    what = (
        "dtype='float16' is given with a Source, which sets the engines' dtypes by served=; leave"
    )
    with pytest.raises(ValueError, match=what):
        read_source(source, "float16")


CENTERED = {"layernorm_zero_centered_gamma": True}
DELTA = {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2}


@pytest.mark.parametrize(
    ("kind", "changes", "norms", "why"),
    [
        ("qwen3_moe", {}, "check", ""),
        ("qwen3_moe", CENTERED, "check", "norms less one, and checkpoints of 'qwen3moe' whole"),
        ("qwen3_moe", CENTERED, "keep", ""),
        ("gemma3_text", CENTERED, "check", ""),
        ("gemma3_text", {}, "check", "stores norms whole, and checkpoints of 'gemma3' less one"),
        ("gemma3_text", {}, "keep", ""),
        ("gemma3_text", {}, "whole", "norms='whole' is not known; use one of check, keep"),
        ("qwen3_next", DELTA, "check", "norms whole, and checkpoints of 'qwen3next' less one"),
        ("qwen3_next", DELTA | CENTERED, "check", "'model.layers.0.linear_attn.norm.weight' less"),
    ],
)
def test_norms_are_stored_as_in_checkpoints_of_the_kind(
    pool: Pool, kind: str, changes: dict[str, Any], norms: str, why: str
) -> None:
    for said in pool.run(read_norms, kind, changes, norms):
        assert why in said and bool(why) == bool(said)


def test_a_hybrid_models_pattern_divides_it_among_stages(pool: Pool) -> None:
    """A segment for each chunk of a stage; learned positions are beside the embedding."""
    seen = pool.run(read, "qwen3_moe", None, {}, "check", "*E||-|*")
    held = [
        {name.split(".")[2] for name in names if name.startswith("decoder.layers.")}
        for rank in (0, 4)
        for names in seen[rank].chunks
    ]
    assert held == [{"0", "1"}, {"0"}, set(), {"0"}]
    assert all(one.own for one in seen)
    assert "decoder.final_norm.weight" in seen[4].chunks[1]
    assert "model.position_embeddings.weight" in seen[4].told.shapes


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (0, "TypeError: chunks= is empty, where modules are needed; pass a GPTModel"),
        (1, "TypeError: chunks= is int, where modules are needed; pass a GPTModel"),
        (2, "TypeError: Linear has no Megatron-Core config (a TransformerConfig); pass a"),
        (3, "StoreError: config= is dict with vocab_size=None, where an integer is needed"),
    ],
)
def test_what_is_no_model_of_megatrons(pool: Pool, number: int, why: str) -> None:
    assert all(said[number].startswith(why) for said in pool.run(read_wrong))
