"""Loads: how many bytes each rank has under way by each of its links, and how long that takes.

1. A rank has four links: out and in on its node, out and in to other nodes.
2. A round is as long as its fullest link takes, and one latency; rounds follow each other.
3. `round_loads` counts slice by slice what `for_rank` lists; `leg_loads` all slots together.

>>> from shardmath.flows.topology import Topology
>>> slow = Topology(intra_bytes_per_s=10, inter_bytes_per_s=1, latency_s=1)
>>> seconds(slow, np.array([[0, 20, 0, 0], [0, 0, 5, 0]]))
6.0
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Bools, Ints, Offsets
from shardmath.flows.topology import Topology
from shardmath.programs.program import Program, slices, turn_of
from shardmath.programs.streams import Streams, streams

__all__ = ["LEGS", "Loads", "Pairs", "leg_loads", "messages", "pairs", "round_loads", "seconds"]

LEGS = 3
"""Straight, to other nodes, inside nodes."""

LINKS = 4
"""Near out, near in, far out, far in: 2 * far + incoming."""

Loads: TypeAlias = NDArray[np.int64]
"""Bytes by ..., rank (in order) and link: near out, near in, far out, far in."""


class Pairs(NamedTuple):
    """`nbytes` that go from rank to rank in a phase and leg, all slots together.

    Ranks are given by their places.
    """

    phase: Ints
    leg: Ints
    sender: Ints
    receiver: Ints
    far: Bools
    nbytes: Ints


def pairs(prog: Program) -> Pairs:
    """What goes from rank to rank: each pair once per phase and leg."""
    ranks = np.array(prog.ranks, np.int64)
    shape = _count_phases(prog), LEGS, len(ranks), len(ranks)
    # Each line is summed by itself first, so that what is kept grows with pairs and not with
    # streams.
    none = np.zeros(0, np.int64)
    codes, sizes = [none], [none]
    for line in range(len(prog.legs.lines.holders)):
        code, nbytes = _sum_line(prog, line, ranks, shape)
        codes.append(code)
        sizes.append(nbytes)
    code, nbytes = _sum_by_code(np.concatenate(codes), np.concatenate(sizes))
    phase, leg, sender, receiver = np.unravel_index(code, shape)
    far = _is_far(prog, ranks[sender], ranks[receiver])
    return Pairs(phase, leg, sender, receiver, far, nbytes)


def _sum_line(
    prog: Program, line: int, ranks: Ints, shape: tuple[int, int, int, int]
) -> tuple[Ints, Ints]:
    """The pairs of a line, coded as places of a table of this shape, and the bytes of each."""
    of = streams(prog.legs, line)
    sender, receiver = _find_places(ranks, of)
    phase = prog.legs.lines.addend[of.block]
    code = np.ravel_multi_index((phase, of.leg - 1, sender, receiver), shape)
    return _sum_by_code(code, of.hi - of.lo)


def _count_phases(prog: Program) -> int:
    """The number of addends that are folded one after the other."""
    addend = prog.legs.lines.addend
    return int(addend.max(initial=0)) + 1


def _find_places(ranks: Ints, of: Streams) -> tuple[Ints, Ints]:
    """The places of senders and receivers among all ranks."""
    return np.searchsorted(ranks, of.sender), np.searchsorted(ranks, of.receiver)


def _is_far(prog: Program, sender: Ints, receiver: Ints) -> Bools:
    """Whether these ranks are on different nodes."""
    per_node = prog.topology.ranks_per_node
    far: Bools = sender // per_node != receiver // per_node
    return far


def _sum_by_code(code: Ints, nbytes: Ints) -> tuple[Ints, Ints]:
    """Each code once, ascending, and its bytes in all."""
    order = np.argsort(code, kind="stable")
    code = code[order]
    alike = Offsets.of_sorted(code)
    return code[alike.first[:-1]], alike.sums(nbytes[order])


def leg_loads(prog: Program, of: Pairs) -> Loads:
    """Bytes by phase, leg, rank and link, all slots together."""
    shape = _count_phases(prog), LEGS, len(prog.ranks), LINKS
    out = np.zeros(shape, np.int64)
    link = 2 * of.far
    np.add.at(out, (of.phase, of.leg, of.sender, link), of.nbytes)
    np.add.at(out, (of.phase, of.leg, of.receiver, link + 1), of.nbytes)
    return out


def messages(of: Pairs, turns: int, ranks: int) -> Ints:
    """By turn and rank, the most messages that a round may have.

    There is one for each leg and peer, each way, whatever the phase.
    """
    code = (of.leg * ranks + of.sender) * ranks + of.receiver
    _, some = np.unique(code, return_index=True)
    sender = of.sender[some]
    receiver = of.receiver[some]
    leg = of.leg[some] + 1
    turn = turn_of(sender + receiver, leg, ranks) % turns
    out = np.zeros((turns, ranks), np.int64)
    np.add.at(out, (turn, sender), 1)
    np.add.at(out, (turn, receiver), 1)
    return out


def round_loads(prog: Program) -> Loads:
    """Bytes by phase, slot, turn, rank and link, exactly."""
    ranks = np.array(prog.ranks, np.int64)
    slots = prog.slots + LEGS - 1
    shape = _count_phases(prog), slots, prog.turns, len(ranks), LINKS
    out = np.zeros(math.prod(shape), np.int64)
    for line in range(len(prog.legs.lines.holders)):
        _add_line(out, shape, prog, line, ranks)
    return out.reshape(shape)


def _add_line(
    out: Ints, shape: tuple[int, int, int, int, int], prog: Program, line: int, ranks: Ints
) -> None:
    """Add what goes in the slots of a line, at both ends; `out` is flat."""
    of = streams(prog.legs, line)
    sender, receiver = _find_places(ranks, of)
    turn = turn_of(sender + receiver, of.leg, len(ranks)) % prog.turns
    phase = prog.legs.lines.addend[of.block]
    link = 2 * _is_far(prog, of.sender, of.receiver)
    cut = slices(prog, line, of)
    nbytes = cut.hi - cut.lo
    # Slices differ from their stream in the slot alone: streams are coded as if in slot 0, slices
    # are that many slots further. There are many more slices than streams.
    ahead = cut.slot * math.prod(shape[2:])
    slot = np.zeros_like(turn)
    for place, link_there in ((sender, link), (receiver, link + 1)):
        where = phase, slot, turn, place, link_there
        code = np.ravel_multi_index(where, shape)
        np.add.at(out, code[cut.stream] + ahead, nbytes)


def seconds(where: Topology, loads: Loads) -> float:
    """The time of rounds one after the other, each its fullest link's time and one latency.

    `loads` are bytes by (..., rank, link).
    """
    near, far = where.intra_bytes_per_s, where.inter_bytes_per_s
    rate = np.array([near, near, far, far])
    each = (loads / rate).max(axis=(-2, -1), initial=0.0)
    latency = where.latency_s * np.count_nonzero(each)
    return float(each.sum() + latency)
