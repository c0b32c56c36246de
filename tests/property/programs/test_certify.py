"""Certificates of programs: what has to move, element by element; the bound below every program's own figure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import (
    Layout,
    Mesh,
    Plan,
    PlanError,
    Program,
    Topology,
    Transfer,
    adjoint,
    certify,
    crossing_bytes,
    plan,
    schedule,
)
from shardmath.display.pictures.text import show
from shardmath.display.traces.model import model
from shardmath.layouts.edits import window
from shardmath.plans.flows.bound import find_bound
from shardmath.plans.programs.certify import list_blocks
from shardmath.plans.programs.scheduling import as_planned
from tests.property.drawn.plans import chosen_axes, folded_axes, passing, place
from tests.property.drawn.programs import (
    FANOUTS,
    PROGRAMS,
    all_rounds,
    cut_anywhere,
    messages,
    plans,
    programs,
    sides,
    topologies,
)


@pytest.fixture(autouse=True)
def _small_tensors_are_cut() -> Iterator[None]:
    with cut_anywhere():
        yield


# What has to be where, element by element

Key = tuple[tuple[int, ...], tuple[int, ...], int, int]


def elements(layout: Layout, rank: int) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(i[i >= 0].tolist() for i in layout.indices(rank)))


def expected_blocks(p: Plan) -> Counter[Key]:
    """Bytes by holders, receivers, addend, and whether it is one of several that are folded.

    Windows of a destination that overlap count in the first that has the element; where any one addend of the
    destination may receive, nothing has to.
    """
    out: Counter[Key] = Counter()
    for name, windows in p.src.items():
        if any(chosen_axes(p, name, j) for j in range(len(p.dst[name]))):
            continue
        for holders, receivers, addend, folded in _elements(p, name):
            out[tuple(sorted(holders)), tuple(sorted(receivers)), addend, folded] += windows[
                0
            ].itemsize
    return out


def _elements(p: Plan, name: str) -> Iterator[tuple[set[int], set[int], int, int]]:
    """Holders and receivers of each addend of each element, addends that pass through being elements of their own."""
    src, dst = p.src[name][0], p.dst[name][0]
    folded, through = folded_axes(src, dst), passing(src, dst)
    count = math.prod(src.mesh.axis_size(axis) for axis in folded)
    held: dict[Any, set[int]] = {}
    needed: dict[Any, set[int]] = {}
    for layout in p.src[name]:
        for rank in layout.mesh.ranks:
            at = place(layout.mesh, rank, folded), place(layout.mesh, rank, list(through))
            for e in elements(layout, rank):
                held.setdefault((e, *at), set()).add(rank)
    for layout in p.dst[name]:
        for rank in layout.mesh.ranks:
            at = place(layout.mesh, rank, list(through.values()))
            for e in elements(layout, rank):
                needed.setdefault((e, at), set()).add(rank)
    for (e, at), receivers in needed.items():
        for addend in range(count):
            yield held[e, addend, at], receivers, addend, int(count > 1)


def found_blocks(p: Plan) -> Counter[Key]:
    out: Counter[Key] = Counter()
    for block in list_blocks(p):
        out[block.holders, block.receivers, block.addend, block.group] += block.nbytes
    return out


@given(sides(), st.one_of(st.none(), topologies()))
def test_blocks_are_those_of_elements(pair: Any, where: Topology | None) -> None:
    """Whatever the plan's topology: blocks are of the layouts."""
    p = plan(*pair, topology=where)
    assert merged(found_blocks(p)) == merged(expected_blocks(p))


def merged(found: Counter[Key]) -> Counter[Key]:
    """Blocks of the first addend may share rows with tensors that are not folded."""
    out: Counter[Key] = Counter()
    for (holders, receivers, addend, _), nbytes in found.items():
        out[holders, receivers, addend, 0] += nbytes
    return out


