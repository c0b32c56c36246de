"""Adjoints: ends swapped, Replicate and Partial exchanged, and what has none."""

from __future__ import annotations

import pickle
import re

import numpy as np
import pytest
from hypothesis import given

from shardmath import (
    Layout,
    Mesh,
    Plan,
    PlanError,
    Transposed,
    adjoint,
    plan,
    simulate,
    testing,
    verify,
)
from shardmath.layouts.edits import window
from shardmath.plans.adjoint import everybody, swap_ends

TP, FAR = Mesh(tp=2), Mesh(dp=2, tp=2, ranks=range(4, 8))


def of(src: str, dst: str, there: Mesh = TP, dtype: str = "float32"):
    return adjoint(plan(Layout((4,), TP, src, dtype=dtype), Layout((4,), there, dst, dtype=dtype)))


def texts(p) -> tuple[str, str]:
    return p.src[""][0].text, p.dst[""][0].text


@pytest.mark.parametrize(
    ("src", "dst", "there", "back"),
    [
        ("(tp n)", "n", TP, ("n {sum: tp}", "(tp n)")),
        ("n {sum: tp}", "n", TP, ("n {sum: tp}", "n")),
        ("n {sum: tp}", "(tp n)", TP, ("(tp n)", "n")),
        ("n", "(tp n)", TP, ("(tp n)", "n {sum: tp}")),
        ("n", "n {sum: tp}", TP, ("n", "n {sum: tp}")),
        ("n {sum: tp}", "n {sum: tp}", TP, ("n {sum: tp}", "n {sum: tp}")),
        ("(tp n)", "(tp n)", FAR, ("(tp n) {sum: dp}", "(tp n)")),
        ("(tp n)", "(tp n) {sum: dp}", FAR, ("(tp n)", "(tp n)")),
        ("n {avg: tp}", "n", FAR, ("n {sum: dp tp}", "n")),
        ("n", "(tp n) {avg: dp}", FAR, ("(tp n) {sum: dp}", "n {sum: tp}")),
    ],
)
def test_replicate_and_partial_change_places(
    src: str, dst: str, there: Mesh, back: tuple[str, str]
) -> None:
    p = of(src, dst, there)
    assert texts(p) == back
    verify(p)
    assert adjoint(p) is p.forward and adjoint(adjoint(p)) == p


def test_ends_are_swapped() -> None:
    forward = plan(Layout((4,), TP, "(tp n)"), Layout((4,), FAR, "n"))
    p = adjoint(forward)
    assert p.src_ranks == (4, 5, 6, 7) and p.dst_ranks == (0, 1)
    assert p.sent_bytes() == forward.received_bytes() and p.received_bytes() == forward.sent_bytes()
    there = sorted(map(str, map(swap_ends, forward.transfers())))
    assert sorted(str(t._replace(op="copy")) for t in p.transfers()) == there
    assert sorted((t.addend, t.src_rank) for t in p.transfers(dst=0)) == [
        (i, 4 + i) for i in range(4)
    ]
    assert {t.op for t in p.transfers()} == {"sum"}
    assert list(p.transfers(src=5)) == [t for r in (0, 1) for t in p.transfers(src=5, dst=r)]
    assert list(p.transfers(src=0)) == [] and repr(p).startswith(
        "<adjoint plan of 1 tensor, 4 -> 2 ranks, "
    )


def test_a_transposed_plan_is_a_value_of_its_own(fails) -> None:
    forward = plan({"w": Layout((4,), TP, "(tp n)")}, {"w": Layout((4,), FAR, "n")})
    p = adjoint(forward)
    assert isinstance(p, Transposed) and not isinstance(p, Plan)
    again = pickle.loads(pickle.dumps(p))
    assert again == p and hash(again) == hash(p) and p != forward and forward != p
    verify(again)
    assert p.ranks == forward.ranks and p.topology is None and p.is_tree
    what = "the plan has no tensor 'v'; give one of its tensors: 'w'"
    fails(lambda: p.fill("v"), PlanError, what)
    fails(lambda: p.divisor("v"), PlanError, what)
    fails(lambda: adjoint("p"), PlanError, "'p' is not a Plan; pass what plan(src, dst) returns")


