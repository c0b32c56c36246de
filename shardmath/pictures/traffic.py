"""Traffic: who sends how many bytes to whom, ranks in groups.

1. A group is of ranks that follow each other: of one node where there are few nodes, else of whole nodes.
2. A program shows its own streams: what is relayed counts each time that it is sent.
3. The traffic of an adjoint is that of its plan, transposed.

>>> from shardmath.algebra.mesh import Mesh
>>> from shardmath.layouts.layout import Layout
>>> from shardmath.plans.plan import plan
>>> moved = traffic(plan(Layout((4,), Mesh(tp=2), "(tp n)"), Layout((4,), Mesh(tp=2), "n")))
>>> moved.sent.tolist(), moved.stays.tolist()
([[0, 8], [8, 0]], [[8, 0], [0, 8]])
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.flows.topology import Topology
from shardmath.plans.adjoint import Transposed
from shardmath.plans.demands import Demands, wire
from shardmath.plans.plan import Plan
from shardmath.programs.loads import sum_pairs
from shardmath.programs.program import Program

__all__ = ["Group", "Traffic", "traffic"]

_T = TypeVar("_T")

MOST_GROUPS = 24
"""Rows and columns of a heat map."""
MANY = 2048
"""Receivers of a line that are counted by group, not one by one."""
ONE_NODE = 1 << 24
"""More ranks than any mesh has: without a topology all are on one node."""


class Group(NamedTuple):
    """Ranks that share a row or a column, and the node that all of them are on."""

    ranks: tuple[int, ...]
    node: int | None = None


class Traffic(NamedTuple):
    """Bytes by sender and receiver, or groups of them: int64 of shape (senders, receivers).

    `sent` goes to another rank, and `far` of that to another node; `stays` does not leave its rank.
    """

    senders: tuple[Group, ...]
    receivers: tuple[Group, ...]
    sent: Ints
    stays: Ints
    far: Ints


def traffic(
    value: Plan | Transposed | Program, topology: Topology | None = None, most: int = MOST_GROUPS
) -> Traffic:
    """What a plan, or a program, sends from where to where, ranks in at most so many groups on each side."""
    if isinstance(value, Program):
        return _sum_program(value, topology, most)
    if isinstance(value, Transposed):
        back = traffic(value.forward, topology, most)
        return Traffic(back.receivers, back.senders, back.sent.T, back.stays.T, back.far.T)
    rows = _group_ranks(value.src_ranks, topology, most)
    columns = _group_ranks(value.dst_ranks, topology, most)
    sums = _Sums(rows, columns, value.lines, topology)
    sums.add_plan()
    return sums.finish()


def _sum_program(program: Program, topology: Topology | None, most: int) -> Traffic:
    """What the streams of a program carry."""
    p = program.plan
    of = sum_pairs(program)
    # Ranks of the destination send too, where a program relays.
    senders = {p.ranks[i] for i in set(of.sender.tolist())}
    rows = _group_ranks(senders.union(p.src_ranks), topology, most)
    columns = _group_ranks(p.dst_ranks, topology, most)
    sums = _Sums(rows, columns, p.lines, topology)
    ranks = np.array(p.ranks, np.int64)
    sums.add(ranks[of.sender], ranks[of.receiver], of.nbytes)
    return sums.finish()


class _Sums:
    """Bytes by group of senders and group of receivers, while they are added up."""

    def __init__(
        self,
        rows: tuple[Group, ...],
        columns: tuple[Group, ...],
        on: Demands,
        topology: Topology | None,
    ) -> None:
        self.rows = rows
        self.columns = columns
        self.on = on
        self.row = _number_groups(rows)
        self.column = _number_groups(columns)
        shape = len(rows), len(columns)
        self.sent = np.zeros(shape, np.int64)
        self.stays = np.zeros(shape, np.int64)
        self.far = np.zeros(shape, np.int64)
        self.per_node = ONE_NODE if topology is None else topology.ranks_per_node
        self.members: dict[int, Ints] = {}

    def finish(self) -> Traffic:
        """The sums, with what stays where it is."""
        self._add_stays()
        return Traffic(self.rows, self.columns, self.sent, self.stays, self.far)

    def add(self, sender: Ints, receiver: Ints, count: Ints) -> None:
        """Bytes that go from ranks to ranks."""
        at = self.row[sender], self.column[receiver]
        crosses = sender // self.per_node != receiver // self.per_node
        np.add.at(self.sent, at, count)
        np.add.at(self.far, at, np.where(crosses, count, 0))

    def add_plan(self) -> None:
        """All that a plan sends."""
        for line, held in enumerate(self.on.holders.tolist()):
            holders = self.on.sets[held]
            first, stop = self.on.first[line : line + 2].tolist()
            asking = int(self.on.count[first:stop].sum())
            if len(holders) > 1 or asking <= MANY:
                self.add(*_pair_line(self.on, line, range(first, stop)))
                continue
            for block in range(first, stop):
                self._add_from_one(holders[0], block)

    def _add_from_one(self, holder: int, block: int) -> None:
        """A block that one rank sends to all receivers, who may be many, as may be such blocks."""
        receivers = self._find_members(int(self.on.receivers[block]))
        first = holder // self.per_node * self.per_node
        # Ranks ascend, so those of the holder's node are side by side.
        begin, end = receivers.searchsorted([first, first + self.per_node])
        on_node = receivers[begin:end]
        everybody = self._count_by_column(receivers)
        near = self._count_by_column(on_node)
        itself = self._count_by_column(on_node[on_node == holder])
        nbytes = int(self.on.nbytes[block])
        row = self.row[holder]
        self.sent[row] += nbytes * (everybody - itself)
        self.far[row] += nbytes * (everybody - near)

    def _count_by_column(self, ranks: Ints) -> Ints:
        """How many of the ranks are in each column."""
        return np.bincount(self.column[ranks], minlength=len(self.columns))

    def _add_stays(self) -> None:
        """What ranks have and need: blocks of which they are a holder and a receiver."""
        line = np.repeat(np.arange(len(self.on.holders)), np.diff(self.on.first))
        for block, held in enumerate(self.on.holders[line].tolist()):
            number = int(self.on.receivers[block])
            if self.on.count[block] == len(self.on.sets[number]):
                continue  # no receiver is a holder
            receivers = self._find_members(number)
            holders = self._find_members(held)
            at = receivers.searchsorted(holders)
            at = np.minimum(at, len(receivers) - 1)
            both = holders[receivers[at] == holders]
            pair = self.row[both], self.column[both]
            np.add.at(self.stays, pair, self.on.nbytes[block])

    def _find_members(self, number: int) -> Ints:
        """A set of ranks as an array."""
        if number not in self.members:
            self.members[number] = np.array(self.on.sets[number], np.int64)
        return self.members[number]


def _pair_line(on: Demands, line: int, blocks: range) -> tuple[Ints, Ints, Ints]:
    """Senders, receivers and bytes of a line, along which both have stretches one after the other."""
    holders = np.array(on.sets[on.holders[line]], np.int64)
    first = int(on.cut_first[line])
    cuts = on.cuts[first : first + len(holders) + 1]
    asking = [wire(on, line, block) for block in blocks]
    receivers = np.array(list(itertools.chain.from_iterable(asking)), np.int64)
    nbytes = on.nbytes[blocks.start : blocks.stop]
    sizes = np.repeat(nbytes, list(map(len, asking)))
    ends = np.append(0, sizes.cumsum())
    # Between two neighbouring borders of either kind there is one sender and one receiver. Of several stretches that
    # begin at one place all but the last are empty.
    borders = np.unique(np.concatenate((cuts, ends)))
    sender = cuts.searchsorted(borders[:-1], "right") - 1
    receiver = ends.searchsorted(borders[:-1], "right") - 1
    return holders[sender], receivers[receiver], np.diff(borders)


def _group_ranks(ranks: Iterable[int], where: Topology | None, most: int) -> tuple[Group, ...]:
    """The ranks, ascending, in at most so many groups."""
    nodes = [sorted(ranks)] if where is None else list(map(list, where.nodes(ranks).values()))
    if len(nodes) > most:
        parts = []
        for several in _chop(nodes, -(-len(nodes) // most)):
            parts.append(list(itertools.chain.from_iterable(several)))
    else:
        size = _find_size(nodes, most)
        parts = [part for node in nodes for part in _chop(node, size)]
    return tuple(_make_group(part, where) for part in parts)


def _find_size(nodes: Sequence[Sequence[int]], most: int) -> int:
    """The least size of groups such that the nodes, not mixed, have at most so many."""
    size = 1
    while sum(-(-len(node) // size) for node in nodes) > most:
        size += 1
    return size


def _chop(values: list[_T], size: int) -> list[list[_T]]:
    """The values in lists of this size, the last one shorter."""
    return [values[i : i + size] for i in range(0, len(values), size)]


def _make_group(ranks: Sequence[int], where: Topology | None) -> Group:
    """These ranks as a row or a column."""
    if where is None:
        return Group(tuple(ranks))
    first = where.node(ranks[0])
    last = where.node(ranks[-1])
    return Group(tuple(ranks), first if first == last else None)


def _number_groups(groups: Sequence[Group]) -> Ints:
    """The number of each rank's group, by rank."""
    most = max((group.ranks[-1] for group in groups), default=-1)
    numbers = np.zeros(most + 1, np.int64)
    for i, group in enumerate(groups):
        numbers[list(group.ranks)] = i
    return numbers
