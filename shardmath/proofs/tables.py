"""Tables: checks that a plan's demands are well formed, so that both ends of a pair expand the same transfers.

**Lines** are blocks laid end to end, blocks are rows laid end to end, and lines are cut from the
first byte to the last, where pieces may be cut.

`plan_proof` checks what the tables say of tensors and ranks. It finds the positions of a set of
ranks in a mesh by `Places`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, lengths, pick, ranges
from shardmath.layouts.algebra.mesh import Mesh
from shardmath.layouts.holdings import label
from shardmath.plans.demands import Batch, Demands, Ranks
from shardmath.plans.programs.legs import Bands, Legs
from shardmath.plans.template import unit_addends
from shardmath.plans.units import is_legal_cut
from shardmath.proofs.shapes import check_integers, require

__all__ = ["MemberTable", "Places", "check_lines", "find_misfit_of_bands"]


def check_lines(demands: Demands, batches: Sequence[Batch]) -> None:
    """Raise PlanError unless the byte ranges in `demands` follow each other without gaps, lie within the tensors in
    `batches`, and have one sender for each byte."""
    check_integers(demands)
    _check_tables(demands)
    _check_numbers(demands, batches)
    _check_rows(demands, batches)
    _check_blocks(demands, batches)
    length = demands.blocks.sums(demands.nbytes * demands.count)
    _check_cuts(demands, length)
    _check_stripes(demands, batches)
    _check_inner_cuts(demands, batches, length)


def _require_rows(demands: Demands, batches: Sequence[Batch], holds: Bools, what: str) -> None:
    """Raise PlanError for the first row that does not hold, naming its tensor and `what` is wrong."""
    for row in np.flatnonzero(~holds).tolist():
        name = _name_row(demands, batches, row)
        require(False, f"{label(name)}: row {row} {what}")


def _require_blocks(demands: Demands, batches: Sequence[Batch], holds: Bools, what: str) -> None:
    """Raise PlanError for the first block that does not hold, naming its ranks and `what` is wrong."""
    for block in np.flatnonzero(~holds).tolist():
        name = _name_row(demands, batches, int(demands.row_first[block]))
        ranks = demands.asked_by(block)[:8]
        require(False, f"{label(name)}: block {block}, for ranks {ranks}, {what}")


def _require_lines(demands: Demands, holds: Bools, what: str) -> None:
    """Raise PlanError for the first line that does not hold, naming its ranks and `what` is wrong."""
    for line in np.flatnonzero(~holds).tolist():
        ranks = demands.held_by(line)[:8]
        require(False, f"line {line}, of ranks {ranks}, {what}")


def _name_row(demands: Demands, batches: Sequence[Batch], row: int) -> str:
    """The first tensor of a row."""
    batch = batches[int(demands.batch[row])]
    return batch.names[0]


# Numbers


def _check_tables(demands: Demands) -> None:
    """Check that the tables fit each other: each line has blocks and cuts, and each block has rows."""
    row_columns = (
        demands.batch,
        demands.unit,
        demands.lo,
        demands.hi,
        demands.at,
        demands.each,
    )
    # The first column of lines is `holders`, the first of blocks `receivers`.
    block_columns = demands.receivers, demands.addend, demands.count, demands.nbytes, demands.start
    fits = (
        len(demands.near) == len(demands.holders)
        and _are_owned(demands.holders, demands.first, block_columns)
        and _are_owned(demands.receivers, demands.row_first, row_columns)
        and _are_owned(demands.holders, demands.cut_first, (demands.cuts,))
    )
    require(fits, "tables of lines are not of one length")


def _are_owned(owners: Ints, first: Ints, owned: Iterable[Ints]) -> bool:
    """Whether each owner i has items, which are `first[i]..first[i+1]-1` of all owned columns."""
    if len(first) != len(owners) + 1 or first[0] != 0:
        return False
    counts = np.diff(first)
    if (counts <= 0).any():
        return False
    return set(map(len, owned)) == {int(first[-1])}


def _check_numbers_of_sets(demands: Demands) -> None:
    """Check that all holders and receivers are numbers of existing sets of ranks."""
    for column in (demands.holders, demands.receivers):
        _check_known(column, len(demands.sets))


def _check_known(column: Ints, count: int) -> None:
    """Check that the numbers are from 0 to count - 1."""
    known = (column >= 0) & (column < count)
    require(known.all(), "lines are of unknown ranks or tensors")


def _check_numbers(demands: Demands, batches: Sequence[Batch]) -> None:
    """Check that each set has ranks, which ascend, and that sets, batches and units exist."""
    for ranks in demands.sets:
        ascending = bool(ranks) and all(map(operator.lt, ranks, ranks[1:]))
        require(ascending, f"ranks {ranks[:8]} are not ascending")
    _check_numbers_of_sets(demands)
    _check_known(demands.batch, len(batches))
    _check_units(demands, batches)


def _check_units(demands: Demands, batches: Sequence[Batch]) -> None:
    """Check that the rows' units exist, and that rows lie inside them."""
    unit = demands.unit
    sizes = [batch.template.unit_size for batch in batches]
    counts = lengths(sizes)
    known = (unit >= 0) & (unit < counts[demands.batch])
    _require_rows(demands, batches, known, "is of an unknown unit")
    size = pick(sizes, demands.batch, unit)
    lo = demands.lo
    hi = demands.hi
    inside = (lo >= 0) & (lo < hi) & (hi <= size)
    _require_rows(demands, batches, inside, "is not inside its unit")


