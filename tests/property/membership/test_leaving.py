"""Leaving: whose transfers stay as they were, whose names do, and who cannot leave."""

from __future__ import annotations

import itertools
import pickle
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmath as sm
from shardmath import Layout, Mesh, PlanError, Topology, plan, simulate, verify, without
from shardmath.layouts.edits import window
from shardmath.layouts.holdings import Windows
from shardmath.plans.programs.scheduling import schedule
from shardmath.testing.oracle import distribute
from shardmath.testing.strategies import copies
from tests.property.refits.test_refit import check_arrived, draw, engine, shapes, trainer

TRAINER = Mesh(tp=2)
ENGINES = Mesh(engine=3, tp=2, ranks=range(2, 8))
SRC = Layout((8, 4), TRAINER, "(tp n) h")
DST = Layout((8, 4), ENGINES, "n (tp h)")


def arrows(p: sm.Plan) -> list[str]:
    return [str(t) for t in p.transfers()]


def test_what_stays_of_a_line_is_sent_by_those_who_sent_it() -> None:
    """Three receivers and two holders: the middle one has halves of both, and leaves."""
    there = Layout((8, 4096), Mesh(copy=3, ranks=[2, 3, 4]), "n h")
    p = plan(Layout((8, 4096), Mesh(dp=2), "n h"), there)
    assert [(t.src_rank, t.dst_rank, t.shape) for t in p.transfers()] == [
        (0, 2, (8, 4096)),
        (0, 3, (4, 4096)),
        (1, 3, (4, 4096)),
        (1, 4, (8, 4096)),
    ]
    pairs = {
        rank: [(t.src_rank, t.dst_rank) for t in without(p, [rank]).transfers()]
        for rank in (2, 3, 4)
    }
    assert pairs == {
        2: [(0, 3), (1, 3), (1, 4)],
        3: [(0, 2), (1, 4)],
        4: [(0, 2), (0, 3), (1, 3)],
    }


@given(copies(), st.integers(1, 4))
def test_with_a_topology(case: tuple[Layout, Layout, tuple[int, ...]], per_node: int) -> None:
    src, dst, leaving = case
    p = plan(src, dst, topology=Topology(ranks_per_node=per_node))
    rest = without(p, leaving)
    verify(rest)
    assert list(rest.transfers()) == [t for t in p.transfers() if t.dst_rank not in leaving]


@given(copies(), st.data())
def test_trees_of_windows(
    case: tuple[Layout, Layout, tuple[int, ...]], data: st.DataObject
) -> None:
    """Tensors in windows, beside others whose ranks all stay; local names do not change."""
    src, dst, leaving = case
    if src.partial or dst.partial:
        src, dst = (Layout(src.shape, x.mesh, {}, dtype=src.dtype) for x in (src, dst))
    cut = [data.draw(st.integers(0, n)) for n in src.shape]
    halves = [window(dst, tuple((0, c) for c in cut)), dst]
    first = Layout(src.shape, Mesh(ranks=[src.mesh.ranks[0]]), {}, dtype=src.dtype)
    dsts: dict[str, Layout | tuple[Layout, ...]] = {"a": dst, "b": tuple(halves), "c": first}
    p = plan(dict.fromkeys(dsts, src), dsts)
    rest = without(p, leaving)
    verify(rest)
    assert list(rest.transfers()) == [t for t in p.transfers() if t.dst_rank not in leaving]
    assert rest.dst["c"] is p.dst["c"]


def test_windows_that_stay_keep_their_names() -> None:
    """Engines that store otherwise are windows; of two, the one that stays has its name and its digest."""
    other = Layout((8, 4), Mesh(tp=4, ranks=range(8, 12)), "(tp n) h")
    p = plan({"w": SRC}, {"w": (DST, other)})
    rest = without(p, range(2, 8))
    verify(rest)
    assert rest.dst["w"].local_names("w") == ["w[1]"]
    assert {t.dst_tensor for t in rest.transfers()} == {"w[1]"}
    assert arrows(rest) == [str(t) for t in p.transfers() if t.dst_rank >= 8]
    back = pickle.loads(pickle.dumps(rest))
    assert back == rest and back.dst["w"].local_names("w") == ["w[1]"]
    # A plan made of these windows is one of these names.
    again = plan({"w": SRC}, rest.dst)
    assert again.digest != plan({"w": SRC}, {"w": (other,)}).digest
    assert {t.dst_tensor for t in again.transfers()} == {"w[1]"}
    flipped = sm.adjoint(rest)
    verify(flipped)
    assert {t.src_tensor for t in flipped.transfers()} == {"w[1]"}
    assert without(p, range(8, 12)).dst["w"].local_names("w") == ["w[0]"]


