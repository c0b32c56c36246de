"""Schedules: what they bring, what of it crosses nodes, what it costs, and that they keep limits or say why not."""

from __future__ import annotations

import itertools
import math
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import (
    Layout,
    Mesh,
    Plan,
    PlanError,
    Program,
    Runs,
    Shard,
    Table,
    Topology,
    adjoint,
    certify,
    plan,
    schedule,
    simulate,
    verify,
)
from shardmath.plans.programs import scheduling
from shardmath.plans.programs import streams as module
from shardmath.plans.programs.loads import (
    count_messages,
    estimate_seconds,
    sum_leg_loads,
    sum_pairs,
    sum_round_loads,
)
from shardmath.plans.programs.scheduling import as_planned
from shardmath.plans.programs.streams import list_streams
from tests.property.drawn.programs import (
    FANOUTS,
    PROGRAMS,
    all_rounds,
    copied,
    cut_anywhere,
    expected,
    messages,
    nodes_of,
    of,
    plans,
    programs,
    programs_with_mates,
    results,
    topologies,
    under_way,
)


@pytest.fixture(autouse=True)
def _small_tensors_are_cut() -> Iterator[None]:
    with cut_anywhere():
        yield


# What a schedule brings


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_schedule_does_what_its_plan_does(name: str) -> None:
    assert results(PROGRAMS[name]) == expected(PROGRAMS[name].plan)


@given(plans(), topologies(), st.sampled_from(FANOUTS))
def test_every_schedule_does_what_its_plan_does(p: Plan, where: Topology, fanout: Any) -> None:
    """Bit for bit, of numbers whose sums depend on the order of the addends."""
    assert results(schedule(p, topology=where, fanout=fanout)) == expected(p)


@pytest.mark.parametrize("dtype", ["float16", "int32", "complex64"])
def test_arrays_of_any_type(dtype: str) -> None:
    p = plan(
        *(
            Layout((6,), m, t, dtype=dtype)
            for m, t in ((Mesh(a=3), "n {sum: a}"), (Mesh(x=4, y=2), "(y n)"))
        )
    )
    x = {rank: (np.arange(6) * 1.7 * (rank + 1)).astype(dtype) for rank in range(3)}
    ours, theirs = simulate(schedule(p, topology=nodes_of(2), fanout="node"), x), simulate(p, x)
    assert all(
        ours[rank].dtype == dtype and ours[rank].tobytes() == theirs[rank].tobytes()
        for rank in range(8)
    )


def test_minus_zero_is_relayed() -> None:
    """A destination whose cells start at -0.0 relays what it received, signs included."""
    p = plan(
        Layout((2,), Mesh(), "n"), Layout((2,), Mesh(x=2, y=4, ranks=range(4, 12)), "n {sum: x}")
    )
    out = simulate(
        schedule(p, topology=nodes_of(4), fanout="node"), {0: np.array([-0.0, 0.0], "float32")}
    )
    held = [np.signbit(out[rank]).tolist() for rank in range(4, 12)]
    assert Counter(map(tuple, held)) == {(True, False): 4, (True, True): 4}


# What crosses nodes


def elements(layout: Layout, rank: int) -> set[tuple[int, ...]]:
    if rank not in layout.mesh:
        return set()
    return set(itertools.product(*(i[i >= 0].tolist() for i in layout.indices(rank))))


