"""Boxes against sets of elements."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import PlanError, testing
from shardmath.layouts.algebra.box import (
    _digest_arguments,
    _draw_weights,
    first_gap,
    first_overlap,
    flat_boxes,
    from_slices,
    full,
    row_size,
    shape,
    tiles,
    volume,
)

SHAPES = [dims for d in range(4) for dims in itertools.product((0, 1, 2, 3), repeat=d)]


def elements(box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(lo, hi) for lo, hi in box)))


@st.composite
def box_lists(draw: st.DrawFn, dims: int | None = None):
    sides = tuple(
        draw(st.integers(1, 4)) for _ in range(draw(st.integers(0, 3)) if dims is None else dims)
    )
    drawn = draw(st.lists(testing.boxes(sides), max_size=5))
    return sides, [box for box in drawn if volume(box)]


def test_a_box() -> None:
    box = ((1, 3), (0, 4))
    assert (shape(box), volume(box)) == ((2, 4), 8)
    assert from_slices((slice(1, 3), slice(0, 4))) == box
    assert (full((3, 2)), full(())) == (((0, 3), (0, 2)), ())
    assert (shape(()), volume(()), from_slices(())) == ((), 1, ())


@pytest.mark.parametrize(
    ("dims", "row"),
    [
        ((), 1),
        ((1,), 1),
        ((5,), 1),
        ((4, 3), 3),
        ((1, 4, 3), 3),
        ((1, 1, 7), 1),
        ((2, 3, 5), 15),
        ((0, 3), 1),
        ((0, 3, 4), 4),
    ],
)
def test_row_size(dims: tuple[int, ...], row: int) -> None:
    assert row_size(dims) == row


@pytest.mark.parametrize("dims", SHAPES, ids=str)
def test_every_flat_range(dims: tuple[int, ...]) -> None:
    total = math.prod(dims)
    listed = elements(full(dims))
    for lo, hi in itertools.combinations_with_replacement(range(total + 1), 2):
        boxes = flat_boxes(dims, lo, hi)
        assert [x for box in boxes for x in elements(box)] == listed[lo:hi]
        assert all(volume(box) for box in boxes)
        assert len(boxes) <= max(1, 2 * len(dims) - 1)


def test_flat_range_literals() -> None:
    assert flat_boxes((4, 5), 5, 15) == (((1, 3), (0, 5)),)
    assert flat_boxes((4, 5), 0, 20) == (((0, 4), (0, 5)),)
    assert flat_boxes((2, 3, 4), 5, 19) == (
        ((0, 1), (1, 2), (1, 4)),
        ((0, 1), (2, 3), (0, 4)),
        ((1, 2), (0, 1), (0, 4)),
        ((1, 2), (1, 2), (0, 3)),
    )
    assert flat_boxes((), 0, 1) == ((),)
    assert flat_boxes((), 0, 0) == ()
    assert flat_boxes((2, 3), 4, 4) == ()


@pytest.mark.parametrize(("lo", "hi"), [(-1, 2), (3, 2), (0, 7)])
def test_flat_range_outside(lo: int, hi: int, fails) -> None:
    fails(
        lambda: flat_boxes((2, 3), lo, hi),
        PlanError,
        f"elements {lo}:{hi}, counted row-major, are not a range of shape (2, 3), which has 6; "
        "give 0 <= start <= stop <= 6",
    )


@given(box_lists())
def test_first_overlap(case) -> None:
    _, boxes = case
    meeting = {
        (i, j)
        for i, j in itertools.combinations(range(len(boxes)), 2)
        if set(elements(boxes[i])) & set(elements(boxes[j]))
    }
    found = first_overlap(boxes)
    assert (found in meeting) if meeting else (found is None)


def test_first_overlap_literals() -> None:
    assert first_overlap([]) is None
    assert first_overlap([()]) is None
    assert first_overlap([(), ()]) == (0, 1)
    assert first_overlap([((0, 2),), ((2, 4),)]) is None
    assert first_overlap([((2, 4),), ((0, 2),), ((3, 5),)]) == (0, 2)
    assert first_overlap([((3, 5),), ((0, 4),)]) == (0, 1)
    # All start alike in one dimension and touch in the other.
    assert first_overlap([((0, 4), (0, 2)), ((0, 4), (2, 4)), ((0, 4), (4, 5))]) is None
    # The first meets nothing, the last two meet.
    assert first_overlap([((0, 1), (0, 9)), ((5, 9), (0, 1)), ((6, 7), (0, 1))]) == (1, 2)


@given(box_lists())
def test_first_gap(case) -> None:
    sides, boxes = case
    covered = {x for box in boxes for x in elements(box)}
    missing = [x for x in elements(full(sides)) if x not in covered]
    assert first_gap([[(0, n)] for n in sides], boxes) == (missing[0] if missing else None)


def test_first_gap_looks_only_at_what_is_held() -> None:
    assert first_gap([[(0, 1), (3, 4)]], [((0, 1),)]) == (3,)
    assert first_gap([[(0, 1), (3, 4)]], [((0, 1),), ((3, 4),)]) is None
    assert first_gap([[(0, 2)], [(1, 2), (4, 6)]], [((0, 2), (0, 5))]) == (0, 5)
    assert first_gap([[]], []) is None
    assert first_gap([], []) == ()
    assert first_gap([], [()]) is None


N = 20_000
TILED = {
    "rows": ([[(0, N)]], [((i, i + 1),) for i in range(N)]),
    "columns": ([[(0, 7)], [(0, N)]], [((0, 7), (i, i + 1)) for i in range(N)]),
    "rows beside columns": (
        [[(0, N // 2)], [(0, N // 2 + 1)]],
        [((0, N // 2), (i, i + 1)) for i in range(N // 2)]
        + [((i, i + 1), (N // 2, N // 2 + 1)) for i in range(N // 2)],
    ),
    "nested": ([[(0, 2 * N)]], [((i, 2 * N - i),) for i in range(1, N)] + [((0, 2 * N),)]),
}


@pytest.mark.parametrize("case", TILED)
def test_the_last_of_many_boxes_is_missing(case: str) -> None:
    """Not in proportion to the square of their number."""
    held, boxes = TILED[case]
    begun = time.process_time()
    last = tuple(lo for lo, _ in boxes[-1])
    assert first_gap(held, boxes) is None
    assert first_gap(held, boxes[:-1]) == last
    assert time.process_time() - begun < 10


@given(box_lists(), st.data())
def test_boxes_of_one_label_may_overlap(case, data: st.DataObject) -> None:
    _, boxes = case
    labels = data.draw(st.lists(st.integers(0, 2), min_size=len(boxes), max_size=len(boxes)))
    meeting = {
        (i, j)
        for i, j in itertools.combinations(range(len(boxes)), 2)
        if labels[i] != labels[j] and set(elements(boxes[i])) & set(elements(boxes[j]))
    }
    found = first_overlap(boxes, labels)
    assert (found in meeting) if meeting else (found is None)


@st.composite
def ranges_and_boxes(draw: st.DrawFn) -> tuple[list[list[tuple[int, int]]], list[Any]]:
    """Ranges of up to three dimensions, and boxes that tile their product or nearly do."""
    held = draw(
        st.lists(
            st.sampled_from([[(0, 3)], [(1, 2), (4, 6)], [(0, 1)], [(2, 2)]]),
            min_size=1,
            max_size=3,
        )
    )
    singles = [
        tuple((x, x + 1) for x in at)
        for at in itertools.product(*(sorted(cells(one)) for one in held))
    ]
    boxes = [box for box in singles if draw(st.integers(0, 9))]
    extra = draw(st.lists(st.sampled_from(singles), max_size=2)) if singles else []
    return held, boxes + extra


def cells(ranges: list[tuple[int, int]]) -> set[int]:
    return {x for lo, hi in ranges for x in range(lo, hi)}


@given(ranges_and_boxes())
def test_tiles_is_exactly_once(case: tuple[list[list[tuple[int, int]]], list[Any]]) -> None:
    """Weights agree just where every element is in one box, and none is outside."""
    held, boxes = case
    found = Counter(
        at for box in boxes for at in itertools.product(*(range(lo, hi) for lo, hi in box))
    )
    wanted = Counter(itertools.product(*(sorted(cells(one)) for one in held)))
    assert tiles(held, boxes) == (found == wanted)


def test_tiles_of_many_boxes() -> None:
    """A duplicate and a gap of equal volume are seen, at any size."""
    n = 1 << 40
    boxes = [((i * n, (i + 1) * n), (j, j + 1)) for i in range(40) for j in range(40)]
    held = [[(0, 40 * n)], [(0, 40)]]
    assert tiles(held, boxes)
    assert not tiles(held, [*boxes[:-1], boxes[0]])
    assert not tiles(held, boxes[:-1])
    assert not tiles(held, [*boxes[:-1], ((39 * n, 40 * n), (40, 41))])


def test_tiles_draws_the_same_weights_everywhere() -> None:
    """So an answer can be repeated, also the one that is wrong once in 2**60."""
    assert _draw_weights(3, b"seed").tolist() == [1884067081, 12687371, 1497180314]
    assert _draw_weights(3, b"other").tolist() != _draw_weights(3, b"seed").tolist()
    held, boxes = [[(0, 4)]], np.array([[(0, 2)], [(2, 4)]])
    assert (
        _digest_arguments(held, boxes)
        == _digest_arguments(held, boxes.copy())
        != _digest_arguments(held, boxes[::-1])
    )
