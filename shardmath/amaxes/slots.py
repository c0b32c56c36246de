"""Slots: which amaxes travel, and who needs them.

1. Of a block that some part cuts, every part that touches it has an amax of its own. Those are the **slots**, numbered
   block by block, and within a block part by part.
2. A part sends its own slots, and receives all slots of the blocks that it cuts. Their largest is the block's amax.
3. Slots are one row of float32, and who sends and who receives are two layouts of it.

>>> halves = [Part((((0, 3),),)), Part((((3, 8),),))]
>>> slots = number_slots(halves, Blocks((2,)), (8,))
>>> slots.count, [(share.sent, share.received) for share in slots.shares]
(2, [(array([0]), array([0, 1])), (array([1]), array([0, 1]))])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from shardmath.algebra.runs import Runs
from shardmath.amaxes.parts import Bools, Part, touch
from shardmath.base.arrays import Ints
from shardmath.formats.blocks import Blocks
from shardmath.layouts.layout import Layout
from shardmath.storage.fitting import from_holdings

__all__ = ["Share", "Slots", "join_shares", "lay_slots", "number_slots"]


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

    count: int
    shares: list[Share]


def number_slots(parts: Sequence[Part], blocks: Blocks, shape: tuple[int, ...]) -> Slots:
    """The slots of the blocks of a tensor of that shape that some of these parts cut."""
    count = blocks.count(shape)
    touched = [touch(part, blocks, shape) for part in parts]
    numbers = [one.flat(count) for one in touched]
    cuts = [one.cut for one in touched]
    is_cut = np.zeros(math.prod(count), np.bool_)
    for own, cut in zip(numbers, cuts, strict=True):
        is_cut[own[cut]] = True
    # A part of nothing takes the scales of what is whole in a dimension, and has nothing to say of them.
    sends = [
        is_cut[own] & (not part.is_empty) for own, part in zip(numbers, parts, strict=True)
    ]
    sent, block_of = _number([own[mask] for own, mask in zip(numbers, sends, strict=True)])
    shares = []
    for i, slots in enumerate(sent):
        received = np.flatnonzero(np.isin(block_of, numbers[i][cuts[i]]))
        _, starts = np.unique(block_of[received], return_index=True)
        shares.append(Share(sends[i], cuts[i], slots, received, starts))
    return Slots(len(block_of), shares)


def _number(blocks: Sequence[Ints]) -> tuple[list[Ints], Ints]:
    """The slots of each part, which has one for each of these blocks; and the block of each slot."""
    every = np.concatenate(blocks)
    # Stable, so that within a block slots are in the order of the parts.
    order = np.argsort(every, kind="stable")
    # The inverse of a permutation is what sorts it.
    slot_of = np.argsort(order)
    ends = np.cumsum([len(own) for own in blocks])
    return np.split(slot_of, ends[:-1]), every[order]


def join_shares(kinds: Sequence[Slots]) -> Iterator[tuple[Share, ...]]:
    """Each part's shares in slots of several kinds of blocks, which are numbered one kind after the other."""
    counts = [0, *(slots.count for slots in kinds)]
    firsts = list(itertools.accumulate(counts))
    for shares in zip(*(slots.shares for slots in kinds), strict=True):
        joined = []
        before = 0
        for share, first in zip(shares, firsts, strict=False):
            sent = share.sent + first
            received = share.received + first
            starts = share.starts + before
            before += len(received)
            joined.append(Share(share.sends, share.cuts, sent, received, starts))
        yield tuple(joined)


def lay_slots(count: int, held: Mapping[int, Ints]) -> tuple[Layout, ...]:
    """The layout, or windows, of that many slots of which ranks hold these; ranks that hold none are on none."""
    runs = {rank: (_join(slots),) for rank, slots in held.items() if slots.size}
    if not runs:
        return ()
    found = from_holdings((count,), runs)
    return found if isinstance(found, tuple) else (found,)


def _join(positions: Ints) -> Runs:
    """These positions, which ascend, one after the other."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    pieces = np.split(positions, breaks)
    at = itertools.accumulate(map(len, pieces), initial=0)
    segments = [(lo, int(piece[0]), len(piece)) for lo, piece in zip(at, pieces, strict=False)]
    return Runs(segments, len(positions))