@pytest.mark.parametrize("fanout", ["none", "node", "auto"])
@pytest.mark.parametrize("named", [True, False], ids=["tree", "alone"])
@pytest.mark.parametrize(("leaving", "staying"), [(range(2, 8), 1), (range(8, 12), 0)])
def test_a_window_that_stays_is_scheduled_under_its_name(
    fanout: str, named: bool, leaving: range, staying: int
) -> None:
    """One window that is left of two is no single tensor: plan, program and oracle call it name[i]."""
    other = Layout((8, 4), Mesh(tp=4, ranks=range(8, 12)), "(tp n) h")
    name = "w" if named else ""
    src, dst = ({"w": SRC}, {"w": (DST, other)}) if named else (SRC, (DST, other))
    rest = without(plan(src, dst), leaving)
    program = schedule(rest, topology=Topology(ranks_per_node=2), fanout=fanout)
    verify(program)
    local = f"{name}[{staying}]"
    whole = np.arange(32.0).reshape(8, 4)
    pieces = distribute(SRC, [whole])
    held = {rank: {"w": piece} for rank, piece in pieces.items()} if named else pieces
    for moved in (simulate(rest, held), simulate(program, held)):
        for rank, wanted in distribute((DST, other)[staying], [whole]).items():
            assert list(moved[rank]) == [local]
            assert np.array_equal(moved[rank][local], wanted)


def test_a_window_that_stays_may_not_have_the_name_of_a_tensor() -> None:
    other = Layout((8, 4), Mesh(tp=4, ranks=range(8, 12)), "(tp n) h")
    rest = without(plan({"w": SRC}, {"w": (DST, other)}), range(2, 8))
    with pytest.raises(PlanError, match=re.escape("window 'w[1]' of tensor 'w' has the name of")):
        plan({"w": SRC, "w[1]": SRC}, {"w": rest.dst["w"], "w[1]": other})


def test_who_comes_back_is_out_of_those_that_left() -> None:
    p = plan({"w": SRC}, {"w": DST})
    without_two = without(without(p, [2, 3]), [6, 7])
    assert without_two == without(p, [7, 6, 3, 2, 2]) and without_two.left == (2, 3, 6, 7)
    assert without(without_two.whole, [6, 7]) == without(p, [6, 7]) != without(p, [2, 3])
    assert without(p, []) is p and without(without_two, [2, 3]) is without_two
    digests = {without(p, ranks).digest for ranks in ([], [2, 3], [4, 5], [2, 3, 4, 5])}
    assert len(digests) == 4


def test_what_is_made_of_it() -> None:
    """Programs, adjoints and simulations of what stays are those of a plan."""
    p = without(plan({"w": SRC}, {"w": DST}), [4, 5])
    program = schedule(p, topology=Topology(ranks_per_node=2))
    verify(program)
    assert program.ranks == (0, 1, 2, 3, 6, 7)
    flipped = sm.adjoint(p)
    verify(flipped)
    assert sm.adjoint(flipped) is p
    held = {rank: {"w": np.arange(16.0).reshape(4, 4) + 16 * rank} for rank in (0, 1)}
    assert simulate(p, held).keys() == {2, 3, 6, 7}
    assert p.shadow_bytes() == {0: 0, 1: 0, 2: 64, 3: 64, 6: 64, 7: 64}
    assert repr(p).startswith("<plan of 1 tensor, 2 -> 4 ranks")


def test_tensors_that_nobody_asks_for_any_longer() -> None:
    own = Layout((8, 4), Mesh(ranks=[9]), "n h")
    p = plan({"v": SRC, "w": SRC}, {"v": DST, "w": own})
    with pytest.raises(PlanError, match=r"'w': all ranks that hold element \(0, 0\) of"):
        without(p, [9])
    rest = without(p, [9], window=True)
    verify(rest)
    assert (list(rest.src), rest.ranks) == (["v"], (0, 1, *range(2, 8)))
    halves = tuple(window(own, ((lo, lo + 4), (0, 4))) for lo in (0, 4))
    apart = sm.Layout((8, 4), Mesh(ranks=[10]), "n h")
    p = plan({"w": SRC}, {"w": (halves[0], window(apart, ((4, 8), (0, 4))))})
    with pytest.raises(
        PlanError,
        match=(
            r"'w': none of the ranks that stay holds element "
            r"\(4, 0\)"
        ),
    ):
        without(p, [10])
    rest = without(p, [10], window=True)
    verify(rest)
    assert rest.in_part == ("w",) and p.in_part == ()


