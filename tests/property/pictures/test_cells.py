"""A layout cut into boxes that the same ranks hold."""

from __future__ import annotations

import itertools
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shardmath import Layout, Mesh, testing, window
from shardmath.display.pictures.cells import (
    MOST_PANELS,
    Holders,
    Panel,
    cells_of,
    idle_ranks,
)

LAYOUTS = st.sampled_from((None, "sum", "max")).flatmap(lambda op: testing.layouts(op=op))


def held(layout: Layout) -> dict[tuple[int, ...], Holders]:
    """Who holds each element, by the index lists of every rank."""
    place = layout.mesh.coordinate(name for name, _ in layout.partial).tolist()
    found: dict[tuple[int, ...], dict[int, list[int]]] = {
        index: {} for index in itertools.product(*map(range, layout.shape))
    }
    for rank, addend in zip(layout.mesh.ranks, place, strict=True):
        own = [i[i >= 0].tolist() for i in layout.indices(rank)]
        for index in itertools.product(*own):
            found[index].setdefault(addend, []).append(rank)
    return {
        index: tuple(tuple(sorted(ranks)) for _, ranks in sorted(by.items()))
        for index, by in found.items()
    }


def elements(layout: Layout, panel: Panel) -> dict[tuple[int, ...], Holders]:
    """Who holds each element of a panel, as the panel says."""
    out = {}
    for row, line in zip(panel.rows, panel.holders, strict=True):
        for column, holders in zip(panel.columns, line, strict=True):
            spans = (*panel.lead, row, column)
            own = spans[len(spans) - layout.ndim :]
            for index in itertools.product(*(range(*span) for span in own)):
                assert index not in out
                out[index] = holders
    return out


@given(LAYOUTS)
def test_cells_are_the_layout_element_by_element(layout: Layout) -> None:
    cells, expected = cells_of(layout), held(layout)
    drawn = [elements(layout, panel) for panel in cells.panels]
    for one in drawn:
        assert one.items() <= expected.items()
    assert len(cells.panels) == min(cells.slices, MOST_PANELS)
    if cells.slices <= MOST_PANELS:
        assert sum(map(len, drawn)) == len(expected)


@given(LAYOUTS, st.data())
def test_windows_have_cells_of_nobody(layout: Layout, data: st.DataObject) -> None:
    part = window(layout, data.draw(testing.boxes(layout.shape)))
    expected = held(part)
    for panel in cells_of(part).panels:
        assert elements(part, panel).items() <= expected.items()


@given(LAYOUTS, st.integers(1, 20))
def test_what_is_left_out_is_the_middle(layout: Layout, most: int) -> None:
    whole, some = cells_of(layout), cells_of(layout, most)
    expected = held(layout)
    for all_of_it, panel in zip(whole.panels, some.panels, strict=True):
        assert len(panel.rows) * len(panel.columns) <= max(most // len(some.panels), 1)
        assert elements(layout, panel).items() <= expected.items()
        if panel.rows:
            assert panel.rows[0] == all_of_it.rows[0]


@given(LAYOUTS)
def test_neighbors_differ(layout: Layout) -> None:
    for panel in cells_of(layout).panels:
        columns = list(zip(*panel.holders, strict=True))
        pairs = [*itertools.pairwise(panel.holders), *itertools.pairwise(columns)]
        empty = not any(itertools.chain.from_iterable(panel.holders))
        assert empty or all(a != b for a, b in pairs) or layout.ndim > 1


@pytest.mark.parametrize("count", [1, 2, 3, 24, 25, 600, 601, 5000])
def test_the_number_of_cells_is_bounded(count: int) -> None:
    for text in ("(a n) (b h)", "(n a 1) (h b 1)"):
        layout = Layout((5000, 5000), Mesh(a=min(count, 25), b=2), text)
        (panel,) = cells_of(layout, count).panels
        assert len(panel.rows) * len(panel.columns) <= count
    assert math.prod(layout.shape) == 25_000_000


@given(LAYOUTS)
def test_idle_ranks_hold_nothing(layout: Layout) -> None:
    sizes = {r: math.prod(runs.size for runs in layout.runs(r)) for r in layout.mesh.ranks}
    assert idle_ranks(layout) == sorted(rank for rank, size in sizes.items() if not size)
