"""Fields and dimensions against definitions by lists."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import PlacementError, Runs
from shardmath.layouts.algebra.cuts import BalancedChunks, Chunks, FixedBlock, Sizes, UserCut
from shardmath.layouts.algebra.dimension import Dimension, Field, cells, lengths_at
from shardmath.layouts.algebra.runs import from_ranges, identity
from shardmath.layouts.algebra.stages import Digit, canonical_stages
from tests.property.drawn.digits import (
    Halves,
    Says,
    by_definition,
    coordinates,
    field,
    stage_lists,
)

A = Digit(Chunks(2), ("a",), (2,))
B = Digit(Chunks(2), ("b",), (2,))


@given(stage_lists(), st.integers(0, 14))
def test_canonical_stages_hold_the_same(stages, n: int) -> None:
    kept = canonical_stages(stages)
    assert canonical_stages(kept) == kept
    for coords in coordinates(stages):
        positions = list(range(n))
        for stage in stages:
            positions = [positions[i] for i in by_definition(stage, len(positions), coords)]
        assert Field(n, kept).runs(coords).indices().tolist() == positions
        assert Field(n, stages).runs(coords).indices().tolist() == positions


def test_a_dimension_is_its_fields_seen_through_stored() -> None:
    fields = (Field(4, ((A,),)), Field(2), Field(2, ((B,),)))
    dim = Dimension(8, fields)
    assert dim.stored is None and dim.stored_size == 8 and dim.axes == {"a": 2, "b": 2}
    assert [str(dim.runs({"a": a, "b": b})) for a in (0, 1) for b in (0, 1)] == [
        "[0:2 4:7]",
        "[0:2 4:6 7:8]",
        "[2:7]",
        "[2:6 7:8]",
    ]
    order = from_ranges([(6, 8), 1, (0, 5)])
    seen = Dimension(8, fields, order)
    assert seen.stored_size == 8
    for a, b in itertools.product((0, 1), (0, 1)):
        held = dim.runs({"a": a, "b": b}).indices()
        assert seen.runs({"a": a, "b": b}).indices().tolist() == order.indices()[held].tolist()


def test_identity_is_not_stored() -> None:
    assert Dimension(3, (Field(3),), identity(3)) == Dimension(3, (Field(3),))
    padded = Dimension(3, (Field(4),), Runs([(0, 0, 3)], 4))
    assert padded.stored is not None and padded.stored_size == 4 and padded.size == 3
    assert Dimension(4, (Field(3),), identity(3)).stored == identity(3)


def test_cells_are_row_major() -> None:
    dim = Dimension(6, (Field(6, ((B, Digit(Chunks(3), ("a",), (3,))),)),))
    assert [str(r) for r in cells(dim)] == ["[0:1]", "[1:2]", "[2:3]", "[3:4]", "[4:5]", "[5:6]"]
    assert cells(Dimension(6, (Field(6),))) == (identity(6),)


@given(stage_lists(), st.integers(0, 12))
def test_lengths_at_every_stage(stages, n: int) -> None:
    f = Field(n, stages)
    for s in range(len(stages) + 1):
        expected = {len(Field(n, stages[:s]).runs(coords)) for coords in coordinates(stages)}
        assert lengths_at(f, s) == expected


def given_sizes(*sizes: int) -> Digit:
    return Digit(Sizes(sizes), ("a",), (len(sizes),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Dimension(5, (Field(2), Field(2))),
            (
                "fields of sizes [2, 2] add up to 4, but 5 positions are stored; make them "
                "add up to 5"
            ),
        ),
        (
            lambda: Dimension(5, (Field(5),), Runs([(0, 0, 5)], 7)),
            ("fields of sizes [5] add up to 5, but 7 positions are stored; make them add up to 7"),
        ),
        (
            lambda: Dimension(5, (Field(6),), identity(6)),
            "stored positions [0:6] reach 5 of a dimension of 5; store only positions below 5",
        ),
        (
            lambda: field(7, given_sizes(3, 5)),
            "sizes [3, 5] add up to 8, but divide 7 positions; give sizes that add up to 7",
        ),
        (
            lambda: field(3, Digit(UserCut(Says((identity(1),)), 2), ("a",), (2,))),
            (
                "Says(answer=(Runs(((0, 0, 1),), 1),)).split(3, 2) returned 1 part instead "
                "of 2; return one Runs per coordinate, even if it is empty"
            ),
        ),
        (
            lambda: field(3, Digit(UserCut(Says((identity(1), "x")), 2), ("a",), (2,))),
            (
                "Says(answer=(Runs(((0, 0, 1),), 1), 'x')).split(3, 2) returned 'x' as part "
                "1, not Runs; return Runs, such as shardmath.from_ranges([(0, 2)])"
            ),
        ),
        (
            lambda: field(3, Digit(UserCut(Says((identity(3), identity(4))), 2), ("a",), (2,))),
            (
                "Says(answer=(Runs(((0, 0, 3),), 3), Runs(((0, 0, 4),), 4))).split(3, 2) "
                "returned [0:4] as part 1, which reaches position 3; return only positions "
                "below 3"
            ),
        ),
    ],
)
def test_errors(make, message: str, fails) -> None:
    fails(make, PlacementError, message)


@pytest.mark.parametrize(
    ("n", "before", "length"),
    [
        (7, Digit(Chunks(2)), 3),
        (7, B, 3),
        (7, Digit(BalancedChunks(2)), 3),
        (7, Digit(FixedBlock(4)), 3),
        (7, Digit(Sizes((4, 3))), 3),
        (5, Digit(FixedBlock(4)), 1),
        (9, Digit(FixedBlock(4), ("b",), (3,)), 1),
        (4, Digit(FixedBlock(4), ("b",), (2,)), 0),
        (4, Digit(UserCut(Halves(), 2), ("b",), (2,)), 0),
        (5, Digit(UserCut(Says((identity(4), Runs((), 1))), 2)), 1),
    ],
)
def test_sizes_have_to_fit_the_last_piece_too(n: int, before: Digit, length: int, fails) -> None:
    message = f"sizes [1, 3] add up to 4, but divide {length} positions; give sizes that add up to {length}"
    fails(lambda: field(n, before, given_sizes(1, 3)), PlacementError, message)


@dataclass(frozen=True)
class NotOne:
    """A rule that cannot split a length of 1."""

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return (identity(n + (n == 1)), *[Runs()] * (parts - 1))


def test_rules_meet_every_length_when_the_dimension_is_made() -> None:
    """Chunks of 7 in 5 are 2, 2, 2, 1, 0: the 1 is neither the first nor the last."""
    with pytest.raises(
        PlacementError, match=("part 0, which reaches position 1; return only positions below 1")
    ):
        field(7, Digit(Chunks(5), ("b",), (5,)), Digit(UserCut(NotOne(), 2), ("a",), (2,)))


def test_sizes_have_to_fit_the_first_piece_too(fails) -> None:
    for before in (
        Digit(FixedBlock(4)),
        Digit(FixedBlock(4), ("b",), (2,)),
        Digit(Sizes((4, 1))),
        Digit(Sizes((4, 1)), ("b",), (2,)),
    ):
        message = "sizes [0, 1] add up to 1, but divide 4 positions; give sizes that add up to 4"
        fails(lambda before=before: field(5, before, given_sizes(0, 1)), PlacementError, message)


def test_sizes_have_to_fit_every_rank_s_length_in_a_later_stage(fails) -> None:
    strided = (Digit(Chunks(2)), B)
    assert Dimension(8, (Field(8, (strided, (given_sizes(1, 3),))),)).runs(
        {"a": 0, "b": 1}
    ) == from_ranges([(2, 3)])
    with pytest.raises(
        PlacementError,
        match=(
            r"sizes \[1, 3\] add up to 4, but divide 2 positions; give "
            r"sizes that add up"
        ),
    ):
        Dimension(6, (Field(6, (strided, (given_sizes(1, 3),))),))


def test_sizes_that_fit_every_piece() -> None:
    assert field(8, B, given_sizes(1, 3)).runs({"a": 1, "b": 1}) == from_ranges([(5, 8)])
    assert field(8, Digit(FixedBlock(4)), given_sizes(1, 3)).runs({"a": 0}) == from_ranges(
        [(0, 1), (4, 5)]
    )
    assert field(8, Digit(FixedBlock(4), ("b",), (2,)), given_sizes(1, 3)).runs(
        {"a": 1, "b": 0}
    ) == from_ranges([(1, 4)])
    assert field(9, Digit(FixedBlock(4), ("b",), (2,)), given_sizes(1, 3)).runs(
        {"a": 0, "b": 1}
    ) == from_ranges([(4, 5)])
    assert field(6, given_sizes(2, 4), Digit(Chunks(2), ("b",), (2,))).runs(
        {"a": 1, "b": 1}
    ) == from_ranges([(4, 6)])
