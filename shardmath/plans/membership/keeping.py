"""Keeping: what a rank does once others have left or come back, of what it did before.

1. Ranks that stay send each other what they sent before, so their messages are the same objects as
   long as the pace is the same. Those for ranks that are gone fall out, those for ranks that are
   back are made anew.
2. `follow` gives what `outline_part(...).part(...)` gives of the new plan at that pace, or None
   where nothing can be kept: the plan is of another `whole`, or goes at another pace. What the rank
   stores is said by the layouts of the plan before: on this rank they are the same.

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

from shardmath.plans.plan import Plan, Transfer, spell_transfers
from shardmath.plans.programs.cutting import Pace, cut_transfers
from shardmath.plans.programs.messages import Message, Round, gather_rounds
from shardmath.plans.programs.part import RankProgram
from shardmath.plans.stretches import list_sent

__all__ = ["MembershipChange", "compare", "count_peers", "follow"]


class MembershipChange(NamedTuple):
    """The ranks that have left since, and those that are back."""

    gone: frozenset[int]
    back: frozenset[int]


def compare(part: RankProgram, plan: object) -> MembershipChange | None:
    """Who has left the plan of the part, and who is back; None where this is another plan, or the rank had left.

    Programs are others: who leaves may have relayed what others get.
    """
    before = part.plan
    if part.pace is None or not isinstance(before, Plan) or not isinstance(plan, Plan):
        return None
    if part.rank in before.left or not _are_related(before, plan):
        return None
    left = frozenset(plan.left)
    had_left = frozenset(before.left)
    return MembershipChange(left - had_left, had_left - left)


def _are_related(one: Plan, other: Plan) -> bool:
    """Whether they are of the same tensors, and differ in who has left and in nothing else."""
    whole = one.whole or one
    if whole != (other.whole or other):
        return False
    # Tensors that nobody asks for are in no plan.
    tensors = len(whole.src)
    return tensors == len(one.src) == len(other.src)


def count_peers(part: RankProgram, plan: Plan) -> int:
    """The `peers` of an outline of the plan, for a rank that stays in it."""
    # What a rank receives comes from whom it came before.
    senders: set[int] = set()
    for one in part.rounds:
        senders.update(m.src_rank for m in one.receives)
    receivers: set[int] = set()
    if part.rank in plan.src_ranks:
        sent = list_sent(plan.lines, part.rank)
        receivers.update(stretch.receiver for stretch in sent)
    return max(len(senders), len(receivers))


def follow(part: RankProgram, plan: Plan, pace: Pace) -> RankProgram | None:
    """The rank's part in a plan from which ranks have left, or to which they have come back.

    None where nothing of the part can be kept.
    """
    found = compare(part, plan)
    if found is None or part.pace is None or not part.pace.is_like(pace):
        return None
    if part.rank in found.gone:
        return _leave(part.rank, plan, pace)
    rounds = part.rounds
    # Nobody who leaves is a source, so that of two destinations neither sends the other anything.
    if part.rank in plan.src_ranks:
        rounds = _drop(rounds, found.gone)
        new = list(_list_new(plan, part.rank, found.back))
        rounds = _add(rounds, new, pace, part.rank)
    return replace(part, plan=plan, rounds=rounds, pace=pace)


def _leave(rank: int, plan: Plan, pace: Pace) -> RankProgram:
    """What a rank does that has left: nothing."""
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


def _drop(rounds: tuple[Round, ...], gone: Collection[int]) -> tuple[Round, ...]:
    """The rounds without what goes to ranks that are gone."""
    if not gone:
        return rounds
    kept = []
    for one in rounds:
        sends = [m for m in one.sends if m.dst_rank not in gone]
        if sends or one.receives or one.keeps:
            kept.append(Round(tuple(sends), one.receives, one.keeps))
    return tuple(kept)


def _list_new(plan: Plan, rank: int, back: Collection[int]) -> Iterator[Transfer]:
    """What the rank sends to those who are back."""
    if not back:
        return
    for stretch in list_sent(plan.lines, rank):
        if stretch.receiver in back:
            yield from spell_transfers(plan, plan.lines, stretch)


def _add(
    rounds: tuple[Round, ...], transfers: list[Transfer], pace: Pace, rank: int
) -> tuple[Round, ...]:
    """The rounds with what is sent besides."""
    if not transfers:
        return rounds
    messages: list[Message] = [m for one in rounds for m in one.messages]
    messages += cut_transfers(transfers, pace)
    return gather_rounds(messages, rank)
