"""Stretches: which bytes of which block go from whom to whom, of lines that are cut.

1. What a rank sends to others lies between its cuts of the lines that it holds; receivers find
   their senders by the same cuts. What a receiver holds itself stays on it, whole blocks.
2. Nothing here looks at pairs of ranks that have nothing in common.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, lengths
from shardmath.base.memo import memo
from shardmath.plans.demands import Demands, Ranks, list_receivers

__all__ = [
    "Stretch",
    "block_at",
    "find_lines",
    "find_rows",
    "list_all_receivers",
    "list_kept",
    "list_received",
    "list_rows",
    "list_sent",
    "row_at",
    "sum_received",
    "sum_sent",
]


class Stretch(NamedTuple):
    """Bytes lo..hi-1 of the content of a block, from one rank to another (or the same)."""

    block: int
    sender: int
    receiver: int
    lo: int
    hi: int


def block_at(demands: Demands, line: int, at: int) -> int:
    """The block that byte `at` of a line is in; the last one at the line's end."""
    return _last_not_after(demands.start, demands.first[line], demands.first[line + 1], at)


def row_at(demands: Demands, block: int, at: int) -> int:
    """The row that byte `at` of the content of a block is in."""
    return _last_not_after(demands.at, demands.row_first[block], demands.row_first[block + 1], at)


def find_lines(demands: Demands, blocks: Ints) -> Ints:
    """The line that each of these blocks is of."""
    lines: Ints = demands.first.searchsorted(blocks, "right") - 1
    return lines


def _last_not_after(places: Ints, first: np.int64, end: np.int64, at: int) -> int:
    """Of the items first..end-1, whose places ascend, the last one that is not after `at`."""
    before = np.searchsorted(places[first:end], at, "right")
    return int(first + before) - 1


class Rows(NamedTuple):
    """Columns of demands, `row_first` and `nbytes` by block, the others by row.

    Lists are quicker to ask for one item than arrays.
    """

    row_first: list[int]
    nbytes: list[int]
    at: list[int]
    batch: list[int]
    unit: list[int]
    lo: list[int]
    each: list[int]


@memo(8)
def list_rows(demands: Demands) -> Rows:
    """The columns of these demands."""
    columns = [getattr(demands, name) for name in Rows._fields]
    return Rows(*(column.tolist() for column in columns))


def find_rows(on: Rows, stretch: Stretch) -> Iterator[tuple[int, int, int]]:
    """(row, first byte of it, last byte of it + 1) of all rows that the stretch has a part of."""
    block, _, _, lo, hi = stretch
    begin = on.row_first[block]
    end = on.row_first[block + 1]
    first = bisect.bisect_right(on.at, lo, begin, end) - 1
    for row in range(first, end):
        start = on.at[row]
        if start >= hi:
            return
        # A row ends where the next one begins, the last one where the block does.
        is_last = row + 1 == end
        stop = on.nbytes[block] if is_last else on.at[row + 1]
        yield row, max(lo - start, 0), min(hi, stop) - start


def list_all_receivers(demands: Demands, blocks: Ints) -> list[Ranks]:
    """The receivers of each of these blocks, as `list_receivers` has them."""
    # Lists are quicker to walk than arrays, and there may be many blocks.
    numbers = demands.receivers[blocks].tolist()
    receivers = [demands.sets[number] for number in numbers]
    some_hold = demands.count[blocks] < lengths(receivers)
    places = np.flatnonzero(some_hold)
    some = blocks[places]
    lines = find_lines(demands, some)
    shared = zip(places.tolist(), lines.tolist(), some.tolist(), strict=True)
    for i, line, block in shared:
        receivers[i] = list_receivers(demands, line, block)
    return receivers


def list_sent(demands: Demands, rank: int) -> Iterator[Stretch]:
    """All that the rank sends to others."""
    for line, lo, hi in _find_shares(demands, rank):
        first = block_at(demands, line, lo)
        last = block_at(demands, line, hi - 1)
        for block in range(first, last + 1):
            yield from _send_of_block(demands, line, block, rank, lo, hi)


def _find_shares(demands: Demands, rank: int) -> list[tuple[int, int, int]]:
    """(line, first byte, last byte + 1) of all that the rank sends."""
    out = []
    for line in range(len(demands.holders)):
        held = demands.held_by(line)
        if not _among(held, rank):
            continue
        holder = bisect.bisect_left(held, rank)
        lo, hi = demands.cuts_of(line)[holder : holder + 2].tolist()
        if lo < hi:
            out.append((line, lo, hi))
    return out


