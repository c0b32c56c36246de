"""Refits of data and scales that a checkpoint or a trainer already has, on workers. No pytest here."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt
from shardmath import formats, transforms
from shardmath.models.systems.hugging_face import hugging_face
from shardmath.models.systems.vllm import vllm
from shardmath.values.formats.casting import cast_array
from tests.distributed.tasks.fp8 import KINDS, compare, to_tensor

TILES = formats.FP8Blocks((4, 4))
LARGE, FINE = formats.FP8Blocks((64, 64)), formats.FP8Blocks((32, 32))
SOURCE = range(4)
ENGINE = 4
LAYER = "model.layers.0."

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 128,
}
EXPERTS = {"num_experts": 3, "moe_intermediate_size": 16}
LATENT = {"num_key_value_heads": 4, "n_routed_experts": 3, "moe_intermediate_size": 16}

ATTENTION = {"q": (32, 16), "k": (16, 16), "v": (16, 16), "o": (16, 32)}
MLP = {"gate": (32, 16), "up": (32, 16), "down": (16, 32)}
EXPERT = {"gate": (16, 16), "up": (16, 16), "down": (16, 16)}
# 14 rows of kv_a are three tiles and a half, as DeepSeek's 576 are four and a half of 128.
DOWN = {"q_a": (8, 16), "kv_a": (14, 16)}
UP = {"q_b": (48, 8), "kv_b": (64, 10), "o": (16, 32)}

Arrays = dict[str, Any]


def configure(kind: str, tile: int = 4, **more: Any) -> dict[str, Any]:
    """A configuration of transformers, with one scale per tile."""
    own = {"qwen3": {}, "qwen3_moe": EXPERTS, "deepseek_v3": LATENT}[kind]
    quantization = {"quant_method": "fp8", "weight_block_size": [tile, tile]}
    config = {**SIZES, **own, "model_type": kind, "quantization_config": quantization}
    return {**config, **more}


def list_quantized(kind: str) -> dict[str, tuple[int, int]]:
    """The shapes of the model's projections."""
    named = {f"self_attn.{name}_proj": shape for name, shape in ATTENTION.items()}
    if kind == "deepseek_v3":
        named = {f"self_attn.{name}_proj": shape for name, shape in (DOWN | UP).items()}
        named["self_attn.kv_a_proj_with_mqa"] = named.pop("self_attn.kv_a_proj")
        named |= {f"mlp.shared_experts.{name}_proj": shape for name, shape in MLP.items()}
    if kind == "qwen3":
        return named | {f"mlp.{name}_proj": shape for name, shape in MLP.items()}
    for e in range(3):
        named |= {f"mlp.experts.{e}.{name}_proj": shape for name, shape in EXPERT.items()}
    return named


def draw(kind: str, tiles: formats.FP8Blocks = TILES, seed: int = 0) -> Arrays:
    """A checkpoint: bytes of projections, their scales, and other tensors."""
    random = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, shape in list_quantized(kind).items():
        values = random.standard_normal(shape) * 10 ** random.uniform(-3, 3)
        data, scales = tiles.quantize(values.astype(np.float32))
        arrays[f"{LAYER}{name}.weight"] = data
        arrays[f"{LAYER}{name}.weight_scale_inv"] = scales
    words = random.standard_normal((128, 16)).astype(np.float32)
    arrays["model.embed_tokens.weight"] = cast_array(words, "float32", "bfloat16")
    return arrays


