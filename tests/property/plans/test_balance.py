"""Balance against brute force: given shares, where lines are cut, who sends what to whom, and what that adds up to."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Plan, Table, Topology, plan, testing, verify
from shardmath.layouts.algebra.runs import from_ranges
from shardmath.plans.balance import (
    Cutter,
    balance,
    make_grid,
    measure_lines,
    measure_uncut,
)
from shardmath.plans.demands import Batch, Demands, gather_lines, list_receivers
from shardmath.plans.stretches import (
    Stretch,
    list_kept,
    list_received,
    list_sent,
    row_at,
    sum_received,
    sum_sent,
)
from shardmath.plans.units import SMALL, snap
from shardmath.testing import plan_laws as laws
from tests.property.drawn.plans import FORWARD

Ranks = tuple[int, ...]


def large(mesh: Mesh, text: str, rows: int = 1000, columns: int = 64) -> Layout:
    """A matrix of float64: 512 bytes a row."""
    return Layout((rows, columns), mesh, text, dtype="float64")


PAIR, FAR = Mesh(a=2), Mesh(b=3, ranks=range(4, 7))
topologies = st.one_of(st.none(), st.integers(1, 5).map(lambda n: Topology(ranks_per_node=n)))


def blocks_of(on: Demands, line: int) -> range:
    return range(int(on.first[line]), int(on.first[line + 1]))


def rows_of(on: Demands, block: int) -> range:
    return range(int(on.row_first[block]), int(on.row_first[block + 1]))


def held_by(on: Demands, line: int) -> tuple[int, ...]:
    return on.sets[on.holders[line]]


def cuts_of(on: Demands, line: int) -> list[int]:
    return on.cuts[on.cut_first[line] : on.cut_first[line + 1]].tolist()


# Where lines are cut


class Drawn:
    """Shares drawn at random, and what was asked for."""

    def __init__(self, data: st.DataObject) -> None:
        self.data, self.calls, self.given = data, [], []

    def __call__(
        self, lengths: list[int], holders: list[Ranks], nodes: dict[int, int] | None
    ) -> list[list[int]]:
        self.calls.append((lengths, holders, nodes))
        cuts = [self.cuts(length, len(held)) for length, held in zip(lengths, holders, strict=True)]
        self.given += [cuts]
        return [[b - a for a, b in itertools.pairwise(line)] for line in cuts]

    def cuts(self, length: int, count: int) -> list[int]:
        inner = st.lists(st.integers(0, length), min_size=count - 1, max_size=count - 1)
        return [0, *sorted(self.data.draw(inner)), length]


def content_places(on: Demands, batches: tuple[Batch, ...], block: int) -> list[int]:
    """Where the content of a block may be cut: where a tensor of a row begins, or a piece of it."""
    out = []
    for row in rows_of(on, block):
        batch, unit, lo, hi = (
            batches[on.batch[row]],
            int(on.unit[row]),
            int(on.lo[row]),
            int(on.hi[row]),
        )
        inner = {
            lo,
            *(x for x in (snap(batch.template, unit, at) for at in range(lo, hi)) if x > lo),
        }
        starts = [(x - lo) * batch.template.src.itemsize for x in sorted(inner)]
        begin, each = int(on.at[row]), int(on.each[row])
        out += [begin + k * each + x for k in range(len(batch.names)) for x in starts]
    return out


def line_places(on: Demands, batches: tuple[Batch, ...], line: int) -> list[int]:
    """Where a line may be cut: where a receiver's content may be, and at its ends."""
    out = {0, int(measure_lines(on)[line])}
    for block in blocks_of(on, line):
        begin, each, places = (
            int(on.start[block]),
            int(on.nbytes[block]),
            content_places(on, batches, block),
        )
        out |= {begin + j * each + x for j in range(int(on.count[block])) for x in places}
    return sorted(out)


def last(places: list[int], at: int) -> int:
    return max(x for x in places if x <= at)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    return plan(*draw(testing.trees()), topology=draw(topologies))


