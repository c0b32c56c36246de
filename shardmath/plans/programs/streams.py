"""Streams: the bytes that go from rank to rank in the legs of lines.

1. A band goes straight from the holders to some of the nodes, to one **entry** rank in each. The
   entries of the other nodes get it from those entries. The rest of each node gets it from the
   entry of that node.
2. A stream is relayed as it arrived, so both ends of every leg cut it at the same places.
3. Leg 1 leaves the holders. Legs 2 and 3 are relayed: to other nodes, then inside a node. In a node
   that was served straight, the relay inside it is already leg 2. What mates send takes legs 4 and 5
   instead of leg 1.
4. Lines are handled in bundles; a line's streams do not depend on the lines bundled with it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets, join, lengths, ranges
from shardmath.base.memo import memo
from shardmath.plans.programs.legs import (
    HANDED,
    HANDING,
    Bands,
    Bundle,
    Legs,
    Nodes,
    Streams,
    bundle,
    list_nodes,
)

__all__ = ["Straight", "bundle_lines", "list_bundles", "list_straight", "list_streams"]


class _Entries(NamedTuple):
    """Bands of blocks at their entries: bytes lo..hi-1 of the content of a block enter a node at a rank.

    `origin` is the number of the entry from which the band arrives: the entry's own number if it arrives
    straight from the holders. The rank is number `place` of the `size` ranks of its node, which begin
    at `start` in the ranks of all nodes.
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
        """The indices of the rows of this table, as an array 0, 1, 2, ... A row is a range of bytes that enters a node
        at one rank."""
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
    # A band enters at the same fraction of the ranks in every node.
    place = bands.place[band] * size // bands.span[band]
    # A band ends where the next one of its block begins, or at the end of the block.
    is_last = band + 1 == end[node]
    next_at = np.append(bands.at[1:], 0)
    nbytes = legs.lines.nbytes[block]
    return _Entries(
        block=block,
        rank=nodes.ranks[start + place],
        lo=bands.at[band],
        hi=np.where(is_last, nbytes, next_at[band]),
        origin=_find_origins(bands, nodes, node, band),
        start=start,
        size=size,
        place=place,
    )


def _find_origins(bands: Bands, nodes: Nodes, node: Ints, band: Ints) -> Ints:
    """By entry, which is a node and a band, the number of the entry from which the band arrives."""
    block = nodes.block[node]
    number = nodes.number[node]
    relay = _find_relays(bands, block, band, number, nodes.total[node])
    # The nodes of a block are neighbors, each with an entry for every band of the block, so the same
    # band of the next node is `width` entries further.
    width = bands.first[block + 1] - bands.first[block]
    origin: Ints = np.arange(len(node)) + (relay - number) * width
    return origin


