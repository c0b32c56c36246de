"""A loader that computes is no loader that copies, whatever numbers it gets right; and one that copies is recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import shardmath as sm
import shardmath_torch as smt

pytestmark = pytest.mark.long

FLOATS = ["float64", "float32", "bfloat16", "float16"]
COMPUTED: dict[str, tuple[Callable[[Tensor], Tensor], list[str]]] = {
    "absolute": (lambda w: w.abs(), [*FLOATS, "int8", "int64"]),
    "relu": (lambda w: w.relu(), [*FLOATS, "int8", "int32"]),
    "rounded": (lambda w: w.round(), FLOATS),
    "truncated": (lambda w: w.to(torch.int64).to(w.dtype), FLOATS),
    "clamped to FP8": (lambda w: w.clamp(-448, 448), FLOATS),
    "clamped to 7 bits": (lambda w: w.clamp(-64, 63), [*FLOATS, "int8", "int64"]),
    "without NaN": (lambda w: w.nan_to_num(posinf=torch.inf, neginf=-torch.inf), FLOATS),
    "without infinities": (lambda w: w.nan_to_num(torch.nan), FLOATS),
    "sorted": (lambda w: w.sort().values, [*FLOATS, "int8", "int64", "bool"]),
    "the largest first": (lambda w: w.topk(len(w)).values, [*FLOATS, "int8"]),
    "zeros for small ones": (lambda w: torch.where(w.abs() < 1e-3, 0, w), FLOATS),
    "zeros for negative ones": (lambda w: torch.where(w < 0, 0, w), [*FLOATS, "int8"]),
    "some twice": (lambda w: w[w.argsort().argsort().argsort().argsort()], [*FLOATS, "int8"]),
    "a sum from the left": (lambda w: w.cumsum(0).to(w.dtype), [*FLOATS, "int8"]),
    "rounded to FP8": (lambda w: w.to(torch.float8_e4m3fn).to(w.dtype), FLOATS),
    "rounded to 16 bits": (lambda w: w.to(torch.bfloat16).to(w.dtype), ["float64", "float32"]),
    "an epsilon more": (lambda w: w + 1e-6, FLOATS),
    "not": (lambda w: w.bitwise_not(), ["bool", "int8"]),
    "the lower bits": (lambda w: w & 0xFFFFFFFF, ["int64"]),
}
CASES = [(what, dtype) for what, (_, dtypes) in COMPUTED.items() for dtype in dtypes]


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(("what", "dtype"), CASES)
def test_what_is_computed_is_no_copy(what: str, dtype: str, size: int) -> None:
    make = COMPUTED[what][0]
    if size == 1 and what in ("sorted", "the largest first", "some twice", "a sum from the left"):
        size = 2
    into = {"x": torch.zeros(2 * size).to(getattr(torch, dtype))}
    shapes = dict.fromkeys("wu", ((size,), dtype))

    def load(given: dict[str, Tensor]) -> None:
        into["x"].copy_(torch.cat([make(given["w"]), given["u"]]))

    with pytest.raises(sm.StoreError, match="'x' is computed"):
        smt.record(load, shapes, into)


SCALES: dict[str, Callable[[Tensor], Tensor]] = {
    "largest": lambda w: w.max(),
    "smallest": lambda w: w.min(),
    "median": lambda w: w.median(),
    "mean": lambda w: w.mean(),
    "largest without its sign": lambda w: w[w.abs().argmax()],
}


@pytest.mark.parametrize("number", [2, 3, 5])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("what", SCALES)
def test_one_scale_of_several(what: str, dtype: str, number: int) -> None:
    """What loaders do with scales of the parts of a fused weight."""
    into = {"x": torch.zeros(1).to(getattr(torch, dtype))}
    shapes = {f"{i}.scale": ((1,), dtype) for i in range(number)}

    def load(given: dict[str, Tensor]) -> None:
        into["x"].copy_(SCALES[what](torch.cat(list(given.values()))))

    with pytest.raises(sm.StoreError, match="'x' is computed"):
        smt.record(load, shapes, into)


def test_what_is_added_to_what_a_target_had() -> None:
    into = {"x": torch.zeros(4)}
    with pytest.raises(sm.StoreError, match="'x' is computed"):
        smt.record(lambda given: into["x"].add_(given["w"]), {"w": ((4,), "float32")}, into)


COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugated": lambda w: w.conj(),
    "turned": lambda w: w * (1 + 1j),
    "real": lambda w: w.real.to(w.dtype),
    "imaginary": lambda w: torch.view_as_complex(torch.stack([w.imag, w.real], dim=-1)),
}


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("what", COMPLEX)
def test_complex_numbers_have_two_parts(what: str, dtype: str) -> None:
    into = {"x": torch.zeros(4, dtype=getattr(torch, dtype))}
    shapes = {"w": ((4,), dtype)}

    def load(given: dict[str, Tensor]) -> None:
        into["x"].copy_(torch.cat([COMPLEX[what](given["w"])]))

    with pytest.raises(sm.StoreError, match="'x' is computed"):
        smt.record(load, shapes, into)


@pytest.mark.parametrize("target", ["uint8", "float8_e5m2"])
def test_bits_that_are_stored_as_another_type(target: str) -> None:
    into = {"x": torch.zeros(4).to(getattr(torch, target))}

    def load(given: dict[str, Tensor]) -> None:
        into["x"].view(torch.uint8).copy_(given["w"].view(torch.uint8))

    word = f"'x' is computed by bits of float8_e4m3fn seen as {target}"
    with pytest.raises(sm.StoreError, match=word):
        smt.record(load, {"w": ((4,), "float8_e4m3fn")}, into)


LOSING = ["int32", "float8_e4m3fn", "bfloat16", "float16", "bool"]


@pytest.mark.parametrize("ways", [("views",), ("numbers",)])
@pytest.mark.parametrize("narrow", LOSING)
def test_a_cast_that_loses_and_one_back(narrow: str, ways: Any) -> None:
    into = {"x": torch.zeros(4)}

    def load(given: dict[str, Tensor]) -> None:
        into["x"].copy_(given["w"].to(getattr(torch, narrow)).float())

    word = f"a cast to {narrow}" if ways == ("views",) else "no element"
    with pytest.raises(sm.StoreError, match=f"(?=.*'x' is computed).*{word}"):
        smt.record(load, {"w": ((4,), "float32")}, into, ways=ways)


@pytest.mark.parametrize("ways", [("views",), ("numbers",)])
def test_a_chain_of_casts_is_judged_by_every_link(ways: Any) -> None:
    """Wider and back is a copy, and what is stored may be of fewer bits; but it is rounded once."""
    into = {
        "same": torch.zeros(64).to(torch.bfloat16),
        "less": torch.zeros(64).to(torch.float8_e5m2),
    }
    shapes = {"w": ((64,), "bfloat16")}

    def load(given: dict[str, Tensor]) -> None:
        wide = given["w"].to(torch.float32)
        into["same"].copy_(wide.to(torch.float64).to(torch.bfloat16))
        into["less"].copy_(wide)

    assert not smt.record(load, shapes, into, ways=ways).unwritten
    twice = {"x": torch.zeros(64).to(torch.float8_e5m2)}
    with pytest.raises(sm.StoreError, match="'x' is computed"):
        smt.record(
            lambda given: twice["x"].copy_(given["w"].to(torch.float16)),
            {"w": ((64,), "float32")},
            twice,
            ways=ways,
        )


def test_a_value_that_was_stored_in_fewer_bits_and_read_again() -> None:
    into = {"a": torch.zeros(4).to(torch.bfloat16), "b": torch.zeros(4)}

    def load(given: dict[str, Tensor]) -> None:
        into["a"].copy_(given["w"])
        into["b"].copy_(into["a"])

    with pytest.raises(sm.StoreError, match="'b' is computed by a cast to bfloat16"):
        smt.record(load, {"w": ((4,), "float32")}, into)


TYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "int64",
    "bool",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_recorded_by_numbers(dtype: str) -> None:
    """Also by the side of others, and where many elements have one value."""
    own = getattr(torch, dtype)
    shapes = {"w": ((40, 30), dtype), "s": ((7,), "float32"), "u": ((3, 30), dtype)}
    memory = torch.zeros(44 * 30 * own.itemsize, dtype=torch.uint8)
    into = {"x": memory.view(own).view(44, 30), "s": torch.zeros(7)}

    def load(given: dict[str, Tensor]) -> None:
        into["x"][:40] = given["w"]
        into["x"][40:43] = given["u"]
        into["s"].copy_(given["s"].flip(0))

    found = smt.record(load, shapes, into, ways=("numbers",))
    assert found.unwritten == {"x": 30}
    assert {p.tensor: p.cell for p in found.natives[0].pieces} == {"w": 0, "u": 1200}
    assert found.natives[1].pieces[0].element == 6


@pytest.mark.parametrize(
    ("source", "target"),
    [
        *itertools.permutations(["float32", "bfloat16", "float16", "float8_e5m2"], 2),
        ("int64", "int32"),
        ("int8", "float32"),
        ("bool", "float32"),
        ("float32", "complex64"),
    ],
)
def test_what_is_stored_in_another_type(source: str, target: str) -> None:
    into = {"x": torch.zeros(300).to(getattr(torch, target))}
    shapes = {"w": ((300,), source)}
    found = smt.record(lambda given: into["x"].copy_(given["w"]), shapes, into, ways=("numbers",))
    assert [piece.blocks for piece in found.natives[0].pieces] == [((300, 1, 1),)]


def test_fractions_through_numpy_which_has_no_bfloat16() -> None:
    """NaN comes back with other bits."""
    into = {"x": torch.zeros(8, 3).to(torch.bfloat16)}
    shapes = dict.fromkeys("qk", ((4, 3), "bfloat16"))

    def load(given: dict[str, Tensor]) -> None:
        both = np.concatenate([tensor.float().numpy() for tensor in given.values()])
        into["x"].copy_(torch.from_numpy(both).to(torch.bfloat16))

    assert not smt.record(load, shapes, into).unwritten


@pytest.mark.parametrize("raises", [True, False])
def test_a_loader_that_takes_finite_numbers_alone(raises: bool) -> None:
    into = {"x": torch.zeros(4, 3)}

    def load(given: dict[str, Tensor]) -> None:
        if not given["w"].isfinite().all():
            if raises:
                raise ValueError("not finite")
            return
        into["x"].copy_(given["w"].flip(0))

    found = smt.record(load, {"w": ((4, 3), "float32")}, into)
    assert found.natives[0].way == "numbers"


def test_a_loader_that_stores_by_chance() -> None:
    into = {"x": torch.zeros(40)}
    with pytest.raises(sm.StoreError, match="'x' is computed"):
        smt.record(
            lambda given: into["x"].copy_(given["w"][torch.randperm(40)]),
            {"w": ((40,), "float32")},
            into,
        )


def test_a_tensor_of_another_shape_in_place_of_a_target() -> None:
    into = {"x": torch.zeros(4)}

    def load(given: dict[str, Tensor]) -> None:
        into["x"] = torch.cat([given["w"], given["w"]])

    with pytest.raises(sm.StoreError, match=r"the shape of 'x' from \[4\] to \[8\]; put"):
        smt.record(load, {"w": ((4,), "float32")}, into)


def test_elements_with_equal_numbers_of_two_types_differ() -> None:
    """Element 0 of the one is not element 0 of the other, nor are parts of complex numbers."""
    into = {"x": torch.zeros(6, 4, dtype=torch.float8_e4m3fn)}
    shapes = {"norm": ((4,), "float32"), "w": ((6, 4), "bfloat16")}
    found = smt.record(lambda given: into["x"].copy_(given["w"].flip(0)), shapes, into)
    assert {piece.tensor for piece in found.natives[0].pieces} == {"w"}
    part = {"x": torch.zeros(1)}
    with pytest.raises(sm.StoreError, match="'x' is computed"):
        smt.record(
            lambda given: part["x"].copy_(torch.cat([given["z"]]).real),
            {"s": ((1,), "float32"), "z": ((1,), "complex64")},
            part,
        )


def test_a_cast_that_no_element_is_told_by_beside_one_that_is_the_same_almost_always() -> None:
    """All numbers of the one, and almost all of the other, are the same truth."""
    into = {"x": torch.zeros(1, dtype=torch.bool)}
    shapes = {"a": ((1,), "float8_e8m0fnu"), "b": ((1,), "int64")}
    with pytest.raises(sm.StoreError, match="float8_e8m0fnu is not cast to bool"):
        smt.record(lambda given: into["x"].copy_(torch.cat([given["a"]])), shapes, into)


@pytest.mark.parametrize("size", range(1, 41, 3))
def test_few_cells_in_fewer_bits_are_rounded_once(size: int) -> None:
    """Most numbers are infinite in either type."""
    into = {"x": torch.zeros(1, dtype=torch.float8_e4m3fn)}

    def load(given: dict[str, Tensor]) -> None:
        into["x"].copy_(torch.cat([given["w"]])[-1:].to(torch.float8_e5m2))

    with pytest.raises(sm.StoreError, match="'x' is computed"):
        smt.record(load, {"w": ((size,), "float32")}, into)


def test_an_empty_target_by_numbers() -> None:
    into = {"x": torch.zeros(0, 3)}
    shapes = {"w": ((0, 3), "float32")}
    found = smt.record(lambda given: into["x"].copy_(torch.cat([given["w"]])), shapes, into)
    assert not found.unwritten


TYPES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *FLOATS,
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "complex64",
    "complex128",
]


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("wanted", TYPES)
@pytest.mark.parametrize("given", TYPES)
def test_a_cast_to_what_is_stored_is_recorded_alike_by_both_ways_or_named_by_both(
    given: str, wanted: str
) -> None:
    """What is stored says what it was cast to; but a part of a complex number is another number."""
    into = {"a": torch.zeros(9, dtype=getattr(torch, wanted), device="meta")}
    shapes = {"q": ((9,), given)}

    def record(way: Any) -> sm.storage.Recorded:
        return smt.record(lambda named: into["a"].copy_(named["q"]), shapes, into, ways=(way,))

    is_part = given.startswith("complex") and not wanted.startswith("complex")
    if is_part:
        with pytest.raises(
            sm.StoreError, match=f"'a' is computed by a cast to {wanted}, not copied; name"
        ):
            record("views")
    else:
        assert record("views").natives[0].pieces[0].blocks == ((9, 1, 1),)
    # Powers of two are all true: no element is told from another.
    if is_part or (given, wanted) == ("float8_e8m0fnu", "bool"):
        with pytest.raises(sm.StoreError, match=f"{given} is not cast to {wanted} by numbers"):
            record("numbers")
    else:
        assert record("numbers").natives[0].pieces[0].blocks == ((9, 1, 1),)


def test_a_part_of_complex_numbers_that_is_declared() -> None:
    into = {"a": torch.zeros(9, device="meta")}
    shapes = {"q": ((9,), "complex64")}
    found = smt.record(
        lambda named: into["a"].copy_(named["q"]), shapes, into, functions={"a": "real"}
    )
    assert found.natives[0].function == "real"


@pytest.mark.parametrize("given", [None, {"q": (4,)}, {"q": ((4.0,), "float32")}])
def test_shapes_that_are_none(given: Any) -> None:
    with pytest.raises(sm.StoreError, match="give"):
        smt.record(lambda weights: None, given, {"a": torch.zeros(4)})


def test_sizes_of_numpy_are_written_as_text() -> None:
    into = {"a": torch.zeros(4)}
    shapes: Any = {"q": (np.array([4]), "float32")}
    recorded = smt.record(lambda weights: into["a"].copy_(weights["q"]), shapes, into)
    assert sm.storage.Recorded.from_json(recorded.to_json()) == recorded


def test_a_function_of_a_target_that_has_no_data() -> None:
    """Whoever computes the stored tensor gets the logical one alone."""
    into = {name: torch.empty(4, device="meta") for name in ("a", "scale")}

    def load(weights: dict[str, torch.Tensor]) -> None:
        into["a"].copy_(weights["q"] * into["scale"])

    with pytest.raises(sm.StoreError, match="'a' is computed by 'f', but the elements that it is"):
        smt.record(load, {"q": ((4,), "float32")}, into, functions={"a": "f"})


def test_targets_that_are_none() -> None:
    with pytest.raises(sm.StoreError, match=r"into= has NoneType .* a mapping is needed"):
        smt.record(lambda weights: None, {"q": ((4,), "float32")}, None)  # type: ignore[arg-type]