@given(plans(), st.sampled_from([0, 16, SMALL]), st.data())
def test_cuts_are_the_last_places_before_the_shares(
    p: Plan, small: int, data: st.DataObject
) -> None:
    with mock.patch("shardmath.plans.units.SMALL", small):
        on, shares = gather_lines(p.batches, p.topology), Drawn(data)
        with mock.patch("shardmath.plans.balance.shares", shares):
            cut = balance(on, p.batches, p.topology)
        asked = given_to(on, shares)
        for line in range(len(on.holders)):
            places = line_places(on, p.batches, line)
            assert cuts_of(cut, line) == [last(places, at) for at in asked[line]]
            assert len(cuts_of(cut, line)) == len(held_by(on, line)) + 1
    columns = [name for name in Demands.__slots__ if "cut" not in name]
    assert all(getattr(cut, name) is getattr(on, name) for name in columns)
    assert cut.cuts.dtype == cut.cut_first.dtype == np.int64


def kinds(on: Demands) -> list[list[int]]:
    """The lines that are far, and those that are near, where there are any."""
    out = [
        [line for line, near in enumerate(on.near.tolist()) if near == wanted]
        for wanted in (False, True)
    ]
    return [some for some in out if some]


def given_to(on: Demands, shares: Drawn) -> dict[int, list[int]]:
    """Where each line is cut, if its holders have a choice."""
    out = {line: [0, int(length)] for line, length in enumerate(measure_lines(on))}
    if shares.given:
        out |= {
            i: cuts
            for some, given in zip(kinds(on), shares.given, strict=True)
            for i, cuts in zip(some, given, strict=True)
        }
    return out


@given(plans(), st.data())
def test_shares_are_asked_for_once(p: Plan, data: st.DataObject) -> None:
    """All far lines together, with the node of every holder; near ones together, without nodes; none without need."""
    on, shares = gather_lines(p.batches, p.topology), Drawn(data)
    with mock.patch("shardmath.plans.balance.shares", shares):
        balance(on, p.batches, p.topology)
    held = [held_by(on, line) for line in range(len(on.holders))]
    nodes = (
        {rank: p.topology.node(rank) for ranks in held for rank in ranks} if p.topology else None
    )
    expected = [
        (
            [int(measure_lines(on)[i]) for i in some],
            [held[i] for i in some],
            None if on.near[some[0]] else nodes,
        )
        for some in kinds(on)
    ]
    assert shares.calls == (expected if any(len(ranks) > 1 for ranks in held) else [])


@given(plans(), st.sampled_from([0, 16, SMALL]), st.data())
def test_contents_are_cut_at_the_last_place(p: Plan, small: int, data: st.DataObject) -> None:
    on = p.lines
    with mock.patch("shardmath.plans.units.SMALL", small):
        make_grid.cache_clear()
        cutter, together = Cutter(on, p.batches), make_grid(on, p.batches)
        for block in range(len(on.receivers)):
            places = content_places(on, p.batches, block)
            some = data.draw(st.lists(st.integers(0, int(on.nbytes[block]) - 1), max_size=20))
            expected = [last(places, at) for at in some]
            assert [cutter.of_block(block, at) for at in some] == expected
            assert (
                together.snapped(np.full(len(some), block), np.array(some, np.int64)).tolist()
                == expected
            )


@given(plans(), st.sampled_from([0, 16, SMALL]), st.data())
def test_lines_are_cut_at_the_last_place(p: Plan, small: int, data: st.DataObject) -> None:
    on = p.lines
    with mock.patch("shardmath.plans.units.SMALL", small):
        cutter = Cutter(on, p.batches)
        for line in range(len(on.holders)):
            places = line_places(on, p.batches, line)
            for at in data.draw(
                st.lists(st.integers(0, int(measure_lines(on)[line])), max_size=20)
            ):
                assert cutter.of_line(line, at) == last(places, at)


