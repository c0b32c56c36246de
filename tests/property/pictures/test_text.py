"""Values as text for people."""

from __future__ import annotations

import pytest

from shardmath import Layout, Mesh, plan
from shardmath.pictures.text import LEGEND, grid, nbytes, show, table


def test_table() -> None:
    assert (
        table(["a", "long"], [[1, "x"], ["wide one", 22]])
        == "       a  long\n       1     x\nwide one    22"
    )
    assert table(["a"], []) == "a"


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_999, "1000.00 kB"),
        (1e6, "1.00 MB"),
        (2.5e9, "2.50 GB"),
        (1_342_000_000_000, "1.34 TB"),
        (7.9, "7 B"),
    ],
)
def test_nbytes(n: float, text: str) -> None:
    assert nbytes(n) == text


def test_a_layout() -> None:
    assert show(Layout((3, 2), Mesh(tp=2, ranks=(10, 4)), "(tp n)=5 h {max: }")).splitlines() == [
        "float32[3, 2] (tp n)=5 h on tp=2",
        "rank  tp  local shape  dimension 0  dimension 1",
        "  10   0       (3, 2)        [0:3]        [0:2]",
        "   4   1       (2, 2)         [-2]        [0:2]",
    ]
    assert show(Layout((), Mesh(), "")).splitlines() == [
        "float32[] scalar on one rank",
        "rank  local shape",
        "   0           ()",
    ]
    long = show(Layout((3,), Mesh(data=40), "n"), most=2)
    assert long.splitlines()[1:] == [
        "rank  data  local shape  dimension 0",
        "   0     0         (3,)        [0:3]",
        "   1     1         (3,)        [0:3]",
        "... and 38 more ranks",
    ]
    assert show(Layout((3,), Mesh(data=2), "n"), most=2).count("\n") == 3


def test_a_plan() -> None:
    p = plan(
        Layout((4, 2), Mesh(tp=2), "(tp n) h"), Layout((4, 2), Mesh(tp=2, ranks=(2, 3)), "n (tp h)")
    )
    assert show(p).splitlines() == [
        "32 B between 2 and 2 ranks, 1 tensor",
        "rank  sends  receives",
        "   0   16 B       0 B",
        "   1   16 B       0 B",
        "   2    0 B      16 B",
        "   3    0 B      16 B",
        LEGEND,
        "0 -> 2 copy [0:2, 0:1] of [0:2, 0:1] to [0:2, 0:1], 8 B",
        "0 -> 3 copy [0:2, 1:2] of [0:2, 1:2] to [0:2, 0:1], 8 B",
        "1 -> 2 copy [2:4, 0:1] of [0:2, 0:1] to [2:4, 0:1], 8 B",
        "1 -> 3 copy [2:4, 1:2] of [0:2, 1:2] to [2:4, 0:1], 8 B",
    ]
    assert show(p, most=3).splitlines()[2:] == [
        "   0   16 B       0 B",
        "   1   16 B       0 B",
        "   2    0 B      16 B",
        "... and 1 more rank",
        LEGEND,
        "0 -> 2 copy [0:2, 0:1] of [0:2, 0:1] to [0:2, 0:1], 8 B",
        "0 -> 3 copy [0:2, 1:2] of [0:2, 1:2] to [0:2, 0:1], 8 B",
        "1 -> 2 copy [2:4, 0:1] of [0:2, 0:1] to [2:4, 0:1], 8 B",
        "...",
    ]
    assert "..." not in show(p, most=4)
    two = {"v": Layout((1,), Mesh(), "n"), "w": Layout((1,), Mesh(), "n")}
    assert show(plan(two, two)).splitlines()[0] == "0 B between 1 and 1 ranks, 2 tensors"


def test_a_grid() -> None:
    assert grid(Layout((4,), Mesh(a=2, ranks=(10, 4)), "(a n)")) == "10 10  4  4"
    assert grid(Layout((2, 3), Mesh(a=2), "n h")) == "+ + +\n+ + +"
    assert grid(Layout((2, 2), Mesh(), "(n)=<0:1> h")) == "0 0\n. ."
    assert grid(Layout((0,), Mesh(), "n")) == ""
    with pytest.raises(ValueError, match=r"has 3 dimensions; grid\(\) draws 1 or 2"):
        grid(Layout((1, 1, 1), Mesh(), "n h w"))
