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

from shardmath.base.arrays import Ints
from shardmath.base.memo import memo
from shardmath.plans.demands import Demands, Ranks, list_receivers

__all__ = ["Bands", "Legs", "Streams", "group_receivers", "legs_as_cut"]


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


def group_receivers(legs: Legs, line: int, block: int) -> tuple[Ranks, ...]:
    """The receivers of a block by what shares what enters: nodes, or every rank by itself."""
    receivers = list_receivers(legs.lines, line, block)
    # A later addend is folded on top of the first, and cannot be relayed from there.
    alone = legs.lines.near[line] or legs.lines.addend[block]
    sharing = 1 if alone else legs.sharing
    return nodes_of(receivers, sharing)


def legs_as_cut(on: Demands) -> Legs:
    """The legs of lines that are cut already: everything straight, from the holders of the cuts."""
    count = len(on.nbytes)
    zero = np.zeros(count, np.int64)
    one = np.ones(count, np.int64)
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
