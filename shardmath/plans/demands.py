"""Demands: the bytes that receivers ask of holders, as integers.

1. A **line** belongs to a set of ranks that hold the same elements, its holders. It is made of
   **blocks**, one for each set of receivers. A block's **content** is `nbytes` bytes, the same for
   every receiver: rows one after the other; in each row, the same unit of each tensor of a batch.
2. A line has the content of a block once for every receiver, receiver by receiver. A receiver
   that is a holder itself copies locally and is not on the line.
3. With a topology, receivers with a holder on their own node ask the holders there: a **near**
   line.
4. The order of lines, blocks and rows depends on what ranks hold, so every rank finds the same.

A **unit** is elements of a tensor that the same ranks hold and the same ranks need (see `template`). No table grows
with pairs of ranks: rows are a template's units, once for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, lengths, ranges
from shardmath.base.errors import PlanError
from shardmath.plans.flows.topology import Topology
from shardmath.plans.template import Batch, Ranks, Sets, Template, unit_addends
from shardmath.plans.units import stripe_unit

__all__ = ["Batch", "Demands", "Ranks", "gather_lines", "list_receivers"]

MOST_BYTES = 1 << 61
"""Most bytes that all ranks together ask for: sums and differences stay exact in 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Demands:
    """A table of all bytes that a move sends: the ranks that hold them, and the ranks that need them.

    Line l is held by the ranks `sets[holders[l]]` and has the blocks `first[l]..first[l+1]-1`; its
    h-th holder sends the bytes `cuts[cut_first[l] + h]..cuts[cut_first[l] + h + 1] - 1` of it;
    `near` lines stay on a node.
    Block b begins at byte `start[b]` of its line, is addend `addend[b]` of a fold (0 if there is no
    fold), has `nbytes[b]` bytes for each of the `count[b]` ranks of `sets[receivers[b]]` that
    are not holders, and the rows `row_first[b]..row_first[b+1]-1`.
    Row r begins at byte `at[r]` of the content and is elements `lo[r]..hi[r]-1` of `unit[r]`,
    `each[r]` bytes, of every tensor of `batch[r]`.
    """

    sets: tuple[Ranks, ...]
    holders: Ints
    near: Bools
    first: Ints
    cut_first: Ints
    cuts: Ints
    receivers: Ints
    addend: Ints
    count: Ints
    nbytes: Ints
    start: Ints
    row_first: Ints
    batch: Ints
    unit: Ints
    lo: Ints
    hi: Ints
    at: Ints
    each: Ints

    @property
    def blocks(self) -> Offsets:
        """The list of blocks of each line, as offsets: line i has the blocks `blocks.first[i]` up to `blocks.first[i +
        1]`, exclusive. A line is bytes that the same ranks hold; a block is the part of a line that the same ranks
        need."""
        return Offsets(self.first)

    @property
    def rows(self) -> Offsets:
        """The offsets of each block's rows: block i has the rows `rows.first[i]` up to `rows.first[i + 1]`, exclusive.
        A block is bytes that the same ranks need; a row is one range of element indices, the same in each of several
        tensors."""
        return Offsets(self.row_first)

    def held_by(self, line: int) -> Ranks:
        """Return the ranks that hold, and may send, the bytes of line number `line` (bytes with equal holders)."""
        return self.sets[self.holders[line]]

    def asked_by(self, block: int) -> Ranks:
        """Return the ranks that need block number `block` (bytes with equal receivers), even if they hold it."""
        return self.sets[self.receivers[block]]

    def cuts_of(self, line: int) -> Ints:
        """Return the byte offsets at which line number `line` (bytes with equal holders) is divided among its holders.

        They ascend from 0 to the length of the line.
        """
        first = int(self.cut_first[line])
        return self.cuts[first : first + len(self.held_by(line)) + 1]


class _Requests(NamedTuple):
    """Requests, one per row: elements lo..hi-1 of a unit, of every tensor of a batch.

    `order` is the unit's place in its template, `addend` its addend (0 if there is no fold),
    `holders` and `receivers` are numbers of sets, and `near` is 1 if they are on one node.
    """

    batch: Ints
    unit: Ints
    order: Ints
    addend: Ints
    lo: Ints
    hi: Ints
    holders: Ints
    receivers: Ints
    near: Ints

    def take(self, rows: Ints) -> _Requests:
        """Return the requests with the indices `rows`, in the order of `rows`. A request is a range of elements, with
        the ranks that hold it and the ranks that need it."""
        return _Requests(*(column[rows] for column in self))

    def lines(self) -> Ints:
        """Return an array with a number for each request (elements that some ranks hold and others need); requests with
        equal numbers have the same holders. The number is odd if holders and receivers are all on one node."""
        return self.holders * 2 + self.near