def test_swapped_is_its_own_inverse() -> None:
    (t, *_) = plan(
        {"w": Layout((4, 6), TP, "(tp n) h")}, {"w": Layout((4, 6), FAR, "n (tp h)")}
    ).transfers()
    assert swap_ends(swap_ends(t)) == t and swap_ends(t) != t
    assert (swap_ends(t).src_rank, swap_ends(t).dst_slices) == (t.dst_rank, t.src_slices)


def test_copies_stay_copies_where_nothing_is_replicated() -> None:
    p = of("(tp n)", "(n tp)")
    assert {(t.op, t.addend) for t in p.transfers()} == {("copy", 0)}


def test_fill_is_zero() -> None:
    p = of("(tp n)", "n")
    assert repr(p.fill("")) == "-0.0"
    assert repr(of("(tp n)", "n", dtype="int32").fill("")) == "0"
    out = simulate(
        of("n", "(tp n)", Mesh(tp=2, ranks=(4, 5))), {r: np.full(2, 3.0) for r in (4, 5)}
    )
    assert {r: x.tolist() for r, x in out.items()} == {
        0: [3.0, 3.0, 0.0, 0.0],
        1: [0.0, 0.0, 3.0, 3.0],
    }
    assert np.signbit(out[0]).tolist() == [False, False, True, True]


def test_average_has_an_adjoint() -> None:
    p = of("n {avg: tp}", "n")
    assert p.divisor("") == 2
    x, y = ({r: np.arange(4.0) * (r + 1) + k for r in (0, 1)} for k in (0, 5))
    forward, back = simulate(adjoint(p), x), simulate(p, y)
    assert sum((forward[r] * y[r]).sum() for r in y) == sum((x[r] * back[r]).sum() for r in x)


def test_everybody() -> None:
    def axes(src: str, dst: str) -> tuple[str, ...]:
        p = plan(Layout((4,), TP, src), Layout((4,), FAR, dst))
        return everybody(p.dst[""][0], p.rules[""])

    assert axes("n", "n") == ("dp", "tp")
    assert axes("n", "(tp n)") == ("dp",)
    assert axes("n", "n {sum: dp}") == ("tp",)
    assert axes("n", "n {avg: dp}") == ("dp", "tp")


@given(testing.pairs(ops=(None,)), testing.lengths(3))
def test_windows_have_an_adjoint(pair: tuple[Layout, ...], cut: int) -> None:
    src, dst = pair
    if not src.ndim:
        return
    at = min(cut, src.shape[0])
    rest = tuple((0, n) for n in src.shape[1:])
    p = plan(
        {"w": src}, {"w": (window(dst, ((0, at), *rest)), window(dst, ((at, src.shape[0]), *rest)))}
    )
    back = adjoint(p)
    verify(back)
    rng = np.random.default_rng(0)
    x = {r: {"w": rng.integers(-4, 5, src.local_shape(r)).astype(float)} for r in src.mesh.ranks}
    y = {
        r: {f"w[{j}]": rng.integers(-4, 5, dst.local_shape(r)).astype(float) for j in (0, 1)}
        for r in dst.mesh.ranks
    }
    forward, backward = simulate(p, x), simulate(back, y)
    left = sum((forward[r][k] * y[r][k]).sum() for r in y for k in y[r])
    assert left == sum((x[r]["w"] * backward[r]["w"]).sum() for r in x)


A, B = Mesh(a=2), Mesh(b=2)


def test_windows_of_other_axis_names_pass_their_own_addends_through() -> None:
    halves = [Layout((4,), mesh, text) for mesh, text in ((A, "n {sum: a}"), (B, "n {sum: b}"))]
    windows = tuple(window(half, (at,)) for half, at in zip(halves, ((0, 2), (2, 4)), strict=True))
    for src, dst in ((windows, halves[0]), (halves[0], windows), (windows, windows)):
        p = plan({"w": src}, {"w": dst})
        back = adjoint(p)
        verify(back)
        assert [layout.op for layout in (*back.src["w"], *back.dst["w"])] == ["sum"] * (
            len(p.src["w"]) + len(p.dst["w"])
        )
    scattered = adjoint(plan({"w": windows}, {"w": Layout((4,), A, "(a n)")}))
    assert [layout.op for layout in scattered.dst["w"]] == [None, None]


