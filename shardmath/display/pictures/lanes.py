"""Lanes: what ranks send and receive in the rounds of a program, as a table to draw.

1. A **lane** is a rank, and a column a round in which any rank sends.
2. Of many ranks, the witness's ranks come first, up to a number, and then the ranks whose links are busy longest:
   holders and others in turn, and of either the ranks of each node in turn.
3. If there are many rounds, one column has the sums of those in the middle.

>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.layouts.layout import Layout
>>> from shardmath.plans.plan import plan
>>> from shardmath.plans.programs.scheduling import schedule
>>> prog = schedule(plan(Layout((4,), Mesh(tp=2), "(tp n)"), Layout((4,), Mesh(tp=2), "n")))
>>> lanes = list_lanes(prog)
>>> lanes.ranks, lanes.columns[0].steps, lanes.halves[1, 0, "receives"].nbytes
((0, 1), ((0, 0, 0),), 8)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Ints, Offsets, number_alike
from shardmath.plans.programs.legs import find_passed_on
from shardmath.plans.programs.loads import (
    Loads,
    RoundPairs,
    sum_round_loads,
    sum_round_pairs,
    time_links,
)
from shardmath.plans.programs.messages import Step
from shardmath.plans.programs.program import Program

__all__ = ["Column", "Half", "Lanes", "list_lanes"]

MOST_LANES = 20
MOST_WITNESSES = 12
"""Lanes of the witness's ranks, while other ranks need lanes."""
MOST_COLUMNS = 11
WAYS = {"sends": (0, 2), "receives": (1, 3)}
"""The links of each way: inside the node, and to other nodes."""


class Column(NamedTuple):
    """A round, or several rounds whose sums are drawn: their steps, and the seconds that they take with latency."""

    steps: tuple[Step, ...]
    seconds: float

    @property
    def is_one(self) -> bool:
        """Whether the column is one round."""
        return len(self.steps) == 1


class Half(NamedTuple):
    """One rank's bytes of one way in a column: the peers, ascending, and the bytes of each; the sums of bytes that
    cross nodes and of bytes that are relayed. `is_fullest` says whether one of these links takes as long as the round.
    """

    peers: Ints
    amounts: Ints
    far: int
    relayed: int
    is_fullest: bool

    @property
    def nbytes(self) -> int:
        """All bytes of the half."""
        return int(self.amounts.sum())


class Lanes(NamedTuple):
    """The drawn ranks, ascending, and columns, with a half by (rank, number of the column, "sends" or "receives") where
    there are bytes. `sent` and `received` are the bytes of the ranks that are left out, whose number is `others`."""

    ranks: tuple[int, ...]
    columns: tuple[Column, ...]
    halves: dict[tuple[int, int, str], Half]
    others: int
    sent: int
    received: int


def list_lanes(prog: Program, witness: Collection[int] = ()) -> Lanes:
    """Return the lanes to draw of a program whose bound the ranks `witness` force."""
    loads = sum_round_loads(prog)
    ranks = _choose_ranks(prog, loads, frozenset(witness))
    columns = _list_columns(prog, loads)
    halves = _list_halves(prog, loads, ranks, columns)
    left_out = ~np.isin(prog.ranks, ranks)
    by_link = loads[..., left_out, :].sum(axis=(0, 1, 2, 3))
    sent, received = (int(by_link[list(links)].sum()) for links in WAYS.values())
    return Lanes(ranks, columns, halves, int(left_out.sum()), sent, received)


def _choose_ranks(prog: Program, loads: Loads, witness: frozenset[int]) -> tuple[int, ...]:
    """The ranks that have lanes, ascending."""
    fullest = time_links(prog.topology, loads).max(axis=-1, initial=0.0)
    seconds = fullest.sum(axis=(0, 1, 2))
    order = np.argsort(-seconds, kind="stable")
    busiest = [prog.ranks[place] for place in order.tolist()]
    first = [rank for rank in busiest if rank in witness][:MOST_WITNESSES]
    others = [rank for rank in busiest if rank not in witness]
    by_node = _take_turns(others, prog.topology.node)
    holders = frozenset(prog.src_ranks)
    by_side = _take_turns(by_node, holders.__contains__)
    chosen = dict.fromkeys([*first, *by_side, *busiest])
    return tuple(sorted(list(chosen)[:MOST_LANES]))


