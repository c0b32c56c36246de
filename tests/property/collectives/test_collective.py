"""Collectives against their textbook definitions: element by element, and in numpy on random shards."""

from __future__ import annotations

import itertools
import pickle
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardmath import (
    Balanced,
    BlockCyclic,
    Layout,
    Mesh,
    Partial,
    PlanError,
    Replicate,
    Shard,
    StridedShard,
    Table,
    plan,
    schedule,
    testing,
)
from shardmath.layouts.algebra.runs import from_ranges
from shardmath.layouts.edits import relabeled, window
from shardmath.plans.collectives.collective import Collective, recognize
from shardmath.proofs.simulate import FOLD
from shardmath.testing import addends, distribute, run

# The textbook, on whole arrays


def textbook(c: Collective, src: Layout, dst: Layout, shards: dict[int, Any]) -> dict[int, Any]:
    """What each rank has after the operation: only members of its own group are read."""
    out = {r: np.zeros(dst.local_shape(r)) for r in dst.mesh.ranks}
    for group, senders in zip(c.groups, c.senders or c.groups, strict=True):
        for i, rank in enumerate(group):
            sources = [senders[i]] if c.senders else list(group)
            seen = np.full(src.shape, np.nan)
            for k, member in enumerate(s for s in sources if s in src.mesh):
                here, there = places(src, member)
                first = k == 0 or c.op is None
                piece = shards[member][here]
                seen[there] = (
                    piece if first else FOLD[{"avg": "sum"}.get(c.op, c.op)](seen[there], piece)
                )
            here, there = places(dst, rank)
            out[rank][here] = seen[there] / (len(group) if c.op == "avg" else 1)
    return out


def places(layout: Layout, rank: int) -> tuple[Any, Any]:
    index = layout.indices(rank)
    return np.ix_(*(np.flatnonzero(i >= 0) for i in index)), np.ix_(*(i[i >= 0] for i in index))


def in_place(c: Collective, shards: dict[int, Any]) -> dict[int, Any]:
    """The operation on the buffers as they are, by concatenation and cutting alone."""
    out = {}
    for group, senders in zip(c.groups, c.senders or c.groups, strict=True):
        have = [shards[rank] for rank in senders]
        if c.op:
            folded = have[0]
            for x in have[1:]:
                folded = FOLD[{"avg": "sum"}.get(c.op, c.op)](folded, x)
            have = [folded / (len(group) if c.op == "avg" else 1)] * len(group)
        if c.kind in ("all_gather", "all_to_all"):
            have = [np.concatenate(have, c.dims[0])] * len(group)
        out |= dict(zip(group, have, strict=True))
    return out


def check(c: Collective, src: Layout, dst: Layout) -> None:
    """The collective does what the plan does, and says the truth of itself."""
    shards = distribute(src, addends(src), hole=99.0)
    moved, book = run(plan(src, dst), shards), textbook(c, src, dst, shards)
    assert all(np.array_equal(moved[r], book[r]) for r in dst.mesh.ranks)
    check_groups(c, src, dst)
    if c.contiguous:
        assert not any(dst.holes(r) for r in dst.mesh.ranks)
        after = in_place(c, shards)
        for group in c.groups:
            whole = after[group[0]]
            if c.kind in ("reduce_scatter", "all_to_all"):
                cuts = np.cumsum([dst.local_shape(r)[c.dims[-1]] for r in group])
                after |= dict(zip(group, np.split(whole, cuts[:-1], c.dims[-1]), strict=True))
        assert all(np.array_equal(moved[r], after[r]) for r in dst.mesh.ranks)


def check_groups(c: Collective, src: Layout, dst: Layout) -> None:
    everybody = sorted(r for group in c.groups for r in group)
    assert everybody == sorted(dst.mesh.ranks) and list(c.groups) == sorted(c.groups)
    assert (c.kind == "local") == (not c.axes) and (c.op is not None) == (
        c.kind in ("all_reduce", "reduce_scatter")
    )
    for group in c.groups if c.axes else ():
        coords = [c.mesh.coords(r) for r in group]
        assert len({tuple(x[a] for a in c.mesh.shape if a not in c.axes) for x in coords}) == 1
        assert [tuple(x[a] for a in c.axes) for x in coords] == list(
            itertools.product(*(range(c.mesh.shape[a]) for a in c.axes))
        )
    if c.even and not c.senders:
        assert all(
            len({x.local_shape(r) for r in group}) == 1
            for group in c.groups
            for x in (src, dst)
            if r_in(x, group)
        )


