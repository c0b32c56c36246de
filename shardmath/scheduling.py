"""Schedule: Plan -> Program. Who passes what on, and in how many rounds.

1. `fanout`: "none" sends every replica its own copy; "node" sends each byte once to each node, to one replica of it,
   and spreads it there; "auto" takes what is faster, and where the sources' links bind, lets nodes of the destination
   pass on to other nodes what goes beyond what their own links take in.
2. All is decided by integers that every rank finds alike: the first leg's lines are cut by `flow`, a copy is shed from
   the lines of the ranks above the target only, and evenly over their blocks.
3. Rounds: as few slots and turns as keep every rank's messages of a round below `max_inflight_bytes`, and their number
   below `max_ops_per_group`, counted for the program as it is.

>>> from shardmath.layout import Layout
>>> from shardmath.mesh import Mesh
>>> from shardmath.plan import plan
>>> p = plan(Layout((8,), Mesh(tp=2), "(tp n)"), Layout((8,), Mesh(dp=2, ranks=(2, 3)), "n"))
>>> [(m.peer, m.direction, m.nbytes) for one in schedule(p).for_rank(3) for m in one.messages]
[(0, 'receive', 16), (1, 'receive', 16)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.balance import grid, shared
from shardmath.digest import digest
from shardmath.errors import PlanError
from shardmath.flow import levels
from shardmath.lines import Lines, Ranks, lines
from shardmath.partition import Bools, Ints
from shardmath.plan import Plan
from shardmath.program import Bands, Legs, Program, Streams, nodes, slices, straight, streams
from shardmath.topology import Topology, checked
from shardmath.whole import whole

__all__ = ["Fanout", "Loads", "leg_loads", "round_loads", "schedule", "seconds"]

Fanout: TypeAlias = Literal["auto", "none", "node"]

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Slots to choose from where something is passed on: many, because the first and last are not full; few, because each
has its latency."""

LEGS = 3
"""Straight, to other nodes, inside nodes."""

MOST_SLOTS = 1 << 12
"""More are not tried: turns divide what goes in a slot further, and cost no more than the messages they divide."""

MOST_ROUNDS = 1 << 24
"""Rounds of all ranks together, so that tables of them fit in memory."""


def schedule(
    p: Plan,
    *,
    topology: Topology | None = None,
    max_inflight_bytes: int = 1 << 30,
    max_ops_per_group: int = 2048,
    fanout: Fanout = "auto",
) -> Program:
    """The program that carries out a plan on a topology (default: the plan's own, or 8 ranks a node).

    `max_inflight_bytes` bounds what a rank has under way in a round, both ways together; `max_ops_per_group` how many
    messages. Raises PlanError for an adjoint, and for limits that no cut can keep.
    """
    if not isinstance(p, Plan) or p.forward is not None:
        raise PlanError(f"{p!r} is not a plan of two sides' layouts; schedule what plan(src, dst) returns")
    if fanout not in ("auto", "none", "node"):
        raise PlanError(f"fanout={fanout!r} is unknown; use 'auto', 'none' or 'node'")
    room, most = (
        whole(max_inflight_bytes, "max_inflight_bytes", PlanError),
        whole(max_ops_per_group, "max_ops_per_group", PlanError),
    )
    for name, value in (("max_inflight_bytes", room), ("max_ops_per_group", most)):
        if value < 1:
            raise PlanError(f"{name}={value} leaves no room for a message; give a positive number")
    where = p.topology or Topology() if topology is None else checked(topology)
    on = lines(p.batches, where)
    made = [one for way in WAYS[fanout] for one in _program(p, where, on, *way)]
    prog = _fastest([replace(one, max_inflight_bytes=room, max_ops_per_group=most) for one in made])
    return replace(prog, digest=_digest(prog))


def _fastest(made: Sequence[Program]) -> Program:
    """Of the programs that can keep their limits the one, divided into rounds, that takes the least time.

    The likeliest come first; those that would not be faster with all legs in one round need not be divided.
    """
    found: list[tuple[float, Program]] = []
    failed: list[PlanError] = []
    for (_, slots), one in sorted(((_best_slots(one), one) for one in made), key=lambda item: item[0][0]):
        least = seconds(one.topology, leg_loads(one).sum(axis=1))
        if all(least < time for time, _ in found):
            try:
                found.append(_sized(one, slots))
            except PlanError as error:
                failed.append(error)
    if not found:
        raise failed[0]
    return min(found, key=lambda item: item[0])[1]


