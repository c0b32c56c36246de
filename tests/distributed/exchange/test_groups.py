"""What ranks start together over NCCL: groups that pair with each other, of at most so many messages.

A wire that records stands in the place of NCCL's, in one process: what is checked is the order of groups, not NCCL.
`run_groups` goes by what NCCL says of groups: a rank's run one after the other, each until all of its messages have met
their other ends, which are found by order alone.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

import shardmath as sm
from shardmath.plans.programs.messages import MOST_OPS
from shardmath.plans.programs.part import RankProgram, make_parts
from shardmath_torch.groups.agreement.wire import PeerFailure
from shardmath_torch.moves.exchange.engine import Exchange
from shardmath_torch.moves.exchange.task import Task
from shardmath_torch.moves.observing.stopwatch import Ledger, Stopwatch
from shardmath_torch.tensors.changes.walking import Walker
from tests.distributed.tasks.cases import random_plan

SEEDS = range(20)
FEW = 4
"""In the place of thousands."""


class Op(NamedTuple):
    """A message at one end: whether it is sent, to or from which rank, of how many bytes."""

    sends: bool
    rank: int
    nbytes: int


Groups = Mapping[int, Sequence[Sequence[Op]]]
"""Of each rank."""


class Recording:
    """A wire that notes what is started together. What is received stays as it was."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.posted: list[Op] = []
        self.groups: list[list[Op]] = []

    def receive(self, memory: torch.Tensor, rank: int) -> Recording:
        self.posted.append(Op(False, rank, memory.nbytes))
        return self

    def send(self, memory: torch.Tensor, rank: int) -> Recording:
        self.posted.append(Op(True, rank, memory.nbytes))
        return self

    def start(self) -> None:
        if self.posted:
            self.groups.append(self.posted)
        self.posted = []

    def wait(self) -> None:
        assert not self.posted, "waits for what has not been started"

    finish = wait


def run_groups(groups: Groups) -> None:
    """Run them to their ends. Raises AssertionError where ranks wait for each other for ever, or unlike sizes meet."""
    ends = _find_other_ends(groups)
    at = dict.fromkeys(groups, 0)
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, mine in groups.items():
            waits = ends.get((rank, at[rank]), ())
            if at[rank] < len(mine) and all(at[peer] >= number for peer, number in waits):
                at[rank] += 1
                is_moving = True
    stuck = {rank: at[rank] for rank, mine in groups.items() if at[rank] < len(mine)}
    assert not stuck, f"ranks wait for ever, each in the group of this number: {stuck}"


def _find_other_ends(groups: Groups) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """For each group of a rank: the groups, as (rank, number), that have the other ends of its messages."""
    posted: dict[tuple[int, int, bool], list[tuple[int, int]]] = collections.defaultdict(list)
    for rank, mine in groups.items():
        for number, group in enumerate(mine):
            for op in group:
                pair = (rank, op.rank) if op.sends else (op.rank, rank)
                posted[(*pair, op.sends)].append((number, op.nbytes))
    ends: dict[tuple[int, int], list[tuple[int, int]]] = collections.defaultdict(list)
    for src, dst, sends in list(posted):
        sent, got = posted[src, dst, True], posted[src, dst, False]
        assert [nbytes for _, nbytes in sent] == [nbytes for _, nbytes in got]
        for (here, _), (there, _) in zip(sent, got, strict=True):
            if sends:
                ends[src, here].append((dst, there))
                ends[dst, there].append((src, here))
    return ends


def record(parts: Sequence[RankProgram]) -> dict[int, list[list[Op]]]:
    """What the exchange starts together, by rank."""
    found = {}
    for part in parts:
        wire: Any = Recording()
        src, dst = make_tensors(part)
        engine = Exchange(Task(part, Group(), wire))
        engine.prepare(src, dst)
        engine.move(src, dst, time_nothing())
        found[part.rank] = wire.groups
    return found


def time_nothing() -> Stopwatch:
    """A watch of a call that nobody looks at."""
    ledger = Ledger("a move", None, 0, logged=False)
    return ledger.time("", None)


class Group:
    """In the place of a process group, which staging belongs to."""


def make_tensors(part: RankProgram) -> Iterator[dict[str, torch.Tensor]]:
    """A rank's tensors of both sides."""
    for side in (part.sources, part.destinations):
        yield {
            key: torch.zeros(layout.local_shape(part.rank), dtype=getattr(torch, layout.dtype))
            for key, (_, layout) in side.items()
        }


