"""Balance: where lines are cut, that is, which holder sends what.

1. A line is cut at integers among its holders, so that the largest load of a rank is minimal over all lines together
   (`flow`); holder h sends what lies between cuts h and h + 1. Loads are differences of cuts, a rank's own list is
   its slices of the lines, striping adds one transfer a cut.
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

from shardmath.base.arrays import Ints
from shardmath.base.memo import memo
from shardmath.flows.flow import shares
from shardmath.flows.topology import Topology
from shardmath.plans.demands import Batch, Lines, Ranks, wire
from shardmath.plans.template import Template, snap, unit_grains, unit_rows

__all__ = [
    "Cutter",
    "Grid",
    "Stretch",
    "balanced",
    "grid",
    "kept",
    "received",
    "received_loads",
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


def totals(on: Lines) -> Ints:
    """The length of each line in bytes."""
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(on.nbytes * on.count)))
    out: Ints = ends[on.first[1:]] - ends[on.first[:-1]]
    return out


def balanced(on: Lines, batches: tuple[Batch, ...], topology: Topology | None = None) -> Lines:
    """The lines cut so that the largest load is minimal."""
    length = totals(on)
    nodes = (
        {r: topology.node(r) for i in on.holders.tolist() for r in on.sets[i]} if topology else None
    )
    first, cuts = shared(on, length.tolist(), nodes)
    inner = np.ones(len(cuts), bool)
    inner[first[:-1]] = inner[first[1:] - 1] = False
    at, line = cuts[inner], np.repeat(np.arange(len(on.holders)), np.diff(first))[inner]
    cuts[inner] = _snapped(on, batches, length, line, at)
    return replace(on, cut_first=first, cuts=cuts)


def shared(
    on: Lines, length: list[int], nodes: Mapping[int, int] | None = None
) -> tuple[Ints, Ints]:
    """Where the lines, of these lengths, are cut among their holders: the first cut of each line, and all cuts."""
    held = [on.sets[i] for i in on.holders.tolist()]
    cuts: list[list[int]] = [[0, nbytes] for nbytes in length]
    for near in (False, True) if any(len(ranks) > 1 for ranks in held) else ():
        some = np.flatnonzero(on.near == near).tolist()
        found = (
            shares([length[i] for i in some], [held[i] for i in some], None if near else nodes)
            if some
            else []
        )
        for i, parts in zip(some, found, strict=True):
            cuts[i] = [0, *itertools.accumulate(parts)]
    first = np.cumsum([0, *map(len, cuts)])
    return first, np.array(list(itertools.chain.from_iterable(cuts)), np.int64)


def _snapped(on: Lines, batches: tuple[Batch, ...], length: Ints, line: Ints, at: Ints) -> Ints:
    """The last places not after bytes `at` of lines where they may be cut."""
    if not len(at):
        return at
    base = np.cumsum(length) - length
    begin = np.repeat(base, np.diff(on.first)) + on.start
    block = np.searchsorted(begin, base[line] + at, "right") - 1
    inside = at - on.start[block]
    whole = (inside == 0) | (at == length[line])
    content = np.where(whole, 0, inside % on.nbytes[block])
    out: Ints = np.where(whole, at, at - content + grid(on, batches).snapped(block, content))
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Cutter:
    """Where lines and contents may be cut: at whole rows of a box, small boxes staying whole."""

    on: Lines
    batches: tuple[Batch, ...]

    def of_line(self, line: int, at: int) -> int:
        """The last place not after byte `at` of the line."""
        a, b = int(self.on.first[line]), int(self.on.first[line + 1])
        block = a + int(np.searchsorted(self.on.start[a:b], at, "right")) - 1
        inside = at - int(self.on.start[block])
        if not inside:
            return at
        content = inside % int(self.on.nbytes[block])
        return at - content + self.of_block(block, content)

    def of_block(self, block: int, at: int) -> int:
        """The last place not after byte `at` of the content of the block."""
        row = row_at(self.on, block, at)
        t, lo = self.batches[int(self.on.batch[row])].template, int(self.on.lo[row])
        inside = (at - int(self.on.at[row])) % int(self.on.each[row])
        place = snap(t, int(self.on.unit[row]), lo + inside // t.src.itemsize) - lo if inside else 0
        return at - inside + max(place, 0) * t.src.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """The same for many places at once, and quick where a unit is one box.

    Row r of the lines begins at byte `begin[r]` of all contents together, of which block b has its own from `base[b]`
    on. `rows[r]` elements are a row of the one box of its unit: 0 where it stays whole, -1 where it has several boxes.
    """

    on: Lines
    batches: tuple[Batch, ...]
    base: Ints
    begin: Ints
    item: Ints
    rows: Ints

    def snapped(self, block: Ints, at: Ints) -> Ints:
        """The last places not after bytes `at` of the contents of blocks."""
        on = self.on
        r = np.searchsorted(self.begin, self.base[block] + at, "right") - 1
        inside, rows = (at - on.at[r]) % on.each[r], self.rows[r]
        whole = np.maximum(rows, 1)
        place = np.where(
            rows == 0, 0, (on.lo[r] + inside // self.item[r]) // whole * whole - on.lo[r]
        )
        out: Ints = at - inside + np.maximum(place, 0) * self.item[r]
        for i in np.flatnonzero((rows < 0) & (inside > 0)).tolist():
            out[i] = Cutter(on, self.batches).of_block(int(block[i]), int(at[i]))
        return out


@memo(8)
def grid(on: Lines, batches: tuple[Batch, ...]) -> Grid:
    """The grid of all blocks of these lines."""
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(on.nbytes)))
    block = np.repeat(np.arange(len(on.nbytes)), np.diff(on.row_first))
    item = np.array([b.template.src.itemsize for b in batches], np.int64)[on.batch]
    (rows,) = _of_units(on, batches, unit_rows)
    return Grid(on, batches, ends, ends[block] + on.at, item, rows)


def _of_units(
    on: Lines, batches: tuple[Batch, ...], *of: Callable[[Template], Ints]
) -> Iterator[Ints]:
    """What each function says of the unit of each row of the lines."""
    templates = list(dict.fromkeys(b.template for b in batches))
    ends = itertools.accumulate((len(t.unit_size) for t in templates), initial=0)
    first = dict(zip(templates, ends, strict=False))
    unit = np.array([first[b.template] for b in batches], np.int64)[on.batch] + on.unit
    for column in of:
        yield np.concatenate([np.zeros(0, np.int64), *map(column, templates)])[unit]


def uncut(on: Lines, batches: tuple[Batch, ...]) -> Ints:
    """Of each row of the lines, the bytes of its largest box, or row of one, that is never cut.

    0 where that is not known, as the row is a stripe of a unit.
    """
    size, grain = _of_units(on, batches, lambda t: t.unit_size, unit_grains)
    return np.where(on.hi - on.lo == size, grain, 0)


def row_at(on: Lines, block: int, at: int) -> int:
    """The row that byte `at` of the content of a block is in."""
    a, b = int(on.row_first[block]), int(on.row_first[block + 1])
    return a + int(np.searchsorted(on.at[a:b], at, "right")) - 1


def sent(on: Lines, rank: int) -> Iterator[Stretch]:
    """All that the rank sends to others."""
    for line, lo, hi in _share(on, rank):
        a, b = int(on.first[line]), int(on.first[line + 1])
        begin = a + int(np.searchsorted(on.start[a:b], lo, "right")) - 1
        for block in range(begin, a + int(np.searchsorted(on.start[a:b], hi, "left"))):
            yield from _of_block(on, line, block, rank, lo, hi)


def _share(on: Lines, rank: int) -> list[tuple[int, int, int]]:
    """(line, first byte, last byte + 1) of all that the rank sends."""
    out = []
    for line, n in enumerate(on.holders.tolist()):
        held = on.sets[n]
        if _among(held, rank):
            at = int(on.cut_first[line]) + bisect.bisect_left(held, rank)
            out.append((line, int(on.cuts[at]), int(on.cuts[at + 1])))
    return [(line, lo, hi) for line, lo, hi in out if lo < hi]


def _of_block(on: Lines, line: int, block: int, rank: int, lo: int, hi: int) -> Iterator[Stretch]:
    """What the bytes lo..hi-1 of the line have of a block, receiver by receiver."""
    each, start = int(on.nbytes[block]), int(on.start[block])
    lo, hi = max(lo - start, 0), min(hi - start, each * int(on.count[block]))
    asking = wire(on, line, block) if lo < hi else ()
    for j in range(lo // each, -(-hi // each)):
        yield Stretch(block, rank, asking[j], max(lo - j * each, 0), min(hi - j * each, each))


def received(on: Lines, rank: int) -> Iterator[Stretch]:
    """All that the rank receives from others."""
    for line, block in _asked_by(on, rank):
        held = on.sets[on.holders[line]]
        if not _among(held, rank):
            begin = int(on.start[block]) + _place(on, held, block, rank) * int(on.nbytes[block])
            for sender, lo, hi in _senders(on, line, begin, begin + int(on.nbytes[block])):
                yield Stretch(block, sender, rank, lo - begin, hi - begin)


def kept(on: Lines, rank: int) -> Iterator[Stretch]:
    """All that stays on the rank: whole blocks."""
    for line, block in _asked_by(on, rank):
        if _among(on.sets[on.holders[line]], rank):
            yield Stretch(block, rank, rank, 0, int(on.nbytes[block]))


def _among(ranks: Ranks, rank: int) -> bool:
    at = bisect.bisect_left(ranks, rank)
    return at < len(ranks) and ranks[at] == rank


def _place(on: Lines, held: Ranks, block: int, rank: int) -> int:
    """The place of a rank among the receivers of a block that are not holders."""
    asking = on.sets[on.receivers[block]]
    at = bisect.bisect_left(asking, rank)
    if on.count[block] == len(asking):
        return at
    return at - sum(_among(asking, other) for other in held[: bisect.bisect_left(held, rank)])


@memo(64)
def _asked_by(on: Lines, rank: int) -> tuple[tuple[int, int], ...]:
    """(line, block) of all blocks that the rank is a receiver of."""
    among = np.array([_among(ranks, rank) for ranks in on.sets], bool)
    blocks = among[on.receivers].nonzero()[0]
    return tuple(
        zip((on.first.searchsorted(blocks, "right") - 1).tolist(), blocks.tolist(), strict=True)
    )


def _senders(on: Lines, line: int, lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """(rank, first byte, last byte + 1) of the holders that send the bytes lo..hi-1 of a line."""
    held = on.sets[on.holders[line]]
    a = int(on.cut_first[line])
    cuts = on.cuts[a : a + len(held) + 1]
    first = max(int(np.searchsorted(cuts, lo, "right")) - 1, 0)
    for h in range(first, min(int(np.searchsorted(cuts, hi, "left")), len(held))):
        x, y = max(lo, int(cuts[h])), min(hi, int(cuts[h + 1]))
        if x < y:
            yield held[h], x, y


def sent_loads(on: Lines) -> dict[int, int]:
    """Bytes that each holder sends to others."""
    out: dict[int, int] = {}
    for line, n in enumerate(on.holders.tolist()):
        a = int(on.cut_first[line])
        for rank, x in zip(
            on.sets[n], np.diff(on.cuts[a : a + len(on.sets[n]) + 1]).tolist(), strict=True
        ):
            out[rank] = out.get(rank, 0) + x
    return out


def received_loads(on: Lines) -> dict[int, int]:
    """Bytes that each receiver gets from others."""
    asked = np.zeros(len(on.sets), np.int64)
    np.add.at(asked, on.receivers, on.nbytes)
    out: dict[int, int] = {}
    for n in np.flatnonzero(asked).tolist():
        for rank in on.sets[n]:
            out[rank] = out.get(rank, 0) + int(asked[n])
    for rank, nbytes in _local(on):
        out[rank] -= nbytes
    return out


def _local(on: Lines) -> Iterator[tuple[int, int]]:
    """(rank, bytes) of what receivers hold themselves, block by block."""
    line = np.repeat(np.arange(len(on.holders)), np.diff(on.first))
    size = np.array([len(ranks) for ranks in on.sets], np.int64)[on.receivers]
    for block in np.flatnonzero(on.count < size).tolist():
        both = set(on.sets[on.receivers[block]]) & set(on.sets[on.holders[line[block]]])
        yield from ((rank, int(on.nbytes[block])) for rank in sorted(both))
