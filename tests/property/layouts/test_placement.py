"""Placements: closed forms against `split`, exhaustively; a placement of one's own; errors."""

from __future__ import annotations

import itertools
import pickle
import time
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given

from shardmath import (
    Balanced,
    BlockCyclic,
    Layout,
    LayoutError,
    Mesh,
    Packed,
    Partial,
    PlacementError,
    Ragged,
    Replicate,
    Runs,
    Shard,
    StridedShard,
    Table,
    plan,
    simulate,
    testing,
    verify,
)
from shardmath.layouts.algebra.cuts import UserCut
from shardmath.layouts.algebra.runs import from_ranges, identity
from shardmath.layouts.algebra.stages import pieces_runs, stage_runs
from shardmath.layouts.placement import OPS, stage_of
from shardmath.testing.placements import covering

LENGTHS, PARTS = range(13), range(1, 6)


def torch_chunk(positions: list[int], k: int) -> list[list[int]]:
    step = max(1, -(-len(positions) // k))
    return [positions[i * step : (i + 1) * step] for i in range(k)]


def strided(n: int, k: int, factor: int) -> list[list[int]]:
    dealt = [torch_chunk(piece, k) for piece in torch_chunk(list(range(n)), factor)]
    return [[i for piece in dealt for i in piece[r]] for r in range(k)]


def packed(sizes: tuple[int, ...], k: int) -> list[list[int]]:
    ends = list(itertools.accumulate(sizes, initial=0))
    dealt = [torch_chunk(list(range(lo, hi)), k) for lo, hi in itertools.pairwise(ends)]
    return [[i for piece in dealt for i in piece[r]] for r in range(k)]


def sizes_of(n: int, count: int):
    """All ways to write n as `count` numbers."""
    cuts = itertools.combinations_with_replacement(range(n + 1), count - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *at, n))) for at in cuts]


def check(placement, n: int, k: int, expected: list[list[int]]) -> None:
    """`split`, the closed form, the definition by pieces, and a layout all say `expected`."""
    assert [part.indices().tolist() for part in placement.split(n, k)] == expected
    stage = stage_of(placement, ("a",), (k,))
    layout = Layout((n,), Mesh(a=k), (placement,))
    for r in range(k):
        assert (
            stage_runs(stage, n, {"a": r})
            == pieces_runs(stage, n, {"a": r})
            == placement.split(n, k)[r]
        )
        assert layout.runs(r) == (placement.split(n, k)[r],)


@pytest.mark.parametrize(("n", "k"), list(itertools.product(LENGTHS, PARTS)))
def test_every_small_split(n: int, k: int) -> None:
    check(Shard(0), n, k, torch_chunk(list(range(n)), k))
    check(Balanced(0), n, k, [part.tolist() for part in np.array_split(np.arange(n), k)])
    for factor in range(1, 5):
        check(StridedShard(0, factor), n, k, strided(n, k, factor))
        blocks = [list(range(i, min(n, i + factor))) for i in range(0, n, factor)]
        check(
            BlockCyclic(0, factor), n, k, [[i for b in blocks[r::k] for i in b] for r in range(k)]
        )


@pytest.mark.parametrize(("n", "k"), list(itertools.product((0, 1, 5, 8), (1, 2, 3))))
def test_every_small_list_of_sizes(n: int, k: int) -> None:
    for sizes in sizes_of(n, k):
        ends = list(itertools.accumulate(sizes, initial=0))
        check(Ragged(0, sizes), n, k, [list(range(lo, hi)) for lo, hi in itertools.pairwise(ends)])
    for sizes in sizes_of(n, 3):
        check(Packed(0, sizes), n, k, packed(sizes, k))