# Rows and blocks


def _check_rows(demands: Demands, batches: Sequence[Batch]) -> None:
    """Check that rows have the bytes of their elements, lie end to end in blocks, and are of their addends."""
    bytes_in_tensor, row_bytes = _measure_rows(demands, batches)
    has_bytes = bytes_in_tensor == demands.each
    _require_rows(demands, batches, has_bytes, "is not of the bytes of its elements")
    rows = demands.rows
    follows = rows.begin(row_bytes) == demands.at
    _require_rows(demands, batches, follows, "does not follow the one before it")
    adds_up = rows.sums(row_bytes) == demands.nbytes
    _require_blocks(demands, batches, adds_up, "is not of the bytes of its rows")
    addends_by_batch = [unit_addends(batch.template) for batch in batches]
    addend_of_unit = pick(addends_by_batch, demands.batch, demands.unit)
    has_addend = rows.spread(demands.addend) == addend_of_unit
    _require_rows(demands, batches, has_addend, "is not of its block's addend")


def _measure_rows(demands: Demands, batches: Sequence[Batch]) -> tuple[Ints, Ints]:
    """By row: its bytes in one tensor, and in all tensors of its batch."""
    itemsizes = [batch.template.src.itemsize for batch in batches]
    itemsize = np.array(itemsizes, np.int64)
    tensors = lengths(batch.names for batch in batches)
    elements = demands.hi - demands.lo
    tensor_bytes = elements * itemsize[demands.batch]
    row_bytes = tensor_bytes * tensors[demands.batch]
    return tensor_bytes, row_bytes


def _check_blocks(demands: Demands, batches: Sequence[Batch]) -> None:
    """Check that blocks count their receivers rightly, and lie end to end in their lines."""
    count = _count_asking(demands)
    _require_blocks(demands, batches, count == demands.count, "counts other receivers")
    total = demands.nbytes * demands.count
    start = demands.blocks.begin(total)
    same = start == demands.start
    _require_blocks(demands, batches, same, "does not follow the one before it")


def _count_asking(demands: Demands) -> Ints:
    """How many receivers of each block are not holders of its line."""
    sets = list(map(frozenset, demands.sets))
    holders = demands.blocks.spread(demands.holders)
    receivers = demands.receivers
    pairs = zip(holders.tolist(), receivers.tolist(), strict=True)
    counts = []
    for holding, receiving in pairs:
        asking = sets[receiving] - sets[holding]
        counts.append(len(asking))
    return np.array(counts, np.int64)


# Cuts


