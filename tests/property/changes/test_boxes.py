"""Boxes of cells: beside a search of every box for every cell."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from shardmath.values.changes.boxes import index_boxes

Box = tuple[tuple[int, int], ...]


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[int]]:
    """A shape, boxes of it that may overlap, and cells."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    interval = [
        st.tuples(st.integers(0, n - 1), st.integers(1, n)).filter(lambda x: x[0] < x[1])
        for n in shape
    ]
    found = draw(st.lists(st.tuples(*interval), max_size=12))
    cells = draw(st.lists(st.integers(0, int(np.prod(shape)) - 1), max_size=12))
    return shape, found, cells


def search(shape: tuple[int, ...], boxes: list[Box], cells: list[int]) -> set[tuple[int, int, int]]:
    """(which cell, box, place) by looking at each box."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    found = set()
    for number, box in enumerate(boxes):
        inside = numbers[tuple(slice(*ends) for ends in box)].reshape(-1).tolist()
        for which, cell in enumerate(cells):
            if cell in inside:
                found.add((which, number, inside.index(cell)))
    return found


@given(cases())
def test_cells_are_found_in_all_boxes_that_cover_them(
    case: tuple[tuple[int, ...], list[Box], list[int]],
) -> None:
    shape, boxes, cells = case
    low = np.array([[a for a, _ in box] for box in boxes], np.int64).reshape(len(boxes), len(shape))
    high = np.array([[b for _, b in box] for box in boxes], np.int64).reshape(low.shape)
    found = index_boxes(shape, low, high - low).find(np.array(cells, np.int64))
    listed = list(zip(*(column.tolist() for column in found), strict=True))
    assert len(set(listed)) == len(listed)
    assert set(listed) == search(shape, boxes, cells)


@pytest.mark.parametrize("n", [100, 400])
def test_unlike_borders_take_no_more_than_there_are_boxes(n: int) -> None:
    """Rows for one receiver and columns for another: together their borders would cut n * n fields."""
    rows = [[i, 0, 1, n] for i in range(n)]
    columns = [[0, i, n, 1] for i in range(n)]
    both = np.array(rows + columns, np.int64)
    boxes = index_boxes((n, n), both[:, :2], both[:, 2:])
    assert sum(len(grid.boxes) for grid in boxes.grids) < 20 * n * np.log2(n)
    found = boxes.find(np.array([7 * n + 3]))
    assert sorted(zip(found.box.tolist(), found.place.tolist(), strict=True)) == [
        (7, 3),
        (n + 3, 7),
    ]


def test_whole_rows_are_intervals() -> None:
    boxes = index_boxes((8, 5, 3), np.array([[0, 0, 0], [4, 0, 0]]), np.array([[4, 5, 3]] * 2))
    assert boxes.shape == (120,) and boxes.low.tolist() == [[0], [60]]
