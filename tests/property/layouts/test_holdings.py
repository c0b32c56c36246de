"""Holdings: layouts that are equivalent, however they were spelled."""

from __future__ import annotations

import pytest
from hypothesis import given

from shardmath import (
    Layout,
    LayoutError,
    Mesh,
    equivalent,
    testing,
)
from shardmath.layouts.holdings import holdings_digest

MESH = Mesh(dp=4, tp=2)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("(dp tp n) h", "(dp n | tp n) h", True),
        ("(dp tp n) h", "(tp dp n) h", False),
        ("(dp n) h", "(dp~ n) h", False),
        ("n (tp h)", "n (tp~ h)", True),
        ("n (dp h)", "n (h dp)", True),
        ("n (tp h)", "n (h tp)", False),
        ("n h {sum: tp}", "n h", False),
        ("n h {sum: tp}", "n h {max: tp}", False),
        ("n h {sum: tp}", "n h {sum: dp}", False),
        ("(n)=12 h", "n h", False),
        ("(n)=<0:4 4:9> h", "n h", True),
    ],
)
def test_equivalent(a: str, b: str, same: bool) -> None:
    x, y = Layout((9, 4), MESH, a), Layout((9, 4), MESH, b)
    assert equivalent(x, y) == equivalent(y, x) == same
    assert (holdings_digest(x) == holdings_digest(y)) == same
    assert equivalent(x, Layout((9, 4), MESH, a))


def test_equivalent_sees_ranks_shapes_and_dtypes() -> None:
    x = Layout((4,), Mesh(a=2), "(a n)")
    assert equivalent(x, Layout((4,), Mesh(b=2, c=1), "(b n)"))
    assert equivalent(x, Layout((4,), Mesh(c=1, b=2), "(b c n)"))
    assert not equivalent(x, Layout((4,), Mesh(a=2, ranks=(1, 0)), "(a n)"))
    assert not equivalent(x, Layout((4,), Mesh(a=2, ranks=(1, 2)), "(a n)"))
    assert not equivalent(x, Layout((4,), Mesh(a=2), "(a n)", dtype="int32"))
    assert not equivalent(x, Layout((4, 1), Mesh(a=2), "(a n) h"))
    turned = Layout((4,), Mesh(a=2, b=2, ranks=(3, 1, 2, 0)), "(b a n)")
    assert equivalent(turned, Layout((4,), Mesh(b=2, a=2, ranks=(3, 2, 1, 0)), "(b a n)"))


def test_partial_over_one_rank_is_no_partial() -> None:
    one = Mesh(a=2, b=1)
    assert equivalent(Layout((4,), one, "(a n) {sum: b}"), Layout((4,), one, "(a n)"))
    assert equivalent(Layout((4,), one, "(a n) {sum: b}"), Layout((4,), one, "(a n) {max: b}"))


@given(testing.pairs())
def test_equivalent_is_holding_the_same(pair: tuple[Layout, ...]) -> None:
    a, b = pair
    if sorted(a.mesh.ranks) == sorted(b.mesh.ranks) and not a.partial and not b.partial:
        same = all(a.runs(r) == b.runs(r) for r in a.mesh.ranks)
        assert equivalent(a, b) == same == (holdings_digest(a) == holdings_digest(b))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: equivalent(Layout((9,), MESH, "n"), "n"),
            LayoutError,
            "'n' is not a Layout; equivalent compares two layouts",
        ),
    ],
)
def test_errors(make, kind, message: str, fails) -> None:
    fails(make, kind, message)