def _send_of_block(
    demands: Demands, line: int, block: int, rank: int, lo: int, hi: int
) -> Iterator[Stretch]:
    """What the bytes lo..hi-1 of the line have of a block, receiver by receiver."""
    each = int(demands.nbytes[block])
    start = int(demands.start[block])
    lo = max(lo - start, 0)
    hi = min(hi - start, each * int(demands.count[block]))
    if lo >= hi:
        return
    asking = list_receivers(demands, line, block)
    first = lo // each
    last = (hi - 1) // each
    for receiver in range(first, last + 1):
        begin = receiver * each
        a = max(lo - begin, 0)
        b = min(hi - begin, each)
        yield Stretch(block, rank, asking[receiver], a, b)


def list_received(demands: Demands, rank: int) -> Iterator[Stretch]:
    """All that the rank receives from others."""
    for line, block in _asked_by(demands, rank):
        held = demands.held_by(line)
        if _among(held, rank):
            continue
        nbytes = int(demands.nbytes[block])
        start = int(demands.start[block])
        place = _place_of(demands, held, block, rank)
        begin = start + place * nbytes
        end = begin + nbytes
        for sender, lo, hi in _find_senders(demands, line, begin, end):
            yield Stretch(block, sender, rank, lo - begin, hi - begin)


def list_kept(demands: Demands, rank: int) -> Iterator[Stretch]:
    """All that stays on the rank: whole blocks."""
    for line, block in _asked_by(demands, rank):
        if _among(demands.held_by(line), rank):
            nbytes = int(demands.nbytes[block])
            yield Stretch(block, rank, rank, 0, nbytes)


def _among(ranks: Ranks, rank: int) -> bool:
    """Whether the rank is one of the ranks, which ascend."""
    at = bisect.bisect_left(ranks, rank)
    return at < len(ranks) and ranks[at] == rank


def _place_of(demands: Demands, held: Ranks, block: int, rank: int) -> int:
    """The place of a rank among the receivers of a block that are not holders."""
    asking = demands.asked_by(block)
    at = bisect.bisect_left(asking, rank)
    if demands.count[block] == len(asking):
        return at
    lower = held[: bisect.bisect_left(held, rank)]
    return at - sum(_among(asking, holder) for holder in lower)


@memo(64)
def _asked_by(demands: Demands, rank: int) -> tuple[tuple[int, int], ...]:
    """(line, block) of all blocks that the rank is a receiver of."""
    among = [_among(ranks, rank) for ranks in demands.sets]
    of_set = np.array(among, bool)
    is_asked = of_set[demands.receivers]
    blocks = np.flatnonzero(is_asked)
    lines = find_lines(demands, blocks)
    pairs = zip(lines.tolist(), blocks.tolist(), strict=True)
    return tuple(pairs)


def _find_senders(demands: Demands, line: int, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """(rank, first byte, last byte + 1) of the holders that send the bytes lo..hi-1 of a line."""
    held = demands.held_by(line)
    cuts = demands.cuts_of(line)
    first = int(cuts.searchsorted(lo, "right")) - 1
    end = int(cuts.searchsorted(hi, "left"))
    places = cuts[first : end + 1].tolist()
    ends = itertools.pairwise(places)
    for holder, (begin, stop) in zip(held[first:end], ends, strict=True):
        a = max(lo, begin)
        b = min(hi, stop)
        if a < b:
            yield holder, a, b


def sum_sent(demands: Demands) -> dict[int, int]:
    """Bytes that each holder sends to others."""
    shares = np.diff(demands.cuts).tolist()
    first = demands.cut_first.tolist()
    out: dict[int, int] = {}
    for line in range(len(demands.holders)):
        held = demands.held_by(line)
        for place, rank in enumerate(held, first[line]):
            before = out.get(rank, 0)
            out[rank] = before + shares[place]
    return out


def sum_received(demands: Demands) -> dict[int, int]:
    """Bytes that each receiver gets from others."""
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
    """(rank, bytes) of what receivers hold themselves, block by block."""
    lines = demands.blocks.owners()
    asking = lengths(demands.sets)[demands.receivers]
    some_local = demands.count < asking
    for block in np.flatnonzero(some_local).tolist():
        nbytes = int(demands.nbytes[block])
        holders = demands.held_by(lines[block])
        receivers = set(demands.asked_by(block))
        both = receivers.intersection(holders)
        for rank in sorted(both):
            yield rank, nbytes
