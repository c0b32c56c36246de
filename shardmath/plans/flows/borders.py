"""Cuts: the bytes that must cross the border of a set of ranks, and the rate of its links.

A **family** is a label for every rank. The ranks of each label are a set, and all sets of a
family are examined together. Forced bytes are those that must enter or leave a set; they cross no
faster than the links between the set and the rest carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, begins, ranges
from shardmath.plans.flows.blocks import BlockTable, Machine, NumberedSets, sum_by_code

__all__ = ["Cut", "TouchedLabels", "find_shared", "list_cuts", "touch"]


@dataclass(frozen=True, slots=True, eq=False)
class TouchedLabels:
    """The distinct labels (such as node numbers) of the ranks that hold each block of a plan's bytes, or of those that
    need it.

    `of` gives the set number of each block; `sets` are ranges of `labels`.
    """

    of: Ints
    sets: Offsets
    labels: Ints

    def widths(self) -> Ints:
        """Return an array: for each block of a plan's bytes, the number of different labels, such as nodes, of its
        ranks (those that hold it, or those that need it)."""
        return self.sets.counts()[self.of]

    def only(self) -> Ints:
        """Return an array: for each block of a plan's bytes, the label that all its ranks (those that hold it, or those
        that need it) have, or -1 if their labels differ."""
        first = self.sets.first[self.of]
        single = self.widths() == 1
        return np.where(single, self.labels[first], -1)

    def labels_of(self, i: int) -> tuple[int, ...]:
        """Return, ascending, the labels (such as node numbers) of one set of ranks; `i` is the index of the set in the
        field `sets`."""
        first = self.sets.first[i]
        stop = self.sets.first[i + 1]
        return tuple(self.labels[first:stop].tolist())

    def expand(self, sets: Ints) -> tuple[Ints, Ints]:
        """Return (labels, owner): the labels, such as node numbers, of the sets of ranks with the indices `sets`, end
        to end. Label k belongs to the set with index `sets[owner[k]]`."""
        first = self.sets.first[sets]
        stop = self.sets.first[sets + 1]
        at, owner = ranges(first, stop)
        return self.labels[at], owner


def touch(sets: NumberedSets, label: Ints, count: int) -> TouchedLabels:
    """Find the distinct labels of the ranks in each of `sets`; `label` has each rank's label, from 0 to `count` - 1."""
    # (set, label) as one number: sorted, these are the labels set by set.
    pairs = sets.owner * count + label[sets.member]
    code = np.unique(pairs)
    least_codes = np.arange(sets.count + 1) * count
    first = np.searchsorted(code, least_codes)
    labels = code % count
    return TouchedLabels(sets.of, Offsets(first), labels)


def find_shared(hold: TouchedLabels, need: TouchedLabels, count: int) -> tuple[Ints, Ints]:
    """Return two arrays (labels, blocks): some rank with the label labels[i] holds block number blocks[i] of bytes, and
    some rank with this label needs it. A label is an id that ranks share, such as their node's; all are below
    `count`."""
    # The pairs (label, block) of the side that has fewer are looked up on the other side.
    few = hold
    many = need
    if many.widths().sum() < few.widths().sum():
        few, many = many, few
    label, block = few.expand(few.of)
    # (set, label) as one number, so that pairs are looked up as numbers.
    many_codes = many.sets.owners() * count + many.labels
    few_codes = many.of[block] * count + label
    is_shared = np.isin(few_codes, many_codes)
    return label[is_shared], block[is_shared]


# Forced bytes


def _force(table: BlockTable, label: Ints, key: Ints, nbytes: Ints, count: int) -> Ints:
    """The bytes of each of `count` labels, given rows (label, key, bytes): for each group the most bytes of any addend,
    summed over the groups.

    A group's addends are copies of the same elements, and one sum may bring all missing addends.
    """
    keys = len(table.group)
    groups = int(table.group[-1]) + 1
    code, amount = sum_by_code(label * keys + key, nbytes)
    # A key is an addend of a group. Keys ascend by group, so the codes of one (label, group) stand together.
    of_label, of_key = np.divmod(code, keys)
    label_and_group = of_label * groups + table.group[of_key]
    first = begins(label_and_group)
    out = np.zeros(count, np.int64)
    if len(first):
        most = np.maximum.reduceat(amount, first)
        np.add.at(out, of_label[first], most)
    return out


