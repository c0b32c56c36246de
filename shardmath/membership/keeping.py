"""Keeping: what a rank does once others have left or come back, of what it did before.

1. Ranks that stay send each other what they sent before, so their messages are the same objects as
   long as the pace is the same. Those for ranks that are gone fall out, those for ranks that are
   back are made anew.
2. `follow` gives what `outline_part(...).part(...)` gives of the new plan at that pace, or None
   where nothing can be kept: the plan is of another `whole`, or goes at another pace. What the rank
   stores is said by the layouts of the plan before: on this rank they are the same.

>>> from shardmath import Layout, Mesh, plan, without
>>> from shardmath.programs.part import make_parts
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

from shardmath.plans.plan import Plan, Transfer, spell_transfers
from shardmath.plans.stretches import list_sent
from shardmath.programs.cutting import Pace, cut_transfers
from shardmath.programs.messages import Message, Round, gather_rounds
from shardmath.programs.part import Part

__all__ = ["can_follow", "find_gone", "follow"]


def can_follow(part: Part, plan: object) -> bool:
    """Whether the plan is that of the part but for who has left, on whose side the part's rank is not."""
    before = part.plan
    if not isinstance(before, Plan) or not isinstance(plan, Plan):
        return False
    one = before.whole or before
    other = plan.whole or plan
    stays = part.rank not in before.left and part.rank not in plan.left
    return one == other and stays


def find_gone(part: Part, plan: Plan) -> frozenset[int]:
    """Who has left since the part was made."""
    before = part.plan.left if isinstance(part.plan, Plan) else ()
    gone = set(plan.left).difference(before)
    return frozenset(gone)


def follow(part: Part, plan: Plan, pace: Pace) -> Part | None:
    """The rank's part in a plan from which others have left, or to which they have come back.

    None where nothing of the part can be kept.
    """
    if part.pace is None or not part.pace.is_like(pace) or not can_follow(part, plan):
        return None
    before = part.plan
    assert isinstance(before, Plan), "can_follow says so"
    # Tensors that nobody asked for are in the plan again, or no longer.
    if plan.src is not before.src:
        return None
    gone = find_gone(part, plan)
    back = frozenset(before.left).difference(plan.left)
    rounds = part.rounds
    # Nobody who leaves is a source, so that of two destinations neither sends the other anything.
    if part.rank in plan.src_ranks:
        rounds = _drop(rounds, gone)
        new = list(_list_new(plan, part.rank, back))
        rounds = _add(rounds, new, pace, part.rank)
    return replace(part, plan=plan, rounds=rounds, pace=pace)


def _drop(rounds: tuple[Round, ...], gone: Collection[int]) -> tuple[Round, ...]:
    """The rounds without what goes to ranks that are gone."""
    if not gone:
        return rounds
    kept = []
    for one in rounds:
        sends = tuple(m for m in one.sends if m.dst_rank not in gone)
        if sends or one.receives or one.keeps:
            kept.append(one._replace(sends=sends))
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