@given(plans(), st.sampled_from([0, SMALL]))
def test_what_no_cut_divides(p: Plan, small: int) -> None:
    """Of each row of the lines: the longest way from one place where its content may be cut to the next."""
    on = p.lines
    with mock.patch("shardmath.plans.units.SMALL", small):
        found = measure_uncut(on, p.batches).tolist()
        for block in range(len(on.receivers)):
            places = np.array([*content_places(on, p.batches, block), int(on.nbytes[block])])
            for row in rows_of(on, block):
                begin, end = int(on.at[row]), int(on.at[row]) + int(on.each[row])
                longest = max(np.diff(places[(begin <= places) & (places <= end)]))
                unit = p.batches[on.batch[row]].template.unit_size[on.unit[row]]
                assert found[row] == (longest if on.hi[row] - on.lo[row] == unit else 0)


@given(plans())
def test_the_row_of_a_byte(p: Plan) -> None:
    on = p.lines
    for block in range(len(on.receivers)):
        for at in range(int(on.nbytes[block])):
            assert row_at(on, block, at) == max(
                row for row in rows_of(on, block) if on.at[row] <= at
            )


def test_large_boxes_are_cut_at_rows_and_small_ones_not_at_all() -> None:
    """1000 rows of 512 B between three; 128 rows, 64 KiB, stay whole."""
    three = Mesh(a=3)
    assert cuts_of(plan(large(three, "n h"), large(Mesh(ranks=[9]), "n h")).lines, 0) == [
        *(512 * x for x in (0, 333, 666, 1000)),
    ]
    assert cuts_of(plan(large(three, "n h", 128), large(Mesh(ranks=[9]), "n h", 128)).lines, 0) == [
        0,
        0,
        0,
        65536,
    ]
    assert cuts_of(plan(large(three, "n h", 129), large(Mesh(ranks=[9]), "n h", 129)).lines, 0) == [
        *(512 * x for x in (0, 43, 86, 129)),
    ]