def _check_cuts(demands: Demands, length: Ints) -> None:
    """Check that every holder has a share, and that the shares together are the line."""
    cuts = demands.cuts
    lines = Offsets(demands.cut_first)
    # Each share is between two cuts, so a line has one cut more than holders.
    holder_counts = lengths(demands.sets)[demands.holders]
    shared = lines.counts() == holder_counts + 1
    _require_lines(demands, shared, "is not cut among them")
    begin = cuts[lines.first[:-1]]
    end = cuts[lines.first[1:] - 1]
    complete = (begin == 0) & (end == length)
    _require_lines(demands, complete, "is not cut from its first byte to its last")
    ascends = ~_find_descending(lines, cuts)
    _require_lines(demands, ascends, "has cuts that go back")


def _find_descending(lines: Offsets, cuts: Ints) -> Bools:
    """Whether each line has a cut that is less than the cut before it."""
    line = lines.owners()
    later = line[1:]
    same_line = later == line[:-1]
    less = cuts[1:] < cuts[:-1]
    out = np.zeros(len(lines), bool)
    out[later[same_line & less]] = True
    return out


def _check_stripes(demands: Demands, batches: Sequence[Batch]) -> None:
    """Check that rows that begin inside their units begin where units may be cut.

    Ends need no check: a row that ends inside its unit ends where another begins.
    """
    for row in np.flatnonzero(demands.lo).tolist():
        batch = batches[int(demands.batch[row])]
        itemsize = batch.template.src.itemsize
        place = int(demands.lo[row]) * itemsize
        _check_place(demands, batches, row, place)


def _check_inner_cuts(demands: Demands, batches: Sequence[Batch], length: Ints) -> None:
    """Check that cuts inside lines are where units may be cut."""
    cuts = demands.cuts
    lines = Offsets(demands.cut_first)
    line = lines.owners()
    is_inner = (cuts > 0) & (cuts < length[line])
    line = line[is_inner]
    inner = cuts[is_inner]
    rows, bytes_of_units = _find_places(demands, length, line, inner)
    places = zip(rows.tolist(), bytes_of_units.tolist(), strict=True)
    # Copies of a block may be cut at the same place, which is checked once.
    for row, byte_of_unit in dict.fromkeys(places):
        _check_place(demands, batches, row, byte_of_unit)


def _find_places(demands: Demands, length: Ints, line: Ints, at: Ints) -> tuple[Ints, Ints]:
    """The row that byte `at` of each line is in, and which byte of the row's unit that is."""
    # From the outside in: the block, the byte of one copy of its content, the row, and the byte of
    # one of the row's tensors.
    block, inside = _locate(demands.start, demands.blocks, length, line, at)
    content = inside % demands.nbytes[block]
    row, inside = _locate(demands.at, demands.rows, demands.nbytes, block, content)
    lo = demands.lo[row]
    elements = demands.hi[row] - lo
    each = demands.each[row]
    itemsize = each // elements
    place = lo * itemsize + inside % each
    return row, place


def _locate(start: Ints, items: Offsets, length: Ints, owner: Ints, at: Ints) -> tuple[Ints, Ints]:
    """The item that has byte `at` of each owner, and which byte of the item that is.

    Items begin at byte `start` of their owner, and owner i has `length[i]` bytes.
    """
    # All owners end to end, so that one search serves all.
    begin = np.cumsum(length) - length
    starts = items.spread(begin) + start
    place = begin[owner] + at
    item = np.searchsorted(starts, place, "right") - 1
    return item, at - start[item]


def _check_place(demands: Demands, batches: Sequence[Batch], row: int, place: int) -> None:
    """Check that byte `place` of a row's unit is at the border of a box, or of a row of a box."""
    batch = batches[int(demands.batch[row])]
    t = batch.template
    unit = int(demands.unit[row])
    element, odd = divmod(place, t.src.itemsize)
    if odd or not is_legal_cut(t, unit, element):
        name = _name_row(demands, batches, row)
        require(False, f"{label(name)}: byte {place} of unit {unit} is a cut inside a row")


# Bands


