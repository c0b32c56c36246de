"""Hugging Face names: numbers, cells and groups of experts; sharing of layouts."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmath import Layout, LayoutError
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.styles import is_expert
from shardmath.models.systems.former import trainer
from shardmath.models.systems.hf import (
    TensorPlace,
    cell,
    expert_counts,
    grouped,
    layouts,
    numbers,
)
from tests.property.systems.model import (
    STAGES,
    model,
)


def test_each_distinct_layout_is_one_object() -> None:
    side = trainer(model(), ranks=range(24), tp=2, pp=3, ep=4, stages=STAGES)
    experts = [layout for name, layout in side.items() if is_expert(name)]
    assert (len(experts), len({id(layout) for layout in experts})) == (48, 12)
    calls: list[str] = []

    def place(name: str, shape: tuple[int, ...]) -> TensorPlace:
        calls.append(name)
        return TensorPlace(Mesh(tp=2), "(tp n) ...", shape)

    found = layouts({"a": ((4, 2), "int8"), "b": ((4, 2), "int8"), "c": ((4, 2), "int16")}, place)
    assert found["a"] is found["b"] is not found["c"]
    assert calls == ["a", "b", "c"]


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


BF = "bfloat16"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: grouped(
                {"experts.0.w1.weight": ((6, 8), BF), "experts.2.w1.weight": ((6, 8), BF)}
            ),
            LayoutError,
            "2 experts numbered 0 to 2 of 'experts.w1.weight', each bfloat16[6, 8]; "
            "give experts of one shape and dtype, numbered from 0 without gaps",
        ),
        (
            lambda: grouped(
                {"experts.0.w1.weight": ((6, 8), BF), "experts.1.w1.weight": ((6, 4), BF)}
            ),
            LayoutError,
            "2 experts numbered 0 to 1 of 'experts.w1.weight', each bfloat16[6, 4] and bfloat16[6, 8]; "
            "give experts of one shape and dtype, numbered from 0 without gaps",
        ),
    ],
)
def test_errors(make, error: type[Exception], message: str, fails) -> None:
    fails(make, error, message)
