"""Loads: bytes in flight by rank and link, and the time that they take.

1. A rank has four links: out and in on its node, out and in to other nodes.
2. A round takes the time of its fullest link, plus one latency; rounds follow each other.
3. `sum_round_loads` counts slice by slice what `for_rank` lists; `sum_leg_loads` all slots together.
4. Lines are **equivalent** if their streams have the same bytes and may be cut at the same places, on any
   ranks. Their slices are the same, except for the slot in which they begin, and are counted
   once. Nearly all lines of a model are equivalent: the lines of stages, experts and replicas.

>>> from shardmath.plans.flows.topology import Topology
>>> slow = Topology(intra_bytes_per_s=10, inter_bytes_per_s=1, latency_s=1)
>>> estimate_seconds(slow, np.array([[0, 20, 0, 0], [0, 0, 5, 0]]))
6.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Bools, Ints, Offsets, distinct, number_alike
from shardmath.plans.balance import make_grid
from shardmath.plans.flows.topology import Topology
from shardmath.plans.programs.legs import Bundle, Streams, count_lags, count_legs, find_lags
from shardmath.plans.programs.program import (
    Program,
    Slices,
    cut_streams,
    list_slices,
    rotate_slots,
    turn_of,
)
from shardmath.plans.programs.streams import list_bundles, list_streams

__all__ = [
    "Loads",
    "Pairs",
    "RoundPairs",
    "count_messages",
    "estimate_seconds",
    "estimate_slots",
    "sum_leg_loads",
    "sum_pairs",
    "sum_round_loads",
    "sum_round_pairs",
    "time_links",
    "time_rounds",
]

LINKS = 4
"""The number of links: near out, near in, far out, far in. A link's number is 2 * far + incoming."""

Loads: TypeAlias = NDArray[np.int64]
"""Bytes by ..., rank (in order) and link: near out, near in, far out, far in."""


class Pairs(NamedTuple):
    """A table of numbers of bytes: in hop `leg[i]`, counted from 0, rank number `sender[i]` sends `nbytes[i]` bytes to
    rank number `receiver[i]`. `phase[i]` is the index of the partial value to which the bytes belong, or 0 if they are
    not reduced. Bytes for other ranks `beyond[i]` are other messages.

    `sender` and `receiver` are places among the program's ranks, and so is `beyond` in legs of mates (`Streams`).
    """

    phase: Ints
    leg: Ints
    sender: Ints
    receiver: Ints
    beyond: Ints
    far: Bools
    nbytes: Ints


def sum_pairs(prog: Program) -> Pairs:
    """Sum the bytes that go from each rank to each other rank in each phase and hop of the program; return Pairs. Phase
    p has the bytes of partial value number p of each sum; all other bytes are in phase 0."""
    ranks = np.array(prog.ranks, np.int64)
    count = len(ranks)
    phases = _count_phases(prog)
    # Without mates, no message is for a rank beyond its receiver.
    beyond_count = 1 if prog.legs.mates is None else count
    shape = phases, count_legs(prog.legs), count, count, beyond_count
    code, nbytes = _sum_lines(prog, ranks, shape)
    phase, leg, sender, receiver, beyond = np.unravel_index(code, shape)
    senders = ranks[sender]
    receivers = ranks[receiver]
    far = _is_far(prog, senders, receivers)
    return Pairs(phase, leg, sender, receiver, beyond, far, nbytes)


_PairShape: TypeAlias = tuple[int, int, int, int, int]
"""The numbers of phases, legs, senders, receivers, and ranks beyond."""


def _sum_lines(prog: Program, ranks: Ints, shape: _PairShape) -> tuple[Ints, Ints]:
    """The distinct (phase, hop, sender, receiver, beyond) of all lines, and the bytes of each. Each is coded as its
    place in a table of this shape; ranks are places in `ranks`, the program's ranks, ascending."""
    empty = np.zeros(0, np.int64)
    codes = [empty]
    sizes = [empty]
    # Each bundle of lines is summed first, so that memory grows with pairs and not with streams.
    for bundle in list_bundles(prog.legs):
        code, nbytes = _sum_streams(prog, bundle.streams, ranks, shape)
        codes.append(code)
        sizes.append(nbytes)
    return _sum_by_code(np.concatenate(codes), np.concatenate(sizes))


