"""Program: a plan as rounds of messages, with what is relayed on the way.

1. A program composes plans through layouts in which the destination does not yet hold all. In the
   first **leg** every node gets each byte once, its replicas holding stripes, or only some of the
   nodes do. In later legs ranks of the destination relay what they have received to other nodes,
   and then inside their own.
2. What goes from one rank to another is a **stream** (`list_streams`). One that is relayed is relayed as
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

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np

from shardmath.base.arguments import as_integer
from shardmath.base.arrays import Ints, Offsets, number_alike, ranges
from shardmath.base.digest import digest
from shardmath.base.drawn import html, svg
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.layouts.holdings import Windows
from shardmath.plans.balance import make_grid
from shardmath.plans.collectives.collective import Collective, recognise_all
from shardmath.plans.demands import Demands
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan, Transfer
from shardmath.plans.programs.legs import Legs, Streams
from shardmath.plans.programs.messages import Message, Round, gather_rounds
from shardmath.plans.programs.spelling import spell_parts
from shardmath.plans.programs.streams import list_bundles
from shardmath.plans.programs.stretch_parts import Stretches, StretchParts, list_parts
from shardmath.plans.stretches import find_lines, list_kept

__all__ = ["Program", "Slices", "cut_streams", "digest_program", "list_slices", "turn_of"]


@public
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Program:
    """A plan divided into rounds of messages, some of them relayed; made by `schedule`.

    Each rank-to-rank stream is cut into `slots` slices, so that a relay forwards one slice while it
    receives the next; the peers of a rank take `turns` turns. No rank has more than
    `max_inflight_bytes` bytes, or `max_ops_per_group` messages, under way in a round. Two programs
    are equal if they send the same messages in the same rounds. `assumes_nodes` says whether nobody
    said where the nodes are: then `certify` and `crossing_bytes` are an error, as of a plan.
    """

    plan: Plan
    topology: Topology
    legs: Legs
    slots: int
    turns: int
    max_inflight_bytes: int
    max_ops_per_group: int
    digest: str
    assumes_nodes: bool = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        rounds = f"{plural(self.slots, 'slot')} of {plural(self.turns, 'turn')}"
        return f"<program of {self.plan!r}, {self.word_nodes()}, {rounds}, {self.digest[:12]}>"

    def word_nodes(self) -> str:
        """The size of its nodes, and whether they are assumed, in words."""
        nodes = f"nodes of {plural(self.topology.ranks_per_node, 'rank')}"
        return f"assumed {nodes}" if self.assumes_nodes else nodes

    def svg(self, *, tensor: str | None = None) -> str:
        """A picture as an SVG document: a tensor before and after, and bytes by sender and receiver, relays included.

        `tensor` is the one drawn (default: the first). Raises PlanError for one that the plan does not have.
        """
        return svg(self, tensor=tensor)

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def src(self) -> Mapping[str, Windows]:
        """Each tensor's windows at the source, by name."""
        return self.plan.src

    @property
    def dst(self) -> Mapping[str, Windows]:
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
        posted = _list_posted(self, rank)
        messages = _spell_messages(self, posted)
        return gather_rounds(messages, rank)


def digest_program(prog: Program) -> str:
    """The digest of the plan, the topology, the legs and the rounds."""
    bands = prog.legs.bands
    columns = [
        bands.first,
        bands.classes,
        bands.at,
        bands.begin,
        bands.count,
        bands.place,
        bands.span,
        bands.cuts,
    ]
    legs = [column.tolist() for column in columns]
    limits = prog.max_inflight_bytes, prog.max_ops_per_group, prog.slots, prog.turns
    return digest(("program", prog.plan.digest, prog.topology, prog.legs.sharing, limits, legs))


class _Posted(NamedTuple):
    """Stretches that a rank keeps, sends and receives, and the step and leg of each."""

    phase: Ints
    slot: Ints
    turn: Ints
    leg: Ints
    stretches: Stretches