def test_windows_that_overlap_are_counted_once() -> None:
    """Elements that two windows of a destination have are needed once; nothing is known of the second then."""
    src, dst = (
        Layout((8,), Mesh(), "n", dtype="int8"),
        Layout((8,), Mesh(x=2, ranks=(1, 2)), "n", dtype="int8"),
    )
    twice = tuple(window(dst, ((lo, hi),)) for lo, hi in ((0, 5), (3, 8)))
    assert found_blocks(plan({"w": src}, {"w": twice})) == {((0,), (1, 2), 0, 0): 5}
    apart = tuple(window(dst, ((lo, hi),)) for lo, hi in ((0, 5), (5, 8)))
    assert found_blocks(plan({"w": src}, {"w": apart})) == {((0,), (1, 2), 0, 0): 8}


def test_addends_are_of_one_group() -> None:
    src, dst = (
        Layout((4,), Mesh(a=2), "n {sum: a}", dtype="int8"),
        Layout((4,), Mesh(x=2), "(x n)", dtype="int8"),
    )
    assert found_blocks(plan(src, dst)) == {
        ((a,), (x,), a, 1): 2 for a, x in itertools.product(range(2), range(2))
    }


# The bound


def bound_is_below(prog: Program) -> None:
    """No program is faster than its bound, and its witness shows why."""
    found = certify(prog)
    assert 0 <= found.bound_s <= found.plan_s * (1 + 1e-9) and found.ratio >= 1
    assert (found.bound_s, found.witness) == find_bound(
        list_blocks(prog.plan), prog.ranks, prog.topology
    )
    if found.witness:
        assert found.bound_s == pytest.approx(
            found.witness.nbytes / found.witness.bytes_per_s + prog.topology.latency_s, rel=1e-9
        )


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_bound_is_below(name: str) -> None:
    bound_is_below(PROGRAMS[name])


@given(programs())
def test_the_bound_is_below_all_programs(prog: Program) -> None:
    bound_is_below(prog)


@given(plans(), topologies())
def test_the_bound_does_not_depend_on_the_program(p: Plan, where: Topology) -> None:
    assert (
        len({certify(schedule(p, topology=where, fanout=fanout)).bound_s for fanout in FANOUTS})
        == 1
    )


# Known figures


def layouts(shape: tuple[int, ...], src: tuple[Mesh, str], dst: tuple[Mesh, str]) -> Plan:
    return plan(*(Layout(shape, mesh, text, dtype="bfloat16") for mesh, text in (src, dst)))


BIG = (1 << 14, 1 << 15)
"""1 GiB of bfloat16."""


def test_nothing_moves() -> None:
    for name in ("nothing moves", "no elements"):
        found = certify(PROGRAMS[name])
        assert (found.bound_s, found.plan_s, found.ratio, found.witness) == (0.0, 0.0, 1.0, None)
    assert str(found) == "0 s; nothing has to move"


@pytest.mark.parametrize(
    ("src", "dst", "ranks_per_node", "nbytes"),
    [
        ((Mesh(a=2), "(a n) h"), (Mesh(x=2, ranks=(2, 3)), "(x n) h"), 1, 1 << 29),
        ((Mesh(a=4), "(a n) h"), (Mesh(x=8, ranks=range(8, 16)), "(x n) h"), 4, 1 << 28),
        ((Mesh(a=8), "(a n) h"), (Mesh(x=4, ranks=range(8, 12)), "(x n) h"), 8, 1 << 28),
        ((Mesh(a=8), "(a n) h"), (Mesh(x=8, ranks=range(8, 16)), "n (x h)"), 8, 1 << 27),
        ((Mesh(a=4), "(a n) h"), (Mesh(x=4, ranks=range(4, 8)), "n (x h)"), 1, 1 << 28),
    ],
)
def test_one_round_is_as_fast_as_can_be(
    src: Any, dst: Any, ranks_per_node: int, nbytes: int
) -> None:
    """Disjoint ranks, nothing replicated: what the fullest rank sends or receives crosses its link once."""
    where = Topology(ranks_per_node=ranks_per_node)
    found = certify(schedule(layouts(BIG, src, dst), topology=where, max_inflight_bytes=1 << 33))
    assert found.ratio == pytest.approx(1, abs=1e-9) and found.plan_s == pytest.approx(
        nbytes / 50e9 + 1e-5
    )
    assert (
        found.witness is not None
        and found.witness.nbytes / found.witness.bytes_per_s == nbytes / 50e9
    )