def find_misfit_of_bands(legs: Legs) -> str:
    """Return an error message if the arrays of routes in `legs` differ in length or have numbers out of range;
    otherwise return "". A band is a range of a block's bytes with one route.

    This comes before anything is expanded from the bands, so that the cost of a proof is in proportion to the
    lengths of the tables, whatever they contain. Raises PlanError if lines and cuts do not fit each other, or if
    lines are of ranks that do not exist.
    """
    demands = legs.lines
    bands = legs.bands
    # A program cuts lines where its bands say, not where the plan does.
    _check_tables(replace(demands, cut_first=bands.cut_first, cuts=bands.cuts))
    _check_numbers_of_sets(demands)
    if not _fit_blocks(bands, demands.receivers):
        return "tables of bands are not of one length"
    # By band, the number of classes into which its block divides the nodes.
    classes = Offsets(bands.first).spread(bands.classes)
    begins_fit = (bands.begin >= 0) & (bands.begin < classes)
    counts_fit = (bands.count > 0) & (bands.count <= classes)
    places_fit = (bands.place >= 0) & (bands.place < bands.span)
    known = begins_fit & counts_fit & places_fit
    if known.all():
        return ""
    return "bands are of unknown classes of nodes, or have entries outside them"


def _fit_blocks(bands: Bands, blocks: Ints) -> bool:
    """Whether every block has classes, a start and entries, and entries are columns of one length."""
    entries = bands.at, bands.begin, bands.count, bands.place, bands.span
    if not _are_owned(blocks, bands.first, entries):
        return False
    return len(bands.classes) == len(bands.start) == len(blocks)


# Positions of sets of ranks


class MemberTable(NamedTuple):
    """The mesh positions of the ranks in each set of ranks; -1 for ranks that are not in the mesh."""

    of_set: Offsets
    positions: Ints

    def of(self, numbers: Ints) -> tuple[Ints, Ints]:
        """Return two arrays: the mesh positions of the ranks in the sets numbered `numbers`, one set after the other,
        and, for each position, the index in `numbers` of the set that it belongs to."""
        first = self.of_set.first
        items, owner = ranges(first[numbers], first[numbers + 1])
        return self.positions[items], owner


class Places:
    """A lookup of the positions, in any mesh, of the ranks in given sets; the positions in each mesh are computed once.

    >>> places = Places([(3, 4), (5,)])
    >>> positions, which = places.within(Mesh(tp=2, ranks=[5, 4])).of(np.array([0, 1]))
    >>> positions.tolist(), which.tolist()
    ([-1, 1, 0], [0, 0, 1])
    """

    def __init__(self, sets: Sequence[Ranks]) -> None:
        self._set_offsets = Offsets.of_counts(lengths(sets))
        # A dict and not an array: ranks that someone wrote into a table may be of any size.
        number: dict[int, int] = {}
        which = [number.setdefault(rank, len(number)) for ranks in sets for rank in ranks]
        # Distinct ranks are numbered; `_member_numbers` are the numbers of the sets' ranks, set by set.
        self._rank_numbers = number
        self._member_numbers = np.array(which, np.int64)
        self._by_mesh: dict[Mesh, MemberTable] = {}
        # Equal meshes are many objects, which are quicker to look up by id than to compare. The
        # plan keeps them alive, so that no id is reused.
        self._by_id: dict[int, MemberTable] = {}

    def within(self, mesh: Mesh) -> MemberTable:
        """Return the positions in `mesh` of the ranks in all sets, as a MemberTable."""
        table = self._by_id.get(id(mesh))
        if table is None:
            if mesh not in self._by_mesh:
                self._by_mesh[mesh] = self._find(mesh)
            table = self._by_id[id(mesh)] = self._by_mesh[mesh]
        return table

    def _find(self, mesh: Mesh) -> MemberTable:
        # A loop over the ranks of the mesh: the sets may have many more, and there may be many meshes.
        position_of = [-1] * len(self._rank_numbers)
        for position, rank in enumerate(mesh.ranks):
            number = self._rank_numbers.get(rank)
            if number is not None:
                position_of[number] = position
        positions = np.array(position_of, np.int64)
        return MemberTable(self._set_offsets, positions[self._member_numbers])
