"""What rows say, as a recording: the same cells hold the same elements as where the slow oracle fills them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import shardmath as sm
from shardmath.models.recordings.declared import record_declared
from shardmath.models.recordings.recorded import label
from shardmath.models.storage.stored import Shapes
from shardmath.models.systems.hugging_face import hugging_face
from shardmath.models.systems.megatron import logical_shapes, megatron
from shardmath.storage import Stored, bind, fill, parse

DENSE = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
MIXED = DENSE | {"num_moe_experts": 4, "attention_output_gate": True}
HYBRID = DENSE | {"is_hybrid_model": True, "mamba_num_heads": 4, "mamba_head_dim": 8}
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "hidden_size": 16,
}
VOCAB = 10
MEGATRON: dict[str, tuple[dict[str, Any], str | None, dict[str, Any]]] = {
    "dense": (DENSE, None, {"tp": 2, "pp": 2, "vpp": 2}),
    # Query rows only on some ranks.
    "more ranks than groups": (DENSE, None, {"tp": 4}),
    "experts": (MIXED, None, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    "experts in one tensor": (MIXED, None, {"ep": 2, "experts": "legacy", "spec": "local"}),
    "hybrid": (HYBRID, "M*-M", {"tp": 2}),
}
KINDS = ["llama", "mixtral", "gpt_oss", "qwen3_next", "phi3", "llama4"]


def check(side: Stored, shapes: Shapes) -> None:
    """Every rank of the side, cell by cell."""
    bound = bind(side, shapes)
    start = 1
    arrays = {}
    for name, (shape, _) in shapes.items():
        stop = start + math.prod(shape)
        arrays[name] = np.arange(start, stop).reshape(shape)
        start = stop
    for rank in bound.ranks:
        recorded = record_declared(bound, shapes, rank)
        assert recorded.shapes == dict(shapes)
        found = recorded.fill(arrays, empty=-1)
        wanted = fill(bound, arrays, rank, empty=-1)
        assert found.keys() == {label(*native) for native in wanted}
        for native, array in wanted.items():
            assert np.array_equal(found[label(*native)], array), native


@pytest.mark.parametrize("name", MEGATRON)
def test_a_recording_of_megatrons_rows_fills_what_they_fill(name: str) -> None:
    config, pattern, sizes = MEGATRON[name]
    shapes = logical_shapes(config, vocab=VOCAB, pattern=pattern)
    check(megatron(config, ranks=range(8), vocab=VOCAB, vocab_multiple=4, **sizes), shapes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_of_a_checkpoints_rows_fills_what_they_fill(kind: str) -> None:
    config = HEADS | {"model_type": kind}
    shapes: Shapes = logical_shapes(DENSE | {"num_moe_experts": 4}, vocab=VOCAB)
    if kind == "qwen3_next":
        shapes = logical_shapes(MIXED, vocab=VOCAB)
    if kind == "llama4":
        # Rotary halves that are stored in turns.
        shapes = {
            f"model.layers.0.self_attn.q_{half}_proj.weight": ((8, 16), "float32")
            for half in ("even", "odd")
        }
    check(hugging_face(config), shapes)


def test_a_function_is_kept() -> None:
    side = Stored(parse("A = neg_exp(A_log)"), (sm.Mesh(),))
    shapes: Shapes = {"A_log": ((4,), "float32")}
    (native,) = record_declared(bind(side, shapes), shapes, 0).natives
    assert (native.function, native.way, native.unwritten) == ("neg_exp", "rows", 0)