def r_in(layout: Layout, group: tuple[int, ...]) -> bool:
    return all(r in layout.mesh for r in group)


# The textbook, element by element


def cells(layout: Layout, rank: int) -> frozenset[tuple[int, ...]]:
    if rank not in layout.mesh:
        return frozenset()
    return frozenset(itertools.product(*(i[i >= 0].tolist() for i in layout.indices(rank))))


def span(held: frozenset[tuple[int, ...]], d: int) -> frozenset[int]:
    return frozenset(cell[d] for cell in held)


def groupings(meshes: list[Mesh]) -> set[frozenset[frozenset[int]]]:
    out = set()
    for mesh in meshes:
        for k in range(1, len(mesh.axes) + 1):
            for axes in itertools.combinations(mesh.shape, k):
                by: dict[tuple[int, ...], set[int]] = {}
                for r in mesh.ranks:
                    by.setdefault(
                        tuple(n for a, n in mesh.coords(r).items() if a not in axes), set()
                    ).add(r)
                out.add(frozenset(map(frozenset, by.values())))
    return {groups for groups in out if max(map(len, groups)) > 1}


def disjoint_union(held: list[frozenset[tuple[int, ...]]]) -> frozenset[tuple[int, ...]] | None:
    union = frozenset().union(*held)
    return union if sum(map(len, held)) == len(union) else None


def shares(
    held: list[frozenset[tuple[int, ...]]], whole: frozenset[tuple[int, ...]], ndim: int
) -> set[int]:
    return {d for d in range(ndim) for h in held if h and span(h, d) != span(whole, d)}


def oracle(src: Layout, dst: Layout) -> set[tuple[str, frozenset[frozenset[int]]]]:
    """Every (kind, groups) that copies `src` to `dst`, without Partial, by counting elements."""
    ranks, mine = set(dst.mesh.ranks), set(src.mesh.ranks)
    have, want = ({r: cells(x, r) for r in ranks | mine} for x in (src, dst))
    if all(want[r] <= have[r] for r in ranks):
        return {("local", frozenset(frozenset([r]) for r in ranks))}
    out = set()
    for groups in groupings(
        [src.mesh, dst.mesh] if ranks == mine else [dst.mesh] if mine < ranks else []
    ):
        out |= {(kind, groups) for kind in kinds(groups, have, want, src.ndim)}
    return {x for x in out if ranks == mine or x[0] == "broadcast"}


def kinds(
    groups: frozenset[frozenset[int]], have: dict[int, Any], want: dict[int, Any], ndim: int
) -> set[str]:
    fits = {"broadcast", "permute", "all_gather", "all_to_all"}
    gathered: set[int] = set()
    divided: set[int] = set()
    for group in groups:
        before, after = [have[r] for r in group], [want[r] for r in group]
        whole = disjoint_union(before)
        if sum(map(bool, before)) > 1 or set(after) != {frozenset().union(*before)}:
            fits.discard("broadcast")
        if Counter(before) != Counter(after):
            fits.discard("permute")
        if whole is None or set(after) != {whole}:
            fits.discard("all_gather")
        if whole is None or disjoint_union(after) != whole:
            fits.discard("all_to_all")
        elif whole is not None:
            gathered |= shares(before, whole, ndim)
            divided |= shares(after, whole, ndim)
    if len(gathered) != 1 or len(divided) != 1 or gathered == divided:
        fits.discard("all_to_all")
    return fits


def check_against_oracle(src: Layout, dst: Layout) -> Collective | None:
    found, expected = recognize(src, dst), oracle(src, dst)
    if found is None:
        assert not expected
        return None
    groups = frozenset(map(frozenset, found.groups))
    assert (found.kind, groups) in expected
    assert len(found.groups[0]) == min(len(next(iter(g))) for _, g in expected)
    check(found, src, dst)
    check_bytes(found, src, dst)
    return found


