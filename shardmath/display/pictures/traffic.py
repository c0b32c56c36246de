"""Traffic: bytes by sender and receiver, or by groups of them.

1. A group has consecutive ranks: of one node if there are few nodes, else of whole nodes.
2. A **line** is bytes that the same ranks hold, a **block** a part of a line that the same ranks need. A line has the
   bytes of a block once for each of these receivers, and each holder sends one stretch of the line.
3. The traffic of a program is its streams: relayed bytes count each time that they are sent.
4. The traffic of an adjoint is its plan's traffic, transposed.

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
"""Receivers of a line from which on they are counted by group, not one by one."""
ONE_NODE = 1 << 24
"""Ranks per node without a topology: more than any mesh has, so that all are on one node."""


class RankGroup(NamedTuple):
    """The ranks of one row or column of a traffic matrix, and their `node`, which is None if they are on several nodes
    or nodes are unknown."""

    ranks: tuple[int, ...]
    node: int | None = None


class TrafficMatrix(NamedTuple):
    """The bytes from each group of senders to each group of receivers, in three int64 arrays of shape (senders,
    receivers). `sent` counts bytes to other ranks, `far` the part sent to other nodes, and `stays` bytes that stay on
    their rank."""

    senders: tuple[RankGroup, ...]
    receivers: tuple[RankGroup, ...]
    sent: Ints
    stays: Ints
    far: Ints


def traffic(
    value: Plan | Transposed | Program, topology: Topology | None = None, most: int = MOST_GROUPS
) -> TrafficMatrix:
    """Return the bytes that a plan or program sends between ranks and, by `topology`, between nodes. Sending ranks are
    combined into at most `most` groups, and so are receiving ranks."""
    if isinstance(value, Program):
        return _sum_program(value, topology, most)
    if isinstance(value, Transposed):
        senders, receivers, *tables = traffic(value.forward, topology, most)
        return TrafficMatrix(receivers, senders, *(table.T for table in tables))
    rows = _group_ranks(value.src_ranks, topology, most)
    columns = _group_ranks(value.dst_ranks, topology, most)
    sums = _TrafficSums(rows, columns, value.lines, topology)
    sums.add_plan()
    return sums.finish()


def _sum_program(program: Program, topology: Topology | None, most: int) -> TrafficMatrix:
    """The traffic of a program's streams."""
    p = program.plan
    ranks = np.array(p.ranks, np.int64)
    streams = sum_pairs(program)
    sender = ranks[streams.sender]
    receiver = ranks[streams.receiver]
    # Ranks of the destination also send if a program relays.
    senders = {*p.src_ranks, *sender.tolist()}
    rows = _group_ranks(senders, topology, most)
    columns = _group_ranks(p.dst_ranks, topology, most)
    sums = _TrafficSums(rows, columns, p.lines, topology)
    sums.add(sender, receiver, streams.nbytes)
    return sums.finish()