@pytest.mark.parametrize("names", [1, 3])
def test_large_tensors_are_striped(names: int) -> None:
    src = {f"w{i}": large(Mesh(a=3), "n h") for i in range(names)}
    dst = {f"w{i}": large(Mesh(b=2, ranks=(7, 5)), "n h") for i in range(names)}
    p = plan(src, dst)
    verify(p)
    loads = list(p.sent_bytes().values())[:3]
    assert sum(loads) == names * 2 * 512000 and max(loads) - min(loads) <= 1024
    whole = 2 * names * 1000
    assert p.lines.cuts.tolist() == [0, *(512 * (whole * j // 3) for j in (1, 2)), 512 * whole]


def test_cuts_inside_stripes() -> None:
    """Two holders, three addends of which each receives a stripe: stripes begin inside the unit."""
    p = plan(large(PAIR, "n h"), large(FAR, "n h {sum: b}"))
    assert p.lines.lo.tolist() == [0, 64 * 333, 64 * 666]
    assert p.lines.cuts.tolist() == [0, 512 * 500, 512 * 1000]
    verify(p)
    assert [p.sent_bytes()[r] for r in (0, 1)] == [512 * 500, 512 * 500]


# Who sends what to whom


def stretches(on: Demands) -> list[Stretch]:
    """All that goes from rank to rank, by line, block, receiver and sender."""
    out = []
    for line in range(len(on.holders)):
        shares = list(zip(held_by(on, line), itertools.pairwise(cuts_of(on, line)), strict=True))
        for block in blocks_of(on, line):
            each = int(on.nbytes[block])
            for j, receiver in enumerate(list_receivers(on, line, block)):
                begin = int(on.start[block]) + j * each
                ends = [(h, max(a - begin, 0), min(b - begin, each)) for h, (a, b) in shares]
                out += [Stretch(block, h, receiver, lo, hi) for h, lo, hi in ends if lo < hi]
    return out


def local(on: Demands) -> list[Stretch]:
    """All that stays where it is."""
    pairs = [(line, block) for line in range(len(on.holders)) for block in blocks_of(on, line)]
    both = [
        (block, set(held_by(on, line)) & set(on.sets[on.receivers[block]])) for line, block in pairs
    ]
    return [
        Stretch(block, rank, rank, 0, int(on.nbytes[block]))
        for block, ranks in both
        for rank in sorted(ranks)
    ]


def check_stretches(p: Plan) -> None:
    """Every rank's own lists are its part of all of them; both ends of a pair have them in one order."""
    on, there, here = p.lines, stretches(p.lines), local(p.lines)
    for rank in (*p.ranks, 10**6):
        assert list(list_kept(on, rank)) == [x for x in here if x.receiver == rank]
        assert list(list_received(on, rank)) == [x for x in there if x.receiver == rank]
        assert sorted(list_sent(on, rank)) == sorted(x for x in there if x.sender == rank)
        for other in p.ranks:
            ours = [x for x in list_sent(on, rank) if x.receiver == other]
            assert ours == [x for x in list_received(on, other) if x.sender == rank]
    asked = [on.count[block] * on.nbytes[block] for block in range(len(on.receivers))]
    assert sum(x.hi - x.lo for x in there) == sum(asked) == measure_lines(on).sum()


@given(plans(), st.sampled_from([0, 16, SMALL]))
def test_everybody_finds_its_part(p: Plan, small: int) -> None:
    with mock.patch("shardmath.plans.units.SMALL", small):
        check_stretches(plan(p.src, p.dst, topology=p.topology))


@pytest.mark.parametrize("name", FORWARD)
def test_everybody_finds_its_part_of_all_plans(name: str) -> None:
    check_stretches(FORWARD[name])


@given(plans(), st.data())
def test_wherever_lines_are_cut(p: Plan, data: st.DataObject) -> None:
    """At any byte, and holders may have nothing at all to send."""
    shares = Drawn(data)
    on = p.lines
    cuts = [
        shares.cuts(int(measure_lines(on)[line]), len(held_by(on, line)))
        for line in range(len(on.holders))
    ]
    check_stretches(
        replace(p, lines=replace(on, cuts=np.array(list(itertools.chain(*cuts)), np.int64)))
    )


def test_stretches_of_two_receivers() -> None:
    """Three senders, two receivers: the second sender ends the first receiver's and begins the second's."""
    p = plan(large(Mesh(a=3), "n h", 300), large(Mesh(b=2, ranks=(8, 9)), "n h", 300))
    row = 512
    assert stretches(p.lines) == [
        Stretch(0, 0, 8, 0, 200 * row),
        Stretch(0, 1, 8, 200 * row, 300 * row),
        Stretch(0, 1, 9, 0, 100 * row),
        Stretch(0, 2, 9, 100 * row, 300 * row),
    ]
    assert list(list_sent(p.lines, 1)) == stretches(p.lines)[1:3]
    assert list(list_received(p.lines, 9)) == stretches(p.lines)[2:]


# Loads


@given(plans(), st.sampled_from([0, SMALL]))
def test_loads_are_what_goes_from_rank_to_rank(p: Plan, small: int) -> None:
    with mock.patch("shardmath.plans.units.SMALL", small):
        p = plan(p.src, p.dst, topology=p.topology)
    out, into = Counter(), Counter()
    for x in stretches(p.lines):
        out[x.sender] += x.hi - x.lo
        into[x.receiver] += x.hi - x.lo
    assert Counter(sum_sent(p.lines)) == out and Counter(sum_received(p.lines)) == into
    assert all(
        type(x) is int
        for loads in (sum_sent(p.lines), sum_received(p.lines))
        for x in loads.items()
        for x in x
    )
    assert p.sent_bytes() == {rank: out[rank] for rank in p.ranks}
    assert p.received_bytes() == {rank: into[rank] for rank in p.ranks}


def test_loads_are_even_over_all_lines_together() -> None:
    """Rank 0 alone has the first half; the second, which 1 has too, is sent by 1."""
    held = Table(0, (from_ranges([(0, 1000)]), from_ranges([(500, 1000)])))
    p = plan(Layout((1000, 64), PAIR, {"a": held}, dtype="float64"), large(Mesh(ranks=[9]), "n h"))
    assert p.sent_bytes() == {0: 512 * 500, 1: 512 * 500, 9: 0}


# Nodes


def test_what_a_node_has_does_not_leave_another() -> None:
    """Ranks 0 and 4 hold it; of 1, 2, 5 and 8 only 8 asks across, and both may send it half."""
    held, wanted = (
        large(Mesh(a=2, ranks=(0, 4)), "n h"),
        large(Mesh(b=4, ranks=(1, 2, 5, 8)), "n h"),
    )
    p = plan(held, wanted, topology=Topology(ranks_per_node=4))
    pairs = Counter((x.sender, x.receiver) for x in stretches(p.lines))
    assert set(pairs) == {(0, 1), (0, 2), (4, 5), (0, 8), (4, 8)}
    far = [x for x in stretches(p.lines) if x.receiver == 8]
    assert [(x.sender, x.hi - x.lo) for x in far] == [(0, 256000), (4, 256000)]
    assert p.sent_bytes() == {0: 2 * 512000 + 256000, 1: 0, 2: 0, 4: 512000 + 256000, 5: 0, 8: 0}
    verify(p)


@given(plans())
def test_nobody_asks_across_for_what_its_node_has(p: Plan) -> None:
    if p.topology is None:
        return
    on, node = p.lines, p.topology.node
    for x in stretches(on):
        line = int(np.searchsorted(on.first, x.block, "right")) - 1
        if on.near[line]:
            assert {node(rank) for rank in held_by(on, line)} == {node(x.receiver)}
        else:
            assert node(x.receiver) not in {node(rank) for rank in held_by(on, line)}


# Laws where every row is a cut


@pytest.mark.parametrize(
    "law",
    [
        laws.plan_is_proved,
        laws.plan_moves_the_tensor,
        laws.ends_agree,
        laws.spelling_is_not_meaning,
        laws.relabeling_commutes,
    ],
)
def test_laws_of_plans_where_every_row_is_a_cut(law: Callable[..., None]) -> None:
    @given(testing.pairs())
    def check(pair: tuple[Layout, ...]) -> None:
        with mock.patch("shardmath.plans.units.SMALL", 0):
            law(*pair)

    check()


def test_trees_where_every_row_is_a_cut() -> None:
    @given(testing.trees())
    def check(tree: tuple[dict[str, Layout], dict[str, Layout]]) -> None:
        with mock.patch("shardmath.plans.units.SMALL", 0):
            laws.trees_are_their_tensors(tree)

    check()


def test_windows_where_every_row_is_a_cut() -> None:
    @given(st.data(), testing.pairs(ops=(None,)))
    def check(data: st.DataObject, pair: tuple[Layout, ...]) -> None:
        with mock.patch("shardmath.plans.units.SMALL", 0):
            laws.windows_are_their_union(data, *pair)

    check()


# Nothing, and next to nothing


def test_a_tensor_of_no_elements_beside_others() -> None:
    """A template without classes once shifted the cuts of all lines after it."""
    m, k = Mesh(x=2), Mesh(x=2, ranks=(2, 3))
    p = plan(
        {"w": Layout((4,), m, "(x n)"), "e": Layout((0,), m, "(x n)")},
        {"w": Layout((4,), k, "(x n)"), "e": Layout((0,), k, "(x n)")},
    )
    check_stretches(p)
    assert [(t.src_rank, t.dst_rank) for t in p.transfers()] == [(0, 2), (1, 3)]


def test_nothing_is_asked_for_nothing() -> None:
    p = plan(large(PAIR, "n h", 0), large(FAR, "n h {sum: b}", 0))
    assert list(p.transfers()) == [] and len(p.lines.batch) == 0
    assert (p.lines.cut_first.tolist(), len(p.lines.cuts)) == ([0], 0)
    assert sum_sent(p.lines) == sum_received(p.lines) == {} and len(measure_lines(p.lines)) == 0


def test_a_line_on_which_nothing_is_sent() -> None:
    """All receivers are holders: a line of no bytes, cut into nothing."""
    p = plan(large(PAIR, "n h"), large(PAIR, "n h"))
    assert cuts_of(p.lines, 0) == [0, 0, 0] and stretches(p.lines) == []
    assert sum_sent(p.lines) == sum_received(p.lines) == {0: 0, 1: 0}
    check_stretches(p)
