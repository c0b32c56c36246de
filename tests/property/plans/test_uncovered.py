"""Cover: sources that hold something twice, destinations that nobody can serve."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import dataclass, replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import (
    Layout,
    Mesh,
    PlanError,
    Shard,
    Table,
    adjoint,
    plan,
    schedule,
    testing,
    verify,
)
from shardmath.layouts.algebra import gaps
from shardmath.layouts.algebra.runs import Runs, from_ranges
from shardmath.layouts.edits import window
from shardmath.plans.uncovered import (
    check_disjoint,
    count_cells,
    find_meeting,
    first_unheld,
    holds_all,
)

MESH = Mesh(dp=2, tp=2)
WHOLE = Layout((6, 4), MESH, "(tp n) h")


def box(*sides: tuple[int, int]) -> Layout:
    return window(WHOLE, sides)


@given(testing.layouts(), st.data())
def test_source_windows_hold_different_elements(layout: Layout, data: st.DataObject) -> None:
    boxes = [data.draw(testing.boxes(layout.shape)) for _ in range(2)]
    windows = tuple(window(layout, b) for b in boxes)
    both = [
        set.intersection(
            *(
                {i for r in w.mesh.ranks for i in w.indices(r)[d].tolist() if i >= 0}
                for w in windows
            )
        )
        for d in range(layout.ndim)
    ]
    if all(both):
        with pytest.raises(PlanError) as caught:
            check_disjoint("w", windows)
        at = tuple(min(x) for x in both)
        fix = "cut one of them with shardmath.window"
        assert (
            str(caught.value) == f"tensor 'w': source windows 0 and 1 both hold element {at}; {fix}"
        )
    else:
        check_disjoint("w", windows)


def test_windows_that_touch() -> None:
    line = Layout((6,), Mesh(), "n")
    held = Layout((6,), Mesh(ranks=[1]), "(n)=<0:2 3:5>")
    with pytest.raises(PlanError, match=r"both hold element \(3,\)"):
        check_disjoint("w", (window(line, ((2, 4),)), held))
    check_disjoint("w", (window(line, ((2, 3),)), held))
    check_disjoint("w", (window(line, ((5, 6),)), held))


def test_all_pairs_of_windows_are_compared(fails) -> None:
    a, b, c = box((0, 2), (0, 4)), box((2, 4), (0, 4)), box((3, 6), (1, 2))
    fails(
        lambda: plan({"w": (a, b, c)}, {"w": WHOLE}),
        PlanError,
        (
            "tensor 'w': source windows 1 and 2 both hold element (3, 1); cut one of them "
            "with shardmath.window"
        ),
    )
    check_disjoint("w", (a, b))


@given(testing.layouts(overlap=False), testing.layouts(), st.data())
def test_holes_at_the_source_are_found(src: Layout, other: Layout, data: st.DataObject) -> None:
    """The plan exists if and only if everything that is asked is held."""
    hole = window(src, data.draw(testing.boxes(src.shape)))
    dst = data.draw(testing.layouts(src.shape, data.draw(testing.meshes())))
    held = {x for r in hole.mesh.ranks for x in _elements(hole, r)}
    short = next((r for r in dst.mesh.ranks if not set(_elements(dst, r)) <= held), None)
    if short is None:
        plan(hole, dst)
        return
    first = min(set(_elements(dst, short)) - held)
    with pytest.raises(PlanError) as caught:
        plan(hole, dst)
    assert str(caught.value) == (
        f"the tensor: rank {short} needs element {first} under {dst}, "
        f"but no source rank holds it under {hole}; give it to a source rank"
    )


def _elements(layout: Layout, rank: int) -> list[tuple[int, ...]]:
    return list(itertools.product(*(i[i >= 0].tolist() for i in layout.indices(rank))))


def test_each_destination_window_is_covered_alone(fails) -> None:
    half = box((0, 3), (0, 4))
    plan({"w": half}, {"w": (box((0, 2), (0, 4)), box((2, 3), (1, 2)))})
    fails(
        lambda: plan(
            {"w": (half, box((4, 6), (0, 4)))}, {"w": (box((0, 2), (0, 4)), box((2, 6), (0, 4)))}
        ),
        PlanError,
        f"tensor 'w': rank 1 needs element (3, 0) under {box((2, 6), (0, 4))}, "
        f"but no source rank holds it under {half}; give it to a source rank",
    )


def test_a_missing_addend_is_missed(fails) -> None:
    """Only the ranks of the first addend hold the second half."""
    mesh = Mesh(dp=2)
    part = Layout((4,), mesh, {"dp": Table(0, (from_ranges([(0, 3)]), from_ranges([(0, 4)])))})
    fails(
        lambda: plan(window(part, ((0, 2),)), Layout((4,), mesh, "n {sum: dp}")),
        PlanError,
        f"the tensor: rank 0 needs element (2,) under float32[4] n {{sum: dp}} on dp=2, "
        f"but no source rank holds it under {window(part, ((0, 2),))}; give it to a source rank",
    )


def test_a_missing_addend_of_a_chosen_axis_is_missed(fails) -> None:
    """Where any one addend may receive, none can."""
    hole, dst = box((0, 3), (0, 4)), Layout((6, 4), Mesh(x=2, ranks=(7, 5)), "n h {sum: x}")
    fails(
        lambda: plan(hole, dst),
        PlanError,
        f"the tensor: rank 7 needs element (3, 0) under {dst}, but no source rank holds it under {hole}; "
        "give it to a source rank",
    )


@given(testing.layouts())
def test_cells_are_what_ranks_hold(layout: Layout) -> None:
    expected = [
        math.prod(int((i >= 0).sum()) for i in layout.indices(rank)) for rank in layout.mesh.ranks
    ]
    assert count_cells(layout).tolist() == expected


@given(testing.layouts(), testing.meshes(), st.data())
def test_windows_meet_where_their_hulls_do(layout: Layout, mesh: Mesh, data: st.DataObject) -> None:
    """All pairs with an element in common are among those that meet, and every destination window is."""
    other = data.draw(testing.layouts(layout.shape, mesh))
    src, dst = (
        tuple(
            window(x, data.draw(testing.boxes(x.shape)))
            for _ in range(data.draw(st.integers(1, 3)))
        )
        for x in (layout, other)
    )
    met = find_meeting(src, dst)
    assert len(set(met)) == len(met) and {j for _, j in met} == set(range(len(dst)))
    held = [
        [{x for r in w.mesh.ranks for x in _elements(w, r)} for w in side] for side in (src, dst)
    ]
    for i, j in itertools.product(range(len(src)), range(len(dst))):
        if held[0][i] & held[1][j]:
            assert (i, j) in met
        elif len(src) * len(dst) > 1 and (i, j) in met:
            assert i == 0 or _hulls_meet(src[i], dst[j])


def _hulls_meet(a: Layout, b: Layout) -> bool:
    """Whether, dimension by dimension, neither is before the other."""
    out = True
    for d in range(a.ndim):
        (lo, hi), (begin, end) = (
            (min(held, default=1 << 62), max(held, default=-1))
            for x in (a, b)
            for held in ({i for r in x.mesh.ranks for i in x.indices(r)[d].tolist() if i >= 0},)
        )
        out &= lo <= end and begin <= hi
    return out


def test_windows_that_only_touch_do_not_meet() -> None:
    row = Layout((6,), Mesh(), "n")
    src = tuple(window(row, ((lo, lo + 2),)) for lo in (0, 2, 4))
    dst = tuple(window(row, ((lo, lo + 3),)) for lo in (0, 3))
    assert find_meeting(src, dst) == [(0, 0), (1, 0), (1, 1), (2, 1)]
    assert find_meeting(src[:1], dst[1:]) == [(0, 0)]
    empty = window(row, ((2, 2),))
    assert find_meeting(src, (empty, dst[1])) == [(0, 0), (1, 1), (2, 1)]


def test_a_scalar_needs_a_holder() -> None:
    empty = Layout((1,), Mesh(), {}, stored={0: from_ranges([1])})
    with pytest.raises(
        PlanError, match=r"rank 0 needs element \(0,\) .*; give it to a source rank"
    ):
        plan(empty, Layout((1,), Mesh(), "n"))
    plan(empty, empty, window=True)
    plan(Layout((), Mesh(), ""), Layout((), MESH, ""))
    plan(Layout((0,), Mesh(), "n"), Layout((0,), MESH, (Shard(0), Shard(0))))


def test_the_first_missing_element_is_behind_all_that_are_held() -> None:
    src = Layout((6,), Mesh(a=2), "(a n)=<0:4>")
    with pytest.raises(PlanError, match=r"rank 9 needs element \(4,\) under"):
        plan(src, Layout((6,), Mesh(ranks=[9]), "n"))


# destinations that hold less than the tensor


@dataclass(frozen=True)
class Lossy:
    """Equal chunks; the rest that does not divide is nobody's."""

    dim: int

    def split(self, n: int, parts: int) -> tuple[Runs, ...]:
        each = n // parts
        return tuple(from_ranges([(each * i, each * (i + 1))]) for i in range(parts))