def _sum_streams(
    prog: Program, streams: Streams, ranks: Ints, shape: _PairShape
) -> tuple[Ints, Ints]:
    """The same as `_sum_lines`, of these streams."""
    phase = prog.legs.lines.addend[streams.block]
    sender, receiver = _find_places(ranks, streams)
    # In legs without a rank beyond, `beyond` is 0, and any place may stand for it.
    beyond = np.searchsorted(ranks, streams.beyond)
    place = phase, streams.leg - 1, sender, receiver, beyond
    code = np.ravel_multi_index(place, shape)
    return _sum_by_code(code, streams.hi - streams.lo)


def _count_phases(prog: Program) -> int:
    """The number of addends that are folded one after the other."""
    addend = prog.legs.lines.addend
    return int(addend.max(initial=0)) + 1


def _find_places(ranks: Ints, streams: Streams) -> tuple[Ints, Ints]:
    """The places of senders and receivers among all ranks."""
    sender = np.searchsorted(ranks, streams.sender)
    receiver = np.searchsorted(ranks, streams.receiver)
    return sender, receiver


def _is_far(prog: Program, sender: Ints, receiver: Ints) -> Bools:
    """Whether these ranks are on different nodes."""
    per_node = prog.topology.ranks_per_node
    far: Bools = sender // per_node != receiver // per_node
    return far


