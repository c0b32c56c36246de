"""Legs: a plan's lines and how their contents are cut, straight or relayed, as tables.

1. The content of a block is cut into **bands**. A band goes straight from the holders to some of
   the nodes, whose ranks relay it to the others.
2. The first leg is cut among the holders as lines are. What goes from one rank to another is a
   **stream**.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets, begins, join, lengths, ranges
from shardmath.plans.demands import Demands
from shardmath.plans.stretches import list_all_receivers

__all__ = [
    "Bands",
    "Bundle",
    "Legs",
    "Nodes",
    "Streams",
    "bundle",
    "count_straight",
    "legs_as_cut",
    "list_nodes",
    "measure_bands",
]


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


class Bundle(NamedTuple):
    """All streams of some lines: line `lines[i]` has those from `first[i]` to `first[i + 1] - 1`.

    The root of each is counted among those of its line.
    """

    lines: Ints
    streams: Streams
    first: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Legs:
    """Who sends what to whom, and what is relayed: lines of a plan and their bands.

    Groups of `sharing` ranks share what enters them: nodes, or 1 where every rank is served by
    itself.
    """

    lines: Demands
    bands: Bands
    sharing: int
    _bundles: dict[int, Bundle] = field(default_factory=dict, init=False, repr=False)
    _loads: dict[object, tuple[object, Ints]] = field(default_factory=dict, init=False, repr=False)


def measure_bands(demands: Demands, bands: Bands) -> Ints:
    """The size of each band: up to the next one of its block, or to the end of the block."""
    size = np.diff(bands.at, append=0)
    last = bands.first[1:] - 1
    size[last] = demands.nbytes - bands.at[last]
    return size


def count_straight(bands: Bands, block: Ints, groups: list[list[int]]) -> Ints:
    """To how many nodes each band goes straight."""
    by_block = lengths(groups)
    nodes = by_block[block]
    classes = bands.classes[block]
    counts = np.zeros(len(block), np.int64)
    most = int(bands.count.max(initial=0))
    for i in range(most):
        # Of the nodes, every `classes`-th from node number `kind` on is in that class.
        kind = (bands.begin + i) % classes
        in_class = (nodes - kind + classes - 1) // classes
        is_served = i < bands.count
        counts += np.where(is_served, in_class, 0)
    return counts


class Nodes(NamedTuple):
    """The receivers of some blocks by what shares what enters: node i is `size[i]` of `ranks`, from `start[i]` on.

    It is node `number[i]` of the `total[i]` nodes of `block[i]`.
    """

    ranks: Ints
    start: Ints
    size: Ints
    block: Ints
    number: Ints
    total: Ints


MOST_TOGETHER = 1 << 13
"""Streams, or about as many, of a bundle of lines.

Where lines are many, most have few streams each, and looking at every line by itself takes longer
than looking at what it has. More together would be no quicker, and take memory.
"""


def bundle(lines: Ints, weights: Ints) -> list[Ints]:
    """The lines in bundles of neighbours, in each of which all but the last weigh less than MOST_TOGETHER.

    >>> weights = np.array([5000, 3000, 9000, 5000, 4000])
    >>> [together.tolist() for together in bundle(np.arange(5), weights)]
    [[0, 1, 2], [3, 4]]
    """
    before = np.cumsum(weights) - weights
    first = begins(before // MOST_TOGETHER)
    places = itertools.pairwise([*first.tolist(), len(lines)])
    return [lines[i:k] for i, k in places]


MOST_SHARING = 1 << 62
"""Ranks of a node, of which a topology may say any number, and int64 holds no more."""


def list_nodes(demands: Demands, sharing: int, lines: Ints) -> Nodes:
    """The receivers of lines in groups of `sharing`, block by block."""
    blocks, of = ranges(demands.first[lines], demands.first[lines + 1])
    receivers = list_all_receivers(demands, blocks)
    ranks = join(receivers)
    inside = np.arange(len(blocks))
    inside = inside.repeat(lengths(receivers))
    shared = _find_sharing(demands, sharing, blocks, lines[of])
    node = ranks // shared[inside]
    # A node begins where the block changes, or the node does.
    is_first = np.diff(inside, prepend=-1) != 0
    is_first |= np.diff(node, prepend=-1) != 0
    start = np.flatnonzero(is_first)
    inside = inside[start]
    totals = np.bincount(inside, minlength=len(blocks))
    before = Offsets.of_counts(totals)
    return Nodes(
        ranks=ranks,
        start=start,
        size=np.diff(start, append=len(ranks)),
        block=blocks[inside],
        number=np.arange(len(start)) - before.first[inside],
        total=totals[inside],
    )


def _find_sharing(demands: Demands, sharing: int, blocks: Ints, lines: Ints) -> Ints:
    """By block, given its line, how many ranks in a row share what enters them.

    A node's, or 1 where each rank is served alone.
    """
    # A later addend is folded on top of the first, and cannot be relayed from there.
    alone = demands.near[lines] | (demands.addend[blocks] > 0)
    # A node may be larger than any number of ranks.
    return np.where(alone, 1, min(sharing, MOST_SHARING))


def legs_as_cut(demands: Demands) -> Legs:
    """The legs of lines that are cut already: everything straight, from the holders of the cuts."""
    count = len(demands.nbytes)
    zero = np.zeros(count, np.int64)
    one = np.ones(count, np.int64)
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
    return Legs(demands, bands, 1)
