"""Alternatives: what is said of other ways to do a move, counted by hand and by brute force."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Plan, Topology, certify, plan, schedule
from shardmath.plans.flows.certificate import Witness, make_certificate
from shardmath.plans.programs.alternatives import _join

MB = 10**6
SLOW = Topology(ranks_per_node=4, intra_bytes_per_s=100e6, inter_bytes_per_s=10e6, latency_s=0.25)


def pipeline() -> Plan:
    """Three tensors of 40 MB on three ranks, each to both halves of the next node, in two copies."""
    src = {
        name: Layout((40 * MB,), Mesh(pp=1, ranks=(rank,)), "n", dtype="int8")
        for rank, name in enumerate("abc")
    }
    wide = Mesh(dp=2, tp=2, ranks=range(4, 8))
    dst = {name: Layout((40 * MB,), wide, "(tp n)", dtype="int8") for name in src}
    return plan(src, dst)


def test_sentences_by_hand() -> None:
    """120 MB enter four ranks at 40 MB/s; each rank sends two copies of its 40 MB at 10 MB/s; and so on."""
    p = pipeline()
    said = certify(schedule(p, topology=SLOW)).explain().splitlines()
    bound, alone, stages = 120 / 30 + 0.25, 80 / 10 + 0.25, 3 * (40 / 10 + 0.25)
    assert (
        said[0]
        == "No schedule takes less than 4.25 s: 3 ranks (0, 1, 2) must give out 120 MB at 30 MB/s, "
        "after 250 ms of latency."
    )
    assert said[1].startswith("This takes ")
    assert said[2:] == [
        f"Without relays, each rank is sent its own copy in {alone:.4g} s, {alone / bound:.4g} times the bound.",
        f"Its 3 stages, one after the other, take at least {stages:.4g} s, {stages / bound:.4g} times the bound.",
    ]


def test_one_stage_is_not_divided() -> None:
    p = plan(
        Layout((40 * MB,), Mesh(tp=2), "(tp n)"), Layout((40 * MB,), Mesh(a=2, ranks=(4, 5)), "n")
    )
    said = certify(schedule(p, topology=SLOW)).explain()
    assert "stages" not in said and "Without relays" in said


def test_certificates_made_by_hand_have_no_alternatives() -> None:
    found = make_certificate((2.0, Witness((3,), "out", 2000, 1000.0)), 3.0)
    told = "No schedule takes less than 2 s: rank 3 must give out 2 kB at 1 kB/s."
    assert found.explain() == told + "\nThis takes 3 s, 1.5 times the bound."
    assert make_certificate((0.0, None), 0.0).explain() == "Nothing has to move."


def test_what_is_explained_is_not_compared() -> None:
    """Certificates of equal numbers are equal, and a copy explains the same."""
    found = certify(schedule(pipeline(), topology=SLOW))
    bare = make_certificate((found.bound_s, found.witness), found.plan_s)
    assert found == bare and hash(found) == hash(bare) and repr(found) == repr(bare)
    assert pickle.loads(pickle.dumps(found)).explain() == found.explain()


@given(st.lists(st.frozensets(st.integers(0, 9), min_size=1, max_size=3), max_size=9))
def test_stages_are_what_common_ranks_connect(groups: list[frozenset[int]]) -> None:
    """Against paths from group to group, looked for one step at a time."""
    joined = _join(map(tuple, groups))
    for rank in {rank for group in groups for rank in group}:
        reached = {rank}
        for _ in groups:
            reached |= {other for group in groups if group & reached for other in group}
        assert joined[rank] == reached
        assert all(joined[other] is joined[rank] for other in reached)


def test_a_long_chain_of_stages_is_joined_at_once() -> None:
    """Copies of all ranks joined so far, one for each group, would take minutes."""
    count = 1 << 16
    joined = _join((rank, rank + 1) for rank in range(count))
    assert len(joined) == len(joined[0]) == count + 1
