"""Streams: all that goes from rank to rank in the legs of a line.

1. A band goes straight from the holders to some of the nodes, to one **entry** rank in each. The
   entries of the other nodes get it from those entries. The rest of each node gets it from the
   entry of that node.
2. A stream is relayed as it came, so both ends of every leg cut it alike.
3. Leg 1 leaves the holders. Legs 2 and 3 are relayed: to other nodes, then inside a node. Where a
   node was served straight, what is relayed inside it is already leg 2.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets, ranges
from shardmath.base.memo import memo
from shardmath.programs.legs import Bands, Legs, Nodes, Streams, list_nodes

__all__ = ["Straight", "list_straight", "list_streams"]


class _Entries(NamedTuple):
    """Bands of blocks at their entries: bytes lo..hi-1 of the content of a block enter at a rank.

    `origin` is the number of the entry that a band comes through: its own where it comes straight
    from the holders. The rank is number `place` of the `size` ranks of its node, which begin at
    `start` of the line's.
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
    """All entries of these nodes, block by block and node by node.

    All at once: where many lines have many blocks, looking at each block takes seconds.
    """
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
    """What goes straight from the holders of a line.

    `size` bytes, from `place` on the line and from byte `begin` of the content of `block`, to entry
    number `entry` of the line.
    """

    entry: Ints
    block: Ints
    place: Ints
    begin: Ints
    size: Ints


def list_straight(legs: Legs, line: int) -> Straight:
    """What goes straight from the holders of a line, as it lies on the line."""
    entries = _list_entries(legs, list_nodes(legs.lines, legs.sharing, line))
    return _pick_straight(legs, entries)


def _pick_straight(legs: Legs, entries: _Entries) -> Straight:
    """Of the entries of a line, those that are served straight from the holders."""
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
    """All streams of a line: the first leg, and what is relayed of it.

    Counting loads and proving a program walk through all lines several times. Where lines are many,
    most have few streams, which are kept with the legs: a cache of the latest ones alone would lose
    each before it is asked for again.
    """
    found = legs._streams.get(line)
    if found is not None:
        return found
    found = _find_streams(legs, line)
    total = len(found.block) * len(legs.lines.holders)
    if total <= MOST_KEPT:
        legs._streams[line] = found
    return found


class _Roots(NamedTuple):
    """The streams of the first leg, entry by entry of where they go.

    Entry e of the line receives those from `first[e]` to `first[e + 1] - 1`.
    """

    streams: Streams
    first: Ints


@memo(512)
def _find_streams(legs: Legs, line: int) -> Streams:
    """The three legs: straight, to other nodes, inside nodes."""
    nodes = list_nodes(legs.lines, legs.sharing, line)
    entries = _list_entries(legs, nodes)
    roots = _leave_holders(legs, line, entries)
    to_nodes = _relay_to_nodes(entries, roots)
    inside_nodes = _relay_inside_nodes(entries, roots, nodes.ranks)
    columns = zip(roots.streams, to_nodes, inside_nodes, strict=True)
    return Streams(*map(np.concatenate, columns))


def _leave_holders(legs: Legs, line: int, entries: _Entries) -> _Roots:
    """What each holder of a line sends, by its cuts."""
    to = _pick_straight(legs, entries)
    holders = legs.lines.held_by(line)
    held = np.array(holders, np.int64)
    cuts = _find_cuts(legs.bands, line)
    holder, item, lo, hi = _cut_items(to, cuts, len(held))
    begin = to.begin[item]
    entry = to.entry[item]
    found = Streams(
        block=to.block[item],
        leg=np.ones_like(item),
        sender=held[holder],
        receiver=entries.rank[entry],
        lo=begin + lo,
        hi=begin + hi,
        root=np.arange(len(item)),
    )
    number = np.append(entries.number, len(entries.rank))
    first = np.searchsorted(entry, number)
    return _Roots(found, first)


def _find_cuts(bands: Bands, line: int) -> Ints:
    """Where the first leg of a line is cut, ends included."""
    first, end = bands.cut_first[line : line + 2].tolist()
    return bands.cuts[first:end]


def _cut_items(to: Straight, cuts: Ints, holders: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Holders, the items that each has a share of, and bytes lo..hi-1 of them that are its share."""
    holder, item = _find_holders(to, cuts, holders)
    place = to.place[item]
    begin = cuts[holder] - place
    end = cuts[holder + 1] - place
    lo = np.maximum(begin, 0)
    hi = np.minimum(end, to.size[item])
    # Some among the holders have no share.
    some = np.flatnonzero(lo < hi)
    return holder[some], item[some], lo[some], hi[some]


def _find_holders(to: Straight, cuts: Ints, holders: int) -> tuple[Ints, Ints]:
    """Which holder serves which item: all from that of its first byte to that of its last."""
    end = to.place + to.size
    first = np.searchsorted(cuts, to.place, "right") - 1
    last = np.searchsorted(cuts, end, "left")
    # Only in a wrong table are there bytes beyond the cuts: nobody sends them, and its proof
    # refuses it.
    most = min(holders, len(cuts) - 1)
    return ranges(np.maximum(first, 0), np.minimum(last, most))


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
        root=root,
    )