def check_bytes(c: Collective, src: Layout, dst: Layout) -> None:
    """Where each element has one holder, bytes by (sender, receiver): nothing crosses groups, holdings go whole."""
    have = {r: cells(src, r) for r in src.mesh.ranks}
    if c.op or disjoint_union(list(have.values())) is None:
        return
    moved: Counter[tuple[int, int]] = Counter()
    for t in plan(src, dst).transfers():
        moved[t.src_rank, t.dst_rank] += t.nbytes
    pairs = [
        (a, b) for group in c.groups for a, b in itertools.product(group, repeat=2) if a in src.mesh
    ]
    assert moved.keys() <= set(pairs)
    if c.kind in ("all_gather", "broadcast"):
        assert moved == +Counter({(a, b): len(have[a]) * src.itemsize for a, b in pairs})
    if c.kind == "permute":
        sent = zip(itertools.chain(*c.senders), itertools.chain(*c.groups), strict=True)
        assert moved == +Counter({(a, b): len(have[a]) * src.itemsize for a, b in sent})


@given(testing.pairs(ops=(None,)))
def test_random_pairs_are_what_the_elements_say(pair: tuple[Layout, ...]) -> None:
    check_against_oracle(*pair)


@st.composite
def on_one_mesh(draw: st.DrawFn, ops: tuple[str | None, ...]) -> tuple[Layout, Layout]:
    """Two layouts on the same ranks, small shapes: collectives are frequent."""
    mesh, shape, op = (
        draw(testing.meshes(8, first=0)),
        draw(testing.shapes(4)),
        draw(st.sampled_from(ops)),
    )
    other = draw(
        st.sampled_from(
            [
                mesh,
                mesh,
                Mesh(z=mesh.size, ranks=mesh.ranks),
                mesh.transpose(list(mesh.shape)[::-1]),
            ]
        )
    )
    return draw(testing.layouts(shape, mesh, op=op)), draw(testing.layouts(shape, other, op=op))


@given(on_one_mesh((None,)))
def test_pairs_on_the_same_ranks_are_what_the_elements_say(pair: tuple[Layout, Layout]) -> None:
    check_against_oracle(*pair)


@given(on_one_mesh(("sum", "max", "avg", "product")))
def test_with_addends_what_is_recognized_is_right(pair: tuple[Layout, Layout]) -> None:
    found = recognize(*pair)
    if found:
        check(found, *pair)


# Moves that are collectives by construction

Groups = frozenset[frozenset[int]]
Case = tuple[str, Groups, Layout, Layout]
MADE = ("all_gather", "all_to_all", "all_reduce", "reduce_scatter")