def _spell_messages(prog: Program, posted: _Posted) -> list[Message]:
    """The messages of these stretches, in order of step, sender, receiver and leg."""
    demands = prog.legs.lines
    p = prog.plan
    given = posted.stretches
    keys = [
        posted.phase,
        posted.slot,
        posted.turn,
        given.sender,
        given.receiver,
        posted.leg,
    ]
    first, number = number_alike(keys)
    parts, message = _put_large_first(prog, given, number)
    is_relayed = posted.leg > 1
    transfers, by_part = spell_parts(p, demands, given, is_relayed, parts)
    numbers = np.arange(len(first) + 1)
    first_parts = np.searchsorted(message, numbers)
    by_message = Offsets(by_part.first[first_parts])
    columns = [key[first].tolist() for key in keys]
    messages = _make_messages(transfers, by_message, columns)
    return list(messages)


def _put_large_first(prog: Program, given: Stretches, message: Ints) -> tuple[StretchParts, Ints]:
    """The parts of stretches of these messages, message by message, and the message of each."""
    demands = prog.legs.lines
    batches = prog.plan.batches
    parts = list_parts(demands, batches, given)
    grid = make_grid(demands, batches)
    item = grid.item[parts.row]
    of_part = message[parts.stretch]
    # Large elements first, so that no byte of a message is padding; else in the order of stretches.
    order = np.lexsort((-item, of_part))
    return parts.take(order), of_part[order]


def _make_messages(
    transfers: list[Transfer], of: Offsets, columns: list[list[int]]
) -> Iterator[Message]:
    """Messages of these transfers, each with its step, sender, receiver and leg."""
    sizes = [t.nbytes for t in transfers]
    nbytes = np.array(sizes, np.int64)
    starts = of.begin(nbytes).tolist()
    totals = of.sums(nbytes).tolist()
    places = itertools.pairwise(of.first.tolist())
    for (i, k), total, *key in zip(places, totals, *columns, strict=True):
        phase, slot, turn, sender, receiver, leg = key
        yield Message(
            step=(phase, slot, turn),
            src_rank=sender,
            dst_rank=receiver,
            leg=leg,
            pieces=tuple(transfers[i:k]),
            starts=tuple(starts[i:k]),
            nbytes=total,
        )


class Slices(NamedTuple):
    """Streams cut: `stream[i]` sends bytes lo..hi-1 of the content of its block in slot
    `slot[i]`."""

    stream: Ints
    slot: Ints
    lo: Ints
    hi: Ints


def list_slices(prog: Program, of: Streams) -> Slices:
    """All slices of streams that are not empty."""
    cut = cut_streams(prog, of)
    line = find_lines(prog.legs.lines, of.block)
    # Each line begins one slot later than the line before, each leg one later than the leg before.
    slot = (cut.slot + line[cut.stream]) % prog.slots
    slot += of.leg[cut.stream] - 1
    return cut._replace(slot=slot)


def cut_streams(prog: Program, of: Streams) -> Slices:
    """All slices of streams that are not empty, in the slots that they would have in leg 1 of line 0."""
    # What is relayed is cut as it came: streams of one root, of a line, are cut once.
    line = find_lines(prog.legs.lines, of.block)
    most = of.root.max(initial=0) + 1
    roots = line * most + of.root
    _, one, root = np.unique(roots, return_index=True, return_inverse=True)
    borders = _find_borders(prog, of.block[one], of.lo[one], of.hi[one])
    size = np.diff(borders, axis=1)
    cut, at = size.nonzero()
    lo = borders[cut, at]
    hi = borders[cut, at + 1]
    counts = np.bincount(cut, minlength=len(one))
    which, stream = _give_to_streams(counts, root)
    # Streams of one root take the slots in one order.
    slot = at[which] + of.root[stream]
    return Slices(stream, slot % prog.slots, lo[which], hi[which])


