"""Keeping: what follows from a part is what would be made anew, of the same messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmath import Layout, Mesh, Topology, adjoint, plan, schedule, without
from shardmath.plans.membership.keeping import MembershipChange, compare, count_peers, follow
from shardmath.plans.plan import Plan
from shardmath.plans.programs.cutting import Pace
from shardmath.plans.programs.part import RankProgram, outline_part
from shardmath.proofs.part_proof import prove_parts
from shardmath.testing.strategies import copies


def make(p: Plan, peers: int, limit: int, by_addend: bool = False) -> dict[int, RankProgram]:
    """The parts of all ranks at the pace of so many peers."""
    return {
        rank: outline_part(p, rank).part(peers=peers, max_inflight_bytes=limit, by_addend=by_addend)
        for rank in p.ranks
    }


def check_same(part: RankProgram | None, made: RankProgram) -> None:
    """All is as if made anew; layouts are so on this rank."""
    assert part is not None
    for side in ("sources", "destinations"):
        stored, wanted = getattr(part, side), getattr(made, side)
        assert list(stored) == list(wanted)
        for key, (tensor, layout) in stored.items():
            assert tensor == wanted[key].tensor
            assert layout.runs(made.rank) == wanted[key].layout.runs(made.rank)
    assert replace(part, destinations=made.destinations) == made


def pace_of(parts: dict[int, RankProgram]) -> Pace:
    pace = next(iter(parts.values())).pace
    assert pace is not None
    return pace


@given(copies(), st.sampled_from([64, 256, 1 << 20, 1 << 30]), st.booleans())
def test_what_follows_is_what_is_made_anew(
    case: tuple[Layout, Layout, tuple[int, ...]], limit: int, by_addend: bool
) -> None:
    """Both when ranks leave and when they come back; what follows keeps the messages themselves."""
    src, dst, leaving = case
    p = plan({"v": src, "w": src}, {"v": dst, "w": dst})
    rest = without(p, leaving)
    peers = max(outline_part(p, rank).peers for rank in p.ranks)
    before, after = (make(one, peers, limit, by_addend) for one in (p, rest))
    same = pace_of(before).is_like(pace_of(after))
    assert same or pace_of(before).peers_at_once < len(p.ranks)
    for rank in p.ranks:
        if not same:
            assert follow(before[rank], rest, pace_of(after)) is None
            continue
        if rank in leaving:
            made = outline_part(rest, rank).part(
                peers=peers, max_inflight_bytes=limit, by_addend=by_addend
            )
            check_same(follow(before[rank], rest, pace_of(after)), made)
            assert follow(made, p, pace_of(before)) is None
            continue
        left = follow(before[rank], rest, pace_of(after))
        check_same(left, after[rank])
        assert count_peers(before[rank], rest) == outline_part(rest, rank).peers
        assert count_peers(after[rank], p) == outline_part(p, rank).peers
        known = {id(m) for one in before[rank].rounds for m in one.messages}
        assert {id(m) for one in left.rounds for m in one.messages} <= known
        check_same(follow(after[rank], p, pace_of(before)), before[rank])
        some = frozenset(leaving)
        assert compare(before[rank], rest) == MembershipChange(some, frozenset())
        assert compare(after[rank], p) == MembershipChange(frozenset(), some)


@given(copies(), st.data())
def test_some_leave_while_others_come_back(
    case: tuple[Layout, Layout, tuple[int, ...]], data: st.DataObject
) -> None:
    src, dst, _ = case
    p = plan(src, dst)
    count = dst.mesh.axis_size("copy")
    drawn = st.sets(st.integers(1, count - 1))
    groups = [
        [rank for number in data.draw(drawn) for rank in dst.mesh.select(copy=number).ranks]
        for _ in range(2)
    ]
    one, other = (without(p, ranks) for ranks in groups)
    peers = max(outline_part(p, rank).peers for rank in p.ranks)
    before, after = (make(each, peers, 1 << 30) for each in (one, other))
    followed = []
    for rank in set(one.ranks) & set(other.ranks):
        part = follow(before[rank], other, pace_of(after))
        check_same(part, after[rank])
        followed.append(part)
    if other.ranks == one.ranks:
        prove_parts(followed)


def test_what_cannot_follow() -> None:
    src = Layout((8,), Mesh(tp=2), "(tp n)")
    dst = Layout((8,), Mesh(engine=3, tp=2, ranks=range(2, 8)), "(tp n)")
    p = plan(src, dst)
    rest = without(p, [2, 3])
    parts = make(p, 3, 1 << 30)
    pace = pace_of(parts)
    assert compare(parts[0], rest) == compare(parts[2], rest)
    assert follow(parts[0], rest, pace) is not None
    assert follow(parts[0], plan(src, dst, topology=Topology()), pace) is None
    assert follow(parts[0], rest, pace._replace(message_bytes=16)) is None
    assert follow(parts[0], rest, pace._replace(by_addend=True)) is None
    assert compare(parts[0], adjoint(p)) is compare(parts[0], None) is None
    program = schedule(p, topology=Topology())
    of_program = outline_part(program, 0).part(peers=0)
    assert of_program.pace is None and follow(of_program, rest, pace) is None
    assert compare(of_program, rest) is compare(parts[0], program) is None
    flipped = outline_part(adjoint(p), 0).part(peers=3)
    assert follow(flipped, rest, pace) is None


@pytest.mark.parametrize("rank", [0, 9, 8])
def test_tensors_that_come_and_go_are_made_anew(rank: int) -> None:
    """A source has tensors more or less than before."""
    src = Layout((8,), Mesh(), "n")
    both = {"a": Layout((8,), Mesh(ranks=[8]), "n"), "b": Layout((8,), Mesh(ranks=[9]), "n")}
    p = plan(dict.fromkeys(both, src), both)
    rest = without(p, [8], window=True)
    parts = make(p, 2, 1 << 30)
    assert follow(parts[rank], rest, pace_of(parts)) is None
