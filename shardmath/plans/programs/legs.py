"""Legs: a plan's lines and how their contents are cut, straight or relayed, as tables.

1. The content of a block is cut into **bands**. A band goes straight from the holders to some of
   the nodes, whose ranks relay it to the others.
2. The first leg is cut among the holders as lines are. The bytes from one rank to another are a
   **stream**.
3. If the links of a line's holders are too slow, **mates** send some of its bytes: other ranks of their
   nodes. A holder hands these bytes to the mate (leg 4), which sends them one slot later (leg 5), together
   with what holders send straight (leg 1).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, begins, join, lengths, ranges
from shardmath.plans.demands import Demands
from shardmath.plans.stretches import list_all_receivers

__all__ = [
    "Bands",
    "Bundle",
    "HANDED",
    "HANDING",
    "Legs",
    "Mates",
    "Nodes",
    "RELAYING",
    "Streams",
    "bundle",
    "count_lags",
    "count_legs",
    "count_straight",
    "find_lags",
    "find_passed_on",
    "find_relayed",
    "legs_as_cut",
    "list_nodes",
    "measure_bands",
]


@dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """The routes of a plan's bytes from rank to rank, as arrays. Each block (bytes that the same ranks need) is cut
    into bands, which are ranges of bytes with one route each.

    Block b has the bands `first[b]..first[b+1]-1` and divides its nodes into `classes[b]` classes:
    node i is in class `i % classes[b]`. Band i begins at byte `at[i]` of the content and goes straight
    to the `count[i]` classes from `begin[i]` on; in a node of q ranks it enters at rank number
    `place[i] * q // span[i]`. In the first leg, block b begins at byte `start[b]` of its line, and
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


HANDING = 4
"""The leg in which holders hand bytes to mates. Legs 1, 2 and 3 go straight, to other nodes, and inside nodes."""

HANDED = 5
"""The leg in which mates send the bytes that they were handed."""

RELAYING = (2, 3)
"""The legs in which ranks send what they received: to other nodes, then inside nodes."""

LAGS = np.array([0, 0, 1, 2, -1, 0])
"""By leg, from 1 on: how many slots later than the first leg it sends a slice."""


def find_lags(legs: Legs, leg: Ints) -> Ints:
    """Return by how many slots each hop `leg` lags behind the first hop of `legs` that sends anything."""
    lags: Ints = LAGS[leg]
    return lags if legs.mates is None else lags + 1


def count_lags(legs: Legs) -> int:
    """Return how many hops a byte takes at most, one slot after the other."""
    return 3 if legs.mates is None else 4


def count_legs(legs: Legs) -> int:
    """Return the number of the last of the hops, which are numbered from 1."""
    return 3 if legs.mates is None else HANDED


def find_relayed(leg: Ints) -> Bools:
    """Return whether the sender in each hop `leg` reads from its destination tensors, in which the bytes arrived."""
    return np.isin(leg, RELAYING)


def find_passed_on(leg: Ints) -> Bools:
    """Return whether the sender in each hop `leg` is another rank than one that holds the bytes at the source."""
    passed_on: Bools = (leg > 1) & (leg != HANDING)
    return passed_on


class Streams(NamedTuple):
    """A table of streams: in row i, bytes `lo[i]` to `hi[i]` - 1 of block `block[i]` go from rank `sender[i]` to rank
    `receiver[i]`, in hop `leg[i]`. A block is bytes that the same ranks need.

    Streams of a line with the same `root` are one stream of the first leg and its relays. `beyond[i]` is
    the rank to which a mate sends on what it is handed, in leg 4, or from which it was handed them, in leg
    5; 0 in other legs.
    """

    block: Ints
    leg: Ints
    sender: Ints
    receiver: Ints
    lo: Ints
    hi: Ints
    root: Ints
    beyond: Ints


class Bundle(NamedTuple):
    """All streams (bytes that go from one rank to another) of several lines, sorted by line. A line is bytes that the
    same ranks hold.

    `lines[i]` has the streams first[i]..first[i+1]-1. Roots are numbered within each line.
    """

    lines: Ints
    streams: Streams
    first: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Mates:
    """Ranks that send bytes of a line although they do not hold it, by line. A line is bytes that the same ranks hold.

    Line l has the mates first[l]..first[l+1]-1, whose pieces follow the pieces of the line's holders. Mate i is
    `rank[i]`, and the holder `feeder[i]`, on its node, hands it the bytes. A rank is several mates of a line if
    several holders feed it.
    """

    first: Ints
    rank: Ints
    feeder: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Legs:
    """A description of the bytes that each rank sends in each hop (leg) of a plan. It consists of all bytes with the
    ranks that hold and need them (`lines`), and their routes (`bands`).

    `sharing` neighboring ranks share the bytes that enter their group: a node's ranks, or 1 if every
    rank is served separately. `mates` is None if only holders send in the first leg.
    """

    lines: Demands
    bands: Bands
    sharing: int
    mates: Mates | None = None
    _bundles: dict[int, Bundle] = field(default_factory=dict, init=False, repr=False)
    _loads: dict[object, tuple[object, Ints]] = field(default_factory=dict, init=False, repr=False)