def entering(prog: Program) -> Counter[int]:
    """Bytes that come into each node from other nodes."""
    n = prog.topology.ranks_per_node
    out: Counter[int] = Counter()
    for rank, _, m in messages(all_rounds(prog), "receives"):
        out[rank // n] += m.nbytes * (rank // n != m.src_rank // n)
    return +out


def asked_for(p: Plan, per_node: int, *, once: bool) -> Counter[int]:
    """Bytes that ranks of a node need and no rank of it holds, for the node once or for every rank."""
    out: Counter[int] = Counter()
    for (src,), (dst,) in ((p.src[name], p.dst[name]) for name in p.src):
        for node in {rank // per_node for rank in p.ranks}:
            ranks = [rank for rank in p.ranks if rank // per_node == node]
            held = set().union(*(elements(src, rank) for rank in ranks))
            needed = [elements(dst, rank) - held for rank in ranks]
            out[node] += src.itemsize * (
                len(set().union(*needed)) if once else sum(map(len, needed))
            )
    return +out


@given(copied(), topologies())
def test_each_byte_enters_a_node_once(pair: tuple[Layout, Layout], where: Topology) -> None:
    """With fanout="node": what its ranks need and none of them holds."""
    p = plan(*pair)
    prog = schedule(p, topology=where, fanout="node")
    assert entering(prog) == asked_for(p, where.ranks_per_node, once=True)


@given(copied(), topologies())
def test_every_replica_is_sent_its_own_copy(pair: tuple[Layout, Layout], where: Topology) -> None:
    """With fanout="none": what each needs and no rank of its node holds."""
    p = plan(*pair)
    prog = schedule(p, topology=where, fanout="none")
    assert entering(prog) == asked_for(p, where.ranks_per_node, once=False)
    assert all(m.leg == 1 for _, _, m in messages(all_rounds(prog), "sends"))


def test_trees_enter_nodes_once() -> None:
    prog = PROGRAMS["tree"]
    assert prog.legs.sharing == 4 and entering(prog) == asked_for(prog.plan, 4, once=True)


@given(copied(), topologies())
def test_what_stays_on_a_node_does_not_leave_it(
    pair: tuple[Layout, Layout], where: Topology
) -> None:
    """Whoever has a holder on its own node is served by one."""
    p, n = plan(*pair), where.ranks_per_node
    for fanout in FANOUTS:
        for rank, _, m in messages(
            all_rounds(schedule(p, topology=where, fanout=fanout)), "receives"
        ):
            for t in m.pieces if m.src_rank // n != rank // n else ():
                near = set().union(*(elements(pair[0], r) for r in p.ranks if r // n == rank // n))
                assert near.isdisjoint(
                    itertools.product(*(range(s.start, s.stop) for s in t.global_slices))
                )


# What is taken where all are to choose from


@given(plans(), topologies(), st.integers(1, 4000), st.integers(1, 30))
def test_auto_is_as_good_as_the_others(p: Plan, where: Topology, nbytes: int, ops: int) -> None:
    """By its own figure; and where one of the others keeps the limits, so does it."""
    times = {}
    for fanout in FANOUTS:
        try:
            prog = schedule(
                p, topology=where, fanout=fanout, max_inflight_bytes=nbytes, max_ops_per_group=ops
            )
            times[fanout] = certify(prog).plan_s
        except PlanError:
            times[fanout] = math.inf
    assert times["auto"] <= min(times.values()) * (1 + 1e-9)


def sent_far(prog: Program) -> Counter[int]:
    out: Counter[int] = Counter()
    for rank, _, m in messages(all_rounds(prog), "sends"):
        out[rank] += m.nbytes
    return +out


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 12])
def test_one_source_is_relieved_by_its_receivers(count: int) -> None:
    """It sends little more than the content, where each alone would have it send as many copies as there are nodes."""
    size = 1024
    where = nodes_of(1, 1e-11)
    p = plan(
        Layout((size,), Mesh(), "n", dtype="int8"),
        Layout((size,), Mesh(x=count, ranks=range(1, count + 1)), "n", dtype="int8"),
    )
    alone, shared = (schedule(p, topology=where, fanout=fanout) for fanout in ("none", "auto"))
    assert sent_far(alone) == {0: count * size}
    assert sent_far(shared)[0] <= 1.03 * size and max(sent_far(shared).values()) <= 1.03 * size
    assert certify(shared).plan_s < certify(alone).plan_s


def test_sources_that_are_not_the_bottleneck_send_all_themselves() -> None:
    """As many sources as receivers: nothing is gained by relaying between nodes."""
    p = plan(Layout((64,), Mesh(a=4), "n"), Layout((64,), Mesh(x=4, ranks=range(4, 8)), "n"))
    prog = schedule(p, topology=nodes_of(1))
    assert {m.leg for _, _, m in messages(all_rounds(prog), "sends")} == {1}
    assert set(sent_far(prog).values()) == {64 * 4}


def test_sources_are_relieved_as_far_as_they_must_be() -> None:
    """Two sources, six receivers: each would send three copies, and sends little more than one."""
    p = plan(Layout((3000,), Mesh(a=2), "n"), Layout((3000,), Mesh(x=6, ranks=range(2, 8)), "n"))
    load = sent_far(schedule(p, topology=nodes_of(1, 1e-10)))
    assert load[0] == load[1] == 12000 and max(load.values()) <= 12000


# Limits


def limited(p: Plan, **limits: Any) -> tuple[Program, int]:
    """The program within limits that are raised as its errors say, and how often they had to be."""
    for times in itertools.count():
        try:
            return schedule(p, **limits), times
        except PlanError as error:
            said = str(error)
        found = re.fullmatch(r"(max_\w+)=(\d+): .*; pass (\d+) or more", said)
        assert found and limits[found[1]] == int(found[2]) < int(found[3]), said
        limits[found[1]] = int(found[3])
    raise AssertionError


@given(plans(), topologies(), st.sampled_from(FANOUTS), st.integers(1, 300), st.integers(1, 6))
def test_limits_are_kept_or_what_would_do_is_said(
    p: Plan, where: Topology, fanout: Any, nbytes: int, ops: int
) -> None:
    limits = {"max_inflight_bytes": nbytes, "max_ops_per_group": ops}
    prog, times = limited(p, topology=where, fanout=fanout, **limits)
    most, count = under_way(all_rounds(prog))
    assert most <= prog.max_inflight_bytes and count <= prog.max_ops_per_group and times <= 5
    assert times or (prog.max_inflight_bytes, prog.max_ops_per_group) == (nbytes, ops)


@given(programs())
def test_a_program_keeps_its_limits(prog: Program) -> None:
    most, count = under_way(all_rounds(prog))
    assert most <= prog.max_inflight_bytes and count <= prog.max_ops_per_group


def test_limits_that_nothing_keeps(fails) -> None:
    src, far = Layout((8,), Mesh(), "n", dtype="float64"), Mesh(x=4, ranks=range(1, 5))
    p = plan(src, Layout((8,), far, "n", dtype="float64"))
    for nbytes in (1, 7):
        fails(
            lambda nbytes=nbytes: schedule(
                p, topology=nodes_of(1), max_inflight_bytes=nbytes, fanout="none"
            ),
            PlanError,
            f"max_inflight_bytes={nbytes}: 8 bytes of the tensor are a row or small box, which is never cut; "
            "pass 8 or more",
        )
    assert under_way(
        all_rounds(schedule(p, topology=nodes_of(1), max_inflight_bytes=8, fanout="none"))
    ) == (8, 1)
    swap = plan(Layout((8,), Mesh(a=2), "(a n)"), Layout((8,), Mesh(a=2, ranks=(1, 0)), "(a n)"))
    fails(
        lambda: schedule(swap, max_ops_per_group=1),
        PlanError,
        "max_ops_per_group=1: even in the smallest rounds a rank has 2 messages; pass 2 or more",
    )
    assert under_way(all_rounds(schedule(swap, max_ops_per_group=2))) == (32, 2)


GIB = 1 << 30


@pytest.mark.parametrize("nbytes", [1, 1 << 20])
@pytest.mark.parametrize("columns", [1 << 12, 1 << 24])
def test_tiny_limits_on_large_tensors_do_not_take_for_ever(nbytes: int, columns: int) -> None:
    """2 GiB in rows of 4 KiB or 16 MiB to replicas on two nodes."""
    src = Layout((2 * GIB // columns, columns), Mesh(a=2), "(a n) h", dtype="int8")
    p = plan(src, Layout(src.shape, Mesh(x=4, y=2, ranks=range(8, 16)), "n h", dtype="int8"))
    begin = time.process_time()
    prog, times = limited(p, topology=nodes_of(4, 1e-5), max_inflight_bytes=nbytes)
    assert times < 4 and time.process_time() - begin < 20
    assert nbytes < columns or nbytes == 1 << 20 or prog.max_inflight_bytes < GIB


def test_what_cannot_be_kept_is_refused_at_once(fails) -> None:
    """Between 128 ranks: a row of 256 bytes, and pairs with more than so many slots divide."""
    src, dst = Mesh(a=64), Mesh(x=64, ranks=range(64, 128))
    p = plan(Layout((4096, 64), src, "(a n) h"), Layout((4096, 64), dst, "n (x h)"))
    begin = time.process_time()
    for nbytes in (1, 3):
        what = f"max_inflight_bytes={nbytes}: 4 bytes of the tensor are a row or small box"
        what += ", which is never cut; pass 4 or more"
        fails(lambda nbytes=nbytes: schedule(p, max_inflight_bytes=nbytes), PlanError, what)
    long = plan(
        Layout((1 << 20,), src, "n", dtype="int8"), Layout((1 << 20,), dst, "n", dtype="int8")
    )
    what = "some rank has 32 bytes in flight in a round, even with the most rounds"
    fails(
        lambda: schedule(long, max_inflight_bytes=1),
        PlanError,
        f"max_inflight_bytes=1: {what}; pass 32 or more",
    )
    assert time.process_time() - begin < 2


def test_turns_divide_what_the_last_try_left() -> None:
    """The most slots that are tried leave least under way, though more than there is room for."""
    p = plan(Layout((64,), Mesh(), "n"), Layout((64,), Mesh(x=2, ranks=(1, 2)), "n"))

    def measure(prog: Program) -> tuple[float, int]:
        return 1.0, 1000 // prog.slots if prog.turns == 1 else 1

    with (
        mock.patch.object(scheduling, "_measure", measure),
        mock.patch.object(scheduling, "_count_most_slots", return_value=4),
    ):
        prog = schedule(p, fanout="none", max_inflight_bytes=200)
    assert (prog.slots, prog.turns > 1) == (4, True)


def test_few_messages_among_many_ranks() -> None:
    p = plan(*(Layout((64, 64), Mesh(a=24), text, dtype="int8") for text in ("(a n) h", "n (a h)")))
    for ops in (2, 3, 45, 46):
        assert (
            under_way(all_rounds(schedule(p, topology=nodes_of(8), max_ops_per_group=ops)))[1]
            <= ops
        )


@pytest.mark.parametrize(("held", "per_node"), [((1, 6), 2), ((1, 6), 4), ((1, 3, 6), 4)])
def test_two_messages_are_enough_where_something_is_relayed(
    held: tuple[int, ...], per_node: int
) -> None:
    """No rank has two legs in one turn, where turns are many enough."""
    p = plan(
        Layout((12, 2), Mesh(b=len(held), ranks=held), "n (b h)"), Layout((12, 2), Mesh(b=8), "n h")
    )
    prog = schedule(p, topology=nodes_of(per_node), fanout="node", max_ops_per_group=2)
    assert under_way(all_rounds(prog))[1] == 2
    verify(prog)


def test_a_plan_and_no_fanout_have_the_senders_of_its_topology() -> None:
    src, dst = (
        Layout((64, 32), Mesh(r=2, s=4, tp=2), "(s tp n) h"),
        Layout((64, 32), Mesh(dp=2, tp=8), "n (tp h)"),
    )
    p = plan(src, dst, topology=nodes_of(8))
    assert (
        moved(schedule(p, fanout="none"))
        == moved(as_planned(p))
        == sorted(map(repr, p.transfers()))
    )
    verify(as_planned(p))


def moved(prog: Program) -> list[str]:
    return sorted(
        repr(t) for _, _, m in messages(all_rounds(prog), "sends", "keeps") for t in m.pieces
    )


@given(plans(), topologies())
def test_what_a_plan_does_is_a_program(p: Plan, where: Topology) -> None:
    """Each rank's transfers, wherever the nodes are, and the limits that they keep."""
    prog = as_planned(p, where)
    verify(prog)
    assert moved(prog) == sorted(map(repr, p.transfers()))
    nbytes, count = under_way(all_rounds(prog))
    assert prog.max_inflight_bytes == max(nbytes, 1) and prog.max_ops_per_group >= count


# What does not make a schedule


def test_what_cannot_be_scheduled(fails) -> None:
    p = plan(Layout((8,), Mesh(a=2), "(a n)"), Layout((8,), Mesh(a=2), "n"))
    back = adjoint(p)
    fix = "is not a Plan; schedule what plan(src, dst) returns"
    fails(lambda: schedule(back), PlanError, f"{back!r} {fix}")
    fails(lambda: schedule("plan"), PlanError, f"'plan' {fix}")
    fails(
        lambda: schedule(p, fanout="all"),
        PlanError,
        "fanout='all' is unknown; use 'auto', 'none' or 'node'",
    )
    fix = "is not a Plan; give what plan(src, dst) returns"
    fails(lambda: as_planned(back), PlanError, f"{back!r} {fix}")
    for name in ("max_inflight_bytes", "max_ops_per_group"):
        for bad in (0, -5):
            what = f"{name}={bad} leaves no room for a message; pass 1 or more"
            fails(lambda name=name, bad=bad: schedule(p, **{name: bad}), PlanError, what)
        for bad in (2.0, True, "8", None):
            fails(
                lambda name=name, bad=bad: schedule(p, **{name: bad}),
                PlanError,
                f"{name} is {bad!r}; give an integer",
            )


# Loads and time


def brute_loads(prog: Program) -> tuple[dict[Any, list[int]], dict[Any, int]]:
    """Of every rank and step: bytes near out, near in, far out, far in; of rank and turn: the messages of all slots."""
    n, loads = prog.topology.ranks_per_node, defaultdict(lambda: [0, 0, 0, 0])
    pairs = set()
    for rank, step, m in messages(all_rounds(prog), "sends", "receives"):
        link = 2 * (m.src_rank // n != m.dst_rank // n) + (m.dst_rank == rank)
        loads[step, prog.ranks.index(rank)][link] += m.nbytes
        ends = {(t.src_rank, t.dst_rank) for t in m.pieces}
        pairs.add((step[2], prog.ranks.index(rank), m.src_rank, m.dst_rank, m.leg, *ends))
    return dict(loads), Counter((turn, rank) for turn, rank, *_ in pairs)


def loads_are_those_of_messages(prog: Program) -> None:
    """By phase, slot, turn, rank and link; and no round has more messages than is counted."""
    exact, counted = (
        sum_round_loads(prog),
        count_messages(sum_pairs(prog), prog.turns, len(prog.ranks)),
    )
    loads, peers = brute_loads(prog)
    assert {tuple(at[:4]): exact[tuple(at[:4])].tolist() for at in np.argwhere(exact).tolist()} == {
        (*step, rank): links for (step, rank), links in loads.items()
    }
    assert {tuple(at): counted[tuple(at)] for at in np.argwhere(counted).tolist()} == peers


def legs_are_those_of_messages(prog: Program) -> None:
    """By phase, lag, rank and link."""
    exact = sum_leg_loads(prog, sum_pairs(prog))
    found = np.zeros_like(exact)
    n = prog.topology.ranks_per_node
    for rank, (phase, _, _), m in messages(all_rounds(prog), "sends", "receives"):
        link = 2 * (m.src_rank // n != m.dst_rank // n) + (m.dst_rank == rank)
        lag = {1: 0, 2: 1, 3: 2, 4: -1, 5: 0}[m.leg] + (prog.legs.mates is not None)
        found[phase, lag, prog.ranks.index(rank), link] += m.nbytes
    assert (found == exact).all()


def time_is_that_of_rounds(prog: Program) -> None:
    """One step after the other, each as long as its fullest link and a latency."""
    where, fullest = prog.topology, defaultdict(float)
    rates = [where.intra_bytes_per_s] * 2 + [where.inter_bytes_per_s] * 2
    for (step, _), links in brute_loads(prog)[0].items():
        fullest[step] = max(
            fullest[step], *(x / rate for x, rate in zip(links, rates, strict=True))
        )
    total = sum(fullest.values()) + where.latency_s * len(fullest)
    assert math.isclose(estimate_seconds(where, sum_round_loads(prog)), total, rel_tol=1e-9)
    assert certify(prog).plan_s == estimate_seconds(where, sum_round_loads(prog))


LAWS = (loads_are_those_of_messages, legs_are_those_of_messages, time_is_that_of_rounds)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", PROGRAMS)
def test_laws(law, name: str) -> None:
    law(PROGRAMS[name])


@given(programs())
def test_laws_of_random_programs(prog: Program) -> None:
    for law in LAWS:
        law(prog)


@given(programs_with_mates())
def test_laws_of_programs_with_mates(prog: Program) -> None:
    for law in LAWS:
        law(prog)


def test_lines_that_are_alike_but_for_their_rows() -> None:
    """Streams of the same bytes are cut where their own tensor's rows are, also where it is of several boxes."""
    entry = Mesh(x=2, ranks=(4, 5))
    layouts = {
        "wide": (Mesh(ranks=(0,)), (40, 32768), "n h"),
        "alike": (Mesh(ranks=(1,)), (40, 32768), "n h"),
        "narrow": (Mesh(ranks=(2,)), (64, 20480), "n h"),
        "cut": (Mesh(ranks=(3,)), (2, 32, 20480), "n h d"),
    }
    src, dst = {}, {}
    for name, (mesh, shape, text) in layouts.items():
        src[name] = Layout(shape, mesh, text)
        dst[name] = Layout(shape, entry, "n (x h) d" if name == "cut" else text)
    with mock.patch("shardmath.plans.programs.loads.FEW_SLICES", 0):
        prog = schedule(plan(src, dst), topology=nodes_of(2), max_inflight_bytes=1 << 21)
        assert prog.slots > 10
        loads_are_those_of_messages(prog)


def test_seconds_by_hand() -> None:
    where = Topology(ranks_per_node=2, intra_bytes_per_s=100, inter_bytes_per_s=10, latency_s=1)
    loads = np.array(
        [
            [[[100, 0, 0, 50], [0, 300, 0, 0]]],
            [[[0, 0, 0, 0], [0, 0, 0, 0]]],
            [[[0, 0, 5, 0], [0, 0, 0, 0]]],
        ]
    )
    assert estimate_seconds(where, loads) == (5 + 1) + (0.5 + 1)
    assert estimate_seconds(where, np.zeros((1, 1, 0, 4))) == 0.0


def test_one_round_by_hand() -> None:
    """Rank 0 sends 32 bytes to its own node and 64 to another, in one round."""
    prog = of((4,), (Mesh(), "n"), (Mesh(x=3, ranks=(1, 2, 3)), "n"), 2, "none")
    exact, counted = (
        sum_round_loads(prog),
        count_messages(sum_pairs(prog), prog.turns, len(prog.ranks)),
    )
    assert exact.sum(axis=(0, 1, 2)).tolist() == [
        [32, 0, 64, 0],
        [0, 32, 0, 0],
        [0, 0, 0, 32],
        [0, 0, 0, 32],
    ]
    assert counted.tolist() == [[3, 1, 1, 1]]


def overlapping(seed: int, ranks: int, positions: int, holders: float) -> Layout:
    """Each position on about so many of the ranks, and on one at least."""
    rng = np.random.default_rng(seed)
    has = rng.random((ranks, positions)) < holders / ranks
    has[rng.integers(0, ranks, positions), np.arange(positions)] = True
    parts = tuple(Runs([(i, int(g), 1) for i, g in enumerate(np.flatnonzero(row))]) for row in has)
    return Layout((positions,), Mesh(x=ranks), {"x": Table(0, parts)})


def test_streams_of_many_lines_are_found_once() -> None:
    """A cache of the latest lost each before it was asked for again: overlapping Tables took minutes."""
    src = overlapping(0, 16, 700, 6.4)
    p = plan(src, Layout((700,), src.mesh, {"x": Shard(0)}))
    count = len(p.lines.holders)
    assert count > 512
    with (
        mock.patch("shardmath.plans.programs.legs.MOST_TOGETHER", 1),
        mock.patch.object(module, "_list_entries", wraps=module._list_entries) as found,
    ):
        prog = schedule(p, topology=Topology(), fanout="none")
        assert found.call_count <= 2 * count  # cut among holders, and as streams
        before = found.call_count
        certify(prog)
        verify(prog)
        assert found.call_count == before


def test_many_lines_are_looked_at_together() -> None:
    """Lines of one position each were looked at one by one, a hundred calls each: 10,000 of them took 20 s."""
    p = plan(overlapping(0, 32, 1200, 3), overlapping(1, 32, 1200, 3))
    prog, calls = calls_of(lambda: schedule(p))
    count = len(prog.legs.lines.holders)
    assert count > 1000 and calls < 4 * count
    _, calls = calls_of(lambda: verify(prog))
    assert calls < count
    rounds, calls = calls_of(lambda: prog.for_rank(5))
    pieces = sum(len(m.pieces) for one in rounds for m in one.messages)
    assert pieces > 200 and calls < 2 * pieces


def calls_of(act: Callable[[], Any]) -> tuple[Any, int]:
    """What it returns, and how often it calls functions of programs, of transfers, and of the proof of programs."""
    counted = Counter[str]()
    files = "/shardmath/plans/programs/", "/shardmath/transfers/", "/program_proof.py"

    def count(frame: FrameType, event: str, _: object) -> None:
        counted[event] += any(file in frame.f_code.co_filename for file in files)

    sys.setprofile(count)
    try:
        return act(), counted["call"]
    finally:
        sys.setprofile(None)


# Lines in bundles


@given(plans(), topologies(), st.sampled_from([1, 20]))
def test_bundles_change_nothing(p: Plan, where: Topology, together: int) -> None:
    """Neither what is scheduled nor the streams and loads of a line depend on what it is looked at with."""
    prog = schedule(p, topology=where)
    lines = range(len(prog.legs.lines.holders))
    with (
        mock.patch("shardmath.plans.programs.legs.MOST_TOGETHER", together),
        mock.patch("shardmath.plans.programs.loads.FEW_SLICES", together - 1),
    ):
        assert schedule(p, topology=where) == prog
        apart = replace(prog, legs=replace(prog.legs))
        for line in lines:
            mine, other = (list_streams(one.legs, line) for one in (apart, prog))
            assert all(map(np.array_equal, mine, other))
        assert (sum_round_loads(apart) == sum_round_loads(prog)).all()
        verify(apart)
