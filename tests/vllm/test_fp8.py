"""A refit makes FP8 tiles of bfloat16 weights in vLLM's own parameters, bit for bit as vLLM's own loader fills them
from a checkpoint of such tiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardmath import formats, transforms
from tests.distributed.pool import Pool
from tests.vllm import checkpoints, engine
from tests.vllm.cases import fields
from tests.vllm.tasks import refit

RANKS = 6
STEPS = 2
TIMEOUT_S = 200.0
TILES = formats.FP8Blocks()


def list_sizes(heads: int) -> dict[str, Any]:
    """Those of a model with so many heads of 64. vLLM asks for whole tiles of each projection on each of two ranks."""
    return {
        "hidden_size": 32 * heads,
        "intermediate_size": 64 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 64,
        "moe_intermediate_size": 32 * heads,
    }


CASES = [("qwen3", "source", 16), ("qwen3", "destination", 8), ("qwen3_moe", "destination", 8)]
"""Where is quantized, and heads. Trainers can where their quarters are whole tiles, which those of 8 heads are not."""


@pytest.mark.parametrize(("kind", "at", "heads"), CASES)
def test_fp8_parameters_are_those_that_vllm_loads(
    kind: str, at: Any, heads: int, tmp_path: Path
) -> None:
    model = fields(kind, **list_sizes(heads))
    held, loaded = [], []
    for seed in range(STEPS):
        folder = checkpoints.save(model, tmp_path / str(seed), seed)
        checkpoints.calibrate(folder, model["num_hidden_layers"], seed)
        held.append(folder)
        loaded.append(checkpoints.quantize(folder, tmp_path / f"{seed}-fp8", TILES))
    rules = {
        "*_proj.weight": transforms.Quantize(TILES, at),
        "*.self_attn.[kv]_scale": transforms.Cast("bfloat16"),
    }
    pool = Pool(RANKS)
    try:
        wrong = pool.run(refit, held, loaded, rules, timeout=TIMEOUT_S)
    finally:
        pool.close()
    assert wrong == [[[]] * STEPS] * RANKS


def test_only_its_kernel_keeps_vllm_from_building_fp8_tiles(tmp_path: Path) -> None:
    """What `engine.built` says in the kernel's place is needed where the processor has no AMX, and changes nothing."""
    folder = checkpoints.save(fields("qwen3", **list_sizes(8)), tmp_path / "held")
    quantized = checkpoints.quantize(folder, tmp_path / "fp8", TILES)
    with engine.built(quantized, tp=2) as model:
        built = list_parameters(model)
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    assert built[fused] == ((512, 256), torch.float8_e4m3fn)
    assert built[f"{fused}_scale_inv"] == ((4, 2), torch.float32)
    if torch.cpu._is_amx_tile_supported():
        with engine.built(quantized, tp=2, to_run=True) as model:
            assert list_parameters(model) == built
        return
    needed = "CPUFp8BlockScaledMMKernel requires AMX tile support"
    with pytest.raises(ValueError, match=needed), engine.built(quantized, tp=2, to_run=True):
        pass


def list_parameters(model: nn.Module) -> dict[str, Any]:
    """Shape and type of each."""
    return {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters()}