def test_addends_that_pass_through_to_one_window_alone_have_no_adjoint(fails) -> None:
    src = Layout((4,), Mesh(x=2, y=2), "n {sum: x y}")
    rows, columns = (Layout((4,), Mesh(p=2, q=2), text) for text in ("n {sum: p}", "n {sum: q}"))
    p = plan({"w": src}, {"w": (window(rows, ((0, 2),)), window(columns, ((2, 4),)))})
    verify(p)
    fails(
        lambda: adjoint(p),
        PlanError,
        (
            "tensor 'w': different addends of float32[4] n {sum: x y} on x=2 y=2 pass "
            "through to float32[4] (n)=<0:2 -2> {sum: p} on p=2 q=2 and to float32[4] "
            "(n)=<-2 2:4> {sum: q} on p=2 q=2, and no layout is Partial in both ways; make "
            "one plan per destination window, and its adjoint"
        ),
    )


def respelled(layout: Layout) -> Layout:
    """The same on a mesh of other axis names."""
    names = {name: f"{name}_" for name in layout.mesh.shape}
    mesh = Mesh({names[name]: size for name, size in layout.mesh.axes}, ranks=layout.mesh.ranks)
    text = re.sub(r"[A-Za-z_]\w*", lambda word: names.get(word[0], word[0]), layout.text)
    return Layout(layout.shape, mesh, text, dtype=layout.dtype, rules=layout.rules)


@given(testing.pairs(ops=(None, "sum", "avg")))
def test_tensors_that_are_held_alike_keep_their_own_axes(pair: tuple[Layout, Layout]) -> None:
    """One plan of two spellings says of each what a plan of it alone says."""
    sides = {"v": tuple(map(respelled, pair)), "w": pair}
    p = plan(
        {name: src for name, (src, _) in sides.items()},
        {name: dst for name, (_, dst) in sides.items()},
    )
    verify(p)
    for name, (src, dst) in sides.items():
        alone = plan({name: src}, {name: dst})
        assert p.rules[name] == alone.rules[name]
        back, own = adjoint(p), adjoint(alone)
        verify(back)
        assert (back.src[name], back.dst[name], back.rules[name]) == (
            own.src[name],
            own.dst[name],
            own.rules[name],
        )


def test_partial_over_one_rank_beside_a_plain_tensor() -> None:
    one = Mesh(tp=1)
    plain, partial = (Layout((4,), one, text) for text in ("n", "n {sum: tp}"))
    p = plan({"v": plain, "w": plain}, {"v": partial, "w": plain})
    assert [len(batch.names) for batch in p.batches] == [2] and [
        rule.op for rule in p.rules.values()
    ] == ["sum", None]
    verify(p)
    verify(adjoint(p))


@pytest.mark.parametrize(
    ("src", "dst", "op"),
    [
        ("n {max: tp}", "n", "max"),
        ("n {min: tp}", "(tp n)", "min"),
        ("n {product: tp}", "n", "product"),
        ("n", "n {product: tp}", "product"),
    ],
)
def test_nonlinear_plans_have_none(src: str, dst: str, op: str, fails) -> None:
    fails(
        lambda: of(src, dst),
        PlanError,
        f"the tensor is reduced by {op}, which is not linear and has no adjoint; "
        "plan layouts that are Partial by sum or avg, or not Partial",
    )


def test_what_passes_through_or_is_copied_is_linear() -> None:
    for op in ("max", "min", "product"):
        verify(of(f"n {{{op}: tp}}", f"n {{{op}: tp}}"))
    verify(of("n", "n {max: tp}"))


def test_bool_has_no_sum(fails) -> None:
    fails(
        lambda: of("(tp n)", "n", dtype="bool"),
        PlanError,
        "sum of bool has no agreed meaning; use max for any, min for all, or cast to an integer type",
    )