def _give_to_streams(counts: Ints, root: Ints) -> tuple[Ints, Ints]:
    """(slice, stream) of every slice of each stream's root; roots have so many slices, one after the other."""
    by_root = Offsets.of_counts(counts)
    first = by_root.first[root]
    end = by_root.first[root + 1]
    return ranges(first, end)


def _find_borders(prog: Program, block: Ints, lo: Ints, hi: Ints) -> Ints:
    """Where slices of bytes lo..hi-1 of blocks begin and end: a row for each, one border more than there are slots.

    Borders are evenly spaced, and then snapped to rows of boxes.
    """
    lo = lo[:, None]
    hi = hi[:, None]
    inner = np.arange(1, prog.slots)
    length = hi - lo
    even = lo + length * inner // prog.slots
    where = make_grid(prog.legs.lines, prog.plan.batches)
    snapped = where.snapped(block.repeat(len(inner)), even.ravel())
    snapped = snapped.reshape(even.shape)
    # A row may begin before its stream does: the first slices are then empty.
    snapped = np.maximum(snapped, lo)
    return np.hstack((lo, snapped, hi))


def _list_posted(prog: Program, rank: int) -> _Posted:
    """All that the rank keeps, and then all that it sends and receives, line by line."""
    kept = _list_own_blocks(prog.legs.lines, rank)
    of = _list_own_streams(prog.legs, rank)
    cut = list_slices(prog, of)
    which = cut.stream
    sent = Stretches(
        block=of.block[which],
        sender=of.sender[which],
        receiver=of.receiver[which],
        lo=cut.lo,
        hi=cut.hi,
    )
    stretches = Stretches(*map(np.append, kept, sent))
    turn = _find_turns(prog, of)
    # What stays on the rank takes no room, so neither slots nor turns divide it.
    none = np.zeros_like(kept.block)
    return _Posted(
        phase=prog.legs.lines.addend[stretches.block],
        slot=np.append(none, cut.slot),
        turn=np.append(none, turn[which]),
        leg=np.append(none + 1, of.leg[which]),
        stretches=stretches,
    )


def _list_own_blocks(demands: Demands, rank: int) -> Stretches:
    """All that stays on the rank."""
    kept = list(list_kept(demands, rank))
    table = np.array(kept, np.int64)
    rows = table.reshape(-1, len(Stretches._fields))
    return Stretches(*rows.T)


def _list_own_streams(legs: Legs, rank: int) -> Streams:
    """All streams that the rank sends or receives, line by line."""
    none = np.zeros((len(Streams._fields), 0), np.int64)
    tables = [none]
    lines = _find_lines(legs.lines, rank)
    for found in list_bundles(legs, lines):
        of = found.streams
        mine = of.sender == rank
        mine |= of.receiver == rank
        every = np.stack(of)
        tables.append(every[:, mine])
    columns = np.hstack(tables)
    return Streams(*columns)


def _find_turns(prog: Program, of: Streams) -> Ints:
    """The turn in which each stream goes."""
    ranks = np.array(prog.ranks, np.int64)
    sender = np.searchsorted(ranks, of.sender)
    receiver = np.searchsorted(ranks, of.receiver)
    places = sender + receiver
    turn = turn_of(places, of.leg, len(ranks))
    return turn % prog.turns


Places = TypeVar("Places", int, Ints)


def turn_of(places: Places, leg: Places, ranks: int) -> Places:
    """The turn of what goes between two ranks in a leg, if there are enough turns.

    `places` is the sum of the places of the two ranks among all. With 2 `ranks` turns a rank has
    one peer in each; with 2 `ranks` for each leg, one peer and one leg.
    """
    return places + 2 * ranks * (leg - 1)


def _find_lines(demands: Demands, rank: int) -> Ints:
    """The lines that the rank holds or asks of."""
    is_mine = np.array([rank in ranks for ranks in demands.sets], bool)
    is_held = is_mine[demands.holders]
    is_asked = is_mine[demands.receivers]
    asking = demands.blocks.owners()[is_asked]
    is_held[asking] = True
    return np.flatnonzero(is_held)
