"""Families: which rank holds what, against loops over the coordinates; sharing of layouts; errors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmath import Layout, LayoutError, MeshError, plan, simulate, verify
from shardmath.algebra.mesh import Mesh
from shardmath.families.hf import (
    MODULES,
    Place,
    cell,
    dimension,
    expert_counts,
    grouped,
    is_expert,
    kind,
    layouts,
    numbers,
)
from shardmath.families.megatron import trainer
from shardmath.families.vllm import engine

EXPERTS, LAYERS = 4, 5
STAGES = (2, 1, 2)


def model(experts: int = EXPERTS, layers: int = LAYERS) -> dict[str, tuple[tuple[int, ...], str]]:
    """A small mixture of experts; layer 0 is dense."""
    block = {
        "self_attn.q_proj.weight": (16, 8),
        "self_attn.k_proj.weight": (4, 8),
        "self_attn.o_proj.weight": (8, 16),
    }
    block |= {
        "self_attn.k_proj.bias": (4,),
        "self_attn.kv_a_proj_with_mqa.weight": (6, 8),
        "norm.weight": (8,),
    }
    expert = {"gate_proj.weight": (8, 8), "up_proj.weight": (8, 8), "down_proj.weight": (8, 8)}
    moe = {
        f"mlp.experts.{e}.{name}": shape for e in range(experts) for name, shape in expert.items()
    }
    moe |= {"mlp.gate.weight": (experts, 8), "mlp.shared_experts.up_proj.weight": (16, 8)}
    dense = {"mlp.up_proj.weight": (16, 8), "mlp.down_proj.weight": (8, 16)}
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 8)}
    for i in range(layers):
        out |= {
            f"model.layers.{i}.{name}": shape
            for name, shape in (block | (moe if i else dense)).items()
        }
    out |= {"model.norm.weight": (8,), "lm_head.weight": (64, 8)}
    return {
        name: (shape, "float32" if "gate.w" in name else "bfloat16") for name, shape in out.items()
    }


Held = dict[tuple[str, int], tuple[list[int], ...]]
"""The global indices of each dimension that a rank holds of a tensor; those it holds nothing of are left out."""


def held(side: dict[str, Layout]) -> Held:
    out: Held = {}
    for name, layout in side.items():
        for rank in layout.mesh.ranks:
            cells = tuple([i for i in index.tolist() if i >= 0] for index in layout.indices(rank))
            if all(cells):
                out[name, rank] = cells
    return out


def chunk(n: int, parts: int, at: int) -> list[int]:
    return list(range(n * at // parts, n * (at + 1) // parts))


def whole(shape: tuple[int, ...]) -> list[list[int]]:
    return [list(range(n)) for n in shape]


def divided(name: str, shape: tuple[int, ...], tp: int, at: int) -> tuple[list[int], ...]:
    """What coordinate `at` of tp holds, said once more: by the name's last module alone."""
    module, leaf = name.split(".")[-2:]
    dim = 0 if module in ("embed_tokens", "lm_head") else None
    if module in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
        dim = 0
    if module in ("o_proj", "down_proj"):
        dim = 1 if leaf == "weight" else None
    cells = whole(shape)
    if dim is not None:
        cells[dim] = chunk(shape[dim], tp, at)
    return tuple(cells)


# The trainer


def trainer_by_hand(
    ranks: list[int], tp: int, pp: int, ep: int, stages: tuple[int, ...], stacked: bool
) -> Held:
    """Rule by rule, rank by rank."""
    out: Held = {}
    size = len(ranks) // pp
    ends = list(itertools.accumulate(stages))
    for name, (shape, _) in model().items():
        parts = name.split(".")
        first = 0 if "embed_tokens" in parts else pp - 1
        stage = (
            next(s for s, end in enumerate(ends) if int(parts[2]) < end)
            if "layers" in parts
            else first
        )
        for i, rank in enumerate(ranks[stage * size : (stage + 1) * size]):
            if "experts" not in parts:
                out[name, rank] = divided(name, shape, tp, i % tp)
            elif i % ep == int(parts[5]) // (EXPERTS // ep):
                out[name, rank] = ([0], *whole(shape)) if stacked else tuple(whole(shape))
    return out


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 4), (4, 2), (2, 4), (4, 4)])
def test_trainer_is_what_its_rules_say(tp: int, ep: int, stacked: bool) -> None:
    ranks = list(range(7, 7 + 24))[::-1]
    side = trainer(model(), ranks=ranks, tp=tp, pp=3, ep=ep, stages=STAGES, stacked=stacked)
    assert held(side) == trainer_by_hand(ranks, tp, 3, ep, STAGES, stacked)
    assert {name: layout.dtype for name, layout in side.items()} == {
        name: dtype for name, (_, dtype) in model().items()
    }