def test_torch_agrees() -> None:
    torch = pytest.importorskip("torch")
    for n, k in itertools.product(range(1, 13), PARTS):
        chunks = [t.tolist() for t in torch.arange(n).chunk(k)]
        held = [part.indices().tolist() for part in Shard(0).split(n, k)]
        assert held == chunks + [[]] * (k - len(chunks))


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Shard(0), "(tp n)"),
        (Balanced(0), "(tp~ n)"),
        (StridedShard(0, 2), "(2 tp n)"),
        (StridedShard(0, 1), "(tp n)"),
        (Packed(0, (8, 2, 2)), "([8 2 2] tp n)"),
        (Packed(0, (12,)), "(tp n)"),
        (Ragged(0, (7, 5)), "(tp[7 5] n)"),
        (BlockCyclic(0, 4), "(n tp 4)"),
        (BlockCyclic(0), "(n tp)"),
        (Table(0, (identity(12), Runs())), "(tp@table n)"),
        (Replicate(), "n"),
        (Partial("max"), "n {max: tp}"),
    ],
)
def test_text_of_each(placement, text: str) -> None:
    layout = Layout((12,), Mesh(tp=2), (placement,))
    assert layout.text == text
    assert Layout((12,), Mesh(tp=2), text, rules=layout.rules) is layout


def test_table_gives_its_parts() -> None:
    parts = (from_ranges([(3, 5), 1, (0, 1)]), from_ranges([(0, 4)]))
    table = Table(0, list(parts))
    assert table.parts == parts and hash(table) == hash(Table(0, parts))
    assert table.split(5, 2) == parts
    layout = Layout((5,), Mesh(a=2), (table,))
    assert [layout.runs(r)[0] for r in range(2)] == list(parts)


def test_sizes_are_tuples_of_int() -> None:
    assert Packed(0, [np.int64(3), 2]) == Packed(0, (3, 2))
    assert Ragged(0, iter((3, 2))).sizes == (3, 2)


def test_sizes_are_checked_even_where_they_change_nothing() -> None:
    for spec in ((Packed(0, (5,)),), "([5] tp n)", "([1 2] n)"):
        with pytest.raises(
            (PlacementError, ValueError), match=r"add up to \d(\n|, but divide 8 positions)"
        ):
            Layout((8,), Mesh(tp=2), spec)


# A placement of one's own, in ten lines