def count_most(groups: Groups) -> int:
    """The messages of the largest group."""
    return max((len(group) for mine in groups.values() for group in mine), default=0)


@pytest.fixture(params=[FEW, MOST_OPS])
def most(request: pytest.FixtureRequest) -> Iterator[int]:
    """How many messages a group may have."""
    with mock.patch("shardmath.plans.programs.cutting.MOST_OPS", request.param):
        yield request.param


def test_groups_of_plans_meet(most: int) -> None:
    """Every message is in groups that come up together at both its ends, and no group is too large."""
    largest = 0
    for seed in SEEDS:
        for limit in (64, 1 << 30):
            groups = record(make_parts(random_plan(seed), max_inflight_bytes=limit))
            run_groups(groups)
            largest = max(largest, count_most(groups))
    assert largest <= most
    # The bound is met, not only kept.
    assert largest == FEW or most == MOST_OPS


def test_groups_of_programs_meet() -> None:
    """With relays, and with as few messages in a group as there can be."""
    mesh = sm.Mesh(dp=2, tp=4)
    p = sm.plan(sm.Layout((64, 64), mesh, "(tp dp n) h"), sm.Layout((64, 64), mesh, "n (tp h)"))
    for per_node in (2, 4):
        for ops in (2, 3, 100):
            where = sm.Topology(ranks_per_node=per_node, latency_s=0.0)
            program = sm.schedule(p, topology=where, fanout="node", max_ops_per_group=ops)
            groups = record(make_parts(program))
            run_groups(groups)
            assert 0 < count_most(groups) <= ops


def test_groups_of_what_changes_are_told_in_meet(most: int) -> None:
    """Before changes move, ranks tell each other how many there are."""
    largest = 0
    for seed in SEEDS:
        plan = random_plan(seed, ops=())
        groups = {}
        for part in make_parts(plan):
            wire: Any = Recording()
            walker = Walker(Task(part, Group(), wire), *make_tensors(part))
            walker.exchange_counts(walker.sort([]), time_nothing())
            groups[part.rank] = wire.groups
        run_groups(groups)
        largest = max(largest, count_most(groups))
    assert largest <= most
    assert largest == FEW or most == MOST_OPS


class Broken(Recording):
    """A wire on which nothing goes."""

    def send(self, memory: torch.Tensor, rank: int) -> Recording:
        raise PeerFailure(rank, "its connection closed")


def test_whoever_fails_in_telling_how_much_changed_fails_in_a_tensor() -> None:
    """As in a whole move: the error says what was on its way, and the watch whom it waited for."""
    a, b = sm.Mesh(), sm.Mesh(ranks=(1,))
    plan = sm.plan({"w": sm.Layout((4,), a, "n")}, {"w": sm.Layout((4,), b, "n")})
    first, second = make_parts(plan)
    broken: Any = Broken()
    whole: Any = Recording()
    sender = Walker(Task(first, Group(), broken), *make_tensors(first))
    with pytest.raises(PeerFailure) as failed:
        sender.exchange_counts(sender.sort([]), time_nothing())
    assert (failed.value.rank, failed.value.tensor) == (1, "w")
    receiver = Walker(Task(second, Group(), whole), *make_tensors(second))
    watch = time_nothing()
    receiver.exchange_counts(receiver.sort([]), watch)
    assert list(watch.sum_up().waited) == [0]


def test_groups_that_each_rank_cuts_for_itself_do_not_meet() -> None:
    """Why rounds are cut by what both ends know: 8 messages of each rank, of which it would take 4 at a time."""
    everybody = range(5)
    groups = {
        rank: [
            [Op(sends, peer, 16) for sends in (False, True) for peer in everybody if peer != rank]
        ]
        for rank in everybody
    }
    run_groups(groups)
    cut = {rank: [group[:4], group[4:]] for rank, (group,) in groups.items()}
    with pytest.raises(AssertionError, match="ranks wait for ever"):
        run_groups(cut)


def test_many_peers_take_turns() -> None:
    """Of 10,000 ranks each of which has something for each, a rank has 4,000 in hand each way."""
    from shardmath.plans.programs.cutting import set_pace

    room = 1 << 40
    pace = set_pace(tuple(range(10_000)), peers=9_999, max_inflight_bytes=room, by_addend=False)
    assert pace.peers_at_once == MOST_OPS // 2 == 4000
