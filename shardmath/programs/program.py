"""Program: a plan as rounds of messages, with what is passed on on the way.

1. A program composes plans through layouts in which the destination holds less than it is to hold: in the first **leg**
   every node gets each byte once, replicas of a node holding stripes; or only some of the nodes get it. In later legs
   ranks of the destination pass on, to other nodes and then inside their own, what they have received.
2. The content of a block is cut into **bands**. A band goes straight from the holders to some of the nodes, to one
   **entry** rank in each; the entries of the other nodes have it from those, and the rest of each node from its entry.
3. The first leg is cut among senders as lines are. What goes from one rank to another is a **stream**; one that is
   passed on is passed on as it came.
4. Streams are cut into `slots` **slices**. A slice is passed on one slot later for every leg, so no rank sends what it
   does not have. Streams begin at different slots in turn, so that small ones, which stay whole, do not all go at once.
5. A **step** is (phase, slot, turn): phases bring the addends of what is folded in their order, turns divide the peers
   of a rank, and the legs, into groups. Steps are ordered, and a message is in one step at both ends: in the earliest
   step in which anybody waits all messages are posted, so nobody waits for ever.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from shardmath.base.arrays import Ints, begins, ranges
from shardmath.base.drawn import html, svg
from shardmath.base.errors import PlanError
from shardmath.base.given import plural
from shardmath.base.integers import whole
from shardmath.base.memo import memo
from shardmath.base.public import public
from shardmath.flows.topology import Topology
from shardmath.layouts.layout import Layout
from shardmath.plans.balance import Stretch, grid, kept
from shardmath.plans.demands import Lines, Ranks, wire
from shardmath.plans.plan import Plan, Transfer, spelled
from shardmath.programs.collectives import Collective, recognise

__all__ = [
    "Bands",
    "Legs",
    "Message",
    "Program",
    "Round",
    "Slices",
    "Step",
    "Streams",
    "nodes",
    "nodes_of",
    "slices",
    "straight",
    "streams",
    "turn_of",
]

Step: TypeAlias = tuple[int, int, int]
"""(phase, slot, turn), in the order in which ranks walk them."""


class Message(NamedTuple):
    """What goes between this rank and `peer` in one go: `direction` is "send", "receive", or "keep" for a copy that
    stays. `pieces` are listed row-major one after the other; from leg 2 on they are read from destination tensors."""

    peer: int
    direction: str
    nbytes: int
    pieces: tuple[Transfer, ...]
    leg: int

    def __str__(self) -> str:
        way = {"send": "to", "receive": "from", "keep": "of"}[self.direction]
        pieces = plural(self.pieces, "piece")
        return (
            f"{self.direction} {self.nbytes} B {way} rank {self.peer} in {pieces}, leg {self.leg}"
        )


class Round(NamedTuple):
    """One rank's messages of one step: posted together, done before the next."""

    step: Step
    messages: tuple[Message, ...]

    def __str__(self) -> str:
        phase, slot, turn = self.step
        return "\n  ".join((f"phase {phase}, slot {slot}, turn {turn}", *map(str, self.messages)))


