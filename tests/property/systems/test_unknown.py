"""Tensors that no row knows are refused, or whole on each rank that has their layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardmath import StoreError
from shardmath.models.storage.binding import bind
from shardmath.models.storage.filling import fill
from shardmath.models.systems.hugging_face import hugging_face
from shardmath.models.systems.megatron import megatron
from shardmath.models.systems.sglang import sglang
from shardmath.models.systems.torchtitan import torchtitan
from shardmath.models.systems.vllm import vllm

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 10,
}
MEGATRON = {"num_layers": 2, "num_attention_heads": 2}
STRANGE = (
    "model.layers.1.self_attn.strange",
    "model.layers.1.strange.weight",
    "model.strange",
    "strange.weight",
)
MAKERS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "megatron": (functools.partial(megatron, MEGATRON), {"pp": 2}),
    "vllm": (functools.partial(vllm, CONFIG), {"pp": 2}),
    "sglang": (functools.partial(sglang, CONFIG), {"pp": 2}),
    "torchtitan": (functools.partial(torchtitan, CONFIG), {"stages": [1, 1]}),  # type: ignore[dict-item]
}
ARRAYS = {name: np.arange(3 * i, 3 * i + 3) for i, name in enumerate(STRANGE, start=1)}
SHAPES = {name: (array.shape, "int64") for name, array in ARRAYS.items()}


@pytest.mark.parametrize("name", MAKERS)
def test_refused_unless_asked(name: str) -> None:
    make, sizes = MAKERS[name]
    with pytest.raises(StoreError, match=f"no row stores {STRANGE[0]}, {STRANGE[1]}"):
        bind(make(ranks=range(4), tp=2, **sizes), SHAPES)
    with pytest.raises(
        StoreError, match="unknown='drop' is not an option; use one of refuse, replicate"
    ):
        make(ranks=range(4), tp=2, unknown="drop", **sizes)


@pytest.mark.parametrize("name", MAKERS)
def test_whole_if_asked(name: str) -> None:
    make, sizes = MAKERS[name]
    bound = bind(make(ranks=range(4), tp=2, unknown="replicate", **sizes), SHAPES)
    for rank in range(4):
        stored = [list(array) for array in fill(bound, ARRAYS, rank).values()]
        # The layer is on the second stage, all else everywhere.
        own = STRANGE if rank >= 2 else STRANGE[2:]
        assert sorted(stored) == sorted(list(ARRAYS[each]) for each in own)


@pytest.mark.parametrize("name", MAKERS)
def test_known_tensors_stay_cut(name: str) -> None:
    """The last row takes only what no row before it takes."""
    make, sizes = MAKERS[name]
    shapes = {"model.layers.0.mlp.gate_proj.weight": ((8, 4), "int64")}
    shapes["model.layers.0.mlp.up_proj.weight"] = ((8, 4), "int64")
    bound = bind(make(ranks=range(4), tp=2, unknown="replicate", **sizes), shapes)
    assert {layout.local_shape(0) for layout in bound.layouts.values()} == {(4, 4)}


def test_a_checkpoint_has_all_under_their_own_names() -> None:
    bound = bind(hugging_face(CONFIG), SHAPES)
    assert {name for _, name in fill(bound, ARRAYS, 0)} == set(STRANGE)
