"""vLLM: which rank of an engine holds what, against loops over the coordinates; refits from Megatron."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from shardmath import Layout, LayoutError, MeshError, plan, simulate, verify
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.styles import is_expert
from shardmath.models.systems.former import engine, trainer
from shardmath.models.systems.hf import (
    grouped,
)
from tests.property.systems.model import (
    STAGES,
    chunk,
    divided,
    held,
    model,
)


@pytest.mark.parametrize("dp", [1, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_engine_is_what_its_rules_say(tp: int, dp: int) -> None:
    ranks = list(range(5, 5 + dp * tp))[::-1]
    expected = {
        (name, rank): divided(name, shape, tp, i % tp)
        for name, (shape, _) in model().items()
        for i, rank in enumerate(ranks)
    }
    assert held(engine(model(), ranks=ranks, tp=tp)) == expected


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 4), (2, 4), (1, 2), (2, 8), (4, 8)])
def test_few_key_value_heads_lie_on_neighboring_ranks(kv_heads: int, tp: int) -> None:
    side = engine(model(), ranks=range(2 * tp), tp=tp, kv_heads=kv_heads)
    for leaf, tail in (("weight", [list(range(8))]), ("bias", [])):
        layout = side[f"model.layers.1.self_attn.k_proj.{leaf}"]
        rows = {rank: [index.tolist() for index in layout.indices(rank)] for rank in range(2 * tp)}
        assert rows == {
            r: [chunk(4, kv_heads, r % tp * kv_heads // tp), *tail] for r in range(2 * tp)
        }
    assert side["model.layers.1.self_attn.q_proj.weight"].text == "(tp n) h"


def test_as_many_key_value_heads_as_tp_are_columns() -> None:
    assert engine(model(), ranks=range(4), tp=2, kv_heads=4) == engine(
        model(), ranks=range(4), tp=2
    )


def test_windows_of_w13_and_w2() -> None:
    """gate_r, then up_r, in one buffer of E experts; down's columns in another."""
    side = engine(model(), ranks=range(2), tp=2, stacked=True)
    at = {
        part: side[f"model.layers.1.mlp.experts.2.{part}_proj.weight"]
        for part in ("gate", "up", "down")
    }
    assert {layout.shape for layout in at.values()} == {(1, 8, 8)}
    assert at["gate"].local_shape(1) == at["up"].local_shape(1) == (4, 8, 8)
    assert at["gate"].indices(1)[1].tolist() == [4, 5, 6, 7, -1, -1, -1, -1]
    assert at["up"].indices(1)[1].tolist() == [-1, -1, -1, -1, 4, 5, 6, 7]
    assert at["down"].local_shape(1) == (4, 8, 4) and at["down"].indices(1)[2].tolist() == [
        4,
        5,
        6,
        7,
    ]
    assert [layout.indices(0)[0].tolist() for layout in at.values()] == [[-1, -1, 0, -1]] * 3


def test_grouped_experts_are_divided_inside() -> None:
    side = engine(grouped(model()), ranks=range(2), tp=2)
    assert side["model.layers.1.mlp.experts.gate_proj.weight"].text == "n (tp h) w"
    assert side["model.layers.1.mlp.experts.down_proj.weight"].text == "n h (tp w)"


def test_vocabularies_are_padded_at_the_end() -> None:
    shapes = {"model.embed_tokens.weight": ((70, 8), "bfloat16")}
    layout = engine(shapes, ranks=range(4), tp=4)["model.embed_tokens.weight"]
    assert layout is Layout((70, 8), Mesh(dp=1, tp=4), "(tp n)=128 h", dtype="bfloat16")
    assert trainer(shapes, ranks=range(4), tp=4, vocab_multiple=8) == engine(
        shapes, ranks=range(4), tp=4, vocab_multiple=8
    )


def forms() -> Iterator[tuple[dict[str, Layout], dict[str, Layout]]]:
    ranks = range(24), range(30, 38)
    one = {"ranks": ranks[0], "tp": 2, "pp": 3, "ep": 4, "stages": STAGES}
    two = {"ranks": ranks[1], "tp": 4, "kv_heads": 2}
    alone = {name: ((1, *s), d) if is_expert(name) else (s, d) for name, (s, d) in model().items()}
    yield trainer(model(), **one), engine(model(), **two)
    yield trainer(model(), **one, stacked=True), engine(model(), **two, stacked=True)
    yield trainer(model(), **one, stacked=True), engine(alone, **two)
    yield trainer(grouped(model()), **one), engine(grouped(model()), **two)


@pytest.mark.parametrize("form", range(4))
def test_a_refit_moves_every_weight(form: int) -> None:
    src, dst = list(forms())[form]
    p = plan(src, dst)
    verify(p)
    whole = {
        n: np.arange(math.prod(x.shape), dtype=np.float32).reshape(x.shape) + i
        for i, (n, x) in enumerate(src.items())
    }
    shards: dict[int, dict[str, np.ndarray]] = {}
    for name, layout in src.items():
        for rank in layout.mesh.ranks:
            shards.setdefault(rank, {})[name] = cut(whole[name], layout, rank)
    for rank, arrived in simulate(p, shards).items():
        for name, array in arrived.items():
            assert (array == cut(whole[name], dst[name], rank)).all(), (name, rank)


def cut(array: np.ndarray, layout: Layout, rank: int) -> np.ndarray:
    """The rank's local array, with zeros in the holes."""
    for d, index in enumerate(layout.indices(rank)):
        shape = [-1 if i == d else 1 for i in range(array.ndim)]
        array = np.take(array, np.maximum(index, 0), d) * (index >= 0).reshape(shape)
    return array


BF = "bfloat16"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: engine({"lm_head.weight": ((6, 8), BF)}, ranks=range(3), tp=3),
            LayoutError,
            (
                "tp of size 3 does not divide dimension 0 of 'lm_head.weight', shape (6, 8), "
                "which is stored as 64; choose a size of tp that divides it, or "
                "vocab_multiple=3"
            ),
        ),
        (
            lambda: engine(
                {"lm_head.weight": ((6, 8), BF)}, ranks=range(3), tp=3, vocab_multiple=0
            ),
            LayoutError,
            "vocab_multiple is 0, but must be at least 1; give 1 to pad nothing",
        ),
        (
            lambda: engine(model(), ranks=range(6), tp=4),
            MeshError,
            "6 ranks do not fall into engines of tp=4; "
            "pass a number of ranks that is a multiple of tp, or another tp",
        ),
        (
            lambda: engine(model(), ranks=range(4), tp=4, kv_heads=3),
            LayoutError,
            "3 key-value heads and tp=4: neither divides the other; "
            "choose a tp that divides the number of heads or is a multiple of it",
        ),
        (
            lambda: engine(model(), ranks=range(4), tp=4, kv_heads=0),
            LayoutError,
            "0 key-value heads and tp=4: neither divides the other; "
            "choose a tp that divides the number of heads or is a multiple of it",
        ),
        (
            lambda: engine({"norm.weight": ((4,), "float3")}, ranks=range(2), tp=2),
            LayoutError,
            "tensor 'norm.weight' of shape (4,): unknown dtype 'float3'; did you mean 'float32'?",
        ),
    ],
)
def test_errors(make, error: type[Exception], message: str, fails) -> None:
    fails(make, error, message)
