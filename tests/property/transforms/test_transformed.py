"""Two sides and what travels between them: names, errors, values; and where things are done."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import shardmath as sm
from shardmath import PlanError, transforms
from shardmath.layouts.edits import window
from shardmath.transforms import Cast, Component, Custom, NegativeExp

TP, ONE = sm.Mesh(tp=4), sm.Mesh()
WIDE = sm.Layout((8, 64), TP, "n (tp h)")
NARROW = sm.Layout((8, 64), TP, "(tp n) h", dtype="bfloat16")
CAST = Cast("bfloat16")
Fails = Callable[[Callable[[], object], type[sm.ShardError], str], None]


def blocks(*sizes: int) -> Custom:
    parts = (Component("data", "uint8"), Component("scale", "uint8", sizes))
    return Custom("mx", parts, lambda x: (x, x), lambda xs: xs[0])


def test_wire_tensors_follow_from_the_layouts() -> None:
    src = sm.Layout((8, 128), TP, "n (tp h)")
    dst = sm.Layout((8, 128), TP, "(tp n) h", dtype="uint8")
    t = sm.transforms.transformed({"w": src, "b": WIDE}, {"w": dst, "b": WIDE}, {"w": blocks(32)})
    assert t.src == {
        "w.data": sm.Layout((8, 128), TP, "n (tp h)", dtype="uint8"),
        "w.scale": sm.Layout((8, 4), TP, "n (tp h)", dtype="uint8"),
        "b": WIDE,
    }
    assert t.dst["w.scale"] is sm.Layout((8, 4), TP, "(tp n) h", dtype="uint8")
    plan = sm.plan(t.src, t.dst)
    sm.verify(plan)
    sm.verify(sm.schedule(plan))


def test_what_travels_is_a_plan_like_any_other() -> None:
    """A collective of the narrow type, with a certificate."""
    sharded = sm.Layout((8, 64), TP, "(tp n) h")
    whole = sm.Layout((8, 64), TP, "n h", dtype="bfloat16")
    t = sm.transforms.transformed({"w": sharded}, {"w": whole}, {"w": CAST})
    found: Any = sm.recognize(t.src["w.data"], t.dst["w.data"])  # type: ignore[arg-type]
    assert found.kind == "all_gather"
    rack = sm.Topology(ranks_per_node=2)
    plan = sm.plan(t.src, t.dst)
    assert sm.certify(sm.schedule(plan, topology=rack)).bound_s > 0
    assert sum(plan.received_bytes().values()) == 3 * 8 * 64 * 2


def test_two_layouts_have_components_alone() -> None:
    t = sm.transforms.transformed(WIDE, NARROW, {"*": CAST})
    assert list(t.src) == list(t.dst) == ["data"]
    whole = np.arange(512, dtype=np.float32).reshape(8, 64) % 128
    held = {r: t.prepare(r, whole[:, 16 * r : 16 * r + 16]) for r in TP.ranks}
    arrived: Any = sm.simulate(sm.plan(t.src, t.dst), held)
    found = t.finalize(3, arrived[3])
    assert np.array_equal(np.asarray(found), (whole[6:].view(np.uint32) >> 16).astype(np.uint16))


def test_tensors_without_a_rule_are_the_same_objects() -> None:
    held = {"w": WIDE, "b": (WIDE,)}
    t = sm.transforms.transformed(held, {"w": NARROW, "b": WIDE}, {"w": CAST})
    assert t.src["b"] is held["b"]
    array = np.ones((8, 16), np.float32)
    made = t.prepare(0, {"w": array, "b": array})
    assert made["b"] is array and made["w.data"].dtype == np.uint16
    # Nor is what arrives as it is held.
    wires = {"w.data": np.zeros((2, 64), np.uint16), "b": array}
    assert t.finalize(0, wires)["b"] is array


def test_where_nothing_is_done_nothing_is_copied() -> None:
    late = sm.transforms.transformed(
        {"w": WIDE}, {"w": NARROW}, {"w": Cast("bfloat16", at="destination")}
    )
    array = np.ones((8, 16), np.float32)
    assert late.prepare(0, {"w": array})["w.data"] is array
    early = sm.transforms.transformed({"w": WIDE}, {"w": NARROW}, {"w": CAST})
    arrived = np.ones((2, 64), np.uint16)
    assert early.finalize(0, {"w.data": arrived})["w"] is arrived
    # In its own place, holes included; what is made is without.
    padded = sm.Layout((8, 64), TP, "n (tp h)=80")
    t = sm.transforms.transformed(
        {"w": padded}, {"w": NARROW}, {"w": Cast("bfloat16", at="destination")}
    )
    assert t.src["w.data"] is padded
    t = sm.transforms.transformed({"w": padded}, {"w": NARROW}, {"w": CAST})
    assert t.src["w.data"].local_shape(3) == (8, 4)


def test_addends_are_added_before_they_are_cast() -> None:
    """In the source's dtype, and rounded once: another order would give 256."""
    src = sm.Layout((1,), sm.Mesh(dp=3), "n {sum: dp}")
    dst = sm.Layout((1,), sm.Mesh(dp=3), "n")
    t = sm.transforms.transformed({"w": src}, {"w": dst}, {"w": Cast("bfloat16", at="destination")})
    parts = [256.0, 1.0, 1.0]
    held = {r: t.prepare(r, {"w": np.array([x], np.float32)}) for r, x in enumerate(parts)}
    arrived: Any = sm.simulate(sm.plan(t.src, t.dst), held)
    assert t.finalize(0, arrived[0])["w"] == [258.0]


