"""Slots: which amaxes travel, and who needs them.

1. Of a block that some part cuts, every part that touches it has an amax of its own. Those are the **slots**. A part
   sends its own, and receives all slots of the blocks that it cuts. Their largest is the block's amax.
2. Slots are one row of float32, and who sends and who receives are two layouts of it.
3. Blocks that the same parts touch have their slots together, part by part. So what a part sends or receives is a few
   stretches of the row, and not as many as it cuts blocks: plans of many rows stay small.

>>> halves = [Part((((0, 3),),)), Part((((3, 8),),))]
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
from shardmath.values.amaxes.parts import Bools, Part, touch
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


def number_slots(parts: Sequence[Part], blocks: Blocks, shape: tuple[int, ...]) -> Slots:
    """The slots of the blocks of a tensor of that shape that some of these parts cut."""
    count = blocks.count(shape)
    numbers = []
    wanted = []
    for part in parts:
        touched = touch(part, blocks, shape)
        own = touched.flat(count)
        numbers.append(own.reshape(-1))
        wanted.append(own[touched.cut])
    is_wanted = np.zeros(math.prod(count), np.bool_)
    for own in wanted:
        is_wanted[own] = True
    told = []
    for part, own in zip(parts, numbers, strict=True):
        blocks_of_it = _list_told(part, own, is_wanted)
        told.append(blocks_of_it)
    slots, block_of = _number(told, is_wanted.size)
    shares = []
    for i, own in enumerate(numbers):
        sent = np.sort(slots[i])
        received = _find_slots(block_of, wanted[i], is_wanted.size)
        blocks_sent = block_of[sent]
        blocks_received = block_of[received]
        sources = np.searchsorted(own, blocks_sent)
        targets = np.searchsorted(own, blocks_received)
        share = Share(sources, sent, targets, received)
        shares.append(share)
    return Slots(len(block_of), shares)


def _list_told(part: Part, numbers: Ints, is_wanted: Bools) -> Ints:
    """Of the blocks that a part touches, those of which others want to know what it has."""
    # It takes the scales of what is whole in a dimension, and has nothing to say of them.
    if part.is_empty:
        return numbers[:0]
    return numbers[is_wanted[numbers]]


def _number(told: Sequence[Ints], count: int) -> tuple[list[Ints], Ints]:
    """The slots of each part, which has one for each of these blocks; and the block of each slot."""
    lengths = [len(own) for own in told]
    every = np.concatenate(told)
    part_of = np.repeat(np.arange(len(told)), lengths)
    first = np.full(count, len(told))
    last = np.zeros(count, np.int64)
    np.minimum.at(first, every, part_of)
    np.maximum.at(last, every, part_of)
    # Blocks that the same parts touch have the same first and last. Where others have, too, it is one more stretch.
    order = np.lexsort((every, part_of, last[every], first[every]))
    # The inverse of a permutation is what sorts it.
    slot_of = np.argsort(order)
    ends = np.cumsum(lengths)
    return np.split(slot_of, ends[:-1]), every[order]


def _find_slots(block_of: Ints, blocks: Ints, count: int) -> Ints:
    """The slots of these blocks."""
    is_one = np.zeros(count, np.bool_)
    is_one[blocks] = True
    found: Ints = np.flatnonzero(is_one[block_of])
    return found


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
