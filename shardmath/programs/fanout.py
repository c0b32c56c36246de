"""Fan-out: who passes on what, so that few bytes cross between nodes and no holder sends all copies.

1. By node: each byte enters a node once, at one replica of it, a stripe each, and is spread there.
2. Relays: where what holders send is the bottleneck, nodes of the destination pass a share on to other nodes. The
   target is a load that no rank can go below; only lines whose holders would send more shed copies, as many as bring
   their holders down to it, evenly over the line's blocks.
3. All is decided by integers that every rank finds alike; the first leg's lines are cut by `flow`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from shardmath.base.arrays import Bools, Ints
from shardmath.flows.flow import levels
from shardmath.plans.balance import grid, shared
from shardmath.plans.demands import Lines, Ranks
from shardmath.plans.plan import Plan
from shardmath.programs.program import Bands, Legs, nodes, straight

__all__ = ["as_cut", "passed_on"]


def passed_on(p: Plan, on: Lines, per_node: int, *, by_node: bool, relays: bool) -> Iterator[Legs]:
    """The legs of one way to pass on, by node and between nodes of `per_node` ranks; none where `relays` find nothing
    to shed, as then there are no others than without."""
    none = np.zeros(0, np.int64)
    bare = Legs(on, Bands(*[none] * 10), per_node if by_node else 1)
    groups = [[len(ranks) for ranks in nodes(bare, line, b)] for line, b in _blocks(on)]
    plots: list[Plot] = [(1, [(0, 0, 1)])] * len(groups)
    shed = _shed(on, groups) if relays else {}
    for b, nbytes in shed.items():
        plots[b] = _plot(
            int(on.nbytes[b]), len(groups[b]), len(groups[b]) * int(on.nbytes[b]) - nbytes
        )
    if shed or not relays:
        yield _cut(p, replace(bare, bands=_bands(p, bare, groups, plots)), groups)


def as_cut(on: Lines) -> Legs:
    """The legs of lines that are cut already: everything straight, from the holders that the cuts say."""
    count = len(on.nbytes)
    zero, one = np.zeros(count, np.int64), np.ones(count, np.int64)
    bands = Bands(
        np.arange(count + 1), one, zero, zero, one, zero, on.nbytes, on.start, on.cut_first, on.cuts
    )
    return Legs(on, bands, 1)


def _blocks(on: Lines) -> Iterator[tuple[int, int]]:
    """(line, block) of all blocks."""
    return (
        (line, b)
        for line in range(len(on.holders))
        for b in range(int(on.first[line]), int(on.first[line + 1]))
    )


# what is passed on between nodes


def _shed(on: Lines, groups: list[list[int]]) -> dict[int, int]:
    """By block, how many bytes of its copies to nodes others of these are to pass on.

    The target is what no rank can go below: what the fullest takes in, or sends if each byte leaves its holders once.
    """
    line = np.repeat(np.arange(len(on.holders)), np.diff(on.first))
    far = ~on.near[line] & (on.addend == 0)
    copies = np.where(far, [len(sizes) for sizes in groups], 0)
    once = _by_line(on, np.where(copies > 0, on.nbytes, 0))
    held = [on.sets[i] for i in on.holders.tolist()]
    least = max(
        [x.nbytes / Fraction(len(x.ranks)) for x in levels(once, held)[:1]], default=Fraction(0)
    )
    target = max(math.ceil(least), _taken_in(on, groups, far))
    wanted = _within_target(_by_line(on, on.nbytes * copies), once, held, target)
    shed: dict[int, int] = {}
    for at, nbytes in enumerate(wanted):
        if nbytes:
            blocks = range(int(on.first[at]), int(on.first[at + 1]))
            shed |= _spread(
                {b: int(on.nbytes[b]) for b in blocks if copies[b] > 1}, copies.tolist(), nbytes
            )
    return shed


def _by_line(on: Lines, sizes: Ints) -> list[int]:
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    out: list[int] = (ends[on.first[1:]] - ends[on.first[:-1]]).tolist()
    return out


def _taken_in(on: Lines, groups: list[list[int]], far: Bools) -> int:
    """The most bytes that a rank takes in from other nodes, each node taking every byte once.

    Receivers of far lines have no holder on their node, so all of them are on the wire.
    """
    total: dict[int, int] = {}
    sizes: dict[int, list[int]] = {}
    for b in np.flatnonzero(far).tolist():
        receivers = int(on.receivers[b])
        total[receivers] = total.get(receivers, 0) + int(on.nbytes[b])
        sizes[receivers] = groups[b]
    load: dict[int, Fraction] = {}
    for receivers, nbytes in total.items():
        shares = (Fraction(nbytes, q) for q in sizes[receivers] for _ in range(q))
        for rank, share in zip(on.sets[receivers], shares, strict=True):
            load[rank] = load.get(rank, Fraction(0)) + share
    return math.ceil(max(load.values(), default=Fraction(0)))


def _within_target(copies: list[int], once: list[int], held: list[Ranks], target: int) -> list[int]:
    """How much each line sheds so that no holder sends more than the target, as nearly as a few corrections get."""
    left = list(copies)
    for _ in range(6):
        high = [x for x in levels(left, held) if x.nbytes > target * len(x.ranks)]
        if not high:
            break
        number = {rank: n for n, x in enumerate(high) for rank in x.ranks}
        own = [max(number.get(rank, len(high)) for rank in ranks) for ranks in held]
        for n, x in enumerate(high):
            some = [i for i, at in enumerate(own) if at == n]
            least = sum(once[i] for i in some)
            over = sum(left[i] for i in some) - least
            keep = max(target * len(x.ranks) - least, 0)
            for i in some if over > 0 else ():
                left[i] = once[i] + (left[i] - once[i]) * min(keep, over) // over
    return [a - b for a, b in zip(copies, left, strict=True)]


def _spread(sizes: dict[int, int], copies: list[int], nbytes: int) -> dict[int, int]:
    """The bytes shed of each block: evenly over the large ones, or over all where that is not enough."""
    large = {b: size for b, size in sizes.items() if 16 * size >= max(sizes.values())}
    for some in (large, sizes):
        room = {b: (copies[b] - 1) * size for b, size in some.items()}
        total = sum(room.values())
        if total >= nbytes:
            return {b: free * nbytes // total for b, free in room.items()}
    return room


def _plot(size: int, count: int, straight: int) -> Plot:
    """Bands in which `straight` bytes of `count` copies of a content go straight: all nodes get and pass on the same.

    Classes are the fewest, of as many nodes each, of which one or more can be served straight: in a class with a node
    less than others one node would pass on twice as much. Chunk c goes straight to d classes of nodes, or d + 1, that
    begin with class c.
    """
    classes = next(
        c for c in range(2, count + 1) if count % c == 0 and c * straight >= count * size
    )
    d = min(classes * straight // (count * size), classes - 1)
    less = ((d + 1) * size * count - straight * classes) // (classes * count)
    plot = []
    for c in range(classes):
        at, end = c * size // classes, (c + 1) * size // classes
        marks = ((at, c, d), (min(at + less, end), c, d + 1), (end, 0, 0))
        plot += [one for one, after in itertools.pairwise(marks) if one[0] < after[0]]
    return classes, plot


# bands


Plot: TypeAlias = tuple[int, list[tuple[int, int, int]]]
"""How nodes pass on a content: number of classes, and (byte, first class, classes) of what goes straight."""


def _bands(p: Plan, legs: Legs, groups: list[list[int]], plots: Sequence[Plot]) -> Bands:
    """Bands of all blocks: a new one where the plot changes or a stripe does."""
    rows = [
        (b, *band)
        for b, (sizes, (_, plot)) in enumerate(zip(groups, plots, strict=True))
        for band in _striped(int(legs.lines.nbytes[b]), set(sizes) or {1}, plot)
    ]
    block, wanted, begin, count, place, span = np.array(rows, np.int64).reshape(-1, 6).T
    first = np.searchsorted(block, np.arange(len(groups) + 1))
    at = grid(legs.lines, p.batches).snapped(block, wanted)
    classes, none = np.array([n for n, _ in plots], np.int64), np.zeros(0, np.int64)
    return Bands(first, classes, at, begin, count, place, span, none, none, none)


def _striped(
    size: int, replicas: set[int], plot: list[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int, int, int]]:
    """The bands of a plot, each in stripes for nodes of several replicas: byte, first class, classes, place, span."""
    ends = [at for at, _, _ in plot[1:]] + [size]
    for (at, begin, count), end in zip(plot, ends, strict=True):
        span = end - at
        for place in sorted({-(-j * span // q) for q in replicas for j in range(q)}):
            if place < span:
                yield at + place, begin, count, place, span


def _cut(p: Plan, legs: Legs, groups: list[list[int]]) -> Legs:
    """The same with the first leg's lines cut among their holders."""
    on, bands = legs.lines, legs.bands
    size = np.diff(bands.at, append=0)
    size[bands.first[1:] - 1] = on.nbytes - bands.at[bands.first[1:] - 1]
    block = np.repeat(np.arange(len(groups)), np.diff(bands.first))
    ends = np.concatenate(
        (np.zeros(1, np.int64), np.cumsum(size * _straight_nodes(bands, block, groups)))
    )
    begin = ends[bands.first[:-1]]
    line = np.repeat(np.arange(len(on.holders)), np.diff(on.first))
    start = begin - begin[on.first[:-1]][line]
    total = (ends[bands.first[on.first[1:]]] - begin[on.first[:-1]]).tolist()
    first, cuts = shared(on, total)
    whole = replace(legs, bands=replace(bands, start=start, cut_first=first, cuts=cuts))
    return replace(whole, bands=replace(whole.bands, cuts=_snapped(p, whole)))


