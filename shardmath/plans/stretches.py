"""Stretches: the bytes of blocks that go from one rank to another, given the cuts of lines.

1. The bytes that a rank sends to others lie between its cuts of the lines that it holds; receivers
   find their senders by the same cuts. Blocks that a receiver holds itself stay on it.
2. No function loops over pairs of ranks that have nothing in common.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, lengths
from shardmath.base.memo import memo
from shardmath.plans.demands import Demands, Ranks, list_receivers

__all__ = [
    "Stretch",
    "block_at",
    "list_all_receivers",
    "list_kept",
    "list_received",
    "list_sent",
    "row_at",
    "sum_received",
    "sum_sent",
]


class Stretch(NamedTuple):
    """Bytes lo..hi-1 of a block (bytes with equal holders and receivers) that go from one rank to another, or stay."""

    block: int
    sender: int
    receiver: int
    lo: int
    hi: int


def block_at(demands: Demands, line: int, at: int) -> int:
    """Return the number of the block that has byte `at`, counted from the start of line number `line`. A line is bytes
    that the same ranks hold, and a block is bytes of a line that the same ranks need.

    It is the last block if `at` is the end of the line.
    """
    return _last_not_after(demands.start, demands.first[line], demands.first[line + 1], at)


def row_at(demands: Demands, block: int, at: int) -> int:
    """Return the index of the row of `demands` that has byte `at` of block number `block` (bytes that the same ranks
    need), counted from the start of the block. A row is a range of elements of equally sharded tensors."""
    return _last_not_after(demands.at, demands.row_first[block], demands.row_first[block + 1], at)


def _last_not_after(places: Ints, first: np.int64, end: np.int64, at: int) -> int:
    """The last of the items first..end-1 whose place is not after `at`; places ascend."""
    count = np.searchsorted(places[first:end], at, "right")
    return int(first + count) - 1


def list_all_receivers(demands: Demands, blocks: Ints) -> list[Ranks]:
    """Return, for each block number in `blocks`, the ranks that need the block's bytes and do not hold them already."""
    # Lists are faster to loop over than arrays, and there may be many blocks.
    numbers = demands.receivers[blocks].tolist()
    receivers = [demands.sets[number] for number in numbers]
    # `count` leaves out the receivers that are holders: only these blocks need a closer look.
    some_hold = demands.count[blocks] < lengths(receivers)
    index = np.flatnonzero(some_hold)
    shared = blocks[index]
    lines = demands.blocks.owners_of(shared)
    triples = zip(index.tolist(), lines.tolist(), shared.tolist(), strict=True)
    for i, line, block in triples:
        receivers[i] = list_receivers(demands, line, block)
    return receivers


def list_sent(demands: Demands, rank: int) -> Iterator[Stretch]:
    """Yield the stretches (bytes of a block, with sender and receiver) that `rank` sends to other ranks."""
    for line, lo, hi in _find_shares(demands, rank):
        first = block_at(demands, line, lo)
        last = block_at(demands, line, hi - 1)
        for block in range(first, last + 1):
            yield from _send_of_block(demands, line, block, rank, lo, hi)


def _find_shares(demands: Demands, rank: int) -> list[tuple[int, int, int]]:
    """(line, first byte, last byte + 1) of the rank's share of each line."""
    listed = _list_columns(demands)
    out = []
    for line, number in enumerate(listed.holders):
        holders = demands.sets[number]
        if not _among(holders, rank):
            continue
        # The h-th holder sends the bytes from cut h to cut h + 1.
        cut = listed.cut_first[line] + bisect.bisect_left(holders, rank)
        lo, hi = listed.cuts[cut : cut + 2]
        if lo < hi:
            out.append((line, lo, hi))
    return out


def _send_of_block(
    demands: Demands, line: int, block: int, rank: int, lo: int, hi: int
) -> Iterator[Stretch]:
    """The stretches of a block in the bytes lo..hi-1 of the line, receiver by receiver."""
    nbytes = int(demands.nbytes[block])
    start = int(demands.start[block])
    # On the line the block's bytes are repeated, once per receiver; from here, lo and hi count from the block's start.
    lo = max(lo - start, 0)
    hi = min(hi - start, nbytes * int(demands.count[block]))
    if lo >= hi:
        return
    receivers = list_receivers(demands, line, block)
    first = lo // nbytes
    last = (hi - 1) // nbytes
    for i in range(first, last + 1):
        copy_start = i * nbytes
        begin = max(lo - copy_start, 0)
        end = min(hi - copy_start, nbytes)
        yield Stretch(block, rank, receivers[i], begin, end)


def list_received(demands: Demands, rank: int) -> Iterator[Stretch]:
    """Yield the stretches (bytes of a block, with sender and receiver) that `rank` receives from other ranks."""
    listed = _list_columns(demands)
    for line, block in _asked_by(demands, rank):
        held = demands.sets[listed.holders[line]]
        if _among(held, rank):
            continue
        nbytes = listed.nbytes[block]
        asking = demands.sets[listed.receivers[block]]
        place = bisect.bisect_left(asking, rank)
        # Counts leave out the receivers that are holders.
        if listed.counts[block] != len(asking):
            place -= _count_lower(held, asking, rank)
        begin = listed.start[block] + place * nbytes
        end = begin + nbytes
        for sender, lo, hi in _find_senders(listed, line, held, begin, end):
            yield Stretch(block, sender, rank, lo - begin, hi - begin)