def test_values_print_compare_and_pickle() -> None:
    t = sm.transforms.transformed({"w": WIDE, "b": WIDE}, {"w": NARROW, "b": WIDE}, {"w": CAST})
    again = sm.transforms.transformed(
        {"b": WIDE, "w": WIDE}, {"w": NARROW, "b": WIDE}, {"w*": CAST}
    )
    other = sm.transforms.transformed(
        {"w": WIDE, "b": WIDE}, {"w": NARROW, "b": WIDE}, {"w": Cast("bfloat16", at="destination")}
    )
    assert t == again and hash(t) == hash(again) and t.digest == again.digest
    assert t != other and t.digest != other.digest
    spelled = sm.Layout((8, 64), TP, {"tp": sm.Shard(1)})
    assert (
        sm.transforms.transformed({"w": spelled, "b": WIDE}, t.held_dst, {"w": CAST}).digest
        == t.digest
    )
    assert str(t).splitlines() == [
        "w: float32[8, 64] to bfloat16[8, 64] by Cast(dtype='bfloat16', at='source', lossy=False) as data bfloat16",
        "1 tensor as held",
    ]
    assert repr(t) == f"<transforms of 1 of 2 tensors, {t.digest[:12]}>"
    assert pickle.loads(pickle.dumps(t)) == t
    assert eval(repr(CAST), {"Cast": Cast}) == CAST
    assert eval(repr(NegativeExp()), {"NegativeExp": NegativeExp}) == NegativeExp()


def test_windows_keep_their_numbers() -> None:
    halves = tuple(window(WIDE, ((a, a + 4), (0, 64))) for a in (0, 4))
    t = sm.transforms.transformed({"w": halves}, {"w": (NARROW,)}, {"w": CAST})
    array = np.ones((8, 16), np.float32)
    made = t.prepare(1, {"w[0]": array, "w[1]": array})
    assert {key: x.shape for key, x in made.items()} == {"w.data[0]": (4, 16), "w.data[1]": (4, 16)}
    assert isinstance(t.dst["w.data"], tuple)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            sm.Layout((8, 64), TP, "n (tp h)"),
            (
                "rank 0 holds positions 0:16 of dimension 1 under float32[8, 64] n (tp h) on "
                "tp=4, and so cuts a block of 32 of component 'scale uint8 per 32' at 16; "
                "divide the dimension at multiples of 32"
            ),
        ),
        (
            sm.Layout((8, 70), sm.Mesh(tp=2, ranks=(5, 3)), {"tp": sm.Ragged(1, (32, 38))}),
            "",
        ),
        (
            sm.Layout((8, 70), sm.Mesh(tp=2, ranks=(5, 3)), {"tp": sm.Ragged(1, (66, 4))}),
            (
                "rank 5 holds positions 0:66 of dimension 1 under float32[8, 70] n (tp[66 4] "
                "h) on tp=2, and so cuts a block of 32 of component 'scale uint8 per 32' at "
                "66; divide the dimension at multiples of 32"
            ),
        ),
        (
            window(sm.Layout((8, 64), TP, "(tp n) h"), ((0, 8), (16, 64))),
            "rank 0 holds positions 16:64",
        ),
    ],
)
def test_cuts_inside_a_block(layout: sm.Layout, words: str) -> None:
    dst = sm.Layout(layout.shape, ONE, "...", dtype="uint8")
    make = lambda: sm.transforms.transformed({"w": layout}, {"w": dst}, {"w": blocks(32)})  # noqa: E731
    if not words:
        assert make().src["w.scale"] == sm.Layout(
            (8, 3), layout.mesh, {"tp": sm.Ragged(1, (1, 2))}, dtype="uint8"
        )
        return
    with pytest.raises(PlanError) as caught:
        make()
    assert words in str(caught.value) and str(caught.value).startswith("tensor 'w': ")


