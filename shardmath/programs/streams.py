"""Streams: what goes from rank to rank, straight from holders and relayed by those that received
it.

1. The content of a block is cut into **bands**. A band goes straight from the holders to some of
   the nodes, to one **entry** rank in each. The entries of the other nodes get it from those
   entries. The rest of each node gets it from the entry of that node.
2. The first leg is cut among the holders as lines are. What goes from one rank to another is a
   **stream**. A stream is relayed as it came, so both ends of every leg cut it alike.
3. Leg 1 leaves the holders. Legs 2 and 3 are relayed: to other nodes, then inside a node. Where a
   node was served straight, what is relayed inside it is already leg 2.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets, ranges
from shardmath.base.memo import memo
from shardmath.plans.demands import Demands, Ranks, wire

__all__ = ["Bands", "Legs", "Straight", "Streams", "nodes", "nodes_of", "straight", "streams"]


@dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """How the content of each block is cut, and the first leg among senders.

    Block b has the bands `first[b]..first[b+1]-1` and divides its nodes into `classes[b]` classes,
    node i into class i modulo that. Band i begins at byte `at[i]` of the content and goes straight
    to the `count[i]` classes from `begin[i]` on; in a node of q ranks its entry is the one at
    `place[i] * q // span[i]`. On the line of the first leg block b begins at byte `start[b]`, and
    holder h of line l sends from `cuts[cut_first[l] + h]` to the next cut.
    """

    first: Ints
    classes: Ints
    at: Ints
    begin: Ints
    count: Ints
    place: Ints
    span: Ints
    start: Ints
    cut_first: Ints
    cuts: Ints


class Streams(NamedTuple):
    """What goes from rank to rank in one leg: bytes lo..hi-1 of the content of a block.

    Streams with one `root` are one stream of the first leg and what is relayed of it.
    """

    block: Ints
    leg: Ints
    sender: Ints
    receiver: Ints
    lo: Ints
    hi: Ints
    root: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Legs:
    """Who sends what to whom, and what is relayed: lines of a plan and their bands.

    Groups of `sharing` ranks share what enters them: nodes, or 1 where every rank is served by
    itself.
    """

    lines: Demands
    bands: Bands
    sharing: int
    _streams: dict[int, Streams] = field(default_factory=dict, init=False, repr=False)


@memo()
def nodes_of(ranks: Ranks, per_node: int) -> tuple[Ranks, ...]:
    """The ranks by node of `per_node` ranks, in order."""
    by_node = itertools.groupby(ranks, lambda rank: rank // per_node)
    return tuple(tuple(group) for _, group in by_node)


def nodes(legs: Legs, line: int, block: int) -> tuple[Ranks, ...]:
    """The receivers of a block by what shares what enters: nodes, or every rank by itself."""
    # A later addend is folded on top of the first, and cannot be relayed from there.
    alone = legs.lines.near[line] or legs.lines.addend[block]
    return nodes_of(wire(legs.lines, line, block), 1 if alone else legs.sharing)


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


def _list_entries(legs: Legs, line: int) -> _Entries:
    """All entries of a line, block by block and node by node."""
    first, end = legs.lines.first[line : line + 2].tolist()
    if _is_straight(legs, first, end):
        return _list_receivers(legs, line, first, end)
    none = np.zeros(0, np.int64)
    parts = [_Entries(none, none, none, none, none, [])]
    before = 0
    for block in range(first, end):
        groups = nodes(legs, line, block)
        if groups:
            parts.append(_list_entries_of_block(legs, block, groups, before))
            before += len(parts[-1].rank)

    columns = list(zip(*parts, strict=True))
    block_, rank, lo, hi, origin = map(np.concatenate, columns[:-1])
    others = list(itertools.chain.from_iterable(columns[-1]))
    return _Entries(block_, rank, lo, hi, origin, others)


def _is_straight(legs: Legs, first: int, end: int) -> bool:
    """Whether blocks first..end-1 go whole from the holders to every rank that asks for them."""
    bands = legs.bands
    begin = bands.first[first : end + 1]
    if legs.sharing > 1 or (np.diff(begin) != 1).any():
        return False
    several = (bands.classes[first:end] != 1) | (bands.place[begin[:-1]] != 0)
    return not several.any()


def _list_receivers(legs: Legs, line: int, first: int, end: int) -> _Entries:
    """The entries of a line that goes straight: its receivers, all blocks at once.

    Where many lines have many blocks, looking at each block takes seconds.
    """
    receivers = [wire(legs.lines, line, block) for block in range(first, end)]
    counts = np.array(list(map(len, receivers)), np.int64)
    block = np.arange(first, end).repeat(counts)
    rank = np.array(list(itertools.chain.from_iterable(receivers)), np.int64)
    return _Entries(
        block=block,
        rank=rank,
        lo=legs.bands.at[legs.bands.first[block]],
        hi=legs.lines.nbytes[block],
        origin=np.arange(len(rank)),
        others=[()] * len(rank),
    )


def _list_entries_of_block(
    legs: Legs, block: int, groups: tuple[Ranks, ...], before: int
) -> _Entries:
    """The entries of a block, node by node; `before` entries of the line stand before them."""
    a, b = legs.bands.first[block : block + 2].tolist()
    count = len(groups)
    lo = legs.bands.at[a:b]
    hi = np.append(lo[1:], legs.lines.nbytes[block])
    if count > 1:
        lo = np.tile(lo, count)
        hi = np.tile(hi, count)
    rank = _pick_entries(legs.bands, a, b, groups)
    origin = _find_origins(legs.bands, block, count)
    return _Entries(
        block=np.full(rank.size, block),
        rank=rank,
        lo=lo,
        hi=hi,
        origin=origin.ravel() + before,
        others=_list_others(groups, rank.tolist()),
    )


def _pick_entries(bands: Bands, a: int, b: int, groups: tuple[Ranks, ...]) -> Ints:
    """The entry rank of the bands a..b-1 in each node, node by node."""
    sizes = np.array(list(map(len, groups)), np.int64)
    replicas = sizes[:, None]
    inside = bands.place[a:b] * replicas // bands.span[a:b]
    # Ranks of all nodes end to end: node i has those from first[i] on.
    ranks = np.array(list(itertools.chain.from_iterable(groups)), np.int64)
    first = np.cumsum(replicas, axis=0) - replicas
    entry: Ints = ranks[first + inside]
    return entry.ravel()


def _find_origins(bands: Bands, block: int, nodes: int) -> Ints:
    """By node and band, the number of the entry through which the band comes."""
    a, b = bands.first[block : block + 2].tolist()
    width = b - a
    number = np.arange(nodes * width).reshape(nodes, width)
    classes = int(bands.classes[block])
    if classes == 1:
        return number
    node = _find_relays(bands.begin[a:b], bands.count[a:b], classes, nodes)
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
        if len(group) == 1:
            others += [()] * bands
            continue
        for entry in entries[i * bands : (i + 1) * bands]:
            others.append(tuple(rank for rank in group if rank != entry))
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


def straight(legs: Legs, line: int) -> Straight:
    """What goes straight from the holders of a line, as it lies on the line."""
    return _pick_straight(legs, _list_entries(legs, line))


def _pick_straight(legs: Legs, entries: _Entries) -> Straight:
    """Of the entries of a line, those that are served straight from the holders."""
    some = np.flatnonzero(entries.origin == np.arange(len(entries.origin)))
    block = entries.block[some]
    begin = entries.lo[some]
    size = entries.hi[some] - begin
    place = _lay_by_group(block, size) + legs.bands.start[block]
    return Straight(some, block, place, begin, size)


def _lay_by_group(group: Ints, size: Ints) -> Ints:
    """Where each item begins among those of its group, groups standing together."""
    return Offsets.of_sorted(group).begin(size)


MOST_KEPT = 1 << 20
"""Streams that are kept with the legs of a program, 56 bytes each."""


def streams(legs: Legs, line: int) -> Streams:
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
    """The streams of the first leg, in order of `entry`, where they go.

    Entry e of the line receives the streams `first[e]..first[e+1]-1`.
    """

    entry: Ints
    sender: Ints
    lo: Ints
    hi: Ints
    first: Ints


@memo(512)
def _find_streams(legs: Legs, line: int) -> Streams:
    """The three legs: straight, to other nodes, inside nodes."""
    entries = _list_entries(legs, line)
    roots = _cut_among_holders(legs, line, entries)
    found = (
        _leave_holders(entries, roots),
        _relay_to_nodes(entries, roots),
        _relay_inside_nodes(entries, roots),
    )
    return Streams(*map(np.concatenate, zip(*found, strict=True)))


def _cut_among_holders(legs: Legs, line: int, entries: _Entries) -> _Roots:
    """What each holder of a line sends, by its cuts."""
    to = _pick_straight(legs, entries)
    held = np.array(legs.lines.held_by(line), np.int64)
    a, b = legs.bands.cut_first[line : line + 2].tolist()
    cuts = legs.bands.cuts[a:b]
    holder, item = _find_holders(to, cuts, len(held))
    place = to.place[item]
    lo = np.maximum(cuts[holder] - place, 0)
    hi = np.minimum(cuts[holder + 1] - place, to.size[item])
    # Some among the holders have no share.
    sends = lo < hi
    holder, item = holder[sends], item[sends]
    begin = to.begin[item]
    entry = to.entry[item]
    numbers = np.arange(len(entries.rank) + 1)
    return _Roots(
        entry=entry,
        sender=held[holder],
        lo=begin + lo[sends],
        hi=begin + hi[sends],
        first=np.searchsorted(entry, numbers),
    )


def _find_holders(to: Straight, cuts: Ints, holders: int) -> tuple[Ints, Ints]:
    """Which holder serves which item: all from that of its first byte to that of its last."""
    first = np.searchsorted(cuts, to.place, "right") - 1
    last = np.searchsorted(cuts, to.place + to.size, "left")
    # Only in a wrong table are there bytes beyond the cuts: nobody sends them, and its proof
    # refuses it.
    last = np.minimum(last, min(holders, len(cuts) - 1))
    return ranges(np.maximum(first, 0), last)


def _leave_holders(entries: _Entries, roots: _Roots) -> Streams:
    """The streams that leave the holders."""
    count = len(roots.entry)
    return Streams(
        block=entries.block[roots.entry],
        leg=np.ones(count, np.int64),
        sender=roots.sender,
        receiver=entries.rank[roots.entry],
        lo=roots.lo,
        hi=roots.hi,
        root=np.arange(count),
    )


def _relay_to_nodes(entries: _Entries, roots: _Roots) -> Streams:
    """The streams of entries that have another origin, from that origin."""
    own = np.arange(len(entries.origin))
    entry = np.flatnonzero(entries.origin != own)
    origin = entries.origin[entry]
    sender, receiver = entries.rank[origin], entries.rank[entry]
    return _relay(entries, roots, entry, sender, receiver, np.full_like(entry, 2))


def _relay_inside_nodes(entries: _Entries, roots: _Roots) -> Streams:
    """The streams from each entry to all other ranks of its node."""
    own = np.arange(len(entries.origin))
    entry = np.repeat(own, [len(others) for others in entries.others])
    receiver = np.array(list(itertools.chain.from_iterable(entries.others)), np.int64)
    leg = np.where(entries.origin[entry] == entry, 2, 3)
    return _relay(entries, roots, entry, entries.rank[entry], receiver, leg)


def _relay(
    entries: _Entries, roots: _Roots, entry: Ints, sender: Ints, receiver: Ints, leg: Ints
) -> Streams:
    """The streams that reached the origin of each `entry`, relayed from sender to receiver."""
    origin = entries.origin[entry]
    root, which = ranges(roots.first[origin], roots.first[origin + 1])
    return Streams(
        block=entries.block[entry[which]],
        leg=leg[which],
        sender=sender[which],
        receiver=receiver[which],
        lo=roots.lo[root],
        hi=roots.hi[root],
        root=root,
    )
