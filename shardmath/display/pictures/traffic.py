"""Traffic: who sends how many bytes to whom, ranks in groups.

1. A group is of ranks that follow each other: of one node where there are few nodes, else of whole nodes.
2. A program shows its own streams: what is relayed counts each time that it is sent.
3. The traffic of an adjoint is that of its plan, transposed.

>>> from shardmath.layouts.algebra.mesh import Mesh
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
from shardmath.plans.adjoint import Transposed
from shardmath.plans.demands import Demands, list_receivers
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan
from shardmath.plans.programs.loads import sum_pairs
from shardmath.plans.programs.program import Program

__all__ = ["RankGroup", "TrafficMatrix", "traffic"]

_T = TypeVar("_T")

MOST_GROUPS = 24
"""Rows and columns of a heat map."""
MANY = 2048
"""Receivers of a line that are counted by group, not one by one."""
ONE_NODE = 1 << 24
"""More ranks than any mesh has: without a topology all are on one node."""


class RankGroup(NamedTuple):
    """Ranks that share a row or a column, and the node that all of them are on."""

    ranks: tuple[int, ...]
    node: int | None = None


class TrafficMatrix(NamedTuple):
    """Bytes by sender and receiver, or groups of them: int64 of shape (senders, receivers).

    `sent` goes to another rank, and `far` of that to another node; `stays` does not leave its rank.
    """

    senders: tuple[RankGroup, ...]
    receivers: tuple[RankGroup, ...]
    sent: Ints
    stays: Ints
    far: Ints


def traffic(
    value: Plan | Transposed | Program, topology: Topology | None = None, most: int = MOST_GROUPS
) -> TrafficMatrix:
    """What a plan, or a program, sends from where to where, ranks in at most so many groups on each side."""
    if isinstance(value, Program):
        return _sum_program(value, topology, most)
    if isinstance(value, Transposed):
        forward = traffic(value.forward, topology, most)
        senders, receivers, *tables = forward
        turned = [table.T for table in tables]
        return TrafficMatrix(receivers, senders, *turned)
    rows = _group_ranks(value.src_ranks, topology, most)
    columns = _group_ranks(value.dst_ranks, topology, most)
    sums = _Sums(rows, columns, value.lines, topology)
    sums.add_plan()
    return sums.finish()


def _sum_program(program: Program, topology: Topology | None, most: int) -> TrafficMatrix:
    """What the streams of a program carry."""
    p = program.plan
    ranks = np.array(p.ranks, np.int64)
    streams = sum_pairs(program)
    sender = ranks[streams.sender]
    receiver = ranks[streams.receiver]
    # Ranks of the destination send too, where a program relays.
    senders = {*p.src_ranks, *sender.tolist()}
    rows = _group_ranks(senders, topology, most)
    columns = _group_ranks(p.dst_ranks, topology, most)
    sums = _Sums(rows, columns, p.lines, topology)
    sums.add(sender, receiver, streams.nbytes)
    return sums.finish()


class _Sums:
    """Bytes by group of senders and group of receivers, while they are added up."""

    def __init__(
        self,
        rows: tuple[RankGroup, ...],
        columns: tuple[RankGroup, ...],
        demands: Demands,
        topology: Topology | None,
    ) -> None:
        self.rows = rows
        self.columns = columns
        self.demands = demands
        self.row = _number_groups(rows)
        self.column = _number_groups(columns)
        shape = len(rows), len(columns)
        self.sent = np.zeros(shape, np.int64)
        self.stays = np.zeros(shape, np.int64)
        self.far = np.zeros(shape, np.int64)
        self.per_node = ONE_NODE if topology is None else topology.ranks_per_node
        self.members: dict[int, Ints] = {}

    def finish(self) -> TrafficMatrix:
        """The sums, with what stays where it is."""
        self._add_stays()
        return TrafficMatrix(self.rows, self.columns, self.sent, self.stays, self.far)

    def add(self, sender: Ints, receiver: Ints, nbytes: Ints) -> None:
        """Bytes that go from ranks to ranks."""
        at = (self.row[sender], self.column[receiver])
        np.add.at(self.sent, at, nbytes)
        node = sender // self.per_node
        other = receiver // self.per_node
        distant = nbytes * (other != node)
        np.add.at(self.far, at, distant)

    def add_plan(self) -> None:
        """All that a plan sends."""
        demands = self.demands
        for line, held in enumerate(demands.holders.tolist()):
            holders = demands.sets[held]
            first, stop = demands.first[line : line + 2].tolist()
            asking = demands.count[first:stop].sum()
            blocks = range(first, stop)
            if len(holders) > 1 or asking <= MANY:
                streams = _pair_line(demands, line, blocks)
                self.add(*streams)
                continue
            holder = holders[0]
            for block in blocks:
                self._add_from_one(holder, block)

    def _add_from_one(self, holder: int, block: int) -> None:
        """A block that one rank sends to all receivers, who may be many, as may be such blocks."""
        asking = int(self.demands.receivers[block])
        receivers = self._find_members(asking)
        node = holder // self.per_node
        first = node * self.per_node
        stop = first + self.per_node
        # Ranks ascend, so those of the holder's node are side by side.
        begin, end = receivers.searchsorted([first, stop])
        on_node = receivers[begin:end]
        itself = on_node[on_node == holder]
        everybody = self._count_by_column(receivers)
        others = everybody - self._count_by_column(itself)
        distant = everybody - self._count_by_column(on_node)
        nbytes = int(self.demands.nbytes[block])
        row = self.row[holder]
        self.sent[row] += nbytes * others
        self.far[row] += nbytes * distant

    def _count_by_column(self, ranks: Ints) -> Ints:
        """How many of the ranks are in each column."""
        return np.bincount(self.column[ranks], minlength=len(self.columns))

    def _add_stays(self) -> None:
        """What ranks have and need: blocks of which they are a holder and a receiver."""
        demands = self.demands
        blocks_of_line = np.diff(demands.first)
        holders_of_block = np.repeat(demands.holders, blocks_of_line)
        for block, held in enumerate(holders_of_block.tolist()):
            asking = int(demands.receivers[block])
            receivers = demands.sets[asking]
            if demands.count[block] == len(receivers):
                continue  # no receiver is a holder
            both = self._find_common(held, asking)
            at = (self.row[both], self.column[both])
            np.add.at(self.stays, at, demands.nbytes[block])

    def _find_common(self, held: int, asking: int) -> Ints:
        """The ranks of one set that are in another."""
        holders = self._find_members(held)
        receivers = self._find_members(asking)
        last = len(receivers) - 1
        at = receivers.searchsorted(holders)
        found = receivers[np.minimum(at, last)]
        common: Ints = holders[found == holders]
        return common

    def _find_members(self, number: int) -> Ints:
        """A set of ranks as an array."""
        if number not in self.members:
            ranks = self.demands.sets[number]
            self.members[number] = np.array(ranks, np.int64)
        return self.members[number]


def _pair_line(demands: Demands, line: int, blocks: range) -> tuple[Ints, Ints, Ints]:
    """Senders, receivers and bytes of a line, along which both have stretches one after the other."""
    held = demands.holders[line]
    holders = np.array(demands.sets[held], np.int64)
    first = int(demands.cut_first[line])
    last = first + len(holders)
    cuts = demands.cuts[first : last + 1]
    receivers, ends = _lay_out_receivers(demands, line, blocks)
    # Between two neighbouring borders of either kind there is one sender and one receiver. Of several stretches that
    # begin at one place all but the last are empty.
    every_border = np.concatenate((cuts, ends))
    borders = np.unique(every_border)
    starts = borders[:-1]
    sender = cuts.searchsorted(starts, "right") - 1
    receiver = ends.searchsorted(starts, "right") - 1
    nbytes = np.diff(borders)
    return holders[sender], receivers[receiver], nbytes


def _lay_out_receivers(demands: Demands, line: int, blocks: range) -> tuple[Ints, Ints]:
    """The receivers of a line, block by block, and where each one's bytes begin; at last where all end."""
    receivers: list[int] = []
    end = 0
    ends = [end]
    for block in blocks:
        nbytes = int(demands.nbytes[block])
        for rank in list_receivers(demands, line, block):
            end += nbytes
            receivers.append(rank)
            ends.append(end)
    return np.array(receivers, np.int64), np.array(ends, np.int64)


