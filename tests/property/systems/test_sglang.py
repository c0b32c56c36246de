"""What surprises in how SGLang stores weights, each by its own name; `test_recorded` has it as recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shardmath as sm
from shardmath import MeshError, ShardError, StoreError
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill
from shardmath.models.systems.sglang import sglang
from shardmath.models.systems.vllm import vllm

Fails = Callable[[Callable[[], object], type[ShardError], str], None]

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "vocab_size": 100,
}
LAYER = "model.layers.0."
QKV = {
    f"{LAYER}self_attn.q_proj.weight": (16, 4),
    f"{LAYER}self_attn.k_proj.weight": (4, 4),
    f"{LAYER}self_attn.v_proj.weight": (4, 4),
}


def number(shapes: dict[str, tuple[int, ...]]) -> dict[str, NDArray[np.int64]]:
    """Arrays of which no two elements are equal."""
    return {
        name: 1000 * i + np.arange(1, 1 + int(np.prod(shape))).reshape(shape)
        for i, (name, shape) in enumerate(shapes.items())
    }


def store(
    config: dict[str, Any], arrays: dict[str, NDArray[np.int64]], rank: int, **sizes: Any
) -> dict[str, NDArray[np.int64]]:
    """What a rank stores of the logical arrays; 0 where no element lies."""
    world = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("dp", 1)
    side = sglang(config, ranks=range(world), **sizes)
    bound = bind(side, {name: (array.shape, "int64") for name, array in arrays.items()})
    return {name: array for (_, name), array in fill(bound, arrays, rank).items()}


def test_attention_is_cut_over_what_its_data_parallelism_leaves() -> None:
    arrays = number(QKV)
    q, k, v = arrays.values()
    for rank in range(4):
        stored = store(DENSE, arrays, rank, tp=4, attn_dp=2)
        half = rank % 2
        parts = q[8 * half :][:8], k[2 * half :][:2], v[2 * half :][:2]
        expected = np.concatenate(parts)
        assert np.array_equal(stored[f"{LAYER}self_attn.qkv_proj.weight"], expected)


def test_key_heads_are_repeated_where_ranks_are_more() -> None:
    arrays = number(QKV)
    q, k, v = arrays.values()
    stored = store(DENSE, arrays, 5, tp=8)
    expected = np.concatenate([q[10:12], k[2:4], v[2:4]])
    assert np.array_equal(stored[f"{LAYER}self_attn.qkv_proj.weight"], expected)


@pytest.mark.parametrize(("tp", "rows"), [(1, 128), (2, 64), (3, 64), (6, 64)])
def test_a_vocabulary_is_padded_for_its_ranks(tp: int, rows: int) -> None:
    """To 128 words, or where ranks do not divide these, to a multiple of 64 times the ranks."""
    arrays = number({"model.embed_tokens.weight": (100, 4)})
    stored = store(DENSE, arrays, tp - 1, tp=tp)
    assert stored["model.embed_tokens.weight"].shape == (rows, 4)


def test_a_head_is_cut_like_attention_if_asked() -> None:
    arrays = number({"model.embed_tokens.weight": (100, 4), "lm_head.weight": (100, 4)})
    for asked, rows in ((False, 32), (True, 64)):
        stored = store(DENSE, arrays, 0, tp=4, attn_dp=2, dp_lm_head=asked)
        assert stored["lm_head.weight"].shape == (rows, 4)
        assert stored["model.embed_tokens.weight"].shape == (64, 4)


def test_dense_layers_are_whole_if_asked() -> None:
    arrays = number({f"{LAYER}mlp.gate_proj.weight": (8, 4), f"{LAYER}mlp.up_proj.weight": (8, 4)})
    (fused,) = store(DENSE, arrays, 1, tp=2, moe_dense_tp=1).values()
    assert np.array_equal(fused, np.concatenate(list(arrays.values())))


def test_experts_are_dealt_and_cut() -> None:
    config = {**DENSE, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 8}
    shapes = {
        f"{LAYER}mlp.experts.{e}.{name}_proj.weight": (8, 4)
        for e in range(4)
        for name in ("gate", "up")
    }
    arrays = number(shapes)
    (stored,) = store(config, arrays, 3, tp=4, ep=2).values()
    parts = list(arrays.values())[4:]
    expected = [np.concatenate([parts[2 * e][4:], parts[2 * e + 1][4:]]) for e in range(2)]
    assert np.array_equal(stored, np.stack(expected))


def test_replicas_are_numbered_one_after_the_other() -> None:
    arrays = number(QKV)
    for rank in range(4):
        again = store(DENSE, arrays, rank + 4, dp=2, pp=2, tp=2)
        once = store(DENSE, arrays, rank, pp=2, tp=2)
        assert again.keys() == once.keys()
        assert all(np.array_equal(again[name], once[name]) for name in once)


def test_unknown_tensors_are_refused_or_whole(fails: Fails) -> None:
    arrays = number({f"{LAYER}self_attn.strange": (4,)})
    message = "no row stores model.layers.0.self_attn.strange"
    with pytest.raises(StoreError, match=message):
        store(DENSE, arrays, 0)
    (stored,) = store(DENSE, arrays, 1, tp=2, unknown="replicate").values()
    assert stored.shape == (4,)


def test_weights_move_from_vllm() -> None:
    shapes = {name: (shape, "bfloat16") for name, shape in QKV.items()}
    src = vllm(DENSE, ranks=range(2), tp=2)
    dst = sglang(DENSE, ranks=range(2, 6), tp=4, attn_dp=2)
    sm.verify(sm.refit(src, dst, shapes).plan)


def test_what_no_row_says_is_refused(fails: Fails) -> None:
    def make(**given: Any) -> Callable[[], object]:
        return lambda: sglang(DENSE, ranks=range(4), tp=4, **given)

    fails(
        make(fused_shared=True),
        StoreError,
        "fused_shared=True: fused shared experts lie behind the routed ones of each rank, which no "
        "row describes; start SGLang with --disable-shared-experts-fusion, or record its loader",
    )
    fails(
        make(moe_dense_tp=2),
        StoreError,
        "moe_dense_tp=2: SGLang divides dense layers over 1 rank or tp=4; pass 1 or 4",
    )
    fails(
        make(unknown="drop"),
        StoreError,
        "unknown='drop' is not an option; use one of refuse, replicate",
    )
    fails(
        make(ep=3),
        MeshError,
        "mdp=1 ep=3: the product 3 does not divide 4 ranks of tp; choose sizes of 1 or more "
        "whose product divides it",
    )
    fails(
        make(pp=2),
        MeshError,
        "ranks= has 4 ranks, but the mesh dp=1 pp=2 tp=4 has 8; give one rank for each coordinate, 8 in all",
    )
    fails(
        make(stages=[1, 1]),
        StoreError,
        "1 layers do not fall to 1 stages as [1, 1]; give the number of layers of each stage",
    )
