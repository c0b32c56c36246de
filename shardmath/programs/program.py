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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from shardmath.base.arguments import as_integer
from shardmath.base.arrays import Ints, Offsets, ranges
from shardmath.base.digest import digest
from shardmath.base.drawn import html, svg
from shardmath.base.errors import PlanError
from shardmath.base.public import public
from shardmath.base.text import plural
from shardmath.collectives.collective import Collective, recognise_all
from shardmath.flows.topology import Topology
from shardmath.layouts.holdings import Windows
from shardmath.plans.balance import make_grid
from shardmath.plans.demands import Demands
from shardmath.plans.plan import Plan, Transfer, spell_transfers
from shardmath.plans.stretches import Stretch, find_lines, list_kept
from shardmath.programs.legs import Legs, Streams
from shardmath.programs.messages import Round, Step, gather_rounds, itemsize_of, make_message
from shardmath.programs.streams import list_streams

__all__ = ["Program", "Slices", "cut_streams", "digest_program", "list_slices", "turn_of"]


@public
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Program:
    """A plan divided into rounds of messages, some of them relayed; made by `schedule`.

    Each rank-to-rank stream is cut into `slots` slices, so that a relay forwards one slice while it
    receives the next; the peers of a rank take `turns` turns. No rank has more than
    `max_inflight_bytes` bytes, or `max_ops_per_group` messages, under way in a round. Two programs
    are equal if they send the same messages in the same rounds.
    """

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
        pieces = _gather_pieces(self, rank)
        messages = []
        for key in sorted(pieces):
            ordered = _put_large_first(pieces[key])
            messages.append(make_message(*key, ordered))
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


_End: TypeAlias = tuple[Step, int, int, int]
"""One message of a rank: its step, sender, receiver and leg."""


def _gather_pieces(prog: Program, rank: int) -> dict[_End, list[Transfer]]:
    """The pieces of each message of a rank."""
    lines = prog.legs.lines
    pieces: dict[_End, list[Transfer]] = {}
    for step, leg, stretch in _list_stretches(prog, rank):
        end = step, stretch.sender, stretch.receiver, leg
        message = pieces.setdefault(end, [])
        message += spell_transfers(prog.plan, lines, stretch, relayed=leg > 1)
    return pieces


def _put_large_first(pieces: list[Transfer]) -> list[Transfer]:
    """The pieces with large elements first, so that no byte of their message is padding."""
    # Elements of one size, which is usual, need no order.
    sizes = list(map(itemsize_of, pieces))
    if min(sizes) < max(sizes):
        pieces.sort(key=itemsize_of, reverse=True)
    return pieces


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


def _list_stretches(prog: Program, rank: int) -> Iterator[tuple[Step, int, Stretch]]:
    """(step, leg, stretch) of all that the rank keeps, sends and receives, in order."""
    on = prog.legs.lines
    for stretch in list_kept(on, rank):
        # What stays on the rank takes no room, so neither slots nor turns divide it.
        phase = int(on.addend[stretch.block])
        step = phase, 0, 0
        yield step, 1, stretch
    for line in _find_lines(on, rank):
        every = list_streams(prog.legs, line)
        mine = every.sender == rank
        mine |= every.receiver == rank
        some = Streams(*(column[mine] for column in every))
        yield from _list_slices(prog, some)


def _list_slices(prog: Program, of: Streams) -> Iterator[tuple[Step, int, Stretch]]:
    """(step, leg, stretch) of all slices of streams, in order."""
    rows = _tabulate_slices(prog, of)
    for phase, turn, leg, block, sender, receiver, slot, lo, hi in rows:
        step = phase, slot, turn
        stretch = Stretch(block, sender, receiver, lo, hi)
        yield step, leg, stretch


def _tabulate_slices(prog: Program, of: Streams) -> list[list[int]]:
    """Of each slice of streams: phase, turn, leg, block, sender, receiver, slot, lo, hi."""
    phase = prog.legs.lines.addend[of.block]
    turn = _find_turns(prog, of)
    by_stream = np.array([phase, turn, of.leg, of.block, of.sender, of.receiver])
    cut = list_slices(prog, of)
    by_slice = by_stream[:, cut.stream]
    columns = np.vstack((by_slice, cut.slot, cut.lo, cut.hi))
    table = columns.T
    # Python's integers are quicker to walk than arrays.
    rows: list[list[int]] = table.tolist()
    return rows


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


def _find_lines(on: Demands, rank: int) -> list[int]:
    """The lines that the rank holds or asks of."""
    mine = [number for number, ranks in enumerate(on.sets) if rank in ranks]
    is_held = np.isin(on.holders, mine)
    is_asked = np.isin(on.receivers, mine)
    line_of_block = on.blocks.owners()
    holding = np.flatnonzero(is_held)
    asking = line_of_block[is_asked]
    found: list[int] = np.union1d(holding, asking).tolist()
    return found
