"""Loads: how many bytes each rank has under way by each of its links, and how long that takes.

1. A rank has four links: out and in on its node, out and in to other nodes.
2. A round is as long as its fullest link takes, and one latency; rounds follow each other.
3. `round_loads` counts slice by slice what `for_rank` lists; `leg_loads` all slots together.

>>> from shardmath.flows.topology import Topology
>>> seconds(Topology(intra_bytes_per_s=10, inter_bytes_per_s=1, latency_s=1), np.array([[0, 20, 0, 0], [0, 0, 5, 0]]))
6.0
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Bools, Ints, begins
from shardmath.flows.topology import Topology
from shardmath.programs.program import Program, slices, turn_of
from shardmath.programs.streams import Streams, streams

__all__ = ["LEGS", "Loads", "Pairs", "leg_loads", "messages", "pairs", "round_loads", "seconds"]

LEGS = 3
"""Straight, to other nodes, inside nodes."""

Loads: TypeAlias = NDArray[np.int64]
"""Bytes by ..., rank (in order) and link: near out, near in, far out, far in."""


class Pairs(NamedTuple):
    """`nbytes` that go from rank to rank in a phase and leg, all slots together; ranks by their places."""

    phase: Ints
    leg: Ints
    sender: Ints
    receiver: Ints
    far: Bools
    nbytes: Ints


def pairs(prog: Program) -> Pairs:
    """What goes from rank to rank: each pair once a phase and leg."""
    on, ranks = prog.legs.lines, np.array(prog.ranks, np.int64)
    shape = _phases(prog), LEGS, len(ranks), len(ranks)
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    for line in range(len(on.holders)):
        of = streams(prog.legs, line)
        code = np.ravel_multi_index((on.addend[of.block], of.leg - 1, *_places(ranks, of)), shape)
        found.append(_summed(code, of.hi - of.lo))
    code, nbytes = _summed(*map(np.concatenate, zip(*found, strict=True)))
    phase, leg, sender, receiver = np.unravel_index(code, shape)
    return Pairs(phase, leg, sender, receiver, _far(prog, ranks[sender], ranks[receiver]), nbytes)


def _phases(prog: Program) -> int:
    return int(prog.legs.lines.addend.max(initial=0)) + 1


def _places(ranks: Ints, of: Streams) -> tuple[Ints, Ints]:
    return np.searchsorted(ranks, of.sender), np.searchsorted(ranks, of.receiver)


def _far(prog: Program, sender: Ints, receiver: Ints) -> Bools:
    per_node = prog.topology.ranks_per_node
    out: Bools = sender // per_node != receiver // per_node
    return out


def _summed(code: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """Each code once, ascending, and its bytes in all."""
    order = np.argsort(code, kind="stable")
    first = begins(code[order])
    return code[order[first]], np.add.reduceat(nbytes[order], first) if len(first) else nbytes


def leg_loads(prog: Program, of: Pairs) -> Loads:
    """Bytes by phase, leg, rank and link, all slots together."""
    out = np.zeros((_phases(prog), LEGS, len(prog.ranks), 4), np.int64)
    np.add.at(out, (of.phase, of.leg, of.sender, 2 * of.far), of.nbytes)
    np.add.at(out, (of.phase, of.leg, of.receiver, 2 * of.far + 1), of.nbytes)
    return out


def messages(of: Pairs, turns: int, ranks: int) -> Ints:
    """By turn and rank, the most messages that a round may have: one for each leg and peer, each way."""
    _, some = np.unique((of.leg * ranks + of.sender) * ranks + of.receiver, return_index=True)
    out = np.zeros((turns, ranks), np.int64)
    for side in (of.sender, of.receiver):
        turn = turn_of(of.sender + of.receiver, of.leg + 1, ranks)[some] % turns
        np.add.at(out, (turn, side[some]), 1)
    return out


def round_loads(prog: Program) -> Loads:
    """Bytes by phase, slot, turn, rank and link, exactly."""
    on, ranks = prog.legs.lines, np.array(prog.ranks, np.int64)
    shape = _phases(prog), prog.slots + LEGS - 1, prog.turns, len(ranks), 4
    out = np.zeros(math.prod(shape), np.int64)
    for line in range(len(on.holders)):
        of = streams(prog.legs, line)
        cut = slices(prog, line, of)
        sender, receiver = _places(ranks, of)
        turn = turn_of(sender + receiver, of.leg, len(ranks)) % prog.turns
        link = 2 * _far(prog, of.sender, of.receiver)
        for end in ((sender, link), (receiver, link + 1)):
            code = np.ravel_multi_index(
                (on.addend[of.block], np.zeros_like(turn), turn, *end), shape
            )
            np.add.at(out, code[cut.stream] + cut.slot * math.prod(shape[2:]), cut.hi - cut.lo)
    return out.reshape(shape)


def seconds(where: Topology, loads: Loads) -> float:
    """The time of rounds one after the other, each as long as its fullest link and one latency.

    `loads` are bytes by (..., rank, link).
    """
    rate = np.array([where.intra_bytes_per_s] * 2 + [where.inter_bytes_per_s] * 2)
    each = (loads / rate).max(axis=(-2, -1), initial=0.0)
    return float(each.sum() + where.latency_s * np.count_nonzero(each))