def _digest(prog: Program) -> str:
    """Of the plan, the topology, the legs and the rounds."""
    bands = prog.legs.bands
    legs = [
        x.tolist()
        for x in (bands.first, bands.classes, bands.at, bands.begin, bands.count, bands.place, bands.span, bands.cuts)
    ]
    limits = prog.max_inflight_bytes, prog.max_ops_per_group, prog.slots, prog.turns
    return digest(("program", prog.plan.digest, prog.topology, prog.legs.sharing, limits, legs))


WAYS: dict[str, tuple[tuple[bool, bool], ...]] = {
    "none": ((False, False),),
    "node": ((True, False),),
    "auto": ((True, True), (True, False), (False, False)),
}
"""(by node, relays between nodes) to choose from; the first of equals."""


def _program(p: Plan, where: Topology, on: Lines, by_node: bool, relays: bool) -> Iterator[Program]:
    """The program of one way to pass on, not divided into rounds yet; none where nothing is passed on in this way."""
    none = np.zeros(0, np.int64)
    bare = Legs(on, Bands(*[none] * 10), where.ranks_per_node if by_node else 1)
    groups = [[len(ranks) for ranks in nodes(bare, line, b)] for line, b in _blocks(on)]
    plots: list[Plot] = [(1, [(0, 0, 1)])] * len(groups)
    shed = _shed(on, groups) if relays else {}
    for b, nbytes in shed.items():
        plots[b] = _plot(int(on.nbytes[b]), len(groups[b]), len(groups[b]) * int(on.nbytes[b]) - nbytes)
    if shed or not relays:
        legs = replace(bare, bands=_bands(p, bare, groups, plots))
        yield Program(p, where, _cut(p, legs, groups), 1, 1, 0, 0, "")


def _blocks(on: Lines) -> Iterator[tuple[int, int]]:
    """(line, block) of all blocks."""
    return ((line, b) for line in range(len(on.holders)) for b in range(int(on.first[line]), int(on.first[line + 1])))


# what is passed on between nodes


def _shed(on: Lines, groups: list[list[int]]) -> dict[int, int]:
    """By block, how many bytes of its copies to nodes others of these are to pass on.

    The target is what no rank can go below: what the fullest takes in, or sends if each byte leaves its holders once.
    """
    line = np.repeat(np.arange(len(on.holders)), np.diff(on.first))
    far = ~on.near[line] & (on.addend == 0)
    copies = np.where(far, [len(sizes) for sizes in groups], 0)
    once = _by_line(on, np.where(copies > 0, on.nbytes, 0))
    held = [on.sets[i] for i in on.holders.tolist()]
    least = max([x.nbytes / Fraction(len(x.ranks)) for x in levels(once, held)[:1]], default=Fraction(0))
    target = max(math.ceil(least), _taken_in(on, groups, far))
    wanted = _within_target(_by_line(on, on.nbytes * copies), once, held, target)
    shed: dict[int, int] = {}
    for at, nbytes in enumerate(wanted):
        if nbytes:
            blocks = range(int(on.first[at]), int(on.first[at + 1]))
            shed |= _spread({b: int(on.nbytes[b]) for b in blocks if copies[b] > 1}, copies.tolist(), nbytes)
    return shed


def _by_line(on: Lines, sizes: Ints) -> list[int]:
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    out: list[int] = (ends[on.first[1:]] - ends[on.first[:-1]]).tolist()
    return out


