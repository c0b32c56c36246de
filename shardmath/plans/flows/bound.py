"""Bound: a time that no schedule beats, and a set of ranks that forces it.

1. A **block** is bytes of distinct elements that exactly its holders have before the move, and its
   receivers need after it.
2. **Time**: every rank sends at most `intra_bytes_per_s` to other ranks of its node and
   `inter_bytes_per_s` to other nodes, and receives at most as much of each. A NIC carries nothing
   between two ranks of one node, and only ranks of the program have links. A message takes
   `latency_s` in addition to its bytes. Everything else is allowed: relays through any rank,
   multicast, any order, any splitting, sums on the way.
3. A **cut** is a set X of ranks. Bytes needed in X and held nowhere in X must enter it, once however
   many ranks of X want them; bytes held in X alone and needed elsewhere must leave it. They cross
   no faster than the links between X and the rest carry. Entering X is leaving the rest, so every
   set is asked both ways.
4. The addends of a reduction are copies of the same elements. Elements of addend k that are missing
   in X cannot be replaced by other addends, but one sum may bring all missing addends: the addend
   with most missing bytes counts.
5. Every cut is a true bound. Which ones are looked at decides how close the bound is, never whether
   it holds: each rank, each node, what each node and the whole program hold and need, and the sets
   that crowd what they alone hold.
6. Bytes and comparisons are exact; only the seconds that come out are floats.

Two nodes of two ranks; rank 0 holds what both ranks of the other node need, and so 1 GB leaves it,
not 2:

>>> from shardmath.plans.flows.certificate import make_certificate
>>> from shardmath.plans.flows.topology import Topology
>>> two = Topology(
...     ranks_per_node=2, intra_bytes_per_s=450e9, inter_bytes_per_s=50e9, latency_s=1e-5
... )
>>> seconds, witness = find_bound([Block((0,), (2, 3), 10**9)], range(4), two)
>>> witness
Witness(ranks=(2, 3), direction='in', nbytes=1000000000, bytes_per_s=100000000000.0)
>>> print(make_certificate((seconds, witness), 0.0125))
12.5 ms, 1.249 times the bound of 10.01 ms: 2 ranks (2, 3) must take in 1 GB at 100 GB/s
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.plans.flows.blocks import Block, BlockTable, Machine, read_blocks, sum_by_code
from shardmath.plans.flows.borders import Cut, TouchedLabels, find_shared, list_cuts, touch
from shardmath.plans.flows.certificate import Witness
from shardmath.plans.flows.flow import find_levels
from shardmath.plans.flows.topology import Topology

__all__ = ["find_bound"]


def find_bound(
    blocks: Iterable[Block], ranks: Iterable[int], topology: Topology
) -> tuple[float, Witness | None]:
    """Find the seconds that every schedule takes at least, and the ranks that force them; (0.0, None) if nothing moves.

    `ranks` are all ranks of the program, in any order: their links may relay. One latency is added
    to the time of the worst cut, since each link that carries some of its bytes sends at least one
    message. Raises PlanError for a block with a rank not among `ranks`, with receivers
    and no holder, or of a negative size.
    """
    # Blocks that stay on their ranks cross no cut, and must not enter the families of holders and receivers.
    asked = [b for b in blocks if b.nbytes and not set(b.receivers) <= set(b.holders)]
    if not asked:
        return 0.0, None
    table, machine = read_blocks(asked, ranks, topology)
    cuts = _gather_cuts(table, machine)
    if not cuts:
        return 0.0, None
    worst = max(cuts, key=lambda cut: cut.seconds)
    seconds = worst.seconds + Fraction(topology.latency_s)
    return float(seconds), _name_witness(worst, machine)


def _gather_cuts(table: BlockTable, machine: Machine) -> list[Cut]:
    """The worst cuts of all families."""
    cuts: list[Cut] = []
    for label in _list_families(table, machine):
        cuts += list_cuts(table, machine, label)
    if not cuts:
        return []
    for unit, link in _list_units(machine):
        worst = max(cut.seconds for cut in cuts)
        crowded = _find_crowded(table, unit, link, worst)
        if crowded is not None:
            cuts += list_cuts(table, machine, crowded)
    return cuts


def _name_witness(cut: Cut, machine: Machine) -> Witness:
    """The smaller of the two sets of ranks that the cut divides."""
    inside = cut.inside
    direction = cut.direction
    if 2 * inside.sum() > len(inside):
        inside = ~inside
        direction = "out" if direction == "in" else "in"
    ranks = tuple(machine.ranks[inside].tolist())
    return Witness(ranks, direction, cut.nbytes, float(cut.rate))


def _list_families(table: BlockTable, machine: Machine) -> Iterator[Ints]:
    """The families: nodes; ranks; ranks that hold anything, and that need anything, in the program and in each node."""
    count = len(machine.ranks)
    yield machine.node
    yield np.arange(count)
    for sets in (table.holders, table.receivers):
        role = np.zeros(count, np.int64)
        role[sets.member] = 1
        yield role
        yield machine.node * 2 + role


def _list_units(machine: Machine) -> Iterator[tuple[Ints, Fraction]]:
    """(unit of each rank, rate of a rank's links out of its unit) with nodes as units, then with ranks."""
    yield machine.node, machine.inter
    rate = machine.intra
    has_several_nodes = len(machine.size) > 1
    if has_several_nodes:
        rate += machine.inter
    each_rank = np.arange(len(machine.ranks))
    yield each_rank, rate


def _find_crowded(table: BlockTable, unit: Ints, link: Fraction, worst: Fraction) -> Ints | None:
    """A family of unions of units (nodes, or ranks) with the most bytes per rank that only they hold.

    If the links of units add up, no union has to take in more per rank than the worst of its units: bytes
    that must enter the union must enter one of them. Leaving differs: bytes that two nodes hold need not
    leave either of them by itself. The worst union is the highest level of the flow that spreads each
    block once, however many ranks want it, over its holders; the family has the lower levels too. An even
    spread has at least the load of that level: if it takes no longer than the time `worst`, neither does
    any union of units whose links add up, and the answer is None.
    """
    lengths, holders = _gather_demands(table, unit)
    # The bytes of each unit in an even spread.
    load = np.zeros(len(unit), np.int64)
    for nbytes, ranks in zip(lengths, holders, strict=True):
        share = -(-nbytes // len(ranks))
        load[list(ranks)] += share
    if int(load.max()) <= worst * link:
        return None
    label = np.zeros(len(unit), np.int64)
    for i, level in enumerate(find_levels(lengths, holders), 1):
        label[list(level.ranks)] = i
    return label


def _gather_demands(table: BlockTable, unit: Ints) -> tuple[list[int], list[tuple[int, ...]]]:
    """Two lists: how many bytes some unit needs and does not hold, added up by the units that hold them; and the
    positions of all ranks of these units."""
    count = int(unit.max()) + 1
    holder_units = touch(table.holders, unit, count)
    rows = _find_missed(table, holder_units, unit, count)
    set_of_row = table.holders.of[rows]
    sets, nbytes = sum_by_code(set_of_row, table.nbytes[rows])
    total: dict[tuple[int, ...], int] = defaultdict(int)
    for holder_set, set_nbytes in zip(sets.tolist(), nbytes.tolist(), strict=True):
        units = holder_units.labels_of(holder_set)
        total[units] += set_nbytes
    lengths = list(total.values())
    holders = _list_members(list(total), unit, count)
    return lengths, holders


def _find_missed(table: BlockTable, hold: TouchedLabels, unit: Ints, count: int) -> Ints:
    """The blocks that some unit needs and does not hold.

    Of a group only those of its first addend: elements count once.
    """
    need = touch(table.receivers, unit, count)
    _, served_blocks = find_shared(hold, need, count)
    units_served = np.bincount(served_blocks, minlength=len(table.key))
    missed = need.widths() > units_served
    step = np.diff(table.group, prepend=-1)
    is_first = step != 0  # by key, which is an addend of a group
    counted = is_first[table.key]
    return np.flatnonzero(counted & missed)


def _list_members(groups: list[tuple[int, ...]], unit: Ints, count: int) -> list[tuple[int, ...]]:
    """The positions, ascending, of all ranks of each group of units."""
    members: list[list[int]] = [[] for _ in range(count)]
    for rank, u in enumerate(unit.tolist()):
        members[u].append(rank)
    out = []
    for units in groups:
        ranks: list[int] = []
        for u in units:
            ranks += members[u]
        ranks.sort()
        out.append(tuple(ranks))
    return out