def _group_ranks(ranks: Iterable[int], where: Topology | None, most: int) -> tuple[RankGroup, ...]:
    """The ranks, ascending, in at most so many groups."""
    nodes = [sorted(ranks)]
    if where is not None:
        by_node = where.nodes(ranks)
        nodes = [list(members) for members in by_node.values()]
    divide = _join_nodes if len(nodes) > most else _chop_nodes
    parts = divide(nodes, most)
    return tuple(_make_group(part, where) for part in parts)


def _join_nodes(nodes: list[list[int]], most: int) -> list[list[int]]:
    """Groups of as many nodes each."""
    each = -(-len(nodes) // most)
    groups = []
    for several in _chop(nodes, each):
        ranks = itertools.chain.from_iterable(several)
        groups.append(list(ranks))
    return groups


def _chop_nodes(nodes: list[list[int]], most: int) -> list[list[int]]:
    """Groups of as many ranks each, of one node, as few as it takes."""
    size = 1
    while _count_parts(nodes, size) > most:
        size += 1
    groups = []
    for node in nodes:
        groups += _chop(node, size)
    return groups


def _count_parts(nodes: list[list[int]], size: int) -> int:
    """How many groups of so many ranks each, of one node, there are."""
    counts = [-(-len(node) // size) for node in nodes]
    return sum(counts)


def _chop(values: list[_T], size: int) -> list[list[_T]]:
    """The values in lists of this size, the last one shorter."""
    starts = range(0, len(values), size)
    return [values[i : i + size] for i in starts]


def _make_group(ranks: Sequence[int], where: Topology | None) -> RankGroup:
    """These ranks as a row or a column."""
    if where is None:
        return RankGroup(tuple(ranks))
    first = where.node(ranks[0])
    last = where.node(ranks[-1])
    return RankGroup(tuple(ranks), first if first == last else None)


def _number_groups(groups: Sequence[RankGroup]) -> Ints:
    """The number of each rank's group, by rank."""
    last_ranks = [group.ranks[-1] for group in groups]
    largest = max(last_ranks, default=-1)
    numbers = np.zeros(largest + 1, np.int64)
    for i, group in enumerate(groups):
        ranks = list(group.ranks)
        numbers[ranks] = i
    return numbers