def _force_in(table: BlockTable, hold: TouchedLabels, need: TouchedLabels, count: int) -> Ints:
    """Bytes that must enter the ranks X of each label: some of X need them and none of X has them.

    A first copy of each such element has to cross into X. Inside X it may be relayed, so it counts
    once. Of a reduction, an element whose addend k is held outside X only needs a value to enter
    that depends on addend k, and one value may do so for all addends: at least as many elements as
    miss any one addend enter.
    """
    sets, key, nbytes = table.wanted
    label, row = need.expand(sets)
    held_label, held_block = find_shared(hold, need, count)
    # The bytes that X needs, minus those of them that X holds.
    minus_held = -table.nbytes[held_block]
    held_key = table.key[held_block]
    labels = np.concatenate((label, held_label))
    keys = np.concatenate((key[row], held_key))
    amounts = np.concatenate((nbytes[row], minus_held))
    return _force(table, labels, keys, amounts, count)


def _force_out(table: BlockTable, hold: TouchedLabels, need: TouchedLabels, count: int) -> Ints:
    """Bytes that must leave the ranks X of each label: only X has them, and others need them.

    These bytes must enter the ranks outside X. The number of replicas that need them does not
    matter: one copy leaves, and the others may be copies of it.
    """
    home = hold.only()
    held_by_one = home >= 0
    wanted_elsewhere = home != need.only()
    rows = held_by_one & wanted_elsewhere
    return _force(table, home[rows], table.key[rows], table.nbytes[rows], count)


DIRECTIONS = (("in", _force_in), ("out", _force_out))
"""By direction, the function that gives the bytes that must cross a border."""

# Cuts


class Cut(NamedTuple):
    """A set of ranks (`inside`), the bytes that must enter or leave it, and the least seconds that this takes."""

    seconds: Fraction
    inside: Bools
    direction: str
    nbytes: int
    rate: Fraction


def _count_links(machine: Machine, label: Ints, count: int) -> tuple[Ints, Ints]:
    """How many ranks' intra-node and inter-node links join the ranks X of each label to the rest.

    Inside a node of n ranks, k of them in X, at most k take in and n - k give out: min(k, n - k)
    links. Between nodes at most |X| receive and |R - X| send, R all ranks of the program; and a
    byte that goes to another node has an end outside the largest node, so at most |R - largest|
    links are at work, none where all ranks are on one node. The other direction is the same with
    senders and receivers changed over.

    So a whole node has only its NICs, one per rank of the program, and one rank has both its
    links, even for bytes that another rank of its node holds: they may come over either, relayed by
    another node.
    """
    nodes = len(machine.size)
    total = len(machine.ranks)
    # One number for (label, node): k counts the ranks of the node that have the label.
    pairs = label * nodes + machine.node
    code, k = np.unique(pairs, return_counts=True)
    of_label, of_node = np.divmod(code, nodes)
    rest = machine.size[of_node] - k
    links = np.minimum(k, rest)
    intra = np.zeros(count, np.int64)
    np.add.at(intra, of_label, links)
    members = np.bincount(label, minlength=count)
    smaller = np.minimum(members, total - members)
    outside_largest = total - machine.size.max()
    return intra, np.minimum(smaller, outside_largest)


def list_cuts(table: BlockTable, machine: Machine, label: Ints) -> Iterator[Cut]:
    """Yield lower bounds of a plan's time: each Cut is a set of ranks, and the least seconds for the bytes that must
    enter or leave it. Ranks i and j (positions in `machine.ranks`) are in one set if `label[i] == label[j]`.

    Of sets with equal numbers of links to the other ranks, only the one with the most bytes is yielded.
    """
    count = int(label.max()) + 1
    holder_labels = touch(table.holders, label, count)
    receiver_labels = touch(table.receivers, label, count)
    intra, inter = _count_links(machine, label, count)
    for direction, force in DIRECTIONS:
        forced = force(table, holder_labels, receiver_labels, count)
        for worst in _find_worst(forced, intra, inter):
            rate = int(intra[worst]) * machine.intra
            rate += int(inter[worst]) * machine.inter
            nbytes = int(forced[worst])
            seconds = nbytes / rate
            inside = label == worst
            yield Cut(seconds, inside, direction, nbytes, rate)


def _find_worst(forced: Ints, intra: Ints, inter: Ints) -> list[int]:
    """Of each set of labels with equal links, the label with the most forced bytes, if it has any."""
    labels = np.flatnonzero(forced)
    # In this order sets with equal links are neighbors, most bytes first: the first of each run is taken.
    order = np.lexsort((labels, -forced[labels], inter[labels], intra[labels]))
    labels = labels[order]
    is_first = np.ones(len(labels), bool)
    new_intra = np.diff(intra[labels]) != 0
    new_inter = np.diff(inter[labels]) != 0
    is_first[1:] = new_intra | new_inter
    worst: list[int] = labels[is_first].tolist()
    return worst
