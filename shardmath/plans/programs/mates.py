"""Mates: ranks that send for the busy holders of their node.

1. A holder's links to other nodes may be the bottleneck while other ranks of its node have links to spare. What such
   holders would send beyond a target is **shed** to their mates, which hold none of it: a holder hands them the bytes
   inside the node, where links are fast.
2. The target is a load that some rank has in any case: the bytes that the fullest rank takes in, or those that the
   fullest node has to send, divided by its ranks.
3. The bytes of a line that mates send are its last ones. Each mate has a share, from one holder of its node, or from
   several evenly.

>>> given = MateShares(*np.array([[1, 3, 0, 5], [1, 3, 2, 5]]).T)
>>> add_mates(np.array([0, 2, 5]), np.array([0, 8, 0, 10, 20]), given)[:2]
(array([0, 2, 7]), array([ 0,  8,  0, 10, 20, 25, 30]))
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets
from shardmath.plans.demands import Demands
from shardmath.plans.flows.flow import shares
from shardmath.plans.flows.shedding import find_least_sent, shed_to_target
from shardmath.plans.plan import Plan
from shardmath.plans.programs.legs import Mates
from shardmath.plans.template import Ranks

__all__ = [
    "MateShares",
    "add_mates",
    "choose_mates",
    "count_handed",
    "find_far",
    "find_most_taken_in",
]


NEEDED = 1.002
"""Mates are used if holders would otherwise send this factor more than the target: each share takes more messages."""


class MateShares(NamedTuple):
    """A table of bytes that mates send: of line `line[i]`, rank `rank[i]` sends `nbytes[i]` bytes, which the holder
    `feeder[i]`, on its node, hands to it. A line is bytes that the same ranks hold.

    Rows are in the order of lines.
    """

    line: Ints
    rank: Ints
    feeder: Ints
    nbytes: Ints


def choose_mates(
    plan: Plan, demands: Demands, node_sizes: list[list[int]], per_node: int
) -> MateShares | None:
    """Choose the bytes that mates send, if some holder has to send more than some rank has to send or take in anyway;
    None otherwise. `node_sizes[i]` are the numbers of receivers of block i on each of their nodes, which have
    `per_node` ranks."""
    sent = _count_sent(demands, node_sizes)
    holders = [demands.sets[number] for number in demands.holders.tolist()]
    together = _find_together(plan, holders, per_node)
    taken_in = find_most_taken_in(demands, node_sizes, find_far(demands))
    target = max(find_least_sent(sent, together), taken_in)
    if find_least_sent(sent, holders) <= target * NEEDED:
        return None
    # Lines that all ranks of their nodes hold have no mates, so only others can be shed.
    least = [
        nbytes if held == ranks else 0
        for nbytes, held, ranks in zip(sent, holders, together, strict=True)
    ]
    shed = shed_to_target(sent, least, holders, target)
    return _divide_shed(sent, shed, holders, together, per_node)


def _count_sent(demands: Demands, node_sizes: list[list[int]]) -> list[int]:
    """By line, the bytes that its holders send to other nodes."""
    copies = np.array(list(map(len, node_sizes)), np.int64)
    copies *= demands.blocks.spread(~demands.near)
    sent: list[int] = demands.blocks.sums(demands.nbytes * copies).tolist()
    return sent


def _find_together(plan: Plan, holders: list[Ranks], per_node: int) -> list[Ranks]:
    """By line, all ranks of the plan on the nodes of its holders."""
    members: dict[int, list[int]] = {}
    for rank in plan.ranks:
        members.setdefault(rank // per_node, []).append(rank)
    # Without a function per line, since there may be tens of thousands of lines.
    found = []
    for held in holders:
        ranks: set[int] = set()
        for rank in held:
            ranks.update(members[rank // per_node])
        found.append(tuple(sorted(ranks)))
    return found


def _divide_shed(
    sent: list[int],
    shed: list[int],
    holders: list[Ranks],
    together: list[Ranks],
    per_node: int,
) -> MateShares | None:
    """The shares of mates in the bytes that lines shed, so that no rank sends much more than others."""
    lines = [line for line, nbytes in enumerate(shed) if nbytes]
    if not lines:
        return None
    mates = [tuple(sorted(set(together[line]).difference(holders[line]))) for line in lines]
    # What a rank sends of what it holds is like a line of its own, which only this rank can send.
    busy = _sum_kept(sent, shed, holders)
    lengths = [*busy.values(), *(shed[line] for line in lines)]
    senders = [*zip(busy), *mates]
    parts = shares(lengths, senders)[len(busy) :]
    rows = _list_fed_shares(lines, mates, parts, holders, per_node)
    return MateShares(*np.array(rows, np.int64).reshape(-1, 4).T)


def _list_fed_shares(
    lines: list[int],
    mates: list[Ranks],
    parts: list[list[int]],
    holders: list[Ranks],
    per_node: int,
) -> list[tuple[int, int, int, int]]:
    """The rows of MateShares, given the bytes of each mate of these lines. Holders on its node feed it evenly."""
    # Without a function per line, since there may be tens of thousands of lines.
    rows = []
    for line, ranks, by_mate in zip(lines, mates, parts, strict=True):
        for mate, nbytes in zip(ranks, by_mate, strict=True):
            feeders = []
            for holder in holders[line]:
                if holder // per_node == mate // per_node:
                    feeders.append(holder)
            done = 0
            for number, feeder in enumerate(feeders, 1):
                end = nbytes * number // len(feeders)
                if done < end:
                    rows.append((line, mate, feeder, end - done))
                done = end
    return rows


def _sum_kept(sent: list[int], shed: list[int], holders: list[Ranks]) -> dict[int, int]:
    """By rank, the bytes that it sends of what it holds."""
    kept = [before - less for before, less in zip(sent, shed, strict=True)]
    total: dict[int, int] = {}
    for held, parts in zip(holders, shares(kept, holders), strict=True):
        for rank, nbytes in zip(held, parts, strict=True):
            if nbytes:
                total[rank] = total.get(rank, 0) + nbytes
    return total


def count_handed(given: MateShares | None, lines: int) -> Ints:
    """Return an array with the number of bytes that mates send of each of `lines` lines, of which `given` are their
    shares."""
    handed = np.zeros(lines, np.int64)
    if given is not None:
        np.add.at(handed, given.line, given.nbytes)
    return handed


def add_mates(cut_first: Ints, cuts: Ints, given: MateShares) -> tuple[Ints, Ints, Mates]:
    """Add the shares `given` behind the cuts of each line; return the first cut of each line, all cuts, and the Mates.
    Line i has the cuts cuts[cut_first[i]] up to cuts[cut_first[i + 1] - 1]."""
    counts = np.bincount(given.line, minlength=len(cut_first) - 1)
    of_line = Offsets.of_counts(counts)
    # A line's last cut is the end of what its holders send; shares follow each other from there.
    last = cuts[cut_first[1:] - 1]
    total = np.cumsum(given.nbytes)
    before = np.append(0, total)[of_line.first[given.line]]
    ends = last[given.line] + total - before
    more = np.insert(cuts, cut_first[given.line + 1], ends)
    return cut_first + of_line.first, more, Mates(of_line.first, given.rank, given.feeder)


# What limits the time in any case


def find_far(demands: Demands) -> Bools:
    """Return, for each block (bytes that the same ranks need), whether copies may be relayed from node to node."""
    is_far = demands.blocks.spread(~demands.near)
    # Addends after the first are folded on arrival, and cannot be relayed.
    is_first: Bools = demands.addend == 0
    return is_far & is_first


def find_most_taken_in(demands: Demands, node_sizes: list[list[int]], is_far: Bools) -> int:
    """Return the most bytes that a rank takes in from other nodes, if each node takes in every byte once.
    `node_sizes[i]` are the numbers of receivers of block i on each of their nodes, and `is_far[i]` says whether the
    block comes from other nodes. A block is bytes that the same ranks need.

    Receivers of far lines have no holder on their node, so all of them receive from other nodes.
    """
    # By number of a set of receivers: all its blocks have the same nodes.
    wanted: Counter[int] = Counter()
    sizes_of_set: dict[int, list[int]] = {}
    far_blocks = np.flatnonzero(is_far).tolist()
    for block in far_blocks:
        set_number = int(demands.receivers[block])
        wanted[set_number] += int(demands.nbytes[block])
        sizes_of_set[set_number] = node_sizes[block]
    # Exact fractions, so that the target does not depend on the order in which shares are summed.
    load: defaultdict[int, Fraction] = defaultdict(Fraction)
    for set_number, nbytes in wanted.items():
        ranks = demands.sets[set_number]
        shares = _share_in_nodes(nbytes, sizes_of_set[set_number])
        for rank, share in zip(ranks, shares, strict=True):
            load[rank] += share
    fullest = max(load.values(), default=0)
    return math.ceil(fullest)


def _share_in_nodes(nbytes: int, sizes: list[int]) -> list[Fraction]:
    """The bytes that each rank takes in, one stripe each, in nodes of these sizes.

    Receivers ascend, so those of one node follow each other.
    """
    shares = []
    for size in sizes:
        stripe = Fraction(nbytes, size)
        shares += [stripe] * size
    return shares
