"""Slots: which amaxes travel, and who needs them.

1. Of a block that some part cuts, every part that touches it has an amax of its own. Those are the **slots**, numbered
   block by block, and within a block part by part.
2. A part sends its own slots, and receives all slots of the blocks that it cuts. Their largest is the block's amax.
3. Slots are one row of float32, and who sends and who receives are two layouts of it.

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

from shardmath.algebra.runs import Runs
from shardmath.amaxes.parts import Bools, Part, touch
from shardmath.base.arrays import Ints
from shardmath.formats.blocks import Blocks
from shardmath.layouts.holdings import LayoutOrWindows
from shardmath.storage.fitting import from_holdings

__all__ = ["Share", "Side", "Slots", "join_slots", "lay_slots", "number_slots"]

Side: TypeAlias = Mapping[str, LayoutOrWindows]
"""How slots lie, by the name of their tensor."""


class Share(NamedTuple):
    """What a part has to do with the slots of one kind of block.

    `sends` and `cuts` say of each block that it touches whether its slot is sent, and whether the part cuts it. Slots
    are by number, ascending; those of each block that it cuts begin at `starts` of what it receives.
    """

    sends: Bools
    cuts: Bools
    sent: Ints
    received: Ints
    starts: Ints


class Slots(NamedTuple):
    """How many slots there are, and each part's share."""

    size: int
    shares: list[Share]


def number_slots(parts: Sequence[Part], blocks: Blocks, shape: tuple[int, ...]) -> Slots:
    """The slots of the blocks of a tensor of that shape that some of these parts cut."""
    count = blocks.count(shape)
    numbers = []
    cuts = []
    for part in parts:
        touched = touch(part, blocks, shape)
        numbers.append(touched.flat(count))
        cuts.append(touched.cut)
    wanted = [own[cut] for own, cut in zip(numbers, cuts, strict=True)]
    sends = _find_sent(parts, numbers, wanted, math.prod(count))
    told = [own[mask] for own, mask in zip(numbers, sends, strict=True)]
    sent, block_of = _number(told)
    shares = []
    for mask, cut, slots, own in zip(sends, cuts, sent, wanted, strict=True):
        is_received = np.isin(block_of, own)
        received = np.flatnonzero(is_received)
        blocks_of_these = block_of[received]
        _, starts = np.unique(blocks_of_these, return_index=True)
        share = Share(mask, cut, slots, received, starts)
        shares.append(share)
    return Slots(len(block_of), shares)


def _find_sent(
    parts: Sequence[Part], numbers: Sequence[Ints], wanted: Sequence[Ints], count: int
) -> list[Bools]:
    """Of the blocks that each part touches, which some part wants to know."""
    is_wanted = np.zeros(count, np.bool_)
    for own in wanted:
        is_wanted[own] = True
    sends = []
    for part, own in zip(parts, numbers, strict=True):
        mask = is_wanted[own]
        # It takes the scales of what is whole in a dimension, and has nothing to say of them.
        if part.is_empty:
            mask = np.zeros_like(mask)
        sends.append(mask)
    return sends


def _number(blocks: Sequence[Ints]) -> tuple[list[Ints], Ints]:
    """The slots of each part, which has one for each of these blocks; and the block of each slot."""
    every = np.concatenate(blocks)
    # Stable, so that within a block slots are in the order of the parts.
    order = np.argsort(every, kind="stable")
    # The inverse of a permutation is what sorts it.
    slot_of = np.argsort(order)
    lengths = [len(own) for own in blocks]
    ends = np.cumsum(lengths)
    return np.split(slot_of, ends[:-1]), every[order]


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
