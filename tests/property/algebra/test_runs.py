"""Runs against lists of positions: canonical form, algebra, errors."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Runs, RunsError, testing
from shardmath.layouts.algebra.runs import (
    compose,
    concat,
    from_ranges,
    identity,
    invert,
    restrict,
    spanning,
)

FIT = "; give (local start, global start, n) >= 0 with local start + n <= "
ONCE = "; give each global position once"


def of(positions: list[int]) -> Runs:
    """The Runs whose local position i holds positions[i], -1 for a hole."""
    return Runs([(i, g, 1) for i, g in enumerate(positions) if g >= 0], len(positions))


def small(n: int) -> list[list[int]]:
    """All partial injections of 0..n-1 with length n."""
    kept = itertools.product(*([(True, False)] * n))
    return [
        [g if k else -1 for g, k in zip(order, mask, strict=True)]
        for mask in kept
        for order in itertools.permutations(range(n))
    ]


SMALL = [positions for n in range(5) for positions in small(n)]


def test_canonical_form() -> None:
    runs = Runs([(3, 9, 1), (0, 4, 2), (2, 6, 1), (2, 50, 0)])
    assert runs.segments == ((0, 4, 3), (3, 9, 1))
    assert (len(runs), runs.size, runs.extent) == (4, 4, 10)
    assert runs == Runs(((0, 4, 3), (3, 9, 1)), 4)
    assert runs != Runs(runs.segments, 5)


def test_neighbors_merge_only_where_both_sides_continue() -> None:
    assert Runs([(0, 0, 1), (1, 2, 1)]).segments == ((0, 0, 1), (1, 2, 1))
    assert Runs([(0, 0, 1), (2, 1, 1)]).segments == ((0, 0, 1), (2, 1, 1))
    assert Runs([(0, 0, 1), (1, 1, 1), (2, 2, 3)]).segments == ((0, 0, 5),)
    assert Runs([(0, 3, 1), (1, 3, 0), (1, 4, 1)]).segments == ((0, 3, 2),)


def test_first_segment_at_the_origin_does_not_join_nothing() -> None:
    assert Runs([(0, 0, 1)]).segments == ((0, 0, 1),)
    assert Runs([(0, 0, 0)]).segments == ()


def test_empty_and_holes() -> None:
    assert Runs() == Runs((), 0) and len(Runs()) == 0
    assert Runs((), 3).indices().tolist() == [-1, -1, -1]
    assert (Runs((), 3).size, Runs((), 3).extent) == (0, 0)
    assert Runs().indices().dtype == np.int64


@pytest.mark.parametrize("positions", SMALL, ids=str)
def test_small_runs_are_their_positions(positions: list[int]) -> None:
    runs = of(positions)
    assert runs.indices().tolist() == positions
    assert runs.size == sum(g >= 0 for g in positions)
    assert runs.extent == max([g + 1 for g in positions if g >= 0], default=0)
    borders = sum(
        g >= 0 and (i == 0 or positions[i - 1] < 0 or positions[i - 1] + 1 != g)
        for i, g in enumerate(positions)
    )
    assert len(runs.segments) == borders
    n = len(positions)
    back = [positions.index(g) if g in positions else -1 for g in range(n)]
    assert invert(runs, n) == of(back)
    for lo, hi in itertools.combinations_with_replacement(range(n + 1), 2):
        assert restrict(runs, lo, hi) == of([g if lo <= g < hi else -1 for g in positions])


def test_all_small_compositions() -> None:
    for f, g in itertools.product(small(3), small(3)):
        assert compose(of(f), of(g)) == of([g[i] if i >= 0 else -1 for i in f])


@given(st.lists(testing.runs(most=6), max_size=3))
def test_concat_is_concatenation(parts: list[Runs]) -> None:
    moved = [
        Runs([(lo, g + 20 * i, n) for lo, g, n in p.segments], len(p)) for i, p in enumerate(parts)
    ]
    assert concat(moved).indices().tolist() == [x for p in moved for x in p.indices().tolist()]


@given(testing.runs())
def test_text_of_spans_reads_back(runs: Runs) -> None:
    words = spanning(runs).split()
    ranges = [int(w[1:]) if w[0] == "-" else tuple(map(int, w.split(":"))) for w in words]
    assert from_ranges(ranges) == runs
    assert str(runs) == f"[{spanning(runs)}]"
    assert eval(repr(runs), {"Runs": Runs}) == runs
    assert pickle.loads(pickle.dumps(runs)) == runs


def test_text() -> None:
    assert str(from_ranges([2, (0, 1), 1, (5, 7), (3, 4), 3])) == "[-2 0:1 -1 5:7 3:4 -3]"
    assert str(Runs()) == "[]"
    assert repr(Runs([(0, 1, 2)], 3)) == "Runs(((0, 1, 2),), 3)"


def test_composing_into_the_identity_is_free() -> None:
    f = from_ranges([(1, 2), (4, 6)])
    assert compose(f, identity(6)) is f
    assert compose(f, Runs([(0, 0, 6)], 7)) == f
    assert compose(f, Runs([(0, 1, 6)])) == from_ranges([(2, 3), (5, 7)])


def test_identity() -> None:
    assert identity(0) == Runs() and identity(0).segments == ()
    assert identity(3).indices().tolist() == [0, 1, 2]


def test_from_ranges() -> None:
    assert from_ranges([(2, 2), (0, 2)]) == identity(2)
    assert from_ranges([0, (0, 2), 0]) == identity(2)
    assert from_ranges([(0, 2), (2, 4)]).segments == ((0, 0, 4),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Runs((), 1 << 63),
            (
                "position 9223372036854775807 has more than 63 bits; give positions below "
                "9223372036854775807"
            ),
        ),
        (
            lambda: Runs([(0, (1 << 63) - 1, 2)]),
            (
                "position 9223372036854775808 has more than 63 bits; give positions below "
                "9223372036854775807"
            ),
        ),
        (
            lambda: Runs([(-1, 0, 2)]),
            "segment (-1, 0, 2) does not fit a local length of 1" + FIT + "1",
        ),
        (
            lambda: Runs([(0, -1, 2)]),
            "segment (0, -1, 2) does not fit a local length of 2" + FIT + "2",
        ),
        (
            lambda: Runs([(0, 0, -1)]),
            "length -1 of segments ((0, 0, -1),) is negative; give a length of 0 or more",
        ),
        (
            lambda: Runs([(1, 0, 3)], 3),
            "segment (1, 0, 3) does not fit a local length of 3" + FIT + "3",
        ),
        (
            lambda: Runs([(0, 0, 3), (2, 7, 1)]),
            "local ranges 0:3 and 2:3 share position 2; give each local position once",
        ),
        (
            lambda: Runs([(0, 4, 3), (3, 6, 2)]),
            "global ranges 4:7 and 6:8 share position 6" + ONCE,
        ),
        (
            lambda: Runs([(3, 4, 3), (0, 6, 2)]),
            "global ranges 4:7 and 6:8 share position 6" + ONCE,
        ),
        (lambda: Runs((), 2.5), "length of Runs () is 2.5; give an integer"),
        (
            lambda: Runs((), -1),
            ("length -1 of segments () is negative; give a length of 0 or more"),
        ),
        (
            lambda: Runs([(0, 1)]),
            "segment (0, 1) is not (local start, global start, length); give three integers",
        ),
        (lambda: Runs([(0, 1, 2.0)]), "a number of segment (0, 1, 2.0) is 2.0; give an integer"),
        (
            lambda: from_ranges([(0, 1, 2)]),
            ("range (0, 1, 2) is not (start, stop); give two integers, or one integer for a hole"),
        ),
        (lambda: from_ranges([(0, "1")]), "the stop of (0, '1') is '1'; give an integer"),
        (lambda: from_ranges([("0", 1)]), "the start of ('0', 1) is '0'; give an integer"),
        (lambda: from_ranges([2.0]), "the stop of 2.0 is 2.0; give an integer"),
        (
            lambda: from_ranges([(0, 1), (5, 3)]),
            "5:3 is not a range; give 0 <= start <= stop",
        ),
        (lambda: from_ranges([(-2, 3)]), "-2:3 is not a range; give 0 <= start <= stop"),
        (lambda: from_ranges([-1]), "0:-1 is not a range; give 0 <= start <= stop"),
        (
            lambda: concat([identity(2), identity(1)]),
            "global ranges 0:2 and 0:1 share position 0" + ONCE,
        ),
        (
            lambda: invert(from_ranges([(2, 5)]), 4),
            "[2:5] reaches position 4, but the dimension has 4; give n >= 5",
        ),
        (
            lambda: compose(identity(4), identity(3)),
            (
                "[0:4] reaches position 3, but [0:3] has a length of 3; compose it with a "
                "Runs of length 4 or more"
            ),
        ),
    ],
)
def test_errors(make, message: str, fails) -> None:
    fails(make, RunsError, message)


def test_touching_segments_are_no_error() -> None:
    assert invert(from_ranges([(2, 5)]), 5) == Runs([(2, 0, 3)], 5)
    assert Runs([(0, 3, 2), (2, 0, 3)], 5).indices().tolist() == [3, 4, 0, 1, 2]


def test_concat_keeps_holes_at_the_end() -> None:
    assert concat([identity(1), Runs((), 2)]) == Runs([(0, 0, 1)], 3)
    assert concat([Runs((), 1), from_ranges([(4, 5), 1])]) == from_ranges([1, (4, 5), 1])