def test_inside_a_node_nvlink_counts() -> None:
    """Halves change places; with nowhere else to go they cross in one round at 450 GB/s."""
    p = layouts(BIG, (Mesh(a=2), "(a n) h"), (Mesh(a=2, ranks=(1, 0)), "(a n) h"))
    found = certify(schedule(p, topology=Topology(ranks_per_node=2), max_inflight_bytes=1 << 33))
    assert found.ratio == 1 and found.plan_s == pytest.approx((1 << 29) / 450e9 + 1e-5)


@pytest.mark.parametrize("nodes", [2, 3, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("sources", [1, 2])
def test_receivers_pass_on_to_each_other(sources: int, nodes: int) -> None:
    """1 GiB to many nodes of one GPU: without relays, `nodes / sources` times the bound."""
    p = layouts(
        BIG, (Mesh(a=sources), "(a n) h"), (Mesh(x=nodes, ranks=range(2, 2 + nodes)), "n h")
    )
    where = Topology(ranks_per_node=1)
    assert certify(schedule(p, topology=where, max_inflight_bytes=1 << 40)).ratio < 1.06
    alone = certify(schedule(p, topology=where, max_inflight_bytes=1 << 40, fanout="none")).ratio
    assert alone == pytest.approx(nodes / sources if nodes > sources else 1, rel=1e-3)


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_nodes_share_what_they_get(nodes: int) -> None:
    """1 GiB to nodes of 8, each of whose NICs takes in an eighth: NVLink hides behind them, but for the last slot."""
    p = layouts(
        BIG, (Mesh(a=8), "(a n) h"), (Mesh(x=8 * nodes, ranks=range(8, 8 + 8 * nodes)), "n h")
    )
    found = certify(schedule(p, topology=Topology(), max_inflight_bytes=1 << 40))
    assert found.ratio < 1.2
    assert (
        found.witness is not None
        and found.witness.nbytes == 1 << 30
        and found.witness.bytes_per_s == 400e9
    )


def test_a_reduction_may_be_slower_than_its_bound() -> None:
    """The bound takes one combined addend for all; a plan sends every addend to where it is added."""
    p = layouts(BIG, (Mesh(a=2), "n h {sum: a}"), (Mesh(x=2, ranks=range(8, 10)), "(x n) h"))
    found = certify(schedule(p, topology=Topology(), max_inflight_bytes=1 << 40))
    assert found.witness is not None and found.witness.nbytes == 1 << 30 and found.ratio > 2 - 1e-6


def test_a_choice_asks_for_nothing() -> None:
    """Whichever addend of a Partial destination receives, no cut shows that bytes must move there."""
    found = certify(PROGRAMS["to sum"])
    assert (found.bound_s, found.witness) == (0.0, None) and found.ratio == math.inf


def test_what_is_no_program(fails) -> None:
    p = plan(Layout((8,), Mesh(), "n"), Layout((8,), Mesh(x=2), "n"))
    back = adjoint(p)
    what = "is not a plan or a Program; give what plan(src, dst) or schedule(plan) returns"
    fails(lambda: certify(back), PlanError, f"{back!r} {what}")
    fails(lambda: crossing_bytes("plan"), PlanError, f"'plan' {what}")


# Plans as they are


def crossing(p: Plan | Program, per_node: int) -> int:
    """Bytes between nodes, transfer by transfer."""
    plain = p.transfers() if isinstance(p, Plan) else _sent(p)
    far = (t for t in plain if t.src_rank // per_node != t.dst_rank // per_node)
    return sum(t.nbytes for t in far)


def _sent(prog: Program) -> Iterator[Transfer]:
    return (t for _, _, m in messages(all_rounds(prog), "sends") for t in m.pieces)


@given(plans(), topologies())
def test_a_plan_has_the_certificate_of_what_it_does(p: Plan, where: Topology) -> None:
    own = as_planned(p, where)
    assert certify(p, topology=where) == certify(own) == certify(own, topology=where)
    assert (
        crossing_bytes(p, topology=where)
        == crossing_bytes(own)
        == crossing(p, where.ranks_per_node)
    )
    for fanout in ("none", "node"):
        prog = schedule(p, topology=where, fanout=fanout)
        assert crossing_bytes(prog) == crossing(prog, where.ranks_per_node)


def test_nodes_count_only_where_they_are_named() -> None:
    """Replicas on every node: a plan that knows the nodes sends nothing between them."""
    where = Topology(ranks_per_node=8)
    src, dst = (
        Layout((64, 32), Mesh(r=2, s=4, tp=2), "(s tp n) h"),
        Layout((64, 32), Mesh(dp=2, tp=8), "n (tp h)"),
    )
    blind, aware = plan(src, dst), plan(src, dst, topology=where)
    assert crossing_bytes(blind, where) > 0
    assert crossing_bytes(aware) == crossing_bytes(schedule(blind, topology=where)) == 0
    assert certify(blind, topology=where).plan_s > certify(aware).plan_s
    assert crossing_bytes(adjoint(blind), where) == crossing_bytes(blind, where)


def test_no_nodes_are_assumed() -> None:
    """Of 2 nodes of 4 ranks 96 bytes crossed, and the answer was 0, as of one node of 8."""
    p = plan(
        Layout((8, 4), Mesh(tp=4), "(tp n) h"), Layout((8, 4), Mesh(tp=4, ranks=range(4, 8)), "n h")
    )
    for ask in (certify, crossing_bytes, model):
        with pytest.raises(PlanError, match="nothing says which ranks of"):
            ask(p)
    assert crossing_bytes(p, Topology(ranks_per_node=4)) == 4 * 8 * 4 * 4
    assert crossing_bytes(p, Topology(ranks_per_node=8)) == 0
    assumed = schedule(p)
    for ask in (certify, crossing_bytes, model):
        with pytest.raises(PlanError, match=r"nothing says which ranks of <program.*to schedule"):
            ask(assumed)
    what = "assumed nodes of 8 ranks"
    assert what in repr(assumed) and what in show(assumed)
    assert "from node to node" not in assumed.svg()
    named = schedule(p, topology=Topology(ranks_per_node=8))
    assert "assumed" not in repr(named) and "from node to node" in named.svg()
    assert named == assumed  # the same messages in the same rounds
    assert crossing_bytes(named) == crossing_bytes(assumed, Topology(ranks_per_node=8)) == 0


def test_what_has_no_certificate_of_that_topology(fails) -> None:
    p = plan(Layout((8,), Mesh(a=2), "(a n)"), Layout((8,), Mesh(a=2), "n"))
    prog, other = schedule(p, topology=Topology(ranks_per_node=1)), Topology(ranks_per_node=2)
    what = (
        f"{prog!r} was scheduled for {prog.topology}, not for {other}; "
        "schedule its plan for that topology, or leave topology= out"
    )
    fails(lambda: certify(prog, topology=other), PlanError, what)
    fails(lambda: crossing_bytes(prog, topology=other), PlanError, what)
    fails(
        lambda: certify(p, topology=8),
        PlanError,
        "topology=8 is not a Topology; give shardmath.Topology(ranks_per_node=8)",
    )
