"""The refit table's rows in FP8 with models of a few hundred numbers, on workers. No pytest here."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from bench.mappings import Engine, Row, Trainer
from bench.models import GATED, Model, shapes_of
from bench.table import make_refit
from shardmath import formats
from shardmath.storage import fill
from shardmath.values.formats.casting import cast_array
from tests.distributed.tasks.fp8 import KINDS, compare, to_tensor

TILES = formats.FP8Blocks((4, 4))

DENSE = {
    **GATED,
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "ffn_hidden_size": 32,
    "qk_layernorm": True,
}
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "moe_grouped_gemm": True}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 4,
    "q_lora_rank": 8,
    # 8 + 2 rows are two tiles and half a one, as DeepSeek's 576 are 4.5 of 128.
    "kv_lora_rank": 8,
    "qk_pos_emb_head_dim": 2,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_shared_expert_intermediate_size": 8,
    "moe_router_enable_expert_bias": True,
}

MODELS = {
    "dense": Model("qwen3", DENSE, 72, tied=True, tiles=TILES),
    "experts": Model("qwen3_moe", {**DENSE, **EXPERTS}, 72, tiles=TILES),
    "latent": Model("deepseek_v3", {**DENSE, **EXPERTS, **LATENT}, 72, tiles=TILES),
}

ROWS = (
    Row("dense", Trainer(4), Engine(copies=4)),
    Row("dense", Trainer(4, pp=2), Engine(tp=4)),
    Row("dense", Trainer(4, pp=4), Engine(tp=4)),
    Row("dense", Trainer(4, tp=2, pp=2), Engine(tp=4)),
    Row("dense", Trainer(4, tp=2), Engine(tp=2, copies=2)),
    Row("experts", Trainer(4, tp=2, pp=2, ep=2), Engine(tp=2, copies=2)),
    Row("experts", Trainer(4, pp=2, ep=2), Engine(tp=2, copies=2)),
    Row("experts", Trainer(4, ep=4), Engine(tp=2, copies=2)),
    Row("latent", Trainer(4, tp=2, pp=2, ep=2), Engine(tp=2, copies=2)),
)
"""Rows of the table with as many ranks as there are workers, and DeepSeek's attention."""

Arrays = dict[str, Any]


def plan(row: Row) -> sm.Refit:
    """The refit of a row, of its small model."""
    return make_refit(row, MODELS[row.model])


def draw(row: Row, seed: int) -> Arrays:
    """Logical tensors as a trainer has them, each of numbers of a magnitude of its own."""
    random = np.random.default_rng(seed)
    drawn = {}
    for name, (shape, dtype) in shapes_of(MODELS[row.model]).items():
        values = (random.standard_normal(shape) * 10 ** random.uniform(-3, 3)).astype(np.float32)
        drawn[name] = cast_array(values, "float32", dtype)
    return drawn


def serve(arrays: Arrays) -> Arrays:
    """What an engine is to have of them: each linear layer quantized whole."""
    served = dict(arrays)
    for name, array in arrays.items():
        if fnmatchcase(name, "*_proj*.weight"):
            numbers = cast_array(array, "bfloat16", "float32")
            served[name], served[f"{name}_scale_inv"] = TILES.quantize(numbers)
    return served


def store(side: Any, arrays: Arrays, rank: int) -> dict[str, Tensor]:
    """What the rank of a side stores of these logical tensors."""
    filled = fill(side, arrays, rank)
    return {name: to_tensor(array, KINDS[str(array.dtype)]) for (_, name), array in filled.items()}


def steps(rank: int, number: int) -> list[Any]:
    """What differs from the reference after each of two steps, and how many tensors and scales were compared."""
    row = ROWS[number]
    planned = plan(row)
    refit = smt.Refit(planned, timeout=30.0)
    src = store(planned.trainer, draw(row, 0), rank) if rank in planned.trainer.ranks else None
    mine = {name: side for name, side in planned.engines.items() if rank in side.ranks}
    zeros = serve({name: array * 0 for name, array in draw(row, 0).items()})
    # Scales of zeros are ones, and would be right by chance where nothing comes.
    dst = {}
    for name, side in mine.items():
        dst[name] = store(side, {n: array * 0 for n, array in zeros.items()}, rank)
    if src is None and len(planned.engines) == 1:
        refit.prepare(None, *dst.values())
    else:
        refit.prepare(src, dst)
    found: list[Any] = []
    compared: list[str] = []
    for seed in range(2):
        arrays = draw(row, seed)
        if src is not None:
            for name, tensor in store(planned.trainer, arrays, rank).items():
                src[name].copy_(tensor)
        refit(acknowledge=True)
        for name, side in mine.items():
            wanted = store(side, serve(arrays), rank)
            compared = list(wanted)
            found += compare(dst[name], wanted)
    return [found, compared]
