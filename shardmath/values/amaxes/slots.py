"""Slots: which amaxes travel, and who needs them.

1. Of a block that some part cuts, every part that touches it has an amax of its own. Those are the **slots**. A part
   sends its own, and receives all slots of the blocks that it cuts. Their largest is the block's amax.
2. Slots are one row of float32, and who sends and who receives are two layouts of it.
3. Blocks that the same parts touch have their slots together, part by part. So what a part sends or receives is a few
   stretches of the row, and not as many as it cuts blocks: plans of many rows stay small.

>>> halves = [PartStretches((((0, 3),),)), PartStretches((((3, 8),),))]
>>> slots = number_slots(halves, Blocks((2,)), (8,))
>>> slots.size, [(share.sent, share.received) for share in slots.shares]
(2, [(array([0]), array([0, 1])), (array([1]), array([0, 1]))])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.layouts.algebra.runs import Runs
from shardmath.layouts.fitting import from_holdings
from shardmath.layouts.holdings import LayoutOrWindows
from shardmath.values.amaxes.parts import Bools, PartStretches, touch
from shardmath.values.formats.blocks import Blocks

__all__ = ["Share", "Side", "Slots", "join_slots", "lay_slots", "number_slots"]

Side: TypeAlias = Mapping[str, LayoutOrWindows]
"""How slots lie, by the name of their tensor."""


class Share(NamedTuple):
    """What a part has to do with the slots of one kind of block.

    It sends slots `sent`, which are the amaxes at `sources` of those that it touches, row by row; and receives slots
    `received`, which are of the blocks at `targets`. Slots are by number, ascending.
    """

    sources: Ints
    sent: Ints
    targets: Ints
    received: Ints


class Slots(NamedTuple):
    """How many slots there are, and each part's share."""

    size: int
    shares: list[Share]


class _Has(NamedTuple):
    """The blocks that a part touches, and those of them that it cuts: numbers among all blocks, ascending."""

    touched: Ints
    cut: Ints


def number_slots(parts: Sequence[PartStretches], blocks: Blocks, shape: tuple[int, ...]) -> Slots:
    """The slots of the blocks of a tensor of that shape that some of these parts cut."""
    count = blocks.count(shape)
    total = math.prod(count)
    had = []
    for part in parts:
        touched = touch(part, blocks, shape)
        numbers = touched.flat(count)
        had.append(_Has(numbers.reshape(-1), numbers[touched.cut]))
    is_cut = _mark(np.concatenate([has.cut for has in had]), total)
    sent = []
    for part, has in zip(parts, had, strict=True):
        # A part without positions takes scales of blocks that it touches, and has no amax of any.
        has_amaxes = not part.is_empty
        sent.append(has.touched[is_cut[has.touched] & has_amaxes])
    slots, block_of = _number(sent, total)
    shares = [_make_share(has, own, block_of, total) for has, own in zip(had, slots, strict=True)]
    return Slots(len(block_of), shares)


def _mark(numbers: Ints, total: int) -> Bools:
    """Which of so many blocks are among these."""
    is_one = np.zeros(total, np.bool_)
    is_one[numbers] = True
    return is_one


def _number(sent: Sequence[Ints], total: int) -> tuple[list[Ints], Ints]:
    """The slots of each part, one for each block of which it sends its amax; and the block of each slot."""
    lengths = [len(blocks) for blocks in sent]
    block = np.concatenate(sent)
    part = np.repeat(np.arange(len(sent)), lengths)
    first_part = np.full(total, len(sent))
    last_part = np.zeros(total, np.int64)
    np.minimum.at(first_part, block, part)
    np.maximum.at(last_part, block, part)
    # Blocks that the same parts touch have the same first and last. Where others have, too, it is one more stretch.
    order = np.lexsort((block, part, last_part[block], first_part[block]))
    # The inverse of a permutation is what sorts it.
    slot = np.argsort(order)
    ends = np.cumsum(lengths)
    return np.split(slot, ends[:-1]), block[order]


def _make_share(has: _Has, slots: Ints, block_of: Ints, total: int) -> Share:
    """The share of a part with these slots of its own; `block_of` has the block of each slot of all parts."""
    sent = np.sort(slots)
    received = np.flatnonzero(_mark(has.cut, total)[block_of])
    # Touched blocks ascend, so that a block is found where it would be put in.
    sources = np.searchsorted(has.touched, block_of[sent])
    targets = np.searchsorted(has.touched, block_of[received])
    return Share(sources, sent, targets, received)


def join_slots(kinds: Sequence[Slots], count: int) -> list[tuple[Share, ...]]:
    """The shares of so many parts in slots of several kinds of blocks, numbered one kind after the other."""
    joined: list[tuple[Share, ...]] = [()] * count
    first = 0
    for slots in kinds:
        for i, share in enumerate(slots.shares):
            moved = _move(share, first)
            joined[i] += (moved,)
        first += slots.size
    return joined


def _move(share: Share, first: int) -> Share:
    """The share in slots that are numbered from there on."""
    sent = share.sent + first
    received = share.received + first
    return share._replace(sent=sent, received=received)


def lay_slots(name: str, size: int, held: Mapping[int, Ints]) -> Side:
    """The side on which ranks hold these of so many slots; of no tensor, and no rank, where there are none."""
    runs = {}
    for rank, slots in held.items():
        if slots.size:
            own = _join(slots)
            runs[rank] = (own,)
    return {name: from_holdings((size,), runs)} if runs else {}


def _join(positions: Ints) -> Runs:
    """These positions, which ascend, one after the other."""
    is_break = np.diff(positions) != 1
    breaks = np.flatnonzero(is_break) + 1
    at = 0
    segments = []
    for piece in np.split(positions, breaks):
        first = int(piece[0])
        segments.append((at, first, len(piece)))
        at += len(piece)
    return Runs(segments, at)
