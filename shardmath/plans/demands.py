"""Demands: all that is asked, of whom and by whom, as integers.

1. A **line** belongs to a set of ranks that hold the same, its holders. It is made of **blocks**,
   one for each set of receivers. A block's **content** is `nbytes` bytes, the same for every
   receiver: rows one after the other, in each the tensors of a batch one after the other, of each
   tensor one unit.
2. On the line a block takes its content once for every receiver, receiver by receiver. A receiver
   that is a holder itself copies locally and is not on the line.
3. With a topology, receivers with a holder on their own node ask the holders there: a **near**
   line.
4. The order of lines, blocks and rows depends on what ranks hold, so every rank finds the same.

Nothing here grows with pairs of ranks: rows are a template's units, once for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, lengths, ranges
from shardmath.base.errors import PlanError
from shardmath.plans.flows.topology import Topology
from shardmath.plans.pieces import stripe_unit
from shardmath.plans.template import Batch, Ranks, Sets, Template, unit_addends

__all__ = ["Batch", "Demands", "Ranks", "gather_lines", "list_receivers"]

MOST_BYTES = 1 << 61
"""That all ranks together ask for; sums and differences stay exact in 64 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Demands:
    """All lines, and where they are cut.

    Line l is held by the ranks `sets[holders[l]]` and has the blocks `first[l]..first[l+1]-1`; its
    h-th holder sends the bytes `cuts[cut_first[l] + h]..cuts[cut_first[l] + h + 1] - 1` of it;
    `near` lines stay on a node.
    Block b begins at byte `start[b]` of its line, is addend `addend[b]` of what is folded (0 where
    nothing is), has `nbytes[b]` bytes for each of the `count[b]` ranks of `sets[receivers[b]]` that
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
        """Line -> its blocks."""
        return Offsets(self.first)

    @property
    def rows(self) -> Offsets:
        """Block -> its rows."""
        return Offsets(self.row_first)

    def held_by(self, line: int) -> Ranks:
        """The ranks that hold the line."""
        return self.sets[self.holders[line]]

    def asked_by(self, block: int) -> Ranks:
        """The ranks that ask for the block, holders included."""
        return self.sets[self.receivers[block]]

    def cuts_of(self, line: int) -> Ints:
        """Where the line is cut, ends included: one place more than it has holders."""
        first = int(self.cut_first[line])
        return self.cuts[first : first + len(self.held_by(line)) + 1]


class _Asked(NamedTuple):
    """What is asked, row by row: elements lo..hi-1 of a unit, of every tensor of a batch.

    `order` is the unit's place in its template, `addend` the addend that it is of (0 where nothing
    is folded), `holders` and `receivers` are sets by number, and `near` is 1 where they are on one
    node.
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

    def take(self, rows: Ints) -> _Asked:
        """Some of the rows, in this order."""
        return _Asked(*(column[rows] for column in self))

    def lines(self) -> Ints:
        """The line of each row as a number."""
        return self.holders * 2 + self.near


def gather_lines(batches: Sequence[Batch], topology: Topology | None = None) -> Demands:
    """The lines of all batches, not cut yet."""
    sets = Sets()
    asked = _stack(_ask(batches, sets))
    if topology is not None:
        asked = _split_by_node(asked, sets, topology)
    listed, place = sets.in_order()
    holders = place[asked.holders]
    receivers = place[asked.receivers]
    renumbered = asked._replace(holders=holders, receivers=receivers)
    return _gather(batches, listed, renumbered)


def _stack(parts: Iterable[_Asked]) -> _Asked:
    """All rows in one table."""
    none = np.zeros(0, np.int64)
    empty = [none] * len(_Asked._fields)
    columns = zip(empty, *parts, strict=True)
    return _Asked(*map(np.concatenate, columns))


def _ask(batches: Sequence[Batch], sets: Sets) -> Iterator[_Asked]:
    """Who asks whom for which unit, template by template."""
    groups: dict[Template, list[int]] = {}
    for number, batch in enumerate(batches):
        groups.setdefault(batch.template, []).append(number)
    for template, numbers in groups.items():
        if template.reduction.chosen:
            for number in numbers:
                yield _ask_for_one_each(number, batches[number], sets)
        else:
            yield _ask_for_all(template, numbers, batches, sets)


