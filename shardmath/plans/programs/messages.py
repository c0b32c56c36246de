"""Messages and rounds: what ranks post, for a plan and for a program.

1. A **message** is what one rank sends another at once, and the same value at both ends. A message
   from a rank to itself is kept, and never sent.
2. A **round** is one rank's messages of one step. Every rank walks its rounds in one order of
   steps, and posts all of a round before it waits: the earliest step in which any rank waits has all
   of its messages posted, so there is no deadlock.
3. Messages from holders are of leg 1. A plan has no others; a program relays in later legs.
4. Pieces that are folded into one element (a reduction) must arrive in order of addend.
   `keeps_fold_order` says whether rounds keep that order.

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
from shardmath.plans.programs.legs import HANDED, HANDING, RELAYING
from shardmath.plans.transfers import Transfer

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
    "start_after",
]

ALIGNMENT = 16
"""Bytes of the largest element of any dtype: a message may begin with any element."""

MOST_OPS = 8000
"""Most messages of a rank in a round, sent and received: in one group of NCCL 24,000 hang and 8,000 pass (pytorch
174288). Both ends must divide messages into rounds alike: otherwise one would wait for a message of another group."""

Step: TypeAlias = tuple[int, int, int]
"""(phase, slot, turn), in the order in which ranks walk them.

Phases bring the addends of a fold one after the other, slots divide streams from rank to rank, turns
divide the peers of a rank.
"""


class Message(NamedTuple):
    """A message of `nbytes` bytes from rank `src_rank` to rank `dst_rank`, which carries `pieces` (transfers, or parts
    of them) one after another. Piece i begins at byte `starts[i]` of the message.

    A piece begins at the first byte after the piece before that is aligned to its elements. In legs 2 and 3
    a message is relayed. In leg 4 the receiver only keeps it in staging, and in leg 5 sends it on as it is: its
    pieces are those that the holder would send straight, from its own tensors to the last receiver's.
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
        """The number of bytes of all pieces, without the padding between them."""
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def relayed(self) -> bool:
        """Whether the sender only relays the message: it reads the pieces from its destination tensors."""
        return self.leg in RELAYING

    @property
    def is_handing(self) -> bool:
        """Whether the receiver only keeps the message in staging, to send it on in the next slot."""
        return self.leg == HANDING

    @property
    def is_handed(self) -> bool:
        """Whether the sender sends what it was handed in the slot before, as it is."""
        return self.leg == HANDED

    def __str__(self) -> str:
        return (
            f"{self.nbytes} B from rank {self.src_rank} to rank {self.dst_rank}{_show_pieces(self)}"
        )


def _show_pieces(m: Message) -> str:
    """The number of pieces of a message and its leg, as text that follows its ends."""
    return f" in {plural(m.pieces, 'piece')}, leg {m.leg}"


class Round(NamedTuple):
    """All messages of one rank that are posted together, and completed before the next round.

    `keeps` stay on the rank.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    keeps: tuple[Message, ...]

    @property
    def step(self) -> Step:
        """The round's place in its program: (phase, slot, turn). They number the partial value that is sent, the time
        slot, and the group of peers with which a rank exchanges it."""
        return self.messages[0].step

    @property
    def messages(self) -> tuple[Message, ...]:
        """All messages of one rank in this round: first those from the rank to itself, then received ones, then sent
        ones."""
        return (*self.keeps, *self.receives, *self.sends)

    @property
    def arriving(self) -> tuple[Message, ...]:
        """The messages that bring elements to this rank's tensors: received or kept."""
        brought = [m for m in self.receives if not m.is_handing]
        return (*brought, *self.keeps)

    def __str__(self) -> str:
        phase, slot, turn = self.step
        lines = [f"phase {phase}, slot {slot}, turn {turn}"]
        for m in self.keeps:
            lines.append(f"keep {m.nbytes} B of rank {m.src_rank}{_show_pieces(m)}")
        for m in self.receives:
            lines.append(f"receive {m.nbytes} B from rank {m.src_rank}{_show_pieces(m)}")
        for m in self.sends:
            lines.append(f"send {m.nbytes} B to rank {m.dst_rank}{_show_pieces(m)}")
        return "\n  ".join(lines)


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """Round `nbytes` up to a multiple of `to`."""
    return -(-nbytes // to) * to


def itemsize_of(t: Transfer) -> int:
    """Return the number of bytes of an element in the transfer `t`."""
    return t.nbytes // math.prod(t.shape)


def start_after(end: int, t: Transfer) -> int:
    """Return where the transfer `t` begins in a message whose earlier pieces take `end` bytes."""
    # The size of an element divides ALIGNMENT, so that most pieces begin where the last one ends.
    return end if end % ALIGNMENT == 0 else align(end, itemsize_of(t))


def make_message(
    step: Step, src_rank: int, dst_rank: int, leg: int, pieces: Sequence[Transfer]
) -> Message:
    """Make a Message of `pieces`, one after the other, each aligned to its element size, for the round `step` (phase,
    slot, turn) and the hop `leg`."""
    starts = []
    end = 0
    for piece in pieces:
        start = start_after(end, piece)
        starts.append(start)
        end = start + piece.nbytes
    return Message(step, src_rank, dst_rank, leg, tuple(pieces), tuple(starts), end)


def gather_rounds(given: Iterable[Message], rank: int) -> tuple[Round, ...]:
    """Return the Rounds of `rank`, in order, made of the messages in `given` that it sends, receives or keeps.

    Several messages of one step between the same ranks stay in the given order.
    """
    # Both ends list their common messages in one order, so that order matches them.
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
    # Sends go to the ranks after this one first, and receives come from those before it first, so
    # that not all ranks begin with the same peer.
    sends.sort(key=lambda m: (m.dst_rank < rank, m.dst_rank))
    receives.sort(key=lambda m: (m.src_rank > rank, -m.src_rank))
    return Round(tuple(sends), tuple(receives), tuple(keeps))


def staging_bytes(posted: Round) -> int:
    """Return the bytes of buffers that a round needs for the messages that it sends or receives."""
    staged = (*posted.sends, *posted.receives)
    return sum(align(m.nbytes) for m in staged)


# The order of addends

_ByAddend: TypeAlias = dict[int, list[tuple[Step, Box]]]
"""By addend of a tensor: the boxes that arrive, and their steps."""


def keeps_fold_order(rounds: Iterable[Round]) -> bool:
    """Return whether the rounds of one rank are sure to bring the partial values of each element in ascending order of
    their numbers, so that they are summed in this order.

    Rounds are ordered and pieces of one round are folded in order of addend, so a tensor is in order
    in two cases: its addends arrive in rounds one after the other, or they all bring the same
    boxes in the same rounds. (Boxes of one addend are disjoint, since each element receives each
    addend once.)
    """
    arriving = [m for posted in rounds for m in posted.arriving]
    # Most moves sum nothing: then no boxes have to be compared.
    if len({piece.addend for m in arriving for piece in m.pieces}) <= 1:
        return True
    tensors: dict[str, _ByAddend] = {}
    for m in arriving:
        for piece in m.pieces:
            by_addend = tensors.setdefault(piece.dst_tensor, {})
            boxes = by_addend.setdefault(piece.addend, [])
            box = from_slices(piece.dst_slices)
            boxes.append((m.step, box))
    return all(_are_apart(tensor) or _are_alike(tensor) for tensor in tensors.values())


def _are_apart(by_addend: _ByAddend) -> bool:
    """Whether addends arrive one after the other; an addend may begin in the last step of the one before."""
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