def _find_relays(bands: Bands, block: Ints, band: Ints, node: Ints, nodes: Ints) -> Ints:
    """By entry, the number of the node that relays the band to it: its own number if it is served straight. `node` is
    the number of the entry's node among the `nodes` nodes of the block."""
    classes = bands.classes[block]
    begin = bands.begin[band]
    count = bands.count[band]
    # The distance of a node's class from the first class that is served straight.
    distance = (node % classes - begin) % classes
    # The other classes are divided among those served straight. A node is served by the node at its
    # own place in that class, or by the last one if that class has fewer nodes.
    relay_class = (begin + distance % count) % classes
    last = (nodes - 1 - relay_class) // classes
    place = np.minimum(node // classes, last)
    relay = relay_class + classes * place
    # The class has no node at all only in a wrong table, which the proof rejects.
    relay = np.maximum(relay, 0)
    is_straight = distance < count
    return np.where(is_straight, node, relay)


class Straight(NamedTuple):
    """A table of bytes that ranks receive directly from ranks that hold them at the source, not forwarded. The rank in
    row `entry[i]` of an `_Entries` table receives `size[i]` bytes of block number `block[i]`, bytes that the same ranks
    need.

    An item is `size` bytes: from byte `begin` of the content of `block`, at `place` on its line, to entry
    number `entry`.
    """

    entry: Ints
    block: Ints
    place: Ints
    begin: Ints
    size: Ints


def list_straight(legs: Legs, lines: Ints) -> Straight:
    """List, as Straight, the bytes that ranks send directly from their own data, and not from what they received. Only
    bytes in the lines (bytes that the same ranks hold) with the numbers `lines` are listed."""
    nodes = list_nodes(legs.lines, legs.sharing, lines)
    entries = _list_entries(legs, nodes)
    return _pick_straight(legs, entries)


def _pick_straight(legs: Legs, entries: _Entries) -> Straight:
    """The items of the entries that are served straight from the holders."""
    # Bytes that no other entry relays arrive from a holder.
    entry = np.flatnonzero(entries.origin == entries.number)
    block = entries.block[entry]
    begin = entries.lo[entry]
    size = entries.hi[entry] - begin
    # Items of one block are neighbors.
    in_block = Offsets.of_sorted(block).begin(size)
    place = legs.bands.start[block] + in_block
    return Straight(entry, block, place, begin, size)


MOST_KEPT = 1 << 20
"""Most streams that are cached with the legs of a program, 64 bytes each."""


def list_streams(legs: Legs, line: int) -> Streams:
    """List all streams (bytes from rank to rank) of `line` (bytes with equal holders), relayed ones included."""
    bundles = _divide_lines(legs)
    number = bisect.bisect_right(bundles, line, key=_find_first) - 1
    found = _keep_bundle(legs, number)
    place = line - int(found.lines[0])
    first, end = found.first[place : place + 2].tolist()
    return Streams(*(column[first:end] for column in found.streams))


def _find_first(lines: Ints) -> int:
    """The first of these lines."""
    return int(lines[0])


def list_bundles(legs: Legs, some: Ints | None = None) -> Iterator[Bundle]:
    """Yield all streams (bytes that go from one rank to another), in Bundles of several lines (bytes that the same
    ranks hold). If `some`, an array of line numbers, is given, only Bundles that contain such a line are yielded."""
    bundles = _divide_lines(legs)
    wanted: Iterable[int] = range(len(bundles))
    if some is not None:
        first = np.array([lines[0] for lines in bundles], np.int64)
        numbers = np.searchsorted(first, some, "right") - 1
        wanted = np.unique(numbers).tolist()
    for number in wanted:
        yield _keep_bundle(legs, number)


def bundle_lines(legs: Legs, lines: Ints) -> list[Ints]:
    """Divide `lines`, an array of line numbers, into consecutive arrays that have about equally many streams (bytes
    that go from one rank to another). A line is bytes that the same ranks hold."""
    demands = legs.lines
    # A line has about one stream for each receiver of each band, and one more for each holder.
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
    """The streams of a bundle of lines, cached with the legs if all streams are few.

    Counting loads and proving a program walk through all lines several times; a cache of only the latest
    bundles would lose each one before it is used again.
    """
    kept = legs._bundles.get(number)
    if kept is not None:
        return kept
    found = _find_bundle(legs, number)
    # Bundles have about equally many streams.
    total = len(found.streams.block) * len(_divide_lines(legs))
    if total <= MOST_KEPT:
        legs._bundles[number] = found
    return found


@memo(32)
def _find_bundle(legs: Legs, number: int) -> Bundle:
    """The streams of a bundle of lines, line by line, and in each line leg by leg."""
    lines = _divide_lines(legs)[number]
    found = _find_streams(legs, lines)
    line = legs.lines.blocks.owners_of(found.block)
    order = np.argsort(line, kind="stable")
    in_order = line[order]
    # The lines of a bundle are consecutive: each ends where the next one begins.
    bounds = np.append(lines, lines[-1] + 1)
    first = np.searchsorted(in_order, bounds)
    streams = Streams(*(column[order] for column in found))
    return Bundle(lines, streams, first)


class _Roots(NamedTuple):
    """The streams of the first leg, entry by entry: entry e receives streams `first[e]..first[e+1]-1`."""

    streams: Streams
    first: Ints


def _find_streams(legs: Legs, lines: Ints) -> Streams:
    """The streams of all legs: from holders and mates, to other nodes, inside nodes, and to mates."""
    nodes = list_nodes(legs.lines, legs.sharing, lines)
    entries = _list_entries(legs, nodes)
    roots = _leave_holders(legs, lines, entries)
    to_nodes = _relay_to_nodes(entries, roots)
    inside_nodes = _relay_inside_nodes(entries, roots, nodes.ranks)
    # For each column of Streams, that of every leg.
    columns = zip(roots.streams, to_nodes, inside_nodes, _hand(roots.streams), strict=True)
    return Streams(*map(np.concatenate, columns))


def _leave_holders(legs: Legs, lines: Ints, entries: _Entries) -> _Roots:
    """The streams of the first leg: the shares of the holders and mates of neighboring lines, by the lines' cuts."""
    items = _pick_straight(legs, entries)
    line = legs.lines.blocks.owners_of(items.block) - lines[0]
    sender, feeder, item, lo, hi = _cut_items(legs, lines, items, line)
    begin = items.begin[item]
    entry = items.entry[item]
    line_of_stream = line[item]
    number = np.arange(len(item))
    is_handed = feeder != sender
    streams = Streams(
        block=items.block[item],
        leg=np.where(is_handed, HANDED, 1),
        sender=sender,
        receiver=entries.rank[entry],
        lo=begin + lo,
        hi=begin + hi,
        # Roots count from 0 within each line: the number less the number of the line's first stream.
        root=number - np.searchsorted(line_of_stream, line_of_stream),
        beyond=np.where(is_handed, feeder, 0),
    )
    # Streams are in the order of entries; one more number gives the end of the last entry's streams.
    bounds = np.append(entries.number, len(entries.rank))
    first = np.searchsorted(entry, bounds)
    return _Roots(streams, first)


def _hand(first: Streams) -> Streams:
    """The streams that hand bytes to mates, given those of the first leg."""
    handed = Streams(*(column[first.leg == HANDED] for column in first))
    return handed._replace(
        leg=np.full_like(handed.leg, HANDING),
        sender=handed.beyond,
        receiver=handed.sender,
        beyond=handed.receiver,
    )


def _cut_items(
    legs: Legs, lines: Ints, items: Straight, line: Ints
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """(sender, feeder, item, lo, hi) for every item of which a rank has a share, which is bytes lo..hi-1 of it.

    Item i is on line `lines[line[i]]`.
    """
    # Lines laid end to end, so that one search serves all.
    numbers = np.arange(len(lines) + 1)
    items_by_line = Offsets(np.searchsorted(line, numbers))
    length = items_by_line.sums(items.size)
    base = np.cumsum(length) - length
    shares = _list_shares(legs, lines, base)
    place = base[line] + items.place
    end = place + items.size
    share, item = _find_shares(shares, line, place, end)
    lo = np.maximum(shares.begin[share] - place[item], 0)
    hi = np.minimum(shares.end[share] - place[item], items.size[item])
    # A share may be empty.
    nonempty = np.flatnonzero(lo < hi)
    share = share[nonempty]
    ends = item[nonempty], lo[nonempty], hi[nonempty]
    return shares.sender[share], shares.feeder[share], *ends


class _Shares(NamedTuple):
    """The shares of ranks in lines laid end to end: share i is bytes `begin[i]..end[i]-1`, sent by `sender[i]`.

    Line l has the shares `first[l]..first[l+1]-1`: one for each of its holders, then one for each of its mates.
    `feeder[i]` hands the bytes to the sender; it is the sender itself if that holds them.
    """

    first: Ints
    sender: Ints
    feeder: Ints
    begin: Ints
    end: Ints


def _list_shares(legs: Legs, lines: Ints, base: Ints) -> _Shares:
    """The shares of lines, by their cuts; line `lines[i]` begins at `base[i]`."""
    bands = legs.bands
    senders, feeders = _list_senders(legs, lines)
    sender_counts = lengths(senders)
    begin = bands.cut_first[lines]
    # A line has one piece less than cuts.
    pieces = bands.cut_first[lines + 1] - begin - 1
    # There are fewer pieces than senders only in a wrong table, which the proof rejects.
    counts = np.clip(pieces, 0, sender_counts)
    cut, line = ranges(begin, begin + counts)
    first_sender = Offsets.of_counts(sender_counts).first[:-1]
    # The place, among all senders, of the sender of each piece.
    place, _ = ranges(first_sender, first_sender + counts)
    return _Shares(
        first=Offsets.of_counts(counts).first,
        sender=join(senders)[place],
        feeder=join(feeders)[place],
        begin=base[line] + bands.cuts[cut],
        end=base[line] + bands.cuts[cut + 1],
    )


def _list_senders(legs: Legs, lines: Ints) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """By line, its holders and then its mates; and the feeder of each, which is a holder itself."""
    holders = list(map(legs.lines.held_by, lines.tolist()))
    mates = legs.mates
    if mates is None:
        return holders, holders
    senders = []
    feeders = []
    for line, held in zip(lines.tolist(), holders, strict=True):
        first, end = mates.first[line : line + 2].tolist()
        senders.append((*held, *mates.rank[first:end].tolist()))
        feeders.append((*held, *mates.feeder[first:end].tolist()))
    return senders, feeders


def _find_shares(shares: _Shares, line: Ints, begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """(share, item) for all shares of each item, from the share of its first byte to that of its last."""
    first = np.searchsorted(shares.begin, begin, "right") - 1
    last = np.searchsorted(shares.begin, end, "left")
    # There are bytes beyond the cuts only in a wrong table: no rank sends them, and the proof rejects
    # it.
    first = np.maximum(first, shares.first[line])
    last = np.minimum(last, shares.first[line + 1])
    return ranges(first, last)


def _relay_to_nodes(entries: _Entries, roots: _Roots) -> Streams:
    """The streams to entries whose origin is another entry, from that entry."""
    entry = np.flatnonzero(entries.origin != entries.number)
    origin = entries.origin[entry]
    sender = entries.rank[origin]
    receiver = entries.rank[entry]
    leg = np.full_like(entry, 2)
    return _relay(entries, roots, entry, sender, receiver, leg)


def _relay_inside_nodes(entries: _Entries, roots: _Roots, ranks: Ints) -> Streams:
    """The streams from each entry to all other ranks of its node; `ranks` are the ranks of all nodes."""
    zero = np.zeros_like(entries.size)
    # The other ranks of each entry's node, numbered from 0.
    other, entry = ranges(zero, entries.size - 1)
    # Their numbers skip the entry's own place, so those from there on are one place further.
    place = other + (other >= entries.place[entry])
    receiver = ranks[entries.start[entry] + place]
    sender = entries.rank[entry]
    origin = entries.origin[entry]
    # One leg later if the entry received the band from another node.
    leg = np.where(origin == entry, 2, 3)
    return _relay(entries, roots, entry, sender, receiver, leg)


def _relay(
    entries: _Entries, roots: _Roots, entry: Ints, sender: Ints, receiver: Ints, leg: Ints
) -> Streams:
    """The streams that reached the origin of each `entry`, relayed from sender to receiver."""
    origin = entries.origin[entry]
    # The streams of the first leg that an origin receives are a range of rows of `roots`.
    row, entry_index = ranges(roots.first[origin], roots.first[origin + 1])
    return Streams(
        block=roots.streams.block[row],
        leg=leg[entry_index],
        sender=sender[entry_index],
        receiver=receiver[entry_index],
        lo=roots.streams.lo[row],
        hi=roots.streams.hi[row],
        root=roots.streams.root[row],
        beyond=np.zeros_like(row),
    )
