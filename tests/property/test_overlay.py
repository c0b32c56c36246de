"""Overlays and templates against sets of elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Table, testing
from shardmath.overlay import Overlay, expand, overlay, ranges, template, unit_boxes
from shardmath.partition import Partition
from shardmath.reduction import reduction
from shardmath.runs import Runs, from_ranges, identity


def parts_of(*held: Runs) -> Partition:
    return Partition(("a",), held, np.arange(len(held)))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
def test_ranges(spans: list[tuple[int, int]]) -> None:
    starts, stops = (np.array([span[i] for span in spans], np.int64) for i in (0, 1))
    values, owner = ranges(starts, stops)
    expected = [(x, i) for i, (lo, hi) in enumerate(spans) for x in range(lo, hi)]
    assert list(zip(values.tolist(), owner.tolist(), strict=True)) == expected


@st.composite
def partitions(draw: st.DrawFn, overlap: bool) -> Partition:
    """Distinct parts of 0..11 in any order, with holes; disjoint unless `overlap`."""
    if overlap:
        held = draw(st.lists(testing.runs(most=12), min_size=1, max_size=4, unique=True))
        return parts_of(*held)
    owner = draw(st.lists(st.integers(0, 3), min_size=12, max_size=12))
    order = draw(st.permutations(range(12)))
    held = [from_ranges([(i, i + 1) for i in order if owner[i] == p]) for p in range(4)]
    return parts_of(*dict.fromkeys(held))


@given(st.booleans().flatmap(partitions), st.booleans().flatmap(partitions))
def test_rows_are_what_both_hold(source: Partition, target: Partition) -> None:
    over = overlay(source, target)
    found: dict[int, list[tuple[int, ...]]] = {}
    for pair, (key, part) in enumerate(zip(over.pair_key.tolist(), over.pair_part.tolist(), strict=True)):
        members = over.keys[key]
        assert list(members) == sorted(set(members))
        rows = range(int(over.first[pair]), int(over.first[pair + 1]))
        assert over.pair_size[pair] == over.size[list(rows)].sum() and len(rows) > 0
        held = [source.parts[m].indices() for m in members]
        there = target.parts[part].indices()
        assert all(over.dst[r] < over.dst[r + 1] for r in list(rows)[:-1])
        for r in rows:
            for i in range(int(over.size[r])):
                g = int(over.start[r]) + i
                assert there[int(over.dst[r]) + i] == g
                assert all(x[int(over.src[r, m]) + i] == g for m, x in enumerate(held))
                found.setdefault(part, []).append((g, *members))
    for part, runs in enumerate(target.parts):
        expected = []
        for g in runs.indices().tolist():
            members = tuple(p for p, held in enumerate(source.parts) if g >= 0 and g in held.indices().tolist())
            expected += [(g, *members)] if members else []
        assert sorted(found.get(part, [])) == sorted(expected)
    assert over.first[-1] == len(over.start) == len(over.size) == len(over.dst) == len(over.src)
    pairs = list(zip(over.pair_key.tolist(), over.pair_part.tolist(), strict=True))
    assert pairs == sorted(set(pairs))


def rows(over: Overlay) -> list[tuple[int, ...]]:
    return list(zip(*(x.tolist() for x in (over.start, over.size, over.dst, over.src[:, 0])), strict=True))


def test_rows_are_as_long_as_they_can_be() -> None:
    tp8, tp6 = (parts_of(*(from_ranges([(i * s, i * s + s)]) for i in range(24 // s))) for s in (3, 4))
    assert max(np.bincount(overlay(tp8, tp6).pair_part)) == 2
    assert len(overlay(tp8, tp6).size) == 12
    one = overlay(parts_of(from_ranges([(2, 6), (0, 2)])), parts_of(identity(6)))
    assert rows(one) == [(0, 2, 0, 4), (2, 4, 2, 0)]


def test_overlapping_parts_are_cut_into_atoms() -> None:
    over = overlay(parts_of(from_ranges([(0, 4)]), from_ranges([(2, 6)])), parts_of(identity(6)))
    assert over.keys == ((0,), (0, 1), (1,))
    assert over.pair_size.tolist() == [2, 2, 2]
    assert over.src.tolist() == [[0, -1], [2, 0], [2, -1]]


def test_nothing_in_common() -> None:
    over = overlay(parts_of(from_ranges([(0, 2)])), parts_of(from_ranges([(2, 4)])))
    assert len(over.pair_key) == 0 and over.first.tolist() == [0]
    empty = overlay(parts_of(Runs()), parts_of(Runs()))
    assert len(empty.pair_key) == 0 and empty.keys == ((0,),)


MESH = Mesh(dp=2, tp=2)


def of(src: Layout, dst: Layout):
    return template(src, dst, reduction(src, dst))


@given(testing.pairs())
def test_units_move_what_is_asked(pair: tuple[Layout, ...]) -> None:
    """Every unit's boxes, from every holder, lie at the same elements on both sides, and all boxes are there."""
    t = of(*pair)
    src, dst = pair
    asked: dict[int, list[tuple[int, ...]]] = {r: [] for r in dst.mesh.ranks}
    for unit, rank in zip(t.entry_unit.tolist(), t.entry_rank.tolist(), strict=True):
        klass = int(t.unit_class[unit])
        holders = t.holders[t.holder_first[klass] : t.holder_first[klass + 1]].tolist()
        assert holders == sorted(set(holders)) and holders
        for sender in holders:
            pieces = expand(t, unit, sender, 0, int(t.unit_size[unit]))
            seen = []
            for piece in pieces:
                here, there = (np.ix_(*map(_range, x)) for x in (piece.src, piece.dst))
                whole = [_range(s) for s in piece.whole]
                for d, index in enumerate(zip(src.indices(sender), dst.indices(rank), whole, strict=True)):
                    assert index[0][here[d].ravel()].tolist() == index[1][there[d].ravel()].tolist() == index[2]
                seen += [(piece.addend, *x) for x in itertools.product(*whole)]
            assert len(seen) == t.unit_size[unit]
        asked[rank] += seen
    for rank, elements in asked.items():
        need = itertools.product(
            range(t.reduction.addends), *([i for i in x.tolist() if i >= 0] for x in dst.indices(rank))
        )
        assert sorted(elements) == sorted(need)