def gather_lines(batches: Sequence[Batch], topology: Topology | None = None) -> Demands:
    """Make a table of the bytes that `batches` (groups of equally sharded tensors) move: which ranks hold them, and
    which need them. With `topology`, if a receiver's node has holders, only these are listed as holders for this
    receiver.

    The table does not say yet which of the holders sends a byte.
    """
    sets = Sets()
    requests = _stack(_list_requests(batches, sets))
    if topology is not None:
        requests = _split_by_node(requests, sets, topology)
    listed, place = sets.in_order()
    holders = place[requests.holders]
    receivers = place[requests.receivers]
    renumbered = requests._replace(holders=holders, receivers=receivers)
    return _gather(batches, listed, renumbered)


def _stack(parts: Iterable[_Requests]) -> _Requests:
    """All rows in one table."""
    none = np.zeros(0, np.int64)
    # np.concatenate needs an array even if there are no parts.
    empty = [none] * len(_Requests._fields)
    columns = zip(empty, *parts, strict=True)
    return _Requests(*map(np.concatenate, columns))


def _list_requests(batches: Sequence[Batch], sets: Sets) -> Iterator[_Requests]:
    """The requests of all batches, template by template."""
    groups: dict[Template, list[int]] = {}
    for number, batch in enumerate(batches):
        groups.setdefault(batch.template, []).append(number)
    for template, numbers in groups.items():
        if template.reduction.chosen:
            # Which destination addend receives a unit depends on the ranks, and so on the batch.
            for number in numbers:
                yield _ask_for_one_each(number, batches[number], sets)
        else:
            yield _ask_for_all(template, numbers, batches, sets)


def _ask_for_all(
    t: Template, numbers: list[int], batches: Sequence[Batch], sets: Sets
) -> _Requests:
    """The requests of a template of which every destination cell receives: each batch asks for all units."""
    holders = []
    receivers = []
    for batch_number in numbers:
        batch = batches[batch_number]
        # The number of each class's and of each cell's set of ranks.
        holding = sets.add_all(batch.src, t.holders)
        asking = sets.add_all(batch.dst, t.receivers)
        holders.append(holding[t.unit_class])
        receivers.append(asking[t.unit_cell])
    units = len(t.unit_size)
    unit = np.tile(np.arange(units), len(numbers))
    zeros = np.zeros_like(unit)
    return _Requests(
        batch=np.array(numbers, np.int64).repeat(units),
        unit=unit,
        order=t.unit_order[unit],
        addend=unit_addends(t)[unit],
        lo=zeros,
        hi=t.unit_size[unit],
        holders=np.concatenate(holders),
        receivers=np.concatenate(receivers),
        near=zeros,  # `_split_by_node` tells which are near
    )


def _ask_for_one_each(batch_number: int, batch: Batch, sets: Sets) -> _Requests:
    """The requests of a batch whose elements each go to one addend of the destination: to the addend of which
    most ranks hold the unit already; if no rank does, each addend gets a stripe of the unit.

    Replicas of an addend have to stay equal, so the choice depends only on the unit.
    """
    t = batch.template
    rows = list(_list_stripes(batch, sets))
    unit, lo, hi, receivers = np.array(rows, np.int64).reshape(-1, 4).T
    holders = sets.add_all(batch.src, t.holders)
    return _Requests(
        batch=np.full_like(unit, batch_number),
        unit=unit,
        order=t.unit_order[unit],
        addend=unit_addends(t)[unit],
        lo=lo,
        hi=hi,
        holders=holders[t.unit_class[unit]],
        receivers=receivers,
        near=np.zeros_like(unit),
    )