def test_a_block_that_lies_in_two_places_is_whole() -> None:
    """A rank has both halves of a block, the second before the first: packed, they are one."""
    split = sm.Layout((64,), ONE, "(n)=<16:32 0:16 -3 32:64>")
    t = sm.transforms.transformed(
        {"w": split}, {"w": sm.Layout((64,), ONE, "n", dtype="uint8")}, {"w": blocks(32)}
    )
    assert t.src["w.scale"].local_shape(0) == (2,)


I64, I32 = (sm.Layout((4,), ONE, "n", dtype=x) for x in ("int64", "int32"))
SUM = sm.Layout((8, 64), TP, "n h {sum: tp}")

ERRORS = {
    "no rule": (
        lambda: sm.transforms.transformed({"w": WIDE}, {"w": NARROW}, {}),
        (
            "tensor 'w': float32[8, 64] at the source, bfloat16[8, 64] at the destination, "
            "and no rule matches it; add a rule such as {'w': transforms.Cast('bfloat16')}"
        ),
    ),
    "idle": (
        lambda: sm.transforms.transformed({"w": WIDE}, {"w": WIDE}, {"*": CAST, "w": CAST}),
        (
            "rule 'w' is never used: earlier rules match 'w' and all else it matches; move "
            "it before them, or remove it"
        ),
    ),
    "type": (
        lambda: sm.transforms.transformed({"w": WIDE}, {"w": WIDE}, {"*": "bfloat16"}),  # type: ignore[dict-item]
        "rule '*' has 'bfloat16', not a transform; give a value such as transforms.Cast('bfloat16')",
    ),
    "class": (
        lambda: sm.transforms.transformed({"w": WIDE}, {"w": WIDE}, {"*": Cast}),  # type: ignore[dict-item]
        "rule '*' has <class 'shardmath.values.transforms.pointwise.Cast'>, not a transform; "
        "give a value such as transforms.Cast('bfloat16')",
    ),
    "clash": (
        lambda: sm.transforms.transformed(
            {"w": WIDE, "w.data": WIDE}, {"w": NARROW, "w.data": WIDE}, {"w": CAST}
        ),
        "'w.data' is both a tensor and a component of 'w'; rename the tensor or the component",
    ),
    "integers": (
        lambda: sm.transforms.transformed({"w": I64}, {"w": I32}, {"w": Cast("int32")}),
        (
            "tensor 'w': Cast(dtype='int32', at='source', lossy=False) of int64[4] to "
            "int32[4]: cannot cast int64 to int32: values could be lost; pass lossy=True if "
            "that is meant"
        ),
    ),
    "fractions": (
        lambda: sm.transforms.transformed(
            {"w": WIDE}, {"w": WIDE}, {"w": Cast("int8", lossy=True)}
        ),
        (
            "tensor 'w': Cast(dtype='int8', at='source', lossy=True) of float32[8, 64] to "
            "float32[8, 64]: cannot cast float32 to int8: the results for NaN and large "
            "numbers differ between machines; use transforms.Custom"
        ),
    ),
    "float8": (
        lambda: sm.transforms.transformed({"w": WIDE}, {"w": WIDE}, {"w": Cast("float8_e4m3fn")}),
        (
            "tensor 'w': Cast(dtype='float8_e4m3fn', at='source', lossy=False) of float32[8, "
            "64] to float32[8, 64]: cannot cast float32 to float8_e4m3fn: float8_e4m3fn has "
            "no cast; use transforms.Custom, with scales if it needs them"
        ),
    ),
    "exp": (
        lambda: sm.transforms.transformed({"w": I64}, {"w": I64}, {"w": NegativeExp()}),
        (
            "tensor 'w': NegativeExp(at='destination') of int64[4] to int64[4]: int64 has no "
            "exp; give tensors of a float dtype"
        ),
    ),
    "addends": (
        lambda: sm.transforms.transformed({"w": SUM}, {"w": NARROW}, {"w": CAST}),
        (
            "tensor 'w' is Partial at the source: float32[8, 64] n h {sum: tp} on tp=4, and "
            "transformed addends do not add up to the transformed sum; transform it at the "
            "destination instead"
        ),
    ),
    "to addends": (
        lambda: sm.transforms.transformed({"w": WIDE}, {"w": SUM}, {"w": CAST}),
        (
            "tensor 'w' is Partial at the destination: float32[8, 64] n h {sum: tp} on tp=4, "
            "but transforms give values, not addends; give it a destination layout without "
            "Partial"
        ),
    ),
    "shapes": (
        lambda: sm.transforms.transformed(
            {"w": WIDE}, {"w": sm.Layout((8, 32), ONE, "n h")}, {"w": CAST}
        ),
        (
            "tensor 'w': component 'data bfloat16' has shape [8, 64] for float32[8, 64], but "
            "[8, 32] for float32[8, 32]; give grains, or tensors, with which both are the "
            "same"
        ),
    ),
    "component shapes": (
        lambda: sm.transforms.transformed(
            {"w": WIDE}, {"w": sm.Layout((8, 32), ONE, "n h")}, {"w": blocks()}
        ),
        (
            "tensor 'w': component 'data uint8' has shape [8, 64] for float32[8, 64], but "
            "[8, 32] for float32[8, 32]; give grains, or tensors, with which both are the "
            "same"
        ),
    ),
    "held": (
        lambda: sm.transforms.transformed(
            {"w": WIDE},
            {"w": WIDE},
            {"w": Custom("c", (Component("data", "int8"),), None, abs)},  # type: ignore[arg-type]
        ),
        (
            "tensor 'w': Custom('c': data int8) does nothing at the source, which holds "
            "float32[8, 64], but moves int8[8, 64]; give it a function at the source"
        ),
    ),
    "grain": (
        lambda: sm.transforms.transformed({"w": I64}, {"w": I64}, {"w": blocks(2, 2)}),
        (
            "component 'scale uint8 per 2x2' has a grain of 2 dimensions, but the tensor has "
            "1; give a grain of 1 at most"
        ),
    ),
    "name": (
        lambda: Component("a.b", "int8"),
        "the name 'a.b' of a component is empty, or has one of . [ ]; write one such as 'scale'",
    ),
    "no block": (
        lambda: Component("a", "int8", (0,)),
        "component 'a' has grain (0,); give sizes of 1 or more",
    ),
    "end": (
        lambda: Cast("int8", at="sender"),
        "Cast('int8') has at='sender'; give 'source' or 'destination'",
    ),  # type: ignore[arg-type]
    "idle custom": (
        lambda: Custom("c", (Component("data", "int8"),)),
        "Custom 'c' has no function; give at_source= or at_destination=",
    ),
    "twice": (
        lambda: Custom("c", (Component("data", "int8"),) * 2, abs),  # type: ignore[arg-type]
        "Custom 'c' has components ['data', 'data']; give one or more different names",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str, fails: Fails) -> None:
    make, words = ERRORS[case]
    fails(make, PlanError, words)


def test_arrays_that_do_not_fit() -> None:
    t = sm.transforms.transformed({"w": WIDE}, {"w": NARROW}, {"w": CAST})
    cases: dict[str, Callable[[], object]] = {
        "rank 0: array 'w' is missing; pass it with 'v'": lambda: t.prepare(0, {"v": np.zeros(3)}),
        "array 'w' has shape (8, 64), but float32[8, 64] n (tp h) on tp=4 gives this rank (8, 16)": (
            lambda: t.prepare(0, {"w": np.zeros((8, 64), np.float32)})
        ),
        "array 'w' has dtype float64, not float32; pass an array of float32": (
            lambda: t.prepare(0, {"w": np.zeros((8, 16))})
        ),
        # Of the same name.
        "array 'w' has dtype >f4, of another byte order; pass x.astype(x.dtype.newbyteorder('='))": (
            lambda: t.prepare(0, {"w": np.zeros((8, 16), ">f4")})
        ),
    }
    for words, make in cases.items():
        with pytest.raises(PlanError) as caught:
            make()
        assert words in str(caught.value)


def test_what_a_transform_makes_is_looked_at() -> None:
    part = (Component("data", "float32"),)
    array = {"w": np.zeros((8, 16), np.float32)}
    bad = {
        "makes 2 arrays for 1 component": lambda x: (x, x),
        "array 'w.data' has dtype float64": lambda x: (x.astype(float),),
        "array 'w.data' has dtype >f4, of another byte order": lambda x: (x.astype(">f4"),),
        "array 'w.data' has shape (16, 8)": lambda x: (x.T,),
    }
    for words, function in bad.items():
        t = sm.transforms.transformed({"w": WIDE}, {"w": WIDE}, {"w": Custom("c", part, function)})
        with pytest.raises(PlanError) as caught:
            t.prepare(0, array)
        assert words in str(caught.value)


def test_rules_are_kinds_and_globs_and_names() -> None:
    names = ("layers.0.fc1.weight", "layers.0.fc2.weight", "norm.weight", "a[0]")
    side = dict.fromkeys(names, WIDE)
    rules = {"column": CAST, "*norm*": NegativeExp(), "a[0]": Cast("float16")}
    t = sm.transforms.transformed(side, side, rules)
    assert {n: type(w.transform).__name__ for n, w in t.wired.items()} == {
        "layers.0.fc1.weight": "Cast",
        "norm.weight": "NegativeExp",
        "a[0]": "Cast",
    }
    assert isinstance(CAST, transforms.Transform)
