"""Laws of plans cut into messages: pure Python, no processes."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

import shardmath as sm
from shardmath.plans.programs.cutting import Pace, cut_transfers, most_peers, set_pace
from shardmath.plans.programs.messages import (
    Message,
    gather_rounds,
    keeps_fold_order,
    staging_bytes,
)
from shardmath.plans.transfers import Transfer
from shardmath.testing.rounds import walk
from tests.distributed.tasks import cases

random_plan = functools.cache(cases.random_plan)

LIMITS = (32, 100, 4096, 1 << 20, 1 << 30)
SEEDS = range(25)


def pace_of(plan: sm.Plan, limit: int, by_addend: bool = False) -> Pace:
    """The pace on which all ranks of the plan would agree."""
    peers = max(most_peers([*plan.transfers(src=r), *plan.transfers(dst=r)]) for r in plan.ranks)
    return set_pace(plan.ranks, peers=peers, max_inflight_bytes=limit, by_addend=by_addend)


def cells(transfers: Iterable[Transfer]) -> Counter[tuple[Any, ...]]:
    """How often each element goes from where to where: (everything that names the transfer, places of the element)."""
    out: Counter[tuple[Any, ...]] = Counter()
    for t in transfers:
        fixed = (t.src_rank, t.dst_rank, t.tensor, t.addend, t.op, t.src_tensor, t.dst_tensor)
        ends = [
            [range(s.start, s.stop) for s in slices]
            for slices in (t.src_slices, t.dst_slices, t.global_slices)
        ]
        out.update(
            (fixed, *places)
            for places in zip(*(itertools.product(*end) for end in ends), strict=True)
        )
    return out


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("by_addend", [False, True])
def test_every_element_is_in_one_message(limit: int, by_addend: bool) -> None:
    """The pieces of all messages are the transfers, each element once."""
    for seed in SEEDS:
        plan = random_plan(seed)
        cut = cut_transfers(plan.transfers(), pace_of(plan, limit, by_addend))
        assert cells(p for m in cut for p in m.pieces) == cells(plan.transfers())


@pytest.mark.parametrize("limit", LIMITS)
def test_both_ends_cut_alike(limit: int) -> None:
    """What a sender sends to a receiver is what that receiver expects from it, in the same order."""
    for seed in SEEDS:
        plan = random_plan(seed)
        pace = pace_of(plan, limit)
        sent = {r: cut_transfers(plan.transfers(src=r), pace) for r in plan.ranks}
        got = {r: cut_transfers(plan.transfers(dst=r), pace) for r in plan.ranks}
        for a in plan.ranks:
            for b in plan.ranks:
                assert [m for m in sent[a] if m.dst_rank == b] == [
                    m for m in got[b] if m.src_rank == a
                ]


@pytest.mark.parametrize("limit", LIMITS)
def test_staging_is_bounded(limit: int) -> None:
    """No message is above the pace's size, no round of any rank above the limit."""
    for seed in SEEDS:
        plan = random_plan(seed)
        pace = pace_of(plan, limit)
        cut = cut_transfers(plan.transfers(), pace)
        assert all(0 < m.nbytes <= pace.message_bytes for m in cut)
        assert all(staging_bytes(one) <= limit for r in plan.ranks for one in gather_rounds(cut, r))


def test_pieces_lie_apart_and_aligned() -> None:
    """Pieces follow each other inside their message, each at a multiple of its element's size."""
    for seed in SEEDS:
        plan = random_plan(seed)
        for m in cut_transfers(plan.transfers(), pace_of(plan, 256)):
            ends = [0]
            for piece, start in zip(m.pieces, m.starts, strict=True):
                assert start >= ends[-1]
                assert start % (piece.nbytes // math.prod(piece.shape)) == 0
                ends.append(start + piece.nbytes)
            assert ends[-1] == m.nbytes


@pytest.mark.parametrize("limit", LIMITS)
def test_rounds_do_not_deadlock(limit: int) -> None:
    """Ranks that post a round, wait for all of it and go on, each at its own pace, all finish."""
    for seed in SEEDS:
        plan = random_plan(seed)
        cut = cut_transfers(plan.transfers(), pace_of(plan, limit))
        walk({r: gather_rounds(cut, r) for r in plan.ranks})


@pytest.mark.parametrize("limit", LIMITS)
def test_addends_come_in_order(limit: int) -> None:
    """Where `keeps_fold_order` says so, and always one addend after the other, an element's addends come in order."""
    for seed in SEEDS:
        plan = random_plan(seed)
        for by_addend in (False, True):
            cut = cut_transfers(plan.transfers(), pace_of(plan, limit, by_addend))
            for r in plan.dst_ranks:
                mine = [m for m in cut if m.dst_rank == r]
                if keeps_fold_order(gather_rounds(cut, r)):
                    assert _in_order(mine)
                else:
                    assert not by_addend


def _in_order(mine: list[Message]) -> bool:
    """By brute force over elements: sorting by (step, addend) sorts each element's pieces by addend."""
    last: dict[object, int] = {}
    for _, addend, p in sorted(
        ((m.step, p.addend, p) for m in mine for p in m.pieces), key=lambda x: x[:2]
    ):
        for _, _, dst, _ in cells([p]):
            if last.get((p.dst_tensor, dst), -1) > addend:
                return False
            last[p.dst_tensor, dst] = addend
    return True


def test_few_peers_go_at_once_where_the_limit_is_small() -> None:
    """Many peers and little room: streams take turns rather than being cut to crumbs."""
    pace = set_pace(tuple(range(1000)), peers=999, max_inflight_bytes=1 << 20, by_addend=False)
    assert (pace.peers_at_once, pace.message_bytes) == (8, 1 << 16)


def test_no_room_is_an_error() -> None:
    """A limit below one element each way cannot be kept."""
    with pytest.raises(
        sm.ExchangeError, match=r"max_inflight_bytes=31 has no room.*pass 32 or more"
    ):
        set_pace((0, 1), peers=1, max_inflight_bytes=31, by_addend=False)
