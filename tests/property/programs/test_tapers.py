"""Tapers: slots that fall take less time than even ones, have room, and take the time that was estimated."""

from __future__ import annotations

import math
from dataclasses import replace
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
    Topology,
    certify,
    plan,
    schedule,
    verify,
)
from shardmath.plans.programs import scheduling
from shardmath.plans.programs.loads import (
    estimate_seconds,
    sum_leg_loads,
    sum_pairs,
    sum_round_loads,
)
from shardmath.plans.programs.tapers import HEAVIEST, find_taper
from tests.property.drawn.programs import (
    carried_out,
    cut_anywhere,
    of,
    plans,
    topologies,
    weighted,
)

MIB = 1 << 20


def copies(replicas: int, nbytes: int = 8192 * MIB) -> Plan:
    """A tensor that eight ranks divide, in so many copies on the ranks of the next node."""
    rest = Mesh(dp=replicas, tp=8 // replicas, ranks=range(8, 16))
    shape = nbytes // 8192, 8192
    src = Layout(shape, Mesh(tp=8), "(tp n) h", dtype="int8")
    return plan(src, Layout(shape, rest, "(tp n) h", dtype="int8"))


def even(p: Plan, **limits: int) -> Program:
    """What is scheduled if slots do not taper off."""
    with mock.patch.object(scheduling, "find_taper", return_value=None):
        return schedule(p, topology=Topology(), **limits)


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("room", [512 * MIB, 1024 * MIB, 64 * 1024 * MIB])
def test_little_is_left_to_relay_at_the_end(replicas: int, room: int) -> None:
    """A tensor in several copies takes 2 % more than the bound at most, and less than in even slots."""
    p = copies(replicas)
    prog = schedule(p, topology=Topology(), max_inflight_bytes=room)
    verify(prog)
    assert certify(prog).ratio < min(1.02, certify(even(p, max_inflight_bytes=room)).ratio)
    # Slots fall behind those that are alike.
    alike = prog.weights.count(HEAVIEST)
    falling = prog.weights[alike:]
    assert set(prog.weights[:alike]) == {HEAVIEST}
    assert list(falling) == sorted(set(falling), reverse=True)


def test_seconds_by_hand() -> None:
    """Two copies a node: a slot is relayed while the next one, of a ninth of its bytes, arrives."""
    p = copies(2, 900 * MIB)
    prog = schedule(p, topology=Topology())
    ninth = HEAVIEST / 9
    assert prog.weights[:3] == (HEAVIEST, *(pytest.approx(ninth / 9**k, rel=1e-3) for k in (0, 1)))
    # Each rank takes in 450 MiB / 4 from another node at 50 GB/s, and relays as much in the end.
    arriving = 900 * MIB / 8 / 50e9
    last = prog.weights[-1] / sum(prog.weights)
    rounds = (prog.slots + 1) * 1e-5
    expected = arriving + arriving * last / 9 + rounds
    assert math.isclose(certify(prog).plan_s, expected, rel_tol=1e-4)


@given(plans(), topologies())
def test_tapers_only_where_they_are_faster(p: Plan, where: Topology) -> None:
    with cut_anywhere():
        prog = schedule(p, topology=where)
        with mock.patch.object(scheduling, "find_taper", return_value=None):
            other = schedule(p, topology=where)
    assert certify(prog).plan_s <= certify(other).plan_s * 1.001
    assert not prog.weights or prog.slots == len(prog.weights)


def rounds_by_hand(loads: np.ndarray, weights: tuple[int, ...]) -> np.ndarray:
    """By phase and round, the bytes of slots of these weights if a slice may have any size."""
    phases, lags, ranks, links = loads.shape
    rounds = np.zeros((phases, len(weights) + lags - 1, 1, ranks, links))
    for slot, weight in enumerate(weights):
        for lag in range(lags):
            rounds[:, slot + lag, 0] += loads[:, lag] * weight / sum(weights)
    return rounds


@given(st.data(), st.integers(1, 2), st.integers(1, 4), st.sampled_from([3, 4]))
def test_estimates_are_those_of_rounds(
    data: st.DataObject, phases: int, ranks: int, lags: int
) -> None:
    """Of any loads: the seconds are those of the rounds, and no rank has more in flight than there is room for."""
    shape = phases, lags, ranks, 4
    size = math.prod(shape)
    numbers = data.draw(st.lists(st.integers(0, 1000), min_size=size, max_size=size))
    loads = np.array(numbers, np.int64).reshape(shape)
    where = Topology(
        intra_bytes_per_s=90, inter_bytes_per_s=10, latency_s=data.draw(st.floats(0, 9))
    )
    room = data.draw(st.sampled_from([100, 3000, 1 << 30]))
    found = find_taper(where, loads, room)
    if found is None:
        assert room < 1 << 30
        return
    rounds = rounds_by_hand(loads, found.weights)
    assert math.isclose(found.seconds, estimate_seconds(where, rounds), rel_tol=1e-9)
    assert rounds.sum(axis=-1).max() <= room
    assert all(0 < weight <= HEAVIEST for weight in found.weights)


def test_what_was_estimated_is_what_it_takes() -> None:
    """Of tensors that are cut finely."""
    prog = schedule(copies(4), topology=Topology())
    loads = sum_leg_loads(prog, sum_pairs(prog))
    found = find_taper(prog.topology, loads, prog.max_inflight_bytes)
    assert found is not None and found.weights == prog.weights
    assert math.isclose(found.seconds, certify(prog).plan_s, rel_tol=1e-3)


def test_weights_are_one_per_slot(fails) -> None:
    """Another number of slots has no weights that anybody chose."""
    prog = schedule(copies(2), topology=Topology())
    count = prog.slots
    assert prog.weights
    fix = "give weights=() for slots of equal weight"
    fails(
        lambda: replace(prog, slots=2),
        PlanError,
        f"a program has 2 slots but {count} weights; {fix}",
    )
    made = replace(prog, slots=2, weights=())
    assert "2 slots of 1 turn, " in repr(made)
    lighter = count - prog.weights.count(HEAVIEST)
    assert f"{count} slots of 1 turn, {lighter} of them lighter, " in repr(prog)


def test_equal_weights_are_even_slots() -> None:
    """They cut and send alike, though the programs are two."""
    with cut_anywhere():
        src, dst = (Mesh(a=2), "(a n) h"), (Mesh(x=4, y=2, ranks=range(8, 16)), "n h")
        plain = weighted(of((24, 6), src, dst, 4, "node"), ())
        plain = replace(plain, slots=5)
        same = weighted(plain, [3] * 5)
        assert (sum_round_loads(plain) == sum_round_loads(same)).all()
        assert [plain.for_rank(r) for r in plain.ranks] == [same.for_rank(r) for r in same.ranks]
        assert plain.digest != same.digest and carried_out(same)


def test_long_streams_are_cut_without_overflow() -> None:
    """Bytes times weights may exceed 64 bits."""
    size = 1 << 45
    p = plan(
        Layout((size,), Mesh(), "n", dtype="int8"),
        Layout((size,), Mesh(x=2, ranks=(1, 2)), "n", dtype="int8"),
    )
    long = schedule(p, fanout="none", max_inflight_bytes=1 << 62)
    prog = weighted(long, (HEAVIEST, HEAVIEST - 1, 1))
    prog = replace(prog, turns=1, max_inflight_bytes=1 << 62)
    for one in prog.for_rank(1):
        share = prog.weights[one.step[1]] / sum(prog.weights)
        assert sum(m.nbytes for m in one.receives) == pytest.approx(size * share, rel=1e-3)