class _TrafficSums:
    """Running sums of bytes by group of senders and group of receivers."""

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
        # The number of the row, and of the column, of each rank.
        self.row = _number_groups(rows)
        self.column = _number_groups(columns)
        shape = len(rows), len(columns)
        self.sent = np.zeros(shape, np.int64)
        self.stays = np.zeros(shape, np.int64)
        self.far = np.zeros(shape, np.int64)
        self.per_node = ONE_NODE if topology is None else topology.ranks_per_node
        self.members: dict[int, Ints] = {}  # by the number of a set of ranks

    def finish(self) -> TrafficMatrix:
        """The TrafficMatrix of the bytes added so far, including bytes that stay on their rank."""
        self._add_stays()
        return TrafficMatrix(self.rows, self.columns, self.sent, self.stays, self.far)

    def add(self, sender: Ints, receiver: Ints, nbytes: Ints) -> None:
        """Add `nbytes[i]` bytes sent from `sender[i]` to `receiver[i]`, for each i."""
        pair = (self.row[sender], self.column[receiver])
        np.add.at(self.sent, pair, nbytes)
        is_far = sender // self.per_node != receiver // self.per_node
        np.add.at(self.far, pair, nbytes * is_far)

    def add_plan(self) -> None:
        """Add, to the sums in this object, all bytes that are sent by the plan for which the object was made."""
        demands = self.demands
        for line, holder_set in enumerate(demands.holders.tolist()):
            holders = demands.sets[holder_set]
            first, stop = demands.first[line : line + 2].tolist()
            receiver_count = demands.count[first:stop].sum()
            blocks = range(first, stop)
            # Receivers are counted by group only if one holder sends them everything.
            if len(holders) > 1 or receiver_count <= MANY:
                streams = _pair_line(demands, line, blocks)
                self.add(*streams)
                continue
            holder = holders[0]
            for block in blocks:
                self._add_from_one(holder, block)

    def _add_from_one(self, holder: int, block: int) -> None:
        """Add a block that one rank sends to all receivers; fast, since both blocks and receivers may be many."""
        receivers = self._find_members(int(self.demands.receivers[block]))
        node = holder // self.per_node
        first = node * self.per_node
        stop = first + self.per_node
        # Receivers ascend, so those on the holder's node are consecutive.
        begin, end = receivers.searchsorted([first, stop])
        on_node = receivers[begin:end]
        itself = on_node[on_node == holder]
        total = self._count_by_column(receivers)
        nbytes = int(self.demands.nbytes[block])
        row = self.row[holder]
        self.sent[row] += nbytes * (total - self._count_by_column(itself))
        self.far[row] += nbytes * (total - self._count_by_column(on_node))

    def _count_by_column(self, ranks: Ints) -> Ints:
        """The number of ranks in each column."""
        return np.bincount(self.column[ranks], minlength=len(self.columns))

    def _add_stays(self) -> None:
        """Add the blocks that ranks both hold and need."""
        demands = self.demands
        holder_sets = np.repeat(demands.holders, np.diff(demands.first))
        for block, holder_set in enumerate(holder_sets.tolist()):
            receiver_set = int(demands.receivers[block])
            # `count` leaves out receivers that are holders.
            if demands.count[block] == len(demands.sets[receiver_set]):
                continue
            common = self._find_common(holder_set, receiver_set)
            pair = (self.row[common], self.column[common])
            np.add.at(self.stays, pair, demands.nbytes[block])

    def _find_common(self, holder_set: int, receiver_set: int) -> Ints:
        """The ranks that are in both sets."""
        holders = self._find_members(holder_set)
        receivers = self._find_members(receiver_set)
        # Receivers ascend: a holder is one of them if it equals the receiver at its insertion point.
        index = np.minimum(receivers.searchsorted(holders), len(receivers) - 1)
        common: Ints = holders[receivers[index] == holders]
        return common

    def _find_members(self, number: int) -> Ints:
        """The set of ranks with this number, as an array."""
        if number not in self.members:
            ranks = self.demands.sets[number]
            self.members[number] = np.array(ranks, np.int64)
        return self.members[number]


def _pair_line(demands: Demands, line: int, blocks: range) -> tuple[Ints, Ints, Ints]:
    """Senders, receivers and bytes of a line, along which senders and receivers both have consecutive stretches."""
    holders = np.array(demands.sets[demands.holders[line]], np.int64)
    first = int(demands.cut_first[line])
    last = first + len(holders)
    cuts = demands.cuts[first : last + 1]
    receivers, ends = _lay_out_receivers(demands, line, blocks)
    # Between two neighboring borders of either kind there is one sender and one receiver. If several stretches begin at
    # the same border, all except the last are empty, so searching from the right finds the last.
    borders = np.unique(np.concatenate((cuts, ends)))
    starts = borders[:-1]
    sender = cuts.searchsorted(starts, "right") - 1
    receiver = ends.searchsorted(starts, "right") - 1
    nbytes = np.diff(borders)
    return holders[sender], receivers[receiver], nbytes


def _lay_out_receivers(demands: Demands, line: int, blocks: range) -> tuple[Ints, Ints]:
    """The receivers of a line, block by block, and the borders between their bytes, including both ends."""
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
    """The ranks, ascending, in at most `most` groups."""
    nodes = [sorted(ranks)]
    if where is not None:
        by_node = where.nodes(ranks)
        nodes = [list(members) for members in by_node.values()]
    divide = _merge_nodes if len(nodes) > most else _split_nodes
    parts = divide(nodes, most)
    return tuple(_make_group(part, where) for part in parts)


def _merge_nodes(nodes: list[list[int]], most: int) -> list[list[int]]:
    """At most `most` groups of equally many nodes."""
    nodes_per_group = -(-len(nodes) // most)
    groups = _chop(nodes, nodes_per_group)
    return [list(itertools.chain.from_iterable(several)) for several in groups]


def _split_nodes(nodes: list[list[int]], most: int) -> list[list[int]]:
    """At most `most` groups, each of ranks of one node, equally large and as small as possible."""
    size = 1
    while _count_parts(nodes, size) > most:
        size += 1
    groups = []
    for node in nodes:
        groups += _chop(node, size)
    return groups


def _count_parts(nodes: list[list[int]], size: int) -> int:
    """The number of groups if each has at most `size` ranks of one node."""
    counts = [-(-len(node) // size) for node in nodes]
    return sum(counts)


def _chop(values: list[_T], size: int) -> list[list[_T]]:
    """The values in lists of this size, the last one shorter."""
    starts = range(0, len(values), size)
    return [values[i : i + size] for i in starts]


def _make_group(ranks: Sequence[int], where: Topology | None) -> RankGroup:
    """The group of these ranks, with their node if they share one."""
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
