"""Slots: the amaxes that travel, and the ranks that need them.

1. If some part cuts a block, every part with positions in it measures its own amax, which has a **slot**. A part
   sends its own slots, and receives all slots of the blocks that it cuts. Their largest is the block's amax.
2. Slots form one row of float32; what ranks send and what they receive are two layouts of that row.
3. Blocks that the same parts touch have neighboring slots, part by part. So a part sends or receives few stretches of
   the row, rather than one per block that it cuts: plans for tensors of many rows stay small.

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
"""The layout of the slots, by the name of their tensor."""


class Share(NamedTuple):
    """The amaxes (largest magnitudes of blocks) that one rank sends and receives, as indices in the list of all
    exchanged amaxes (`sent`, `received`). `sources` and `targets` have, for each of them, the index of the rank's
    block.

    A slot is the number of one rank's amax of one block. A rank touches the blocks of which it holds positions. It
    sends slots `sent`, filled with the amaxes of its touched blocks at `sources`; and receives slots `received`, which
    belong to its touched blocks at `targets`. Slot numbers ascend; touched blocks are counted row by row.
    """

    sources: Ints
    sent: Ints
    targets: Ints
    received: Ints


class Slots(NamedTuple):
    """The amaxes (largest magnitudes of blocks) that ranks exchange: how many there are (`size`), and a list with one
    Share for each rank's part of the tensor (`shares`). A Share tells which amaxes the rank sends and receives."""

    size: int
    shares: list[Share]


class _BlockNumbers(NamedTuple):
    """The blocks that a part touches, and those that it cuts: ascending numbers among all blocks of the tensor."""

    touched: Ints
    cut: Ints


def number_slots(parts: Sequence[PartStretches], blocks: Blocks, shape: tuple[int, ...]) -> Slots:
    """Number the amaxes (largest magnitudes of `blocks`) to exchange between ranks that hold these `parts` of a tensor
    of this `shape`; return them as Slots. If any part that needs a block's scale lacks some of the block's elements,
    every part with elements in that block sends an amax. An empty part needs the scales of blocks that span whole
    dimensions."""
    count = blocks.count(shape)
    total = math.prod(count)
    by_part = []
    for part in parts:
        touched = touch(part, blocks, shape)
        numbers = touched.flat(count)
        by_part.append(_BlockNumbers(numbers.reshape(-1), numbers[touched.cut]))
    is_cut = _mark(np.concatenate([numbers.cut for numbers in by_part]), total)
    sent = []
    for part, (touched_blocks, _) in zip(parts, by_part, strict=True):
        # To `touch`, an empty part has the blocks that span whole dimensions, since it holds their scales. But it has
        # no numbers whose amax it could send.
        has_amaxes = not part.is_empty
        sent.append(touched_blocks[is_cut[touched_blocks] & has_amaxes])
    slots, block_of = _assign_slots(sent, total)
    shares = [
        _make_share(numbers, part_slots, block_of, total)
        for numbers, part_slots in zip(by_part, slots, strict=True)
    ]
    return Slots(len(block_of), shares)


def _mark(numbers: Ints, total: int) -> Bools:
    """An array of `total` flags, True at these numbers."""
    is_marked = np.zeros(total, np.bool_)
    is_marked[numbers] = True
    return is_marked


def _assign_slots(sent: Sequence[Ints], total: int) -> tuple[list[Ints], Ints]:
    """The slots of each part, one for each block whose amax it sends; and the block of each slot."""
    lengths = [len(blocks) for blocks in sent]
    block = np.concatenate(sent)
    part = np.repeat(np.arange(len(sent)), lengths)
    first_part = np.full(total, len(sent))
    last_part = np.zeros(total, np.int64)
    np.minimum.at(first_part, block, part)
    np.maximum.at(last_part, block, part)
    # Blocks that the same parts touch get adjacent slots, which a part then receives as one stretch: they have the same
    # first and last part. (Other blocks may have these, too, and only make stretches shorter.)
    order = np.lexsort((block, part, last_part[block], first_part[block]))
    # argsort inverts a permutation.
    slot = np.argsort(order)
    ends = np.cumsum(lengths)
    return np.split(slot, ends[:-1]), block[order]


def _make_share(numbers: _BlockNumbers, slots: Ints, block_of: Ints, total: int) -> Share:
    """The share of a part that sends these slots; `block_of` has the block of each slot of all parts."""
    sent = np.sort(slots)
    is_cut_here = _mark(numbers.cut, total)
    received = np.flatnonzero(is_cut_here[block_of])
    # Touched blocks ascend, so a binary search finds each block's index.
    sources = np.searchsorted(numbers.touched, block_of[sent])
    targets = np.searchsorted(numbers.touched, block_of[received])
    return Share(sources, sent, targets, received)


def join_slots(kinds: Sequence[Slots], count: int) -> list[tuple[Share, ...]]:
    """Renumber amaxes (largest magnitudes of blocks), which are numbered from 0 for each of several block sizes, so
    that no two have the same number. `kinds` has one Slots per block size; the result has a tuple for each of `count`
    parts of the tensor, with one renumbered Share per size."""
    joined: list[tuple[Share, ...]] = [()] * count
    first = 0
    for slots in kinds:
        for i, share in enumerate(slots.shares):
            sent = share.sent + first
            received = share.received + first
            joined[i] += (share._replace(sent=sent, received=received),)
        first += slots.size
    return joined


def lay_slots(name: str, size: int, held: Mapping[int, Ints]) -> Side:
    """Return {`name`: layout} for an array of the `size` amaxes that ranks exchange, in which rank r holds the items
    with indices `held[r]`. If no rank holds any, return {}."""
    runs = {rank: (_pack_slots(slots),) for rank, slots in held.items() if slots.size}
    return {name: from_holdings((size,), runs)} if runs else {}


def _pack_slots(slots: Ints) -> Runs:
    """Ascending slots, packed end to end in a local array."""
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    local = 0
    segments = []
    for stretch in np.split(slots, breaks):
        segments.append((local, int(stretch[0]), len(stretch)))
        local += len(stretch)
    return Runs(segments, local)