def _taken_in(on: Lines, groups: list[list[int]], far: Bools) -> int:
    """The most bytes that a rank takes in from other nodes, each node taking every byte once.

    Receivers of far lines have no holder on their node, so all of them are on the wire.
    """
    total: dict[int, int] = {}
    sizes: dict[int, list[int]] = {}
    for b in np.flatnonzero(far).tolist():
        receivers = int(on.receivers[b])
        total[receivers] = total.get(receivers, 0) + int(on.nbytes[b])
        sizes[receivers] = groups[b]
    load: dict[int, Fraction] = {}
    for receivers, nbytes in total.items():
        shares = (Fraction(nbytes, q) for q in sizes[receivers] for _ in range(q))
        for rank, share in zip(on.sets[receivers], shares, strict=True):
            load[rank] = load.get(rank, Fraction(0)) + share
    return math.ceil(max(load.values(), default=Fraction(0)))


def _within_target(copies: list[int], once: list[int], held: list[Ranks], target: int) -> list[int]:
    """How much each line sheds so that no holder sends more than the target, as nearly as a few corrections get."""
    left = list(copies)
    for _ in range(6):
        high = [x for x in levels(left, held) if x.nbytes > target * len(x.ranks)]
        if not high:
            break
        number = {rank: n for n, x in enumerate(high) for rank in x.ranks}
        own = [max(number.get(rank, len(high)) for rank in ranks) for ranks in held]
        for n, x in enumerate(high):
            some = [i for i, at in enumerate(own) if at == n]
            least = sum(once[i] for i in some)
            over = sum(left[i] for i in some) - least
            keep = max(target * len(x.ranks) - least, 0)
            for i in some if over > 0 else ():
                left[i] = once[i] + (left[i] - once[i]) * min(keep, over) // over
    return [a - b for a, b in zip(copies, left, strict=True)]