def measure_bands(demands: Demands, bands: Bands) -> Ints:
    """Return an array with the number of bytes in each band, a range of bytes with one route. `demands` has the sizes
    of the blocks that `bands` cuts into bands."""
    size = np.diff(bands.at, append=0)
    # The last band of a block ends with the content, and the next one in the list is another block's.
    last = bands.first[1:] - 1
    size[last] = demands.nbytes - bands.at[last]
    return size


def count_straight(bands: Bands, block: Ints, groups: list[list[int]]) -> Ints:
    """Return, for each range i of bytes in `bands`, how many nodes receive it directly from a rank that holds it at the
    source, not through another node. Range i is in block number `block[i]` of the bytes, and `len(groups[b])` nodes
    receive block b."""
    by_block = lengths(groups)
    nodes = by_block[block]
    classes = bands.classes[block]
    counts = np.zeros(len(block), np.int64)
    most = int(bands.count.max(initial=0))
    for i in range(most):
        # The nodes of a class are every `classes`-th node, from the one with the class's number on.
        number = (bands.begin + i) % classes
        in_class = (nodes - number + classes - 1) // classes  # rounded up
        is_served = i < bands.count
        counts += np.where(is_served, in_class, 0)
    return counts


class Nodes(NamedTuple):
    """The ranks that receive each block of bytes, in groups: each byte enters a group once, and its ranks then send it
    to each other. A group is the receiving ranks of one node, or a single rank if every rank is served separately.

    Node i has `size[i]` of `ranks`, from `start[i]` on.

    It is node `number[i]` of the `total[i]` nodes of `block[i]`.
    """

    ranks: Ints
    start: Ints
    size: Ints
    block: Ints
    number: Ints
    total: Ints


MOST_TOGETHER = 1 << 13
"""About the number of streams of a bundle of lines.

Most of many lines have few streams each, and handling each line separately takes longer than handling
its streams. Larger bundles would be no faster, and take more memory.
"""


def bundle(lines: Ints, weights: Ints) -> list[Ints]:
    """Divide the array `lines` into parts, with a cut where the running sum of `weights` reaches a multiple of 8192;
    list the parts. `weights[i]` is the cost of item i, such as its number of transfers.

    >>> weights = np.array([5000, 3000, 9000, 5000, 4000])
    >>> [together.tolist() for together in bundle(np.arange(5), weights)]
    [[0, 1, 2], [3, 4]]
    """
    before = np.cumsum(weights) - weights
    first = begins(before // MOST_TOGETHER)
    places = itertools.pairwise([*first.tolist(), len(lines)])
    return [lines[i:k] for i, k in places]


MOST_SHARING = 1 << 62
"""Most ranks of a node in tables: a topology may give any number, and int64 holds no more."""


def list_nodes(demands: Demands, sharing: int, lines: Ints) -> Nodes:
    """Group the ranks that receive each block by node, at most `sharing` per group, for all blocks of the lines
    numbered `lines`. A line is bytes that the same ranks hold, and a block is bytes of a line that the same ranks need.

    Return the groups as Nodes. The ranks of a group are on one node.
    """
    blocks, line = ranges(demands.first[lines], demands.first[lines + 1])
    receivers = list_all_receivers(demands, blocks)
    ranks = join(receivers)
    places = np.arange(len(blocks))
    place = places.repeat(lengths(receivers))  # the index in `blocks` of each rank's block
    sharing_by_block = _find_sharing(demands, sharing, blocks, lines[line])
    node = ranks // sharing_by_block[place]
    # A node begins where the block or the number of the node changes.
    is_first = np.diff(place, prepend=-1) != 0
    is_first |= np.diff(node, prepend=-1) != 0
    start = np.flatnonzero(is_first)
    place = place[start]
    totals = np.bincount(place, minlength=len(blocks))
    before = Offsets.of_counts(totals)
    return Nodes(
        ranks=ranks,
        start=start,
        size=np.diff(start, append=len(ranks)),
        block=blocks[place],
        number=np.arange(len(start)) - before.first[place],
        total=totals[place],
    )


def _find_sharing(demands: Demands, sharing: int, blocks: Ints, lines: Ints) -> Ints:
    """By block, given its line, how many neighboring ranks share the bytes that enter; 1 if none do."""
    # A receiver folds a later addend on top of the first, and then has no bytes of it to relay.
    alone = demands.near[lines] | (demands.addend[blocks] > 0)
    # The ranks per node may be any integer, even one beyond int64.
    return np.where(alone, 1, min(sharing, MOST_SHARING))


def legs_as_cut(demands: Demands) -> Legs:
    """Make the Legs in which each receiver gets its bytes straight from the ranks that hold them; `demands` determines
    which holder sends which bytes."""
    count = len(demands.nbytes)
    zero = np.zeros(count, np.int64)
    one = np.ones(count, np.int64)
    # Each block is one band, which goes to the block's one class of nodes.
    bands = Bands(
        first=np.arange(count + 1),
        classes=one,
        at=zero,
        begin=zero,
        count=one,
        place=zero,
        span=demands.nbytes,
        start=demands.start,
        cut_first=demands.cut_first,
        cuts=demands.cuts,
    )
    return Legs(demands, bands, sharing=1)
