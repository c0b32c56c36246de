"""Program: a plan as rounds of messages, with what is relayed on the way.

1. A program composes plans through layouts in which the destination does not yet hold all. In the
   first **leg** every node gets each byte once, its replicas holding stripes, or only some of the
   nodes do. In later legs ranks of the destination relay what they have received to other nodes,
   and then inside their own.
2. What goes from one rank to another is a **stream** (`streams`). One that is relayed is relayed as
   it came.
3. Streams are cut into `slots` **slices**. A slice is relayed one slot later for every leg, so no
   rank sends what it does not have. Streams begin at different slots in turn, so that small ones,
   which stay whole, do not all go at once.
4. A **step** is (phase, slot, turn): phases bring the addends of what is folded in their order,
   turns divide the peers of a rank, and the legs, into groups. Steps are ordered, and a message is
   in one step at both ends: in the earliest step in which anybody waits all messages are posted, so
   there is no deadlock.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from shardmath.base.arrays import Ints
from shardmath.base.drawn import html, svg
from shardmath.base.errors import PlanError
from shardmath.base.given import plural
from shardmath.base.integers import as_integer
from shardmath.base.public import public
from shardmath.flows.topology import Topology
from shardmath.layouts.layout import Layout
from shardmath.plans.balance import Stretch, grid, kept
from shardmath.plans.demands import Demands
from shardmath.plans.plan import Plan, Transfer, spelled
from shardmath.programs.collectives import Collective, recognise_all
from shardmath.programs.streams import Legs, Streams, streams

__all__ = ["Message", "Program", "Round", "Slices", "Step", "slices", "turn_of"]

Step: TypeAlias = tuple[int, int, int]
"""(phase, slot, turn), in the order in which ranks walk them."""


class Message(NamedTuple):
    """What goes between this rank and `peer` in one go.

    `direction` is "send", "receive", or "keep" for a copy that stays. `pieces` are listed row-major
    one after the other; from leg 2 on they are read from destination tensors.
    """

    peer: int
    direction: str
    nbytes: int
    pieces: tuple[Transfer, ...]
    leg: int

    def __str__(self) -> str:
        way = {"send": "to", "receive": "from", "keep": "of"}[self.direction]
        what = f"{self.direction} {self.nbytes} B {way} rank {self.peer}"
        return f"{what} in {plural(self.pieces, 'piece')}, leg {self.leg}"


class Round(NamedTuple):
    """One rank's messages of one step: posted together, done before the next."""

    step: Step
    messages: tuple[Message, ...]

    def __str__(self) -> str:
        phase, slot, turn = self.step
        return "\n  ".join((f"phase {phase}, slot {slot}, turn {turn}", *map(str, self.messages)))


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
    def src(self) -> Mapping[str, tuple[Layout, ...]]:
        """Each tensor's windows at the source, by name."""
        return self.plan.src

    @property
    def dst(self) -> Mapping[str, tuple[Layout, ...]]:
        """Each tensor's windows at the destination, by name."""
        return self.plan.dst

    @property
    def is_tree(self) -> bool:
        """Whether tensors have names."""
        return self.plan.is_tree

    @property
    def in_part(self) -> tuple[str, ...]:
        """The tensors, ascending, of which no rank of the destination holds some element."""
        return self.plan.in_part

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """The ranks of the source, ascending."""
        return self.plan.src_ranks

    @property
    def dst_ranks(self) -> tuple[int, ...]:
        """The ranks of the destination, ascending."""
        return self.plan.dst_ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of either side, ascending."""
        return self.plan.ranks

    def fill(self, name: str) -> complex | None:
        """As `Plan.fill`."""
        return self.plan.fill(name)

    def divisor(self, name: str) -> int:
        """As `Plan.divisor`."""
        return self.plan.divisor(name)

    @property
    def collectives(self) -> dict[str, Collective]:
        """The tensors whose move is one textbook operation within groups of ranks, by name."""
        return recognise_all(self.plan)

    def for_rank(self, rank: int) -> tuple[Round, ...]:
        """The rank's rounds, in order; none for a stranger."""
        rank = as_integer(rank, "a rank", PlanError)
        steps: dict[Step, _Pieces] = {}
        for step, leg, stretch in _list_stretches(self, rank):
            peer, direction = _find_peer(stretch, rank)
            pieces = spelled(self.plan, self.legs.lines, stretch, relayed=leg > 1)
            by_message = steps.setdefault(step, {})
            by_message.setdefault((peer, leg, direction), []).extend(pieces)
        return tuple(Round(step, _make_messages(steps[step])) for step in sorted(steps))


