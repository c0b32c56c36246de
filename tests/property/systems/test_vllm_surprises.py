"""More of what surprises in how vLLM stores weights: names that vanish, faults of loaders, scales in a block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import shardmath as sm
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill, gather
from shardmath.models.systems.hugging_face import hugging_face, logical_shapes
from shardmath.models.systems.vllm import expert_tile, vllm
from tests.refits.carrying import LAYER, Arrays, number

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 100,
    "num_experts": 6,
    "num_local_experts": 6,
    "intermediate_size": 4,
}
STACKED = f"{LAYER}mlp.experts.routed_experts.w2_weight"


def experts(kind: str = "weight") -> Arrays:
    names = [f"{LAYER}mlp.experts.{e}.down_proj.{kind}" for e in range(6)]
    return number(dict.fromkeys(names, ((4, 4), "int64")))


def store(kind: str, arrays: Mapping[str, Any], rank: int, tp: int, ep: bool = False) -> Arrays:
    """What a rank stores of the logical arrays."""
    side = vllm({**CONFIG, "model_type": kind}, ranks=range(tp), tp=tp, ep=ep)
    bound = bind(side, {name: (array.shape, "int64") for name, array in arrays.items()})
    return {name: array for (_, name), array in fill(bound, arrays, rank).items()}


def test_names_of_experts_vanish() -> None:
    """Rule 3: a rank has one tensor of its experts, in the order of their numbers in the model."""
    arrays = experts()
    held = store("qwen3_moe", arrays, 1, tp=2, ep=True)
    assert list(held) == [STACKED]
    assert np.array_equal(held[STACKED], np.stack(list(arrays.values())[3:]))


def test_every_expert_of_an_uneven_gpt_oss_is_somewhere() -> None:
    """Rule 12: vLLM's loader begins each rank at rank * (experts // ep), so experts 4 and 5 are nowhere."""
    arrays = list(experts().values())
    begins = [rank * (6 // 4) for rank in range(4)]
    counts = [2, 2, 1, 1]
    loaded = [begin + n for begin, count in zip(begins, counts, strict=True) for n in range(count)]
    assert 1 in loaded and not {4, 5} & set(loaded)
    found = [store("gpt_oss", experts(), rank, tp=4, ep=True)[STACKED] for rank in range(4)]
    assert [len(stack) for stack in found] == counts
    assert np.array_equal(np.concatenate(found), np.stack(arrays))


def test_the_bias_of_a_router_is_one_tensor() -> None:
    """Rules 16 and 30: one parameter with two names is stored once, whole, under the name of the gate."""
    arrays = number({f"{LAYER}mlp.gate.e_score_correction_bias": ((6,), "int64")})
    (held,) = store("deepseek_v3", arrays, 1, tp=2).items()
    (array,) = arrays.values()
    assert held[0] == f"{LAYER}mlp.gate.e_score_correction_bias"
    assert np.array_equal(held[1], array)


def test_what_is_fused_on_disk_is_split_and_then_cut() -> None:
    """Rule 23: equal rows of a fused projection are queries alone on the first of two ranks."""
    natives = number({f"{LAYER}self_attn.qkv_proj.weight": ((24, 4), "int64")})
    (fused,) = natives.values()
    config = {**CONFIG, "model_type": "phi3"}
    shapes = logical_shapes(
        config, {name: (array.shape, "int64") for name, array in natives.items()}
    )
    disk = bind(hugging_face(config, natives), shapes)
    logical = gather(disk, {0: {(0, name): array for name, array in natives.items()}}, [0])
    (held,) = store("phi3", logical, 0, tp=2).values()
    q, k, v = np.split(fused, [16, 20])
    assert np.array_equal(held, np.concatenate([q[:8], k[:2], v[:2]]))
    assert np.isin(fused[:12], q).all()


def scaled(ffn: int = 384, hidden: int = 256) -> dict[str, Any]:
    """A configuration of experts with a scale per tile of 128 x 128."""
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    sizes = {"moe_intermediate_size": ffn, "hidden_size": hidden}
    return {**CONFIG, **sizes, "quantization_config": quantization}


def test_scales_of_experts_are_repeated_so_that_no_rank_cuts_their_tiles() -> None:
    """Rule 26: 384 rows are 192 on each of two ranks, in tiles of 64; 96 on each of four, in tiles of 32."""
    sizes: list[dict[str, Any]] = [{"tp": 1}, {"tp": 2}, {"tp": 4}, {"tp": 2, "dp": 2}]
    found = [expert_tile(scaled(), **one) for one in sizes]
    assert found == [(128, 128), (64, 64), (32, 32), (32, 32)]
    # Experts that are dealt whole, or whose parts have common divisors below 32 only, keep their tiles.
    assert expert_tile(scaled(), tp=4, ep=True) == (128, 128)
    assert expert_tile(scaled(ffn=176), tp=2) == (128, 128)
    # Gate and up are joined, so that also a whole expert may have no last tile.
    assert expert_tile(scaled(ffn=192)) == (64, 64)
    names = [f"{LAYER}mlp.experts.{e}.gate_proj.weight_scale_inv" for e in range(6)]
    names += [name.replace("gate", "up") for name in names]
    whole = number(dict.fromkeys(names, ((3, 2), "int64")))
    fine = {name: array.repeat(2, 0).repeat(2, 1) for name, array in whole.items()}
    side = vllm(scaled(), ranks=range(2), tp=2)
    bound = bind(side, {name: (array.shape, "float32") for name, array in fine.items()})
    (held,) = fill(bound, fine, 1).values()
    gate, up = (
        fine[f"{LAYER}mlp.experts.0.{half}_proj.weight_scale_inv"] for half in ("gate", "up")
    )
    assert np.array_equal(held[0], np.concatenate([gate[3:], up[3:]]))


def test_scales_that_are_cut_inside_a_block_are_refused() -> None:
    """A linear layer's scales are not repeated: 384 rows are 3 tiles, 1.5 on each of two ranks."""
    side = vllm(scaled(), ranks=range(2), tp=2)
    name = f"{LAYER}self_attn.o_proj.weight_scale_inv"
    with pytest.raises(sm.StoreError, match=r"'n' has 3 .* into 2 equal parts"):
        bind(side, {name: ((2, 3), "float32")})


@pytest.mark.parametrize(("tp", "parts"), [(2, [256, 128]), (4, [128, 128, 128, 0])])
def test_other_backends_get_whole_tiles(tp: int, parts: list[int]) -> None:
    """Rule 27: of 384 rows, the last ranks have fewer, or none; their cells are padding."""
    names = [f"{LAYER}mlp.experts.0.{half}_proj.weight" for half in ("gate", "up", "down")]
    shapes = {name: ((384, 256) if "down" not in name else (256, 384), "int64") for name in names}
    scales = {f"{name}_scale_inv": ((3, 2), "int64") for name in names[:2]}
    arrays = number(shapes | scales | {f"{names[2]}_scale_inv": ((2, 3), "int64")})
    config = {**scaled(), "num_experts": 1, "num_local_experts": 1}
    side = vllm(config, ranks=range(tp), tp=tp, backend="deep_gemm")
    bound = bind(side, {name: (array.shape, "int64") for name, array in arrays.items()})
    own = max(parts)
    start = 0
    for rank, size in enumerate(parts):
        held = {
            name.rpartition(".")[2]: array[0]
            for (_, name), array in fill(bound, arrays, rank).items()
        }
        for half, name in enumerate(names[:2]):
            rows = held["w13_weight"][own * half : own * (half + 1)]
            assert np.array_equal(rows[:size], arrays[name][start : start + size])
            assert not rows[size:].any()
            tiles = held["w13_weight_scale_inv"].reshape(2, -1, 2)[half]
            kept = arrays[f"{name}_scale_inv"][start // 128 : (start + size) // 128]
            assert np.array_equal(tiles[: size // 128], kept)
        assert np.array_equal(
            held["w2_weight"][:, :size], arrays[names[2]][:, start : start + size]
        )
        start += size


def refit_scaled(
    kind: str, rows: int, tile: tuple[int, int], scale: tuple[int, int], **sizes: Any
) -> sm.Refit:
    """A refit of one MLP in FP8 with a scale per `scale` rows and columns, into an engine with this `tile`."""
    config = {
        **scaled(ffn=rows),
        "model_type": kind,
        "num_experts": 1,
        "num_local_experts": 1,
        "quantization_config": {"weight_block_size": tile},
    }
    prefix = f"{LAYER}mlp.experts.0." if kind == "qwen3_moe" else f"{LAYER}mlp."
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}
    for name in ("gate", "up", "down"):
        shape = (256, rows) if name == "down" else (rows, 256)
        shapes[f"{prefix}{name}_proj.weight"] = shape, "float8_e4m3fn"
        scales = tuple(-(-n // size) for n, size in zip(shape, scale, strict=True))
        shapes[f"{prefix}{name}_proj.weight_scale_inv"] = scales, "float32"
    engine = vllm(config, ranks=range(1, 1 + sizes.get("tp", 1)), **sizes)
    return sm.refit(hugging_face(config, shapes), engine, shapes)


@pytest.mark.parametrize(
    ("kind", "rows", "scale", "given", "stored", "tile"),
    [
        ("qwen3", 256, 64, (4, 4), (2, 2), 128),
        ("qwen3_moe", 256, 64, (4, 4), (2, 2), 128),
        # Of 384 rows a rank has 192, and vLLM repeats scales of 128 rows for 64.
        ("qwen3_moe", 384, 32, (12, 8), (6, 4), 64),
    ],
)
def test_scales_of_other_tiles_are_refused(
    kind: str, rows: int, scale: int, given: object, stored: object, tile: int
) -> None:
    refit_scaled(kind, rows, (128, 128), (tile, tile), tp=2)
    what = f"is {given}, but the engine stores {stored}, a scale per {tile} x {tile} elements"
    with pytest.raises(sm.StoreError, match=re.escape(what)):
        refit_scaled(kind, rows, (128, 128), (scale, scale), tp=2)


def test_tiles_that_are_not_square() -> None:
    """`refine_fp8_moe_block_shape` makes squares, and `pad_tp_shard_to_weight_blocks` pads squares only."""
    config = {**scaled(ffn=256), "quantization_config": {"weight_block_size": [128, 64]}}
    assert expert_tile(config, tp=2) == (128, 64)
    numbers = vllm(config, ranks=range(2), tp=2).numbers
    assert (numbers["expert_tile_rows"], numbers["expert_tile_columns"]) == (128, 64)
    assert expert_tile(config, tp=4) == (64, 64)
    refit_scaled("qwen3_moe", 256, (128, 64), (128, 64), tp=2)
    refit_scaled("qwen3_moe", 256, (128, 64), (64, 64), tp=4)
    with pytest.raises(sm.StoreError, match=r"cuts a block of 128|equal parts"):
        refit_scaled("qwen3_moe", 256, (128, 64), (128, 64), tp=4, backend="deep_gemm")
    # Square ones are padded only if they divide the whole expert.
    with pytest.raises(sm.StoreError, match="cuts a block of 128"):
        refit_scaled("qwen3_moe", 320, (128, 128), (128, 128), tp=2, backend="deep_gemm")
