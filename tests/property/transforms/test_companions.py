"""Companions: tensors that are held as several, at the source, at the destination, or at both."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import shardmath as sm
from shardmath.transforms import Companion, Component, Custom

BLOCK = 4
SCALE = Companion("_scale", "float32", (BLOCK,))
PARTS = (Component("data", "int8"), Component("scale", "float32", (BLOCK,)))
SHAPE = (8, 16)


def cut(layout: sm.Layout, rank: int, values: Any) -> Any:
    """What the rank holds of an array."""
    return values[np.ix_(*layout.indices(rank))]


def _blocks(array: Any) -> Any:
    return array.reshape(*array.shape[:-1], -1, BLOCK)


def quantize(array: Any) -> tuple[Any, Any]:
    """Bytes of which the largest of a block is 127, and what they stand for."""
    blocks = _blocks(array)
    scale = (np.abs(blocks).max(-1) / 127).astype(np.float32)
    data = np.rint(blocks / scale[..., None]).astype(np.int8)
    return data.reshape(array.shape), scale


def dequantize(arrays: tuple[Any, Any]) -> Any:
    data, scale = arrays
    values = _blocks(data).astype(np.float32) * scale[..., None]
    return values.reshape(data.shape)


def halve(arrays: tuple[Any, Any]) -> tuple[Any, Any]:
    """Other bytes for half of the values."""
    return quantize(dequantize(arrays) / 2)


WHOLE = (Component("data", "float32"),)
AT_SOURCE = Custom("to bytes", PARTS, at_source=quantize, beside=((), (SCALE,)))
AT_DESTINATION = Custom(
    "to bytes there", WHOLE, at_destination=lambda one: quantize(*one), beside=((), (SCALE,))
)
BACK = Custom("to numbers", PARTS, at_destination=dequantize, beside=((SCALE,), ()))
BACK_AT_SOURCE = Custom(
    "to numbers here", WHOLE, at_source=lambda pair: (dequantize(pair),), beside=((SCALE,), ())
)
HALVES = Custom("halves", PARTS, at_source=halve, beside=((SCALE,), (SCALE,)))
HALVES_THERE = Custom("halves there", PARTS, at_destination=halve, beside=((SCALE,), (SCALE,)))


def lay(mesh: sm.Mesh, text: str, quantized: bool) -> dict[str, sm.Layout]:
    """The tensor beside one that is left alone, with scales where it has some."""
    held = {
        "w": sm.Layout(SHAPE, mesh, text, dtype="int8" if quantized else "float32"),
        "norm": sm.Layout((8,), mesh, "n"),
    }
    if quantized:
        held["w_scale"] = sm.Layout((8, 16 // BLOCK), mesh, text)
    return held


CASES = {
    "at the source": (AT_SOURCE, False, True, quantize),
    "at the destination": (AT_DESTINATION, False, True, quantize),
    "back": (BACK, True, False, dequantize),
    "back at the source": (BACK_AT_SOURCE, True, False, dequantize),
    "to other bytes": (HALVES, True, True, halve),
    "to other bytes there": (HALVES_THERE, True, True, halve),
}
TEXTS = ["(tp n) (dp h)", "n (tp dp h)", "(dp tp n) h", "n h", "(2 tp n) (2 dp h)"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("here", TEXTS)
@pytest.mark.parametrize("there", TEXTS)
def test_what_is_made_of_parts_is_part_of_what_is_made_of_all(
    case: str, here: str, there: str
) -> None:
    transform, was, becomes, function = CASES[case]
    src = lay(sm.Mesh(dp=2, tp=2), here, was)
    dst = lay(sm.Mesh(tp=2, dp=2, ranks=(3, 4, 5, 2)), there, becomes)
    values = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    given: Any = quantize(values) if was else values
    made: Any = function(given)
    t = sm.transforms.transformed(src, dst, {"w": transform})
    plan = sm.plan(t.src, t.dst)
    sm.verify(plan)

    def name(some: Any, is_pair: bool) -> dict[str, Any]:
        norm = np.arange(8, dtype=np.float32)
        return {
            "norm": norm,
            **(dict(zip(("w", "w_scale"), some, strict=True)) if is_pair else {"w": some}),
        }

    begun, wanted = name(given, was), name(made, becomes)
    sent = {
        rank: t.prepare(rank, {n: cut(src[n], rank, begun[n]) for n in src})
        for rank in plan.src_ranks
    }
    arrived = sm.simulate(plan, sent)
    for rank in plan.dst_ranks:
        found: Any = t.finalize(rank, arrived[rank])
        assert found.keys() == dst.keys()
        for n in dst:
            np.testing.assert_array_equal(found[n], cut(dst[n], rank, wanted[n]))


def refusal(src: Any, dst: Any, rule: Custom = AT_SOURCE) -> str:
    with pytest.raises(sm.PlanError) as caught:
        sm.transforms.transformed(src, dst, {"w": rule})
    return str(caught.value)


def test_what_does_not_fit_is_named() -> None:
    mesh = sm.Mesh(dp=2, tp=2)
    plain, held = lay(mesh, "n (tp h)", False), lay(mesh, "n (tp h)", True)
    short = {name: one for name, one in held.items() if name != "w_scale"}
    said = refusal(plain, short)
    assert "the destination does not have" in said
    assert "names of tensors differ: only the destination has ['w_scale']" in refusal(
        plain, held, HALVES_AT_HOME
    )
    other = held | {"w_scale": sm.Layout((8, 4), mesh, "(tp n) h")}
    said = refusal(plain, other, AT_DESTINATION)
    assert (
        "'w_scale' is float32[8, 4] (tp n) h on dp=2 tp=2 at the destination, but 'w' int8" in said
    )
    wide = held | {"w_scale": sm.Layout((8, 4), mesh, "n (tp h)", dtype="float64")}
    assert "give ranks the same blocks of both, as float32[8, 4] n (tp h)" in refusal(
        plain, wide, AT_DESTINATION
    )
    assert "but moves int8[8, 16], float32[8, 4]" in refusal(plain, wide)
    fine = lay(sm.Mesh(dp=2, tp=8), "n (tp h)", True) | {"norm": held["norm"]}
    fine["w_scale"] = sm.Layout((8, 4), sm.Mesh(dp=4, tp=4), "n (tp h)")
    assert "cuts a block of 4 of component 'companion float32 per 4'" in refusal(
        plain, fine, AT_DESTINATION
    )


HALVES_AT_HOME = Custom("halves", (Component("data", "float32"),), at_source=lambda x: (x / 2,))


def test_rules_take_companions_with_them() -> None:
    mesh = sm.Mesh(tp=2)
    src, dst = lay(mesh, "(tp n) h", True), lay(mesh, "n (tp h)", False)
    del src["norm"], dst["norm"]
    t = sm.transforms.transformed(src, dst, {"*": BACK})
    assert list(t.wired) == ["w"] and set(t.src) == {"w.data", "w.scale"}
    assert t.find_held({"w.data": 0}) == ["w"]
    assert str(t).splitlines() == [
        "w: int8[8, 16] to float32[8, 16] by Custom('to numbers': data int8, scale float32 per 4 "
        "from w_scale to w) as data int8, scale float32 per 4"
    ]
    assert t.digest == sm.transforms.transformed(src, dst, {"w": BACK}).digest
    moved = dst | {"w": sm.Layout(SHAPE, mesh, "(tp n) h")}
    assert t.digest != sm.transforms.transformed(src, moved, {"w": BACK}).digest


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        (3, "the companions of Custom 'c' are 3"),
        ((1,), "give (at_source, at_destination)"),
        (((1,), ()), "give Companion(suffix, dtype, grain)"),
    ],
)
def test_companions_are_what_they_are_said_to_be(beside: Any, said: str) -> None:
    with pytest.raises(sm.PlanError) as caught:
        Custom("c", PARTS, at_source=quantize, beside=beside)
    assert said in str(caught.value)
    with pytest.raises(sm.PlanError, match="a companion is ''"):
        Companion("", "float32")
    with pytest.raises(sm.PlanError, match="give sizes of 1 or more"):
        Companion("_scale", "float32", (0,))
