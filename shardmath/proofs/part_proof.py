"""Proof of parts: the messages that ranks post, round by round, do what their plan says.

1. Ranks walk their steps in one ascending order, and post all of a step before they wait. The two
   ranks of a message both post it, in the same step and in the same order among their messages.
   So the earliest step in which any rank waits has all of its messages: there is no deadlock.
2. Pieces are transfers of the plan cut to size: they tile each transfer, without overlap. (A program's
   pieces may be relayed; the program's proof shows that they bring what the plan promises.)
3. The pieces of a message lie in it one after the other, each aligned to its elements.
4. The addends of an element enter in their order.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from shardmath.base.errors import PlanError
from shardmath.layouts.algebra.box import first_gap, first_overlap, from_slices
from shardmath.layouts.holdings import label
from shardmath.plans.adjoint import Transposed
from shardmath.plans.plan import Plan
from shardmath.plans.programs.messages import Message, Step, align
from shardmath.plans.programs.part import RankProgram
from shardmath.plans.transfers import Transfer

__all__ = ["prove_parts"]

FIX = "make the parts of all ranks of one plan or program"


class _Pair(NamedTuple):
    """Messages of one step from one rank to another."""

    step: Step
    src_rank: int
    dst_rank: int


def prove_parts(parts: Sequence[RankProgram], *, relays: bool = False) -> None:
    """Raise PlanError unless the RankPrograms of all ranks fit together: what one rank sends, the other must receive,
    in the same order. If `relays` is False, messages must also carry exactly the transfers of the plan; if ranks can
    forward bytes, this is not checked.

    Pieces must be aligned in their messages, and the addends of an element in order. `relays` is for a program's parts.
    """
    for part in parts:
        _check_steps(part)
        for posted in part.rounds:
            for message in posted.messages:
                _check_places(message)
        if not part.keeps_order:
            raise PlanError(
                f"rank {part.rank} folds addends out of order; {FIX}, with by_addend=True"
            )
    _check_both_ends(parts)
    if parts and not relays:
        _check_pieces(parts[0].plan, parts)


def _check_steps(part: RankProgram) -> None:
    """Check that each round has one step, later than the step of the round before."""
    before: Step | None = None
    for posted in part.rounds:
        distinct = {message.step for message in posted.messages}
        steps = sorted(distinct)
        if len(steps) != 1 or (before is not None and steps[0] <= before):
            what = f"rank {part.rank} has a round of the steps {steps} after step {before}"
            raise PlanError(f"{what}; {FIX}")
        before = steps[0]


def _check_places(message: Message) -> None:
    """Check that each piece begins at the first aligned byte after the piece before it."""
    end = 0
    for piece, start in zip(message.pieces, message.starts, strict=True):
        itemsize = piece.nbytes // math.prod(piece.shape)
        if start != align(end, itemsize):
            what = f"rank {message.src_rank} sends {piece} at byte {start} of its message"
            raise PlanError(f"{what}, and the piece before ends at {end}; {FIX}")
        end = start + piece.nbytes
    if end != message.nbytes:
        raise PlanError(f"a message of {message.nbytes} B has pieces up to byte {end}; {FIX}")


def _check_both_ends(parts: Sequence[RankProgram]) -> None:
    """Check that what one rank sends, the other receives, in the same step and order."""
    sent: dict[_Pair, list[Message]] = defaultdict(list)
    received: dict[_Pair, list[Message]] = defaultdict(list)
    for part in parts:
        for posted in part.rounds:
            for message in posted.sends:
                pair = _Pair(message.step, part.rank, message.dst_rank)
                sent[pair].append(message)
            for message in posted.receives:
                pair = _Pair(message.step, message.src_rank, part.rank)
                received[pair].append(message)
    pairs = sent.keys() | received.keys()
    for pair in sorted(pairs):
        sending = sent[pair]
        receiving = received[pair]
        if sending != receiving:
            sends = f"rank {pair.src_rank} sends {_show_sizes(sending)}"
            receives = f"rank {pair.dst_rank}, which receives {_show_sizes(receiving)}"
            raise PlanError(f"in step {pair.step} {sends} to {receives}; {FIX}")


def _show_sizes(posted: Sequence[Message]) -> str:
    """The bytes of each message, as text."""
    sizes = [f"{message.nbytes} B" for message in posted]
    return " and ".join(sizes) or "nothing"


_Key = tuple[int, int, str, str, str, int, str]
"""What the pieces of one transfer share: ranks, tensor, local names, addend, operation."""


def _make_key(t: Transfer) -> _Key:
    return t.src_rank, t.dst_rank, t.tensor, t.src_tensor, t.dst_tensor, t.addend, t.op


def _check_pieces(plan: Plan | Transposed, parts: Sequence[RankProgram]) -> None:
    """Check that the pieces cut from each transfer tile it."""
    planned = _group_by_key(t for t in plan.transfers() if t.nbytes)
    posted = _group_by_key(_list_arriving(parts))
    keys = planned.keys() | posted.keys()
    for key in sorted(keys):
        _check_cut(key, planned[key], posted[key])


def _group_by_key(transfers: Iterable[Transfer]) -> defaultdict[_Key, list[Transfer]]:
    """The transfers of each key, in their order."""
    groups: defaultdict[_Key, list[Transfer]] = defaultdict(list)
    for t in transfers:
        key = _make_key(t)
        groups[key].append(t)
    return groups


def _list_arriving(parts: Sequence[RankProgram]) -> Iterator[Transfer]:
    """The pieces of all messages that any rank receives or keeps."""
    for part in parts:
        for posted in part.rounds:
            for message in posted.arriving:
                yield from message.pieces


def _check_cut(key: _Key, transfers: Sequence[Transfer], pieces: Sequence[Transfer]) -> None:
    """Check that the pieces of a key tile its transfers, in all three boxes: global, source and destination."""
    src, dst, tensor = key[:3]
    what = f"{label(tensor)} from rank {src} to rank {dst}"
    planned = sum(t.nbytes for t in transfers)
    posted = sum(piece.nbytes for piece in pieces)
    if planned != posted:
        sizes = f"pieces have {posted} B, but the plan's transfers have {planned} B"
        raise PlanError(f"{what}: {sizes}; {FIX}")
    # The destination's boxes stand for all three: a piece is at the same offset in each (`_is_inside`).
    boxes = [from_slices(piece.dst_slices) for piece in pieces]
    overlap = first_overlap(boxes)
    if overlap is not None:
        i, j = overlap
        raise PlanError(f"{what}: pieces {boxes[i]} and {boxes[j]} share an element; {FIX}")
    for t in transfers:
        gap = _find_gap(t, pieces)
        if gap is not None:
            raise PlanError(f"{what}: no piece brings local element {gap}; {FIX}")


def _find_gap(t: Transfer, pieces: Sequence[Transfer]) -> tuple[int, ...] | None:
    """The first cell of a transfer that no piece brings."""
    boxes = [from_slices(piece.dst_slices) for piece in pieces if _is_inside(piece, t)]
    held = [[span] for span in from_slices(t.dst_slices)]
    return first_gap(held, boxes)


def _is_inside(piece: Transfer, t: Transfer) -> bool:
    """Whether the piece is a part of the transfer, at the same offset in all three boxes."""
    source = _find_offset(piece.src_slices, t.src_slices)
    target = _find_offset(piece.dst_slices, t.dst_slices)
    tensor = _find_offset(piece.global_slices, t.global_slices)
    return source is not None and source == target == tensor


def _find_offset(box: tuple[slice, ...], outer: tuple[slice, ...]) -> tuple[int, ...] | None:
    """The offset of a box in an outer box; None if it is not inside."""
    offset = []
    for inside, whole in zip(box, outer, strict=True):
        if inside.start < whole.start or whole.stop < inside.stop:
            return None
        offset.append(inside.start - whole.start)
    return tuple(offset)