@st.composite
def made(draw: st.DrawFn, kinds: tuple[str, ...] = MADE) -> Case:
    """A source, and what the collective gives along the axes that divide last."""
    sizes = draw(st.sampled_from([(2,), (3,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (3, 2, 2)]))
    mesh = Mesh(
        dict(zip("abc", sizes, strict=False)),
        ranks=draw(st.permutations(range(int(np.prod(sizes))))),
    )
    kind, op = draw(st.sampled_from(kinds)), draw(st.sampled_from(["sum", "max", "avg", "product"]))
    shape = (draw(st.integers(12, 17)), draw(st.integers(12, 17)))
    axes = draw(st.permutations(list(mesh.shape)))
    cut = draw(st.integers(1, len(axes)))
    along, rest = axes[:cut], axes[cut:]
    spec: dict[str, Any] = {}
    for name in rest:
        spec[name] = draw(st.one_of(st.just(Replicate()), outer(spec, 0), outer(spec, 1)))
    dims = [draw(st.integers(0, 1)) for _ in along]
    before, after = {
        "all_gather": (Shard, lambda d: Replicate()),
        "all_to_all": (lambda d: Shard(dims[0]), lambda d: Shard(1 - dims[0])),
        "all_reduce": (lambda d: Partial(op), lambda d: Replicate()),
        "reduce_scatter": (lambda d: Partial(op), Shard),
    }[kind]
    src, dst = (
        {**spec, **{n: make(d) for n, d in zip(along, dims, strict=True)}}
        for make in (before, after)
    )
    groups: dict[Any, set[int]] = {}
    for r in mesh.ranks:
        groups.setdefault(tuple(mesh.coords(r)[name] for name in rest), set()).add(r)
    return kind, sets(groups.values()), Layout(shape, mesh, src), Layout(shape, mesh, dst)


def sets(groups: Iterable[Iterable[int]]) -> Groups:
    return frozenset(map(frozenset, groups))


def outer(spec: dict[str, Any], d: int) -> st.SearchStrategy[Any]:
    """Any placement for the first axis on a dimension, Shard after it."""
    if any(getattr(by, "dim", None) == d for by in spec.values()):
        return st.just(Shard(d))
    return st.sampled_from([Shard(d), Balanced(d), StridedShard(d, 2), BlockCyclic(d, 2)])


@given(made())
def test_what_is_made_is_recognized(case: Case) -> None:
    kind, groups, src, dst = case
    found = recognize(src, dst)
    assert found and (found.kind, sets(found.groups)) == (kind, groups)
    check(found, src, dst)
    check_bytes(found, src, dst)


@given(made())
def test_equal_plans_are_the_same_collective(case: Case) -> None:
    """What is recognized is a plan as a value: a destination of another spelling and the same plan is the same."""
    _, _, src, dst = case
    for text in (dst.text, src.text):
        other = Layout(dst.shape, dst.mesh, text)
        assert (plan(src, other) == plan(src, dst)) == (
            recognize(src, other) == recognize(src, dst)
        )


@st.composite
def respelled(draw: st.DrawFn, layout: Layout) -> Layout:
    """The same holdings on a transposed mesh, or with each axis that can be split in two."""
    mesh, text = layout.mesh, layout.text
    order = draw(st.permutations(list(mesh.shape))) if len(layout.partial) < 2 else list(mesh.shape)
    turned = mesh.transpose(order)
    for name, n in mesh.axes if draw(st.booleans()) else ():
        if n % 2 == 0:
            turned = turned.split(name, **{f"{name}0": 2, f"{name}1": n // 2})
            text = re.sub(rf"\b{name}\b", f"{name}0*{name}1", text)
    text = re.sub(r"\{.*\}", lambda m: m[0].replace("*", " "), text)
    return Layout(layout.shape, turned, text, dtype=layout.dtype, rules=layout.rules)


@given(made(), st.data())
def test_spelling_is_not_meaning(case: Case, data: st.DataObject) -> None:
    _, _, src, dst = case
    other = data.draw(respelled(src)), data.draw(respelled(dst))
    a, b = recognize(src, dst), recognize(*other)
    assert a and b and (a.kind, a.dims, a.op, a.even) == (b.kind, b.dims, b.op, b.even)
    assert sets(a.groups) == sets(b.groups)
    assert b.contiguous or not a.contiguous
    check(b, *other)


def test_texts_tuples_and_mappings() -> None:
    mesh = Mesh(dp=4, tp=2)
    sources = ["(tp dp n) h", {"tp": Shard(0), "dp": Shard(0)}]
    found = {
        recognize(Layout((16, 3), mesh, x), Layout((16, 3), mesh, "(tp n) h")) for x in sources
    }
    strided = Layout((16, 3), mesh, (StridedShard(0, 2), Shard(0)), reading="order")
    found.add(recognize(strided, Layout((16, 3), mesh, (Replicate(), Shard(0)))))
    assert [str(c) for c in found] == [
        "all_gather of dimension 0 over dp: 2 groups of 4, contiguous"
    ]


@given(on_one_mesh((None,)), st.randoms(use_true_random=False))
def test_renamed_ranks_are_a_permutation(pair: tuple[Layout, Layout], random) -> None:
    src, ranks = pair[0], list(pair[0].mesh.ranks)
    names = dict(zip(ranks, random.sample(ranks, len(ranks)), strict=True))
    found = check_against_oracle(src, relabeled(src, names))
    assert found and found.kind in ("permute", "broadcast", "all_gather", "local")


@given(made(("all_gather",)), st.data())
def test_what_one_coordinate_held_is_broadcast(case: Case, data: st.DataObject) -> None:
    layout = case[2]
    at = {a: data.draw(st.integers(0, n - 1)) for a, n in layout.mesh.axes if a in layout.free_axes}
    assume(at)
    alone = layout.mesh.select(**at)
    src = Layout(layout.shape, alone, layout.text, rules=layout.rules)
    found = check_against_oracle(src, layout)
    assert found and found.kind == "broadcast" and found.contiguous
    assert {r for senders in found.senders for r in senders} == set(alone.ranks)
    assert recognize(layout, src).kind == "local"


# Which groups, which order, which buffers

GRID = Mesh(a=2, b=3)


def of(src: str, dst: str, mesh: Mesh = GRID, shape: tuple[int, ...] = (12, 6)) -> str:
    return str(recognize(Layout(shape, mesh, src), Layout(shape, mesh, dst)))


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("(a n) h", "n h", "all_gather of dimension 0 over a: 3 groups of 2, contiguous"),
        ("n (a h)", "n h", "all_gather of dimension 1 over a: 3 groups of 2, contiguous"),
        ("(a b n) h", "(a n) h", "all_gather of dimension 0 over b: 2 groups of 3, contiguous"),
        ("(a b n) h", "(2 b n) h", "all_gather of dimension 0 over a: 3 groups of 2, contiguous"),
        ("(a b n) h", "n h", "all_gather of dimension 0 over a*b: 1 group of 6, contiguous"),
        ("(b a n) h", "n h", "all_gather of dimension 0 over b*a: 1 group of 6, contiguous"),
        ("(2 a n) h", "n h", "all_gather of dimension 0 over a: 3 groups of 2"),
        ("(n a 1) h", "n h", "all_gather of dimension 0 over a: 3 groups of 2"),
        ("(a n) (b h)", "n h", "all_gather of dimension 0, 1 over a*b: 1 group of 6"),
        ("(a n)=14 h", "n h", "all_gather of dimension 0 over a: 3 groups of 2"),
        (
            "(a n) h",
            "n (a h)",
            "all_to_all from dimension 0 to 1 over a: 3 groups of 2, contiguous",
        ),
        ("(a n) h", "n (2 a h)", "all_to_all from dimension 0 to 1 over a: 3 groups of 2"),
        (
            "n (b a h)",
            "(a n) (b h)",
            "all_to_all from dimension 1 to 0 over a: 3 groups of 2, contiguous",
        ),
        ("n h {sum: a}", "n h", "sum all_reduce over a: 3 groups of 2, contiguous"),
        ("n h {max: b}", "n h", "max all_reduce over b: 2 groups of 3, contiguous"),
        ("(b n) h {avg: a}", "(b n) h", "avg all_reduce over a: 3 groups of 2, contiguous"),
        ("n h {sum: a b}", "n h {sum: a}", "sum all_reduce over b: 2 groups of 3, contiguous"),
        (
            "n h {sum: a}",
            "(a n) h",
            "sum reduce_scatter of dimension 0 over a: 3 groups of 2, contiguous",
        ),
        ("n h {sum: a}", "(2 a n) h", "sum reduce_scatter of dimension 0 over a: 3 groups of 2"),
        (
            "n h {sum: a b}",
            "(b a n) h",
            "sum reduce_scatter of dimension 0 over b*a: 1 group of 6, contiguous",
        ),
        (
            "n h {sum: a b}",
            "(a n) (b h)",
            "sum reduce_scatter of dimension 0, 1 over a*b: 1 group of 6",
        ),
        (
            "(b n) h {sum: a}",
            "n h {sum: a}",
            "all_gather of dimension 0 over b: 2 groups of 3, contiguous",
        ),
        ("n h", "(a n) h", "local"),
        ("n h", "n h", "local, contiguous"),
        ("n h", "(1: n + 11: n) h", "local, contiguous"),
        ("(a b n) h", "(b a n) h", "permute over a*b: 1 group of 6, contiguous"),
        ("(a[12 0] n) h", "n h", "broadcast over a: 3 groups of 2, contiguous"),
        ("(a b n) h", "(b n) h", "None"),
        ("(a n) (b h)", "(b n) (a h)", "None"),
        ("n h {sum: a}", "(b n) h", "None"),
        ("n h {sum: a}", "n h {sum: b}", "None"),
        ("n h", "n h {sum: a}", "None"),
        ("n h {sum: a}", "(a[12 0] n) h", "None"),
        ("(a[12 0] n) h", "(a n) h", "None"),
        ("(a n) h", "(a[12 0] n) h", "None"),
        ("(a n) h", "(2 a n) h", "None"),
        ("(a n) h", "n (b h)", "None"),
    ],
)
def test_examples(src: str, dst: str, expected: str) -> None:
    assert of(src, dst) == expected


def test_sizes_that_do_not_divide_are_not_even() -> None:
    found = recognize(Layout((7,), GRID, "(a n)"), Layout((7,), GRID, "n"))
    assert found.contiguous and not found.even
    found = recognize(Layout((8,), GRID, "(a n)"), Layout((8,), GRID, "n"))
    assert found.contiguous and found.even
    uneven = recognize(Layout((7, 6), GRID, "(b n) (a h)"), Layout((7, 6), GRID, "(b n) h"))
    assert uneven.even


def test_buffers_as_they_come() -> None:
    """A destination in the order of the buffers is contiguous, one in the order of the tensor is not."""
    src = Layout((8,), Mesh(a=2), "(2 a n)")
    buffers = Table(0, (from_ranges([(0, 2), (4, 6), (2, 4), (6, 8)]),) * 2)
    assert recognize(src, Layout((8,), Mesh(a=2), {"a": buffers})).contiguous
    assert not recognize(src, Layout((8,), Mesh(a=2), "n")).contiguous


def test_holes_are_other_tensors() -> None:
    """A native all_gather would overwrite the holes of the destination."""
    mesh = Mesh(a=2)
    padded = Layout((6,), mesh, "(a n)=8"), Layout((6,), mesh, "(n)=8")
    found = recognize(*padded)
    assert found.kind == "all_gather" and found.even and not found.contiguous
    check(found, *padded)
    same = Layout((6,), mesh, "(n)=8")
    assert not recognize(same, same).contiguous


def test_groups_of_the_destination_where_the_source_cannot_say_them() -> None:
    src = Layout((8,), Mesh(t=4), "(t n)")
    dst = Layout((8,), Mesh(x=2, y=2), "(x n)")
    found = check_against_oracle(src, dst)
    assert (found.mesh, found.axes, found.groups) == (dst.mesh, ("y",), ((0, 1), (2, 3)))
    assert recognize(src, Layout((8,), Mesh(x=2, y=2), "n")).mesh is src.mesh


def test_permutations_say_who_sends() -> None:
    mesh = Mesh(a=4)
    src = Layout((8,), mesh, "(a n)")
    found = check_against_oracle(src, relabeled(src, {0: 1, 1: 2, 2: 0}))
    assert (found.kind, found.groups, found.senders) == (
        "permute",
        ((0, 1, 2, 3),),
        ((2, 0, 1, 3),),
    )
    wide = Mesh(r=2, a=2)
    replicated = Layout((8,), wide, "(a n)")
    swapped = check_against_oracle(replicated, relabeled(replicated, {0: 1, 1: 0}))
    assert (swapped.axes, swapped.senders) == (("a",), ((1, 0), (2, 3)))


def test_of_groups_that_fit_alike_those_of_the_first_ranks() -> None:
    """Ranks hold halves like a chessboard: either axis swaps them, whichever the mesh names first."""
    halves = from_ranges([(0, 4)]), from_ranges([(4, 8)])
    board = {("a", "b"): Table(0, tuple(halves[i] for i in (0, 1, 1, 0)))}
    other = {("a", "b"): Table(0, tuple(halves[i] for i in (1, 0, 0, 1)))}
    for axes in ("ab", "ba"):
        mesh = Mesh(a=2, b=2).transpose(axes)
        found = check_against_oracle(Layout((8,), mesh, board), Layout((8,), mesh, other))
        assert (found.kind, found.groups, found.axes) == ("permute", ((0, 1), (2, 3)), ("b",))


def test_addends_change_ranks_only_with_themselves() -> None:
    mesh = Mesh(p=2, t=2)
    src = Layout((4,), mesh, "(t n) {sum: p}")
    inside = relabeled(src, {0: 1, 1: 0, 2: 3, 3: 2})
    assert recognize(src, inside).axes == ("t",)
    check(recognize(src, inside), src, inside)
    assert recognize(src, relabeled(src, {0: 2, 2: 0})) is None


def test_replicas_are_no_shares() -> None:
    """Parts that overlap would be sent twice."""
    parts = (from_ranges([(0, 5)]), from_ranges([(4, 8)]))
    src = Layout((8,), Mesh(a=2), {"a": Table(0, parts)})
    assert recognize(src, Layout((8,), Mesh(a=2), "n")) is None
    inside = Layout((5,), Mesh(a=2), {"a": Table(0, (parts[0], from_ranges([(0, 2)])))})
    assert recognize(inside, Layout((5,), Mesh(a=2), "n")) is None


def test_scalars_and_nothing() -> None:
    mesh = Mesh(a=2)
    assert of("", "", mesh, ()) == "local, contiguous"
    assert of("{sum: a}", "", mesh, ()) == "sum all_reduce over a: 1 group of 2, contiguous"
    one = Layout((), Mesh(), "")
    assert str(recognize(one, Layout((), mesh, ""))) == "broadcast over a: 1 group of 2, contiguous"
    assert of("(a n) h", "n h", mesh, (0, 3)) == "local, contiguous"
    assert recognize(Layout((0,), mesh, "n {sum: a}"), Layout((0,), mesh, "n")).kind == "local"


def test_ranks_that_hold_nothing_take_part() -> None:
    """One column for three coordinates: two groups of all, or two members of a group, hold and get nothing."""
    assert (
        of("(a n) (b h)", "n (b h)", shape=(8, 1))
        == "all_gather of dimension 0 over a: 3 groups of 2, contiguous"
    )
    assert (
        of("(a n) (b h)", "n h", shape=(8, 1)) == "all_gather of dimension 0 over a*b: 1 group of 6"
    )
    assert of("n (b h) {sum: a}", "(a n) (b h)", shape=(8, 1)).endswith("contiguous")
    for pair in (("(a n) (b h)", "n h"), ("(a n) (b h)", "n (b h)")):
        check_against_oracle(*(Layout((8, 1), GRID, text) for text in pair))


def test_the_sender_of_nothing_is_in_the_source() -> None:
    mesh = Mesh(a=2, b=2)
    src, dst = Layout((1,), mesh.select(b=1), "(a n)"), Layout((1,), mesh, "(a n)")
    found = check_against_oracle(src, dst)
    assert (found.senders, found.contiguous) == (((1, 1), (3, 3)), True)


def test_other_ranks() -> None:
    src = Layout((8,), Mesh(a=2), "(a n)")
    assert recognize(src, Layout((8,), Mesh(a=2, ranks=[2, 3]), "(a n)")) is None
    assert recognize(src, Layout((8,), Mesh(a=4), "n")) is None
    assert recognize(src, Layout((8,), Mesh(a=4), "(a[0 0 4 4] n)")) is None
    assert recognize(Layout((8,), Mesh(a=4), "n {sum: a}"), Layout((8,), Mesh(a=2), "n")) is None


def test_tensors_of_several_windows_are_not_named() -> None:
    """Not even where another tensor moves as their first windows do."""
    top, bottom = (((0, 4), (0, 4)), ((4, 8), (0, 4)))
    src, dst = Layout((8, 4), GRID, "(a n) h"), Layout((8, 4), GRID, "n h")
    p = plan(
        {"one": window(src, top), "two": (window(src, top), window(src, bottom))},
        {"one": window(dst, top), "two": (window(dst, top), window(dst, bottom))},
        window=True,
    )
    assert list(schedule(p).collectives) == ["one"]


def test_a_collective_is_a_value() -> None:
    found = recognize(Layout((8,), GRID, "(a b n)"), Layout((8,), GRID, "(b a n)"))
    assert (
        eval(repr(found), {"Collective": Collective, "Mesh": Mesh})
        == found
        == pickle.loads(pickle.dumps(found))
    )
    assert hash(found) == hash(
        recognize(Layout((8,), GRID, "(a b n)"), Layout((8,), GRID, "(b a n)"))
    )


def test_what_cannot_be_compared(fails) -> None:
    a, b = Layout((8,), GRID, "n"), Layout((9,), GRID, "n")
    what = (
        "the source has float32[8], the destination float32[9]; give both the same shape and dtype"
    )
    fails(lambda: recognize(a, b), PlanError, what)
    halves = window(a, ((0, 4),)), window(a, ((4, 8),))
    fails(
        lambda: recognize(halves, a),
        PlanError,
        f"{halves} is not a Layout; pass recognize two Layouts",
    )
