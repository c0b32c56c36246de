"""Stages against definitions by lists, and canonical stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Runs
from shardmath.layouts.algebra.cuts import BalancedChunks, Chunks, FixedBlock, Sizes, UserCut
from shardmath.layouts.algebra.stages import Digit, canonical_stages, pieces_runs, stage_runs
from tests.property.drawn.digits import Halves, by_definition, coordinates, stage_lists


def test_coordinates_flatten_first_slowest() -> None:
    digit = Digit(Chunks(6), ("a", "b"), (2, 3))
    assert [digit.coordinate({"a": a, "b": b, "c": 9}) for a in range(2) for b in range(3)] == list(
        range(6)
    )
    assert Digit(Chunks(2)).coordinate({"a": 1}) == 0


@given(stage_lists(), st.integers(0, 14))
def test_stages_are_lists_of_pieces(stages, n: int) -> None:
    for stage in stages:
        for coords in coordinates([stage]):
            held = stage_runs(stage, n, coords)
            assert held.indices().tolist() == by_definition(stage, n, coords)
            assert held == Runs(held.segments, len(held)) == pieces_runs(stage, n, coords)


A, B = Digit(Chunks(2), ("a",), (2,)), Digit(Chunks(2), ("b",), (2,))
LOCAL = Digit(Chunks(2))


@pytest.mark.parametrize(
    ("stages", "canonical"),
    [
        ((), ()),
        (((),), ()),
        (((LOCAL,),), ()),
        (((A, LOCAL),), ((A,),)),
        (((A, LOCAL, LOCAL),), ((A,),)),
        (((Digit(Chunks(1)), A),), ((A,),)),
        (((Digit(BalancedChunks(1)), A),), ((Digit(BalancedChunks(1)), A),)),
        (((Digit(Sizes((4,))), A),), ((A,),)),
        (((Digit(Sizes((4, 0))), A),), ((Digit(Sizes((4, 0))), A),)),
        (((A,), (B,)), ((A, B),)),
        (((A,), (LOCAL, B)), ((A, LOCAL, B),)),
        (((LOCAL, A), (B,)), ((LOCAL, A), (B,))),
        (((LOCAL, A), (), (B,)), ((LOCAL, A), (B,))),
        (((A, LOCAL), (B,)), ((A, B),)),
        (((Digit(Chunks(1), ("a",), (1,)),),), ((Digit(Chunks(1), ("a",), (1,)),),)),
        (((Digit(FixedBlock(6)), Digit(FixedBlock(3)), A),), ((Digit(FixedBlock(3)), A),)),
        (
            ((Digit(FixedBlock(4)), Digit(FixedBlock(3)), A),),
            ((Digit(FixedBlock(4)), Digit(FixedBlock(3)), A),),
        ),
        (
            ((Digit(FixedBlock(6)), Digit(FixedBlock(3), ("a",), (2,))),),
            ((Digit(FixedBlock(6)), Digit(FixedBlock(3), ("a",), (2,))),),
        ),
        (
            ((Digit(FixedBlock(3), ("a",), (2,)), Digit(FixedBlock(3)), B),),
            ((Digit(FixedBlock(3), ("a",), (2,)), Digit(FixedBlock(3)), B),),
        ),
        (((LOCAL, Digit(FixedBlock(3)), A),), ((LOCAL, Digit(FixedBlock(3)), A),)),
        (((Digit(FixedBlock(6)), LOCAL, A),), ((Digit(FixedBlock(6)), LOCAL, A),)),
    ],
)
def test_canonical_literals(stages, canonical) -> None:
    assert canonical_stages(stages) == canonical


def test_rules_compose_in_any_stage() -> None:
    halves = Digit(UserCut(Halves(), 2), ("a",), (2,))
    assert str(stage_runs((halves,), 5, {"a": 0})) == "[2:5 0:2]"
    assert stage_runs((halves,), 5, {"a": 1}) == Runs()
    assert str(stage_runs((Digit(Chunks(2)), halves), 6, {"a": 0})) == "[1:3 0:1 4:6 3:4]"
    assert str(stage_runs((halves, B), 6, {"a": 0, "b": 1})) == "[0:3]"
    assert str(stage_runs((Digit(UserCut(Halves(), 2)), B), 6, {"b": 0})) == "[3:6]"
