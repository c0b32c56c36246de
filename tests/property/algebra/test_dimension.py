"""Digits against definitions by lists: cuts, stages, canonical stages, fields, dimensions."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, PlacementError, Runs
from shardmath.algebra.dimension import (
    Balanced,
    Block,
    Chunks,
    Digit,
    Dimension,
    Field,
    Rule,
    Sizes,
    canonical_stages,
    cells,
    lengths_at,
    pieces_runs,
    stage_runs,
)
from shardmath.algebra.partition import overlapping, partition, spans
from shardmath.algebra.runs import concat, from_ranges, identity

LENGTHS = range(13)


@dataclass(frozen=True)
class Halves:
    """Everything to part 0, in the other order; the others nothing."""

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return (from_ranges([(n // 2, n), (0, n // 2)]), *[Runs()] * (parts - 1))


@dataclass(frozen=True)
class Says:
    """A rule that answers anything."""

    answer: tuple

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return self.answer


def torch_chunk(n: int, k: int) -> list[list[int]]:
    step = -(-n // k)
    return [[i for i in range(n) if step and i // step == r] for r in range(k)]


def blocks(n: int, b: int) -> list[list[int]]:
    return [list(range(i, min(i + b, n))) for i in range(0, n, b)]


def pieces_of(cut, n: int) -> list[list[int]]:
    return [list(range(o, o + k)) for o, k in (cut.part(n, i) for i in range(cut.count(n)))]


@pytest.mark.parametrize("n", LENGTHS)
def test_cuts_are_their_definitions(n: int) -> None:
    for k in range(1, 6):
        assert pieces_of(Chunks(k), n) == torch_chunk(n, k)
        assert pieces_of(Balanced(k), n) == [
            part.tolist() for part in np.array_split(np.arange(n), k)
        ]
        assert pieces_of(Block(k), n) == blocks(n, k)
        assert all(
            Block(k).part(n, i) == (n, 0) for i in range(Block(k).count(n), Block(k).count(n) + 3)
        )
    for first, second in itertools.combinations_with_replacement(range(n + 1), 2):
        sizes = (first, second - first, n - second)
        assert pieces_of(Sizes(sizes), n) == [
            part.tolist() for part in np.split(np.arange(n), [first, second])
        ]


def test_coordinates_flatten_first_slowest() -> None:
    digit = Digit(Chunks(6), ("a", "b"), (2, 3))
    assert [digit.coordinate({"a": a, "b": b, "c": 9}) for a in range(2) for b in range(3)] == list(
        range(6)
    )
    assert Digit(Chunks(2)).coordinate({"a": 1}) == 0


CUTS = [Chunks(2), Chunks(3), Balanced(2), Balanced(3), Block(1), Block(2), Block(3)]


@st.composite
def digits(draw: st.DrawFn, axis: str) -> Digit:
    """A digit whose cut has as many parts as its axis, or a local one."""
    keeper = draw(st.sampled_from([(), (2,), (3,)]))
    cuts = [
        Chunks(k := (keeper or (draw(st.integers(1, 3)),))[0]),
        Balanced(k),
        Block(draw(st.integers(1, 4))),
    ]
    return Digit(draw(st.sampled_from(cuts)), (axis,) if keeper else (), keeper)


@st.composite
def stage_lists(draw: st.DrawFn) -> tuple[tuple[Digit, ...], ...]:
    names = iter("abcdefgh")
    return tuple(
        tuple(draw(digits(next(names))) for _ in range(draw(st.integers(0, 3))))
        for _ in range(draw(st.integers(0, 2)))
    )


def by_definition(stage, length: int, coords) -> list[int]:
    """Cut every piece and keep, on lists."""
    pieces = [list(range(length))]
    for digit in stage:
        cut = [
            [
                piece[o : o + n]
                for o, n in (
                    digit.cut.part(len(piece), i) for i in _kept(digit, len(piece), coords)
                )
            ]
            for piece in pieces
        ]
        pieces = [part for parts in cut for part in parts]
    return [i for piece in pieces for i in piece]


def _kept(digit: Digit, length: int, coords) -> list[int]:
    return [digit.coordinate(coords)] if digit.axes else list(range(digit.cut.count(length)))


def coordinates(stages):
    axes = {
        name: n
        for stage in stages
        for digit in stage
        for name, n in zip(digit.axes, digit.sizes, strict=True)
    }
    return [
        dict(zip(axes, at, strict=True)) for at in itertools.product(*map(range, axes.values()))
    ]


@given(stage_lists(), st.integers(0, 14))
def test_stages_are_lists_of_pieces(stages, n: int) -> None:
    for stage in stages:
        for coords in coordinates([stage]):
            held = stage_runs(stage, n, coords)
            assert held.indices().tolist() == by_definition(stage, n, coords)
            assert held == Runs(held.segments, len(held)) == pieces_runs(stage, n, coords)


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
        (((Digit(Balanced(1)), A),), ((Digit(Balanced(1)), A),)),
        (((Digit(Sizes((4,))), A),), ((A,),)),
        (((Digit(Sizes((4, 0))), A),), ((Digit(Sizes((4, 0))), A),)),
        (((A,), (B,)), ((A, B),)),
        (((A,), (LOCAL, B)), ((A, LOCAL, B),)),
        (((LOCAL, A), (B,)), ((LOCAL, A), (B,))),
        (((LOCAL, A), (), (B,)), ((LOCAL, A), (B,))),
        (((A, LOCAL), (B,)), ((A, B),)),
        (((Digit(Chunks(1), ("a",), (1,)),),), ((Digit(Chunks(1), ("a",), (1,)),),)),
        (((Digit(Block(6)), Digit(Block(3)), A),), ((Digit(Block(3)), A),)),
        (((Digit(Block(4)), Digit(Block(3)), A),), ((Digit(Block(4)), Digit(Block(3)), A),)),
        (
            ((Digit(Block(6)), Digit(Block(3), ("a",), (2,))),),
            ((Digit(Block(6)), Digit(Block(3), ("a",), (2,))),),
        ),
        (
            ((Digit(Block(3), ("a",), (2,)), Digit(Block(3)), B),),
            ((Digit(Block(3), ("a",), (2,)), Digit(Block(3)), B),),
        ),
        (((LOCAL, Digit(Block(3)), A),), ((LOCAL, Digit(Block(3)), A),)),
        (((Digit(Block(6)), LOCAL, A),), ((Digit(Block(6)), LOCAL, A),)),
    ],
)
def test_canonical_literals(stages, canonical) -> None:
    assert canonical_stages(stages) == canonical


def test_rules_compose_in_any_stage() -> None:
    halves = Digit(Rule(Halves(), 2), ("a",), (2,))
    assert str(stage_runs((halves,), 5, {"a": 0})) == "[2:5 0:2]"
    assert stage_runs((halves,), 5, {"a": 1}) == Runs()
    assert str(stage_runs((Digit(Chunks(2)), halves), 6, {"a": 0})) == "[1:3 0:1 4:6 3:4]"
    assert str(stage_runs((halves, B), 6, {"a": 0, "b": 1})) == "[0:3]"
    assert str(stage_runs((Digit(Rule(Halves(), 2)), B), 6, {"b": 0})) == "[3:6]"


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


def field(n: int, *stage: Digit) -> Dimension:
    return Dimension(n, (Field(n, (stage,)),))


def given_sizes(*sizes: int) -> Digit:
    return Digit(Sizes(sizes), ("a",), (len(sizes),))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Dimension(5, (Field(2), Field(2))),
            "fields [2, 2] add up to 4, the dimension stores 5; make the fields add up to the stored size",
        ),
        (
            lambda: Dimension(5, (Field(5),), Runs([(0, 0, 5)], 7)),
            "fields [5] add up to 5, the dimension stores 7; make the fields add up to the stored size",
        ),
        (
            lambda: Dimension(5, (Field(6),), identity(6)),
            "stored [0:6] reaches position 5 of a dimension of 5; stay inside",
        ),
        (
            lambda: field(7, given_sizes(3, 5)),
            "sizes [3, 5] add up to 8, the piece has 7; make them add up",
        ),
        (
            lambda: field(3, Digit(Rule(Says((identity(1),)), 2), ("a",), (2,))),
            "Says(answer=(Runs(((0, 0, 1),), 1),)).split(3, 2) gave 1 part; give 2, empty ones included",
        ),
        (
            lambda: field(3, Digit(Rule(Says((identity(1), "x")), 2), ("a",), (2,))),
            "Says(answer=(Runs(((0, 0, 1),), 1), 'x')).split(3, 2) gave 'x' as part 1; give Runs",
        ),
        (
            lambda: field(3, Digit(Rule(Says((identity(3), identity(4))), 2), ("a",), (2,))),
            "Says(answer=(Runs(((0, 0, 3),), 3), Runs(((0, 0, 4),), 4))).split(3, 2): part 1 is [0:4], beyond "
            "the length; stay below 3",
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
        (7, Digit(Balanced(2)), 3),
        (7, Digit(Block(4)), 3),
        (7, Digit(Sizes((4, 3))), 3),
        (5, Digit(Block(4)), 1),
        (9, Digit(Block(4), ("b",), (3,)), 1),
        (4, Digit(Block(4), ("b",), (2,)), 0),
        (4, Digit(Rule(Halves(), 2), ("b",), (2,)), 0),
        (5, Digit(Rule(Says((identity(4), Runs((), 1))), 2)), 1),
    ],
)
def test_sizes_have_to_fit_the_last_piece_too(n: int, before: Digit, length: int, fails) -> None:
    message = f"sizes [1, 3] add up to 4, the piece has {length}; make them add up"
    fails(lambda: field(n, before, given_sizes(1, 3)), PlacementError, message)


@dataclass(frozen=True)
class NotOne:
    """A rule that cannot split a length of 1."""

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return (identity(n + (n == 1)), *[Runs()] * (parts - 1))


def test_rules_meet_every_length_when_the_dimension_is_made() -> None:
    """Chunks of 7 in 5 are 2, 2, 2, 1, 0: the 1 is neither the first nor the last."""
    with pytest.raises(PlacementError, match=r"part 0 is \[0:2\], beyond the length; stay below 1"):
        field(7, Digit(Chunks(5), ("b",), (5,)), Digit(Rule(NotOne(), 2), ("a",), (2,)))


def test_sizes_have_to_fit_the_first_piece_too(fails) -> None:
    for before in (
        Digit(Block(4)),
        Digit(Block(4), ("b",), (2,)),
        Digit(Sizes((4, 1))),
        Digit(Sizes((4, 1)), ("b",), (2,)),
    ):
        message = "sizes [0, 1] add up to 1, the piece has 4; make them add up"
        fails(lambda before=before: field(5, before, given_sizes(0, 1)), PlacementError, message)


def test_sizes_have_to_fit_every_rank_s_length_in_a_later_stage(fails) -> None:
    strided = (Digit(Chunks(2)), B)
    assert Dimension(8, (Field(8, (strided, (given_sizes(1, 3),))),)).runs(
        {"a": 0, "b": 1}
    ) == from_ranges([(2, 3)])
    with pytest.raises(
        PlacementError, match=r"sizes \[1, 3\] add up to 4, the piece has 2; make them add up"
    ):
        Dimension(6, (Field(6, (strided, (given_sizes(1, 3),))),))


def test_sizes_that_fit_every_piece() -> None:
    assert field(8, B, given_sizes(1, 3)).runs({"a": 1, "b": 1}) == from_ranges([(5, 8)])
    assert field(8, Digit(Block(4)), given_sizes(1, 3)).runs({"a": 0}) == from_ranges(
        [(0, 1), (4, 5)]
    )
    assert field(8, Digit(Block(4), ("b",), (2,)), given_sizes(1, 3)).runs(
        {"a": 1, "b": 0}
    ) == from_ranges([(1, 4)])
    assert field(9, Digit(Block(4), ("b",), (2,)), given_sizes(1, 3)).runs(
        {"a": 0, "b": 1}
    ) == from_ranges([(4, 5)])
    assert field(6, given_sizes(2, 4), Digit(Chunks(2), ("b",), (2,))).runs(
        {"a": 1, "b": 1}
    ) == from_ranges([(4, 6)])


# Partitions of a dimension


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
    g, stop, lo, part = spans(parts)
    assert (g.tolist(), stop.tolist(), lo.tolist(), part.tolist()) == (
        [0, 1, 4],
        [1, 4, 6],
        [3, 0, 0],
        [0, 1, 0],
    )
    assert [x.tolist() for x in spans(())] == [[], [], [], []]
    nested = spans((from_ranges([(1, 2)]), from_ranges([(0, 4)])))
    assert [x.tolist() for x in nested] == [[0, 1], [4, 2], [0, 0], [1, 0]]


def test_spans_that_begin_alike_are_in_the_order_of_their_parts() -> None:
    """More than the 16 that any sort keeps in order."""
    _, _, _, part = spans([from_ranges([(i % 3, i % 3 + 1)]) for i in range(999)])
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
    dim = field(4, Digit(Rule(Says(table), len(table)), ("a",), (len(table),)))
    assert overlapping(dim) == overlap
    assert overlap == (concat_fails(table))


def concat_fails(parts) -> bool:
    try:
        concat(parts)
    except ValueError:
        return True
    return False
