"""Streams: all that goes from rank to rank in the legs of lines.

1. A band goes straight from the holders to some of the nodes, to one **entry** rank in each. The
   entries of the other nodes get it from those entries. The rest of each node gets it from the
   entry of that node.
2. A stream is relayed as it came, so both ends of every leg cut it alike.
3. Leg 1 leaves the holders. Legs 2 and 3 are relayed: to other nodes, then inside a node. Where a
   node was served straight, what is relayed inside it is already leg 2.
4. Lines are looked at in bundles; those of a line are the same whatever it is bundled with.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets, join, lengths, ranges
from shardmath.base.memo import memo
from shardmath.plans.programs.legs import Bands, Bundle, Legs, Nodes, Streams, bundle, list_nodes
from shardmath.plans.stretches import find_lines

__all__ = ["Straight", "bundle_lines", "list_bundles", "list_straight", "list_streams"]


class _Entries(NamedTuple):
    """Bands of blocks at their entries: bytes lo..hi-1 of the content of a block enter at a rank.

    `origin` is the number of the entry that a band comes through: its own where it comes straight
    from the holders. The rank is number `place` of the `size` ranks of its node, which begin at
    `start` of those of all nodes.
    """

    block: Ints
    rank: Ints
    lo: Ints
    hi: Ints
    origin: Ints
    start: Ints
    size: Ints
    place: Ints

    @property
    def number(self) -> Ints:
        """The number of each entry."""
        return np.arange(len(self.rank))


def _list_entries(legs: Legs, nodes: Nodes) -> _Entries:
    """All entries of these nodes, block by block and node by node."""
    bands = legs.bands
    first = bands.first[nodes.block]
    end = bands.first[nodes.block + 1]
    band, node = ranges(first, end)
    block = nodes.block[node]
    size = nodes.size[node]
    start = nodes.start[node]
    stripe = bands.place[band] * size
    place = stripe // bands.span[band]
    # A band goes on to the next of its block, or to the end of the block.
    is_last = band + 1 == end[node]
    after = np.append(bands.at[1:], 0)
    nbytes = legs.lines.nbytes[block]
    return _Entries(
        block=block,
        rank=nodes.ranks[start + place],
        lo=bands.at[band],
        hi=np.where(is_last, nbytes, after[band]),
        origin=_find_origins(bands, nodes, node, band),
        start=start,
        size=size,
        place=place,
    )


def _find_origins(bands: Bands, nodes: Nodes, node: Ints, band: Ints) -> Ints:
    """By entry, which is a node and a band, the number of the entry through which the band comes."""
    block = nodes.block[node]
    own = nodes.number[node]
    relay = _find_relays(bands, block, band, own, nodes.total[node])
    # The nodes of a block stand together, each with all bands of the block.
    width = bands.first[block + 1] - bands.first[block]
    further = (relay - own) * width
    origin: Ints = np.arange(len(node)) + further
    return origin


def _find_relays(bands: Bands, block: Ints, band: Ints, node: Ints, nodes: Ints) -> Ints:
    """By entry, the node of the block whose entry the band comes through: its own where that is served straight."""
    classes = bands.classes[block]
    begin = bands.begin[band]
    count = bands.count[band]
    # How many classes after the first that is served straight a node's own class comes.
    turn = (node % classes - begin) % classes
    # Other classes divide themselves among those served straight. A node asks the one of that class
    # that stands where it stands in its own, or the last if that class has fewer nodes.
    relay_class = (begin + turn % count) % classes
    last = (nodes - 1 - relay_class) // classes
    place = np.minimum(node // classes, last)
    relay = relay_class + classes * place
    # Only in a wrong table, which its proof refuses, has the class no node at all.
    relay = np.maximum(relay, 0)
    is_straight = turn < count
    return np.where(is_straight, node, relay)


class Straight(NamedTuple):
    """What goes straight from the holders of lines.

    `size` bytes, from `place` on their line and from byte `begin` of the content of `block`, to
    entry number `entry`.
    """

    entry: Ints
    block: Ints
    place: Ints
    begin: Ints
    size: Ints


def list_straight(legs: Legs, lines: Ints) -> Straight:
    """What goes straight from the holders of lines, line by line, as it lies on them."""
    nodes = list_nodes(legs.lines, legs.sharing, lines)
    entries = _list_entries(legs, nodes)
    return _pick_straight(legs, entries)


def _pick_straight(legs: Legs, entries: _Entries) -> Straight:
    """Of the entries, those that are served straight from the holders."""
    entry = np.flatnonzero(entries.origin == entries.number)
    block = entries.block[entry]
    begin = entries.lo[entry]
    size = entries.hi[entry] - begin
    # Items of one block stand together.
    in_block = Offsets.of_sorted(block).begin(size)
    place = legs.bands.start[block] + in_block
    return Straight(entry, block, place, begin, size)


MOST_KEPT = 1 << 20
"""Streams that are kept with the legs of a program, 56 bytes each."""


def list_streams(legs: Legs, line: int) -> Streams:
    """All streams of a line: the first leg, and what is relayed of it."""
    together = _divide_lines(legs)
    number = bisect.bisect_right(together, line, key=_find_first) - 1
    found = _keep_bundle(legs, number)
    place = line - int(found.lines[0])
    first, end = found.first[place : place + 2].tolist()
    mine = slice(first, end)
    return Streams(*(column[mine] for column in found.streams))


def _find_first(lines: Ints) -> int:
    """The first of these lines."""
    return int(lines[0])


def list_bundles(legs: Legs, some: Ints | None = None) -> Iterator[Bundle]:
    """All streams, some lines at a time: of all bundles of lines, or of those with one of `some`."""
    together = _divide_lines(legs)
    wanted: Iterable[int] = range(len(together))
    if some is not None:
        first = np.array([lines[0] for lines in together], np.int64)
        found = np.searchsorted(first, some, "right") - 1
        wanted = np.unique(found).tolist()
    for number in wanted:
        yield _keep_bundle(legs, number)


def bundle_lines(legs: Legs, lines: Ints) -> list[Ints]:
    """The lines in bundles that have about as many streams each."""
    demands = legs.lines
    # About as many as receivers of bands, and one more for each cut among the holders.
    bands = Offsets(legs.bands.first).counts()
    received = demands.blocks.sums(demands.count * bands)
    holders = lengths(demands.sets)
    weights = received + holders[demands.holders]
    return bundle(lines, weights[lines])


@memo(8)
def _divide_lines(legs: Legs) -> list[Ints]:
    """All lines, in bundles."""
    count = len(legs.lines.holders)
    return bundle_lines(legs, np.arange(count))


def _keep_bundle(legs: Legs, number: int) -> Bundle:
    """The streams of a bundle of lines.

    Counting loads and proving a program walk through all lines several times. Where streams are
    few, they are kept with the legs: a cache of the latest ones alone would lose each before it is
    asked for again.
    """
    kept = legs._bundles.get(number)
    if kept is not None:
        return kept
    found = _find_bundle(legs, number)
    together = _divide_lines(legs)
    total = len(found.streams.block) * len(together)
    if total <= MOST_KEPT:
        legs._bundles[number] = found
    return found


@memo(32)
def _find_bundle(legs: Legs, number: int) -> Bundle:
    """The streams of a bundle of lines: line by line, those of a line leg by leg."""
    lines = _divide_lines(legs)[number]
    found = _find_streams(legs, lines)
    line = find_lines(legs.lines, found.block)
    order = np.argsort(line, kind="stable")
    in_order = line[order]
    end = lines[-1] + 1
    ends = np.append(lines, end)
    first = np.searchsorted(in_order, ends)
    streams = Streams(*(column[order] for column in found))
    return Bundle(lines, streams, first)


class _Roots(NamedTuple):
    """The streams of the first leg, entry by entry of where they go.

    Entry e receives those from `first[e]` to `first[e + 1] - 1`.
    """

    streams: Streams
    first: Ints


def _find_streams(legs: Legs, lines: Ints) -> Streams:
    """The three legs: straight, to other nodes, inside nodes."""
    nodes = list_nodes(legs.lines, legs.sharing, lines)
    entries = _list_entries(legs, nodes)
    roots = _leave_holders(legs, lines, entries)
    to_nodes = _relay_to_nodes(entries, roots)
    inside_nodes = _relay_inside_nodes(entries, roots, nodes.ranks)
    columns = zip(roots.streams, to_nodes, inside_nodes, strict=True)
    return Streams(*map(np.concatenate, columns))


def _leave_holders(legs: Legs, lines: Ints, entries: _Entries) -> _Roots:
    """What each holder of neighbouring lines sends, by its cuts."""
    to = _pick_straight(legs, entries)
    line = find_lines(legs.lines, to.block) - lines[0]
    holder, item, lo, hi = _cut_items(legs, lines, to, line)
    begin = to.begin[item]
    entry = to.entry[item]
    by_line = line[item]
    number = np.arange(len(item))
    found = Streams(
        block=to.block[item],
        leg=np.ones_like(item),
        sender=holder,
        receiver=entries.rank[entry],
        lo=begin + lo,
        hi=begin + hi,
        root=number - np.searchsorted(by_line, by_line),
    )
    ends = np.append(entries.number, len(entries.rank))
    first = np.searchsorted(entry, ends)
    return _Roots(found, first)


def _cut_items(legs: Legs, lines: Ints, to: Straight, line: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """Holders, the items that each has a share of, and bytes lo..hi-1 of them that are its share.

    Item i is on line `lines[line[i]]`.
    """
    # Lines laid end to end, so that one search serves all.
    numbers = np.arange(len(lines) + 1)
    on_lines = Offsets(np.searchsorted(line, numbers))
    length = on_lines.sums(to.size)
    base = np.cumsum(length) - length
    shares = _list_shares(legs, lines, base)
    place = base[line] + to.place
    end = place + to.size
    share, item = _find_shares(shares, line, place, end)
    begin = shares.begin[share] - place[item]
    end = shares.end[share] - place[item]
    lo = np.maximum(begin, 0)
    hi = np.minimum(end, to.size[item])
    # Some among the holders have no share.
    some = np.flatnonzero(lo < hi)
    holder = shares.holder[share]
    return holder[some], item[some], lo[some], hi[some]


class _Shares(NamedTuple):
    """What holders send of lines laid end to end: share i, a rank's, is bytes `begin[i]` to `end[i] - 1`.

    Line l has the shares from `first[l]` to `first[l + 1] - 1`, one for each of its holders.
    """

    first: Ints
    holder: Ints
    begin: Ints
    end: Ints


def _list_shares(legs: Legs, lines: Ints, base: Ints) -> _Shares:
    """The shares of lines, by their cuts; line `lines[i]` begins at `base[i]`."""
    demands = legs.lines
    bands = legs.bands
    held = list(map(demands.held_by, lines.tolist()))
    holders = lengths(held)
    begin = bands.cut_first[lines]
    pieces = bands.cut_first[lines + 1] - begin - 1
    # Only in a wrong table, which its proof refuses, are there fewer pieces than holders.
    counts = np.clip(pieces, 0, holders)
    cut, line = ranges(begin, begin + counts)
    of_line = Offsets.of_counts(holders)
    first = of_line.first[:-1]
    place, _ = ranges(first, first + counts)
    at = base[line]
    ranks = join(held)
    shares = Offsets.of_counts(counts)
    return _Shares(
        first=shares.first,
        holder=ranks[place],
        begin=at + bands.cuts[cut],
        end=at + bands.cuts[cut + 1],
    )


def _find_shares(shares: _Shares, line: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Which shares serve which items: all from that of its first byte to that of its last."""
    first = np.searchsorted(shares.begin, begin, "right") - 1
    last = np.searchsorted(shares.begin, end, "left")
    # Only in a wrong table are there bytes beyond the cuts: nobody sends them, and its proof
    # refuses it.
    first = np.maximum(first, shares.first[line])
    last = np.minimum(last, shares.first[line + 1])
    return ranges(first, last)