def test_layers_fall_evenly_without_stages() -> None:
    shapes, ranks = model(layers=6), range(12)
    assert trainer(shapes, ranks=ranks, pp=3) == trainer(
        shapes, ranks=ranks, pp=3, stages=(2, 2, 2)
    )
    assert trainer(shapes, ranks=ranks) == trainer(shapes, ranks=ranks, stages=[6])


def test_a_stage_may_have_no_layer() -> None:
    side = trainer(model(), ranks=range(3), pp=3, stages=(0, 5, 0))
    assert {layout.mesh.ranks for layout in side.values()} == {(0,), (1,), (2,)}
    assert {name for name, layout in side.items() if layout.mesh.ranks == (2,)} == {
        "model.norm.weight",
        "lm_head.weight",
    }


def test_windows_are_cells_of_a_stack_of_the_rank_s_own_experts() -> None:
    side = trainer(model(), ranks=range(8), ep=2, stacked=True)
    layout = side["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert (layout.shape, layout.text) == (
        (1, 8, 8),
        Layout((1, 8, 8), layout.mesh, "(ep n)=<-3 0:1> i h").text,
    )
    assert {layout.local_shape(rank) for rank in range(8)} == {(2, 8, 8)}
    assert layout.indices(5)[0].tolist() == [-1, 0] and layout.indices(4)[0].tolist() == [-1, -1]


def test_grouped_experts_are_divided_over_ep() -> None:
    side = trainer(grouped(model()), ranks=range(8), tp=2, ep=4)
    layout = side["model.layers.1.mlp.experts.up_proj.weight"]
    assert layout is Layout((4, 8, 8), Mesh(edp=2, ep=4), "(ep e) i h", dtype="bfloat16")


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("model.embed_tokens.weight", 0),
        ("embeddings.word_embeddings.weight", 0),
        ("bert.embeddings.LayerNorm.bias", 0),
        ("transformer.wpe.weight", 0),
        ("shared.weight", 0),
        ("embed_out.weight", 1),
        ("model.norm.weight", 1),
        ("lm_head.weight", 1),
        ("pooler.dense.weight", 1),
        ("transformer.h.0.ln_1.weight", 0),
        ("encoder.layer.1.output.dense.weight", 1),
    ],
)
def test_stages_of_names(name: str, stage: int) -> None:
    shapes = {
        name: ((4, 4), "float32"),
        "layers.0.norm.weight": ((4,), "float32"),
        "h.1.ln.weight": ((4,), "float32"),
    }
    assert trainer(shapes, ranks=range(2), pp=2)[name].mesh.ranks == (stage,)


# The engine


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
def test_few_key_value_heads_lie_on_neighbouring_ranks(kv_heads: int, tp: int) -> None:
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


# Both


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


def test_each_distinct_layout_is_one_object() -> None:
    side = trainer(model(), ranks=range(24), tp=2, pp=3, ep=4, stages=STAGES)
    experts = [layout for name, layout in side.items() if is_expert(name)]
    assert (len(experts), len({id(layout) for layout in experts})) == (48, 12)
    calls: list[str] = []

    def place(name: str, shape: tuple[int, ...]) -> Place:
        calls.append(name)
        return Place(Mesh(tp=2), "(tp n) ...", shape)

    found = layouts({"a": ((4, 2), "int8"), "b": ((4, 2), "int8"), "c": ((4, 2), "int16")}, place)
    assert found["a"] is found["b"] is not found["c"]
    assert calls == ["a", "b", "c"]


# Names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.12.mlp.experts.7.up_proj.weight", (12, 7)),
        ("layers.0.block_sparse_moe.experts.31.w1.weight", (0, 31)),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", (3, None)),
        ("model.layers.3.mlp.experts.gate_up_proj", (3, None)),
        ("transformer.h.11.attn.c_attn.weight", (11, None)),
        ("encoder.layer.5.output.dense.bias", (5, None)),
        ("decoder.block.2.layer.0.SelfAttention.q.weight", (2, None)),
        ("experts.3.w1.weight", (None, 3)),
        ("model.embed_tokens.weight", (None, None)),
        ("sublayers.3.weight", (None, None)),
    ],
)
def test_numbers(name: str, expected: tuple[int | None, int | None]) -> None:
    assert numbers(name) == expected


