"""Streams: all that goes from rank to rank in the legs of a line.

1. A band goes straight from the holders to some of the nodes, to one **entry** rank in each. The
   entries of the other nodes get it from those entries. The rest of each node gets it from the
   entry of that node.
2. A stream is relayed as it came, so both ends of every leg cut it alike.
3. Leg 1 leaves the holders. Legs 2 and 3 are relayed: to other nodes, then inside a node. Where a
   node was served straight, what is relayed inside it is already leg 2.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets, ranges
from shardmath.base.memo import memo
from shardmath.plans.demands import Ranks, list_receivers
from shardmath.programs.legs import Bands, Legs, Streams, group_receivers

__all__ = ["Straight", "list_straight", "list_streams"]


class _Entries(NamedTuple):
    """Bands of blocks at their entries: bytes lo..hi-1 of the content of a block enter at a rank.

    `origin` is the number of the entry that a band comes through: its own where it comes straight
    from the holders. `others` are the other ranks of its node.
    """

    block: Ints
    rank: Ints
    lo: Ints
    hi: Ints
    origin: Ints
    others: list[Ranks]

    @property
    def number(self) -> Ints:
        """The number of each entry."""
        return np.arange(len(self.rank))


def _list_entries(legs: Legs, line: int) -> _Entries:
    """All entries of a line, block by block and node by node."""
    first, end = legs.lines.first[line : line + 2].tolist()
    if _is_straight(legs, first, end):
        return _list_receivers(legs, line, first, end)
    none = np.zeros(0, np.int64)
    parts = [_Entries(none, none, none, none, none, [])]
    before = 0
    for block in range(first, end):
        groups = group_receivers(legs, line, block)
        if groups:
            part = _list_entries_of_block(legs, block, groups, before)
            before += len(part.rank)
            parts.append(part)
    return _join_entries(parts)


def _join_entries(parts: list[_Entries]) -> _Entries:
    """These entries one after the other."""
    *columns, others = zip(*parts, strict=True)
    block, rank, lo, hi, origin = map(np.concatenate, columns)
    joined = list(itertools.chain.from_iterable(others))
    return _Entries(block, rank, lo, hi, origin, joined)


def _is_straight(legs: Legs, first: int, end: int) -> bool:
    """Whether blocks first..end-1 go whole from the holders to every rank that asks for them."""
    bands = legs.bands
    begin = bands.first[first : end + 1]
    counts = np.diff(begin)
    if legs.sharing > 1 or np.any(counts != 1):
        return False
    place = bands.place[begin[:-1]]
    classes = bands.classes[first:end]
    has_relays = np.any(classes != 1)
    return not has_relays and not place.any()


def _list_receivers(legs: Legs, line: int, first: int, end: int) -> _Entries:
    """The entries of a line that goes straight: its receivers, all blocks at once.

    Where many lines have many blocks, looking at each block takes seconds.
    """
    receivers = [list_receivers(legs.lines, line, block) for block in range(first, end)]
    counts = list(map(len, receivers))
    block = np.arange(first, end).repeat(counts)
    ranks = list(itertools.chain.from_iterable(receivers))
    count = len(ranks)
    band = legs.bands.first[block]
    return _Entries(
        block=block,
        rank=np.array(ranks, np.int64),
        lo=legs.bands.at[band],
        hi=legs.lines.nbytes[block],
        origin=np.arange(count),
        others=[()] * count,
    )


def _list_entries_of_block(
    legs: Legs, block: int, groups: tuple[Ranks, ...], before: int
) -> _Entries:
    """The entries of a block, node by node; `before` entries of the line stand before them."""
    bands = legs.bands
    first, end = bands.first[block : block + 2].tolist()
    lo = bands.at[first:end]
    hi = np.append(lo[1:], legs.lines.nbytes[block])
    count = len(groups)
    if count > 1:
        lo = np.tile(lo, count)
        hi = np.tile(hi, count)
    rank = _pick_entries(bands, first, end, groups)
    origin = _find_origins(bands, block, count)
    return _Entries(
        block=np.full(rank.size, block),
        rank=rank,
        lo=lo,
        hi=hi,
        origin=origin.ravel() + before,
        others=_list_others(groups, rank.tolist()),
    )


def _pick_entries(bands: Bands, first: int, end: int, groups: tuple[Ranks, ...]) -> Ints:
    """The entry rank of the bands first..end-1 in each node, node by node."""
    sizes = list(map(len, groups))
    replicas = np.array(sizes, np.int64)[:, None]
    place = bands.place[first:end]
    span = bands.span[first:end]
    inside = place * replicas // span
    # Ranks of all nodes end to end: node i has those from start[i] on.
    in_order = list(itertools.chain.from_iterable(groups))
    ranks = np.array(in_order, np.int64)
    start = np.cumsum(replicas, axis=0) - replicas
    entry: Ints = ranks[start + inside]
    return entry.ravel()


def _find_origins(bands: Bands, block: int, nodes: int) -> Ints:
    """By node and band, the number of the entry through which the band comes."""
    first, end = bands.first[block : block + 2].tolist()
    width = end - first
    number = np.arange(nodes * width).reshape(nodes, width)
    classes = int(bands.classes[block])
    if classes == 1:
        return number
    begin = bands.begin[first:end]
    count = bands.count[first:end]
    node = _find_relays(begin, count, classes, nodes)
    origin: Ints = number[node, np.arange(width)]
    return origin


def _find_relays(begin: Ints, count: Ints, classes: int, nodes: int) -> Ints:
    """By node and band, the node whose entry the band comes through: its own where that is served
    straight."""
    node = np.arange(nodes)[:, None]
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


def _list_others(groups: tuple[Ranks, ...], entries: list[int]) -> list[Ranks]:
    """The other ranks of each entry's node."""
    bands = len(entries) // len(groups)
    others: list[Ranks] = []
    for i, group in enumerate(groups):
        first = i * bands
        for entry in entries[first : first + bands]:
            rest = tuple(rank for rank in group if rank != entry)
            others.append(rest)
    return others


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
    entries = _list_entries(legs, line)
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
    entries = _list_entries(legs, line)
    roots = _leave_holders(legs, line, entries)
    to_nodes = _relay_to_nodes(entries, roots)
    inside_nodes = _relay_inside_nodes(entries, roots)
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


def _relay_inside_nodes(entries: _Entries, roots: _Roots) -> Streams:
    """The streams from each entry to all other ranks of its node."""
    counts = list(map(len, entries.others))
    entry = entries.number.repeat(counts)
    others = list(itertools.chain.from_iterable(entries.others))
    receiver = np.array(others, np.int64)
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
