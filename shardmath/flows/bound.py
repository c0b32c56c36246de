"""Cost: no schedule is faster than this, and a set of ranks that shows why.

1. A **block** is bytes of distinct elements that exactly these ranks hold before the move and these need after it.
2. **Time**: every rank sends at most `intra_bytes_per_s` to other ranks of its node and `inter_bytes_per_s` to other
   nodes, and receives at most as much of each. A NIC carries nothing between two ranks of one node, and ranks that
   take no part lend no links. A message takes `latency_s` beside its bytes. All else is allowed: relays through any
   rank, multicast, any order, any splitting, sums on the way.
3. A **cut** is a set X of ranks. Bytes needed in X and held nowhere in X must enter it, once however many ranks of X
   want them; bytes held in X alone and needed elsewhere must leave it. They cross no faster than the links between X
   and the rest carry. Entering X is leaving the rest, so every set is asked both ways.
4. The addends of a reduction are copies of the same elements. What misses addend k at X is not made up for by the
   other addends, but one sum may serve all that miss: the addend that misses most counts.
5. Every cut is a true bound. Which ones are looked at decides how close the bound is, never whether it holds: each
   rank, each node, what each node and the whole program hold and need, and the sets that crowd what they alone hold.
6. Bytes and comparisons are exact; only the seconds that come out are floats.

Two nodes of two ranks; rank 0 holds what both ranks of the other node need, and so 1 GB leaves it, not 2:

>>> from shardmath.flows.topology import Topology
>>> two = Topology(ranks_per_node=2, intra_bytes_per_s=450e9, inter_bytes_per_s=50e9, latency_s=1e-5)
>>> seconds, witness = bound([Block((0,), (2, 3), 10**9)], range(4), two)
>>> witness
Witness(ranks=(2, 3), direction='in', nbytes=1000000000, bytes_per_s=100000000000.0)
>>> print(certificate((seconds, witness), 0.0125))
12.5 ms, 1.249 times the bound of 10.01 ms: 2 ranks (2, 3) must take in 1 GB at 100 GB/s
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, begins, ranges
from shardmath.base.errors import PlanError
from shardmath.base.integers import whole
from shardmath.base.public import public
from shardmath.flows.flow import levels
from shardmath.flows.topology import Topology

__all__ = ["Block", "Certificate", "Witness", "bound", "certificate"]

MOST_BYTES = 1 << 62
"""More bytes than any program moves; sums and differences of them stay exact in 64 bits."""


class Block(NamedTuple):
    """`nbytes` of distinct elements that exactly `holders` hold before the move and all of `receivers` need after it.

    Ranks may be in any order and repeat; a receiver that is a holder asks for nothing. Blocks are disjoint sets of
    elements unless they are of one `group` and differ in `addend`: then they may be addends of the same elements.
    Blocks of different groups are of different elements.
    """

    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    nbytes: int
    addend: int = 0
    group: int = 0


class Witness(NamedTuple):
    """The set of ranks, ascending, that must take in ("in") or give out ("out") `nbytes` at `bytes_per_s` or less.

    The other ranks of the program would do as well, the other way; these are the fewer.
    """

    ranks: tuple[int, ...]
    direction: str
    nbytes: int
    bytes_per_s: float


@public
@dataclass(frozen=True, slots=True)
class Certificate:
    """How near a plan of `plan_s` seconds is to `bound_s`, which no schedule beats because of `witness`.

    `ratio` is `plan_s / bound_s`, 1.0 where nothing has to move and nothing does. Made by `certificate`.
    """

    bound_s: float
    plan_s: float
    ratio: float
    witness: Witness | None

    def __str__(self) -> str:
        if self.witness is None:
            return f"{_si(self.plan_s)}s; nothing has to move"
        w = self.witness
        return (
            f"{_si(self.plan_s)}s, {self.ratio:.4g} times the bound of {_si(self.bound_s)}s: {_ranks(w.ranks)} must "
            f"{'take in' if w.direction == 'in' else 'give out'} {_si(w.nbytes)}B at {_si(w.bytes_per_s)}B/s"
        )


def certificate(bound: tuple[float, Witness | None], plan_s: float) -> Certificate:
    """The certificate of a plan that takes `plan_s` seconds, given what `bound` returned for it.

    Raises PlanError if `plan_s` is no time, or less than the bound by more than rounding.
    """
    bound_s, witness = bound
    if not 0 <= plan_s < math.inf:
        raise PlanError(f"a plan of {plan_s!r} seconds; give a finite time that is not negative")
    if plan_s < bound_s * (1 - 1e-9):
        shown = Certificate(bound_s, plan_s, plan_s / bound_s, witness)
        raise PlanError(
            f"no schedule is faster than its bound: {shown}; time all of the plan on the same topology"
        )
    if bound_s == 0:
        return Certificate(bound_s, plan_s, math.inf if plan_s else 1.0, witness)
    return Certificate(bound_s, plan_s, max(1.0, plan_s / bound_s), witness)


def _si(value: float) -> str:
    """The value with four digits, a space and the prefix of its unit."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0), ("m", 1e-3)):
        if value >= size * 0.99995:
            return f"{value / size:.4g} {prefix}"
    return f"{value / 1e-6:.4g} u" if value else "0 "


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = (
        ", ".join(map(str, ranks))
        if len(ranks) <= 8
        else f"{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}"
    )
    return f"{len(ranks)} ranks ({shown})"


