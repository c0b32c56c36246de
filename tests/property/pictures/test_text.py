"""Values as text for people."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given

from shardmath import (
    Layout,
    LayoutError,
    Mesh,
    ShardError,
    Topology,
    certify,
    from_ranges,
    plan,
    recognize,
    relabel,
    schedule,
    testing,
)
from shardmath.base.text import make_table, show_bytes
from shardmath.display.pictures.drawing import grid
from shardmath.display.pictures.text import LEGEND, show


def test_table() -> None:
    assert (
        make_table(["a", "long"], [[1, "x"], ["wide one", 22]])
        == "       a  long\n       1     x\nwide one    22"
    )
    assert make_table(["a"], []) == "a"


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
    assert show_bytes(n) == text


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
    with pytest.raises(ValueError, match=r"has 3 dimensions; pass grid\(\) a layout of 1 or 2"):
        grid(Layout((1, 1, 1), Mesh(), "n h w"))


def test_every_value_is_shown() -> None:
    a = Layout((8, 4), Mesh(dp=2, tp=2), "(tp dp n) h")
    b = Layout((8, 4), Mesh(dp=2, tp=2), "(tp n) h")
    where = Topology(ranks_per_node=2)
    program = schedule(plan(a, b), topology=where)
    assert show(Mesh(dp=2, tp=2, ranks=(3, 1, 0, 2)), most=2).splitlines() == [
        "dp=2 tp=2",
        "rank  dp  tp",
        "   3   0   0",
        "   1   0   1",
        "... and 2 more ranks",
    ]
    assert show(program, most=1).splitlines() == [
        "1 tensor between 4 and 4 ranks, nodes of 2 ranks: 1 slot of 1 turn, at most 1.07 GB under way per rank",
        "rank  rounds  messages  sends  receives",
        "   0       1         3   32 B      32 B",
        "... and 3 more ranks",
        "as one operation: all_gather of dimension 0 over dp: 2 groups of 2, contiguous",
    ]
    assert show(where) == (
        "nodes of 2 ranks; per rank and direction 450.00 GB/s inside a node, 50.00 GB/s to other nodes; "
        "10 us per message"
    )
    assert show(certify(program), most=1).splitlines()[1:] == [
        "        plan  10 us",
        "       bound  10 us",
        "       ratio  1",
        "must take in  64 B at 100.00 GB/s",
        "       ranks  0, ...",
    ]
    assert show(from_ranges([(4, 6), 2, (0, 1)])).splitlines() == [
        "3 positions of a dimension, 2 holes",
        "local  global",
        "  0:2     4:6",
        "  4:5     0:1",
    ]
    renamed = relabel(
        Layout((8,), Mesh(dp=4), "(dp n)"), Layout((8,), Mesh(dp=2, tp=2), "(tp dp n)")
    )
    assert show(renamed, most=1).splitlines()[1:] == [
        "rank  becomes",
        "   1        2",
        "... and 1 more rank",
    ]
    assert show(recognize(a, b)).splitlines()[1:] == [
        "group of ranks 0, 2",
        "group of ranks 1, 3",
    ]


def test_what_is_shown_is_its_own_repr() -> None:
    text = show(Mesh(tp=2))
    assert repr(text) == str(text) and text == "tp=2\nrank  tp\n   0   0\n   1   1"
    assert pickle.loads(pickle.dumps(text)).value == Mesh(tp=2)
    for other in (3, None, "text", np.zeros(2)):
        with pytest.raises(ShardError, match="show cannot show a "):
            show(other)


def brute(layout: Layout) -> str:
    """The grid, element by element."""
    shape = layout.shape if layout.ndim == 2 else (1, *layout.shape)
    held = [["."] * shape[1] for _ in range(shape[0])]
    for rank in layout.mesh.ranks:
        index = [i[i >= 0].tolist() for i in layout.indices(rank)]
        for row, column in itertools.product(*(index if layout.ndim == 2 else [[0], *index])):
            held[row][column] = str(rank) if held[row][column] == "." else "+"
    width = max((len(x) for row in held for x in row), default=1)
    return "\n".join(" ".join(x.rjust(width) for x in row) for row in held)


@given(testing.layouts(op="sum").filter(lambda layout: layout.ndim in (1, 2)))
def test_a_grid_is_the_layout_element_by_element(layout: Layout) -> None:
    assert grid(layout) == brute(layout)


def test_a_large_grid_says_what_it_leaves_out() -> None:
    text = grid(Layout((4096, 11008), Mesh(dp=4, tp=4), "(tp dp n) h"))
    assert len(text) < 100_000
    assert text.splitlines()[-2:] == [
        "rows 32 to 4063 are left out",
        "columns 32 to 10975 are left out",
    ]
    assert grid(Layout((5, 3), Mesh(tp=5), "(tp n) h"), most=3).splitlines() == [
        "0 0 0",
        "1 1 1",
        "… … …",
        "4 4 4",
        "rows 2 to 3 are left out",
    ]
    with pytest.raises(LayoutError, match="most=1 rows and columns cannot be drawn"):
        grid(Layout((5,), Mesh(), "n"), most=1)
