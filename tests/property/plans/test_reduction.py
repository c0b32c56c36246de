"""Reductions: which axes are folded, matched and chosen, and what arithmetic is refused."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from shardmath import Layout, Mesh, PlanError
from shardmath.layouts.placement import OPS
from shardmath.plans.reduction import (
    Reduction,
    check_arithmetic,
    find_reduction,
    identity_of,
)

MESH = Mesh(dp=2, tp=3)


def asked(src: str, dst: str, dtype: str = "float32", there: Mesh = MESH) -> Reduction:
    return find_reduction(
        Layout((6,), MESH, src, dtype=dtype), Layout((6,), there, dst, dtype=dtype)
    )


def test_no_partial_is_no_reduction() -> None:
    assert asked("(dp n)", "n") == Reduction()
    assert asked("(dp n)", "n").op_of(0) == "copy"


@pytest.mark.parametrize("op", ["sum", "product", "max", "min", "avg"])
def test_to_replicate_everything_is_folded(op: str) -> None:
    found = asked(f"n {{{op}: dp tp}}", "n")
    assert (found.op, found.folded, found.matched, found.chosen) == (op, ("dp", "tp"), (), ())
    assert (found.addends, found.divisor, found.fill) == (6, 6 if op == "avg" else 1, None)
    entry = "sum" if op == "avg" else op
    assert [found.op_of(i) for i in range(3)] == ["copy", entry, entry]


@pytest.mark.parametrize("op", OPS)
def test_the_same_axis_passes_through(op: str) -> None:
    found = asked(f"n {{{op}: dp}}", f"n {{{op}: dp}}")
    assert (found.matched, found.folded, found.chosen) == (((("dp",), ("dp",)),), (), ())
    assert (found.addends, found.divisor, found.fill) == (1, 1, None)
    assert found.op_of(0) == found.op_of(1) == "copy"


def test_passing_through_is_about_ranks() -> None:
    other = Mesh(x=2, y=3)
    assert asked("n {sum: dp}", "n {sum: x}", there=other).matched == ((("dp",), ("x",)),)
    same = Mesh(y=3, x=2, ranks=(0, 3, 1, 4, 2, 5))
    assert asked("n {sum: dp}", "n {sum: x}", there=same).matched == ((("dp",), ("x",)),)
    turned = Mesh(x=2, y=3, ranks=(3, 4, 5, 0, 1, 2))
    found = asked("n {sum: dp}", "n {sum: x}", there=turned)
    assert (found.matched, found.folded, found.chosen) == ((), ("dp",), ("x",))
    moved = Mesh(x=2, y=3, ranks=range(6, 12))
    assert asked("n {sum: dp}", "n {sum: x}", there=moved).matched == ()


def test_one_axis_may_pass_and_another_be_folded() -> None:
    found = asked("n {sum: dp tp}", "n {sum: dp}")
    assert (found.matched, found.folded, found.chosen, found.addends) == (
        ((("dp",), ("dp",)),),
        ("tp",),
        (),
        3,
    )
    assert found.fill is None
    found = asked("n {sum: dp}", "n {sum: dp tp}")
    assert (found.matched, found.folded, found.chosen, found.addends) == (
        ((("dp",), ("dp",)),),
        (),
        ("tp",),
        1,
    )


@pytest.mark.parametrize(
    ("op", "dtype", "fill"),
    [
        ("sum", "float32", -0.0),
        ("sum", "int32", 0),
        ("product", "float32", 1),
        ("sum", "complex64", complex(-0.0, -0.0)),
    ],
)
def test_to_sum_and_product_one_receives(op: str, dtype: str, fill: complex) -> None:
    found = asked("n", f"n {{{op}: tp}}", dtype)
    assert (found.op, found.chosen, found.folded) == (op, ("tp",), ())
    assert repr(found.fill) == repr(fill)
    assert found.op_of(0) == "copy"
    mixed = asked(f"n {{{op}: dp}}", f"n {{{op}: tp}}", dtype)
    assert mixed.op_of(0) == mixed.op_of(1) == op and mixed.addends == 2


@pytest.mark.parametrize("op", ["avg", "max", "min"])
def test_to_avg_max_and_min_all_receive(op: str) -> None:
    found = asked("n", f"n {{{op}: tp}}")
    assert (found.op, found.chosen, found.folded, found.fill) == (op, (), (), None)
    found = asked(f"n {{{op}: dp}}", f"n {{{op}: tp}}")
    assert (found.chosen, found.folded, found.addends, found.divisor) == (
        (),
        ("dp",),
        2,
        2 if op == "avg" else 1,
    )


def test_axes_of_size_1_hold_one_addend() -> None:
    mesh = Mesh(dp=2, one=1)
    found = find_reduction(Layout((6,), mesh, "n {sum: one}"), Layout((6,), mesh, "n {max: one}"))
    assert (found.matched, found.folded, found.chosen, found.addends) == ((), (), (), 1)
    found = find_reduction(Layout((6,), mesh, "n {sum: one dp}"), Layout((6,), mesh, "n"))
    assert (found.folded, found.addends) == (("dp",), 2)


def test_different_operations_where_one_side_has_nothing_left() -> None:
    mesh = Mesh(dp=2, one=1)
    found = find_reduction(Layout((6,), mesh, "n {sum: dp}"), Layout((6,), mesh, "n {max: one}"))
    assert (found.op, found.folded, found.chosen) == ("sum", ("dp",), ())
    found = find_reduction(Layout((6,), mesh, "n {max: one}"), Layout((6,), mesh, "n {sum: dp}"))
    assert (found.op, found.folded, found.chosen) == ("sum", (), ("dp",))


def test_by_ranks_does_not_depend_on_spelling() -> None:
    flat, deep = Mesh(t=6), Mesh(dp=2, tp=3)
    one = (Layout((6,), flat, "n {sum: t}"), Layout((6,), flat, "n"))
    two = (Layout((6,), deep, "n {sum: dp tp}"), Layout((6,), deep, "n"))
    assert find_reduction(*one).by_ranks(*one) == find_reduction(*two).by_ranks(*two)
    three = (Layout((6,), deep, "n {sum: tp}"), Layout((6,), deep, "n"))
    assert find_reduction(*two).by_ranks(*two) != find_reduction(*three).by_ranks(*three)
    plain = (Layout((6,), flat, "(t n)"), Layout((6,), flat, "n"))
    assert find_reduction(*plain).by_ranks(*plain) == ()


@pytest.mark.parametrize(
    ("op", "dtype"),
    list(itertools.product(("sum", "product"), ("float32", "int8", "uint8", "complex64"))),
)
def test_identities_change_nothing(op: str, dtype: str) -> None:
    fill = np.array(identity_of(op, dtype)).astype(dtype)
    values = np.array([-0.0, 0.0, 1, 3], dtype)
    got = values + fill if op == "sum" else values * fill
    assert got.tobytes() == values.tobytes()
    assert math.copysign(1, identity_of("sum", "bfloat16").real) == -1


REFUSED = {
    ("avg", "int32"): "avg of int32 is not an integer; use sum, or cast to a floating type first",
    ("avg", "uint8"): "avg of uint8 is not an integer; use sum, or cast to a floating type first",
    **{
        (
            op,
            "bool",
        ): f"{op} of bool has no agreed meaning; use max for any, min for all, or cast to an integer type"
        for op in ("sum", "avg", "product")
    },
    **{
        (
            op,
            "complex64",
        ): f"{op} of complex64: complex numbers have no order; reduce real and imaginary parts separately"
        for op in ("max", "min")
    },
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool", "complex64"])
def test_arithmetic(op: str, dtype: str, fails) -> None:
    if (op, dtype) in REFUSED:
        fails(lambda: check_arithmetic(op, dtype), PlanError, REFUSED[op, dtype])
        fails(lambda: asked(f"n {{{op}: dp}}", "n", dtype), PlanError, REFUSED[op, dtype])
        assert asked(f"n {{{op}: dp}}", f"n {{{op}: dp}}", dtype).addends == 1
    else:
        check_arithmetic(op, dtype)
        assert asked(f"n {{{op}: dp}}", "n", dtype).addends == 2


def test_two_operations(fails) -> None:
    fails(
        lambda: asked("n {sum: dp}", "n {max: tp}"),
        PlanError,
        (
            "cannot turn Partial('sum') into Partial('max'): float32[6] n {sum: dp} on dp=2 "
            "tp=3 to float32[6] n {max: tp} on dp=2 tp=3; plan to Replicate first, and from "
            "there to Partial"
        ),
    )
    fails(
        lambda: asked("n {sum: dp}", "n {max: dp}"),
        PlanError,
        (
            "cannot turn Partial('sum') into Partial('max'): float32[6] n {sum: dp} on dp=2 "
            "tp=3 to float32[6] n {max: dp} on dp=2 tp=3; plan to Replicate first, and from "
            "there to Partial"
        ),
    )


def test_by_ranks_says_all() -> None:
    sides = Layout((6,), MESH, "n {sum: dp tp}"), Layout((6,), MESH, "n {sum: tp}")
    folded = tuple((rank, rank // 3) for rank in range(6))
    chosen = tuple((rank, 0) for rank in range(6))
    assert find_reduction(*sides).by_ranks(*sides) == (
        "sum",
        2,
        folded,
        chosen,
        "[([0, 3], [1, 4], [2, 5])]",
    )
    sides = Layout((6,), MESH, "n {sum: dp}"), Layout((6,), Mesh(x=2, ranks=(8, 7)), "n {sum: x}")
    assert find_reduction(*sides).by_ranks(*sides) == ("sum", 2, folded, ((7, 1), (8, 0)), "[]")
