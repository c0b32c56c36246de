"""Edits: windows, slices, and layouts with other labels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import (
    Layout,
    LayoutError,
    Mesh,
    testing,
)
from shardmath.layouts.edits import cast, relabeled, repartialed, sliced, transposed, window

MESH = Mesh(dp=4, tp=2)


def held(layout: Layout) -> list[list[list[int]]]:
    return [[i.tolist() for i in layout.indices(r)] for r in layout.mesh.ranks]


@given(testing.layouts(), st.data())
def test_windows_and_slices(layout: Layout, data: st.DataObject) -> None:
    box = data.draw(testing.boxes(layout.shape))
    inside, part = window(layout, box), sliced(layout, box)
    assert inside.shape == layout.shape and part.shape == tuple(hi - lo for lo, hi in box)
    for rank in layout.mesh.ranks:
        assert inside.local_shape(rank) == part.local_shape(rank) == layout.local_shape(rank)
        for old, new, cut, (lo, hi) in zip(
            *(x.indices(rank) for x in (layout, inside, part)), box, strict=True
        ):
            assert new.tolist() == [i if lo <= i < hi else -1 for i in old.tolist()]
            assert cut.tolist() == [i - lo if lo <= i < hi else -1 for i in old.tolist()]


@given(testing.layouts(op="sum"), st.data())
def test_other_layouts(layout: Layout, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(layout.ndim)))
    turned = transposed(layout, order)
    assert turned.shape == tuple(layout.shape[d] for d in order)
    assert held(turned) == [[h[d] for d in order] for h in held(layout)]
    half = cast(layout, "int16")
    assert (half.dtype, held(half), half.partial) == ("int16", held(layout), layout.partial)
    moved = relabeled(layout, {r: r + 50 for r in layout.mesh.ranks})
    assert held(moved) == held(layout) and moved.mesh.ranks == tuple(
        r + 50 for r in layout.mesh.ranks
    )
    assert repartialed(layout, layout.free_axes).partial == tuple(
        (a, "sum") for a in layout.free_axes
    )
    assert repartialed(layout, ()).partial == () and held(repartialed(layout, ())) == held(layout)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (
            lambda: transposed(Layout((9, 4), MESH, "n h"), (0, 0)),
            LayoutError,
            (
                "cannot put the dimensions of shape (9, 4) in the order (0, 0); give each of "
                "(0, 1) once"
            ),
        ),
        (
            lambda: window(Layout((9, 4), MESH, "n h"), ((0, 9),)),
            LayoutError,
            (
                "box ((0, 9),) is not inside shape (9, 4); give one (start, stop) in it per "
                "dimension"
            ),
        ),
        (
            lambda: window(Layout((9,), MESH, "n"), ((3, 2),)),
            LayoutError,
            ("box ((3, 2),) is not inside shape (9,); give one (start, stop) in it per dimension"),
        ),
        (
            lambda: sliced(Layout((9,), MESH, "n"), ((-1, 2),)),
            LayoutError,
            ("box ((-1, 2),) is not inside shape (9,); give one (start, stop) in it per dimension"),
        ),
        (
            lambda: sliced(Layout((9,), MESH, "n"), ((0, 10),)),
            LayoutError,
            ("box ((0, 10),) is not inside shape (9,); give one (start, stop) in it per dimension"),
        ),
        (
            lambda: repartialed(Layout((9,), MESH, "(tp n)"), ("tp",)),
            LayoutError,
            "mesh axis 'tp' is used in dimension 0 and in Partial('sum'); leave it out of one",
        ),
        (
            lambda: cast(Layout((9,), MESH, "n"), "int7"),
            LayoutError,
            "unknown dtype 'int7'; did you mean 'int8'?",
        ),
    ],
)
def test_errors(make, kind, message: str, fails) -> None:
    fails(make, kind, message)
