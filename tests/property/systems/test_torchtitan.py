"""torchtitan's ranks store what its adapter makes of a checkpoint, cut as torch.chunk cuts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import shardmath as sm
from shardmath import MeshError, ShardError, StoreError
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill, gather
from shardmath.models.systems import torchtitan as titan
from shardmath.models.systems.hugging_face import hugging_face
from shardmath.models.systems.hugging_face import logical_shapes as hf_shapes
from shardmath.models.systems.sglang import sglang
from shardmath.models.systems.torchtitan import torchtitan

Fails = Callable[[Callable[[], object], type[ShardError], str], None]
Array = NDArray[np.int64]
Arrays = dict[str, Array]

LLAMA = {
    "model_type": "llama",
    "hidden_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "vocab_size": 21,
}
SPARSE = {**LLAMA, "model_type": "qwen3_moe", "num_experts": 5}
ENDS = {"lm_head": (21, 10), "model.embed_tokens": (21, 10), "model.norm": (10,)}
ATTENTION = {
    "self_attn.q_proj": (24, 10),
    "self_attn.k_proj": (12, 10),
    "self_attn.v_proj": (12, 10),
    "self_attn.o_proj": (10, 24),
    "input_layernorm": (10,),
    "post_attention_layernorm": (10,),
}
MLP = {"gate_proj": (15, 10), "up_proj": (15, 10), "down_proj": (10, 15)}
PLAIN = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "moe.router.gate": "mlp.gate",
}
"""torchtitan's names of modules, and the checkpoint's."""
ROWWISE = ("attention.wo", "feed_forward.w2")
WHOLE = ("attention_norm", "ffn_norm", "norm", "moe.router.gate")
"""What tensor parallelism does not cut; all else it cuts in dimension 0, but for ROWWISE."""


def make(config: dict[str, Any]) -> Arrays:
    """A checkpoint of which no two elements are equal."""
    layer = dict(ATTENTION)
    if "num_experts" in config:
        layer["mlp.gate"] = (5, 10)
        for e, (name, shape) in itertools.product(range(5), MLP.items()):
            layer[f"mlp.experts.{e}.{name}"] = shape
    else:
        layer |= {f"mlp.{name}": shape for name, shape in MLP.items()}
    shapes = dict(ENDS)
    for n in range(3):
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
    starts = itertools.count(1, 1000)
    return {
        f"{name}.weight": next(starts) + np.arange(np.prod(shape)).reshape(shape)
        for name, shape in shapes.items()
    }


def entries(arrays: Arrays) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (array.shape, "int64") for name, array in arrays.items()}


def chunk(array: Array, parts: int, at: int, dim: int = 0) -> Array:
    """Part `at` as torch.chunk makes it; nothing behind the last one."""
    size = -(-array.shape[dim] // parts)
    return array.take(range(array.shape[dim])[at * size : (at + 1) * size], dim)


def turn(array: Array, heads: int) -> Array:
    """The adapter's permutation of the rows of each head."""
    rows, columns = array.shape
    halves = array.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def whole(config: dict[str, Any], arrays: Arrays) -> Arrays:
    """What torchtitan stores on one rank."""
    stored = {}
    for name, own in PLAIN.items():
        for prefix, other in [
            ("", ""),
            *((f"layers.{n}.", f"model.layers.{n}.") for n in range(3)),
        ]:
            array = arrays.get(f"{other}{own}.weight")
            if array is None or (own in ENDS) != (not prefix):
                continue
            heads = {"wq": 6, "wk": 3}.get(name[-2:])
            turned = heads is not None and config["model_type"] == "llama"
            stored[f"{prefix}{name}"] = turn(array, heads) if turned and heads else array
    return stored


def cut(name: str, array: Array, tp: tuple[int, int], fsdp: tuple[int, int]) -> Array:
    """What one rank stores of it: sizes and coordinates of the axes."""
    module = name.partition("layers.")[2].partition(".")[2] or name
    if module not in WHOLE:
        array = chunk(array, *tp, dim=int(module in ROWWISE))
    return chunk(array, *fsdp)


def store(side: Any, arrays: Arrays, rank: int) -> Arrays:
    """What a rank stores of a checkpoint by its rows."""
    config = SPARSE if any(".experts." in name for name in arrays) else LLAMA
    shapes = titan.logical_shapes(config, entries(arrays))
    reference = bind(titan.checkpoint(config, arrays), shapes)
    logical = gather(reference, {0: {(0, name): array for name, array in arrays.items()}}, [0])
    return {name: array for (_, name), array in fill(bind(side, shapes), logical, rank).items()}


