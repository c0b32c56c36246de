"""Topologies: nodes, rates, and what is refused."""

from __future__ import annotations

import pickle
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath.base.digest import digest
from shardmath.base.errors import PlanError
from shardmath.plans.flows.topology import H100, H200, Topology

rates = st.floats(1e-3, 1e15)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    return Topology(
        ranks_per_node=draw(st.integers(1, 72)),
        intra_bytes_per_s=draw(rates),
        inter_bytes_per_s=draw(rates),
        latency_s=draw(st.floats(0, 1)),
    )


@given(topologies())
def test_repr_evaluates_back(topology: Topology) -> None:
    again = eval(repr(topology), {"Topology": Topology})
    assert again == topology and hash(again) == hash(topology) and repr(again) == repr(topology)
    assert pickle.loads(pickle.dumps(topology)) == topology


@given(topologies(), st.lists(st.integers(0, 200)))
def test_nodes_are_the_ranks_by_node(topology: Topology, ranks: list[int]) -> None:
    nodes = topology.nodes(ranks)
    assert sorted(r for held in nodes.values() for r in held) == sorted(set(ranks))
    assert all(
        topology.node(r) == node == r // topology.ranks_per_node
        for node, held in nodes.items()
        for r in held
    )
    assert list(nodes) == sorted(nodes) and all(
        list(held) == sorted(held) for held in nodes.values()
    )


def test_nodes() -> None:
    assert H100.nodes(range(6, 10)) == {0: (6, 7), 1: (8, 9)}
    assert H100.nodes(iter([17, 3, 3])) == {0: (3,), 2: (17,)}
    assert H100.nodes([]) == {}
    assert (H100.node(7), H100.node(8), H100.node(np.int64(16))) == (0, 1, 2)


def test_numbers_of_any_type_are_one_topology() -> None:
    written = Topology(
        ranks_per_node=np.int32(8),
        intra_bytes_per_s=450 * 10**9,
        inter_bytes_per_s=np.float32(50e9),
        latency_s=1e-5,
    )
    assert written.ranks_per_node == 8 and type(written.ranks_per_node) is int
    assert type(written.intra_bytes_per_s) is float
    assert Topology(inter_bytes_per_s=Fraction(1, 2)) == Topology(inter_bytes_per_s=0.5)
    assert repr(Topology(latency_s=-0.0)) == repr(Topology(latency_s=0))
    assert digest(Topology(intra_bytes_per_s=450 * 10**9)) == digest(Topology())
    assert Topology(ranks_per_node=4) != Topology()


def test_defaults_and_presets() -> None:
    rates = "intra_bytes_per_s=450000000000.0, inter_bytes_per_s=50000000000.0"
    expected = f"Topology(ranks_per_node=8, {rates}, latency_s=1e-05)"
    assert repr(Topology()) == repr(H100) == repr(H200) == expected


def test_a_network_may_be_faster_than_the_node() -> None:
    assert Topology(intra_bytes_per_s=1.0, inter_bytes_per_s=2.0).inter_bytes_per_s == 2.0


@pytest.mark.parametrize(
    ("given_as", "message"),
    [
        (
            {"ranks_per_node": 0},
            "ranks_per_node is 0; give at least one rank, and at most 16777216",
        ),
        ({"ranks_per_node": 2.0}, "ranks_per_node is 2.0; give an integer"),
        ({"ranks_per_node": True}, "ranks_per_node is True; give an integer"),
        ({"intra_bytes_per_s": 0}, "intra_bytes_per_s is 0; give a number from 1e-18 to 1e+18"),
        (
            {"inter_bytes_per_s": -1.0},
            "inter_bytes_per_s is -1.0; give a number from 1e-18 to 1e+18",
        ),
        (
            {"inter_bytes_per_s": float("inf")},
            "inter_bytes_per_s is inf; give a number from 1e-18 to 1e+18",
        ),
        (
            {"inter_bytes_per_s": 5e-324},
            "inter_bytes_per_s is 5e-324; give a number from 1e-18 to 1e+18",
        ),
        ({"latency_s": 10**400}, f"latency_s is {10**400}; give a number up to 1e+18"),
        ({"inter_bytes_per_s": "50e9"}, "inter_bytes_per_s is '50e9'; give a number, such as 50e9"),
        ({"inter_bytes_per_s": None}, "inter_bytes_per_s is None; give a number, such as 50e9"),
        ({"intra_bytes_per_s": True}, "intra_bytes_per_s is True; give a number, such as 50e9"),
        ({"latency_s": float("nan")}, "latency_s is nan; give a number from 0 to 1e+18"),
        ({"latency_s": -1e-9}, "latency_s is -1e-09; give a number from 0 to 1e+18"),
    ],
)
def test_what_is_no_topology(fails, given_as: dict[str, object], message: str) -> None:
    fails(lambda: Topology(**given_as), PlanError, message)


def test_what_is_no_rank(fails) -> None:
    fails(lambda: H100.node(-1), PlanError, "rank -1 is negative; number ranks from 0")
    fails(lambda: H100.node(1.5), PlanError, "a rank is 1.5; give an integer")
    fails(lambda: H100.nodes(None), PlanError, "ranks are None; give a tuple")
    fails(lambda: H100.nodes([3, -2]), PlanError, "rank -2 is negative; number ranks from 0")


def test_arguments_have_names() -> None:
    with pytest.raises(TypeError):
        Topology(8)  # type: ignore[misc]