@pytest.mark.parametrize(
    ("dst", "ranks", "text"),
    [
        (
            DST,
            [2],
            "rank 2 leaves and holds element (0, 0) of .*, but ranks 3 of the same copy stay",
        ),
        (DST, [2, 5], "rank 2 leaves and holds element (0, 0) of"),
        (
            DST,
            [8],
            (
                "ranks 8 cannot leave: the destination has ranks 2, 3, 4, 5, 6, 7; "
                "give only ranks of the destination"
            ),
        ),
        (DST, range(2, 8), "all ranks of the destination leave"),
        (DST, "abc", "the ranks that leave"),
        (DST, 3, "the ranks that leave"),
        (DST, [2.5], "a rank that leaves"),
        (
            Layout((8, 4), Mesh(a=2, b=2, ranks=range(2, 6)), "n h"),
            [2],
            "ranks 3, 4, 5, which stay, do not form a mesh of the axes of",
        ),
        (
            Layout((8, 4), Mesh(copy=2, ranks=[0, 2]), "n h"),
            [0],
            (
                "rank 0 cannot leave, as a source rank that sends element (0, 0) to rank 0; "
                "make a new plan from layouts without it"
            ),
        ),
    ],
)
def test_who_cannot_leave(dst: Layout, ranks: object, text: str) -> None:
    p = plan(SRC, dst)
    pattern = re.escape(text).replace(r"\.\*", ".*")
    with pytest.raises(PlanError, match=pattern):
        without(p, ranks)  # type: ignore[arg-type]


def test_what_nobody_can_leave() -> None:
    p = plan({"w": SRC}, {"w": DST})
    for given_ in (sm.adjoint(p), schedule(p, topology=Topology()), p.digest):
        with pytest.raises(PlanError, match="without takes a Plan, not a"):
            without(given_, [2, 3])  # type: ignore[arg-type]
    mesh = Mesh(a=2)
    here = Layout((4,), mesh, "n {sum: a}")
    there = Layout((4,), Mesh(copy=2, a=2), "n {sum: a}")
    with pytest.raises(PlanError, match="have the same addends, so that nothing would be reduced"):
        without(plan(here, there), [2, 3])


def test_a_plan_that_says_otherwise_of_who_left_is_refused() -> None:
    p = plan({"w": SRC}, {"w": DST})
    rest = without(p, [4, 5])
    verify(rest)
    other = plan({"w": SRC}, {"w": Layout((8, 4), ENGINES, "(tp n) h")})
    wrong = [
        replace(rest, left=(2, 3)),
        replace(rest, left=()),
        replace(rest, left=(5, 4)),
        replace(rest, left=(4, [5])),  # type: ignore[arg-type]
        replace(rest, whole=rest),
        replace(rest, whole=None),
        replace(rest, whole=without(other, [2, 3])),
        replace(rest, whole=other),
        replace(p, left=(4, 5)),
        replace(rest, digest=p.digest),
        replace(rest, dst=without(other, [4, 5]).dst),
        replace(rest, dst={"w": Windows([*rest.dst["w"], *rest.dst["w"]])}),
        replace(rest, lines=p.lines),
    ]
    for junk in (None, "x", 2.5, (None,), [1], {}, ([4],), (4, 4), (9,), np.zeros(3), p.dst):
        wrong += [replace(p, left=junk), replace(rest, left=junk), replace(rest, whole=junk)]
        if junk is not None:
            wrong.append(replace(p, whole=junk))
    for one in wrong:
        with pytest.raises(PlanError):
            verify(one)


# Refits


def engines() -> dict[str, sm.storage.Stored]:
    """Two that store alike, and one that does not between them."""
    return {
        "one": engine(range(4, 8)),
        "other": engine(range(8, 10), rep=1),
        "copy": engine(range(10, 14)),
    }


def test_engines_leave_a_refit() -> None:
    moved = sm.refit(trainer(), engines(), shapes())
    arrays = draw(shapes())
    for count in (1, 2):
        for leaving in itertools.combinations(engines(), count):
            rest = moved.without(*leaving)
            verify(rest.plan)
            assert list(rest.engines) == [name for name in engines() if name not in leaving]
            for name, side in rest.engines.items():
                check_arrived(rest, arrays, name)
                for rank in side.ranks:
                    assert rest.slots(rank, name) == moved.slots(rank, name)
    both = moved.without("one").without("copy")
    assert both.plan == moved.without("copy", "one").plan and both.whole is moved
    assert moved.without() is moved


def test_engines_that_cannot_leave() -> None:
    moved = sm.refit(trainer(), engines(), shapes())
    with pytest.raises(PlanError, match="no engine 'two'; pass one of one, other, copy"):
        moved.without("two")
    with pytest.raises(PlanError, match=r"an engine is \[1\]; give a str"):
        moved.without([1])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no engine 'one'; pass one of other, copy"):
        moved.without("one").without("one")
    with pytest.raises(PlanError, match="leave, which are all engines of the refit"):
        moved.without(*engines())
    shared = sm.refit(trainer(), {"a": engine(), "b": engine(range(7, 9), rep=1)}, shapes())
    with pytest.raises(PlanError, match="rank 7 leaves with a, but b, which stays, has it too"):
        shared.without("a")
    colocated = sm.refit(trainer(), {"a": engine(range(4)), "b": engine()}, shapes())
    with pytest.raises(PlanError, match="rank 0 cannot leave, as a source"):
        colocated.without("a")
    assert colocated.without("b").plan.dst_ranks == (0, 1, 2, 3)
