"""Relabeling against brute force: all permutations, bytes counted element by element."""

from __future__ import annotations

import itertools
import pickle
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardmath import Layout, Mesh, PlanError, Table, plan, testing
from shardmath.layouts.algebra.overlay import overlap_table
from shardmath.layouts.algebra.partition import partition
from shardmath.layouts.algebra.runs import from_ranges
from shardmath.layouts.edits import relabeled, window
from shardmath.plans.plan import Side
from shardmath.plans.relabeling.relabeling import Relabeling, relabel


def small_meshes(most: int = 5) -> st.SearchStrategy[Mesh]:
    """Up to `most` ranks out of 0..most, so that sides share some."""

    @st.composite
    def draw_mesh(draw: st.DrawFn) -> Mesh:
        sizes = draw(st.sampled_from([(), (2,), (3,), (4,), (2, 2), (1, 3), (5,)]))
        count = int(np.prod(sizes))
        ranks = draw(st.permutations(range(most + 1)))[:count]
        return Mesh(dict(zip("abc", sizes, strict=False)), ranks=ranks)

    return draw_mesh()


@st.composite
def sides(
    draw: st.DrawFn, ops: tuple[str | None, ...] = (None,), tensors: int = 3
) -> tuple[Side, Side]:
    """Two mappings of a few tensors on a few small meshes, some tensors as windows."""
    meshes = draw(st.lists(small_meshes(), min_size=2, max_size=3))
    src, dst = {}, {}
    for i in range(draw(st.integers(1, tensors))):
        shape, op = draw(testing.shapes(5)), draw(st.sampled_from(ops))
        mesh = draw(st.sampled_from(meshes))
        other = draw(st.one_of(st.just(mesh), st.sampled_from(meshes)))
        a = draw(
            testing.layouts(shape, mesh, op=op, dtype=draw(st.sampled_from(["float16", "float64"])))
        )
        b = draw(testing.layouts(shape, other, op=op, dtype=a.dtype))
        src[f"w{i}"] = draw(testing.tilings(a)) if draw(st.integers(0, 4)) == 0 else a
        dst[f"w{i}"] = draw(testing.tilings(b)) if draw(st.integers(0, 4)) == 0 else b
    return src, dst


def windows(side: Side) -> Iterator[tuple[str, Layout]]:
    for name, held in side.items() if isinstance(side, dict) else [("", side)]:
        yield from ((name, layout) for layout in (held if isinstance(held, tuple) else (held,)))


def cells(layout: Layout, rank: int) -> set[tuple[int, ...]]:
    if rank not in layout.mesh:
        return set()
    return set(itertools.product(*(i[i >= 0].tolist() for i in layout.indices(rank))))


def kept(src: Side, dst: Side, names: dict[int, int]) -> int:
    """Bytes that the rank called names[r] holds of what coordinate r needs, element by element."""
    return sum(
        len(cells(a, names[r]) & cells(b, r)) * a.itemsize
        for name, a in windows(src)
        for other, b in windows(dst)
        if name == other
        for r in b.mesh.ranks
    )


def ranks_of(side: Side) -> list[int]:
    return sorted({rank for _, layout in windows(side) for rank in layout.mesh.ranks})


def received(src: Side, dst: Side) -> int:
    return sum(plan(src, dst).received_bytes().values())


# The optimum


@given(sides())
def test_the_best_of_all_permutations(case: tuple[Side, Side]) -> None:
    src, dst = case
    found, ranks = relabel(src, dst), ranks_of(dst)
    names = (
        [dict(zip(ranks, new, strict=True)) for new in itertools.permutations(ranks)]
        if len(ranks) <= 5
        else []
    )
    assert list(found.ranks) == ranks and sorted(found.ranks.values()) == ranks
    assert found.kept_before == kept(src, dst, {r: r for r in ranks})
    assert found.kept_after == kept(src, dst, found.ranks)
    totals = [kept(src, dst, each) for each in names]
    assert not names or found.kept_after == max(totals)
    if names and found.saving:
        best = [each for each, total in zip(names, totals, strict=True) if total == max(totals)]
        assert sum(old == new for old, new in found.pairs) == max(
            sum(o == n for o, n in x.items()) for x in best
        )


