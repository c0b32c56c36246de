"""The distinct parts of a dimension, and whether they overlap."""

from __future__ import annotations

import numpy as np
import pytest

from shardmath import Layout, Mesh, Runs
from shardmath.layouts.algebra.cuts import UserCut
from shardmath.layouts.algebra.partition import list_spans, overlapping, partition
from shardmath.layouts.algebra.runs import concat, from_ranges
from shardmath.layouts.algebra.stages import Digit
from tests.property.drawn.digits import Says, field


def test_equal_parts_are_one() -> None:
    mesh = Mesh(a=2, b=3, ranks=[9, 8, 7, 6, 5, 4])
    dim = Layout((5,), mesh, "(b n)").dims[0]
    found = partition(dim)
    assert found.axes == ("b",) and list(map(str, found.parts)) == ["[0:2]", "[2:4]", "[4:5]"]
    assert found.cell.tolist() == [0, 1, 2] and found.cell.dtype == np.int64
    assert found.by_rank(mesh).tolist() == [0, 1, 2, 0, 1, 2]
    empty = partition(Layout((1,), mesh, "(b n)").dims[0])
    assert list(map(str, empty.parts)) == ["[0:1]", "[]"] and empty.cell.tolist() == [0, 1, 1]


def test_spans_are_sorted_by_global_start() -> None:
    parts = (from_ranges([(4, 6), 1, (0, 1)]), from_ranges([(1, 4)]), Runs())
    g, stop, lo, part = list_spans(parts)
    assert (g.tolist(), stop.tolist(), lo.tolist(), part.tolist()) == (
        [0, 1, 4],
        [1, 4, 6],
        [3, 0, 0],
        [0, 1, 0],
    )
    assert [x.tolist() for x in list_spans(())] == [[], [], [], []]
    nested = list_spans((from_ranges([(1, 2)]), from_ranges([(0, 4)])))
    assert [x.tolist() for x in nested] == [[0, 1], [4, 2], [0, 0], [1, 0]]


def test_spans_that_begin_alike_are_in_the_order_of_their_parts() -> None:
    """More than the 16 that any sort keeps in order."""
    _, _, _, part = list_spans([from_ranges([(i % 3, i % 3 + 1)]) for i in range(999)])
    assert part.tolist() == [*range(0, 999, 3), *range(1, 999, 3), *range(2, 999, 3)]


@pytest.mark.parametrize(
    ("parts", "overlap"),
    [
        (((0, 2), (2, 4)), False),
        (((2, 4), (0, 2)), False),
        (((0, 3), (2, 4)), True),
        (((0, 2), (0, 2)), True),
        (((0, 0), (0, 2)), False),
        (((0, 4), (0, 0)), False),
        (((0, 1), (1, 3), (2, 4)), True),
        (((0, 1), (2, 4), (1, 3)), True),
        (((0, 1), (2, 3), (3, 4)), False),
    ],
)
def test_overlapping(parts, overlap: bool) -> None:
    table = tuple(from_ranges([part]) for part in parts)
    dim = field(4, Digit(UserCut(Says(table), len(table)), ("a",), (len(table),)))
    assert overlapping(dim) == overlap
    assert overlap == (concat_fails(table))


def concat_fails(parts) -> bool:
    try:
        concat(parts)
    except ValueError:
        return True
    return False