# The program as arrays


@dataclass(frozen=True, slots=True, eq=False)
class _Machine:
    """The ranks of the program, ascending, the number of each one's node, the ranks in each node, a rank's links."""

    ranks: Ints
    node: Ints
    size: Ints
    intra: Fraction
    inter: Fraction


@dataclass(frozen=True, slots=True, eq=False)
class _Sets:
    """Sets of ranks: block i has set `of[i]`; set `owner[j]` of `count` has the rank at position `member[j]`."""

    of: Ints
    count: int
    owner: Ints
    member: Ints


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Blocks that have bytes and receivers. `key` numbers (group, addend), ascending, `group` the group of each key.

    `wanted` sums the blocks by receivers and key: (set, key, bytes).
    """

    holders: _Sets
    receivers: _Sets
    nbytes: Ints
    key: Ints
    group: Ints
    wanted: tuple[Ints, Ints, Ints]


def _machine(ranks: Iterable[int], topology: Topology) -> _Machine:
    held = list(topology.nodes(ranks).values())
    size = np.array([len(node) for node in held], np.int64)
    listed = np.array(list(itertools.chain.from_iterable(held)), np.int64)
    links = Fraction(topology.intra_bytes_per_s), Fraction(topology.inter_bytes_per_s)
    return _Machine(listed, np.repeat(np.arange(len(held)), size), size, *links)


def _table(blocks: Sequence[Block], machine: _Machine) -> _Table:
    nbytes = np.array([block.nbytes for block in blocks], np.int64)
    keys = [(block.group, block.addend) for block in blocks]
    number = {key: i for i, key in enumerate(sorted(set(keys)))}
    groups = {group: i for i, group in enumerate(dict.fromkeys(group for group, _ in number))}
    key = np.array([number[k] for k in keys], np.int64)
    receivers = _sets([block.receivers for block in blocks], machine)
    code, amount = _summed(receivers.of * len(number) + key, nbytes)
    return _Table(
        _sets([block.holders for block in blocks], machine),
        receivers,
        nbytes,
        key,
        np.array([groups[group] for group, _ in number], np.int64),
        (code // len(number), code % len(number), amount),
    )


def _check(blocks: Sequence[Block]) -> None:
    total = 0
    for block in blocks:
        if whole(block.nbytes, "the size of a block", PlanError) < 0:
            raise PlanError(f"a block has {block.nbytes} bytes; give zero or more")
        if not block.holders:
            raise PlanError(
                f"no rank holds the {block.nbytes} bytes that {_ranks(block.receivers)} must have; name one"
            )
        total += block.nbytes
    if total >= MOST_BYTES:
        raise PlanError(f"the blocks have {total} bytes in all; give fewer than {MOST_BYTES}")


def _sets(given: Sequence[tuple[int, ...]], machine: _Machine) -> _Sets:
    """The sets by value; those that are one object are looked at once."""
    number: dict[tuple[int, ...], int] = {}
    of_id = {
        at: number.setdefault(ranks, len(number)) for at, ranks in {id(s): s for s in given}.items()
    }
    of = np.array([of_id[id(s)] for s in given], np.int64)
    flat = np.array(list(itertools.chain.from_iterable(number)), np.int64)
    member = np.searchsorted(machine.ranks, flat)
    inside = member < len(machine.ranks)
    inside[inside] = machine.ranks[member[inside]] == flat[inside]
    if not inside.all():
        program = _ranks(tuple(machine.ranks.tolist()))
        raise PlanError(
            f"rank {flat[~inside][0]} is in a block and not in the program of {program}; add it to the ranks"
        )
    return _Sets(
        of, len(number), np.repeat(np.arange(len(number)), [len(s) for s in number]), member
    )


def _summed(code: Ints, amount: Ints) -> tuple[Ints, Ints]:
    """The distinct codes, ascending, and the sum of each one's amounts."""
    distinct, at = np.unique(code, return_inverse=True)
    total = np.zeros(len(distinct), np.int64)
    np.add.at(total, at, amount)
    return distinct, total