@pytest.mark.parametrize(
    ("name", "ndim", "expected"),
    [
        ("self_attn.q_proj.weight", 2, 0),
        ("self_attn.q_proj.bias", 1, 0),
        ("self_attn.o_proj.weight", 2, 1),
        ("self_attn.o_proj.bias", 1, None),
        ("mlp.experts.3.up_proj.weight", 2, 0),
        ("mlp.experts.3.up_proj.weight", 3, 1),
        ("mlp.experts.up_proj.weight", 3, 1),
        ("mlp.experts.down_proj.weight", 3, 2),
        ("mlp.experts.3.w2.weight", 2, 1),
        ("norm.weight", 1, None),
        ("self_attn.q_proj.weight", 0, None),
        ("self_attn.o_proj.weight", 0, None),
    ],
)
def test_dimension(name: str, ndim: int, expected: int | None) -> None:
    assert dimension(name, ndim) == expected


def test_kinds_of_both_models() -> None:
    """DeepSeek-V3's and Qwen3's names that a shorter end might take for others."""
    layer = "model.layers.3."
    assert {
        name: kind(layer + name)
        for name in (
            "self_attn.q_a_proj.weight",
            "self_attn.q_b_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
            "self_attn.kv_b_proj.weight",
            "self_attn.q_norm.weight",
            "self_attn.kv_a_layernorm.weight",
            "mlp.gate.weight",
            "mlp.gate.e_score_correction_bias",
            "mlp.shared_experts.gate_proj.weight",
            "mlp.shared_experts.down_proj.weight",
            "mlp.experts.255.gate_proj.weight",
            "mlp.experts.255.down_proj.weight",
        )
    } == {
        "self_attn.q_a_proj.weight": "replicate",
        "self_attn.q_b_proj.weight": "column",
        "self_attn.kv_a_proj_with_mqa.weight": "replicate",
        "self_attn.kv_b_proj.weight": "column",
        "self_attn.q_norm.weight": "replicate",
        "self_attn.kv_a_layernorm.weight": "replicate",
        "mlp.gate.weight": "replicate",
        "mlp.gate.e_score_correction_bias": "replicate",
        "mlp.shared_experts.gate_proj.weight": "column",
        "mlp.shared_experts.down_proj.weight": "row",
        "mlp.experts.255.gate_proj.weight": "column",
        "mlp.experts.255.down_proj.weight": "row",
    }


def test_numbers_do_not_change_the_kind() -> None:
    for end, expected in MODULES:
        assert kind(f"a.layers.3.b.{end}.weight") == kind(f"{end}.weight") == expected


@given(st.integers(1, 6), st.data())
@example(1, None)
def test_cells(experts: int, data: st.DataObject | None) -> None:
    expert = data.draw(st.integers(0, experts - 1)) if data else 0
    layout = Layout((1, 2), Mesh(), f"(n)={cell(expert, experts)} h")
    assert layout.indices(0)[0].tolist() == [0 if e == expert else -1 for e in range(experts)]


def test_grouping_keeps_all_elements_and_the_order() -> None:
    shapes, found = model(), grouped(model())
    assert sum(math.prod(s) for s, _ in found.values()) == sum(
        math.prod(s) for s, _ in shapes.values()
    )
    assert found["model.layers.1.mlp.experts.down_proj.weight"] == ((4, 8, 8), "bfloat16")
    assert [name for name in found if not is_expert(name)] == [
        name for name in shapes if not is_expert(name)
    ]
    assert grouped(found) == found


def test_expert_counts() -> None:
    assert expert_counts(model()) == {1: 4, 2: 4, 3: 4, 4: 4}


# Errors