def _relay_to_nodes(entries: _Entries, roots: _Roots) -> Streams:
    """The streams of entries that have another origin, from that origin."""
    entry = np.flatnonzero(entries.origin != entries.number)
    origin = entries.origin[entry]
    sender = entries.rank[origin]
    receiver = entries.rank[entry]
    leg = np.full_like(entry, 2)
    return _relay(entries, roots, entry, sender, receiver, leg)


def _relay_inside_nodes(entries: _Entries, roots: _Roots, ranks: Ints) -> Streams:
    """The streams from each entry to all other ranks of its node; nodes are parts of `ranks`."""
    none = np.zeros_like(entries.size)
    other, entry = ranges(none, entries.size - 1)
    # Ranks from the entry's own place on come one later.
    place = other + (other >= entries.place[entry])
    receiver = ranks[entries.start[entry] + place]
    sender = entries.rank[entry]
    origin = entries.origin[entry]
    # One leg later where the entry had it from another node.
    leg = np.where(origin == entry, 2, 3)
    return _relay(entries, roots, entry, sender, receiver, leg)


def _relay(
    entries: _Entries, roots: _Roots, entry: Ints, sender: Ints, receiver: Ints, leg: Ints
) -> Streams:
    """The streams that reached the origin of each `entry`, relayed from sender to receiver."""
    origin = entries.origin[entry]
    root, which = ranges(roots.first[origin], roots.first[origin + 1])
    return Streams(
        block=roots.streams.block[root],
        leg=leg[which],
        sender=sender[which],
        receiver=receiver[which],
        lo=roots.streams.lo[root],
        hi=roots.streams.hi[root],
        root=roots.streams.root[root],
    )