@given(sides(ops=(None, None, "sum", "max", "avg")))
def test_received_bytes_drop_by_the_saving(case: tuple[Side, Side]) -> None:
    """With windows, overlapping parts, holes and Partial."""
    src, dst = case
    found = relabel(src, dst)
    assert received(src, dst) - received(src, found.apply(dst)) == found.saving >= 0
    if not found.saving:
        assert all(old == new for old, new in found.pairs)


@given(testing.pairs(ops=(None, None, "sum", "max", "avg")))
def test_received_bytes_drop_on_more_ranks(pair: tuple[Layout, ...]) -> None:
    src, dst = pair
    found = relabel(src, dst)
    assert received(src, dst) - received(src, found.apply(dst)) == found.saving >= 0
    assert found.saving <= relabel(src, found.apply(dst)).saving + found.saving
    assert relabel(src, found.apply(dst)).saving == 0


@given(testing.layouts(), st.randoms(use_true_random=False))
def test_a_renamed_layout_gets_its_names_back(layout: Layout, random) -> None:
    ranks = list(layout.mesh.ranks)
    mixed = dict(zip(ranks, random.sample(ranks, len(ranks)), strict=True))
    found = relabel(layout, relabeled(layout, mixed))
    assert received(layout, found.apply(relabeled(layout, mixed))) == 0


@given(st.permutations(range(12)))
def test_grids(ranks: list[int]) -> None:
    """Every rank has its own cell of a grid: all of it can stay."""
    src = Layout((6, 8), Mesh(a=3, b=4), "(a n) (b h)")
    dst = Layout((6, 8), Mesh(a=3, b=4, ranks=ranks), "(a n) (b h)")
    found = relabel(src, dst)
    assert found.kept_after == 6 * 8 * 4 and received(src, found.apply(dst)) == 0


# Addends


@pytest.mark.parametrize("op", ["sum", "max", "avg"])
def test_addends_that_pass_through_stay_with_their_ranks(op: str) -> None:
    """Ranks 0 and 1 hold addend 0; the best permutation of holdings alone would mix addends."""
    mesh = Mesh(p=2, t=2)
    src = Layout((6,), mesh, f"(t n) {{{op}: p}}")
    dst = Layout((6,), Mesh(p=2, t=2, ranks=[1, 0, 3, 2]), f"(t n) {{{op}: p}}")
    found = relabel(src, dst)
    assert found.ranks == {0: 1, 1: 0, 2: 3, 3: 2} and found.saving == 4 * 12
    crossed = Layout((6,), Mesh(p=2, t=2, ranks=[0, 1, 3, 2]), f"(t n) {{{op}: p}}")
    assert relabel(src, crossed).ranks == {0: 0, 1: 1, 2: 3, 3: 2}


def test_ranks_that_are_owed_a_sum_keep_their_own_addend() -> None:
    """Every rank holds one addend of one half; a rank that needs its half receives the other addend alone."""
    src = Layout((6,), Mesh(p=2, t=2), "(t n) {sum: p}")
    dst = Layout((6,), Mesh(t=2, d=2, ranks=[1, 3, 0, 2]), "(t n)")
    found = relabel(src, dst)
    assert (found.kept_before, found.saving) == (0, 48)
    assert received(src, dst) == 96 and received(src, found.apply(dst)) == 48


def test_where_a_sum_is_left_to_be_chosen_ranks_keep_their_names() -> None:
    """Renaming could save here, but what a rank receives depends on what others hold: nothing is promised."""
    mesh = Mesh(p=2, t=2)
    src = {"w": Layout((4,), mesh, "(t n)"), "v": Layout((6,), mesh, "(t n)")}
    swapped = mesh.relabel({0: 1, 1: 0, 2: 3, 3: 2})
    dst = {"w": Layout((4,), mesh, "(t n) {sum: p}"), "v": Layout((6,), swapped, "(t n)")}
    assert relabel(src, dst).saving == 0 and relabel({"v": src["v"]}, {"v": dst["v"]}).saving == 48


