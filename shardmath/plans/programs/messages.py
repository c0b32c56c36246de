"""Messages and rounds: what ranks post, of a plan and of a program alike.

1. A **message** is what one rank sends another in one go, and the same value at both ends. One from
   a rank to itself is kept, and never meets the wire.
2. A **round** is one rank's messages of one step. Every rank walks its rounds in one order of
   steps, and posts all of a round before it waits: the earliest step in which anybody waits has all
   of its messages posted, so there is no deadlock.
3. What leaves a holder is of leg 1. A plan has nothing else; a program relays in later legs.
4. Pieces that are folded into one element (a reduction) must come in order of addend.
   `keeps_fold_order` says whether rounds bring them so.

>>> send, receive = (make_message((0, 0, 0), *ends, leg=1, pieces=()) for ends in ((0, 1), (1, 0)))
>>> print(*gather_rounds([send, receive], rank=0))
phase 0, slot 0, turn 0
  receive 0 B from rank 1 in 0 pieces, leg 1
  send 0 B to rank 1 in 0 pieces, leg 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from shardmath.base.text import plural
from shardmath.layouts.algebra.box import Box, from_slices
from shardmath.plans.plan import Transfer

__all__ = [
    "MOST_OPS",
    "Message",
    "Round",
    "Step",
    "align",
    "gather_rounds",
    "itemsize_of",
    "keeps_fold_order",
    "make_message",
    "staging_bytes",
]

ALIGNMENT = 16
"""Bytes; the largest element of any type, so that a message may begin with any of them."""

MOST_OPS = 8000
"""Messages of a rank in a round, sent and received: of one group of NCCL's 24,000 hang and 8,000 pass (pytorch 174288).
Rounds are cut by what both ends of a message know; a rank that cut its own would wait for what is in another group."""

Step: TypeAlias = tuple[int, int, int]
"""(phase, slot, turn), in the order in which ranks walk them.

Phases bring the addends of what is folded one after the other, slots divide what goes from rank to
rank, turns the peers of a rank.
"""


class Message(NamedTuple):
    """What one rank sends another in one go: `nbytes` bytes, piece i from byte `starts[i]` on.

    A piece begins where its elements may, after the end of the piece before. From leg 2 on a
    message is relayed.
    """

    step: Step
    src_rank: int
    dst_rank: int
    leg: int
    pieces: tuple[Transfer, ...]
    starts: tuple[int, ...]
    nbytes: int

    @property
    def payload(self) -> int:
        """Bytes of the pieces, without what aligns them."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def relayed(self) -> bool:
        """Whether the sender reads the pieces from its destination tensors, where they have come."""
        return self.leg > 1

    def __str__(self) -> str:
        return f"{self.nbytes} B from rank {self.src_rank} to rank {self.dst_rank}{_tail(self)}"


def _tail(m: Message) -> str:
    """What is said of a message after its ends."""
    return f" in {plural(m.pieces, 'piece')}, leg {m.leg}"


