"""Demands against brute force: who asks whom for which elements, and where they lie on the lines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Plan, Topology, plan, testing
from shardmath.plans.demands import Batch, Demands, gather_lines, list_receivers
from shardmath.plans.template import unit_addends
from shardmath.plans.units import SMALL, snap
from tests.property.drawn.plans import FORWARD

Ranks = tuple[int, ...]


class Asked(NamedTuple):
    """Elements lo..hi-1 of a unit of a batch, asked of the holders by the receivers; ordered as on the lines."""

    holders: Ranks
    near: bool
    receivers: Ranks
    addend: int
    batch: int
    order: int
    lo: int
    hi: int
    unit: int


# Brute force


def asked(batches: tuple[Batch, ...], topology: Topology | None) -> list[Asked]:
    """All that is asked, in order."""
    return sorted(x for b, batch in enumerate(batches) for x in asked_of(b, batch, topology))


def asked_of(b: int, batch: Batch, topology: Topology | None) -> Iterator[Asked]:
    t = batch.template
    here, there = list(t.holders), list(t.receivers)
    for unit, (k, c) in enumerate(zip(t.unit_class.tolist(), t.unit_cell.tolist(), strict=True)):
        holders = tuple(sorted(batch.src.ranks[i] for i in here[k]))
        addend = int(unit_addends(t)[unit]) if t.reduction.folded else 0
        for lo, hi, ranks in chosen(batch, unit, holders, [batch.dst.ranks[i] for i in there[c]]):
            for senders, near, receivers in by_node(holders, ranks, topology):
                yield Asked(
                    senders, near, receivers, addend, b, int(t.unit_order[unit]), lo, hi, unit
                )


def chosen(
    batch: Batch, unit: int, holders: Ranks, ranks: list[int]
) -> Iterator[tuple[int, int, Ranks]]:
    """(lo, hi, receivers): all of them; or of addends the one that has most holders, or each a stripe."""
    t, axes = batch.template, batch.template.reduction.chosen
    size = int(t.unit_size[unit])
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(ranks):
        at = t.dst.mesh.coords(batch.dst.position(rank))
        groups.setdefault(tuple(at[axis] for axis in axes), []).append(rank)
    addends = [tuple(groups[at]) for at in sorted(groups)]
    held = [len(set(group) & set(holders)) for group in addends]
    if max(held):
        addends = [addends[held.index(max(held))]]
    cuts = [*(snap(t, unit, size * j // len(addends)) for j in range(len(addends))), size]
    yield from (
        (lo, hi, group) for group, lo, hi in zip(addends, cuts, cuts[1:], strict=False) if lo < hi
    )


def by_node(
    holders: Ranks, ranks: Ranks, topology: Topology | None
) -> Iterator[tuple[Ranks, bool, Ranks]]:
    """(senders, whether on one node, receivers): receivers ask holders on their own node, if there are any."""
    own: dict[Ranks, list[int]] = {}
    for rank in ranks:
        near = tuple(h for h in holders if topology and topology.node(h) == topology.node(rank))
        own.setdefault(near, []).append(rank)
    yield from ((near or holders, bool(near), tuple(receivers)) for near, receivers in own.items())


def laid_out(batches: tuple[Batch, ...], rows: list[Asked]) -> dict[str, list[Any]]:
    """The columns of Demands, but for the cuts, as lists."""
    columns = (
        "holders",
        "near",
        "first",
        "receivers",
        "addend",
        "count",
        "nbytes",
        "start",
        "row_first",
    )
    out: dict[str, list[Any]] = {
        name: [] for name in (*columns, "batch", "unit", "lo", "hi", "at", "each")
    }
    for (holders, near), line in itertools.groupby(rows, key=lambda x: (x.holders, x.near)):
        out["holders"].append(holders)
        out["near"].append(near)
        out["first"].append(len(out["start"]))
        length = 0
        for (receivers, addend), block in itertools.groupby(
            line, key=lambda x: (x.receivers, x.addend)
        ):
            out["receivers"].append(receivers)
            out["addend"].append(addend)
            out["count"].append(sum(rank not in holders for rank in receivers))
            out["start"].append(length)
            out["row_first"].append(len(out["at"]))
            size = 0
            for row in block:
                batch = batches[row.batch]
                each = (row.hi - row.lo) * batch.template.src.itemsize
                for name, value in (
                    ("batch", row.batch),
                    ("unit", row.unit),
                    ("lo", row.lo),
                    ("hi", row.hi),
                ):
                    out[name].append(value)
                out["at"].append(size)
                out["each"].append(each)
                size += each * len(batch.names)
            out["nbytes"].append(size)
            length += size * out["count"][-1]
    out["first"].append(len(out["start"]))
    out["row_first"].append(len(out["at"]))
    return out


def columns_of(on: Demands) -> dict[str, list[Any]]:
    """The columns of Demands as lists, with ranks in place of the numbers of their sets."""
    names = (
        "near",
        "first",
        "addend",
        "count",
        "nbytes",
        "start",
        "row_first",
        "batch",
        "unit",
        "lo",
        "hi",
        "at",
        "each",
    )
    out = {name: getattr(on, name).tolist() for name in names}
    return out | {
        name: [on.sets[i] for i in getattr(on, name).tolist()] for name in ("holders", "receivers")
    }


def check_lines(p: Plan) -> None:
    on = gather_lines(p.batches, p.topology)
    assert columns_of(on) == laid_out(p.batches, asked(p.batches, p.topology))
    assert list(on.sets) == sorted(set(on.sets)) and all(
        ranks == tuple(sorted(set(ranks))) for ranks in on.sets
    )
    assert all(
        getattr(on, name).dtype == np.int64
        for name in Demands.__slots__
        if name not in ("sets", "near")
    )
    assert on.near.dtype == bool and len(on.cuts) == len(on.cut_first) == 0


topologies = st.one_of(st.none(), st.integers(1, 5).map(lambda n: Topology(ranks_per_node=n)))


@given(testing.pairs(), topologies, st.sampled_from([0, 16, SMALL]))
@example((Layout((0,), Mesh(), "n"), Layout((0,), Mesh(), "n")), Topology(ranks_per_node=1), 0)
def test_lines_are_what_is_asked(
    pair: tuple[Layout, ...], topology: Topology | None, small: int
) -> None:
    with mock.patch("shardmath.plans.units.SMALL", small):
        check_lines(plan(*pair, topology=topology))


@given(testing.trees(), topologies)
def test_lines_of_trees(
    tree: tuple[dict[str, Layout], dict[str, Layout]], topology: Topology | None
) -> None:
    check_lines(plan(*tree, topology=topology))


@pytest.mark.parametrize("name", FORWARD)
def test_lines_of_all_plans(name: str) -> None:
    with mock.patch("shardmath.plans.units.SMALL", 0):
        check_lines(FORWARD[name])


# Who asks


def large(mesh: Mesh, text: str, rows: int = 1000, columns: int = 64) -> Layout:
    """A matrix of float64: 512 bytes a row."""
    return Layout((rows, columns), mesh, text, dtype="float64")


def asks(
    src: Layout, dst: Layout, per_node: int | None = None
) -> list[tuple[Ranks, Ranks, int, int]]:
    """(holders, receivers, lo, hi) of every row."""
    on = plan(src, dst, topology=Topology(ranks_per_node=per_node) if per_node else None).lines
    block = np.repeat(np.arange(len(on.receivers)), np.diff(on.row_first))
    line = np.repeat(np.arange(len(on.holders)), np.diff(on.first))[block]
    ends = ([on.sets[i] for i in x.tolist()] for x in (on.holders[line], on.receivers[block]))
    return list(zip(*ends, on.lo.tolist(), on.hi.tolist(), strict=True))


PAIR, FAR = Mesh(a=2), Mesh(b=3, ranks=range(4, 7))
BOTH = (0, 1)


def test_of_sum_addends_the_one_that_holds_it_receives() -> None:
    halves = [((0,), (0,), 0, 32000), ((1,), (1,), 0, 32000)]
    assert asks(large(PAIR, "(a n) h"), large(PAIR, "n h {sum: a}")) == halves
    assert asks(large(PAIR, "n h"), large(PAIR, "n h {sum: a}")) == [(BOTH, (0,), 0, 64000)]
    ahead = Mesh(b=3, ranks=(7, 8, 1))
    assert asks(large(PAIR, "n h"), large(ahead, "n h {sum: b}")) == [(BOTH, (1,), 0, 64000)]


def test_of_sum_addends_that_hold_nothing_each_receives_a_stripe() -> None:
    stripes = [(0, 64 * 333), (64 * 333, 64 * 666), (64 * 666, 64000)]
    expected = [(BOTH, (4 + i,), lo, hi) for i, (lo, hi) in enumerate(stripes)]
    assert asks(large(PAIR, "n h"), large(FAR, "n h {sum: b}")) == expected
    assert asks(large(PAIR, "n h", 100), large(FAR, "n h {sum: b}", 100)) == [(BOTH, (6,), 0, 6400)]


def test_replicas_of_an_addend_all_receive() -> None:
    far = Mesh(b=2, c=2, ranks=range(4, 8))
    stripes = [(BOTH, (4, 5), 0, 32000), (BOTH, (6, 7), 32000, 64000)]
    assert asks(large(PAIR, "n h"), large(far, "n h {sum: b}")) == stripes


def test_a_replica_that_holds_it_decides_for_all() -> None:
    mixed = Mesh(b=2, c=2, ranks=(4, 5, 6, 1))
    assert asks(large(PAIR, "n h"), large(mixed, "n h {sum: b}")) == [(BOTH, (1, 6), 0, 64000)]


def test_the_addend_that_most_hold_receives() -> None:
    """Rank 0 is of the first addend, 1 and 2 are of the second; of as many holders the first addend is chosen."""
    three = Mesh(a=3)
    mixed = Mesh(b=2, c=2, ranks=(0, 5, 1, 2))
    assert asks(large(three, "n h"), large(mixed, "n h {sum: b}")) == [
        ((0, 1, 2), (1, 2), 0, 64000)
    ]
    even = Mesh(b=2, c=2, ranks=(5, 1, 2, 6))
    assert asks(large(three, "n h"), large(even, "n h {sum: b}")) == [((0, 1, 2), (1, 5), 0, 64000)]


def test_ranks_that_hold_the_same_are_one_line() -> None:
    """Tensors of all templates are on the line of their holders."""
    mesh, one = Mesh(a=2, b=2), Mesh(ranks=[9])
    src = {"u": Layout((4,), mesh, "(a n)"), "v": Layout((6, 2), mesh, "h (a n)")}
    on = plan(src, {"u": Layout((4,), one, "n"), "v": Layout((6, 2), one, "h n")}).lines
    assert [on.sets[i] for i in on.holders.tolist()] == [(0, 1), (2, 3)]
    assert on.nbytes.tolist() == [8 + 24] * 2 and on.at.tolist() == [0, 8] * 2


def test_tensors_that_move_alike_are_one_row() -> None:
    """However many there are; all of them follow each other."""
    src, dst = Layout((6,), Mesh(a=2), "(a n)"), Layout((6,), Mesh(ranks=[9]), "n")
    names = [f"w{i}" for i in range(50)]
    on = plan(dict.fromkeys(names, src), dict.fromkeys(names, dst)).lines
    assert (on.each.tolist(), on.nbytes.tolist(), len(on.batch)) == ([12, 12], [600, 600], 2)


def test_rows_do_not_grow_with_pairs_of_ranks() -> None:
    """64 senders and 64 receivers of which each of 8 parts goes to each of 8: 64 rows and 8 lines."""
    src = Layout((64, 64), Mesh(dp=8, tp=8), "(tp n) h")
    dst = Layout((64, 64), Mesh(dp=8, tp=8, ranks=range(64, 128)), "n (tp h)")
    on = plan(src, dst).lines
    assert (len(on.holders), len(on.receivers), len(on.batch), len(on.sets)) == (8, 64, 64, 16)
    assert set(on.count.tolist()) == {8}


def test_addends_that_are_folded_are_blocks_of_their_own() -> None:
    """Both addends are at rank 0 and 1 each; where a rank has several of them, they come in order."""
    on = plan(Layout((4,), PAIR, "n {sum: a}"), Layout((4,), FAR, "n")).lines
    assert (on.addend.tolist(), [on.sets[i] for i in on.holders.tolist()]) == ([0, 1], [(0,), (1,)])
    through = plan(Layout((4,), PAIR, "n {sum: a}"), Layout((4,), PAIR, "n {sum: a}")).lines
    assert through.addend.tolist() == [0, 0]


# Nodes


def test_receivers_ask_holders_on_their_own_node() -> None:
    """Nodes are 0..3 and 4..7: 5 asks 4, and 2 and 3 ask 1; without nodes all ask both."""
    held, wanted = large(Mesh(a=2, ranks=(1, 4)), "n h"), large(Mesh(b=3, ranks=(2, 3, 5)), "n h")
    assert asks(held, wanted) == [((1, 4), (2, 3, 5), 0, 64000)]
    assert asks(held, wanted, 4) == [((1,), (2, 3), 0, 64000), ((4,), (5,), 0, 64000)]


def test_receivers_without_a_holder_on_their_node_ask_all() -> None:
    """Nodes of two ranks: 2 and 3 are on one without holders."""
    held, wanted = large(Mesh(a=2, ranks=(1, 4)), "n h"), large(Mesh(b=3, ranks=(2, 3, 5)), "n h")
    assert asks(held, wanted, 2) == [((1, 4), (2, 3), 0, 64000), ((4,), (5,), 0, 64000)]
    on = plan(held, wanted, topology=Topology(ranks_per_node=2)).lines
    assert on.near.tolist() == [False, True]


def test_near_and_far_lines_of_the_same_holders() -> None:
    """Rank 3 alone holds it: 2 is on its node, 5 is not."""
    held, wanted = large(Mesh(ranks=[3]), "n h"), large(Mesh(b=2, ranks=(2, 5)), "n h")
    on = plan(held, wanted, topology=Topology(ranks_per_node=2)).lines
    assert [on.sets[i] for i in on.holders.tolist()] == [(3,), (3,)]
    assert on.near.tolist() == [False, True] and [on.sets[i] for i in on.receivers.tolist()] == [
        (5,),
        (2,),
    ]


def test_a_node_of_one_rank_is_no_node_at_all() -> None:
    """Nobody is near but the holders themselves, and they have it already."""
    held, wanted = large(PAIR, "n h"), large(Mesh(b=3, ranks=(1, 2, 3)), "n h")
    assert asks(held, wanted, 1) == [((0, 1), (2, 3), 0, 64000), ((1,), (1,), 0, 64000)]
    on = plan(held, wanted, topology=Topology(ranks_per_node=1)).lines
    assert (on.near.tolist(), on.count.tolist()) == ([False, True], [2, 0])


def test_one_node_is_no_nodes_at_all() -> None:
    held, wanted = large(PAIR, "(a n) h"), large(FAR, "n (b h)")
    apart, together = (asks(held, wanted, n) for n in (None, 100))
    assert apart == together


# Who copies


def test_receivers_that_hold_it_are_not_on_the_line() -> None:
    on = plan(large(PAIR, "n h"), large(Mesh(b=3, ranks=(1, 2, 5)), "n h")).lines
    assert (on.sets[on.holders[0]], on.sets[on.receivers[0]], on.count.tolist()) == (
        (0, 1),
        (1, 2, 5),
        [2],
    )
    assert list_receivers(on, 0, 0) == (2, 5)
    (only,) = plan(large(PAIR, "n h"), large(PAIR, "n h")).lines.count.tolist()
    assert only == 0


@given(testing.pairs(), topologies)
def test_the_wire_is_all_who_do_not_hold_it(
    pair: tuple[Layout, ...], topology: Topology | None
) -> None:
    on = plan(*pair, topology=topology).lines
    for line in range(len(on.holders)):
        for block in range(int(on.first[line]), int(on.first[line + 1])):
            held, ranks = on.sets[on.holders[line]], on.sets[on.receivers[block]]
            assert list_receivers(on, line, block) == tuple(
                rank for rank in ranks if rank not in held
            )


def test_no_rows() -> None:
    """Nothing to move, or tensors without elements, with and without nodes."""
    empty = large(PAIR, "n h", 0), large(FAR, "n h {sum: b}", 0)
    for topology in (None, Topology()):
        for p in (plan(*empty, topology=topology), plan({}, {}, topology=topology)):
            check_lines(p)
            assert len(p.lines.batch) == len(p.lines.holders) == 0 and p.lines.first.tolist() == [0]


def test_addends_to_choose_from_beside_tensors_without_any() -> None:
    """A template whose destination may choose an addend comes first; those after it are on the lines too."""
    one, many = Mesh(), Mesh(a=2, ranks=(1, 2))
    names = {"a": "n {sum: a}", "b": "(a n)", "c": "n"}
    p = plan(
        {k: Layout((4,), one, "n") for k in names},
        {k: Layout((4,), many, text) for k, text in names.items()},
    )
    check_lines(p)
    assert sum(p.received_bytes().values()) == 16 + 2 * 8 + 2 * 16