def _range(s: slice) -> list[int]:
    return list(range(s.start, s.stop))


def test_hidden_dimensions_are_addends() -> None:
    src, dst = Layout((4,), MESH, "n {sum: dp tp}"), Layout((4,), MESH, "n {sum: tp}")
    t = of(src, dst)
    assert t.hidden == 2 and t.reduction.folded == ("dp",) and t.reduction.matched == ((("tp",), ("tp",)),)
    assert of(Layout((4,), MESH, "n"), Layout((4,), MESH, "(tp n)")).hidden == 0
    held = {tuple(t.holders[lo:hi].tolist()) for lo, hi in itertools.pairwise(t.holder_first)}
    assert held == {(0,), (1,), (2,), (3,)}
    assert sorted(zip(t.unit_class[t.entry_unit].tolist(), t.entry_rank.tolist(), strict=True))[:2] == [(0, 0), (0, 2)]


def test_scalars_are_one_unit() -> None:
    t = of(Layout((), MESH, ""), Layout((), Mesh(ranks=[9]), ""))
    assert (t.unit_size.tolist(), t.holders.tolist(), t.entry_rank.tolist()) == ([1], [0, 1, 2, 3], [9])
    assert [x.tolist() for x in unit_boxes(t, 0)] == [[[]], [[]]]
    (piece,) = expand(t, 0, 2, 0, 1)
    assert (piece.src, piece.dst, piece.whole, piece.shape, piece.addend) == ((), (), (), (), 0)


def test_boxes_of_a_unit_are_row_major() -> None:
    src, dst = Layout((8, 8), Mesh(a=2), "(2 a n) h"), Layout((8, 8), Mesh(b=2), "n (2 b h)")
    t = of(src, dst)
    table, sizes = unit_boxes(t, 0)
    over = t.overlays
    starts = [[int(o.start[r]) for o, r in zip(over, row, strict=True)] for row in table.tolist()]
    assert starts == [[0, 0], [0, 4], [4, 0], [4, 4]]
    assert sizes.tolist() == [[2, 2]] * 4


def test_part_of_a_unit() -> None:
    """A cut at a box, and at rows of a box."""
    src, dst = Layout((8, 3), Mesh(a=2), "(2 a n) h"), Layout((8, 3), Mesh(), "n h")
    t = of(src, dst)
    assert t.unit_size.tolist() == [12, 12]

    def whole(lo: int, hi: int) -> list[tuple[tuple[int, int], ...]]:
        return [tuple((s.start, s.stop) for s in piece.whole) for piece in expand(t, 0, 0, lo, hi)]

    assert whole(0, 12) == [((0, 2), (0, 3)), ((4, 6), (0, 3))]
    assert whole(6, 12) == [((4, 6), (0, 3))]
    assert whole(0, 6) == [((0, 2), (0, 3))]
    assert whole(3, 9) == [((1, 2), (0, 3)), ((4, 5), (0, 3))]
    assert whole(9, 12) == [((5, 6), (0, 3))]
    piece = expand(t, 0, 0, 9, 12)[0]
    assert (piece.src[0], piece.dst[0], piece.shape) == (slice(3, 4), slice(5, 6), (1, 3))


def test_senders_of_a_key_find_their_own_place() -> None:
    table = Table(0, (from_ranges([(0, 4)]), from_ranges([1, (2, 6), (0, 1)])))
    src, dst = Layout((6,), Mesh(a=2, ranks=(5, 3)), (table,)), Layout((6,), Mesh(ranks=[9]), "n")
    t = of(src, dst)
    both = [
        u
        for u in range(len(t.unit_class))
        if len(t.holders[t.holder_first[t.unit_class[u]] : t.holder_first[t.unit_class[u] + 1]]) == 2
    ]
    seen = {
        (p.whole[0].start, sender): p.src[0].start
        for u in both
        for sender in (3, 5)
        for p in expand(t, u, sender, 0, int(t.unit_size[u]))
    }
    assert seen == {(0, 5): 0, (0, 3): 5, (2, 5): 2, (2, 3): 1}


@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 1, 0, 2), (40, 7, 9, 8)])
def test_holders_are_ascending_ranks(ranks: tuple[int, ...]) -> None:
    mesh = Mesh(dp=2, tp=2, ranks=ranks)
    t = of(Layout((4,), mesh, "(tp n)"), Layout((4,), Mesh(ranks=[99]), "n"))
    held = [t.holders[lo:hi].tolist() for lo, hi in itertools.pairwise(t.holder_first)]
    assert held == [sorted(ranks[0::2]), sorted(ranks[1::2])]


def test_parts_that_all_hold_everything() -> None:
    """Every atom has two holders, though no part is another one."""
    table = Table(0, (identity(4), from_ranges([(2, 4), (0, 2)])))
    t = of(Layout((4,), Mesh(a=2), (table,)), Layout((4,), Mesh(ranks=[9]), "n"))
    assert [t.holders[lo:hi].tolist() for lo, hi in itertools.pairwise(t.holder_first)] == [[0, 1]]