def _spread(sizes: dict[int, int], copies: list[int], nbytes: int) -> dict[int, int]:
    """The bytes shed of each block: evenly over the large ones, or over all where that is not enough."""
    large = {b: size for b, size in sizes.items() if 16 * size >= max(sizes.values())}
    for some in (large, sizes):
        room = {b: (copies[b] - 1) * size for b, size in some.items()}
        total = sum(room.values())
        if total >= nbytes:
            return {b: free * nbytes // total for b, free in room.items()}
    return room


def _plot(size: int, count: int, straight: int) -> Plot:
    """Bands in which `straight` bytes of `count` copies of a content go straight: all nodes get and pass on the same.

    Classes are the fewest, of as many nodes each, of which one or more can be served straight: in a class with a node
    less than others one node would pass on twice as much. Chunk c goes straight to d classes of nodes, or d + 1, that
    begin with class c.
    """
    classes = next(c for c in range(2, count + 1) if count % c == 0 and c * straight >= count * size)
    d = min(classes * straight // (count * size), classes - 1)
    less = ((d + 1) * size * count - straight * classes) // (classes * count)
    plot = []
    for c in range(classes):
        at, end = c * size // classes, (c + 1) * size // classes
        marks = ((at, c, d), (min(at + less, end), c, d + 1), (end, 0, 0))
        plot += [one for one, after in itertools.pairwise(marks) if one[0] < after[0]]
    return classes, plot


# bands


Plot: TypeAlias = tuple[int, list[tuple[int, int, int]]]
"""How nodes pass on a content: number of classes, and (byte, first class, classes) of what goes straight."""


def _bands(p: Plan, legs: Legs, groups: list[list[int]], plots: Sequence[Plot]) -> Bands:
    """Bands of all blocks: a new one where the plot changes or a stripe does."""
    rows = [
        (b, *band)
        for b, (sizes, (_, plot)) in enumerate(zip(groups, plots, strict=True))
        for band in _striped(int(legs.lines.nbytes[b]), set(sizes) or {1}, plot)
    ]
    block, wanted, begin, count, place, span = np.array(rows, np.int64).reshape(-1, 6).T
    first = np.searchsorted(block, np.arange(len(groups) + 1))
    at = grid(legs.lines, p.batches).snapped(block, wanted)
    classes, none = np.array([n for n, _ in plots], np.int64), np.zeros(0, np.int64)
    return Bands(first, classes, at, begin, count, place, span, none, none, none)


def _striped(
    size: int, replicas: set[int], plot: list[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int, int, int]]:
    """The bands of a plot, each in stripes for nodes of several replicas: byte, first class, classes, place, span."""
    ends = [at for at, _, _ in plot[1:]] + [size]
    for (at, begin, count), end in zip(plot, ends, strict=True):
        span = end - at
        for place in sorted({-(-j * span // q) for q in replicas for j in range(q)}):
            if place < span:
                yield at + place, begin, count, place, span


def _cut(p: Plan, legs: Legs, groups: list[list[int]]) -> Legs:
    """The same with the first leg's lines cut among their holders."""
    on, bands = legs.lines, legs.bands
    size = np.diff(bands.at, append=0)
    size[bands.first[1:] - 1] = on.nbytes - bands.at[bands.first[1:] - 1]
    block = np.repeat(np.arange(len(groups)), np.diff(bands.first))
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(size * _straight_nodes(bands, block, groups))))
    begin = ends[bands.first[:-1]]
    line = np.repeat(np.arange(len(on.holders)), np.diff(on.first))
    start = begin - begin[on.first[:-1]][line]
    total = (ends[bands.first[on.first[1:]]] - begin[on.first[:-1]]).tolist()
    first, cuts = shared(on, total)
    whole = replace(legs, bands=replace(bands, start=start, cut_first=first, cuts=cuts))
    return replace(whole, bands=replace(whole.bands, cuts=_snapped(p, whole)))


def _straight_nodes(bands: Bands, block: Ints, groups: list[list[int]]) -> Ints:
    """To how many nodes each band goes straight."""
    count = np.array([len(sizes) for sizes in groups], np.int64)[block]
    classes = bands.classes[block]
    out = np.zeros(len(block), np.int64)
    for i in range(int(bands.count.max(initial=0))):
        kind = (bands.begin + i) % classes
        out += np.where(i < bands.count, (count - kind + classes - 1) // classes, 0)
    return out


def _snapped(p: Plan, legs: Legs) -> Ints:
    """The cuts at the last places not after them where contents may be cut."""
    cuts = legs.bands.cuts.copy()
    for line, (a, b) in enumerate(itertools.pairwise(legs.bands.cut_first.tolist())):
        if b - a > 2 and cuts[b - 1]:
            block, pos, lo, size = straight(legs, line)
            inner = cuts[a + 1 : b - 1]
            at = np.searchsorted(pos, inner, "right") - 1
            content = lo[at] + inner - pos[at]
            cut = grid(legs.lines, p.batches).snapped(block[at], np.minimum(content, lo[at] + size[at] - 1))
            whole = inner >= pos[at] + size[at]
            cuts[a + 1 : b - 1] = np.where(whole, inner, pos[at] + np.maximum(cut - lo[at], 0))
    return cuts


# loads, time and rounds


Loads: TypeAlias = NDArray[np.int64]
"""Bytes by ..., rank (in order) and link: near out, near in, far out, far in."""


def leg_loads(prog: Program) -> Loads:
    """Bytes by phase, leg, rank and link, all slots together."""
    on, ranks = prog.legs.lines, np.array(prog.ranks, np.int64)
    shape = int(on.addend.max(initial=0)) + 1, LEGS, len(ranks), 4
    out = np.zeros(math.prod(shape), np.int64)
    for line in range(len(on.holders)):
        of = streams(prog.legs, line)
        for index, link in _ends(prog.topology, ranks, of):
            code = np.ravel_multi_index((on.addend[of.block], of.leg - 1, index, link), shape)
            np.add.at(out, code, of.hi - of.lo)
    return out.reshape(shape)


def _ends(where: Topology, ranks: Ints, of: Streams) -> Iterator[tuple[Ints, Ints]]:
    """(place among the ranks, its link) of the senders and of the receivers."""
    far = of.sender // where.ranks_per_node != of.receiver // where.ranks_per_node
    yield np.searchsorted(ranks, of.sender), 2 * far
    yield np.searchsorted(ranks, of.receiver), 2 * far + 1


def round_loads(prog: Program) -> tuple[Loads, Ints]:
    """Bytes by phase, slot, turn, rank and link, exactly; and by turn and rank, the most messages of a round."""
    on, ranks = prog.legs.lines, np.array(prog.ranks, np.int64)
    shape = int(on.addend.max(initial=0)) + 1, prog.slots + LEGS - 1, prog.turns, len(ranks), 4
    out = np.zeros(math.prod(shape), np.int64)
    pairs: set[int] = set()
    for line in range(len(on.holders)):
        of = streams(prog.legs, line)
        cut = slices(prog, line, of)
        ends = list(_ends(prog.topology, ranks, of))
        (sender, _), (receiver, _) = ends
        turn = (sender + receiver) % prog.turns
        for index, link in ends:
            zero = np.zeros_like(turn)
            code = np.ravel_multi_index((on.addend[of.block], zero, turn, index, link), shape)
            np.add.at(out, code[cut.stream] + cut.slot * math.prod(shape[2:]), cut.hi - cut.lo)
        pairs.update(np.unique(((of.leg * prog.turns + turn) * len(ranks) + sender) * len(ranks) + receiver).tolist())
    return out.reshape(shape), _messages(np.array(sorted(pairs), np.int64), prog.turns, len(ranks))


def _messages(pairs: Ints, turns: int, ranks: int) -> Ints:
    """By turn and rank, how many (leg, sender, receiver) it is in."""
    out = np.zeros((turns, ranks), np.int64)
    rest, receiver = np.divmod(pairs, ranks)
    rest, sender = np.divmod(rest, ranks)
    np.add.at(out, (rest % turns, sender), 1)
    np.add.at(out, (rest % turns, receiver), 1)
    return out


def seconds(where: Topology, loads: Loads) -> float:
    """The time of rounds one after the other, each as long as its fullest link and one latency.

    `loads` are bytes by (..., rank, link).
    """
    rate = np.array([where.intra_bytes_per_s] * 2 + [where.inter_bytes_per_s] * 2)
    each = (loads / rate).max(axis=(-2, -1), initial=0.0)
    return float(each.sum() + where.latency_s * np.count_nonzero(each))


def _best_slots(prog: Program) -> tuple[float, int]:
    """The least time of the legs and in how many slots, pieces being as small as one likes."""
    loads = leg_loads(prog)
    return min((_estimate(prog.topology, loads, slots), slots) for slots in (SLOTS if loads[:, 1:].any() else (1,)))


def _estimate(where: Topology, loads: Loads, slots: int) -> float:
    """The time of the legs in so many slots, each leg one slot behind the one before."""
    total = 0.0
    for slot in range(slots + LEGS - 1):
        active = [leg for leg in range(LEGS) if 0 <= slot - leg < slots]
        total += seconds(where, loads[:, active].sum(axis=1) / slots)
    return total


def _sized(prog: Program, slots: int) -> tuple[float, Program]:
    """The program with as few turns and slots, from these on, as its limits ask for, and its time."""
    most = int(leg_loads(prog).sum(axis=(0, 1, 3)).max(initial=0))
    slots = min(max(-(-most // prog.max_inflight_bytes), slots), MOST_SLOTS)
    turns, before = 1, math.inf
    while True:
        sized = replace(prog, slots=slots, turns=turns)
        exact, messages = round_loads(sized)
        under_way = int(exact.sum(axis=-1).max(initial=0))
        if messages.max(initial=0) > prog.max_ops_per_group:
            turns = _more_turns(sized, f"max_ops_per_group={prog.max_ops_per_group}", int(messages.max()))
        elif under_way <= prog.max_inflight_bytes:
            return seconds(prog.topology, exact), sized
        elif under_way < before and slots < MOST_SLOTS:
            before = under_way
            slots = min(-(-slots * under_way * 33 // (32 * prog.max_inflight_bytes)) + 1, MOST_SLOTS)
        else:
            turns = _more_turns(sized, f"max_inflight_bytes={prog.max_inflight_bytes}", under_way)
            before = math.inf


def _more_turns(prog: Program, limit: str, least: int) -> int:
    turns, ranks = 2 * prog.turns, len(prog.ranks)
    if turns >= 4 * ranks or turns * prog.slots * ranks > MOST_ROUNDS:
        raise PlanError(f"{limit}: no round of this plan stays below {least}; pass {least} or more")
    return turns
