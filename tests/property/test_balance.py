"""Lines and cuts against brute force: where units may be cut, who asks, who sends."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Plan, balance, plan, testing, verify
from shardmath.balance import SMALL, between, requests, senders, share, snap, stacked, unit_order
from shardmath.overlay import Template, template, unit_boxes
from shardmath.reduction import reduction
from shardmath.testing import laws


def template_of(src: Layout, dst: Layout) -> Template:
    return template(src, dst, reduction(src, dst))


def large(mesh: Mesh, text: str, rows: int = 1000, columns: int = 64) -> Layout:
    """A matrix of float64: 512 bytes a row."""
    return Layout((rows, columns), mesh, text, dtype="float64")


def legal_cuts(t: Template, unit: int, small: int = SMALL) -> list[int]:
    """Boxes of the unit, and the rows of boxes of more than `small` bytes."""
    out, at = [], 0
    for dims in unit_boxes(t, unit)[1].tolist():
        size = int(np.prod(dims))
        long = next((d for d, n in enumerate(dims) if n > 1), len(dims))
        row = int(np.prod(dims[long + 1 :])) if long < len(dims) else 1
        out += range(at, at + size, row) if size * t.src.itemsize > small else [at]
        at += size
    return [*out, at]


# Snapping


@pytest.mark.parametrize(
    ("rows", "cut"),
    [(128, 0), (129, 64 * 64)],
)
def test_boxes_of_64_kib_stay_whole(rows: int, cut: int) -> None:
    t = template_of(large(Mesh(a=2), "n h", rows), large(Mesh(ranks=[9]), "n h", rows))
    assert SMALL == 65536 and snap(t, 0, 64 * 64 + 1) == cut


@given(testing.pairs(), st.sampled_from([0, 16, 64, SMALL]))
def test_snap_is_the_last_legal_place(pair: tuple[Layout, ...], small: int) -> None:
    t = template_of(*pair)
    with mock.patch.object(balance, "SMALL", small):
        for unit in range(len(t.unit_size)):
            legal = legal_cuts(t, unit, small)
            for at in range(int(t.unit_size[unit]) + 1):
                assert snap(t, unit, at) == max(x for x in legal if x <= at)


def test_small_boxes_of_a_large_unit_stay_whole() -> None:
    """Two boxes of 40 KiB: the size of a box counts, not where it ends."""
    t = template_of(large(Mesh(a=2), "(2 a n) h", 320), large(Mesh(ranks=[9]), "n h", 320))
    assert unit_boxes(t, 0)[1].tolist() == [[80, 64], [80, 64]]
    assert [snap(t, 0, 64 * row) for row in (0, 40, 80, 120, 159, 160)] == [0, 0, 64 * 80, 64 * 80, 64 * 80, 64 * 160]


def test_rows_are_of_the_first_long_dimension() -> None:
    src, dst = (Layout((1, 100, 7, 100), Mesh(ranks=[r]), "...", dtype="float64") for r in (0, 1))
    t = template_of(src, dst)
    assert [snap(t, 0, x) for x in (0, 699, 700, 701, 1400, 70000)] == [0, 0, 700, 700, 1400, 70000]


# Units in an order that all spellings share


@given(testing.pairs())
def test_unit_order_is_by_first_element(pair: tuple[Layout, ...]) -> None:
    t = template_of(*pair)
    order = unit_order(t)
    assert sorted(order.tolist()) == list(range(len(t.unit_size)))
    firsts = []
    for unit in np.argsort(order).tolist():
        over = list(zip(t.overlays, t.unit_pairs[unit].tolist(), strict=True))
        firsts.append(
            (tuple(int(o.start[o.first[p]]) for o, p in over), tuple(int(o.dst[o.first[p]]) for o, p in over))
        )
    assert firsts == sorted(firsts)


# Requests


@given(testing.pairs(ops=(None, "max", "avg")))
def test_everybody_asks_for_all_it_holds(pair: tuple[Layout, ...]) -> None:
    src, dst = pair
    t = template_of(src, dst)
    rows, klass, here = requests(3, balance.Batch(t, ("w",)))
    assert set(rows.batch.tolist()) <= {3} and len(rows) == len(t.entry_unit)
    for i in range(len(rows)):
        holders = t.holders[t.holder_first[klass[i]] : t.holder_first[klass[i] + 1]]
        assert klass[i] == t.unit_class[rows.unit[i]]
        assert here[i] == (rows.rank[i] in holders)
        assert (rows.lo[i], rows.hi[i]) == (0, t.unit_size[rows.unit[i]])


def asks(src: Layout, dst: Layout) -> list[tuple[int, int, int, bool]]:
    """(rank, lo, hi, here) of every request, sorted."""
    rows, _, here = requests(0, balance.Batch(template_of(src, dst), ("w",)))
    return sorted(zip(rows.rank.tolist(), rows.lo.tolist(), rows.hi.tolist(), here.tolist(), strict=True))


PAIR, FAR = Mesh(a=2), Mesh(b=3, ranks=range(4, 7))


def test_of_sum_addends_the_one_that_holds_it_receives() -> None:
    assert asks(large(PAIR, "(a n) h"), large(PAIR, "n h {sum: a}")) == [(0, 0, 32000, True), (1, 0, 32000, True)]
    assert asks(large(PAIR, "n h"), large(PAIR, "n h {sum: a}")) == [(0, 0, 64000, True)]
    ahead = Mesh(b=3, ranks=(7, 8, 1))
    assert asks(large(PAIR, "n h"), large(ahead, "n h {sum: b}")) == [(1, 0, 64000, True)]


def test_of_sum_addends_that_hold_nothing_each_receives_a_stripe() -> None:
    stripes = [(0, 64 * 333), (64 * 333, 64 * 666), (64 * 666, 64000)]
    expected = [(4 + i, lo, hi, False) for i, (lo, hi) in enumerate(stripes)]
    assert asks(large(PAIR, "n h"), large(FAR, "n h {sum: b}")) == expected
    assert asks(large(PAIR, "n h", 100), large(FAR, "n h {sum: b}", 100)) == [(6, 0, 6400, False)]


def test_replicas_of_an_addend_all_receive() -> None:
    far = Mesh(b=2, c=2, ranks=range(4, 8))
    asked = asks(large(PAIR, "n h"), large(far, "n h {sum: b}"))
    assert asked == [(4, 0, 32000, False), (5, 0, 32000, False), (6, 32000, 64000, False), (7, 32000, 64000, False)]


def test_a_replica_that_holds_it_decides_for_all() -> None:
    mixed = Mesh(b=2, c=2, ranks=(4, 5, 6, 1))
    asked = asks(large(PAIR, "n h"), large(mixed, "n h {sum: b}"))
    assert asked == [(1, 0, 64000, True), (6, 0, 64000, False)]


def test_rows_of_requests() -> None:
    rows, _, _ = requests(0, balance.Batch(template_of(large(PAIR, "n h"), large(FAR, "(b n) h")), ("w",)))
    assert len(rows) == 3 and rows[np.array([2, 0])].rank.tolist() == [rows.rank[2], rows.rank[0]]
    both = stacked([rows, rows[rows.rank == 4]])
    assert both.rank.tolist() == [*rows.rank.tolist(), 4] and len(stacked([])) == 0
    assert stacked([]).lo.dtype == np.int64


# Lines


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return plan(*draw(testing.trees()))


def check_lines(p: Plan) -> None:
    on = p.lines
    rows = on.requests
    count = [len(b.names) for b in p.batches]
    item = [b.template.src.itemsize for b in p.batches]
    holders = [tuple(on.holders[lo:hi].tolist()) for lo, hi in itertools.pairwise(on.holder_first.tolist())]
    assert holders == sorted(set(holders))
    assert len(on.cuts) == len(on.holders) + len(holders)
    for line, held in enumerate(holders):
        lo, hi = int(on.first[line]), int(on.first[line + 1])
        at = 0
        keys = []
        for e in range(lo, hi):
            batch = int(rows.batch[e])
            t = p.batches[batch].template
            klass = t.unit_class[rows.unit[e]]
            assert tuple(t.holders[t.holder_first[klass] : t.holder_first[klass + 1]].tolist()) == held
            assert rows.rank[e] not in held
            keys.append((int(rows.rank[e]), batch, int(unit_order(t)[rows.unit[e]])))
            assert on.start[e] == at and on.nbytes[e] == (rows.hi[e] - rows.lo[e]) * item[batch]
            at += int(on.nbytes[e]) * count[batch]
        assert keys == sorted(keys)
        cuts = on.cuts[on.holder_first[line] + line : on.holder_first[line + 1] + line + 1].tolist()
        assert cuts == expected_cuts(p, line, at, len(held))
        check_slices(p, line, held, cuts)
    assert on.first[-1] == len(rows)


def expected_cuts(p: Plan, line: int, total: int, count: int) -> list[int]:
    """Even shares, each moved down to the last legal place of the line."""
    places = [total]
    for e in range(int(p.lines.first[line]), int(p.lines.first[line + 1])):
        batch = p.batches[int(p.lines.requests.batch[e])]
        unit, lo, hi = (int(getattr(p.lines.requests, name)[e]) for name in ("unit", "lo", "hi"))
        legal = [x for x in legal_cuts(batch.template, unit, balance.SMALL) if lo < x < hi]
        for tensor in range(len(batch.names)):
            begin = int(p.lines.start[e] + tensor * p.lines.nbytes[e])
            places += [begin + (x - lo) * batch.template.src.itemsize for x in [lo, *legal]]
    return [0, *(max(x for x in [0, *places] if x <= total * j // count) for j in range(1, count)), total]


def check_slices(p: Plan, line: int, held: tuple[int, ...], cuts: list[int]) -> None:
    on, total = p.lines, cuts[-1]
    for j, rank in enumerate(held):
        mine = [(lo, hi) for n, lo, hi in share(on, rank) if n == line]
        assert mine == [(cuts[j], cuts[j + 1])] * (cuts[j] < cuts[j + 1])
    borders = sorted({0, total, *cuts, *range(0, total, max(1, total // 7))})
    spans = list(zip(held, cuts[:-1], cuts[1:], strict=True))
    for lo, hi in itertools.combinations(borders, 2):
        expected = [(r, max(lo, a), min(hi, b)) for r, a, b in spans if max(lo, a) < min(hi, b)]
        assert senders(on, line, lo, hi) == expected
        first, last = int(on.first[line]), int(on.first[line + 1])
        ends = [*on.start[first + 1 : last].tolist(), total]
        touched = [e for e in range(first, last) if on.start[e] < hi and ends[e - first] > lo]
        assert list(between(on, line, lo, hi)) == touched


@given(plans(), st.sampled_from([0, 16, SMALL]))
def test_lines_are_even_shares_of_what_is_asked(p: Plan, small: int) -> None:
    with mock.patch.object(balance, "SMALL", small):
        check_lines(plan(p.src, p.dst))


@pytest.mark.parametrize("names", [1, 3])
def test_large_tensors_are_striped(names: int) -> None:
    src = {f"w{i}": large(Mesh(a=3), "n h") for i in range(names)}
    dst = {f"w{i}": large(Mesh(b=2, ranks=(7, 5)), "n h") for i in range(names)}
    p = plan(src, dst)
    check_lines(p)
    verify(p)
    loads = list(p.sent_bytes().values())[:3]
    assert sum(loads) == names * 2 * 512000 and max(loads) - min(loads) <= 1024
    whole = 2 * names * 1000
    assert p.lines.cuts.tolist() == [0, *(512 * (whole * j // 3) for j in (1, 2)), 512 * whole]


@pytest.mark.parametrize(
    "law",
    [
        laws.plan_is_proved,
        laws.plan_moves_the_tensor,
        laws.ends_agree,
        laws.spelling_is_not_meaning,
        laws.relabelling_commutes,
    ],
)
def test_laws_of_plans_where_every_row_is_a_cut(law) -> None:
    @given(testing.pairs())
    def check(pair: tuple[Layout, ...]) -> None:
        with mock.patch.object(balance, "SMALL", 0):
            law(*pair)

    check()


def test_trees_where_every_row_is_a_cut() -> None:
    @given(testing.trees())
    def check(tree) -> None:
        with mock.patch.object(balance, "SMALL", 0):
            laws.trees_are_their_tensors(tree)

    check()


def test_windows_where_every_row_is_a_cut() -> None:
    @given(st.data(), testing.pairs(ops=(None,)))
    def check(data: st.DataObject, pair: tuple[Layout, ...]) -> None:
        with mock.patch.object(balance, "SMALL", 0):
            laws.windows_are_their_union(data, *pair)

    check()


def test_a_tensor_of_no_elements_beside_others() -> None:
    """A template without classes once shifted the cuts of all lines after it."""
    m, k = Mesh(x=2), Mesh(x=2, ranks=(2, 3))
    p = plan(
        {"w": Layout((4,), m, "(x n)"), "e": Layout((0,), m, "(x n)")},
        {"w": Layout((4,), k, "(x n)"), "e": Layout((0,), k, "(x n)")},
    )
    check_lines(p)
    assert [(t.src_rank, t.dst_rank) for t in p.transfers()] == [(0, 2), (1, 3)]


def test_cuts_inside_stripes() -> None:
    """Two holders, three addends of which each receives a stripe: stripes begin inside the unit."""
    p = plan(large(PAIR, "n h"), large(FAR, "n h {sum: b}"))
    assert p.lines.requests.lo.tolist() == [0, 64 * 333, 64 * 666]
    check_lines(p)
    verify(p)
    sent = p.sent_bytes()
    assert (sent[0], sent[1]) == (512 * 500, 512 * 500)


def test_nothing_is_asked_for_nothing() -> None:
    p = plan(large(PAIR, "n h", 0), large(FAR, "n h {sum: b}", 0))
    assert list(p.transfers()) == [] and len(p.lines.requests) == len(p.local) == 0