@dataclass(frozen=True)
class Snake:
    """Positions dealt boustrophedon: 0 1 2 2 1 0 0 1 2 ..."""

    dim: int

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        turn = [i % parts if i // parts % 2 == 0 else parts - 1 - i % parts for i in range(n)]
        return tuple(
            from_ranges((i, i + 1) for i in range(n) if turn[i] == r) for r in range(parts)
        )


@given(testing.lengths(100), testing.parts())
def test_a_users_placement_keeps_the_laws(n: int, parts: int) -> None:
    testing.check_placement(Snake(0), n, parts)
    testing.check_placement(Snake(3), n, parts)


@dataclass(frozen=True)
class OffByOne:
    """Chunks, each of which begins with the last row of the one before, or that end with a row again."""

    dim: int
    inside: bool = False

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        ends = [n * i // parts for i in range(parts + 1)]
        if self.inside:
            return tuple(from_ranges([(a, b), (b - 1, b)]) for a, b in itertools.pairwise(ends))
        return tuple(from_ranges([(max(a - 1, 0), b)]) for a, b in itertools.pairwise(ends))


class Copied(OffByOne):
    """The same, and meant."""

    overlaps = True


def test_an_overlap_that_is_not_meant_is_no_layout() -> None:
    """Its plans were proved: a row that two ranks hold looks like a replica."""
    mesh = Mesh(dp=2, cp=4, ranks=[7, 5, 3, 1, 6, 4, 2, 0])
    with pytest.raises(PlacementError) as caught:
        Layout((16,), mesh, {"cp": OffByOne(0)})
    assert str(caught.value) == (
        "dimension 0 of shape (16,): OffByOne(dim=0, inside=False).split(16, 4): "
        "part 0 of 2 ranks (7, 6) and part 1 of 2 ranks (5, 4) both hold position 3; "
        "make the parts disjoint, or set `overlaps = True` in the class if copies are meant"
    )
    with pytest.raises(PlacementError, match="parts 0 and 1 both hold position 3") as caught:
        testing.check_placement(OffByOne(0), 16, 4)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(PlacementError) as caught:
        Layout((16,), mesh, {"cp": OffByOne(0, inside=True)})
    assert str(caught.value) == (
        "dimension 0 of shape (16,): OffByOne(dim=0, inside=True).split(16, 4): "
        "global ranges 0:4 and 3:4 share position 3; give each global position once"
    )
    meant = Layout((16,), mesh, {"cp": Copied(0)})
    verify(plan(meant, Layout((16,), mesh, "n")))
    testing.check_placement(Copied(0), 16, 4)


@dataclass(frozen=True)
class Aligned:
    """Zigzag whose chunks are whole blocks where there are rows enough; it loses the rows of the last, short block."""

    dim: int
    block: int = 64
    loses: bool = True

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        step = n // (2 * parts)
        chunk = step // self.block * self.block or step
        ends = [chunk * i for i in range(2 * parts)]
        ends.append(chunk * 2 * parts if self.loses and chunk >= self.block else n)
        chunks = list(itertools.pairwise(ends))
        return tuple(from_ranges([chunks[r], chunks[-1 - r]]) for r in range(parts))


def test_what_only_longer_dimensions_show_is_drawn_too() -> None:
    """All sizes up to 13 kept the laws, and were all that was drawn."""

    @given(testing.lengths(), testing.parts())
    def check(n: int, parts: int) -> None:
        testing.check_placement(Aligned(0), n, parts)

    with pytest.raises(AssertionError, match="is in no part"):
        check()
    for n, parts in itertools.product(range(14), range(1, 5)):
        testing.check_placement(Aligned(0), n, parts)


@given(testing.lengths(), testing.parts())
def test_the_same_without_the_loss_is_right(n: int, parts: int) -> None:
    testing.check_placement(Aligned(0, loses=False), n, parts)


def test_a_million_rows_take_seconds() -> None:
    """Each position was counted in a list of all of them."""
    start = time.perf_counter()
    testing.check_placement(Aligned(0, loses=False), 1_000_003, 8)
    assert time.perf_counter() - start < 30
    with pytest.raises(AssertionError, match=r"position 1000000 is in no part"):
        covering(Aligned(0, block=125_000), 1_000_003, 4)


def test_a_placement_that_other_processes_cannot_find() -> None:
    @dataclass(frozen=True)
    class Here(Snake):
        pass

    with pytest.raises(
        AssertionError, match=r"Here\(dim=0\)\.split\(4, 2\): it cannot be pickled: .* in a module"
    ):
        testing.check_placement(Here(0), 4, 2)


def test_a_users_placement_gets_everything() -> None:
    mesh = Mesh(dp=2, tp=3)
    layout = Layout((8, 4), mesh, {"tp": Snake(0), "dp": Shard(0)})
    assert layout.text == "(tp@snake dp n) h"
    assert layout.rules == {"snake": Snake(0)}
    assert Layout((8, 4), mesh, "(tp@mine dp n) h", rules={"mine": Snake(0)}) is layout
    assert [str(layout.runs(r)[0]) for r in range(6)] == [
        "[0:1 5:6]",
        "[1:2 4:5]",
        "[2:3]",
        "[6:7]",
        "[7:8]",
        "[3:4]",
    ]
    dst = Layout((8, 4), Mesh(a=4, ranks=range(4, 8)), "n (a h)")
    p = plan(layout, dst)
    verify(p)
    whole = np.arange(32.0).reshape(8, 4)
    out = simulate(p, testing.distribute(layout, [whole]))
    assert all((out[4 + i] == whole[:, i : i + 1]).all() for i in range(4))


def test_two_rules_of_one_class_are_numbered() -> None:
    layout = Layout(
        (6, 6),
        Mesh(a=2, b=2),
        {"a": Table(0, (identity(6), Runs())), "b": Table(1, (Runs(), identity(6)))},
    )
    assert layout.text == "(a@table n) (b@table2 h)"
    assert set(layout.rules) == {"table", "table2"}


@dataclass
class Unhashable:
    dim: int

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return Shard(0).split(n, parts)


class NoSplit:
    dim = 0

    def __repr__(self) -> str:
        return "NoSplit()"


class NoDim:
    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        return Shard(0).split(n, parts)

    def __repr__(self) -> str:
        return "NoDim()"


TP = Mesh(tp=2)
PROTOCOL = (
    "is not a placement; use one such as shardmath.Shard(0), "
    "or an object with `dim` and `split(n, parts) -> tuple of Runs`"
)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Partial("mean"),
            f"Partial('mean') is not a known reduction; use one of {', '.join(OPS)}",
        ),
        (
            lambda: StridedShard(1, 0),
            ("the split factor of StridedShard(1, 0) is 0; give the number of pieces, 1 or more"),
        ),
        (
            lambda: BlockCyclic(0, 0),
            "the block of BlockCyclic(0, 0) has 0 positions; give blocks of 1 or more",
        ),
        (lambda: Shard("0"), "the dimension of a Shard is '0'; give an integer"),
        (lambda: Balanced(0.5), "the dimension of a Balanced is 0.5; give an integer"),
        (lambda: Table(None, ()), "the dimension of a Table is None; give an integer"),
        (
            lambda: StridedShard(1, 2.0),
            "the split factor of StridedShard(1, ...) is 2.0; give an integer",
        ),
        (
            lambda: BlockCyclic(0, True),
            "the block of BlockCyclic(0, True) is True; give an integer",
        ),
        (lambda: Packed(0, "34"), "Packed sizes are '34'; give a tuple"),
        (lambda: Packed(0, (3, 2.0)), "a size of Packed is 2.0; give an integer"),
        (lambda: Ragged(0, 7), "Ragged sizes are 7; give a tuple"),
        (lambda: Table(0, 7), "Table parts are 7; give a tuple"),
        (lambda: Packed(0, ()), ("sizes of Packed are []; give one or more sizes, each 0 or more")),
        (
            lambda: Ragged(0, (3, -1)),
            "sizes of Ragged are [3, -1]; give one or more sizes, each 0 or more",
        ),
        (
            lambda: Ragged(0, (3, 1)).split(4, 3),
            (
                "Ragged(dim=0, sizes=(3, 1)) has 2 sizes for a mesh axis of 3 coordinates; "
                "give one size per coordinate"
            ),
        ),
        (
            lambda: Layout((4,), TP, (Ragged(0, (3, 1, 0)),)),
            (
                "Ragged(dim=0, sizes=(3, 1, 0)) has 3 sizes for a mesh axis of 2 "
                "coordinates; give one size per coordinate"
            ),
        ),
        (
            lambda: Ragged(0, (3, 1)).split(5, 2),
            "sizes [3, 1] add up to 4, but divide 5 positions; give sizes that add up to 5",
        ),
        (
            lambda: Packed(0, (3, 1)).split(5, 2),
            "sizes [3, 1] add up to 4, but divide 5 positions; give sizes that add up to 5",
        ),
        (
            lambda: Layout((5,), TP, (Packed(0, (3, 1)),)),
            (
                "dimension 0 of shape (5,): sizes [3, 1] add up to 4, but divide 5 "
                "positions; give sizes that add up to 5"
            ),
        ),
        (
            lambda: Table(0, (identity(2), (0, 1))),
            (
                "part 1 of Table(0, ...) is (0, 1); give Runs, for example "
                "shardmath.from_ranges([(0, 5)])"
            ),
        ),
        (
            lambda: Table(0, (identity(2),)).split(2, 2),
            (
                "Table(0, ...) has 1 part for a mesh axis of 2 coordinates; give one part "
                "per coordinate"
            ),
        ),
        (lambda: stage_of(NoSplit(), ("tp",), (2,)), f"NoSplit() {PROTOCOL}"),
        (lambda: stage_of(NoDim(), ("tp",), (2,)), f"NoDim() {PROTOCOL}"),
        (lambda: Layout((4,), TP, (NoDim(),)), f"NoDim() {PROTOCOL}"),
        (lambda: Layout((4,), TP, (NoSplit(),)), f"NoSplit() {PROTOCOL}"),
        (lambda: Layout((4,), TP, "(tp n)", rules={"x": NoSplit()}), f"NoSplit() {PROTOCOL}"),
        (
            lambda: Layout((4,), TP, (Unhashable(0),)),
            "test_placement.Unhashable(dim=0) cannot be hashed, so equal layouts could not be found equal; "
            "make it a frozen dataclass",
        ),
    ],
)
def test_errors(make, message: str, fails) -> None:
    fails(make, PlacementError, message.replace("test_placement.", ""))


def test_values_stay_values() -> None:
    assert StridedShard(0, 1).split(5, 2) == Shard(0).split(5, 2)
    assert BlockCyclic(0, 1) == BlockCyclic(0) and Partial() == Partial("sum")
    assert isinstance(stage_of(Table(0, (Runs(),)), ("tp",), (1,))[0].cut, UserCut)
    with pytest.raises(LayoutError):
        Layout((4,), TP, (Shard(1),))