def _list_stripes(batch: Batch, sets: Sets) -> Iterator[tuple[int, int, int, int]]:
    """(unit, first element, last element + 1, receivers) of each stripe, which one addend receives; `receivers` is the
    number of a set."""
    t = batch.template
    ranks_by_class = list(map(set, t.holders.name(batch.src)))
    addends_by_cell = [_group_by_addend(batch, positions) for positions in t.receivers]
    classes = t.unit_class.tolist()
    cells = t.unit_cell.tolist()
    for unit, cell in enumerate(cells):
        ranks_by_addend = addends_by_cell[cell]
        holders = ranks_by_class[classes[unit]]
        chosen = _choose_addends(ranks_by_addend, holders)
        parts = stripe_unit(t, unit, len(chosen))
        for (lo, hi), addend in zip(parts, chosen, strict=True):
            receivers = sets.add(ranks_by_addend[addend])
            if lo < hi:
                yield unit, lo, hi, receivers


def _group_by_addend(batch: Batch, positions: Ints) -> dict[int, Ranks]:
    """The ranks at these positions of the destination, by the addend that they hold."""
    t = batch.template
    addend_of = t.dst.mesh.coordinate(t.reduction.chosen).tolist()
    groups: dict[int, list[int]] = {}
    for position in positions.tolist():
        addend = addend_of[position]
        rank = batch.dst.ranks[position]
        groups.setdefault(addend, []).append(rank)
    return {addend: tuple(sorted(ranks)) for addend, ranks in groups.items()}


def _choose_addends(asking: dict[int, Ranks], held: set[int]) -> list[int]:
    """The addends that get the unit: the one of which most ranks hold it already, so that most bytes stay in place; all
    addends, a stripe each, if no rank does. `asking` has the ranks of each addend."""
    addends = sorted(asking)
    holder_counts = [len(held.intersection(asking[addend])) for addend in addends]
    most = max(holder_counts)
    return [addends[holder_counts.index(most)]] if most else addends


