"""The scales of FP8 tiles that vLLM's own loader stores are those that rows say, also where ranks would cut tiles."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from vllm.model_executor.layers.fused_moe.oracle import fp8 as oracle
from vllm.model_executor.layers.quantization import fp8

from shardmath import formats
from shardmath.models.systems.hugging_face import hugging_face, logical_shapes
from shardmath.models.systems.vllm import expert_tile, vllm
from shardmath.storage import bind, fill, gather
from tests.vllm import checkpoints, engine
from tests.vllm.cases import fields
from tests.vllm.test_recording import number

TILES = formats.FP8Blocks()
QUANTIZED = ("_proj.weight", "kv_a_proj_with_mqa.weight", "in_proj_qkvz.weight")
SCALES = re.compile(r"\.experts\.\d+\..*_scale_inv$")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 384,
}
"""Experts of three tiles, which two and four ranks cut; every linear layer has whole tiles on four."""
LINEAR = {
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "shared_expert_intermediate_size": 512,
}
LATENT = {"head_dim": None, "num_key_value_heads": 8, "q_lora_rank": 128, "n_shared_experts": 4}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_moe": SIZES,
    "qwen3_next": SIZES | LINEAR,
    "deepseek_v3": SIZES | LATENT,
}


def save(kind: str, folder: Path) -> tuple[dict[str, Any], checkpoints.Shapes]:
    """An FP8 checkpoint's configuration, and its tensors."""
    held = checkpoints.save(fields(kind, **CASES[kind]), folder / "held")
    tensors = {}
    others = []
    for name, tensor in checkpoints.read(held):
        tensors[name] = tensor
        if name.endswith(QUANTIZED):
            data, scales = TILES.quantize(tensor.float().numpy())
            tensors[name] = torch.from_numpy(data).view(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.from_numpy(scales)
        elif name.endswith(".weight"):
            others.append(name.removesuffix(".weight"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((held / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": list(TILES.block),
        "activation_scheme": "dynamic",
        "modules_to_not_convert": others,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }
    return config, shapes


def load(folder: Path, shapes: checkpoints.Shapes, rank: int, tp: int) -> dict[str, Any]:
    """The scales that the rank stores, which are numbers of elements. Data are zeros."""
    given = []
    for name, array in number(shapes).items():
        _, dtype = shapes[name]
        is_scale = name.endswith("_scale_inv")
        tensor = torch.from_numpy(array).float() if is_scale else torch.zeros(array.shape)
        given.append((name, tensor.to(getattr(torch, dtype))))
    with engine.built(folder, rank, tp, device="cpu") as model:
        model.load_weights(given)
        parameters = dict(model.named_parameters())
    stored = {}
    for name, parameter in parameters.items():
        if name.endswith("_scale_inv"):
            stored[name] = parameter.detach().numpy().astype(np.int64)
    return stored


def declare(
    config: dict[str, Any], shapes: checkpoints.Shapes, rank: int, tp: int, backend: str = "triton"
) -> dict[str, Any]:
    """The scales that the rank stores by rows. Those of experts are repeated, as vLLM reads them."""
    logical = logical_shapes(config, shapes)
    stored = {0: {(0, name): array for name, array in number(shapes).items()}}
    arrays = gather(bind(hugging_face(config, shapes), logical), stored, [0])
    rows, _ = expert_tile(config, tp=tp, backend=backend) or TILES.block
    times = TILES.block[0] // rows
    for name, array in arrays.items():
        if SCALES.search(name):
            arrays[name] = array.repeat(times, 0).repeat(times, 1)
            logical[name] = arrays[name].shape, "float32"
    side = vllm(config, ranks=range(tp), tp=tp, backend=backend)
    filled = fill(bind(side, logical), arrays, rank)
    return {name: array for (_, name), array in filled.items() if name.endswith("_scale_inv")}


@pytest.mark.parametrize("kind", CASES)
def test_loaded_scales_are_declared(kind: str, tmp_path: Path) -> None:
    config, shapes = save(kind, tmp_path)
    for tp in (1, 2, 4):
        for rank in range(tp):
            found = load(tmp_path, shapes, rank, tp)
            wanted = declare(config, shapes, rank, tp)
            assert found.keys() == wanted.keys()
            wrong = [
                name for name, array in found.items() if not np.array_equal(array, wanted[name])
            ]
            assert wrong == [], f"TP {tp}, rank {rank}"


def test_scales_of_whole_tiles_are_declared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a backend that reads no other tiles gets, such as DeepGEMM, which cannot be chosen without a GPU."""

    def pad(config: Any, tile: list[int], *others: Any) -> tuple[list[int], None]:
        oracle.pad_tp_shard_to_weight_blocks(config, tile)
        return tile, None

    monkeypatch.setattr(fp8, "resolve_fp8_moe_weight_block_shape", pad)
    config, shapes = save("qwen3_moe", tmp_path)
    for rank in range(4):
        found = load(tmp_path, shapes, rank, 4)
        wanted = declare(config, shapes, rank, 4, backend="deep_gemm")
        for name, array in found.items():
            # The scale of a tile of padding is 1, and here a cell without an element 0.
            padding = wanted[name] == 0
            assert np.array_equal(np.where(padding, 1, wanted[name]), array), name
        assert any((array == 1).all() for array in found.values()) == (rank == 3)