def assert_equal(stored: Arrays, expected: Arrays) -> None:
    """All tensors that hold anything are the same."""
    filled = {name: array for name, array in expected.items() if array.size}
    assert {name for name, array in stored.items() if array.size} == filled.keys()
    for name, array in filled.items():
        assert np.array_equal(stored[name], array), name


@pytest.mark.parametrize(
    ("replicas", "shards", "tp"), [(1, 1, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 3, 2)]
)
@pytest.mark.parametrize("config", [LLAMA, SPARSE], ids=["llama", "qwen3_moe"])
def test_fsdp_hsdp_and_tensor_parallelism(
    config: dict[str, Any], replicas: int, shards: int, tp: int
) -> None:
    """Of 21 words and 10 columns most divisions are uneven."""
    arrays = make(config)
    world = replicas * shards * tp
    side = torchtitan(config, ranks=range(world), dp_replicate=replicas, dp_shard=shards, tp=tp)
    full = whole(config, arrays)
    for rank in range(world):
        outer, at = divmod(rank, tp)
        fsdp = shards, outer % shards
        expected = {
            f"{name}.weight": cut(name, array, (tp, at), fsdp) for name, array in full.items()
        }
        if config is SPARSE:
            expected |= cut_experts(arrays, (tp, at), fsdp, dim=int(world > 5))
        assert_equal(store(side, arrays, rank), expected)


def stack(arrays: Arrays, layer: int, name: str) -> Array:
    prefix = f"model.layers.{layer}.mlp.experts."
    return np.stack([arrays[f"{prefix}{e}.{name}.weight"] for e in range(5)])


EXPERTS = {"w1_EFD": "gate_proj", "w3_EFD": "up_proj", "w2_EDF": "down_proj"}
INNER = "moe.routed_experts.inner_experts"


def cut_experts(arrays: Arrays, tp: tuple[int, int], fsdp: tuple[int, int], dim: int) -> Arrays:
    """Experts that tensor parallelism cuts."""
    expected = {}
    for layer, (own, name) in itertools.product(range(3), EXPERTS.items()):
        part = chunk(stack(arrays, layer, name), *tp, dim=2 if own == "w2_EDF" else 1)
        expected[f"layers.{layer}.{INNER}.{own}"] = chunk(part, *fsdp, dim=dim)
    return expected