def list_shapes(arrays: Arrays) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor."""
    return {name: (array.shape, KINDS[str(array.dtype)]) for name, array in arrays.items()}


def lay(kind: str, source: str) -> Any:
    """A checkpoint on one rank, or shards of dimension 0 on four, which cut tiles."""
    shapes = list_shapes(draw(kind))
    if source == "checkpoint":
        return hugging_face(configure(kind), shapes)
    mesh = sm.Mesh(fsdp=len(SOURCE), ranks=SOURCE)
    return {
        name: sm.Layout(shape, mesh, {"fsdp": sm.Shard(0)}, dtype=dtype)
        for name, (shape, dtype) in shapes.items()
    }


def plan(kind: str, source: str, tp: int) -> sm.Refit:
    """The refit into an engine."""
    engine = vllm(configure(kind), ranks=range(ENGINE, ENGINE + tp), tp=tp)
    return sm.refit(lay(kind, source), engine, list_shapes(draw(kind)))


def _cut(array: Any, parts: int, part: int, axis: int = 0) -> Any:
    """One of equal parts."""
    return np.split(array, parts, axis)[part]


def load(kind: str, arrays: Arrays, tp: int, rank: int) -> Arrays:
    """What a rank of vLLM stores, written plainly: scales lie as their data do."""
    out: Arrays = {}
    for suffix in ("weight", "weight_scale_inv"):

        def get(name: str, suffix: str = suffix) -> Any:
            return arrays[f"{LAYER}{name}.{suffix}"]

        def gated(module: str, suffix: str = suffix) -> Any:
            halves = [arrays[f"{LAYER}{module}.{one}_proj.{suffix}"] for one in ("gate", "up")]
            return np.concatenate([_cut(half, tp, rank) for half in halves])

        stored = {"self_attn.o_proj": _cut(get("self_attn.o_proj"), tp, rank, 1)}
        if kind == "deepseek_v3":
            down = [get(f"self_attn.{name}") for name in ("q_a_proj", "kv_a_proj_with_mqa")]
            stored["self_attn.fused_qkv_a_proj"] = np.concatenate(down)
            for name in ("self_attn.q_b_proj", "self_attn.kv_b_proj"):
                stored[name] = _cut(get(name), tp, rank)
        else:
            heads = [_cut(get("self_attn.q_proj"), tp, rank)]
            for name in ("k", "v"):
                keys = min(tp, 2)
                heads.append(_cut(get(f"self_attn.{name}_proj"), keys, rank // (tp // keys)))
            stored["self_attn.qkv_proj"] = np.concatenate(heads)
        if kind != "qwen3_moe":
            dense = "mlp" if kind == "qwen3" else "mlp.shared_experts"
            stored[f"{dense}.gate_up_proj"] = gated(dense)
            stored[f"{dense}.down_proj"] = _cut(get(f"{dense}.down_proj"), tp, rank, 1)
        for name, array in stored.items():
            out[f"{LAYER}{name}.{suffix}"] = array
        if kind != "qwen3":
            experts = [f"mlp.experts.{e}" for e in range(3)]
            own = [_cut(get(f"{one}.down_proj"), tp, rank, 1) for one in experts]
            routed = f"{LAYER}mlp.experts.routed_experts."
            out[f"{routed}w13_{suffix}"] = np.stack([gated(one) for one in experts])
            out[f"{routed}w2_{suffix}"] = np.stack(own)
    out["model.embed_tokens.weight"] = _cut(arrays["model.embed_tokens.weight"], tp, rank)
    return out


def _to_tensors(arrays: Arrays) -> dict[str, Tensor]:
    return {name: to_tensor(array, KINDS[str(array.dtype)]) for name, array in arrays.items()}


def steps(rank: int, kind: str, source: str, tp: int) -> list[Any]:
    """What differs on a rank of the engine after each of two steps, and what was compared."""
    planned = plan(kind, source, tp)
    refit = smt.Refit(planned, timeout=30.0)
    layouts = planned.trainer.layouts
    held = {}
    if rank in planned.trainer.ranks:
        for name, array in draw(kind).items():
            rows = layouts[name].indices(rank)[0]
            held[name] = np.ascontiguousarray(array[rows])
    src = _to_tensors(held)
    dst = {}
    own = range(ENGINE, ENGINE + tp)
    if rank in own:
        wanted = load(kind, draw(kind), tp, rank - ENGINE)
        dst = _to_tensors({name: np.zeros_like(array) for name, array in wanted.items()})
    refit.prepare(src or None, dst or None)
    found: list[Any] = []
    for seed in range(2):
        arrays = draw(kind, seed=seed)
        for name, tensor in src.items():
            rows = layouts[name].indices(rank)[0]
            tensor.copy_(to_tensor(arrays[name][rows], KINDS[str(arrays[name].dtype)]))
        refit(acknowledge=True)
        if rank in own:
            found += compare(dst, _to_tensors(load(kind, arrays, tp, rank - ENGINE)))
    return [found, list(dst)]


def list_fine() -> tuple[Arrays, dict[str, Any], dict[str, Any]]:
    """Experts of 96 rows in tiles of 64, and the shapes before and after a refit into tiles of 32."""
    random = np.random.default_rng(0)
    arrays: Arrays = {}
    served = {}
    for name, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
        whole = f"{LAYER}mlp.experts.0.{name}_proj.weight"
        data, scales = LARGE.quantize(random.standard_normal(shape).astype(np.float32))
        arrays[whole], arrays[f"{whole}_scale_inv"] = data, scales
        served[whole] = shape, "float8_e4m3fn"
        served[f"{whole}_scale_inv"] = FINE.scale_shape(shape), "float32"
    return arrays, list_shapes(arrays), served


def plan_fine() -> sm.Refit:
    """The refit of these experts into one rank, whose w13 joins gate and up inside a tile of 64."""
    _, shapes, served = list_fine()
    fields = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 1}
    config = configure("qwen3_moe", 64, **fields)
    rules = {"*_proj.weight": transforms.Requantize(LARGE, FINE)}
    engine = vllm(config, ranks=range(ENGINE, ENGINE + 1))
    return sm.refit(hugging_face(config, shapes), engine, shapes, served=served, rules=rules)


def refine(rank: int) -> list[Any]:
    """What differs on the engine's rank."""
    planned = plan_fine()
    arrays, _, _ = list_fine()
    fine = {}
    for name, array in arrays.items():
        if not name.endswith("_scale_inv"):
            again = LARGE.dequantize(array, arrays[f"{name}_scale_inv"])
            fine[name], fine[f"{name}_scale_inv"] = FINE.quantize(again)
    wanted = {}
    for suffix in ("weight", "weight_scale_inv"):
        gate, up, down = (
            fine[f"{LAYER}mlp.experts.0.{one}_proj.{suffix}"] for one in ("gate", "up", "down")
        )
        routed = f"{LAYER}mlp.experts.routed_experts."
        wanted[f"{routed}w13_{suffix}"] = np.concatenate([gate, up])[None]
        wanted[f"{routed}w2_{suffix}"] = down[None]
    refit = smt.Refit(planned, timeout=30.0)
    dst = _to_tensors({name: np.zeros_like(array) for name, array in wanted.items()})
    refit.prepare(_to_tensors(arrays) if rank == 0 else None, dst if rank == ENGINE else None)
    refit(acknowledge=True)
    return [compare(dst, _to_tensors(wanted)) if rank == ENGINE else [], list(dst)]