BF = "bfloat16"
ERRORS = [
    (
        lambda: trainer(model(), ranks=range(20), tp=2, pp=3, ep=4),
        MeshError,
        "20 ranks do not fall into pp=3 stages of tp=2 times dp, and of ep=4 times edp; "
        "choose ranks that are a multiple of pp tp and of pp ep",
    ),
    (
        lambda: trainer(model(), ranks=range(24), tp=0),
        MeshError,
        "24 ranks do not fall into pp=1 stages of tp=0 times dp, and of ep=1 times edp; "
        "choose ranks that are a multiple of pp tp and of pp ep",
    ),
    (
        lambda: trainer(model(), ranks=[]),
        MeshError,
        "0 ranks do not fall into pp=1 stages of tp=1 times dp, and of ep=1 times edp; "
        "choose ranks that are a multiple of pp tp and of pp ep",
    ),
    (
        lambda: trainer(model(), ranks=range(4), pp=2),
        LayoutError,
        "5 layers do not fall evenly into pp=2 stages; give stages= their number for each",
    ),
    (
        lambda: trainer(model(), ranks=range(4), pp=2, stages=(3, 1)),
        LayoutError,
        "stages=[3, 1] are 2 stages of 4 layers, the model has 5 and pp is 2; "
        "give the number of layers of each of pp stages",
    ),
    (
        lambda: trainer(model(), ranks=range(4), pp=2, stages=(5,)),
        LayoutError,
        "stages=[5] are 1 stages of 5 layers, the model has 5 and pp is 2; "
        "give the number of layers of each of pp stages",
    ),
    (
        lambda: trainer(model(experts=3), ranks=range(4), ep=2),
        LayoutError,
        "layer 1 has 3 experts and ep is 2; choose ep to divide them",
    ),
    (
        lambda: trainer(grouped(model(experts=3)), ranks=range(4), ep=2),
        LayoutError,
        "'model.layers.1.mlp.experts.gate_proj.weight' has 3 experts and ep is 2; choose ep to divide them",
    ),
    (
        lambda: trainer({"q_proj.weight": ((6, 8), BF)}, ranks=range(4), tp=4),
        LayoutError,
        "dimension 0 of 'q_proj.weight', shape (6, 8), is stored as 6 and tp is 4; choose tp to divide it",
    ),
    (
        lambda: engine({"lm_head.weight": ((6, 8), BF)}, ranks=range(3), tp=3),
        LayoutError,
        "dimension 0 of 'lm_head.weight', shape (6, 8), is stored as 64 and tp is 3; "
        "choose tp to divide it, or vocab_multiple=3",
    ),
    (
        lambda: engine({"lm_head.weight": ((6, 8), BF)}, ranks=range(3), tp=3, vocab_multiple=0),
        LayoutError,
        "vocab_multiple is 0; give a multiple of at least 1, which pads nothing",
    ),
    (
        lambda: engine(model(), ranks=range(6), tp=4),
        MeshError,
        "6 ranks do not fall into engines of tp=4; choose a multiple of tp",
    ),
    (
        lambda: engine(model(), ranks=range(4), tp=4, kv_heads=3),
        LayoutError,
        "3 key-value heads and tp=4: neither divides the other; "
        "choose tp so that ranks hold whole heads, or each head lies on as many ranks",
    ),
    (
        lambda: engine(model(), ranks=range(4), tp=4, kv_heads=0),
        LayoutError,
        "0 key-value heads and tp=4: neither divides the other; "
        "choose tp so that ranks hold whole heads, or each head lies on as many ranks",
    ),
    (
        lambda: grouped({"experts.0.w1.weight": ((6, 8), BF), "experts.2.w1.weight": ((6, 8), BF)}),
        LayoutError,
        "2 experts numbered 0 to 2 of 'experts.w1.weight', each bfloat16[6, 8]; "
        "the experts of a group are alike, and numbered from 0 without gaps",
    ),
    (
        lambda: grouped({"experts.0.w1.weight": ((6, 8), BF), "experts.1.w1.weight": ((6, 4), BF)}),
        LayoutError,
        "2 experts numbered 0 to 1 of 'experts.w1.weight', each bfloat16[6, 4] and bfloat16[6, 8]; "
        "the experts of a group are alike, and numbered from 0 without gaps",
    ),
    (
        lambda: engine({"norm.weight": ((4,), "float3")}, ranks=range(2), tp=2),
        LayoutError,
        "tensor 'norm.weight' of shape (4,): unknown dtype 'float3'; did you mean 'float32'?",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), ERRORS)
def test_errors(make, error: type[Exception], message: str, fails) -> None:
    fails(make, error, message)