@pytest.mark.parametrize(
    ("shards", "tp", "ep"), [(2, 1, 2), (4, 1, 2), (2, 2, 2), (6, 1, 2), (1, 2, 2)]
)
def test_experts_are_dealt(shards: int, tp: int, ep: int) -> None:
    """Five experts over ep, then over what it leaves; six ranks cut their columns instead."""
    arrays = make(SPARSE)
    world = shards * tp
    side = torchtitan(SPARSE, ranks=range(world), dp_shard=shards, tp=tp, ep=ep)
    for rank in range(world):
        outer, at = divmod(rank, ep)
        stored = store(side, arrays, rank)
        expected = {}
        for layer, (own, name) in itertools.product(range(3), EXPERTS.items()):
            dealt = chunk(stack(arrays, layer, name), ep, at)
            part = chunk(dealt, world // ep, outer, dim=int(world > 5))
            expected[f"layers.{layer}.{INNER}.{own}"] = part
        assert_equal({name: stored[name] for name in stored if INNER in name}, expected)


@pytest.mark.parametrize(
    ("given", "dim"),
    [
        ({"dp_shard": 6}, 1),
        ({"dp_shard": 4}, 0),
        ({"dp_shard": 2, "dp_replicate": 3}, 1),
        ({"dp_shard": 4, "dp_replicate": 2, "ep": 2}, 0),
        ({"dp_shard": 6, "expert_dim": 0}, 0),
        ({"dp_shard": 6, "names": "0.2"}, 0),
        ({"dp_shard": 4, "dp_replicate": 2, "ep": 2, "names": "0.2"}, 1),
    ],
)
def test_fsdp_cuts_columns_of_experts_where_ranks_are_more(given: dict[str, Any], dim: int) -> None:
    """Of five experts; each version counts other ranks."""
    world = given["dp_shard"] * given.get("dp_replicate", 1)
    side = torchtitan(SPARSE, ranks=range(world), **given)
    stored = store(side, make(SPARSE), 0)
    (columns,) = (
        array for name, array in stored.items() if name.startswith("layers.0.moe.") and "w1" in name
    )
    assert (columns.shape[1] < 15) == dim


def test_stages_have_their_layers() -> None:
    arrays = make(LLAMA)
    side = torchtitan(LLAMA, ranks=range(2), stages=[1, 2])
    first, second = (store(side, arrays, rank) for rank in range(2))
    assert {name.split(".")[1] for name in first if name.startswith("layers.")} == {"0"}
    assert {name.split(".")[1] for name in second if name.startswith("layers.")} == {"1", "2"}
    assert "tok_embeddings.weight" in first.keys() - second.keys()
    assert {"norm.weight", "lm_head.weight"} <= second.keys() - first.keys()


def test_names_of_an_older_version() -> None:
    arrays = make(SPARSE)
    stored = store(torchtitan(SPARSE, ranks=range(1), names="0.2"), arrays, 0)
    newer = store(torchtitan(SPARSE, ranks=range(1)), arrays, 0)
    renames = {
        "lm_head.weight": "output.weight",
        "layers.0.attention.qkv_linear.wq.weight": "layers.0.attention.wq.weight",
        f"layers.0.{INNER}.w1_EFD": "layers.0.moe.experts.w1",
        f"layers.0.{INNER}.w2_EDF": "layers.0.moe.experts.w2",
    }
    assert len(stored) == len(newer)
    for new, old in renames.items():
        assert np.array_equal(stored[old], newer[new])


@pytest.mark.parametrize("names", ["0.3", "0.2"])
def test_latent_attention_without_a_query_rank_has_its_own_name(names: str) -> None:
    """Its wq is in no module for queries, keys and values."""
    config = {**LLAMA, "model_type": "deepseek_v3"}
    prefix = "model.layers.0.self_attn."
    arrays = {
        f"{prefix}{name}.weight": np.ones((8, 10), np.int64)
        for name in ("q_proj", "kv_a_proj_with_mqa")
    }
    side = torchtitan(config, ranks=range(1), names=names)
    shapes = hf_shapes(config, entries(arrays))
    stored = {name for _, name in fill(bind(side, shapes), arrays, 0)}
    assert stored == {f"layers.0.attention.{name}.weight" for name in ("wq", "wkv_a")}


def test_an_engine_stores_even_and_odd_rows_as_its_own_checkpoint() -> None:
    """SGLang's fused tensor of the two halves of queries and keys is that of the undivided ones."""
    arrays = make(LLAMA)
    side = sglang(LLAMA, ranks=range(3), tp=3)
    shapes = hf_shapes(LLAMA, entries(arrays))
    reference = bind(hugging_face(LLAMA, arrays), shapes)
    logical = gather(reference, {0: {(0, name): array for name, array in arrays.items()}}, [0])
    for rank in range(3):
        plain = {
            name: array for (_, name), array in fill(bind(side, shapes), logical, rank).items()
        }
        halved = store(side, arrays, rank)
        assert plain.keys() == halved.keys()
        assert all(np.array_equal(plain[name], halved[name]) for name in plain)
    trainer = torchtitan(LLAMA, ranks=range(3, 9), dp_shard=3, tp=2)
    halved_shapes = titan.logical_shapes(LLAMA, entries(arrays))
    sm.verify(sm.refit(trainer, side, halved_shapes).plan)


def test_what_does_not_fit(fails: Fails) -> None:
    def declare(**given: Any) -> Callable[[], object]:
        return lambda: torchtitan(LLAMA, ranks=range(4), dp_shard=4, **given)

    fails(declare(names="1"), StoreError, "names='1' is not a known version; use one of 0.3, 0.2")
    fails(
        declare(unknown="drop"),
        StoreError,
        "unknown='drop' is not an option; use one of refuse, replicate",
    )
    fails(
        declare(stages=[1, 1]),
        StoreError,
        "3 layers do not fall to 2 stages as [1, 1]; give the number of layers of each stage",
    )
    fails(
        declare(ep=3),
        MeshError,
        "ep=3: the product 3 does not divide 4 ranks of dp_shard times tp; choose sizes of 1 or more "
        "whose product divides it",
    )