def _split_by_node(requests: _Requests, sets: Sets, topology: Topology) -> _Requests:
    """The requests divided by node: receivers whose node has a holder ask the holders there."""
    # Each pair of sets as one number, so that it is split once.
    count = len(sets.number)
    codes = requests.holders * count + requests.receivers
    pairs, pair_of_row = np.unique(codes, return_inverse=True)
    parts, first_part = _split_pairs(pairs // count, pairs % count, sets, topology.node)
    # Every row is repeated for each part of its pair.
    part, row = ranges(first_part[pair_of_row], first_part[pair_of_row + 1])
    holders, receivers, near = parts[part].T
    rows = requests.take(row)
    return rows._replace(holders=holders, receivers=receivers, near=near)


def _split_pairs(
    holders: Ints, receivers: Ints, sets: Sets, node: Callable[[int], int]
) -> tuple[Ints, Ints]:
    """(holders, receivers, near) of all parts of these pairs of sets, and the first part of each pair."""
    listed = list(sets.number)
    parts: list[tuple[int, int, bool]] = []
    first = [0]
    nodes = [frozenset(map(node, ranks)) for ranks in listed]
    for holder_set, receiver_set in zip(holders.tolist(), receivers.tolist(), strict=True):
        if nodes[holder_set].isdisjoint(nodes[receiver_set]):
            parts.append((holder_set, receiver_set, False))
        else:
            split = _split_pair(listed[holder_set], listed[receiver_set], node)
            for holding, asking, near in split:
                part = sets.add(holding), sets.add(asking), near
                parts.append(part)
        first.append(len(parts))
    table = np.array(parts, np.int64)
    begin = np.array(first, np.int64)
    return table.reshape(-1, 3), begin


def _split_pair(
    holders: Ranks, receivers: Ranks, node: Callable[[int], int]
) -> list[tuple[Ranks, Ranks, bool]]:
    """(holders, receivers, near): one part for each node with holders, then one for all other receivers."""
    holders_by_node = _group_by_node(holders, node)
    receivers_by_node = _group_by_node(receivers, node)
    parts = []
    far: list[int] = []
    for node_number, ranks in sorted(receivers_by_node.items()):
        if node_number in holders_by_node:
            parts.append((tuple(holders_by_node[node_number]), tuple(ranks), True))
        else:
            far += ranks
    if far:
        parts.append((holders, tuple(sorted(far)), False))
    return parts


def _group_by_node(ranks: Ranks, node: Callable[[int], int]) -> dict[int, list[int]]:
    """The ranks on each node, by its number."""
    groups: dict[int, list[int]] = {}
    for rank in ranks:
        groups.setdefault(node(rank), []).append(rank)
    return groups


def _gather(batches: Sequence[Batch], sets: tuple[Ranks, ...], requests: _Requests) -> Demands:
    """The requests in order, gathered into blocks and lines."""
    _check_total(batches, sets, requests)
    order, rows = _sort(requests, len(sets))
    requests = requests.take(order)
    # The first row of a block has the values that all its rows have in common.
    heads = requests.take(rows.first[:-1])
    blocks = Offsets.of_sorted(heads.lines())
    line_heads = heads.take(blocks.first[:-1])
    each, row_bytes = _measure_rows(batches, requests)
    nbytes = rows.sums(row_bytes)
    count = _count_receivers(sets, heads)
    no_cuts = np.zeros(0, np.int64)
    return Demands(
        sets=sets,
        holders=line_heads.holders,
        near=line_heads.near > 0,
        first=blocks.first,
        cut_first=no_cuts,
        cuts=no_cuts,
        receivers=heads.receivers,
        addend=heads.addend,
        count=count,
        nbytes=nbytes,
        start=blocks.begin(nbytes * count),
        row_first=rows.first,
        batch=requests.batch,
        unit=requests.unit,
        lo=requests.lo,
        hi=requests.hi,
        at=rows.begin(row_bytes),
        each=each,
    )


def _check_total(batches: Sequence[Batch], sets: tuple[Ranks, ...], requests: _Requests) -> None:
    """Raise PlanError if all bytes together do not fit 64-bit integers."""
    per_element = [batch.template.src.itemsize * len(batch.names) for batch in batches]
    elements = requests.hi - requests.lo
    # Floats are not exact here, but cannot overflow.
    element_bytes_by_batch = np.array(per_element, np.float64)
    nbytes = elements * element_bytes_by_batch[requests.batch]
    # Not `@`: BLAS would wake its threads, which takes longer than the plan's own sorting.
    total = float(np.sum(nbytes * lengths(sets)[requests.receivers]))
    if total > MOST_BYTES:
        what = f"the plan moves about {total:.3g} bytes, which is more than {MOST_BYTES}"
        raise PlanError(f"{what}; plan fewer tensors at a time")


def _sort(requests: _Requests, sets: int) -> tuple[Ints, Offsets]:
    """The order of the rows, and the blocks as ranges of them in that order."""
    # A block is all rows of one line, addend and receivers. Sorting by two numbers of mixed radix is
    # faster than by six columns.
    addends = int(requests.addend.max(initial=0)) + 1
    block = requests.lines() * addends + requests.addend
    block = block * sets + requests.receivers
    orders = int(requests.order.max(initial=0)) + 1
    unit_number = requests.batch * orders + requests.order
    order = np.lexsort((requests.lo, unit_number, block))
    return order, Offsets.of_sorted(block[order])


def _measure_rows(batches: Sequence[Batch], requests: _Requests) -> tuple[Ints, Ints]:
    """The bytes of each row in one tensor, and in all tensors of its batch."""
    itemsize = np.array([batch.template.src.itemsize for batch in batches], np.int64)
    tensors = lengths(batch.names for batch in batches)
    elements = requests.hi - requests.lo
    each = elements * itemsize[requests.batch]
    return each, each * tensors[requests.batch]


def _count_receivers(sets: tuple[Ranks, ...], heads: _Requests) -> Ints:
    """How many receivers of each block are not holders, given a row of each block."""
    count = lengths(sets)[heads.receivers]
    holders = np.unique(heads.holders).tolist()
    sending: set[int] = set()
    for set_number in holders:
        sending.update(sets[set_number])
    # Sets are compared one by one only if some of the receivers holds anything at all.
    asking: dict[int, frozenset[int]] = {}
    for set_number in np.unique(heads.receivers).tolist():
        if not sending.isdisjoint(sets[set_number]):
            asking[set_number] = frozenset(sets[set_number])
    some_hold = np.isin(heads.receivers, list(asking))
    for block in np.flatnonzero(some_hold).tolist():
        holding = sets[heads.holders[block]]
        receiving = asking[int(heads.receivers[block])]
        local = receiving.intersection(holding)
        count[block] -= len(local)
    return count


def list_receivers(demands: Demands, line: int, block: int) -> Ranks:
    """Return the ranks that need, and do not hold, the bytes of block number `block` among all blocks of `demands`. The
    block is part of line number `line` (bytes that the same ranks hold)."""
    asking = demands.asked_by(block)
    # `count` leaves out the ranks that hold the bytes: here none of those that ask does.
    if demands.count[block] == len(asking):
        return asking
    held = demands.held_by(line)
    others = set(asking).difference(held)
    return tuple(sorted(others))
