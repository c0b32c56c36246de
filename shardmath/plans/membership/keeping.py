"""Keeping: a rank's part after others have left or come back, made from its part before.

1. Ranks that stay send each other the same bytes as before, so their messages are the same objects as
   long as the pace is the same. Messages for ranks that are gone are dropped, messages for ranks that
   are back are made again.
2. `follow` returns what `outline_part(...).part(...)` returns for the new plan at that pace, or None
   if nothing can be kept: the plan has another `whole`, or another pace. The part keeps the layouts
   of the plan before: on this rank they are the same.

>>> from shardmath import Layout, Mesh, plan, without
>>> from shardmath.plans.programs.part import make_parts
>>> p = plan(Layout((4,), Mesh(tp=1), "n"), Layout((4,), Mesh(engine=3, ranks=[1, 2, 3]), "n"))
>>> trainer, _, engine, _ = make_parts(p)
>>> rest = without(p, [1])
>>> print(*follow(trainer, rest, trainer.pace).rounds)
phase 0, slot 0, turn 0
  send 16 B to rank 2 in 1 piece, leg 1
  send 16 B to rank 3 in 1 piece, leg 1
>>> follow(engine, rest, trainer.pace).rounds is engine.rounds
True
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardmath.plans.plan import Plan
from shardmath.plans.programs.cutting import Pace, cut_transfers
from shardmath.plans.programs.messages import Message, Round, gather_rounds
from shardmath.plans.programs.part import RankProgram
from shardmath.plans.spelling import list_stretches, spell_stretches
from shardmath.plans.stretches import list_sent
from shardmath.plans.transfers import Transfer

__all__ = ["MembershipChange", "compare", "count_peers", "follow"]


class MembershipChange(NamedTuple):
    """The ranks that have left a plan since an earlier one (`gone`), and those that have come back (`back`)."""

    gone: frozenset[int]
    back: frozenset[int]


def compare(part: RankProgram, plan: object) -> MembershipChange | None:
    """Find which ranks left, and which came back, between the plan of `part` and `plan`; None if the plans are
    unrelated, or if the part's rank had left.

    A program is not related to a plan: a rank that leaves may have relayed bytes for others.
    """
    before = part.plan
    # The part of a program has a plan too, but no pace.
    if part.pace is None or not isinstance(before, Plan) or not isinstance(plan, Plan):
        return None
    if part.rank in before.left or not _are_related(before, plan):
        return None
    left = frozenset(plan.left)
    had_left = frozenset(before.left)
    return MembershipChange(left - had_left, had_left - left)


def _are_related(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same tensors and the same whole plan, and differ only in the ranks that left."""
    whole = one.whole or one
    if whole != (other.whole or other):
        return False
    # A tensor that no rank asks for is not in the plan.
    tensors = len(whole.src)
    return tensors == len(one.src) == len(other.src)


def count_peers(part: RankProgram, plan: Plan) -> int:
    """Return the number of ranks that `part.rank` sends to under `plan`, or receives from, whichever is larger."""
    # A rank that stays receives from the same ranks as before.
    senders: set[int] = set()
    for each_round in part.rounds:
        senders.update(m.src_rank for m in each_round.receives)
    receivers: set[int] = set()
    if part.rank in plan.src_ranks:
        sent = list_sent(plan.lines, part.rank)
        receivers.update(stretch.receiver for stretch in sent)
    return max(len(senders), len(receivers))


def follow(part: RankProgram, plan: Plan, pace: Pace) -> RankProgram | None:
    """Adapt the RankProgram `part` to `plan`, in which ranks left or came back, and keep the messages between the other
    ranks. Returns None if this is not possible, such as if `pace` (message size, peers at once) would cut messages
    differently."""
    change = compare(part, plan)
    if change is None or part.pace is None or not part.pace.is_like(pace):
        return None
    if part.rank in change.gone:
        return _make_empty_part(part.rank, plan, pace)
    rounds = part.rounds
    # Ranks that leave are destinations only, so the rounds of other destinations do not change.
    if part.rank in plan.src_ranks:
        rounds = _drop_sends(rounds, change.gone)
        new = list(_list_new(plan, part.rank, change.back))
        rounds = _add_sends(rounds, new, pace, part.rank)
    return replace(part, plan=plan, rounds=rounds, pace=pace)


def _make_empty_part(rank: int, plan: Plan, pace: Pace) -> RankProgram:
    """The part of a rank that has left: it does nothing."""
    return RankProgram(
        plan=plan,
        rank=rank,
        sources={},
        destinations={},
        rounds=(),
        fills=(),
        divisions=(),
        operations=frozenset(),
        keeps_order=True,
        pace=pace,
    )


def _drop_sends(rounds: tuple[Round, ...], gone: Collection[int]) -> tuple[Round, ...]:
    """The rounds without messages to ranks that are gone, and without rounds in which nothing else happens."""
    if not gone:
        return rounds
    kept = []
    for round_ in rounds:
        sends = [m for m in round_.sends if m.dst_rank not in gone]
        if sends or round_.receives or round_.keeps:
            kept.append(Round(tuple(sends), round_.receives, round_.keeps))
    return tuple(kept)


def _list_new(plan: Plan, rank: int, back: Collection[int]) -> Iterator[Transfer]:
    """The transfers from the rank to ranks that are back."""
    if not back:
        return
    given = list_stretches(plan, rank, None)
    is_new = np.isin(given.receiver, sorted(back))
    yield from spell_stretches(plan, given.take(is_new))


def _add_sends(
    rounds: tuple[Round, ...], transfers: list[Transfer], pace: Pace, rank: int
) -> tuple[Round, ...]:
    """The rounds with messages for further transfers."""
    if not transfers:
        return rounds
    messages: list[Message] = [m for before in rounds for m in before.messages]
    messages += cut_transfers(transfers, pace)
    return gather_rounds(messages, rank)
