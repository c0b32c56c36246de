"""Balance: the cuts of lines, which decide the bytes that each holder sends.

1. A line is cut at integers among its holders, so that the largest load of a rank is minimal over
   all lines together (`flow`); holder h sends what lies between cuts h and h + 1. Loads are
   differences of cuts, and striping adds one transfer per cut.
2. Cuts snap to whole rows of a box; boxes of at most `SMALL` bytes stay whole.
3. Lines that stay on a node are balanced apart from those that do not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardmath.base.arrays import Ints, Offsets, lengths, pick
from shardmath.base.memo import memo
from shardmath.plans.demands import Batch, Demands, Ranks
from shardmath.plans.flows.flow import shares
from shardmath.plans.flows.topology import Topology
from shardmath.plans.stretches import block_at, row_at
from shardmath.plans.template import Template
from shardmath.plans.units import snap, unit_grains, unit_rows

__all__ = [
    "Cutter",
    "Grid",
    "balance",
    "make_grid",
    "measure_lines",
    "measure_uncut",
    "share_lines",
]


def measure_lines(demands: Demands) -> Ints:
    """Return an array: for each line of `demands` (elements that the same ranks hold), the number of bytes to send.
    Each byte counts once for every rank that needs and lacks it."""
    return demands.blocks.sums(demands.nbytes * demands.count)


def balance(
    demands: Demands, batches: tuple[Batch, ...], topology: Topology | None = None
) -> Demands:
    """Choose a sender for each byte in `demands` among the ranks that hold it, so that ranks, and nodes of `topology`,
    send about equally much. `batches` are the groups of tensors in `demands`, with their layouts.

    Bytes that stay on a node and bytes that leave it are balanced separately.
    """
    length = measure_lines(demands)
    nodes = _find_nodes(demands, topology) if topology else None
    first, cuts = share_lines(demands, length.tolist(), nodes)
    line = Offsets(first).owners()
    # The first and the last cut of a line are its ends, which stay.
    is_inner = np.ones(len(cuts), bool)
    is_inner[first[:-1]] = False
    is_inner[first[1:] - 1] = False
    inner = cuts[is_inner]
    line = line[is_inner]
    cuts[is_inner] = _snap_cuts(demands, batches, length, line, inner)
    return replace(demands, cut_first=first, cuts=cuts)


def _find_nodes(demands: Demands, topology: Topology) -> dict[int, int]:
    """The node of each rank that holds anything."""
    holding: set[int] = set()
    for ranks in _list_holders(demands):
        holding.update(ranks)
    return {rank: topology.node(rank) for rank in holding}


def _list_holders(demands: Demands) -> list[Ranks]:
    """The holders of each line."""
    return [demands.sets[number] for number in demands.holders.tolist()]


def share_lines(
    demands: Demands, length: list[int], nodes: Mapping[int, int] | None = None
) -> tuple[Ints, Ints]:
    """Divide bytes that several ranks hold among these ranks, so that all ranks (and nodes, if `nodes` maps ranks to
    nodes) send about equally much. Return (first, cuts): of the `length[i]` bytes with index i, the h-th holder sends
    those from offset cuts[first[i] + h] up to cuts[first[i] + h + 1].

    The cuts of line i (bytes that the same ranks hold) include 0 and its length.
    """
    holders = _list_holders(demands)
    cuts = [[0, nbytes] for nbytes in length]
    most = max(map(len, holders), default=1)
    if most > 1:
        near = np.flatnonzero(demands.near)
        far = np.flatnonzero(~demands.near)
        _cut_among_holders(cuts, far.tolist(), holders, nodes)
        # Near lines stay on a node: no node sends them.
        _cut_among_holders(cuts, near.tolist(), holders, None)
    counts = lengths(cuts)
    lines = Offsets.of_counts(counts)
    places = list(itertools.chain.from_iterable(cuts))
    table = np.array(places, np.int64)
    return lines.first, table


def _cut_among_holders(
    cuts: list[list[int]], lines: list[int], holders: list[Ranks], nodes: Mapping[int, int] | None
) -> None:
    """Cut the lines of these numbers, balanced only among themselves; an uncut line has the cuts [0, its length].
    `holders` are those of every line."""
    if not lines:
        return
    lengths = [cuts[line][-1] for line in lines]
    some_holders = [holders[line] for line in lines]
    sent = shares(lengths, some_holders, nodes)
    for line, parts in zip(lines, sent, strict=True):
        cuts[line] = list(itertools.accumulate(parts, initial=0))


def _snap_cuts(
    demands: Demands, batches: tuple[Batch, ...], length: Ints, line: Ints, at: Ints
) -> Ints:
    """For each i, the last byte of line number `line[i]`, not after byte `at[i]`, where that line may be cut. `length`
    has the number of bytes of every line."""
    if not len(at):
        return at
    # Lines laid end to end make one ascending list of blocks, which is searched for all `at` at once.
    base_of_line = np.cumsum(length) - length
    base_of_block = demands.blocks.spread(base_of_line)
    place = base_of_line[line] + at
    block = np.searchsorted(base_of_block + demands.start, place, "right") - 1
    inside = at - demands.start[block]
    is_end = at == length[line]
    # At the end of a line, the search finds a block of the next line: `inside` means nothing there.
    may_cut = is_end | (inside == 0)
    # A block has its content once for each receiver.
    in_content = np.where(may_cut, 0, inside % demands.nbytes[block])
    snapped = make_grid(demands, batches).snapped(block, in_content)
    out: Ints = np.where(may_cut, at, at - in_content + snapped)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Cutter:
    """A finder of the bytes where messages can be cut: between boxes (multidimensional slices) of a tensor, or between
    the rows of a box of more than 64 KiB."""

    demands: Demands
    batches: tuple[Batch, ...]

    def of_line(self, line: int, at: int) -> int:
        """Return the last byte offset, not after `at`, where a message can begin: the start of a rectangular slice of a
        tensor, or of a row in a slice of over 64 KiB. Offsets count from the start of line number `line` (bytes that
        the same ranks hold)."""
        block = block_at(self.demands, line, at)
        inside = at - int(self.demands.start[block])
        if not inside:
            return at
        # The block has its content once for each receiver.
        content = inside % int(self.demands.nbytes[block])
        return at - content + self.of_block(block, content)

    def of_block(self, block: int, at: int) -> int:
        """Return the last byte offset, not after `at`, where a message can begin: the start of a rectangular slice of a
        tensor, or of a row in a slice of over 64 KiB. Offsets count from the start of block number `block` (bytes that
        the same ranks need).

        `at` counts in the bytes of one receiver.
        """
        demands = self.demands
        row = row_at(demands, block, at)
        begin = int(demands.at[row])
        inside = (at - begin) % int(demands.each[row])
        if not inside:
            return at
        return at - inside + self.of_row(row, inside)

    def of_row(self, row: int, at: int) -> int:
        """Return the last byte offset, not after `at`, where a message can be cut. Both offsets count from the start of
        the range of elements that row `row` of `self.demands` describes."""
        demands = self.demands
        batch = self.batches[int(demands.batch[row])]
        template = batch.template
        itemsize = template.src.itemsize
        unit = int(demands.unit[row])
        lo = int(demands.lo[row])
        element = lo + at // itemsize
        place = snap(template, unit, element)
        # A row may begin inside a box; a cut of the unit before the row is then replaced by the row's start.
        elements = max(place - lo, 0)
        return elements * itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """A finder of the byte offsets in blocks (bytes that the same ranks need) where a message can begin. These are the
    starts of rectangular slices of tensors, and of rows in slices of over 64 KiB.

    For arrays of blocks and of offsets in them, it returns for each pair the last such offset that is not greater. It
    is fast if the elements between two ranks form one box.

    With all contents laid end to end, row r of the lines begins at byte `begin[r]`, and the content of block b
    at `base[b]`. `rows[r]` is the number of elements in a row of the only box of its unit: 0 if the box stays
    whole, -1 if there are several boxes.
    """

    demands: Demands
    batches: tuple[Batch, ...]
    base: Ints
    begin: Ints
    item: Ints
    rows: Ints

    def snapped(self, block: Ints, at: Ints) -> Ints:
        """Return an array: for each i, the last byte offset, not after `at[i]`, where a message can begin. This is the
        start of a rectangular slice, or of a row in a slice of over 64 KiB; offsets count from the start of block
        number `block[i]` (bytes that the same ranks need)."""
        row, inside = self._find_rows(block, at)
        begin = at - inside
        snapped = begin + self._snap_in_box(row, inside)

        # Rows with several boxes, which have -1, are cut one by one; all may be cut at their first byte.
        needs_cutter = (self.rows[row] < 0) & (inside > 0)
        cutter = Cutter(self.demands, self.batches)
        for i in np.flatnonzero(needs_cutter).tolist():
            row_number = int(row[i])
            byte = int(inside[i])
            snapped[i] = begin[i] + cutter.of_row(row_number, byte)
        return snapped

    def _find_rows(self, block: Ints, at: Ints) -> tuple[Ints, Ints]:
        """The row that has byte `at` of each content, and the byte of a tensor of the row that this is."""
        place = self.base[block] + at
        row = np.searchsorted(self.begin, place, "right") - 1
        inside = at - self.demands.at[row]
        # A row has `each` bytes of every tensor of its batch, one tensor after the other.
        return row, inside % self.demands.each[row]

    def describe(self, first: int, end: int) -> tuple[bytes, ...]:
        """Return a dict key for blocks `first` to `end` - 1; a block is bytes that one set of ranks holds and another
        set needs. If two series of blocks have equal keys, messages can be cut at the same byte offsets in both.

        The cuts are equal whatever the tensors and ranks of the blocks are.
        """
        demands = self.demands
        begin, stop = demands.row_first[[first, end]].tolist()
        counts = np.diff(demands.row_first[first : end + 1])
        columns = [demands.at, demands.each, demands.lo, self.item, self.rows]
        described = [counts]
        for column in columns:
            described.append(column[begin:stop])
        # The cuts of a unit of several boxes depend on the unit, those of others only on the columns above.
        several = self.rows[begin:stop] < 0
        for column in (demands.batch, demands.unit):
            described.append(np.where(several, column[begin:stop], 0))
        return tuple(column.tobytes() for column in described)

    def _snap_in_box(self, row: Ints, inside: Ints) -> Ints:
        """The last byte not after `inside`, of one tensor of each row, where its only box may be cut."""
        lo = self.demands.lo[row]
        itemsize = self.item[row]
        box_row = self.rows[row]
        element = lo + inside // itemsize
        # At least 1, since a box that stays whole has 0, and cannot be a divisor.
        divisor = np.maximum(box_row, 1)
        snapped = element - element % divisor
        # A row may begin inside a box, as in Cutter.of_row.
        elements = np.maximum(snapped - lo, 0)
        out: Ints = np.where(box_row == 0, 0, elements * itemsize)
        return out


@memo(8)
def make_grid(demands: Demands, batches: tuple[Batch, ...]) -> Grid:
    """Make the Grid that finds where messages can be cut, for all bytes in the table `demands`. `batches` are the
    groups of tensors in `demands`, with their layouts."""
    bytes_of_block = Offsets.of_counts(demands.nbytes)
    base = bytes_of_block.first
    base_of_row = demands.rows.spread(base[:-1])
    itemsizes = [batch.template.src.itemsize for batch in batches]
    itemsize_of_batch = np.array(itemsizes, np.int64)
    return Grid(
        demands=demands,
        batches=batches,
        base=base,
        begin=base_of_row + demands.at,
        item=itemsize_of_batch[demands.batch],
        rows=_look_up_units(demands, batches, unit_rows),
    )


def _look_up_units(
    demands: Demands, batches: tuple[Batch, ...], of_units: Callable[[Template], Ints]
) -> Ints:
    """For the unit of each row of the lines, its value in the array that the function returns for its template."""
    templates = [batch.template for batch in batches]
    distinct = list(dict.fromkeys(templates))
    number = {template: i for i, template in enumerate(distinct)}
    numbers = [number[template] for template in templates]
    by_batch = np.array(numbers, np.int64)
    by_row = by_batch[demands.batch]
    columns = list(map(of_units, distinct))
    return pick(columns, by_row, demands.unit)


def measure_uncut(demands: Demands, batches: tuple[Batch, ...]) -> Ints:
    """Return, for each range of elements in the table `demands`, the size in bytes of the largest slice that must be
    sent in one message. The slices depend on the layouts of `batches`, the groups of tensors to which the ranges
    belong.

    Such a slice is rectangular, with up to 64 KiB, or a row of a larger one. The size is 0 for a range cut from a
    larger one, a stripe of a unit.
    """
    size = _look_up_units(demands, batches, lambda template: template.unit_size)
    grain = _look_up_units(demands, batches, unit_grains)
    elements = demands.hi - demands.lo
    return np.where(elements == size, grain, 0)
