"""Loads: how many bytes each rank has under way by each of its links, and how long that takes.

1. A rank has four links: out and in on its node, out and in to other nodes.
2. A round is as long as its fullest link takes, and one latency; rounds follow each other.
3. `sum_round_loads` counts slice by slice what `for_rank` lists; `sum_leg_loads` all slots together.
4. Lines are **alike** whose streams have the same bytes and may be cut at the same places, whoever
   their ranks are. Their slices are the same, but for the slot in which they begin, and are counted
   once. Of a model's lines nearly all are alike: those of stages, experts and replicas.

>>> from shardmath.plans.flows.topology import Topology
>>> slow = Topology(intra_bytes_per_s=10, inter_bytes_per_s=1, latency_s=1)
>>> estimate_seconds(slow, np.array([[0, 20, 0, 0], [0, 0, 5, 0]]))
6.0
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Bools, Ints, Offsets, distinct
from shardmath.plans.balance import make_grid
from shardmath.plans.flows.topology import Topology
from shardmath.plans.programs.legs import Bundle, Streams
from shardmath.plans.programs.program import Program, Slices, cut_streams, turn_of
from shardmath.plans.programs.streams import list_bundles, list_streams
from shardmath.plans.stretches import find_lines

__all__ = [
    "LEGS",
    "Loads",
    "Pairs",
    "count_messages",
    "estimate_seconds",
    "estimate_slots",
    "sum_leg_loads",
    "sum_pairs",
    "sum_round_loads",
    "time_rounds",
]

LEGS = 3
"""Straight, to other nodes, inside nodes."""

LINKS = 4
"""Near out, near in, far out, far in: 2 * far + incoming."""

Loads: TypeAlias = NDArray[np.int64]
"""Bytes by ..., rank (in order) and link: near out, near in, far out, far in."""


class Pairs(NamedTuple):
    """`nbytes` that go from rank to rank in a phase and leg, all slots together.

    Ranks are given by their places.
    """

    phase: Ints
    leg: Ints
    sender: Ints
    receiver: Ints
    far: Bools
    nbytes: Ints


def sum_pairs(prog: Program) -> Pairs:
    """What goes from rank to rank: each pair once per phase and leg."""
    ranks = np.array(prog.ranks, np.int64)
    count = len(ranks)
    phases = _count_phases(prog)
    shape = phases, LEGS, count, count
    code, nbytes = _sum_lines(prog, ranks, shape)
    phase, leg, sender, receiver = np.unravel_index(code, shape)
    senders = ranks[sender]
    receivers = ranks[receiver]
    far = _is_far(prog, senders, receivers)
    return Pairs(phase, leg, sender, receiver, far, nbytes)


def _sum_lines(prog: Program, ranks: Ints, shape: tuple[int, int, int, int]) -> tuple[Ints, Ints]:
    """The pairs of all lines, coded as places of a table of this shape, and the bytes of each."""
    none = np.zeros(0, np.int64)
    codes = [none]
    sizes = [none]
    # Bundles of lines are summed by themselves first, so that what is kept grows with pairs and not
    # with streams.
    for found in list_bundles(prog.legs):
        code, nbytes = _sum_streams(prog, found.streams, ranks, shape)
        codes.append(code)
        sizes.append(nbytes)
    return _sum_by_code(np.concatenate(codes), np.concatenate(sizes))


def _sum_streams(
    prog: Program, of: Streams, ranks: Ints, shape: tuple[int, int, int, int]
) -> tuple[Ints, Ints]:
    """The pairs of streams, coded as places of a table of this shape, and the bytes of each."""
    phase = prog.legs.lines.addend[of.block]
    leg = of.leg - 1
    sender, receiver = _find_places(ranks, of)
    where = phase, leg, sender, receiver
    code = np.ravel_multi_index(where, shape)
    nbytes = of.hi - of.lo
    return _sum_by_code(code, nbytes)


def _count_phases(prog: Program) -> int:
    """The number of addends that are folded one after the other."""
    addend = prog.legs.lines.addend
    return int(addend.max(initial=0)) + 1


def _find_places(ranks: Ints, of: Streams) -> tuple[Ints, Ints]:
    """The places of senders and receivers among all ranks."""
    sender = np.searchsorted(ranks, of.sender)
    receiver = np.searchsorted(ranks, of.receiver)
    return sender, receiver


def _is_far(prog: Program, sender: Ints, receiver: Ints) -> Bools:
    """Whether these ranks are on different nodes."""
    per_node = prog.topology.ranks_per_node
    far: Bools = sender // per_node != receiver // per_node
    return far


def _sum_by_code(code: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """Each code once, ascending, and its bytes in all."""
    order = np.argsort(code, kind="stable")
    code = code[order]
    alike = Offsets.of_sorted(code)
    first = alike.first[:-1]
    return code[first], alike.sums(nbytes[order])


def sum_leg_loads(prog: Program, of: Pairs) -> Loads:
    """Bytes by phase, leg, rank and link, all slots together."""
    shape = _count_phases(prog), LEGS, len(prog.ranks), LINKS
    loads = np.zeros(shape, np.int64)
    out_link = 2 * of.far
    in_link = out_link + 1
    sent = of.phase, of.leg, of.sender, out_link
    received = of.phase, of.leg, of.receiver, in_link
    np.add.at(loads, sent, of.nbytes)
    np.add.at(loads, received, of.nbytes)
    return loads


def count_messages(of: Pairs, turns: int, ranks: int) -> Ints:
    """By turn and rank, the most messages that a round may have.

    There is one for each leg and peer, each way, whatever the phase.
    """
    # One number for (leg, sender, receiver).
    from_sender = of.leg * ranks + of.sender
    code = from_sender * ranks + of.receiver
    _, some = np.unique(code, return_index=True)
    sender = of.sender[some]
    receiver = of.receiver[some]
    leg = of.leg[some] + 1
    places = sender + receiver
    turn = turn_of(places, leg, ranks) % turns
    counts = np.zeros((turns, ranks), np.int64)
    np.add.at(counts, (turn, sender), 1)
    np.add.at(counts, (turn, receiver), 1)
    return counts


def sum_round_loads(prog: Program) -> Loads:
    """Bytes by phase, slot, turn, rank and link, exactly.

    The latest ones are kept with the legs: who schedules a program certifies and proves it next.
    """
    rounds = prog.slots, prog.turns, prog.topology.ranks_per_node, prog.ranks
    kept = prog.legs._loads.get(rounds)
    if kept is not None and kept[0] is prog.plan.batches:
        return kept[1]
    loads = _sum_rounds(prog)
    loads.setflags(write=False)
    prog.legs._loads.clear()
    prog.legs._loads[rounds] = prog.plan.batches, loads
    return loads


def _sum_rounds(prog: Program) -> Loads:
    """Bytes by phase, slot, turn, rank and link, slice by slice of lines that are not alike."""
    ranks = np.array(prog.ranks, np.int64)
    phases = _count_phases(prog)
    # The last slot's slices are relayed in the slots after it.
    slots = prog.slots + LEGS - 1
    shape = phases, slots, prog.turns, len(ranks), LINKS
    loads = np.zeros(math.prod(shape), np.int64)
    # How much further in the table each slot is.
    width = math.prod(shape[2:])
    ahead = width * np.arange(prog.slots)
    counted: _Counted = {}
    for found in list_bundles(prog.legs):
        small, large = _part_by_size(found, prog.slots)
        codes = _code_ends(prog, small, ranks, shape)
        for place, nbytes in _list_ends(prog, small, codes, ahead):
            np.add.at(loads, place, nbytes)
        for line in large:
            of = list_streams(prog.legs, line)
            codes = _code_ends(prog, of, ranks, shape)
            for first, by_slot in _count_line(prog, line, of, codes, counted):
                place = first[:, None] + ahead
                np.add.at(loads, place, by_slot)
    return loads.reshape(shape)


FEW_SLICES = 1 << 9
"""Of a line: whether another is alike takes longer to see than its slices take to count."""


def _part_by_size(found: Bundle, slots: int) -> tuple[Streams, list[int]]:
    """The streams of all lines that have few slices, and the other lines."""
    by_line = Offsets(found.first)
    slices = by_line.counts() * slots
    is_small = slices <= FEW_SLICES
    some = by_line.spread(is_small)
    small = Streams(*(column[some] for column in found.streams))
    large = found.lines[~is_small]
    return small, large.tolist()


def _list_ends(
    prog: Program, of: Streams, codes: tuple[Ints, Ints], ahead: Ints
) -> Iterator[tuple[Ints, Ints]]:
    """As sent and as received: where slices are in the table, and the bytes of each.

    Given where the first slots of streams are, and how much further the others.
    """
    cut = cut_streams(prog, of)
    line = find_lines(prog.legs.lines, of.block)
    # A line begins one slot later than the line before.
    slot = (cut.slot + line[cut.stream]) % prog.slots
    further = ahead[slot]
    nbytes = cut.hi - cut.lo
    for code in codes:
        first = code[cut.stream]
        yield first + further, nbytes


_Counted: TypeAlias = dict[tuple[bytes, ...], list[Ints]]
"""By what decides the slices of a line: bytes by end and slot, as sent and as received."""

MOST_COUNTED = 64
"""Lines that are kept to be compared with those that follow; where none are alike, memory is what matters."""


def _count_line(
    prog: Program, line: int, of: Streams, codes: tuple[Ints, Ints], counted: _Counted
) -> Iterator[tuple[Ints, Ints]]:
    """As sent and as received: each code once, and bytes by code and slot."""
    ends = [distinct(code) for code in codes]
    numbers = [which for _, which in ends]
    kind = _describe_line(prog, line, of, numbers)
    tables = counted.get(kind)
    if tables is None:
        tables = _count_ends(prog, of, ends)
        if len(counted) == MOST_COUNTED:
            counted.clear()
        counted[kind] = tables
    for (code, _), table in zip(ends, tables, strict=True):
        # A line begins one slot later than the line before.
        yield code, np.roll(table, line, axis=1)


def _describe_line(prog: Program, line: int, of: Streams, ends: list[Ints]) -> tuple[bytes, ...]:
    """All that decides the slices of a line, and which of its `ends` each has."""
    demands = prog.legs.lines
    first, end = demands.first[line : line + 2].tolist()
    grid = make_grid(demands, prog.plan.batches)
    columns = [of.block - first, of.lo, of.hi, of.root, *ends]
    described = [column.tobytes() for column in columns]
    return (*described, *grid.describe(first, end))


def _count_ends(prog: Program, of: Streams, ends: list[tuple[Ints, Ints]]) -> list[Ints]:
    """Bytes by end and slot, as sent and as received."""
    cut = cut_streams(prog, of)
    tables = []
    for code, which in ends:
        table = _count_slices(cut, prog.slots, which, len(code))
        tables.append(table)
    return tables


def _count_slices(cut: Slices, slots: int, which: Ints, ends: int) -> Ints:
    """Bytes by end and slot of slices, given which end each stream has."""
    table = np.zeros((ends, slots), np.int64)
    end = which[cut.stream]
    place = end, cut.slot
    nbytes = cut.hi - cut.lo
    np.add.at(table, place, nbytes)
    return table


def _code_ends(
    prog: Program, of: Streams, ranks: Ints, shape: tuple[int, int, int, int, int]
) -> tuple[Ints, Ints]:
    """Where the first slots of streams are in a table of this shape: as sent, and as received."""
    sender, receiver = _find_places(ranks, of)
    phase = prog.legs.lines.addend[of.block]
    places = sender + receiver
    free_turn = turn_of(places, of.leg, len(ranks))
    turn = free_turn % prog.turns
    slot = of.leg - 1
    out_link = 2 * _is_far(prog, of.sender, of.receiver)
    in_link = out_link + 1
    sent = phase, slot, turn, sender, out_link
    received = phase, slot, turn, receiver, in_link
    sent_code = np.ravel_multi_index(sent, shape)
    received_code = np.ravel_multi_index(received, shape)
    return sent_code, received_code


def estimate_seconds(where: Topology, loads: Loads) -> float:
    """The time of rounds one after the other, each its fullest link's time and one latency.

    `loads` are bytes by (..., rank, link).
    """
    by_round = _time_links(where, loads)
    latency = where.latency_s * np.count_nonzero(by_round)
    return float(by_round.sum() + latency)


def _time_links(where: Topology, loads: Loads) -> NDArray[np.float64]:
    """By round, the seconds that its fullest link takes."""
    near = where.intra_bytes_per_s
    far = where.inter_bytes_per_s
    rate = np.array([near, near, far, far])
    by_link = loads / rate
    fullest: NDArray[np.float64] = by_link.max(axis=(-2, -1), initial=0.0)
    return fullest


def time_rounds(where: Topology, loads: Loads) -> NDArray[np.float64]:
    """By phase, slot and turn, from when to when the round runs, in seconds; rounds in which nothing goes take none.

    The last ends when `estimate_seconds` says.
    """
    by_round = _time_links(where, loads)
    lasting = by_round + where.latency_s * (by_round > 0)
    end = lasting.cumsum().reshape(lasting.shape)
    return np.stack((end - lasting, end), axis=-1)


def estimate_slots(where: Topology, loads: Loads, slots: int) -> float:
    """The time of the legs in so many slots, each leg one slot behind the one before."""
    total = 0.0
    few = min(slots, LEGS)
    for slot in range(few + LEGS - 1):
        legs = [leg for leg in range(LEGS) if 0 <= slot - leg < few]
        # Slots beyond the few are in the middle, where all legs are under way: they take the same time.
        count = 1 + slots - few if len(legs) == LEGS else 1
        load = loads[:, legs].sum(axis=1)
        total += count * estimate_seconds(where, load / slots)
    return total