def list_kept(demands: Demands, rank: int) -> Iterator[Stretch]:
    """Yield the blocks of bytes that `rank` needs and already holds, as stretches from the rank to itself."""
    listed = _list_columns(demands)
    for line, block in _asked_by(demands, rank):
        if _among(demands.sets[listed.holders[line]], rank):
            yield Stretch(block, rank, rank, 0, listed.nbytes[block])


def _among(ranks: Ranks, rank: int) -> bool:
    """Whether the rank is among these ascending ranks."""
    at = bisect.bisect_left(ranks, rank)
    return at < len(ranks) and ranks[at] == rank


def _count_lower(held: Ranks, asking: Ranks, rank: int) -> int:
    """The number of ranks below `rank` that both hold and ask."""
    lower = held[: bisect.bisect_left(held, rank)]
    return sum(_among(asking, holder) for holder in lower)


class _Columns(NamedTuple):
    """The columns of Demands as lists, in which single items are found faster than in arrays."""

    holders: list[int]
    cut_first: list[int]
    cuts: list[int]
    receivers: list[int]
    counts: list[int]
    nbytes: list[int]
    start: list[int]


@memo(8)
def _list_columns(demands: Demands) -> _Columns:
    """The columns of `demands` as lists."""
    return _Columns(
        holders=demands.holders.tolist(),
        cut_first=demands.cut_first.tolist(),
        cuts=demands.cuts.tolist(),
        receivers=demands.receivers.tolist(),
        counts=demands.count.tolist(),
        nbytes=demands.nbytes.tolist(),
        start=demands.start.tolist(),
    )


@memo(64)
def _asked_by(demands: Demands, rank: int) -> tuple[tuple[int, int], ...]:
    """(line, block) of all blocks for which the rank asks."""
    is_in_set = np.array([_among(ranks, rank) for ranks in demands.sets], bool)
    is_asked = is_in_set[demands.receivers]
    blocks = np.flatnonzero(is_asked)
    lines = demands.blocks.owners_of(blocks)
    pairs = zip(lines.tolist(), blocks.tolist(), strict=True)
    return tuple(pairs)


def _find_senders(
    listed: _Columns, line: int, held: Ranks, lo: int, hi: int
) -> Iterator[tuple[int, int, int]]:
    """(rank, first byte, last byte + 1) of the holders that send the bytes lo..hi-1 of a line."""
    begin = listed.cut_first[line]
    end = begin + len(held) + 1
    first = bisect.bisect_right(listed.cuts, lo, begin, end) - 1
    last = bisect.bisect_left(listed.cuts, hi, begin, end)
    for i in range(first, last):
        share_lo = max(lo, listed.cuts[i])
        share_hi = min(hi, listed.cuts[i + 1])
        if share_lo < share_hi:
            yield held[i - begin], share_lo, share_hi


def sum_sent(demands: Demands) -> dict[int, int]:
    """Return a dict from each rank that holds some of the needed bytes to the number of bytes that it sends to other
    ranks, which can be 0."""
    # The cuts of all lines end to end. A difference between two lines is no share, and is never read: a line has one
    # share less than cuts.
    shares = np.diff(demands.cuts).tolist()
    first = demands.cut_first.tolist()
    out: dict[int, int] = {}
    for line in range(len(demands.holders)):
        held = demands.held_by(line)
        for place, rank in enumerate(held, first[line]):
            out[rank] = out.get(rank, 0) + shares[place]
    return out


def sum_received(demands: Demands) -> dict[int, int]:
    """Return, by rank, the number of bytes received from other ranks, for all ranks that need any."""
    asked = np.zeros(len(demands.sets), np.int64)
    np.add.at(asked, demands.receivers, demands.nbytes)
    out: dict[int, int] = {}
    for ranks, nbytes in zip(demands.sets, asked.tolist(), strict=True):
        if not nbytes:
            continue
        for rank in ranks:
            out[rank] = out.get(rank, 0) + nbytes
    for rank, nbytes in _find_local(demands):
        out[rank] -= nbytes
    return out


def _find_local(demands: Demands) -> Iterator[tuple[int, int]]:
    """(rank, bytes) of the blocks that receivers hold themselves."""
    asking = lengths(demands.sets)[demands.receivers]
    # `count` leaves out the receivers that are holders.
    blocks = np.flatnonzero(demands.count < asking)
    holders = demands.holders[demands.blocks.owners_of(blocks)]
    columns = demands.receivers[blocks], holders, demands.nbytes[blocks]
    # Many blocks have the same receivers, of which a set is made once.
    receivers: dict[int, set[int]] = {}
    for asked, held, nbytes in zip(*(column.tolist() for column in columns), strict=True):
        if asked not in receivers:
            receivers[asked] = set(demands.sets[asked])
        for rank in receivers[asked].intersection(demands.sets[held]):
            yield rank, nbytes
