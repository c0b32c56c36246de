"""Windows of tensors: beside numbers that numpy gives the same cells."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from shardmath.values.changes.windows import join_steps, make_window

Case = tuple[tuple[int, ...], tuple[slice, ...], tuple[int, ...]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A shape, a box of it, and an order of dimensions."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    box = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        box.append(slice(start, draw(st.integers(start + 1, n))))
    order = tuple(draw(st.permutations(range(len(shape)))))
    return shape, tuple(box), order


def list_cells(case: Case) -> list[int]:
    """The tensor's numbers of the window's cells, in the window's order."""
    shape, box, order = case
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    cells: list[int] = numbers[box].transpose(order).ravel().tolist()
    return cells


@given(cases())
def test_cells_have_the_numbers_of_the_box(case: Case) -> None:
    window = make_window(*case)
    cells = list_cells(case)
    assert window.count == len(cells)
    assert window.number(np.arange(len(cells))).tolist() == cells


@given(cases(), st.randoms(use_true_random=False))
def test_found_are_the_cells_of_the_box(case: Case, drawn: random.Random) -> None:
    shape, _, _ = case
    window = make_window(*case)
    places = {cell: place for place, cell in enumerate(list_cells(case))}
    asked = list(range(int(np.prod(shape))))
    drawn.shuffle(asked)
    which, found = window.find(np.array(asked, np.int64))
    here = [k for k, cell in enumerate(asked) if cell in places]
    assert which.tolist() == here
    assert found.tolist() == [places[asked[k]] for k in here]


def test_whole_rows_are_an_interval() -> None:
    rows = make_window((6, 5, 4), (slice(2, 4), slice(0, 5), slice(0, 4)), (0, 1, 2))
    assert rows.steps == ((40, 1),) and rows.first == 40


def test_steps_without_elements_or_without_stride() -> None:
    """A first dimension of size or stride 0 continues no dimension before it."""
    assert join_steps([(0, 1)]) == ((0, 1),)
    assert join_steps([(3, 0), (2, 1)]) == ((3, 0), (2, 1))
    assert join_steps([(1, 7)]) == ((1, 1),)
    assert join_steps([(2, 3), (3, 1)]) == ((6, 1),)