def _sum_by_code(code: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """The distinct codes, ascending, and the sum of each code's bytes."""
    order = np.argsort(code, kind="stable")
    code = code[order]
    alike = Offsets.of_sorted(code)
    first = alike.first[:-1]
    return code[first], alike.sums(nbytes[order])


def sum_leg_loads(prog: Program, pairs: Pairs) -> Loads:
    """Add up the rows of `pairs` into an array of byte counts, with indices [partial value, lag, place of a rank in
    `prog.ranks`, link]. The lag of a hop is how many slots later than the first hop it sends. Links 0 and 1
    are bytes sent and received inside a node, links 2 and 3 bytes sent to and received from other nodes."""
    shape = _count_phases(prog), count_lags(prog.legs), len(prog.ranks), LINKS
    loads = np.zeros(shape, np.int64)
    lag = find_lags(prog.legs, pairs.leg + 1)
    out_link = 2 * pairs.far
    in_link = out_link + 1
    sent = pairs.phase, lag, pairs.sender, out_link
    received = pairs.phase, lag, pairs.receiver, in_link
    np.add.at(loads, sent, pairs.nbytes)
    np.add.at(loads, received, pairs.nbytes)
    return loads


def count_messages(pairs: Pairs, turns: int, ranks: int) -> Ints:
    """Return an array of shape (`turns`, `ranks`): how many messages each rank sends and receives in each turn, added
    up. In hop h, counted from 0, ranks number r and s exchange messages in turn (r + s + 2 * `ranks` * h) % `turns`.

    There is one message for each leg and peer in each direction, whatever the phase, and in legs of mates one for each
    rank beyond.
    """
    # One number for (leg, sender, receiver, beyond).
    from_sender = pairs.leg * ranks + pairs.sender
    code = (from_sender * ranks + pairs.receiver) * ranks + pairs.beyond
    _, first = np.unique(code, return_index=True)
    sender = pairs.sender[first]
    receiver = pairs.receiver[first]
    leg = pairs.leg[first] + 1  # `turn_of` counts legs from 1
    places = sender + receiver
    turn = turn_of(places, leg, ranks) % turns
    counts = np.zeros((turns, ranks), np.int64)
    np.add.at(counts, (turn, sender), 1)
    np.add.at(counts, (turn, receiver), 1)
    return counts


def sum_round_loads(prog: Program) -> Loads:
    """Return how many bytes each rank sends and receives, as an array [partial value, time slot, turn, rank, link]; in
    one turn of a time slot, a rank exchanges messages with some of its peers. Links 0 and 1 are bytes sent and received
    inside a node, links 2 and 3 bytes sent to and received from other nodes.

    Bytes are exact, slice by slice. The latest loads are cached with the legs: a program that is scheduled is often
    certified and proved next.
    """
    rounds = prog.slots, prog.weights, prog.turns, prog.topology.ranks_per_node, prog.ranks
    batches, cached = prog.legs._loads.get(rounds, (None, None))
    if cached is not None and batches is prog.plan.batches:
        return cached
    loads = _sum_rounds(prog)
    loads.setflags(write=False)
    prog.legs._loads.clear()
    prog.legs._loads[rounds] = prog.plan.batches, loads
    return loads


def _sum_rounds(prog: Program) -> Loads:
    """Bytes by phase, slot, turn, rank and link, slice by slice; of large lines that are alike, one is counted."""
    ranks = np.array(prog.ranks, np.int64)
    phases = _count_phases(prog)
    # The last slot's slices are relayed in the slots after it.
    slots = prog.slots + count_lags(prog.legs) - 1
    shape = phases, slots, prog.turns, len(ranks), LINKS
    loads = np.zeros(math.prod(shape), np.int64)
    # The distance of each slot from the first slot, in the flat table.
    width = math.prod(shape[2:])
    slot_offset = width * np.arange(prog.slots)
    counted: _Counted = {}
    for bundle in list_bundles(prog.legs):
        streams_of_small, large_lines = _divide_by_size(bundle, prog.slots)
        codes = _code_ends(prog, streams_of_small, ranks, shape)
        for place, nbytes in _list_ends(prog, streams_of_small, codes, slot_offset):
            np.add.at(loads, place, nbytes)
        for line in large_lines:
            streams = list_streams(prog.legs, line)
            codes = _code_ends(prog, streams, ranks, shape)
            # Of lines alike, each begins at another slot.
            rotated_offset = slot_offset[rotate_slots(prog, np.arange(prog.slots), line)]
            for in_first_slot, by_slot in _count_line(prog, line, streams, codes, counted):
                place = in_first_slot[:, None] + rotated_offset
                # Flat, since `add.at` takes half as long if it has one dimension.
                np.add.at(loads, place.ravel(), by_slot.ravel())
    return loads.reshape(shape)


FEW_SLICES = 1 << 9
"""A line with at most this many slices is counted directly: to look for a line alike would take longer."""


def _divide_by_size(bundle: Bundle, slots: int) -> tuple[Streams, list[int]]:
    """The streams of all lines that have few slices, and the other lines."""
    by_line = Offsets(bundle.first)
    slices = by_line.counts() * slots
    is_small = slices <= FEW_SLICES
    is_in_small = by_line.spread(is_small)  # by stream
    small = Streams(*(column[is_in_small] for column in bundle.streams))
    large = bundle.lines[~is_small]
    return small, large.tolist()


def _list_ends(
    prog: Program, streams: Streams, codes: tuple[Ints, Ints], slot_offset: Ints
) -> Iterator[tuple[Ints, Ints]]:
    """(places in the table, bytes) of all slices, first as sent and then as received.

    `codes` are the places of the streams in the first slot, and `slot_offset` the distance of each slot from it.
    """
    slices = cut_streams(prog, streams)
    line = prog.legs.lines.blocks.owners_of(streams.block)
    slot = rotate_slots(prog, slices.slot, line[slices.stream])
    nbytes = slices.hi - slices.lo
    for code in codes:
        yield code[slices.stream] + slot_offset[slot], nbytes


_Counted: TypeAlias = dict[tuple[bytes, ...], list[Ints]]
"""By the description of a line (`_describe_line`): bytes by end and slot, as sent and as received. An end is one of the
line's distinct codes: a phase, leg, turn, rank and link."""

MOST_COUNTED = 64
"""Lines whose counts are kept for lines alike: if none are alike, keeping more would only take memory."""


def _count_line(
    prog: Program, line: int, streams: Streams, codes: tuple[Ints, Ints], counted: _Counted
) -> Iterator[tuple[Ints, Ints]]:
    """(distinct codes, bytes by code and slot) of a line, first as sent and then as received."""
    ends = [distinct(code) for code in codes]
    numbers = [which for _, which in ends]
    kind = _describe_line(prog, line, streams, numbers)
    tables = counted.get(kind)
    if tables is None:
        tables = _count_ends(prog, streams, ends)
        if len(counted) == MOST_COUNTED:
            counted.clear()
        counted[kind] = tables
    for (code, _), table in zip(ends, tables, strict=True):
        yield code, table


def _describe_line(
    prog: Program, line: int, streams: Streams, ends: list[Ints]
) -> tuple[bytes, ...]:
    """A key of everything on which the slices of a line, and the `ends` of its streams, depend."""
    demands = prog.legs.lines
    first_block, end_block = demands.first[line : line + 2].tolist()
    grid = make_grid(demands, prog.plan.batches)
    # Counted from the line's first block, since lines that are alike have different blocks.
    block = streams.block - first_block
    columns = [block, streams.lo, streams.hi, streams.root, *ends]
    described = [column.tobytes() for column in columns]
    return (*described, *grid.describe(first_block, end_block))


def _count_ends(prog: Program, streams: Streams, ends: list[tuple[Ints, Ints]]) -> list[Ints]:
    """Bytes by end and slot, as sent and as received; `ends` has for each the codes, and the index of each stream's."""
    slices = cut_streams(prog, streams)
    return [_count_slices(slices, prog.slots, index, len(codes)) for codes, index in ends]


def _count_slices(slices: Slices, slots: int, which: Ints, ends: int) -> Ints:
    """The bytes of these slices by end (as in `_Counted`) and slot; `which` has the number of each stream's end."""
    table = np.zeros((ends, slots), np.int64)
    place = which[slices.stream], slices.slot
    np.add.at(table, place, slices.hi - slices.lo)
    return table


def _code_ends(
    prog: Program, streams: Streams, ranks: Ints, shape: tuple[int, int, int, int, int]
) -> tuple[Ints, Ints]:
    """The places of the first slots of streams in a table of this shape: as sent, and as received."""
    sender, receiver = _find_places(ranks, streams)
    phase = prog.legs.lines.addend[streams.block]
    sum_of_places = sender + receiver
    turn = turn_of(sum_of_places, streams.leg, len(ranks)) % prog.turns
    slot = find_lags(prog.legs, streams.leg)
    # Links 0 and 1 are bytes sent and received inside a node, links 2 and 3 between nodes.
    out_link = 2 * _is_far(prog, streams.sender, streams.receiver)
    in_link = out_link + 1
    sent = phase, slot, turn, sender, out_link
    received = phase, slot, turn, receiver, in_link
    sent_code = np.ravel_multi_index(sent, shape)
    received_code = np.ravel_multi_index(received, shape)
    return sent_code, received_code


class RoundPairs(NamedTuple):
    """A table of messages: in round (`phase[i]`, `slot[i]`, `turn[i]`) and hop `leg[i]`, counted from 1, rank
    `sender[i]` sends `nbytes[i]` bytes to rank `receiver[i]`. `beyond` is as in Streams."""

    phase: Ints
    slot: Ints
    turn: Ints
    leg: Ints
    sender: Ints
    receiver: Ints
    beyond: Ints
    nbytes: Ints


def sum_round_pairs(prog: Program, some: Iterable[int]) -> RoundPairs:
    """List all messages that one of the ranks `some` sends or receives, in order of round, as RoundPairs: what
    `for_rank` lists, without pieces, and therefore for large programs too."""
    chosen = np.array(sorted(set(some)), np.int64)
    columns = [np.zeros((len(RoundPairs._fields), 0), np.int64)]
    for bundle in list_bundles(prog.legs):
        sender = np.isin(bundle.streams.sender, chosen)
        is_listed = sender | np.isin(bundle.streams.receiver, chosen)
        streams = Streams(*(column[is_listed] for column in bundle.streams))
        # Each bundle is summed first, so that memory grows with messages and not with slices.
        columns.append(_sum_alike(_cut_in_rounds(prog, streams)))
    return RoundPairs(*_sum_alike(np.hstack(columns)))


def _cut_in_rounds(prog: Program, streams: Streams) -> Ints:
    """The slices of streams, as the columns of RoundPairs."""
    ranks = np.array(prog.ranks, np.int64)
    slices = list_slices(prog, streams)
    phase = prog.legs.lines.addend[streams.block]
    sender, receiver = _find_places(ranks, streams)
    turn = turn_of(sender + receiver, streams.leg, len(ranks)) % prog.turns
    ends = streams.sender, streams.receiver, streams.beyond
    by_stream = np.stack((phase, turn, streams.leg, *ends))
    phase, turn, *others = by_stream[:, slices.stream]
    return np.stack((phase, slices.slot, turn, *others, slices.hi - slices.lo))


def _sum_alike(columns: Ints) -> Ints:
    """The distinct columns of this table, ascending, its last row (bytes) summed over equal ones."""
    *keys, nbytes = columns
    first, which = number_alike(keys)
    total = np.zeros(len(first), np.int64)
    np.add.at(total, which, nbytes)
    return np.vstack((columns[:-1, first], total))


def estimate_seconds(where: Topology, loads: Loads) -> float:
    """Estimate the seconds for rounds that follow each other on the cluster `where`. `loads` has the bytes per round,
    rank and link, and a round takes the time of its fullest link plus a latency.

    `loads` are bytes by (..., rank, link).
    """
    by_round = _time_fullest(where, loads)
    latency = where.latency_s * np.count_nonzero(by_round)
    return float(by_round.sum() + latency)


def time_links(where: Topology, loads: Loads) -> NDArray[np.float64]:
    """Return the seconds that each link takes for its bytes at the rates of `where`, as an array with the axes of
    `loads`."""
    near = where.intra_bytes_per_s
    far = where.inter_bytes_per_s
    rate = np.array([near, near, far, far])
    by_link: NDArray[np.float64] = loads / rate
    return by_link


def _time_fullest(where: Topology, loads: Loads) -> NDArray[np.float64]:
    """By round, the seconds that its fullest link takes."""
    by_link = time_links(where, loads)
    fullest: NDArray[np.float64] = by_link.max(axis=(-2, -1), initial=0.0)
    return fullest


def time_rounds(where: Topology, loads: Loads) -> NDArray[np.float64]:
    """Return the seconds at which each round begins and ends, as an array with axes (partial value, slice, group of
    peers, begin or end). A round sends one slice of one partial value to one group of peers; `loads` has its bytes.

    Empty rounds take no time. The last round ends at the time of `estimate_seconds`.
    """
    by_round = _time_fullest(where, loads)
    duration = by_round + where.latency_s * (by_round > 0)
    end = duration.cumsum().reshape(duration.shape)
    return np.stack((end - duration, end), axis=-1)


def estimate_slots(where: Topology, loads: Loads, slots: int) -> float:
    """Estimate the seconds for sending the bytes in `loads`, given by phase, lag, rank and link. The bytes of each lag
    are cut into `slots` equal parts, and the bytes of lag i + 1 run one part behind the bytes of lag i."""
    total = 0.0
    lags = loads.shape[1]
    few = min(slots, lags)
    for slot in range(few + lags - 1):
        in_flight = [lag for lag in range(lags) if 0 <= slot - lag < few]
        # Slots beyond the few are in the middle, when all hops are in flight: they take the same time.
        count = 1 + slots - few if len(in_flight) == lags else 1
        load = loads[:, in_flight].sum(axis=1)
        total += count * estimate_seconds(where, load / slots)
    return total