# Cuts, a family at a time: a family is a label for every rank, and each label's ranks are a set to look at


@dataclass(frozen=True, slots=True, eq=False)
class _Touched:
    """The labels of each set of ranks, ascending: of block i `labels[first[s]:first[s + 1]]` with s = `of[i]`."""

    of: Ints
    first: Ints
    labels: Ints

    def widths(self) -> Ints:
        """How many labels each block has."""
        return np.diff(self.first)[self.of]

    def only(self) -> Ints:
        """The label of each block that has a single one; -1 for the others."""
        return np.where(self.widths() == 1, self.labels[self.first[self.of]], -1)


class _Cut(NamedTuple):
    """One set of a family, as who is inside it, and what its forced bytes take."""

    seconds: Fraction
    inside: Bools
    direction: str
    nbytes: int
    rate: Fraction


def _touched(sets: _Sets, label: Ints, count: int) -> _Touched:
    code = np.unique(sets.owner * count + label[sets.member])
    return _Touched(sets.of, np.searchsorted(code, np.arange(sets.count + 1) * count), code % count)


def _expanded(touched: _Touched, sets: Ints) -> tuple[Ints, Ints]:
    """Every label of every one of the sets, and which of them it belongs to."""
    at, owner = ranges(touched.first[sets], touched.first[sets + 1])
    return touched.labels[at], owner


def _shared(hold: _Touched, need: _Touched, count: int) -> tuple[Ints, Ints]:
    """(label, block) wherever some ranks of one label hold the block and some need it."""
    few, many = sorted((hold, need), key=lambda touched: int(touched.widths().sum()))
    label, block = _expanded(few, few.of)
    there = np.repeat(np.arange(len(many.first) - 1), np.diff(many.first)) * count + many.labels
    both = np.isin(many.of[block] * count + label, there)
    return label[both], block[both]