@dataclass(frozen=True, slots=True, eq=False)
class Bands:
    """How the content of each block is cut, and the first leg among senders.

    Block b has the bands `first[b]..first[b+1]-1` and divides its nodes into `classes[b]` classes, node i into class i
    modulo that. Band i begins at byte `at[i]` of the content and goes straight to the `count[i]` classes from
    `begin[i]` on; in a node of q ranks its entry is the one at `place[i] * q // span[i]`. On the line of the first leg
    block b begins at byte `start[b]`, and holder h of line l sends from `cuts[cut_first[l] + h]` to the next cut.
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
    """What goes from rank to rank in one leg: bytes lo..hi-1 of the content of a block. Streams with one `root` are one
    stream of the first leg and what is passed on of it."""

    block: Ints
    leg: Ints
    sender: Ints
    receiver: Ints
    lo: Ints
    hi: Ints
    root: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Legs:
    """Who sends what to whom, and what is passed on: lines of a plan and their bands.

    Groups of `sharing` ranks share what enters them: nodes, or 1 where every rank is served by itself.
    """

    lines: Lines
    bands: Bands
    sharing: int
    _streams: dict[int, Streams] = field(default_factory=dict, init=False, repr=False)


@public
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Program:
    """What `schedule` returns. Equal programs do the same for the same names."""

    plan: Plan
    topology: Topology
    legs: Legs
    slots: int
    turns: int
    max_inflight_bytes: int
    max_ops_per_group: int
    digest: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        rounds = f"{plural(self.slots, 'slot')} of {plural(self.turns, 'turn')}"
        return f"<program of {self.plan!r}, {rounds}, {self.digest[:12]}>"

    def svg(self, *, tensor: str | None = None) -> str:
        """A picture as an SVG document: a tensor before and after, and bytes by sender and receiver, relays included.

        `tensor` is the one drawn (default: the first). Raises PlanError for one that the plan does not have.
        """
        return svg(self, tensor=tensor)

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of either side, ascending."""
        return self.plan.ranks

    @property
    def collectives(self) -> dict[str, Collective]:
        """The tensors whose move is one textbook operation within groups of ranks, by name."""
        found: dict[tuple[Layout, Layout], Collective | None] = {}
        for name, windows in self.plan.src.items():
            pair = windows[0], self.plan.dst[name][0]
            alone = len(windows) == len(self.plan.dst[name]) == 1
            if alone and pair not in found and set(pair[0].mesh.ranks) == set(pair[1].mesh.ranks):
                found[pair] = recognise(*pair)
        pairs = (
            (name, found.get((held[0], self.plan.dst[name][0])))
            for name, held in self.plan.src.items()
        )
        return {name: one for name, one in pairs if one is not None}

    def for_rank(self, rank: int) -> tuple[Round, ...]:
        """The rank's rounds, in order; none for a stranger."""
        rank = whole(rank, "a rank", PlanError)
        steps: dict[Step, dict[tuple[int, int, str], list[Transfer]]] = {}
        for step, leg, stretch in _of_rank(self, rank):
            way = (
                "send"
                if stretch.receiver != rank
                else "receive"
                if stretch.sender != rank
                else "keep"
            )
            peer = stretch.receiver if way == "send" else stretch.sender
            pieces = spelled(self.plan, self.legs.lines, stretch, relayed=leg > 1)
            steps.setdefault(step, {}).setdefault((peer, leg, way), []).extend(pieces)
        return tuple(
            Round(step, tuple(itertools.starmap(_message, sorted(steps[step].items()))))
            for step in sorted(steps)
        )


def _message(key: tuple[int, int, str], pieces: list[Transfer]) -> Message:
    peer, leg, way = key
    return Message(peer, way, sum(t.nbytes for t in pieces), tuple(pieces), leg)