class Round(NamedTuple):
    """One rank's messages of one step: posted together, done before the next.

    They are at least one. `keeps` stay on the rank.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    keeps: tuple[Message, ...]

    @property
    def step(self) -> Step:
        """The step of all of its messages."""
        return self.messages[0].step

    @property
    def messages(self) -> tuple[Message, ...]:
        """All of them: those kept, received and sent."""
        return (*self.keeps, *self.receives, *self.sends)

    @property
    def arriving(self) -> tuple[Message, ...]:
        """Those that bring something to this rank: received or kept."""
        return (*self.receives, *self.keeps)

    def __str__(self) -> str:
        phase, slot, turn = self.step
        lines = [f"phase {phase}, slot {slot}, turn {turn}"]
        for m in self.keeps:
            lines.append(f"keep {m.nbytes} B of rank {m.src_rank}{_tail(m)}")
        for m in self.receives:
            lines.append(f"receive {m.nbytes} B from rank {m.src_rank}{_tail(m)}")
        for m in self.sends:
            lines.append(f"send {m.nbytes} B to rank {m.dst_rank}{_tail(m)}")
        return "\n  ".join(lines)


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


def itemsize_of(t: Transfer) -> int:
    """The bytes of an element of a transfer."""
    return t.nbytes // math.prod(t.shape)


def make_message(
    step: Step, src_rank: int, dst_rank: int, leg: int, pieces: Sequence[Transfer]
) -> Message:
    """The message of these pieces, each where its elements may begin."""
    starts = []
    end = 0
    for piece in pieces:
        start = align(end, itemsize_of(piece))
        starts.append(start)
        end = start + piece.nbytes
    return Message(step, src_rank, dst_rank, leg, tuple(pieces), tuple(starts), end)


def gather_rounds(given: Iterable[Message], rank: int) -> tuple[Round, ...]:
    """The rounds of a rank: the messages from and to it, step by step; others are left out.

    Several messages of one step between the same ranks stay in the order in which they are given.
    """
    # Both ends list what they share in one order, so messages of a pair are matched by order alone.
    steps: dict[Step, list[Message]] = {}
    for m in given:
        if rank in (m.src_rank, m.dst_rank):
            posted = steps.setdefault(m.step, [])
            posted.append(m)
    in_order = sorted(steps)
    return tuple(_make_round(steps[step], rank) for step in in_order)


def _make_round(posted: list[Message], rank: int) -> Round:
    """The round of a rank that posts these messages."""
    sends = []
    receives = []
    keeps = []
    for m in posted:
        if m.src_rank == m.dst_rank:
            keeps.append(m)
        elif m.src_rank == rank:
            sends.append(m)
        else:
            receives.append(m)
    # Sends to the ranks behind this one come first, and receives from those before it, so that not
    # all call on one rank.
    sends.sort(key=lambda m: (m.dst_rank < rank, m.dst_rank))
    receives.sort(key=lambda m: (m.src_rank > rank, -m.src_rank))
    return Round(tuple(sends), tuple(receives), tuple(keeps))


def staging_bytes(one: Round) -> int:
    """Bytes that stage all messages of the round that travel."""
    travelling = (*one.sends, *one.receives)
    return sum(align(m.nbytes) for m in travelling)


# The order of addends

_ByAddend: TypeAlias = dict[int, list[tuple[Step, Box]]]
"""What comes of each addend of a tensor: the boxes, and in which steps."""


def keeps_fold_order(rounds: Iterable[Round]) -> bool:
    """Whether a rank's rounds bring the pieces of every element in order of addend.

    Rounds are ordered and pieces of one round are folded in order of addend, so two cases are
    enough for a tensor: its addends come in rounds one after the other, or they all bring the same
    boxes in the same rounds. (Boxes of one addend are disjoint, since each element receives each
    addend once.)
    """
    brought: dict[str, _ByAddend] = {}
    for one in rounds:
        for m in one.arriving:
            for piece in m.pieces:
                by_addend = brought.setdefault(piece.dst_tensor, {})
                boxes = by_addend.setdefault(piece.addend, [])
                box = from_slices(piece.dst_slices)
                boxes.append((m.step, box))
    tensors = brought.values()
    return all(_are_apart(tensor) or _are_alike(tensor) for tensor in tensors)


def _are_apart(by_addend: _ByAddend) -> bool:
    """Whether addends come one after the other, in steps that meet in one at most."""
    in_order = [by_addend[addend] for addend in sorted(by_addend)]
    for boxes, later in itertools.pairwise(in_order):
        last = max(step for step, _ in boxes)
        first = min(step for step, _ in later)
        if last > first:
            return False
    return True


def _are_alike(by_addend: _ByAddend) -> bool:
    """Whether all addends bring the same boxes in the same steps."""
    first, *rest = (sorted(boxes) for boxes in by_addend.values())
    return all(boxes == first for boxes in rest)