_Pieces: TypeAlias = dict[tuple[int, int, str], list[Transfer]]
"""The pieces of each message of a step, by its peer, leg and direction."""


def _find_peer(stretch: Stretch, rank: int) -> tuple[int, str]:
    """The peer of a rank in a stretch, and which way its message goes."""
    if stretch.receiver != rank:
        return stretch.receiver, "send"
    if stretch.sender != rank:
        return stretch.sender, "receive"
    return rank, "keep"


def _make_messages(by_message: _Pieces) -> tuple[Message, ...]:
    """The messages of one step, in order of peer, leg and direction."""
    messages = []
    for (peer, leg, direction), pieces in sorted(by_message.items()):
        nbytes = sum(t.nbytes for t in pieces)
        messages.append(Message(peer, direction, nbytes, tuple(pieces), leg))
    return tuple(messages)


class Slices(NamedTuple):
    """Streams cut: `stream[i]` sends bytes lo..hi-1 of the content of its block in slot
    `slot[i]`."""

    stream: Ints
    slot: Ints
    lo: Ints
    hi: Ints


def slices(prog: Program, line: int, of: Streams) -> Slices:
    """All slices of streams of a line that are not empty."""
    count = prog.slots
    lo, hi = of.lo[:, None], of.hi[:, None]
    # One row per stream, one column per slice: its borders, evenly spaced and then snapped to rows
    # of boxes.
    even = lo + (hi - lo) * np.arange(1, count) // count
    block = np.broadcast_to(of.block[:, None], even.shape)
    where = grid(prog.legs.lines, prog.plan.batches)
    snapped = where.snapped(block.ravel(), even.ravel()).reshape(even.shape)
    # A row may begin before its stream does: the first slices are then empty.
    borders = np.hstack((lo, np.maximum(snapped, lo), hi))
    # Streams of one root take the slots in one order, each leg one slot later.
    first_slot = (of.root + line)[:, None]
    slot = (np.arange(count) + first_slot) % count + of.leg[:, None] - 1
    stream, at = np.nonzero(np.diff(borders, axis=1))
    return Slices(stream, slot[stream, at], borders[stream, at], borders[stream, at + 1])


def _list_stretches(prog: Program, rank: int) -> Iterator[tuple[Step, int, Stretch]]:
    """(step, leg, stretch) of all that the rank keeps, sends and receives, in order."""
    on = prog.legs.lines
    for stretch in kept(on, rank):
        yield (int(on.addend[stretch.block]), 0, 0), 1, stretch
    for line in _find_lines(on, rank):
        every = streams(prog.legs, line)
        mine = np.flatnonzero((every.sender == rank) | (every.receiver == rank))
        some = Streams(*(column[mine] for column in every))
        yield from _list_slices(prog, line, some)


def _list_slices(prog: Program, line: int, of: Streams) -> Iterator[tuple[Step, int, Stretch]]:
    """(step, leg, stretch) of all slices of streams of a line, in order."""
    ranks = np.array(prog.ranks, np.int64)
    places = np.searchsorted(ranks, of.sender) + np.searchsorted(ranks, of.receiver)
    turns = turn_of(places, of.leg, len(ranks)) % prog.turns
    phases = prog.legs.lines.addend[of.block]
    cut = slices(prog, line, of)
    # By slice: its slot and bytes, and what it has of its stream.
    bytes_ = zip(cut.slot.tolist(), cut.lo.tolist(), cut.hi.tolist(), strict=True)
    columns = phases, turns, of.leg, of.block, of.sender, of.receiver
    rest = zip(*(column[cut.stream].tolist() for column in columns), strict=True)
    for (slot, lo, hi), (phase, turn, leg, block, sender, receiver) in zip(
        bytes_, rest, strict=True
    ):
        yield (phase, slot, turn), leg, Stretch(block, sender, receiver, lo, hi)


Places = TypeVar("Places", int, Ints)


def turn_of(places: Places, leg: Places, ranks: int) -> Places:
    """The turn of what goes between two ranks in a leg, if there are enough turns.

    `places` is the sum of the places of the two ranks among all. With 2 `ranks` turns a rank has
    one peer in each; with 2 `ranks` for each leg, one peer and one leg.
    """
    return places + 2 * ranks * (leg - 1)


def _find_lines(on: Demands, rank: int) -> list[int]:
    """The lines that the rank holds or asks of."""
    mine = [i for i, ranks in enumerate(on.sets) if rank in ranks]
    holding = np.flatnonzero(np.isin(on.holders, mine))
    block = np.flatnonzero(np.isin(on.receivers, mine))
    asking = np.searchsorted(on.first, block, "right") - 1
    return sorted({*holding.tolist(), *asking.tolist()})
