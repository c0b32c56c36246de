"""Lines: who sends what, without what goes to ranks that are gone.

1. What a rank that is gone was to receive is taken out of its line, and what is left moves together.
   Cuts move with the bytes around them; one inside of what is taken out stands where that was.
2. So every holder sends those who stay exactly what it sent them, in the same order.
3. Blocks that nobody asks for any longer are gone, and so are lines without blocks. No others are
   joined or put in another order, though a plan made anew might.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.layouts.layout import Layout
>>> from shardmath.plans.plan import plan
>>> there = Layout((8, 2), Mesh(copies=3, ranks=[2, 3, 4]), "n h")
>>> p = plan(Layout((8, 2), Mesh(dp=2), "n h"), there)
>>> p.lines.cuts.tolist(), drop_receivers(p.lines, frozenset({2}), [0]).cuts.tolist()
([0, 64, 192], [0, 0, 128])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, lengths
from shardmath.plans.demands import Demands, Ranks, list_receivers

__all__ = ["drop_receivers"]


def drop_receivers(demands: Demands, left: frozenset[int], batches: Sequence[int]) -> Demands:
    """The lines without what goes to the ranks `left`, none of which is a holder.

    `batches` are the numbers, ascending, of the batches that stay; they are numbered anew.
    """
    staying = [_drop(ranks, left) for ranks in demands.sets]
    size = lengths(staying)
    gone = lengths(demands.sets) - size
    asking = demands.receivers
    count = demands.count - gone[asking]
    cuts = _move_cuts(demands, left, count)
    stays = size[asking] > 0
    kept = _keep_blocks(demands, stays, count, cuts)
    numbered = _number_sets(staying, kept.holders, kept.receivers)
    return replace(
        kept,
        sets=numbered.sets,
        holders=numbered.number[kept.holders],
        receivers=numbered.number[kept.receivers],
        batch=_renumber(kept.batch, batches),
    )


def _keep_blocks(demands: Demands, stays: Bools, count: Ints, cuts: Ints) -> Demands:
    """The lines of these blocks alone, which have so many receivers; sets and batches as they were."""
    blocks = _pick_owned(demands.first, stays)
    some = blocks.counts() > 0
    in_line = Offsets(demands.cut_first).spread(some)
    nbytes = demands.nbytes[stays]
    count = count[stays]
    kept = replace(
        demands,
        holders=demands.holders[some],
        near=demands.near[some],
        first=_drop_empty(blocks),
        cut_first=_drop_empty(_pick_owned(demands.cut_first, in_line)),
        cuts=cuts[in_line],
        receivers=demands.receivers[stays],
        addend=demands.addend[stays],
        count=count,
        nbytes=nbytes,
        start=blocks.begin(nbytes * count),
    )
    return _keep_rows(kept, demands.rows.spread(stays))


def _pick_owned(first: Ints, stays: Bools) -> Offsets:
    """Owners of the items that stay; some may have none."""
    counts = Offsets(first).sums(stays.astype(np.int64))
    return Offsets.of_counts(counts)


def _drop_empty(owned: Offsets) -> Ints:
    """Where the items begin of each owner that has some, and the number of all."""
    return np.unique(owned.first)


def _keep_rows(demands: Demands, stays: Bools) -> Demands:
    """Some of the rows, of blocks that are gone but for them."""
    rows = _pick_owned(demands.row_first, stays)
    return replace(
        demands,
        row_first=_drop_empty(rows),
        batch=demands.batch[stays],
        unit=demands.unit[stays],
        lo=demands.lo[stays],
        hi=demands.hi[stays],
        at=demands.at[stays],
        each=demands.each[stays],
    )


def _drop(ranks: Ranks, left: frozenset[int]) -> Ranks:
    """Those of the ranks that stay."""
    if left.isdisjoint(ranks):
        return ranks
    return tuple(rank for rank in ranks if rank not in left)


class _Numbered(NamedTuple):
    """Sets in order and each once, and the number of each that there was."""

    sets: tuple[Ranks, ...]
    number: Ints


def _number_sets(staying: Sequence[Ranks], holders: Ints, receivers: Ints) -> _Numbered:
    """Those of the sets that are used."""
    used = np.union1d(holders, receivers)
    listed = sorted({staying[number] for number in used.tolist()})
    place = {ranks: i for i, ranks in enumerate(listed)}
    number = np.zeros(len(staying), np.int64)
    for old in used.tolist():
        ranks = staying[old]
        number[old] = place[ranks]
    return _Numbered(tuple(listed), number)


def _renumber(column: Ints, kept: Sequence[int]) -> Ints:
    """The place of each number of the column among those that are kept."""
    ascending = np.array(kept, np.int64)
    return ascending.searchsorted(column)


def _move_cuts(demands: Demands, left: frozenset[int], count: Ints) -> Ints:
    """All cuts, of lines whose blocks have `count` receivers now."""
    length = demands.blocks.sums(demands.nbytes * demands.count)
    line = Offsets(demands.cut_first).owners()
    is_end = demands.cuts == length[line]
    kept = demands.nbytes * count
    ends = demands.blocks.sums(kept)
    moved = np.where(is_end, ends[line], 0)

    inner = np.flatnonzero((demands.cuts > 0) & ~is_end)
    places = _find_places(demands, length, line[inner], demands.cuts[inner])
    before = demands.blocks.begin(kept)
    for i, place in zip(inner.tolist(), places, strict=True):
        moved[i] = before[place.block] + _keep_before(demands, left, place)
    return moved


class _Place(NamedTuple):
    """Byte `at` of what a block of a line takes there."""

    line: int
    block: int
    at: int


def _find_places(demands: Demands, length: Ints, line: Ints, at: Ints) -> list[_Place]:
    """The blocks that bytes `at` of lines are in, each before the end of its line."""
    # All lines laid end to end, so that one search serves all.
    ends = length.cumsum()
    base = ends - length
    begin = demands.blocks.spread(base) + demands.start
    place = base[line] + at
    block = begin.searchsorted(place, "right") - 1
    inside = at - demands.start[block]
    columns = line.tolist(), block.tolist(), inside.tolist()
    return list(map(_Place, *columns))


def _keep_before(demands: Demands, left: frozenset[int], place: _Place) -> int:
    """How many bytes of the block before this place go to receivers that stay."""
    each = int(demands.nbytes[place.block])
    receiver, rest = divmod(place.at, each)
    asking = list_receivers(demands, place.line, place.block)
    earlier = asking[:receiver]
    before = [rank for rank in earlier if rank not in left]
    kept = each * len(before)
    return kept if asking[receiver] in left else kept + rest
