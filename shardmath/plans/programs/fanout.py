"""Fan-out: the choice of relays, so that few bytes cross between nodes and no holder sends all copies.

1. By node: each byte enters a node once, each replica there receives one stripe, and spreads it.
2. Relays: if the holders' links are the bottleneck, nodes of the destination relay a share to
   other nodes. Only lines whose holders would send too much **shed** copies, evenly over
   the line's blocks (`shardmath.plans.flows.shedding` says how much).
3. Mates: if some holders' links are the bottleneck and other ranks of their nodes have room, these send
   a share of the lines. Only lines whose holders would send too much are shed to them.
4. The nodes that receive a block are divided into **classes** of equal size. A **plot** says which bytes of the
   block's content go straight from the holders to which classes; these relay them to the others.
5. Only integers decide, so every rank decides the same; the first leg's lines are cut by `flow`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from shardmath.base.arrays import Ints, Offsets, ranges
from shardmath.base.memo import memo
from shardmath.plans.balance import make_grid, share_lines
from shardmath.plans.demands import Demands
from shardmath.plans.flows.shedding import find_least_sent, shed_to_target
from shardmath.plans.plan import Plan
from shardmath.plans.programs.legs import (
    Bands,
    Legs,
    bundle,
    count_straight,
    list_nodes,
    measure_bands,
)
from shardmath.plans.programs.mates import (
    MateShares,
    add_mates,
    choose_mates,
    count_handed,
    find_far,
    find_most_taken_in,
)
from shardmath.plans.programs.streams import bundle_lines, list_straight

__all__ = ["Way", "find_legs"]


class Way(NamedTuple):
    """A way to route bytes. With `by_node`, they enter each node once, not once per rank. Busy holders leave bytes to
    nodes that have received them (`relays`), or to idle ranks of the same node (`mates`)."""

    by_node: bool
    relays: bool = False
    mates: bool = False


def find_legs(plan: Plan, demands: Demands, per_node: int, way: Way) -> Iterator[Legs]:
    """Yield the routes of all bytes in `demands` by this `way`, as one Legs, on nodes of `per_node` ranks. Yields
    nothing if the way has relays or mates and no sender needs them.

    Relays and mates that send nothing change nothing: the legs would equal the legs without them.
    """
    empty = np.zeros(0, np.int64)
    no_bands = Bands(*[empty] * 10)
    sharing = per_node if way.by_node else 1
    bare = Legs(demands, no_bands, sharing)
    node_sizes = _count_by_node(demands, sharing)
    shed_by_block = _choose_shed(demands, node_sizes) if way.relays else {}
    shares = choose_mates(plan, demands, node_sizes, per_node) if way.mates else None
    if (way.relays and not shed_by_block) or (way.mates and shares is None):
        return
    plots = _plot_blocks(demands, node_sizes, shed_by_block)
    legs = replace(bare, bands=_make_bands(plan, bare, node_sizes, plots))
    yield _cut_first_leg(plan, legs, node_sizes, shares)


@memo(2)
def _count_by_node(demands: Demands, sharing: int) -> list[list[int]]:
    """For each block, how many of its receivers are in each of their nodes of `sharing` ranks."""
    node_sizes: list[list[int]] = []
    all_lines = np.arange(len(demands.holders))
    receiver_counts = demands.blocks.sums(demands.count)
    # In bundles of lines, since handling all at once would take more memory.
    for lines in bundle(all_lines, receiver_counts):
        nodes = list_nodes(demands, sharing, lines)
        first = demands.first[lines[0]]
        end = demands.first[lines[-1] + 1]
        blocks = np.arange(first, end + 1)
        begin = np.searchsorted(nodes.block, blocks)
        sizes = nodes.size.tolist()
        places = itertools.pairwise(begin.tolist())
        node_sizes += [sizes[i:k] for i, k in places]
    return node_sizes


# Bytes relayed between nodes


def _choose_shed(demands: Demands, node_sizes: list[list[int]]) -> dict[int, int]:
    """By block that sheds some, the bytes of its copies to nodes that other nodes relay.

    The target is a load that some rank has in any case: the bytes that the fullest rank takes in, or those
    that the fullest holder sends if each byte leaves its holders once.
    """
    is_far = find_far(demands)
    node_counts = list(map(len, node_sizes))
    copies = np.array(node_counts, np.int64) * is_far
    is_sent = copies > 0
    sent_bytes = demands.nbytes * copies
    once_bytes = demands.nbytes * is_sent
    sent = demands.blocks.sums(sent_bytes).tolist()
    once = demands.blocks.sums(once_bytes).tolist()
    holders = [demands.held_by(line) for line in range(len(sent))]
    least_sent = find_least_sent(once, holders)
    most_taken_in = find_most_taken_in(demands, node_sizes, is_far)
    target = max(least_sent, most_taken_in)
    by_line = shed_to_target(sent, once, holders, target)
    return _divide_among_blocks(demands, copies.tolist(), by_line)


def _divide_among_blocks(demands: Demands, copies: list[int], by_line: list[int]) -> dict[int, int]:
    """By block that sheds some, its part of the bytes that its line sheds."""
    sizes = demands.nbytes.tolist()
    shed: dict[int, int] = {}
    for line, nbytes in enumerate(by_line):
        if not nbytes:
            continue
        first, end = demands.first[line : line + 2].tolist()
        can_shed = {}
        for block in range(first, end):
            if copies[block] > 1:
                can_shed[block] = sizes[block]
        shed |= _spread_evenly(can_shed, copies, nbytes)
    return shed


def _spread_evenly(sizes: dict[int, int], copies: list[int], nbytes: int) -> dict[int, int]:
    """The bytes that each block sheds: evenly over large ones, or over all if those do not suffice."""
    largest = max(sizes.values())
    # Those with at least a sixteenth of the largest block's bytes.
    large = [block for block, size in sizes.items() if 16 * size >= largest]
    for blocks in (large, sizes):
        room = {}
        for block in blocks:
            most_relayed = copies[block] - 1  # one copy has to come from the holders
            room[block] = most_relayed * sizes[block]
        total = sum(room.values())
        if total >= nbytes:
            return {block: free * nbytes // total for block, free in room.items()}
    return room  # all blocks together cannot shed `nbytes`, and each sheds what it can


# Bytes that go straight


class _PlotPart(NamedTuple):
    """From byte `at` on, a content goes straight to the `classes` classes of nodes from class `begin` on."""

    at: int
    begin: int
    classes: int


class _Plot(NamedTuple):
    """How nodes relay a content: the number of their classes, and the parts that go straight to some of them."""

    classes: int
    parts: tuple[_PlotPart, ...]


def _plot_blocks(
    demands: Demands, node_sizes: list[list[int]], shed: dict[int, int]
) -> list[_Plot]:
    """By block, how nodes relay its content. Most blocks are not relayed; `shed` has the bytes of copies that are."""
    # From byte 0 on, a content goes straight to its only class, of all nodes.
    all_straight = _Plot(1, (_PlotPart(0, 0, 1),))
    plots = [all_straight] * len(node_sizes)
    for block, nbytes in shed.items():
        copies = len(node_sizes[block])
        size = int(demands.nbytes[block])
        straight_bytes = copies * size - nbytes
        plots[block] = _plot_content(size, copies, straight_bytes)
    return plots


def _plot_content(size: int, nodes: int, straight: int) -> _Plot:
    """A plot in which `straight` bytes of all copies of a content go straight, and all nodes relay equally.

    It has the fewest classes of equal size of which at least one can be served straight: in a class with fewer
    nodes than others some node would relay twice as much. The content has one chunk per class; chunk c
    goes straight to d or d + 1 classes of nodes, from class c on.
    """
    copies = nodes * size
    options = (c for c in range(2, nodes + 1) if nodes % c == 0)
    classes = next(c for c in options if c * straight >= copies)
    # To serve one class straight takes `copies` / classes bytes, so `straight` bytes are enough for
    # d classes, and for one more behind the first `fewer` bytes of each chunk. All chunks together then lack
    # `fewer` * `nodes` bytes of what d + 1 classes take.
    d = classes * straight // copies
    d = min(d, classes - 1)
    # Both terms are times `classes`, so that no division rounds before the last.
    missing = (d + 1) * copies - straight * classes
    fewer = missing // (classes * nodes)
    parts = []
    for c in range(classes):
        at = c * size // classes
        end = (c + 1) * size // classes
        middle = min(at + fewer, end)
        if at < middle:
            parts.append(_PlotPart(at, c, d))
        if middle < end:
            parts.append(_PlotPart(middle, c, d + 1))
    return _Plot(classes, tuple(parts))


# Bands


class _BandKind(NamedTuple):
    """Everything on which the bands of a block depend; `replicas` are the sizes of its nodes."""

    size: int
    replicas: frozenset[int]
    plot: _Plot


_Stripe: TypeAlias = tuple[int, int, int, int, int]


def _make_bands(
    plan: Plan, legs: Legs, node_sizes: list[list[int]], plots: Sequence[_Plot]
) -> Bands:
    """The bands of all blocks: a new band begins at each part of a plot, and at each stripe. The columns are the fields
    of Bands of these names; block b has the plot `plots[b]`."""
    first, stripes = _list_bands(legs, node_sizes, plots)
    unsnapped_at, begin, count, place, span = stripes.T
    classes = [plot.classes for plot in plots]
    grid = make_grid(legs.lines, plan.batches)
    empty = np.zeros(0, np.int64)  # until `_cut_first_leg`
    return Bands(
        first=first,
        classes=np.array(classes, np.int64),
        at=grid.snapped(Offsets(first).owners(), unsnapped_at),
        begin=begin,
        count=count,
        place=place,
        span=span,
        start=empty,
        cut_first=empty,
        cuts=empty,
    )


def _list_bands(
    legs: Legs, node_sizes: list[list[int]], plots: Sequence[_Plot]
) -> tuple[Ints, Ints]:
    """The first band of each block, and a row for each band, not snapped yet.

    A row is `at` (before snapping), `begin`, `count`, `place` and `span` of Bands.
    """
    kinds, kind_of_block = _number_kinds(legs, node_sizes, plots)
    stripes: list[_Stripe] = []
    first = [0]
    for kind in kinds:
        stripes += _list_stripes(kind.size, kind.replicas, kind.plot.parts)
        first.append(len(stripes))
    table = np.array(stripes, np.int64)
    kind_bands = table.reshape(-1, 5)
    begin = np.array(first, np.int64)
    # Every block has the bands of its kind.
    row, block_of_row = ranges(begin[kind_of_block], begin[kind_of_block + 1])
    blocks = np.arange(len(kind_of_block) + 1)
    return np.searchsorted(block_of_row, blocks), kind_bands[row]


def _number_kinds(
    legs: Legs, node_sizes: list[list[int]], plots: Sequence[_Plot]
) -> tuple[list[_BandKind], Ints]:
    """The distinct kinds, which are few, and the number of each block's kind."""
    number_of_kind: dict[_BandKind, int] = {}
    numbers = []
    sizes = legs.lines.nbytes.tolist()
    for size, replica_counts, plot in zip(sizes, node_sizes, plots, strict=True):
        replicas = frozenset(replica_counts or [1])  # only its holders need a block without nodes
        kind = _BandKind(size, replicas, plot)
        numbers.append(number_of_kind.setdefault(kind, len(number_of_kind)))
    return list(number_of_kind), np.array(numbers, np.int64)


