"""Fan-out: who relays what, so that few bytes cross between nodes and no holder sends all copies.

1. By node: each byte enters a node once, at one replica of it, a stripe each, and is spread there.
2. Relays: where what holders send is the bottleneck, nodes of the destination relay a share to
   other nodes. The target is a load that no rank can go below. Only lines whose holders would send
   more **shed** copies, as many as bring their holders down to it, evenly over the line's blocks.
3. All is decided by integers that every rank finds alike; the first leg's lines are cut by `flow`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets
from shardmath.flows.flow import Level, levels
from shardmath.plans.balance import grid, shared
from shardmath.plans.demands import Demands, Ranks
from shardmath.plans.plan import Plan
from shardmath.programs.streams import Bands, Legs, nodes, straight

__all__ = ["find_legs", "legs_as_cut"]


def find_legs(
    p: Plan, on: Demands, per_node: int, *, by_node: bool, relays: bool
) -> Iterator[Legs]:
    """The legs of one way to relay, by node and between nodes of `per_node` ranks.

    Yields nothing if `relays` would shed nothing: the legs would equal those without relays.
    """
    none = np.zeros(0, np.int64)
    bare = Legs(on, Bands(*[none] * 10), per_node if by_node else 1)
    groups = []
    for line, block in _list_blocks(on):
        groups.append([len(ranks) for ranks in nodes(bare, line, block)])
    shed = _choose_shed(on, groups) if relays else {}
    if relays and not shed:
        return
    plots = [_Plot(1, [_Part(0, 0, 1)])] * len(groups)
    for block, nbytes in shed.items():
        copies = len(groups[block])
        size = int(on.nbytes[block])
        plots[block] = _plot(size, copies, copies * size - nbytes)
    legs = replace(bare, bands=_make_bands(p, bare, groups, plots))
    yield _cut_first_leg(p, legs, groups)


def legs_as_cut(on: Demands) -> Legs:
    """The legs of lines that are cut already: everything straight, from the holders of the cuts."""
    count = len(on.nbytes)
    zero, one = np.zeros(count, np.int64), np.ones(count, np.int64)
    bands = Bands(
        first=np.arange(count + 1),
        classes=one,
        at=zero,
        begin=zero,
        count=one,
        place=zero,
        span=on.nbytes,
        start=on.start,
        cut_first=on.cut_first,
        cuts=on.cuts,
    )
    return Legs(on, bands, 1)


def _list_blocks(on: Demands) -> Iterator[tuple[int, int]]:
    """(line, block) of all blocks."""
    owners = on.blocks.owners().tolist()
    for block, line in enumerate(owners):
        yield line, block


# How much is relayed between nodes

CORRECTIONS = 6
"""How often at most the shares of lines are corrected to meet the target, each time by a max flow.