def _take_turns(ranks: Sequence[int], kind: Callable[[int], int]) -> list[int]:
    """The ranks in another order: the first one of each kind, then the second one of each, ..."""
    turn: Counter[int] = Counter()
    order = []
    for place, rank in enumerate(ranks):
        which = kind(rank)
        order.append((turn[which], place, rank))
        turn[which] += 1
    return [rank for _, _, rank in sorted(order)]


def _list_columns(prog: Program, loads: Loads) -> tuple[Column, ...]:
    """All rounds, or the first and the last ones and the sum of those between."""
    steps = np.argwhere(loads.any(axis=(-1, -2))).tolist()
    rounds = [_make_column(prog, loads, [step]) for step in steps]
    if len(rounds) <= MOST_COLUMNS:
        return tuple(rounds)
    first = MOST_COLUMNS // 2
    last = len(rounds) - (MOST_COLUMNS - 1 - first)
    middle = _make_column(prog, loads, steps[first:last])
    return (*rounds[:first], middle, *rounds[last:])


def _make_column(prog: Program, loads: Loads, steps: Sequence[Sequence[int]]) -> Column:
    """The column of these steps."""
    of_steps = loads[tuple(np.transpose(steps))]
    by_round = time_links(prog.topology, of_steps).max(axis=(-1, -2))
    seconds = by_round.sum() + prog.topology.latency_s * len(steps)
    return Column(tuple((phase, slot, turn) for phase, slot, turn in steps), float(seconds))


def _list_halves(
    prog: Program, loads: Loads, ranks: Sequence[int], columns: Sequence[Column]
) -> dict[tuple[int, int, str], Half]:
    """The halves that have bytes."""
    column_of = np.zeros(loads.shape[:3], np.int64)
    for number, column in enumerate(columns):
        column_of[tuple(np.transpose(column.steps))] = number
    pairs = sum_round_pairs(prog, ranks)
    numbers = column_of[pairs.phase, pairs.slot, pairs.turn]
    per_node = prog.topology.ranks_per_node
    far = pairs.sender // per_node != pairs.receiver // per_node
    amounts = np.stack((pairs.nbytes, pairs.nbytes * far, pairs.nbytes * find_passed_on(pairs.leg)))
    fullest = _find_fullest(prog, loads, columns)
    halves = {}
    for way, (rank, peer) in _list_ends(pairs).items():
        is_drawn = np.isin(rank, ranks)
        keys = [column[is_drawn] for column in (rank, numbers, peer)]
        for (lane, number), peers, sums in _group(keys, amounts[:, is_drawn]):
            nbytes, across, relayed = sums
            is_fullest = (lane, number, way) in fullest
            total = int(across.sum()), int(relayed.sum())
            halves[lane, number, way] = Half(peers, nbytes, *total, is_fullest)
    return halves


def _list_ends(pairs: RoundPairs) -> dict[str, tuple[Ints, Ints]]:
    """By way, the rank of each message's lane, and its peer."""
    return {"sends": (pairs.sender, pairs.receiver), "receives": (pairs.receiver, pairs.sender)}


def _group(keys: list[Ints], amounts: Ints) -> list[tuple[tuple[int, int], Ints, Ints]]:
    """By (rank, column): the peers, and the sums of each row of `amounts` by peer."""
    first, which = number_alike(keys)
    sums = np.zeros((len(amounts), len(first)), np.int64)
    for row, sizes in zip(sums, amounts, strict=True):
        np.add.at(row, which, sizes)
    rank, number, peer = (key[first] for key in keys)
    _, cell = number_alike([rank, number])
    borders = Offsets.of_sorted(cell).first.tolist()
    groups = []
    for start, stop in itertools.pairwise(borders):
        where = int(rank[start]), int(number[start])
        groups.append((where, peer[start:stop], sums[:, start:stop]))
    return groups


def _find_fullest(
    prog: Program, loads: Loads, columns: Sequence[Column]
) -> set[tuple[int, int, str]]:
    """(rank, column, way) of links that take as long as any in the column's round; none of columns of several."""
    found = set()
    for number, column in enumerate(columns):
        if not column.is_one:
            continue
        by_link = time_links(prog.topology, loads[column.steps[0]])
        is_fullest = by_link == by_link.max()
        for way, links in WAYS.items():
            places = np.flatnonzero(is_fullest[:, links].any(axis=1))
            found |= {(prog.ranks[place], number, way) for place in places.tolist()}
    return found
