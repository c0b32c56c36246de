"""Lines: the lines of a plan without the bytes for ranks that left.

1. The bytes for a rank that left are removed from their line, which closes up. Cuts move with the
   bytes around them; a cut inside removed bytes moves to the place where those were.
2. So every holder sends the ranks that stay exactly the same bytes as before, in the same order.
3. Blocks that no rank asks for any longer are removed, and so are lines without blocks. The others
   are not joined or reordered, though the lines of a new plan might be.

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
    """Return `demands` without the bytes that the ranks in `left` need; the caller ensures that these ranks send
    nothing. `batches` are the old numbers of the tensor groups that remain; their new numbers are 0, 1, and so on.

    `batches` is ascending.
    """
    staying = [_drop_ranks(ranks, left) for ranks in demands.sets]
    size = lengths(staying)
    left_counts = lengths(demands.sets) - size
    # The ranks that left hold nothing, so that each of them was counted as a receiver.
    count = demands.count - left_counts[demands.receivers]
    cuts = _move_cuts(demands, left, count)
    stays = size[demands.receivers] > 0
    kept_demands = _keep_blocks(demands, stays, count, cuts)
    numbered = _number_sets(staying, kept_demands.holders, kept_demands.receivers)
    return replace(
        kept_demands,
        sets=numbered.sets,
        holders=numbered.number[kept_demands.holders],
        receivers=numbered.number[kept_demands.receivers],
        batch=_renumber(kept_demands.batch, batches),
    )


def _keep_blocks(demands: Demands, stays: Bools, count: Ints, cuts: Ints) -> Demands:
    """The lines with only the blocks that stay, which now have `count` receivers; sets and batches are unchanged."""
    blocks = _pick_owned(demands.first, stays)
    has_blocks = blocks.counts() > 0
    is_cut_kept = Offsets(demands.cut_first).spread(has_blocks)
    nbytes = demands.nbytes[stays]
    count = count[stays]
    kept = replace(
        demands,
        holders=demands.holders[has_blocks],
        near=demands.near[has_blocks],
        first=_drop_empty(blocks),
        cut_first=_drop_empty(_pick_owned(demands.cut_first, is_cut_kept)),
        cuts=cuts[is_cut_kept],
        receivers=demands.receivers[stays],
        addend=demands.addend[stays],
        count=count,
        nbytes=nbytes,
        start=blocks.begin(nbytes * count),
    )
    return _keep_rows(kept, demands.rows.spread(stays))


def _pick_owned(first: Ints, stays: Bools) -> Offsets:
    """The items that stay, by owner; some owners may have none."""
    counts = Offsets(first).sums(stays.astype(np.int64))
    return Offsets.of_counts(counts)


def _drop_empty(owned: Offsets) -> Ints:
    """The first item of each owner that has items, and the number of all items."""
    # An owner without items has the same first item as the next owner.
    return np.unique(owned.first)


def _keep_rows(demands: Demands, stays: Bools) -> Demands:
    """The demands with only the rows that stay; the other rows' blocks are already removed."""
    rows_of_block = _pick_owned(demands.row_first, stays)
    return replace(
        demands,
        row_first=_drop_empty(rows_of_block),
        batch=demands.batch[stays],
        unit=demands.unit[stays],
        lo=demands.lo[stays],
        hi=demands.hi[stays],
        at=demands.at[stays],
        each=demands.each[stays],
    )


def _drop_ranks(ranks: Ranks, left: frozenset[int]) -> Ranks:
    """The ranks that stay."""
    if left.isdisjoint(ranks):
        return ranks
    return tuple(rank for rank in ranks if rank not in left)


class _RenumberedSets(NamedTuple):
    """Distinct sets in order, and by old number the new number of each set."""

    sets: tuple[Ranks, ...]
    number: Ints


def _number_sets(staying: Sequence[Ranks], holders: Ints, receivers: Ints) -> _RenumberedSets:
    """The sets that are used, renumbered."""
    used = np.union1d(holders, receivers)
    listed = sorted({staying[number] for number in used.tolist()})
    place = {ranks: i for i, ranks in enumerate(listed)}
    number = np.zeros(len(staying), np.int64)
    for old in used.tolist():
        ranks = staying[old]
        number[old] = place[ranks]
    return _RenumberedSets(tuple(listed), number)


def _renumber(column: Ints, kept: Sequence[int]) -> Ints:
    """The place of each number of the column among those that are kept."""
    ascending = np.array(kept, np.int64)
    return ascending.searchsorted(column)


def _move_cuts(demands: Demands, left: frozenset[int], count: Ints) -> Ints:
    """The cuts of all lines, if blocks have `count` receivers, without those that left."""
    length = demands.blocks.sums(demands.nbytes * demands.count)
    line = Offsets(demands.cut_first).owners()
    is_end = demands.cuts == length[line]
    block_bytes = demands.nbytes * count
    new_length = demands.blocks.sums(block_bytes)
    # A cut at byte 0 stays there.
    new_cuts = np.where(is_end, new_length[line], 0)

    inner = np.flatnonzero((demands.cuts > 0) & ~is_end)
    places = _find_places(demands, length, line[inner], demands.cuts[inner])
    start = demands.blocks.begin(block_bytes)
    for i, place in zip(inner.tolist(), places, strict=True):
        new_cuts[i] = start[place.block] + _keep_before(demands, left, place)
    return new_cuts


class _PlaceInBlock(NamedTuple):
    """Byte `at` of a block on its line, which has the content once for each receiver."""

    line: int
    block: int
    at: int


def _find_places(demands: Demands, length: Ints, line: Ints, at: Ints) -> list[_PlaceInBlock]:
    """The blocks that contain byte `at[i]` of line `line[i]`, for each i; no byte is at the end of its line."""
    # All lines laid end to end, so that one search serves all.
    ends = length.cumsum()
    base_of_line = ends - length
    begin_of_block = demands.blocks.spread(base_of_line) + demands.start
    place = base_of_line[line] + at
    block = begin_of_block.searchsorted(place, "right") - 1
    inside = at - demands.start[block]
    columns = line.tolist(), block.tolist(), inside.tolist()
    return list(map(_PlaceInBlock, *columns))


def _keep_before(demands: Demands, left: frozenset[int], place: _PlaceInBlock) -> int:
    """The bytes of the block before this place that go to receivers that stay."""
    # The block has its content once for each receiver: the place is in one of these copies.
    each = int(demands.nbytes[place.block])
    copy, rest = divmod(place.at, each)
    receivers = list_receivers(demands, place.line, place.block)
    staying_before = [rank for rank in receivers[:copy] if rank not in left]
    kept = each * len(staying_before)
    return kept if receivers[copy] in left else kept + rest
