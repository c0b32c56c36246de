"""Simulate: arithmetic, holes, dtypes, order of addends, and what it refuses."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from shardmath import Layout, Mesh, PlanError, plan, simulate
from shardmath.layouts.edits import window
from shardmath.proofs.simulate import FOLD

TP, FAR = Mesh(tp=3), Mesh(tp=3, ranks=range(4, 7))


def reduce(
    op: str, values: list[np.ndarray], dst: str = "n", dtype: str = "float32"
) -> dict[int, np.ndarray]:
    p = plan(
        Layout((len(values[0]),), TP, f"n {{{op}: tp}}", dtype=dtype),
        Layout((len(values[0]),), FAR, dst, dtype=dtype),
    )
    return simulate(p, dict(enumerate(values)))


VALUES = [
    np.array(x, np.float32) for x in ([1e8, 3, -2, -0.0], [1, 5, -4, -0.0], [-1e8, 7, 6, -0.0])
]


@pytest.mark.parametrize("op", ["sum", "product", "max", "min"])
def test_folds_from_the_left_in_mesh_order(op: str) -> None:
    expected = functools.reduce(FOLD[op], VALUES)
    for out in reduce(op, VALUES).values():
        assert out.dtype == np.float32 and out.tobytes() == expected.tobytes()


def test_average_divides_the_sum() -> None:
    expected = ((VALUES[0] + VALUES[1]) + VALUES[2]) / np.float32(3)
    assert all(out.tobytes() == expected.tobytes() for out in reduce("avg", VALUES).values())
    assert all((out == expected).all() for out in reduce("avg", VALUES, "n {avg: tp}").values())


def test_addends_that_receive_nothing_are_identities() -> None:
    out = reduce("sum", VALUES, "n {sum: tp}")
    assert (out[4] + out[5] + out[6]).tobytes() == functools.reduce(np.add, VALUES).tobytes()
    idle = [x for x in out.values() if not x.any()]
    assert len(idle) == 2 and all(np.signbit(x).all() for x in idle)
    out = reduce("product", VALUES, "n {product: tp}")
    assert sum((x == 1).all() for x in out.values()) == 2
    assert (out[4] * out[5] * out[6]).tobytes() == functools.reduce(np.multiply, VALUES).tobytes()


@pytest.mark.parametrize("dtype", ["int8", "uint16", "complex64", "float64", "bool"])
def test_any_dtype_moves(dtype: str) -> None:
    p = plan(Layout((6,), TP, "(tp n)", dtype=dtype), Layout((6,), FAR, "n", dtype=dtype))
    whole = np.array([0, 1, 1, 0, 1, 0]).astype(dtype)
    out = simulate(p, {r: whole[2 * r : 2 * r + 2] for r in range(3)})
    assert all(x.dtype == dtype and (x == whole).all() for x in out.values())


def test_names_and_windows() -> None:
    whole = Layout((6,), FAR, "(tp n)")
    cut = (window(whole, ((0, 3),)), window(whole, ((3, 6),)))
    src = Layout((6,), Mesh(), "n")
    p = plan({"a": src, "b": src}, {"a": whole, "b": cut})
    out = simulate(p, {0: {"a": np.arange(6), "b": np.arange(6) * 10, "unused": np.zeros(1)}})
    assert sorted(out[4]) == ["a", "b[0]", "b[1]"]
    assert (
        out[5]["a"].tolist() == [2, 3]
        and out[5]["b[0]"].tolist() == [20, 0]
        and out[5]["b[1]"].tolist() == [0, 30]
    )
    alone = simulate(plan(src, cut), {0: np.arange(6)})
    assert {k: x.tolist() for k, x in alone[5].items()} == {"[0]": [2, 0], "[1]": [0, 3]}


def test_one_layout_may_be_given_by_name() -> None:
    p = plan(Layout((3,), Mesh(), "n"), Layout((3,), Mesh(ranks=[1]), "n"))
    assert simulate(p, {0: {"": np.arange(3)}})[1].tolist() == [0, 1, 2]
    assert simulate(p, {0: [7, 8, 9]})[1].tolist() == [7, 8, 9]


def test_holes_stay_zero() -> None:
    p = plan(Layout((3,), Mesh(), "n"), Layout((3,), TP, "(tp n)=6 {sum: }"))
    assert [simulate(p, {0: np.arange(1, 4)})[r].tolist() for r in range(3)] == [
        [1, 2],
        [3, 0],
        [0, 0],
    ]
    filled = plan(Layout((3,), Mesh(ranks=[9]), "n"), Layout((3,), TP, "(n)=5 {sum: tp}"))
    out = simulate(filled, {9: np.ones(3)})
    assert all(not x[3:].any() and not np.signbit(x[3:]).any() for x in out.values())


def test_source_arrays_are_left_alone() -> None:
    given = {r: x.copy() for r, x in enumerate(VALUES)}
    p = plan(Layout((4,), TP, "n {sum: tp}"), Layout((4,), TP, "n"))
    simulate(p, given)
    assert all((given[r] == VALUES[r]).all() for r in range(3))


SRC, DST = Layout((6,), TP, "(tp n)"), Layout((6,), FAR, "n")
GIVEN = {r: np.zeros(2) for r in range(3)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: simulate(plan(SRC, DST), {0: GIVEN[0], 2: GIVEN[2]}),
            "no source arrays for rank 1; give them for ranks 0, 1, 2",
        ),
        (
            lambda: simulate(
                plan({"w": SRC}, {"w": DST}), {r: {"v": x, "u": x} for r, x in GIVEN.items()}
            ),
            "rank 0: source array 'w' is missing; pass it with 'v', 'u'",
        ),
        (
            lambda: simulate(plan({"w": SRC}, {"w": DST}), {r: {} for r in GIVEN}),
            "rank 0: source array 'w' is missing; pass it",
        ),
        (
            lambda: simulate(plan(SRC, DST), {**GIVEN, 2: np.zeros((1, 2))}),
            (
                "rank 2: source array has shape (1, 2), but float32[6] (tp n) on tp=3 gives "
                "this rank (2,); pass an array of that shape"
            ),
        ),
        (
            lambda: simulate(plan(SRC, DST), {**GIVEN, 2: np.zeros(2, np.int8)}),
            (
                "the tensor has arrays of several dtypes, float64 on rank 1, int8 on rank 2; "
                "pass one dtype"
            ),
        ),
        (
            lambda: simulate(plan(SRC, DST), {**GIVEN, 2: ["a", "b"]}),
            "rank 2: source array has dtype <U1; pass an array of numbers",
        ),
        (
            lambda: simulate(plan(SRC, DST), {**GIVEN, 2: np.array([1, 2], object)}),
            "rank 2: source array has dtype object; pass an array of numbers",
        ),
    ],
)
def test_errors(make, message: str, fails) -> None:
    fails(make, PlanError, message)