def test_one_addend_is_no_sum() -> None:
    src, dst = (
        Layout((4,), Mesh(p=1, t=2, ranks=ranks), "(t n) {sum: p}") for ranks in ((0, 1), (1, 0))
    )
    assert relabel(src, dst).ranks == {0: 1, 1: 0}


def test_ranks_could_come_to_match() -> None:
    """Under other names the addends would pass through, which is another plan: names are kept."""
    src = Layout((4,), Mesh(p=2, t=2), "n {avg: p}")
    dst = Layout((4,), Mesh(p=2, t=2, ranks=[0, 2, 1, 3]), "n {avg: p}")
    assert relabel(src, dst) == Relabeling(tuple((r, r) for r in range(4)), 0, 0)


# Tables


@given(testing.layouts((9,)), testing.layouts((9,)))
def test_overlap_tables(a: Layout, b: Layout) -> None:
    x, y = partition(a.dims[0]), partition(b.dims[0])
    table = overlap_table(x, y)
    assert table.shape == (len(x.parts), len(y.parts)) and table.dtype == np.int64
    for (i, p), (j, q) in itertools.product(enumerate(x.parts), enumerate(y.parts)):
        assert table[i, j] == len(set(p.indices()) & set(q.indices()) - {-1})


def test_parts_that_overlap() -> None:
    parts = (from_ranges([(0, 4)]), from_ranges([(3, 6), (0, 1)]))
    src = Layout((6,), Mesh(a=2), {"a": Table(0, parts)})
    dst = Layout((6,), Mesh(a=2, ranks=[1, 0]), {"a": Table(0, parts)})
    assert relabel(src, dst) == Relabeling(((0, 1), (1, 0)), 16, 32)


# Values


def case() -> tuple[Layout, Layout]:
    return Layout((8,), Mesh(dp=4), "(dp n)"), Layout((8,), Mesh(dp=2, tp=2), "(tp dp n)")


def test_a_relabeling_is_a_value() -> None:
    found = relabel(*case())
    assert (
        eval(repr(found), {"Relabeling": Relabeling}) == found == pickle.loads(pickle.dumps(found))
    )
    assert hash(found) == hash(relabel(*case()))
    assert str(found) == "2 of 4 ranks renamed, 16 B more kept in place (16 -> 32 B)"
    assert found.ranks == dict(found.pairs)
    assert (
        str(Relabeling(((0, 1), (1, 0), (4, 4)), 8, 9))
        == "2 of 3 ranks renamed, 1 B more kept in place (8 -> 9 B)"
    )


def test_applied_to_what_plan_takes() -> None:
    src, dst = case()
    found = relabel(src, dst)
    one = relabeled(dst, found.ranks)
    halves = (window(dst, ((0, 3),)), window(dst, ((3, 8),)))
    assert found.apply(dst) is one
    assert found.apply(halves) == tuple(relabeled(half, found.ranks) for half in halves)
    assert found.apply({"w": dst, "v": halves}) == {"w": one, "v": found.apply(halves)}
    assert relabel(src, halves) == found == relabel({"w": src}, {"w": halves})


def test_one_permutation_for_all_tensors() -> None:
    """A large tensor decides against a small one, over the union of their ranks."""
    here, there = Mesh(a=2, ranks=[0, 1]), Mesh(a=2, ranks=[1, 0])
    src = {"big": Layout((8,), here, "(a n)"), "small": Layout((2,), here, "(a n)")}
    dst = {
        "big": Layout((8,), there, "(a n)"),
        "small": Layout((2,), Mesh(a=2, ranks=[0, 5]), "(a n)"),
    }
    found = relabel(src, dst)
    assert found.ranks == {0: 1, 1: 0, 5: 5} and found.saving == 32 - 4
    assert received(src, dst) - received(src, found.apply(dst)) == found.saving


def test_disjoint_sides_keep_their_names_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    far = Layout((8,), Mesh(a=2, ranks=[8, 9]), "(a n)")
    assert relabel(case()[0], far) == Relabeling(((8, 8), (9, 9)), 0, 0)
    assert relabel(case()[0], case()[0]).saving == 0
    assert relabel({}, {}) == Relabeling((), 0, 0)