def _straight_nodes(bands: Bands, block: Ints, groups: list[list[int]]) -> Ints:
    """To how many nodes each band goes straight."""
    count = np.array([len(sizes) for sizes in groups], np.int64)[block]
    classes = bands.classes[block]
    out = np.zeros(len(block), np.int64)
    for i in range(int(bands.count.max(initial=0))):
        kind = (bands.begin + i) % classes
        out += np.where(i < bands.count, (count - kind + classes - 1) // classes, 0)
    return out


def _snapped(p: Plan, legs: Legs) -> Ints:
    """The cuts at the last places not after them where contents may be cut."""
    cuts = legs.bands.cuts.copy()
    for line, (a, b) in enumerate(itertools.pairwise(legs.bands.cut_first.tolist())):
        if b - a > 2 and cuts[b - 1]:
            block, pos, lo, size = straight(legs, line)
            inner = cuts[a + 1 : b - 1]
            at = np.searchsorted(pos, inner, "right") - 1
            content = lo[at] + inner - pos[at]
            cut = grid(legs.lines, p.batches).snapped(
                block[at], np.minimum(content, lo[at] + size[at] - 1)
            )
            whole = inner >= pos[at] + size[at]
            cuts[a + 1 : b - 1] = np.where(whole, inner, pos[at] + np.maximum(cut - lo[at], 0))
    return cuts
