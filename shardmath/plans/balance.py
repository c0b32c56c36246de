"""Balance: where lines are cut, that is, which holder sends what.

1. A line is cut at integers among its holders, so that the largest load of a rank is minimal over
   all lines together (`flow`); holder h sends what lies between cuts h and h + 1. Loads are
   differences of cuts, a rank's own list is its slices of the lines, striping adds one transfer a
   cut.
2. Cuts snap to whole rows of a box; boxes of at most `SMALL` bytes stay whole.
3. Lines that stay on a node are balanced apart from those that do not.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets
from shardmath.base.memo import memo
from shardmath.flows.flow import shares
from shardmath.flows.topology import Topology
from shardmath.plans.demands import Batch, Demands, Ranks, wire
from shardmath.plans.pieces import snap, unit_grains, unit_rows
from shardmath.plans.template import Template

__all__ = [
    "Cutter",
    "Grid",
    "Stretch",
    "balanced",
    "grid",
    "kept",
    "received",
    "received_loads",
    "row_at",
    "sent",
    "sent_loads",
    "shared",
    "totals",
    "uncut",
]


class Stretch(NamedTuple):
    """Bytes lo..hi-1 of the content of a block, from one rank to another (or the same)."""

    block: int
    sender: int
    receiver: int
    lo: int
    hi: int


def totals(demands: Demands) -> Ints:
    """The length of each line in bytes."""
    return demands.blocks.sums(demands.nbytes * demands.count)


def balanced(
    demands: Demands, batches: tuple[Batch, ...], topology: Topology | None = None
) -> Demands:
    """The lines cut so that the largest load is minimal."""
    length = totals(demands)
    nodes = _find_nodes(demands, topology) if topology else None
    first, cuts = shared(demands, length.tolist(), nodes)

    # The first and the last cut of a line are its ends, which stay.
    inner = np.ones(len(cuts), bool)
    inner[first[:-1]] = False
    inner[first[1:] - 1] = False
    line = Offsets(first).owners()[inner]
    cuts[inner] = _snap_cuts(demands, batches, length, line, cuts[inner])
    return replace(demands, cut_first=first, cuts=cuts)


def _find_nodes(demands: Demands, topology: Topology) -> dict[int, int]:
    """The node of each rank that holds anything."""
    holding = set().union(*(demands.sets[n] for n in demands.holders.tolist()))
    return {rank: topology.node(rank) for rank in holding}


def shared(
    demands: Demands, length: list[int], nodes: Mapping[int, int] | None = None
) -> tuple[Ints, Ints]:
    """Where the lines, of these lengths, are cut among their holders: the first cut of each line,
    and all cuts."""
    held = [demands.sets[n] for n in demands.holders.tolist()]
    cuts: list[list[int]] = [[0, nbytes] for nbytes in length]
    if any(len(ranks) > 1 for ranks in held):
        for near, on_nodes in ((False, nodes), (True, None)):
            some = np.flatnonzero(demands.near == near).tolist()
            _cut_among_holders(cuts, some, held, on_nodes)
    first = np.cumsum([0, *map(len, cuts)])
    places = list(itertools.chain.from_iterable(cuts))
    return first, np.array(places, np.int64)


def _cut_among_holders(
    cuts: list[list[int]], some: list[int], held: list[Ranks], nodes: Mapping[int, int] | None
) -> None:
    """Cut some of the lines, balanced with each other alone; uncut, a line is [0, its length]."""
    if not some:
        return
    lengths = [cuts[line][-1] for line in some]
    holders = [held[line] for line in some]
    found = shares(lengths, holders, nodes)
    for line, parts in zip(some, found, strict=True):
        cuts[line] = list(itertools.accumulate(parts, initial=0))


def _snap_cuts(
    demands: Demands, batches: tuple[Batch, ...], length: Ints, line: Ints, at: Ints
) -> Ints:
    """The last places not after bytes `at` of lines where they may be cut."""
    if not len(at):
        return at
    # Lines laid end to end make one ascending list of blocks, which is searched for all at once.
    base = np.cumsum(length) - length
    begin = demands.blocks.spread(base) + demands.start
    block = np.searchsorted(begin, base[line] + at, "right") - 1
    inside = at - demands.start[block]
    between = (inside == 0) | (at == length[line])
    content = np.where(between, 0, inside % demands.nbytes[block])
    snapped = grid(demands, batches).snapped(block, content)
    out: Ints = np.where(between, at, at - content + snapped)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Cutter:
    """Where lines and contents may be cut: at whole rows of a box, small boxes staying whole."""

    demands: Demands
    batches: tuple[Batch, ...]

    def of_line(self, line: int, at: int) -> int:
        """The last place not after byte `at` of the line."""
        block = _block_at(self.demands, line, at)
        inside = at - int(self.demands.start[block])
        if not inside:
            return at
        content = inside % int(self.demands.nbytes[block])
        return at - content + self.of_block(block, content)

    def of_block(self, block: int, at: int) -> int:
        """The last place not after byte `at` of the content of the block."""
        demands = self.demands
        row = row_at(demands, block, at)
        begin = int(demands.at[row])
        inside = (at - begin) % int(demands.each[row])
        if not inside:
            return at
        template = self.batches[int(demands.batch[row])].template
        itemsize = template.src.itemsize
        lo = int(demands.lo[row])
        element = lo + inside // itemsize
        place = snap(template, int(demands.unit[row]), element)
        # A stripe may begin inside a box, before which no cut of the unit is a cut of the row.
        return at - inside + max(place - lo, 0) * itemsize


def _block_at(demands: Demands, line: int, at: int) -> int:
    """The block that byte `at` of a line is in; the last one at the line's end."""
    return _last_not_after(demands.start, demands.first[line], demands.first[line + 1], at)