@memo()
def nodes_of(ranks: Ranks, per_node: int) -> tuple[Ranks, ...]:
    """The ranks by node of `per_node` ranks, in order."""
    return tuple(
        tuple(group) for _, group in itertools.groupby(ranks, lambda rank: rank // per_node)
    )


def nodes(legs: Legs, line: int, block: int) -> tuple[Ranks, ...]:
    """The receivers of a block in the groups that share what enters: nodes, or every rank by itself."""
    alone = legs.lines.near[line] or legs.lines.addend[block]
    return nodes_of(wire(legs.lines, line, block), 1 if alone else legs.sharing)


class _Entries(NamedTuple):
    """Bands of blocks at their entries: which block, node and rank, bytes lo..hi-1 of the content, and which of these
    it comes through: itself where it comes straight from the holders."""

    block: Ints
    rank: Ints
    lo: Ints
    hi: Ints
    origin: Ints
    others: list[Ranks]


def _entries(legs: Legs, line: int) -> _Entries:
    """All entries of a line, block by block and node by node."""
    on = legs.lines
    parts: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
    others: list[Ranks] = []
    before = 0
    for block in range(int(on.first[line]), int(on.first[line + 1])):
        groups = nodes(legs, line, block)
        if groups:
            parts.append(_of_block(legs, block, groups, before))
            before += len(parts[-1][0])
            others += _others(groups, parts[-1][1].tolist())
    none = np.zeros(0, np.int64)
    table = [np.concatenate([none, *column]) for column in zip(*parts, strict=True)] or [none] * 5
    return _Entries(table[0], table[1], table[2], table[3], table[4], others)


def _of_block(
    legs: Legs, block: int, groups: tuple[Ranks, ...], before: int
) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Block, rank, lo, hi and origin of its entries, node by node; `before` entries stand before them."""
    bands, size, count = legs.bands, int(legs.lines.nbytes[block]), len(groups)
    a, b = int(bands.first[block]), int(bands.first[block + 1])
    lo = bands.at[a:b]
    hi = np.append(lo[1:], size)
    replicas = np.array([len(group) for group in groups], np.int64)
    flat = np.array(list(itertools.chain.from_iterable(groups)), np.int64)
    first = np.cumsum(replicas) - replicas
    rank = flat[first[:, None] + bands.place[a:b] * replicas[:, None] // bands.span[a:b]]
    index = np.arange(count * (b - a)).reshape(count, b - a)
    origin = (
        index if bands.classes[block] == 1 else index[_origin(legs, block, count), np.arange(b - a)]
    )
    full = np.full(index.size, block)
    ends = (lo, hi) if count == 1 else (np.tile(lo, count), np.tile(hi, count))
    return full, rank.ravel(), *ends, origin.ravel() + before


def _others(groups: tuple[Ranks, ...], entries: list[int]) -> list[Ranks]:
    """Of each entry, the other ranks of its node."""
    bands = len(entries) // len(groups)
    return [
        tuple(rank for rank in group if rank != entry) if len(group) > 1 else ()
        for i, group in enumerate(groups)
        for entry in entries[i * bands : (i + 1) * bands]
    ]


def _origin(legs: Legs, block: int, count: int) -> Ints:
    """For each node and band, the node from which it comes: itself where the band comes straight from the holders."""
    bands = legs.bands
    a, b, classes = int(bands.first[block]), int(bands.first[block + 1]), int(bands.classes[block])
    node = np.arange(count)[:, None]
    turn = (node % classes - bands.begin[a:b]) % classes
    relay = (bands.begin[a:b] + turn % bands.count[a:b]) % classes
    last = (count - 1 - relay) // classes
    out: Ints = np.where(
        turn < bands.count[a:b], node, relay + classes * np.minimum(node // classes, last)
    )
    return out


def straight(legs: Legs, line: int) -> tuple[Ints, Ints, Ints, Ints]:
    """What goes straight from the holders: its block, its first byte on the line and in the content, its size."""
    return _straight(legs, _entries(legs, line))[1:]


def _straight(legs: Legs, at: _Entries) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """The entries that are served straight from the holders; block, byte on the line and in the content, and size."""
    some = np.flatnonzero(at.origin == np.arange(len(at.origin)))
    block, size = at.block[some], at.hi[some] - at.lo[some]
    return some, block, _within(block, size) + legs.bands.start[block], at.lo[some], size


MOST_KEPT = 1 << 20
"""Streams that are kept with the legs of a program, 56 bytes each."""


def streams(legs: Legs, line: int) -> Streams:
    """All streams of a line: the first leg, and what is passed on of it.

    Who counts loads or proves a program walks through all lines several times. Where lines are many, most have few
    streams, which are kept with the legs; of the latest ones alone each would be lost before it is asked for again.
    """
    found = legs._streams.get(line)
    if found is None:
        found = _latest(legs, line)
        if len(found.block) * len(legs.lines.holders) <= MOST_KEPT:
            legs._streams[line] = found
    return found


@memo(512)
def _latest(legs: Legs, line: int) -> Streams:
    at = _entries(legs, line)
    some, _, pos, begin, size = _straight(legs, at)
    held = np.array(legs.lines.sets[legs.lines.holders[line]], np.int64)
    cuts = legs.bands.cuts[legs.bands.cut_first[line] : legs.bands.cut_first[line + 1]]
    holder, entry = ranges(
        np.searchsorted(cuts, pos, "right") - 1, np.searchsorted(cuts, pos + size, "left")
    )
    lo = np.maximum(cuts[holder] - pos[entry], 0)
    hi = np.minimum(cuts[holder + 1] - pos[entry], size[entry])
    full = lo < hi
    holder, entry, lo, hi = holder[full], entry[full], lo[full], hi[full]
    return _Legs(at, some[entry], held[holder], begin[entry] + lo, begin[entry] + hi).all()


def _within(group: Ints, size: Ints) -> Ints:
    """Where each item begins among those of its group, groups standing together."""
    ends = np.cumsum(size) - size
    first = begins(group)
    return ends - np.repeat(ends[first], np.diff(np.append(first, len(group))))


class _Legs:
    """The streams of the first leg of a line, by entry, and what the later ones make of them."""

    def __init__(self, at: _Entries, entry: Ints, sender: Ints, lo: Ints, hi: Ints) -> None:
        self.at, self.entry, self.sender, self.lo, self.hi = at, entry, sender, lo, hi
        self.first = np.searchsorted(entry, np.arange(len(at.rank) + 1))

    def all(self) -> Streams:
        """The three legs: straight, to other nodes, inside nodes."""
        at, count = self.at, len(self.entry)
        root = np.arange(count)
        straight = Streams(
            at.block[self.entry],
            np.ones(count, np.int64),
            self.sender,
            at.rank[self.entry],
            self.lo,
            self.hi,
            root,
        )
        passed = np.flatnonzero(at.origin != np.arange(len(at.origin)))
        inside = [i for i, others in enumerate(at.others) if others]
        spread = np.array([i for i in inside for _ in at.others[i]], np.int64)
        ranks = np.array([rank for i in inside for rank in at.others[i]], np.int64)
        legs = [straight, self._on(passed, at.rank[passed], at.rank[at.origin[passed]], 2)]
        legs.append(
            self._on(spread, ranks, at.rank[spread], np.where(at.origin[spread] == spread, 2, 3))
        )
        return Streams(*(np.concatenate(column) for column in zip(*legs, strict=True)))

    def _on(self, entry: Ints, receiver: Ints, sender: Ints, leg: Ints | int) -> Streams:
        """What came to these entries, passed on from senders to receivers."""
        origin = self.at.origin[entry]
        root, which = ranges(self.first[origin], self.first[origin + 1])
        legs = np.broadcast_to(leg, entry.shape)[which]
        return Streams(
            self.at.block[entry][which],
            legs,
            sender[which],
            receiver[which],
            self.lo[root],
            self.hi[root],
            root,
        )


class Slices(NamedTuple):
    """Streams cut: `stream[i]` sends bytes lo..hi-1 of the content of its block in slot `slot[i]`."""

    stream: Ints
    slot: Ints
    lo: Ints
    hi: Ints


def slices(prog: Program, line: int, of: Streams) -> Slices:
    """All slices of streams of a line that are not empty."""
    k = prog.slots
    inner = of.lo[:, None] + (of.hi - of.lo)[:, None] * np.arange(1, k) // k
    block = np.broadcast_to(of.block[:, None], inner.shape)
    cut = (
        grid(prog.legs.lines, prog.plan.batches)
        .snapped(block.ravel(), inner.ravel())
        .reshape(inner.shape)
    )
    bounds = np.hstack((of.lo[:, None], np.maximum(cut, of.lo[:, None]), of.hi[:, None]))
    slot = (np.arange(k) + (of.root + line)[:, None]) % k + of.leg[:, None] - 1
    stream, at = np.nonzero(np.diff(bounds, axis=1))
    return Slices(stream, slot[stream, at], bounds[stream, at], bounds[stream, at + 1])


def _of_rank(prog: Program, rank: int) -> Iterator[tuple[Step, int, Stretch]]:
    """(step, leg, stretch) of all that the rank keeps, sends and receives, in order."""
    on = prog.legs.lines
    for stretch in kept(on, rank):
        yield (int(on.addend[stretch.block]), 0, 0), 1, stretch
    place = {r: i for i, r in enumerate(prog.ranks)}
    for line in _lines_of(on, rank):
        everything = streams(prog.legs, line)
        mine = np.flatnonzero((everything.sender == rank) | (everything.receiver == rank))
        some = Streams(*(column[mine] for column in everything))
        for i, slot, lo, hi in zip(
            *(column.tolist() for column in slices(prog, line, some)), strict=True
        ):
            block, leg, sender, receiver = (int(column[i]) for column in some[:4])
            turn = turn_of(place[sender] + place[receiver], leg, len(place)) % prog.turns
            yield (int(on.addend[block]), slot, turn), leg, Stretch(block, sender, receiver, lo, hi)


Places = TypeVar("Places", int, Ints)


def turn_of(places: Places, leg: Places, ranks: int) -> Places:
    """Which turn what goes between two ranks, whose places add up to `places`, takes in a leg, if there are enough.

    With 2 `ranks` turns a rank has one peer in each; with 2 `ranks` for each leg, one peer and one leg.
    """
    return places + 2 * ranks * (leg - 1)


def _lines_of(on: Lines, rank: int) -> list[int]:
    """The lines that the rank holds or asks of."""
    mine = [i for i, ranks in enumerate(on.sets) if rank in ranks]
    block = np.flatnonzero(np.isin(on.receivers, mine))
    asking = np.searchsorted(on.first, block, "right") - 1
    return sorted({*np.flatnonzero(np.isin(on.holders, mine)).tolist(), *asking.tolist()})