ROWS = Layout((5, 4), Mesh(cp=2), "(cp n) h")
LOST = Layout((5, 4), Mesh(cp=2, ranks=(2, 3)), {"cp": Lossy(0)})


def test_a_destination_that_drops_a_row_is_no_plan(fails) -> None:
    fails(
        lambda: plan({"v": ROWS, "w": ROWS}, {"v": ROWS, "w": LOST}),
        PlanError,
        f"tensor 'w': no rank of the destination holds element (4, 0) under {LOST}; give it to a rank, "
        "or call plan(..., window=True) if elements may be left out",
    )
    fails(
        lambda: plan(ROWS, LOST, window=1),  # type: ignore[arg-type]
        PlanError,
        (
            "window=1 is not a bool; give True if the destination may hold less than the "
            "tensors, or False"
        ),
    )


def test_a_window_is_said_to_be_one() -> None:
    by_word = plan({"v": ROWS, "w": ROWS}, {"v": ROWS, "w": LOST}, window=True)
    by_tuple = plan({"v": ROWS, "w": ROWS}, {"v": ROWS, "w": (LOST,)})
    assert by_word == by_tuple and list(by_word.transfers()) == list(by_tuple.transfers())
    for p in (by_word, by_tuple):
        verify(p)
        verify(schedule(p))
        assert p.in_part == ("w",) and repr(p).startswith(
            "<plan of 2 tensors, 1 of them in part, 2 -> 4 ranks, "
        )
    assert plan(ROWS, ROWS, window=True).in_part == () == plan(ROWS, (ROWS,)).in_part