def row_at(demands: Demands, block: int, at: int) -> int:
    """The row that byte `at` of the content of a block is in."""
    return _last_not_after(demands.at, demands.row_first[block], demands.row_first[block + 1], at)


def _last_not_after(places: Ints, first: np.int64, end: np.int64, at: int) -> int:
    """Of the items first..end-1, whose places ascend, the last one that is not after `at`."""
    before = np.searchsorted(places[first:end], at, "right")
    return int(first + before) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The same for many places at once, and quick where a unit is one box.

    Row r of the lines begins at byte `begin[r]` of all contents together, of which block b has its
    own from `base[b]` on. `rows[r]` elements are a row of the one box of its unit: 0 where it stays
    whole, -1 where it has several boxes.
    """

    demands: Demands
    batches: tuple[Batch, ...]
    base: Ints
    begin: Ints
    item: Ints
    rows: Ints

    def snapped(self, block: Ints, at: Ints) -> Ints:
        """The last places not after bytes `at` of the contents of blocks."""
        demands = self.demands
        row = np.searchsorted(self.begin, self.base[block] + at, "right") - 1
        inside = (at - demands.at[row]) % demands.each[row]
        lo = demands.lo[row]
        item = self.item[row]
        box_row = self.rows[row]
        element = lo + inside // item
        # At least 1, since a box that stays whole has 0, by which nothing can be divided.
        divisor = np.maximum(box_row, 1)
        place = np.where(box_row == 0, 0, element // divisor * divisor - lo)
        out: Ints = at - inside + np.maximum(place, 0) * item

        cutter = Cutter(demands, self.batches)
        several = (box_row < 0) & (inside > 0)
        for i in several.nonzero()[0].tolist():
            out[i] = cutter.of_block(int(block[i]), int(at[i]))
        return out


@memo(8)
def grid(demands: Demands, batches: tuple[Batch, ...]) -> Grid:
    """The grid of all blocks of these lines."""
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(demands.nbytes)))
    itemsize = np.array([batch.template.src.itemsize for batch in batches], np.int64)
    return Grid(
        demands=demands,
        batches=batches,
        base=ends,
        begin=demands.rows.spread(ends[:-1]) + demands.at,
        item=itemsize[demands.batch],
        rows=_look_up_units(demands, batches, unit_rows),
    )


def _look_up_units(
    demands: Demands, batches: tuple[Batch, ...], of_units: Callable[[Template], Ints]
) -> Ints:
    """What the function says of the unit of each row of the lines."""
    columns = [np.zeros(0, np.int64)]
    first: dict[Template, int] = {}
    end = 0
    for template in dict.fromkeys(batch.template for batch in batches):
        columns.append(of_units(template))
        first[template] = end
        end += len(template.unit_size)
    first_unit = np.array([first[batch.template] for batch in batches], np.int64)
    found: Ints = np.concatenate(columns)[first_unit[demands.batch] + demands.unit]
    return found


def uncut(demands: Demands, batches: tuple[Batch, ...]) -> Ints:
    """Of each row of the lines, the bytes of its largest box, or row of one, that is never cut.

    0 where that is not known, as the row is a stripe of a unit.
    """
    size = _look_up_units(demands, batches, lambda template: template.unit_size)
    grain = _look_up_units(demands, batches, unit_grains)
    elements = demands.hi - demands.lo
    return np.where(elements == size, grain, 0)


def sent(demands: Demands, rank: int) -> Iterator[Stretch]:
    """All that the rank sends to others."""
    for line, lo, hi in _find_shares(demands, rank):
        first = _block_at(demands, line, lo)
        last = _block_at(demands, line, hi - 1)
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
    asking = wire(demands, line, block)
    first = lo // each
    last = (hi - 1) // each
    for receiver in range(first, last + 1):
        begin = receiver * each
        a = max(lo - begin, 0)
        b = min(hi - begin, each)
        yield Stretch(block, rank, asking[receiver], a, b)


def received(demands: Demands, rank: int) -> Iterator[Stretch]:
    """All that the rank receives from others."""
    for line, block in _asked_by(demands, rank):
        held = demands.held_by(line)
        if _among(held, rank):
            continue
        nbytes = int(demands.nbytes[block])
        start = int(demands.start[block])
        begin = start + _place_of(demands, held, block, rank) * nbytes
        for sender, lo, hi in _find_senders(demands, line, begin, begin + nbytes):
            yield Stretch(block, sender, rank, lo - begin, hi - begin)


def kept(demands: Demands, rank: int) -> Iterator[Stretch]:
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
    asking = np.array(among, bool)[demands.receivers]
    blocks = asking.nonzero()[0]
    lines = demands.first.searchsorted(blocks, "right") - 1
    return tuple(zip(lines.tolist(), blocks.tolist(), strict=True))


def _find_senders(demands: Demands, line: int, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """(rank, first byte, last byte + 1) of the holders that send the bytes lo..hi-1 of a line."""
    held = demands.held_by(line)
    cuts = demands.cuts_of(line)
    first = int(cuts.searchsorted(lo, "right")) - 1
    end = int(cuts.searchsorted(hi, "left"))
    for holder in range(max(first, 0), min(end, len(held))):
        a = max(lo, int(cuts[holder]))
        b = min(hi, int(cuts[holder + 1]))
        if a < b:
            yield held[holder], a, b


def sent_loads(demands: Demands) -> dict[int, int]:
    """Bytes that each holder sends to others."""
    cuts = demands.cuts.tolist()
    first = demands.cut_first.tolist()
    out: dict[int, int] = {}
    for line in range(len(demands.holders)):
        for place, rank in enumerate(demands.held_by(line), first[line]):
            nbytes = cuts[place + 1] - cuts[place]
            out[rank] = out.get(rank, 0) + nbytes
    return out


def received_loads(demands: Demands) -> dict[int, int]:
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
    sizes = np.array([len(ranks) for ranks in demands.sets], np.int64)
    some_local = demands.count < sizes[demands.receivers]
    for block in some_local.nonzero()[0].tolist():
        holders = demands.held_by(lines[block])
        local = set(demands.asked_by(block)).intersection(holders)
        for rank in sorted(local):
            yield rank, int(demands.nbytes[block])
