"""Fitting: what is held is named, and the name says what is held."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import (
    Layout,
    LayoutError,
    Mesh,
    Runs,
    equivalent,
    from_holdings,
    from_ranges,
)
from shardmath.layouts import fitting
from shardmath.layouts.algebra.dimension import Dimension
from shardmath.layouts.fitting import Parts, _Finder, fit, trim
from shardmath.layouts.layout import intern
from shardmath.testing.strategies import layouts


def hold(layout: Layout, d: int) -> list[Runs]:
    """What each coordinate of the mesh holds of one dimension."""
    return [layout.runs(rank)[d] for rank in layout.mesh.ranks]


def write(dimension: Dimension, mesh: Mesh) -> str:
    return intern((dimension.size,), "float32", mesh, (dimension,), ()).text


@given(layouts())
def test_what_is_fitted_holds_the_same(layout: Layout) -> None:
    axes = layout.mesh.shape
    for d, n in enumerate(layout.shape):
        held = hold(layout, d)
        fitted = fit(n, axes, held)
        grid = itertools.product(*map(range, axes.values()))
        coords = [dict(zip(axes, at, strict=True)) for at in grid]
        assert [fitted.runs(at) for at in coords] == held


@pytest.mark.parametrize(
    "text", ["(tp n)", "(dp n)", "(tp dp n)", "(dp tp n)", "(dp~ n)", "n", "(dp[1 4 2 2] n)"]
)
def test_people_would_write_it_so(text: str) -> None:
    mesh = Mesh(dp=4, tp=2)
    layout = Layout((9,), mesh, text)
    assert write(fit(9, mesh.shape, hold(layout, 0)), mesh) == text


def test_what_nobody_would_write_is_a_table() -> None:
    parts = [from_ranges([(0, 2), (5, 6)]), from_ranges([(2, 5)])]
    fitted = fit(6, {"tp": 2}, parts)
    assert [fitted.runs({"tp": at}) for at in range(2)] == parts


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=5), st.integers(0, 3))
def test_a_view_has_all_that_is_held(pieces: list[tuple[int, int]], tail: int) -> None:
    ranges: list[tuple[int, int] | int] = []
    at = 0
    for hole, n in pieces:
        ranges += [hole, (at, at + n)]
        at += n
    runs = from_ranges([*ranges, tail])
    view, trimmed = trim(runs)
    assert list(runs.indices()[view.span]) == list(trimmed.indices())
    assert trimmed.size == runs.size
    if trimmed.size:
        assert trimmed.indices()[0] >= 0
        assert trimmed.indices()[-1] >= 0


@given(layouts())
def test_from_holdings_is_the_inverse_of_runs(layout: Layout) -> None:
    held = {rank: layout.runs(rank) for rank in layout.mesh.ranks}
    found = from_holdings(layout.shape, held, dtype=layout.dtype)
    assert isinstance(found, Layout)
    assert equivalent(found, layout)


parts = st.lists(st.integers(0, 6), min_size=2, max_size=2).map(sorted)


@given(st.dictionaries(st.integers(0, 20), st.tuples(parts, parts), min_size=1, max_size=6))
def test_whatever_ranks_hold_is_found(boxes: dict[int, tuple[list[int], list[int]]]) -> None:
    held = {}
    for rank, box in boxes.items():
        held[rank] = tuple(from_ranges([(lo, hi)]) for lo, hi in box)
    found = from_holdings((6, 6), held)
    windows = (found,) if isinstance(found, Layout) else found
    back = {rank: layout.runs(rank) for layout in windows for rank in layout.mesh.ranks}
    assert back == held


def test_boxes_that_are_no_product_take_little(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def count(n: int, axes: Mapping[str, int], parts: Sequence[Runs]) -> Dimension:
        nonlocal made
        made += 1
        return fit(n, axes, parts)

    monkeypatch.setattr(fitting, "fit", count)
    # All combinations of 64 parts each would be 64 ** 6; and all orders of the dimensions, 720.
    dims = 6
    held = {}
    for rank in range(64):
        starts = [(rank * (2 * d + 1) + d * d) % 64 for d in range(dims)]
        held[rank] = tuple(from_ranges([(lo, lo + 1)]) for lo in starts)
    found = from_holdings((64,) * dims, held)
    assert isinstance(found, tuple)
    assert [layout.mesh.ranks for layout in found] == [(rank,) for rank in range(64)]
    assert made == dims * 64


def test_groups_of_groups_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[frozenset[int]] = []
    find_layout = _Finder._find_layout

    def note(finder: _Finder, held: dict[int, Parts]) -> Layout | None:
        looked_at.append(frozenset(held))
        return find_layout(finder, held)

    monkeypatch.setattr(_Finder, "_find_layout", note)
    # One corner of a cube is missing in 6 dimensions, so that many groups of groups are no product.
    corners = list(itertools.product(range(2), repeat=6))[1:]
    held = {}
    for rank, corner in enumerate(corners):
        held[rank] = tuple(from_ranges([(at, at + 1)]) for at in corner)
    found = from_holdings((2,) * 6, held)
    assert isinstance(found, tuple)
    assert len(found) == 6
    assert len(set(looked_at)) == len(looked_at) <= 3**6


def test_from_holdings_prints_as_people_write() -> None:
    layout = Layout((8, 6), Mesh(dp=2, tp=4), "(tp n) h")
    held = {rank: layout.runs(rank) for rank in layout.mesh.ranks}
    assert str(from_holdings((8, 6), held)) == "float32[8, 6] (d0 n) h on d0=4 copy=2"


def test_what_is_not_held_of_a_tensor() -> None:
    with pytest.raises(LayoutError, match=r"held is \{\}; give at least one rank"):
        from_holdings((4,), {})
    with pytest.raises(LayoutError, match=r"rank 3 has 2 Runs, but shape \(4,\) has 1 dimension"):
        from_holdings((4,), {3: (from_ranges([(0, 1)]),) * 2})
    with pytest.raises(LayoutError, match=r"rank 3 holds \[0:5\] of a dimension of 4"):
        from_holdings((4,), {3: (from_ranges([(0, 5)]),)})