A correction takes load off the fullest holders, and the next flow may find others that are then the
fullest. Of 1,500 networks drawn at random none took more than three. A target that is missed costs
time, and nothing else.
"""


def _choose_shed(on: Demands, groups: list[list[int]]) -> dict[int, int]:
    """For each block that sheds some, the bytes of its node copies that other nodes relay.

    The target is what no rank can go below: what the fullest rank takes in, or what the fullest
    holder sends if each byte leaves its holders once.
    """
    is_far = on.blocks.spread(~on.near) & (on.addend == 0)
    copies = np.array(list(map(len, groups)), np.int64) * is_far
    once = on.blocks.sums(on.nbytes * (copies > 0)).tolist()
    sent = on.blocks.sums(on.nbytes * copies).tolist()
    held = [on.sets[i] for i in on.holders.tolist()]
    target = max(_least_sent(once, held), _most_taken_in(on, groups, is_far))
    wanted = _shed_to_target(sent, once, held, target)

    nodes_of_block = copies.tolist()
    shed: dict[int, int] = {}
    for line, nbytes in enumerate(wanted):
        if nbytes:
            first, end = on.first[line : line + 2].tolist()
            sizes = {b: int(on.nbytes[b]) for b in range(first, end) if nodes_of_block[b] > 1}
            shed |= _spread(sizes, nodes_of_block, nbytes)
    return shed


def _least_sent(once: list[int], held: list[Ranks]) -> int:
    """The least that the fullest holder sends if lines of these lengths leave their holders
    once."""
    found = levels(once, held)
    if not found:
        return 0
    fullest = found[0]
    return -(-fullest.nbytes // len(fullest.ranks))


def _most_taken_in(on: Demands, groups: list[list[int]], is_far: Bools) -> int:
    """The most bytes that a rank takes in from other nodes, each node taking every byte once.

    Receivers of far lines have no holder on their node, so all of them are on the wire.
    """
    total: dict[int, int] = {}
    sizes: dict[int, list[int]] = {}
    for b in np.flatnonzero(is_far).tolist():
        receivers = int(on.receivers[b])
        total[receivers] = total.get(receivers, 0) + int(on.nbytes[b])
        sizes[receivers] = groups[b]
    load: dict[int, Fraction] = {}
    for receivers, nbytes in total.items():
        # Receivers are ascending, so those of one node follow each other; each takes in a stripe.
        shares = [Fraction(nbytes, q) for q in sizes[receivers] for _ in range(q)]
        for rank, share in zip(on.sets[receivers], shares, strict=True):
            load[rank] = load.get(rank, Fraction(0)) + share
    return math.ceil(max(load.values(), default=Fraction(0)))


def _shed_to_target(
    copies: list[int], once: list[int], held: list[Ranks], target: int
) -> list[int]:
    """How much each line sheds so that no holder sends more than the target, or little more.

    Line i sends `copies[i]` bytes and cannot go below `once[i]`.
    """
    left = list(copies)
    for _ in range(CORRECTIONS):
        found = levels(left, held)
        high = [level for level in found if level.nbytes > target * len(level.ranks)]
        if not high:
            break
        for level, lines in zip(high, _group_by_level(high, held), strict=True):
            _shed_evenly(left, once, lines, target * len(level.ranks))
    return [a - b for a, b in zip(copies, left, strict=True)]


def _group_by_level(high: list[Level], held: list[Ranks]) -> list[list[int]]:
    """The lines of each of these levels: those that none of the levels below could take load of."""
    number = {rank: n for n, level in enumerate(high) for rank in level.ranks}
    lines: list[list[int]] = [[] for _ in high]
    for i, ranks in enumerate(held):
        lowest = max(number.get(rank, len(high)) for rank in ranks)
        if lowest < len(high):
            lines[lowest].append(i)
    return lines


def _shed_evenly(left: list[int], once: list[int], lines: list[int], room: int) -> None:
    """Shorten the lines together to `room` bytes, in proportion to what each can shed."""
    least = sum(once[i] for i in lines)
    over = sum(left[i] for i in lines) - least
    if over <= 0:
        return
    keep = min(max(room - least, 0), over)
    for i in lines:
        left[i] = once[i] + (left[i] - once[i]) * keep // over


def _spread(sizes: dict[int, int], copies: list[int], nbytes: int) -> dict[int, int]:
    """The bytes shed of each block: evenly over large ones, or over all if those do not suffice."""
    large = {b: size for b, size in sizes.items() if 16 * size >= max(sizes.values())}
    for some in (large, sizes):
        room = {b: (copies[b] - 1) * size for b, size in some.items()}
        total = sum(room.values())
        if total >= nbytes:
            return {b: free * nbytes // total for b, free in room.items()}
    return room


# What goes straight, and to whom


class _Part(NamedTuple):
    """From byte `at` of a content on, it goes straight to `classes` classes of nodes, from `begin`
    on."""

    at: int
    begin: int
    classes: int


class _Plot(NamedTuple):
    """How nodes relay a content: in how many classes they are, and what goes straight to which."""

    classes: int
    parts: list[_Part]


def _plot(size: int, nodes: int, straight: int) -> _Plot:
    """Parts in which `straight` bytes of all copies of a content go straight.

    All nodes get and relay the same. Classes are the fewest, of as many nodes each, of which one or
    more can be served straight: in a class with a node less than others one node would relay twice
    as much. Chunk c of the content goes straight to d classes of nodes, or d + 1, from class c on.
    """
    options = (c for c in range(2, nodes + 1) if nodes % c == 0)
    copies = nodes * size
    classes = next(c for c in options if c * straight >= copies)
    # To serve a class straight takes `copies` / classes bytes, so `straight` bytes are enough for
    # d classes, and for one more of what is left of each chunk after its first `fewer` bytes.
    d = min(classes * straight // copies, classes - 1)
    missing = (d + 1) * copies - straight * classes
    fewer = missing // (classes * nodes)
    parts = []
    for c in range(classes):
        at = c * size // classes
        end = (c + 1) * size // classes
        middle = min(at + fewer, end)
        if at < middle:
            parts.append(_Part(at, c, d))
        if middle < end:
            parts.append(_Part(middle, c, d + 1))
    return _Plot(classes, parts)


# Bands


def _make_bands(p: Plan, legs: Legs, groups: list[list[int]], plots: Sequence[_Plot]) -> Bands:
    """Bands of all blocks: a new one where a part of the plot begins or a stripe does."""
    rows: list[tuple[int, int, int, int, int, int]] = []
    for b, (sizes, plot) in enumerate(zip(groups, plots, strict=True)):
        nbytes = int(legs.lines.nbytes[b])
        for band in _list_stripes(nbytes, set(sizes) or {1}, plot.parts):
            rows.append((b, *band))
    block, wanted, begin, count, place, span = np.array(rows, np.int64).reshape(-1, 6).T
    where = grid(legs.lines, p.batches)
    blocks = np.arange(len(groups) + 1)
    none = np.zeros(0, np.int64)
    return Bands(
        first=np.searchsorted(block, blocks),
        classes=np.array([plot.classes for plot in plots], np.int64),
        at=where.snapped(block, wanted),
        begin=begin,
        count=count,
        place=place,
        span=span,
        start=none,
        cut_first=none,
        cuts=none,
    )


def _list_stripes(
    size: int, replicas: set[int], parts: list[_Part]
) -> Iterator[tuple[int, int, int, int, int]]:
    """The bands of a content, each part in stripes for nodes of so many replicas each.

    A band is: byte, first class, classes, place, span.
    """
    ends = [part.at for part in parts[1:]] + [size]
    for (at, begin, classes), end in zip(parts, ends, strict=True):
        span = end - at
        # A node of q replicas has stripes from the ceilings of j * span / q on. Bands
        # begin at the stripes of nodes of every size, so that every stripe is whole bands.
        places = {-(-j * span // q) for q in replicas for j in range(q)}
        for place in sorted(places):
            if place < span:
                yield at + place, begin, classes, place, span


# The first leg among holders


def _cut_first_leg(p: Plan, legs: Legs, groups: list[list[int]]) -> Legs:
    """The same with the first leg's lines cut among their holders."""
    on, bands = legs.lines, legs.bands
    block = Offsets(bands.first).owners()
    copies = _count_straight_nodes(bands, block, groups)
    # Bands laid end to end, each as often as it goes straight: where blocks and lines begin there.
    sent = Offsets(bands.first).sums(_measure_bands(on, bands) * copies)
    length = on.blocks.sums(sent)
    cut_first, cuts = shared(on, length.tolist())
    start = on.blocks.begin(sent)
    cut = replace(legs, bands=replace(bands, start=start, cut_first=cut_first, cuts=cuts))
    snapped = _snap_cuts(p, cut)
    return replace(cut, bands=replace(cut.bands, cuts=snapped))