def test_an_adjoint_says_what_its_destination_holds() -> None:
    back = adjoint(plan(ROWS, LOST, window=True))
    verify(back)
    assert back.in_part == () and adjoint(back).in_part == ("",)
    part = plan((LOST,), LOST, window=True)
    assert adjoint(part).in_part == ("",)
    verify(adjoint(part))


def test_a_plan_that_is_wrong_of_it_is_refused(fails) -> None:
    p = plan({"v": ROWS, "w": ROWS}, {"v": ROWS, "w": LOST}, window=True)
    fails(
        lambda: verify(replace(p, in_part=()), transfers=p.transfers()),
        PlanError,
        f"in_part of {replace(p, in_part=())!r} does not name tensor 'w', "
        "which the destination holds only in part; make the plan again",
    )
    wrong = replace(p, in_part=("v", "w"))
    says = f"in_part of {wrong!r} names tensor 'v', which the destination holds whole; make the plan again"
    fails(lambda: verify(wrong), PlanError, says)
    fails(lambda: verify(schedule(wrong)), PlanError, says)


@given(testing.layouts(), testing.meshes(), st.sampled_from([0, 30, gaps.GRID]), st.data())
def test_what_is_held_together(layout: Layout, mesh: Mesh, grid: int, data: st.DataObject) -> None:
    """Windows of any boxes, against the sets of their elements; whatever room there is for a grid."""
    others = data.draw(testing.layouts(layout.shape, mesh))
    boxes = data.draw(st.lists(testing.boxes(layout.shape), min_size=1, max_size=4))
    whole = tuple((0, n) for n in layout.shape)
    windows = tuple(window(data.draw(st.sampled_from((layout, others))), b) for b in boxes)
    for held in (windows, data.draw(testing.tilings(layout)), (window(layout, whole),)):
        mine = {x for one in held for r in one.mesh.ranks for x in _elements(one, r)}
        missing = set(itertools.product(*map(range, layout.shape))) - mine
        with mock.patch.object(gaps, "GRID", grid):
            assert first_unheld(held) == min(missing, default=None)
        assert holds_all(held) == (not missing)


@pytest.mark.parametrize(("ndim", "count"), [(1, 2000), (2, 1000), (3, 120)])
def test_many_windows_that_overlap(ndim: int, count: int) -> None:
    """There are up to (2 windows)^dimensions cells between borders."""
    numbers, size = np.random.default_rng(0), 100_000
    layout = Layout((size,) * ndim, Mesh(), "...", dtype="uint8")
    sides = np.sort(numbers.integers(0, size, (count, ndim, 2)), axis=2).tolist()
    last = size - 1
    upper = [(0, last), *[(0, size)] * (ndim - 1)]
    lower = [(last, size), *[(0, size)] * (ndim - 2), (0, last)]
    boxes = [upper, lower] if ndim > 1 else [upper]
    windows = tuple(window(layout, box) for box in [*map(tuple, sides), *boxes])
    begun = time.process_time()
    assert first_unheld(windows) == (last, *[0] * (ndim - 2), last)[-ndim:]
    whole = (
        *windows,
        window(layout, [(last, size)] * ndim),
        window(layout, [(last, size), *[(0, size)] * (ndim - 1)]),
    )
    assert first_unheld(whole) is None
    assert time.process_time() - begun < 4


def test_parts_that_lie_in_many_pieces() -> None:
    even, odd = ([(i, i + 1) for i in range(k, 9, 2)] for k in (0, 1))
    parts = tuple(from_ranges(one) for one in (even, odd))
    both = Layout((9, 9), Mesh(a=2, b=2), {"a": Table(0, parts), "b": Table(1, parts)})
    assert holds_all((both,))
    black = tuple(Layout((9, 9), Mesh(), {}, stored={0: x, 1: x}) for x in parts)
    assert first_unheld(black) == (0, 1) and not holds_all(black)
    white = tuple(Layout((9, 9), Mesh(), {}, stored={0: x, 1: y}) for x, y in (parts, parts[::-1]))
    assert holds_all((*black, *white)) and first_unheld((*black, *white)) is None
    assert not holds_all((*black, *white[:1])) and holds_all((*black, *white, *black))