def test_scipy_is_named_where_it_is_missing(fails, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    fix = "run pip install 'shardmath[relabel]'"
    message = f"relabel solves a linear assignment with scipy, which is not installed; {fix}"
    fails(lambda: relabel(*case()), PlanError, message)


@settings(max_examples=20)
@given(st.integers(50, 55), st.integers(1, 3), st.integers(0, 5))
@example(55, 3, 1)
def test_totals_beyond_floats_are_exact(power: int, odd: int, seed: int) -> None:
    """Bytes that differ by one in 2**55: never worse than the ranks as they are, and counted exactly."""
    n = (1 << power) + odd
    ranks = np.random.default_rng(seed).permutation(4).tolist()
    src = Layout((n,), Mesh(a=4), "(a n)", dtype="int8")
    dst = Layout((n,), Mesh(a=4, ranks=ranks), "(a~ n)", dtype="int8")
    found = relabel(src, dst)
    assert found.saving == received(src, dst) - received(src, found.apply(dst)) >= 0
    assert found.kept_after + received(src, found.apply(dst)) == n


def test_what_cannot_be_relabeled(fails) -> None:
    src, dst = case()
    wrong = Layout((9,), Mesh(a=2), "(a n)")
    fails(
        lambda: relabel(src, wrong),
        PlanError,
        (
            "the tensor is float32[8] at the source and float32[9] at the destination; give "
            "both sides one shape and dtype"
        ),
    )
    fails(
        lambda: relabel({"a": src}, {"b": dst}),
        PlanError,
        (
            "names of tensors differ: only the source has ['a']; only the destination has "
            "['b']; give both sides the same names"
        ),
    )
    fails(
        lambda: relabel({3: src}, {3: dst}),
        PlanError,
        "tensor name 3 is not a str; use a str as its name",
    )
    what = f"the source is {src!r}, the destination a mapping; give two layouts, or two mappings"
    fails(lambda: relabel(src, {"": dst}), PlanError, what)
    fails(lambda: plan(src, {"": dst}), PlanError, what)
    held = {"a": dst, "b": 3}
    fails(
        lambda: relabel(src, dst).apply(held),
        PlanError,
        "tensor 'b' is 3; give a Layout or a tuple of Layouts",
    )
    fails(
        lambda: relabel(src, ()),
        PlanError,
        ("the tensor is (); give a Layout or a tuple of Layouts"),
    )
    mixed = (src, 3)
    fails(
        lambda: relabel(mixed, dst),
        PlanError,
        f"the tensor is {mixed!r}; give a Layout or a tuple of Layouts",
    )
    fails(
        lambda: relabel(3, dst), PlanError, ("the tensor is 3; give a Layout or a tuple of Layouts")
    )
    fails(
        lambda: relabel(src, dst).apply("n"),
        PlanError,
        "the tensor is 'n'; give a Layout or a tuple of Layouts",
    )
    big = Layout((1 << 56,), Mesh(), "n", dtype="int8")
    total = 65 << 56
    fails(
        lambda: relabel({str(i): big for i in range(65)}, {str(i): big for i in range(65)}),
        PlanError,
        f"the tensors have {total} bytes, which is more than {1 << 62}; relabel fewer tensors at once",
    )


# Size


def large(ranks: int) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """FSDP over a trainer to TP8 x DP of co-located engines, 40 sizes of matrices."""
    src = Mesh(fsdp=ranks)
    dst = Mesh(tp=8, dp=ranks // 8, ranks=np.random.default_rng(0).permutation(ranks).tolist())
    shapes = [(4096 + 128 * i, 1024) for i in range(40)]
    return (
        {f"w{i}": Layout(shape, src, "(fsdp n) h") for i, shape in enumerate(shapes)},
        {
            f"w{i}": Layout(shape, dst, ("(tp n) h", "n (tp h)")[i % 2])
            for i, shape in enumerate(shapes)
        },
    )


def test_two_thousand_ranks() -> None:
    assert relabel(*large(2048)).saving > 0