def _list_stripes(size: int, replicas: Set[int], parts: tuple[_PlotPart, ...]) -> list[_Stripe]:
    """The bands of a content, which begin at the stripes of each part of its plot, for nodes of these numbers of
    replicas.

    A band is: byte, first class, classes, place of its stripe in the part, span of the part.
    """
    ends = [part.at for part in parts[1:]]
    ends.append(size)
    stripes = []
    for (at, begin, classes), end in zip(parts, ends, strict=True):
        span = end - at
        for place in _list_borders(span, replicas):
            stripes.append((at + place, begin, classes, place, span))
    return stripes


def _list_borders(span: int, replicas: Set[int]) -> list[int]:
    """The places, ascending, where stripes of `span` bytes begin in nodes of any of these sizes."""
    # Bands begin at the stripes of nodes of every size, so that every stripe is whole bands.
    places = set()
    for count in replicas:
        for j in range(count):
            rounded_up = -(-j * span // count)
            places.add(rounded_up)
    return sorted(place for place in places if place < span)


# The first leg among holders


def _cut_first_leg(
    plan: Plan, legs: Legs, node_sizes: list[list[int]], shares: MateShares | None
) -> Legs:
    """The legs with the first leg's lines cut among their holders, and among the mates that have these shares."""
    lines = legs.lines
    bands_by_block = Offsets(legs.bands.first)
    block_of_band = bands_by_block.owners()
    copies = count_straight(legs.bands, block_of_band, node_sizes)
    # Bands are laid end to end, each as often as it goes straight; blocks and lines are sums of these.
    sizes = measure_bands(lines, legs.bands)
    band_bytes = sizes * copies
    block_bytes = bands_by_block.sums(band_bytes)
    length = lines.blocks.sums(block_bytes)
    start = lines.blocks.begin(block_bytes)
    handed = count_handed(shares, len(length))
    cut_first, cuts = share_lines(lines, (length - handed).tolist())
    if shares is not None:
        cut_first, cuts, mates = add_mates(cut_first, cuts, shares)
        legs = replace(legs, mates=mates)
    bands = replace(legs.bands, start=start, cut_first=cut_first, cuts=cuts)
    unsnapped_legs = replace(legs, bands=bands)
    snapped = _snap_cuts(plan, unsnapped_legs)
    bands = replace(bands, cuts=snapped)
    return replace(legs, bands=bands)


def _snap_cuts(plan: Plan, legs: Legs) -> Ints:
    """The cuts, each moved to the last place not after it where its content may be cut."""
    bands = legs.bands
    cuts = bands.cuts.copy()
    first = bands.cut_first[:-1]
    last = bands.cut_first[1:] - 1
    # The first cut of a line is its begin, 0, and the last one its end.
    is_cut = (last - first > 1) & (cuts[last] > 0)
    for lines in bundle_lines(legs, np.flatnonzero(is_cut)):
        inner, line = ranges(first[lines] + 1, last[lines])
        length = cuts[last[lines]]
        # Lines laid end to end, so that one search serves all.
        base = np.cumsum(length) - length
        at = cuts[inner]
        begin = base[line]
        snapped = _snap_places(plan, legs, lines, base, begin + at)
        # A cut at the very end of a line is after the last byte of its items, and stays there.
        is_end = at == length[line]
        cuts[inner] = np.where(is_end, at, snapped - begin)
    return cuts


def _snap_places(plan: Plan, legs: Legs, lines: Ints, base: Ints, at: Ints) -> Ints:
    """Places inside lines end to end, snapped to cuts of contents; `lines[i]` begins at place `base[i]`."""
    straight = list_straight(legs, lines)
    numbers = legs.lines.blocks.owners_of(straight.block)
    line = np.searchsorted(lines, numbers)
    begin_of_item = base[line] + straight.place
    item = np.searchsorted(begin_of_item, at, "right") - 1
    item_place = begin_of_item[item]
    begin_in_block = straight.begin[item]
    # A place at the very end of a line is behind its last item; the caller does not move it.
    inside = np.minimum(at - item_place, straight.size[item] - 1)
    grid = make_grid(legs.lines, plan.batches)
    snapped = grid.snapped(straight.block[item], begin_in_block + inside)
    # A row may begin before the item does.
    into_item: Ints = np.maximum(snapped - begin_in_block, 0)
    return item_place + into_item