def _ask_for_all(t: Template, numbers: list[int], batches: Sequence[Batch], sets: Sets) -> _Asked:
    """Where every destination cell receives: each batch of the template asks for all its units."""
    holders = []
    receivers = []
    for number in numbers:
        batch = batches[number]
        holding = sets.add_all(batch.src, t.holders)
        asking = sets.add_all(batch.dst, t.receivers)
        holders.append(holding[t.unit_class])
        receivers.append(asking[t.unit_cell])
    units = len(t.unit_size)
    unit = np.tile(np.arange(units), len(numbers))
    none = np.zeros_like(unit)
    return _Asked(
        batch=np.array(numbers, np.int64).repeat(units),
        unit=unit,
        order=t.unit_order[unit],
        addend=unit_addends(t)[unit],
        lo=none,
        hi=t.unit_size[unit],
        holders=np.concatenate(holders),
        receivers=np.concatenate(receivers),
        near=none,
    )


def _ask_for_one_each(number: int, batch: Batch, sets: Sets) -> _Asked:
    """Where one destination addend may receive: the one that most hold already, or all a stripe.

    Replicas of an addend have to stay equal, so what is chosen depends on the unit alone.
    """
    t = batch.template
    rows = list(_list_stripes(batch, sets))
    unit, lo, hi, receivers = np.array(rows, np.int64).reshape(-1, 4).T
    holders = sets.add_all(batch.src, t.holders)
    return _Asked(
        batch=np.full_like(unit, number),
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
    """(unit, first element, last element + 1, receivers) of all that one addend each receives."""
    t = batch.template
    held = list(map(set, t.holders.name(batch.src)))
    asking = [_group_by_addend(batch, positions) for positions in t.receivers]
    classes = t.unit_class.tolist()
    cells = t.unit_cell.tolist()
    for unit, cell in enumerate(cells):
        by_addend = asking[cell]
        holders = classes[unit]
        chosen = _choose_addends(by_addend, held[holders])
        parts = stripe_unit(t, unit, len(chosen))
        for (lo, hi), addend in zip(parts, chosen, strict=True):
            receivers = sets.add(by_addend[addend])
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
    """The addend of which most ranks hold the unit already; all where none does."""
    addends = sorted(asking)
    local = [len(held.intersection(asking[addend])) for addend in addends]
    most = max(local)
    return [addends[local.index(most)]] if most else addends


def _split_by_node(asked: _Asked, sets: Sets, topology: Topology) -> _Asked:
    """The same with receivers apart whose node has a holder: those ask the holders there."""
    # A pair of sets is one number, so that each pair is split once.
    count = len(sets.number)
    codes = asked.holders * count + asked.receivers
    pairs, pair = np.unique(codes, return_inverse=True)
    parts, first = _split_pairs(pairs // count, pairs % count, sets, topology.node)
    # Every row is there once for each part of its pair.
    part, row = ranges(first[pair], first[pair + 1])
    holders, receivers, near = parts[part].T
    rows = asked.take(row)
    return rows._replace(holders=holders, receivers=receivers, near=near)


def _split_pairs(
    holders: Ints, receivers: Ints, sets: Sets, node: Callable[[int], int]
) -> tuple[Ints, Ints]:
    """(holders, receivers, near) of all parts of these pairs of sets, and where each pair's begin."""
    listed = list(sets.number)
    parts: list[tuple[int, int, bool]] = []
    first = [0]
    nodes = [frozenset(map(node, ranks)) for ranks in listed]
    for here, there in zip(holders.tolist(), receivers.tolist(), strict=True):
        if nodes[here].isdisjoint(nodes[there]):
            parts.append((here, there, False))
        else:
            split = _split_pair(listed[here], listed[there], node)
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
    """(holders, receivers, whether on one node): by node that has holders, then all others."""
    here = _group_by_node(holders, node)
    there = _group_by_node(receivers, node)
    parts = []
    far: list[int] = []
    for number, ranks in sorted(there.items()):
        if number in here:
            parts.append((tuple(here[number]), tuple(ranks), True))
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


def _gather(batches: Sequence[Batch], sets: tuple[Ranks, ...], asked: _Asked) -> Demands:
    """Rows in their order, gathered in blocks and lines."""
    _check_total(batches, sets, asked)
    order, rows = _sort(asked, len(sets))
    asked = asked.take(order)
    # What the rows of a block have in common stands in the first of them.
    heads = asked.take(rows.first[:-1])
    blocks = Offsets.of_sorted(heads.lines())
    line_heads = heads.take(blocks.first[:-1])
    each, row_bytes = _measure_rows(batches, asked)
    nbytes = rows.sums(row_bytes)
    count = _count_receivers(sets, heads)
    none = np.zeros(0, np.int64)
    return Demands(
        sets=sets,
        holders=line_heads.holders,
        near=line_heads.near > 0,
        first=blocks.first,
        cut_first=none,
        cuts=none,
        receivers=heads.receivers,
        addend=heads.addend,
        count=count,
        nbytes=nbytes,
        start=blocks.begin(nbytes * count),
        row_first=rows.first,
        batch=asked.batch,
        unit=asked.unit,
        lo=asked.lo,
        hi=asked.hi,
        at=rows.begin(row_bytes),
        each=each,
    )


def _check_total(batches: Sequence[Batch], sets: tuple[Ranks, ...], asked: _Asked) -> None:
    """Bytes are counted in 64 bits."""
    per_element = [batch.template.src.itemsize * len(batch.names) for batch in batches]
    elements = asked.hi - asked.lo
    # In floats, which are not exact, and cannot overflow.
    of_batch = np.array(per_element, np.float64)
    nbytes = elements * of_batch[asked.batch]
    total = float(nbytes @ lengths(sets)[asked.receivers])
    if total > MOST_BYTES:
        what = f"the plan moves about {total:.3g} bytes, more than {MOST_BYTES}"
        raise PlanError(f"{what}; plan fewer tensors at a time")


def _sort(asked: _Asked, sets: int) -> tuple[Ints, Offsets]:
    """The order of the rows, and which of them, in order, are one block's."""
    # A block is all rows of one line, addend and receivers. Two numbers of mixed radix sort faster
    # than six columns.
    addends = int(asked.addend.max(initial=0)) + 1
    block = asked.lines() * addends + asked.addend
    block = block * sets + asked.receivers
    orders = int(asked.order.max(initial=0)) + 1
    within = asked.batch * orders + asked.order
    order = np.lexsort((asked.lo, within, block))
    return order, Offsets.of_sorted(block[order])


def _measure_rows(batches: Sequence[Batch], asked: _Asked) -> tuple[Ints, Ints]:
    """The bytes of each row in one tensor, and in all tensors of its batch."""
    itemsize = np.array([batch.template.src.itemsize for batch in batches], np.int64)
    tensors = lengths(batch.names for batch in batches)
    elements = asked.hi - asked.lo
    each = elements * itemsize[asked.batch]
    return each, each * tensors[asked.batch]


def _count_receivers(sets: tuple[Ranks, ...], heads: _Asked) -> Ints:
    """How many receivers of each block are not holders, given a row of each block."""
    count = lengths(sets)[heads.receivers]
    holders = np.unique(heads.holders).tolist()
    sending: set[int] = set()
    for number in holders:
        sending.update(sets[number])
    # Sets are compared one by one only where some rank of the receivers holds anything at all.
    asking: dict[int, frozenset[int]] = {}
    for number in np.unique(heads.receivers).tolist():
        if not sending.isdisjoint(sets[number]):
            asking[number] = frozenset(sets[number])
    some_hold = np.isin(heads.receivers, list(asking))
    for block in np.flatnonzero(some_hold).tolist():
        holding = sets[heads.holders[block]]
        receiving = asking[int(heads.receivers[block])]
        local = receiving.intersection(holding)
        count[block] -= len(local)
    return count


def list_receivers(demands: Demands, line: int, block: int) -> Ranks:
    """The receivers of a block that do not hold it themselves."""
    asking = demands.asked_by(block)
    if demands.count[block] == len(asking):
        return asking
    held = demands.held_by(line)
    others = set(asking).difference(held)
    return tuple(sorted(others))
