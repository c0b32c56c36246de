"""Spans: sets of ranges are compared with sets of positions, and boxes with sets of elements."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shardmath.layouts.algebra.runs import Runs
from shardmath.plans.collectives.spans import (
    NOTHING,
    Holding,
    Spans,
    find_divided,
    is_inside,
    merge,
    spans_of,
    tile,
)

RANGES = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 4)).map(lambda x: (x[0], x[0] + x[1])), max_size=4
)
SETS = st.sets(st.integers(0, 5))
SOME = st.sets(st.integers(0, 5), min_size=1)


def positions(spans: Spans) -> list[int]:
    return [x for start, stop in spans for x in range(start, stop)]


def spans(numbers: set[int]) -> Spans:
    return merge((x, x + 1) for x in numbers) or ()


def box(*dims: set[int]) -> Holding:
    out = tuple(map(spans, dims))
    return out if all(out) else NOTHING


BOXES = st.builds(box, SETS, SETS)


def elements(of: Holding) -> set[tuple[Any, ...]]:
    return set(itertools.product(*map(positions, of)))


@given(RANGES)
def test_merged_ranges_are_the_set(ranges: list[tuple[int, int]]) -> None:
    listed = positions(tuple(ranges))
    found = merge(ranges)
    assert (found is None) == (len(set(listed)) < len(listed))
    if found is not None:
        assert positions(found) == sorted(listed)
        assert all(a[1] < b[0] for a, b in itertools.pairwise(found))


def test_spans_of_runs_are_global() -> None:
    assert spans_of(Runs([(0, 4, 2), (2, 0, 1)])) == ((0, 1), (4, 6))
    assert spans_of(Runs([])) == ()


@given(BOXES, BOXES)
def test_inside_is_a_subset(a: Holding, b: Holding) -> None:
    assert is_inside(a, b) == (elements(a) <= elements(b))


@given(SOME, SOME, st.data())
def test_cells_of_a_grid_tile_it(rows: set[int], columns: set[int], data: st.DataObject) -> None:
    """Every grid of disjoint parts is one box; without one of its cells it is not that box."""
    a, b = (data.draw(st.sets(st.sampled_from(sorted(s)))) for s in (rows, columns))
    cells = [box(x, y) for x in (a, rows - a) for y in (b, columns - b)]
    assert tile(cells) == box(rows, columns)
    some = [cell for cell in cells if cell != NOTHING]
    assert tile([*cells, *some[:1]]) == (None if some else NOTHING)
    if len(some) == 4:
        assert tile(some[:3]) is None
    assert find_divided(cells, box(rows, columns)) == {
        d for d in range(2) for cell in some if cell[d] != box(rows, columns)[d]
    }


@given(st.lists(BOXES, max_size=4))
def test_what_tiles_has_every_element_once(boxes: list[Holding]) -> None:
    whole = tile(boxes)
    if whole is not None:
        listed = [x for one in boxes if one != NOTHING for x in elements(one)]
        assert len(listed) == len(set(listed))
        assert set(listed) == (elements(whole) if whole != NOTHING else set())
