"""Programs, rank by rank: what is sent is received, everything comes once, and only what has come is relayed."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Plan, Program, Topology, Transfer, plan, schedule
from shardmath.layouts.algebra.box import row_size
from shardmath.plans.balance import make_grid
from shardmath.plans.demands import gather_lines, list_receivers
from shardmath.plans.programs.messages import Message, Round
from shardmath.plans.programs.program import list_slices
from shardmath.plans.programs.streams import list_streams
from shardmath.plans.units import unit_boxes
from tests.property.drawn.programs import (
    PROGRAMS,
    all_rounds,
    arrivals,
    cut_anywhere,
    ends_meet,
    messages,
    nodes_of,
    of,
    plans,
    programs,
    programs_with_mates,
    promised,
    results,
    sides,
    topologies,
    windows,
)


@pytest.fixture(autouse=True)
def _small_tensors_are_cut() -> Iterator[None]:
    with cut_anywhere():
        yield


# Laws of what ranks do


def ends_agree(prog: Program) -> None:
    """What is sent is received, with the same pieces in the same step; steps ascend at every rank."""
    assert ends_meet(all_rounds(prog))


def everything_comes_once(prog: Program) -> None:
    """Every rank gets each element of each addend that its plan gives it once, and relays what it has."""
    done = arrivals(prog.plan, all_rounds(prog))
    assert done is not None and done.same_cells(promised(prog.plan))


def addends_come_in_order(prog: Program) -> None:
    """The addends of an element come one after the other."""
    done = arrivals(prog.plan, all_rounds(prog))
    assert done is not None and done.in_order()


def copies_stay(prog: Program) -> None:
    """What the plan copies on a rank stays there, once, and nothing else does."""
    kept = [t for _, _, m in messages(all_rounds(prog), "keeps") for t in m.pieces]
    assert sorted(map(str, kept)) == sorted(
        str(t) for t in prog.plan.transfers() if t.src_rank == t.dst_rank
    )


def messages_are_their_pieces(prog: Program) -> None:
    """A message has the bytes of its pieces, and a round has one message for each peer, leg, way, and rank beyond."""
    for rank, mine in all_rounds(prog).items():
        for one in mine:
            assert type(one) is Round and one.messages
            keys = [(m[:4], m.pieces[0].src_rank, m.pieces[0].dst_rank) for m in one.messages]
            assert len(keys) == len(set(keys)) and {m.step for m in one.messages} == {one.step}
            assert one.messages == (*one.keeps, *one.receives, *one.sends)
            assert all(m.src_rank == rank != m.dst_rank for m in one.sends)
            assert all(m.src_rank != rank == m.dst_rank for m in one.receives)
            assert all(m.src_rank == rank == m.dst_rank for m in one.keeps)
            for m in one.messages:
                assert type(m) is Message and m.pieces
                assert m.nbytes == sum(t.nbytes for t in m.pieces) > 0
                ((first, last),) = {(t.src_rank, t.dst_rank) for t in m.pieces}
                assert (first == m.src_rank) == (m.leg != 5)
                assert (last == m.dst_rank) == (m.leg != 4)
                assert m.relayed == (m.leg in (2, 3))


def lag_of(prog: Program, leg: int) -> int:
    """How many slots later than the first leg a leg is: with mates, what they are handed goes first."""
    return {1: 0, 2: 1, 3: 2, 4: -1, 5: 0}[leg] + (prog.legs.mates is not None)


def slices_follow_each_other(prog: Program) -> None:
    """A stream is its slices, at most one a slot; those of one root are cut alike, each leg a slot later."""
    for line in range(len(prog.legs.lines.holders)):
        of = list_streams(prog.legs, line)
        cut: dict[int, list[tuple[int, int, int]]] = {i: [] for i in range(len(of.lo))}
        for i, slot, lo, hi in zip(
            *(column.tolist() for column in list_slices(prog, of)), strict=True
        ):
            cut[i].append((slot - lag_of(prog, int(of.leg[i])), lo, hi))
        for i, mine in cut.items():
            assert [mine[0][1], *(hi for _, _, hi in mine)] == [
                int(of.lo[i]),
                *(lo for _, lo, _ in mine[1:]),
                of.hi[i],
            ]
            assert len({slot for slot, _, _ in mine}) == len(mine) and all(
                0 <= s < prog.slots for s, _, _ in mine
            )
            assert mine == cut[int(of.root[i])]
            places = np.array([lo for _, lo, _ in mine])
            block = np.full(len(places), of.block[i])
            assert (
                make_grid(prog.legs.lines, prog.plan.batches).snapped(block, places) == places
            ).all()


def slices_weigh_what_their_slots_do(prog: Program) -> None:
    """Slots take their shares of a stream in their order, each up to the row in which its share ends."""
    shares = prog.weights or (1,) * prog.slots
    order = sorted(range(prog.slots), key=lambda slot: shares[slot])
    heavy = [slot for slot in order if shares[slot] == max(shares)]
    ends = list(itertools.accumulate(shares[slot] for slot in order))
    grid = make_grid(prog.legs.lines, prog.plan.batches)
    for line in range(len(prog.legs.lines.holders)):
        of = list_streams(prog.legs, line)
        cut = list_slices(prog, of)
        found = set(zip(*(column.tolist() for column in cut), strict=True))
        expected = set()
        for i, (block, leg, lo, hi, root) in enumerate(
            zip(*(x.tolist() for x in (of.block, of.leg, of.lo, of.hi, of.root)), strict=True)
        ):
            begin = lo
            for slot, end in zip(order, ends, strict=True):
                place = np.array([lo + (hi - lo) * end // ends[-1]])
                at = grid.snapped(np.array([block]), place)[0] if end < ends[-1] else hi
                turned = slot
                if slot in heavy:
                    turned = heavy[(heavy.index(slot) + root + line) % len(heavy)]
                if begin < at:
                    expected.add((i, turned + lag_of(prog, leg), begin, at))
                begin = max(begin, at)
        assert found == expected


def streams_of_a_root_are_alike(prog: Program) -> None:
    """What is relayed of a stream is the same bytes of the same block, in a later leg."""
    for line in range(len(prog.legs.lines.holders)):
        of = list_streams(prog.legs, line)
        first = (of.leg == 1) | (of.leg == 5)
        assert (of.root[first] == np.flatnonzero(first)).all()
        assert set(of.leg.tolist()) <= {1, 2, 3, 4, 5}
        for column in (of.block, of.lo, of.hi):
            assert (column == column[of.root]).all()


def pickles(prog: Program) -> None:
    """A copy is equal, and its ranks do the same."""
    again = pickle.loads(pickle.dumps(prog))
    assert again == prog and hash(again) == hash(prog) and repr(again) == repr(prog)
    assert all_rounds(again) == all_rounds(prog)


LAWS = (
    ends_agree,
    everything_comes_once,
    addends_come_in_order,
    copies_stay,
    messages_are_their_pieces,
    slices_follow_each_other,
    slices_weigh_what_their_slots_do,
    streams_of_a_root_are_alike,
    pickles,
)


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
    assert any(m.leg == 5 for _, _, m in messages(all_rounds(prog), "receives"))


@given(st.sampled_from([8, 32, 100]), plans(), topologies())
def test_laws_where_small_boxes_stay_whole(small: int, p: Plan, topology: Topology) -> None:
    with mock.patch("shardmath.plans.units.SMALL", small):
        prog = schedule(plan(p.src, p.dst) if p.is_tree else p, topology=topology)
        everything_comes_once(prog)
        slices_follow_each_other(prog)


def test_strangers_have_no_rounds() -> None:
    assert all(prog.for_rank(rank) == () for prog in PROGRAMS.values() for rank in (99, -1))


# What a program is


@given(sides(), topologies(), st.sampled_from(["auto", "none", "node"]))
def test_spelling_is_not_meaning(pair, topology: Topology, fanout) -> None:
    """Layouts that hold the same on the same ranks have the same program."""
    a, b = (
        schedule(plan(*two), topology=topology, fanout=fanout)
        for two in (pair, tuple(map(respelled, pair)))
    )
    assert a == b and hash(a) == hash(b) and all_rounds(a) == all_rounds(b)


def respelled(side):
    """The same with axes in another order, names in another order."""
    if isinstance(side, dict):
        return {name: respelled(side[name]) for name in reversed(side)}
    if isinstance(side, tuple):
        return tuple(map(respelled, side))
    if len(side.partial) > 1:
        return side
    mesh = side.mesh.transpose(tuple(side.mesh.shape)[::-1])
    return Layout(side.shape, mesh, side.text, dtype=side.dtype, rules=side.rules)


def test_what_a_digest_is_of() -> None:
    """The plan, the topology, what is relayed, limits: another of these is another program."""
    src, dst = (
        Layout((24,), Mesh(a=2), "(a n)"),
        Layout((24,), Mesh(x=4, y=2, ranks=range(8, 16)), "n"),
    )
    p = plan(src, dst)
    made = [
        schedule(p, topology=nodes_of(4)),
        schedule(p, topology=nodes_of(2)),
        schedule(p, topology=nodes_of(4, 1e-5)),
        schedule(p, topology=nodes_of(4), fanout="none"),
        schedule(p, topology=nodes_of(4), max_inflight_bytes=1 << 20),
        schedule(p, topology=nodes_of(4), max_ops_per_group=100),
        schedule(plan(src, dst, topology=nodes_of(4)), topology=nodes_of(4)),
        schedule(plan({"w": src}, {"w": dst}), topology=nodes_of(4)),
    ]
    assert len({one.digest for one in made}) == len(made) and len(set(made)) == len(made)
    assert made[0] == schedule(p, topology=nodes_of(4)) and made[0] != "program"


def test_the_topology_is_the_plans_own() -> None:
    p = plan(
        Layout((8,), Mesh(), "n"),
        Layout((8,), Mesh(x=4, ranks=range(1, 5)), "n"),
        topology=nodes_of(2),
    )
    assert schedule(p).topology == nodes_of(2) and schedule(
        p, topology=nodes_of(4)
    ).topology == nodes_of(4)
    assert schedule(plan({"w": p.src[""]}, {"w": p.dst[""]})).topology == Topology()


def test_ranks_and_repr() -> None:
    prog = PROGRAMS["in between"]
    assert prog.ranks == prog.plan.ranks == tuple(range(11))
    nodes = f"nodes of {prog.topology.ranks_per_node} ranks"
    rounds = f"{prog.slots} slots of 1 turn"
    assert repr(prog) == f"<program of {prog.plan!r}, {nodes}, {rounds}, {prog.digest[:12]}>"


# Pieces by hand


def relayed(prog: Program) -> list[Transfer]:
    return [t for _, _, m in messages(all_rounds(prog), "receives") if m.leg > 1 for t in m.pieces]


def test_a_node_shares_what_it_gets() -> None:
    """Two nodes of two: each rank gets half from the source, and hands it to its neighbor."""
    prog = of((8,), (Mesh(), "n"), (Mesh(x=4, ranks=range(2, 6)), "n"), 2, "node")
    received: Counter[tuple[int, int]] = Counter()
    for one in prog.for_rank(2):
        for m in one.receives:
            received[m.src_rank, m.leg] += m.nbytes
    assert received == {(0, 1): 32, (3, 2): 32}
    sent = [m for one in prog.for_rank(0) for m in one.sends]
    assert sum(m.nbytes for m in sent if m.dst_rank in (2, 3)) == 64
    assert relayed(prog) and all(t.src_slices == t.dst_slices for t in relayed(prog))


def test_what_is_relayed_is_read_from_the_destination() -> None:
    """From its tensors, at their places there."""
    prog = windows(4, "node")
    assert (
        {t.src_tensor for t in relayed(prog)}
        == {"w[0]", "w[1]"}
        == {t.dst_tensor for t in relayed(prog)}
    )
    pieces = relayed(PROGRAMS["nodes"])
    assert pieces and all(t.src_slices == t.dst_slices == t.global_slices for t in pieces)


# Where contents may be cut


def places(p: Plan, topology: Topology, small: int) -> Iterator[tuple[int, int, list[int]]]:
    """(block, its bytes, where it may be cut) by looking at every box of every row."""
    on = gather_lines(p.batches, topology)
    for block in range(len(on.nbytes)):
        found: list[int] = []
        for row in range(on.row_first[block], on.row_first[block + 1]):
            batch, at, each = p.batches[on.batch[row]], int(on.at[row]), int(on.each[row])
            item, lo = batch.template.src.itemsize, int(on.lo[row])
            legal = set(cuts_of(batch.template, int(on.unit[row]), small)) & set(
                range(lo, int(on.hi[row]))
            )
            for k in range(len(batch.names)):
                found += [at + k * each + (x - lo) * item for x in sorted(legal | {lo})]
        yield block, int(on.nbytes[block]), found


def cuts_of(t, unit: int, small: int) -> Iterator[int]:
    """Boxes of the unit, and the rows of boxes of more than `small` bytes."""
    at = 0
    for dims in unit_boxes(t, unit)[1]:
        size = int(np.prod(dims, dtype=int))
        yield from range(at, at + size, row_size(dims)) if size * t.src.itemsize > small else [at]
        at += size


@given(sides(), topologies(), st.sampled_from([0, 0, 16, 64, 1 << 16]))
def test_snapped_is_the_last_place_not_after(pair, topology: Topology, small: int) -> None:
    """Everywhere in every block, many places at once."""
    with mock.patch("shardmath.plans.units.SMALL", small):
        p = plan(*pair)
        on = gather_lines(p.batches, topology)
        for block, size, legal in places(p, topology, small):
            at = np.arange(size if size < 500 else 0)
            expected = np.array(legal, np.int64)[np.searchsorted(legal, at, "right") - 1]
            assert legal == sorted(set(legal))
            assert (make_grid(on, p.batches).snapped(np.full(len(at), block), at) == expected).all()


# What goes on the wire


@given(programs())
def test_who_asks_is_served(prog: Program) -> None:
    """Streams go to the ranks that ask for their blocks, and from ranks that hold them or have asked, or over mates."""
    on = prog.legs.lines
    for line in range(len(on.holders)):
        of = list_streams(prog.legs, line)
        for block, leg, sender, receiver in zip(
            *(x.tolist() for x in (of.block, of.leg, of.sender, of.receiver)), strict=True
        ):
            asking = list_receivers(on, line, block)
            assert leg == 4 or receiver in asking
            assert leg == 5 or sender in (on.sets[on.holders[line]] if leg in (1, 4) else asking)


def test_results_do_not_depend_on_the_way() -> None:
    for name in ("nodes", "folded", "overlapping", "tree"):
        p = PROGRAMS[name].plan
        found = [
            results(schedule(p, topology=nodes_of(n), fanout=fanout))
            for n, fanout in itertools.product((1, 2, 4), ("auto", "none", "node"))
        ]
        assert all(one == results(p) for one in found)
