"""Mates: what idle ranks of a node send for its holders is what these have too much of, and arrives as it should."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from hypothesis import given

from shardmath import Layout, Mesh, Plan, Program, Topology, certify, plan, schedule, verify
from shardmath.plans.programs import scheduling
from shardmath.plans.programs.fanout import Way
from shardmath.plans.programs.loads import sum_pairs
from shardmath.plans.programs.mates import MateShares, add_mates, count_handed
from tests.property.drawn.programs import (
    PROGRAMS,
    all_rounds,
    carried_out,
    cut_anywhere,
    messages,
    nodes_of,
    programs_with_mates,
    stages,
    topologies,
    with_mates,
)

MIB = 1 << 20


def pipeline(layers: tuple[int, ...], copies: int = 2) -> Plan:
    """So many layers of 32 MiB on each rank of a node, to the next node, which divides each among some of its ranks."""
    wide = Mesh(dp=copies, tp=8 // copies, ranks=range(8, 16))
    src, dst = {}, {}
    for rank, count in enumerate(layers):
        for i in range(count):
            shape = 4096, 8192
            src[f"{rank}.{i}"] = Layout(shape, Mesh(pp=1, ranks=(rank,)), "n h", dtype="int8")
            dst[f"{rank}.{i}"] = Layout(shape, wide, "(tp n) h", dtype="int8")
    return plan(src, dst)


def sent_far(prog: Program) -> dict[int, int]:
    """By rank, the bytes that it sends to other nodes."""
    pairs = sum_pairs(prog)
    sums = np.bincount(pairs.sender, pairs.nbytes * pairs.far, minlength=len(prog.ranks))
    return dict(zip(prog.ranks, sums.astype(int).tolist(), strict=True))


def without_mates(p: Plan) -> Program:
    ways = tuple(way for way in scheduling.WAYS["auto"] if not way.mates)
    with mock.patch.dict(scheduling.WAYS, {"auto": ways}):
        return schedule(p, topology=Topology())


def test_the_last_stage_has_most() -> None:
    """Seven ranks have 30 layers, and one has 46: the bound is that of 32, and mates reach it."""
    p = pipeline((30, 30, 30, 30, 30, 30, 30, 46))
    prog, alone = schedule(p, topology=Topology()), without_mates(p)
    assert certify(alone).ratio > 1.4 and certify(prog).ratio < 1.02
    verify(prog)
    sent = sent_far(prog)
    assert all(sent[rank] == pytest.approx(32 * 32 * MIB, rel=1e-3) for rank in range(8))
    handed = [m for _, _, m in messages(all_rounds(prog), "sends") if m.is_handing]
    assert {m.src_rank for m in handed} == {7}
    assert sum(m.nbytes for m in handed) == pytest.approx(14 * 32 * MIB, rel=1e-2)


@pytest.mark.parametrize("layers", [(4,) * 8, (5,) * 4])
def test_mates_are_for_busy_holders_only(layers: tuple[int, ...]) -> None:
    """Stages that send alike need none."""
    p = pipeline(layers, copies=8)
    assert schedule(p, topology=Topology()).legs.mates is None


def test_no_mates_of_a_node_of_one_rank() -> None:
    assert with_mates(pipeline((9, 1)), nodes_of(1)) is None
    assert with_mates(pipeline((9, 1)), nodes_of(2)) is not None


def test_only_lines_that_have_mates_are_shed() -> None:
    """On nodes of two ranks, a line that both ranks hold has none; what rank 2 has too much of, rank 3 sends."""
    wide = Mesh(x=16, ranks=range(4, 20))
    src, dst = {}, {}
    for name, held in {"b": (0, 1), "c": (0, 1, 2), "d": (3,)}.items():
        shape = (16, 1) if name == "d" else (384, MIB)
        src[name] = Layout(shape, Mesh(a=len(held), ranks=held), "n h", dtype="int8")
        dst[name] = Layout(shape, wide, "(x n) h", dtype="int8")
    sent = sent_far(schedule(plan(src, dst), topology=Topology(ranks_per_node=2)))
    assert [sent[rank] // MIB for rank in range(4)] == [192] * 4


@given(stages(), topologies())
def test_no_rank_sends_more_than_before(p: Plan, where: Topology) -> None:
    """The fullest rank sends less over its links to other nodes, but for the rows at which lines are cut."""
    with cut_anywhere():
        prog = with_mates(p, where)
        if prog is None:
            return
        with mock.patch.dict(scheduling.WAYS, {"auto": (Way(by_node=True),)}):
            before = schedule(p, topology=where)
        row = 24 * len(prog.legs.lines.holders)
        assert max(sent_far(prog).values()) <= max(sent_far(before).values()) + row
        assert sum(sent_far(prog).values()) == sum(sent_far(before).values())


@given(programs_with_mates())
def test_what_is_handed_stays_on_the_node(prog: Program) -> None:
    """It goes from a holder to its mate, and on in the next slot, while both ranks have it within their limits."""
    per_node = prog.topology.ranks_per_node
    for _, _, m in messages(all_rounds(prog), "sends"):
        if m.is_handing:
            assert (
                m.src_rank // per_node == m.dst_rank // per_node != m.pieces[0].dst_rank // per_node
            )
    assert prog.turns == 1 and carried_out(prog)


def test_limits_that_mates_cannot_keep_are_kept_without_them() -> None:
    """Mates have one turn: with few messages in a round, nobody is a mate."""
    with cut_anywhere():
        p = PROGRAMS["mates"].plan
        prog = schedule(p, topology=nodes_of(4), max_ops_per_group=2)
    assert prog.legs.mates is None and prog.turns > 1


def test_shares_follow_the_cuts_of_their_lines() -> None:
    table = np.array([[0, 5, 1, 3], [0, 6, 1, 4], [2, 5, 2, 9]]).T
    given = MateShares(*table)
    assert count_handed(given, 3).tolist() == [7, 0, 9]
    assert count_handed(None, 2).tolist() == [0, 0]
    cut_first, cuts, mates = add_mates(
        np.array([0, 2, 4, 7]), np.array([0, 1, 0, 2, 0, 3, 4]), given
    )
    assert cut_first.tolist() == [0, 4, 6, 10]
    assert cuts.tolist() == [0, 1, 4, 8, 0, 2, 0, 3, 4, 13]
    assert mates.first.tolist() == [0, 2, 2, 3]
    assert (mates.rank.tolist(), mates.feeder.tolist()) == ([5, 6, 5], [1, 1, 2])
