"""Megatron: which rank of a trainer holds what, against loops over the coordinates."""

from __future__ import annotations

import itertools

import pytest

from shardmath import Layout, LayoutError, MeshError
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.models.systems.former import trainer
from shardmath.models.systems.hf import (
    grouped,
)
from tests.property.systems.model import (
    EXPERTS,
    STAGES,
    Held,
    divided,
    held,
    model,
    whole,
)


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


BF = "bfloat16"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: trainer(model(), ranks=range(20), tp=2, pp=3, ep=4),
            MeshError,
            "20 ranks do not fall into pp=3 stages of tp=2 times dp, and of ep=4 times edp; "
            "choose sizes of 1 or more, and a number of ranks that pp * tp and pp * ep divide",
        ),
        (
            lambda: trainer(model(), ranks=range(24), tp=0),
            MeshError,
            "24 ranks do not fall into pp=1 stages of tp=0 times dp, and of ep=1 times edp; "
            "choose sizes of 1 or more, and a number of ranks that pp * tp and pp * ep divide",
        ),
        (
            lambda: trainer(model(), ranks=[]),
            MeshError,
            "0 ranks do not fall into pp=1 stages of tp=1 times dp, and of ep=1 times edp; "
            "choose sizes of 1 or more, and a number of ranks that pp * tp and pp * ep divide",
        ),
        (
            lambda: trainer(model(), ranks=range(4), pp=2),
            LayoutError,
            "5 layers do not fall evenly into pp=2 stages; "
            "pass stages= with the number of layers of each stage",
        ),
        (
            lambda: trainer(model(), ranks=range(4), pp=2, stages=(3, 1)),
            LayoutError,
            "stages=[3, 1] are 2 stages of 4 layers, the model has 5 and pp is 2; "
            "pass 2 numbers of layers that add up to 5",
        ),
        (
            lambda: trainer(model(), ranks=range(4), pp=2, stages=(5,)),
            LayoutError,
            "stages=[5] are 1 stages of 5 layers, the model has 5 and pp is 2; "
            "pass 2 numbers of layers that add up to 5",
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
            (
                "tp of size 4 does not divide dimension 0 of 'q_proj.weight', shape (6, 8), "
                "which is stored as 6; choose a size of tp that divides it"
            ),
        ),
    ],
)
def test_errors(make, error: type[Exception], message: str, fails) -> None:
    fails(make, error, message)