def _measure_bands(on: Demands, bands: Bands) -> Ints:
    """The size of each band: up to the next one of its block, or to the end of the block."""
    size = np.diff(bands.at, append=0)
    last = bands.first[1:] - 1
    size[last] = on.nbytes - bands.at[last]
    return size


def _count_straight_nodes(bands: Bands, block: Ints, groups: list[list[int]]) -> Ints:
    """To how many nodes each band goes straight."""
    nodes = np.array([len(sizes) for sizes in groups], np.int64)[block]
    classes = bands.classes[block]
    out = np.zeros(len(block), np.int64)
    for i in range(int(bands.count.max(initial=0))):
        # Of the nodes, every `classes`-th from node number `kind` on is in that class.
        kind = (bands.begin + i) % classes
        in_class = (nodes - kind + classes - 1) // classes
        out += np.where(i < bands.count, in_class, 0)
    return out


def _snap_cuts(p: Plan, legs: Legs) -> Ints:
    """The cuts at the last places not after them where contents may be cut."""
    bands = legs.bands
    cuts = bands.cuts.copy()
    for line, (a, b) in enumerate(itertools.pairwise(bands.cut_first.tolist())):
        is_cut = b - a > 2 and cuts[b - 1]
        if is_cut:
            inner = slice(a + 1, b - 1)
            cuts[inner] = _snap_cuts_of_line(p, legs, line, cuts[inner])
    return cuts


def _snap_cuts_of_line(p: Plan, legs: Legs, line: int, cuts: Ints) -> Ints:
    """The cuts inside one line, snapped."""
    to = straight(legs, line)
    item = np.searchsorted(to.place, cuts, "right") - 1
    block, place, begin, size = (x[item] for x in (to.block, to.place, to.begin, to.size))
    # A cut at the very end of the line is after the last byte of its item, and stays there.
    inside = np.minimum(cuts - place, size - 1)
    content = begin + inside
    snapped = grid(legs.lines, p.batches).snapped(block, content)
    is_end = cuts >= place + size
    return np.where(is_end, cuts, place + np.maximum(snapped - begin, 0))
