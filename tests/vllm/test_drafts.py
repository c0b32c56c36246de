"""What vLLM's own `load_weights` stores of layers that predict further tokens, cell by cell, is what rows say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardmath_torch as smt
from shardmath.models.systems.hugging_face import hugging_face, logical_shapes
from shardmath.models.systems.vllm import vllm
from shardmath.storage import bind, fill, gather
from tests.vllm import checkpoints, engine
from tests.vllm.cases import SIZES, VOCAB, fields
from tests.vllm.test_recording import list_faults, number

HIDDEN = SIZES["hidden_size"]
ERNIE = {
    "model_type": "ernie4_5_moe",
    "head_dim": 8,
    "moe_num_experts": 6,
    "moe_k": 2,
    "moe_intermediate_size": 16,
    "moe_num_shared_experts": 1,
}
PROJECTION = {"norm": (HIDDEN,), "fc": (HIDDEN, 2 * HIDDEN)}
NORMS = {"enorm": (HIDDEN,), "hnorm": (HIDDEN,), "eh_proj": (HIDDEN, 2 * HIDDEN)}
TABLES = {"embed_tokens": (VOCAB, HIDDEN), "shared_head.head": (VOCAB, HIDDEN)}
CASES: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    "qwen3_next": (
        {"num_nextn_predict_layers": 1},
        "model.layers.1.",
        "mtp.layers.0.",
        {"mtp.pre_fc_norm_hidden": (HIDDEN,), "mtp.pre_fc_norm_embedding": (HIDDEN,)}
        | {f"mtp.{name}": shape for name, shape in PROJECTION.items()},
    ),
    "nemotron_h": (
        {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*"},
        "backbone.layers.1.",
        "mtp.layers.0.",
        {f"mtp.layers.0.{name}": shape for name, shape in NORMS.items()}
        | {"mtp.layers.0.final_layernorm": (HIDDEN,)},
    ),
    "glm4_moe": (
        {"num_nextn_predict_layers": 1},
        "model.layers.1.",
        "model.layers.2.",
        {f"model.layers.2.{name}": shape for name, shape in (NORMS | TABLES).items()}
        | {"model.layers.2.shared_head.norm": (HIDDEN,)},
    ),
    "ernie4_5_moe": (
        {"num_nextn_predict_layers": 1},
        "model.layers.0.",
        "model.mtp_block.0.",
        {"model.mtp_emb_norm.0": (HIDDEN,), "model.mtp_hidden_norm.0": (HIDDEN,)}
        | {"model.mtp_linear_proj.0": (HIDDEN, 2 * HIDDEN)},
    ),
}
"""Further fields of a configuration, the layer whose modules the draft has too, their names, and its other modules."""
READ_TWICE = ("lm_head.weight", "model.embed_tokens.weight")
"""What vLLM reads of glm's model first, and then its layer's own instead: a recording refuses cells written twice."""


def save(kind: str, folder: Path) -> tuple[dict[str, Any], checkpoints.Shapes]:
    """The configuration of a checkpoint, and its tensors with those of the draft, which transformers does not save."""
    more, copied, name, others = CASES[kind]
    given = {**SIZES, **ERNIE} if kind == "ernie4_5_moe" else fields(kind)
    checkpoints.save(given, folder)
    shapes = dict(checkpoints.shapes_of(folder))
    for tensor, entry in list(shapes.items()):
        if tensor.startswith(copied):
            shapes[name + tensor.removeprefix(copied)] = entry
    shapes |= {f"{module}.weight": (shape, "bfloat16") for module, shape in others.items()}
    file = folder / "config.json"
    config = json.loads(file.read_text()) | more
    file.write_text(json.dumps(config))
    if kind == "glm4_moe":
        shapes = {tensor: entry for tensor, entry in shapes.items() if tensor not in READ_TWICE}
    return config, shapes


@pytest.mark.parametrize("kind", CASES)
def test_recorded_drafts_are_declared(kind: str, tmp_path: Path) -> None:
    config, shapes = save(kind, tmp_path)
    numbers = number(shapes)
    logical = logical_shapes(config, shapes)
    stored = {0: {(0, name): array for name, array in numbers.items()}}
    arrays = gather(bind(hugging_face(config, shapes), logical), stored, [0])
    for tp in (1, 2, 4):
        side = vllm(config, ranks=range(tp), tp=tp, draft=True)
        declared = bind(side, logical, unused=("model.*", "lm_head.*"))
        for rank in range(tp):
            with engine.built(tmp_path, rank, tp, draft=True) as model:
                found = smt.record(model.load_weights, shapes, model, form="pairs").fill(numbers)
            wanted = {name: array for (_, name), array in fill(declared, arrays, rank).items()}
            assert list_faults(found, wanted) == [], f"TP {tp}, rank {rank}"