def _forced(table: _Table, label: Ints, key: Ints, nbytes: Ints, count: int) -> Ints:
    """Bytes by label: of a group the addend with most, of all groups the sum."""
    keys, groups = len(table.group), int(table.group[-1]) + 1
    code, amount = _summed(label * keys + key, nbytes)
    place = code // keys * groups + table.group[code % keys]
    first = begins(place)
    out = np.zeros(count, np.int64)
    if len(first):
        np.add.at(out, place[first] // groups, np.maximum.reduceat(amount, first))
    return out


def _entering(table: _Table, hold: _Touched, need: _Touched, count: int) -> Ints:
    """Bytes that must enter the ranks X of each label: some of X need them and none of X holds them.

    A first copy of each such element has to cross into X. Inside X it may be passed on, so it counts once. Of a
    reduction, an element whose addend k is held outside X only needs a value to enter that depends on addend k, and one
    value may do so for all addends: at least as many elements as miss any one addend enter.
    """
    sets, key, nbytes = table.wanted
    label, row = _expanded(need, sets)
    here, block = _shared(hold, need, count)
    return _forced(
        table,
        np.concatenate((label, here)),
        np.concatenate((key[row], table.key[block])),
        np.concatenate((nbytes[row], -table.nbytes[block])),
        count,
    )


def _leaving(table: _Table, hold: _Touched, need: _Touched, count: int) -> Ints:
    """Bytes that must leave the ranks X of each label: only X holds them and some rank outside X needs them.

    This is what must enter the ranks outside X. The number of replicas that want them does not matter: one copy leaves,
    the rest may be copies of it.
    """
    home = hold.only()
    rows = (home >= 0) & (home != need.only())
    return _forced(table, home[rows], table.key[rows], table.nbytes[rows], count)


def _links(machine: _Machine, label: Ints, count: int) -> tuple[Ints, Ints]:
    """How many ranks' intra-node and inter-node links carry bytes between the ranks X of each label and the rest.

    Inside a node of n ranks, k of them in X, at most k take in and n - k give out: min(k, n - k) links. Between nodes
    at most |X| receive and |R - X| send, R all ranks of the program; and a byte that goes to another node has an end
    outside the largest node, so at most |R - largest| links are at work, none where all ranks are on one node. The
    other direction is the same with senders and receivers changed over.

    So a whole node has its NICs alone, one a rank that takes part, and one rank has both its links, even for bytes
    that another rank of its node holds: they may come over either, relayed by another node.
    """
    nodes, total = len(machine.size), len(machine.ranks)
    code, k = np.unique(label * nodes + machine.node, return_counts=True)
    intra = np.zeros(count, np.int64)
    np.add.at(intra, code // nodes, np.minimum(k, machine.size[code % nodes] - k))
    members = np.bincount(label, minlength=count)
    return intra, np.minimum(np.minimum(members, total - members), total - machine.size.max())


def _cuts(table: _Table, machine: _Machine, label: Ints) -> Iterator[_Cut]:
    """Of each direction, and of the sets of a family that have equal links, the one with the most forced bytes."""
    count = int(label.max()) + 1
    hold, need = _touched(table.holders, label, count), _touched(table.receivers, label, count)
    intra, inter = _links(machine, label, count)
    for direction, forced in (
        ("in", _entering(table, hold, need, count)),
        ("out", _leaving(table, hold, need, count)),
    ):
        rows = np.flatnonzero(forced)
        rows = rows[np.lexsort((rows, -forced[rows], inter[rows], intra[rows]))]
        new = np.diff(intra[rows], prepend=-1).astype(bool) | np.diff(
            inter[rows], prepend=-1
        ).astype(bool)
        for x in rows[new].tolist():
            rate = int(intra[x]) * machine.intra + int(inter[x]) * machine.inter
            nbytes = int(forced[x])
            yield _Cut(nbytes / rate, label == x, direction, nbytes, rate)


# Which cuts


def _families(table: _Table, machine: _Machine) -> Iterator[Ints]:
    """Ranks; nodes; the ranks that hold or need anything and those that do not, of each node and of the program."""
    yield machine.node
    yield np.arange(len(machine.ranks))
    for sets in (table.holders, table.receivers):
        role = np.zeros(len(machine.ranks), np.int64)
        role[sets.member] = 1
        yield role
        yield machine.node * 2 + role


def _crowded(table: _Table, unit: Ints, link: Fraction, found: Fraction) -> Ints | None:
    """A family of sets of whole units (nodes, or ranks) with the most bytes a rank that they alone hold.

    Where the links of units add up, no union has to take in more a rank than the worst of its units: what must enter
    the union must enter one of them. Leaving differs: what two nodes hold need leave neither of them alone. The worst
    union is the highest level of the flow that spreads each block once, however many want it, over its holders; the
    levels below are looked at too. An even spread is at least as high: where it takes no longer than the time
    `found`, no union of units whose links add up does, and the answer is None.
    """
    lengths, holders = _demands(table, unit)
    load = np.zeros(len(unit), np.int64)
    for nbytes, held in zip(lengths, holders, strict=True):
        load[list(held)] += -(-nbytes // len(held))
    if int(load.max()) <= found * link:
        return None
    label = np.zeros(len(unit), np.int64)
    for i, level in enumerate(levels(lengths, holders)):
        label[list(level.ranks)] = i + 1
    return label


def _demands(table: _Table, unit: Ints) -> tuple[list[int], list[tuple[int, ...]]]:
    """Bytes that some unit needs and does not hold, by the positions of all ranks of the units that hold them.

    Of a group only the blocks of its first addend: elements count once.
    """
    count = int(unit.max()) + 1
    hold, need = _touched(table.holders, unit, count), _touched(table.receivers, unit, count)
    missing = need.widths() - np.bincount(_shared(hold, need, count)[1], minlength=len(table.key))
    first = np.diff(table.group, prepend=-1)[table.key].astype(bool)
    rows = np.flatnonzero(first & (missing > 0))
    sets, nbytes = _summed(table.holders.of[rows], table.nbytes[rows])
    total: dict[tuple[int, ...], int] = {}
    for s, n in zip(sets.tolist(), nbytes.tolist(), strict=True):
        held = tuple(hold.labels[hold.first[s] : hold.first[s + 1]].tolist())
        total[held] = total.get(held, 0) + n
    members: list[list[int]] = [[] for _ in range(count)]
    for rank, u in enumerate(unit.tolist()):
        members[u].append(rank)
    return list(total.values()), [
        tuple(sorted(r for u in held for r in members[u])) for held in total
    ]


def bound(
    blocks: Iterable[Block], ranks: Iterable[int], topology: Topology
) -> tuple[float, Witness | None]:
    """Seconds that no schedule among `ranks` beats, and what shows it; (0.0, None) if nothing must move.

    `ranks` are all ranks that take part, in any order: their links may relay. One latency comes on top of the time of
    the worst cut: each link that carries some of its bytes spends that on a message beside them.
    Raises PlanError for a block with a rank not among `ranks`, with receivers and no holder, or of a negative size.
    """
    asked = [block for block in blocks if block.nbytes and block.receivers]
    if not asked:
        return 0.0, None
    _check(asked)
    machine = _machine(ranks, topology)
    table = _table(asked, machine)
    cuts = list(
        itertools.chain.from_iterable(
            _cuts(table, machine, label) for label in _families(table, machine)
        )
    )
    if not cuts:
        return 0.0, None
    between = machine.inter if len(machine.size) > 1 else Fraction(0)
    for unit, link in (
        (machine.node, machine.inter),
        (np.arange(len(machine.ranks)), machine.intra + between),
    ):
        label = _crowded(table, unit, link, max(cut.seconds for cut in cuts))
        if label is not None:
            cuts += _cuts(table, machine, label)
    worst = max(cuts, key=lambda cut: cut.seconds)
    return float(worst.seconds + Fraction(topology.latency_s)), _witness(worst, machine)


def _witness(cut: _Cut, machine: _Machine) -> Witness:
    """The smaller of the two sets of ranks that the cut divides."""
    inside, direction = cut.inside, cut.direction
    if 2 * inside.sum() > len(inside):
        inside, direction = ~inside, "out" if direction == "in" else "in"
    return Witness(tuple(machine.ranks[inside].tolist()), direction, cut.nbytes, float(cut.rate))
