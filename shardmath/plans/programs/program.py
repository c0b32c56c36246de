"""Program: a plan as rounds of messages, with relays on the way.

1. A program composes plans through layouts in which the destination is not complete yet. In the
   first **leg** every node, or only some nodes, get each byte once, as stripes on their replicas.
   In later legs ranks of the destination relay what they have received, to other nodes and then
   inside their own node.
2. The bytes that go from one rank to another are a **stream** (`list_streams`). A stream is relayed as
   it arrived.
3. Streams are cut into `slots` **slices**. A slice is relayed one slot later for every leg, so no
   rank sends what it does not have. Slots may **taper off**: the last ones are lighter, so that little is
   left to relay at the end. Streams begin at different slots in turn, so that small ones, which stay
   whole, do not all go at once.
4. A **step** is (phase, slot, turn): phases bring the addends of a fold in their order,
   turns divide the peers of a rank, and the legs, into groups. Steps are ordered, and a message is
   in one step at both ends: in the earliest step in which any rank waits all messages are posted, so
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
from shardmath.plans.collectives.collective import Collective, recognize_all
from shardmath.plans.demands import Demands
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan
from shardmath.plans.programs.legs import (
    HANDED,
    HANDING,
    Legs,
    Streams,
    find_lags,
    find_relayed,
)
from shardmath.plans.programs.messages import Message, Round, gather_rounds
from shardmath.plans.programs.streams import list_bundles
from shardmath.plans.spelling import spell_parts
from shardmath.plans.stretch_parts import Stretches, StretchParts, list_parts
from shardmath.plans.stretches import list_kept
from shardmath.plans.transfers import Transfer

__all__ = [
    "Program",
    "Slices",
    "cut_streams",
    "digest_program",
    "list_slices",
    "rotate_slots",
    "turn_of",
]


@public
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Program:
    """A plan divided into rounds of messages between ranks, where a rank can forward bytes that it has received; made
    by `schedule`.

    Each rank-to-rank stream is cut into `slots` slices, so that a relay forwards one slice while it
    receives the next; the peers of a rank take `turns` turns. If `weights` are given, one per slot, slices are not
    even: each is as large as its slot is heavy. No rank has more than
    `max_inflight_bytes` bytes, or `max_ops_per_group` messages, in flight in a round. Two programs
    are equal if they send the same messages in the same rounds. `assumes_nodes` says that no topology
    was given: `certify` and `crossing_bytes` then raise PlanError, as for a plan without a topology.
    Raises PlanError if there are weights, but not one per slot.
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
    weights: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.weights and len(self.weights) != self.slots:
            what = f"{plural(self.slots, 'slot')} but {plural(self.weights, 'weight')}"
            raise PlanError(f"a program has {what}; give weights=() for slots of equal weight")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        where = self.word_nodes()
        return f"<program of {self.plan!r}, {where}, {self.word_rounds()}, {self.digest[:12]}>"

    def word_rounds(self) -> str:
        """Return a text that says how many slots and turns the program has, and how many slots are lighter than
        others."""
        rounds = f"{plural(self.slots, 'slot')} of {plural(self.turns, 'turn')}"
        lighter = sum(weight < max(self.weights) for weight in self.weights)
        return f"{rounds}, {lighter} of them lighter" if lighter else rounds

    def word_nodes(self) -> str:
        """Return a text that says how many ranks a node of the program has, and whether that is assumed."""
        nodes = f"nodes of {plural(self.topology.ranks_per_node, 'rank')}"
        return f"assumed {nodes}" if self.assumes_nodes else nodes

    def svg(self, *, tensor: str | None = None) -> str:
        """Draw the program's rounds as an SVG document: what each rank sends and receives in each round, and the bound
        of `certify`. If `tensor` is given, draw that tensor's layouts and the bytes from rank to rank instead.

        The bytes include forwarded ones; `program.plan.svg()` is the picture without them. Raises PlanError for a
        tensor that the plan does not have.
        """
        return svg(self, tensor=tensor)

    def _repr_html_(self) -> str:
        return html(self)

    @property
    def src(self) -> Mapping[str, Windows]:
        """The Windows (layouts that together hold a tensor) of each tensor at the source, by name."""
        return self.plan.src

    @property
    def dst(self) -> Mapping[str, Windows]:
        """The Windows (layouts that together hold a tensor) of each tensor at the destination, by name."""
        return self.plan.dst

    @property
    def is_tree(self) -> bool:
        """True for a plan between mappings from names to layouts, False for a plan of one tensor without a name."""
        return self.plan.is_tree

    @property
    def in_part(self) -> tuple[str, ...]:
        """The names, ascending, of tensors that the destination does not hold completely."""
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
        """The ranks of source and destination together, ascending, each once."""
        return self.plan.ranks

    def fill(self, name: str) -> complex | None:
        """Return the value that fills the tensor `name` at its destination before bytes arrive; None for no fill."""
        return self.plan.fill(name)

    def divisor(self, name: str) -> int:
        """Return the final divisor of the tensor `name`: the number of addends (partial values) of an average, or 1."""
        return self.plan.divisor(name)

    @property
    def collectives(self) -> dict[str, Collective]:
        """A dict from tensor name to Collective, for each tensor whose move is equivalent to a collective, such as an
        all-gather."""
        return recognize_all(self.plan)

    def for_rank(self, rank: int) -> tuple[Round, ...]:
        """Return the rounds of messages that `rank` exchanges, in order; () for a rank that is neither in the source
        nor in the destination."""
        rank = as_integer(rank, "a rank", PlanError)
        messages = _spell_messages(self, _list_posted(self, rank))
        return gather_rounds(messages, rank)


def digest_program(prog: Program) -> str:
    """Return a digest of everything that the program sends: plan, topology, hops and rounds."""
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
    mates = prog.legs.mates
    if mates is not None:
        columns += [mates.first, mates.rank, mates.feeder]
    legs = [column.tolist() for column in columns]
    limits = prog.max_inflight_bytes, prog.max_ops_per_group, prog.slots, prog.turns, *prog.weights
    return digest(("program", prog.plan.digest, prog.topology, prog.legs.sharing, limits, legs))


class _Posted(NamedTuple):
    """Stretches that a rank keeps, sends and receives, and the step, the ends and the leg of the message of each.

    A stretch goes from a rank that has it in its tensors to one that needs it there. If it goes over a mate, one end of
    its message is the mate, and the other end of the stretch is `beyond`.
    """

    phase: Ints
    slot: Ints
    turn: Ints
    sender: Ints
    receiver: Ints
    leg: Ints
    beyond: Ints
    stretches: Stretches


def _spell_messages(prog: Program, posted: _Posted) -> list[Message]:
    """The messages of these stretches, in order of step, sender, receiver and leg."""
    stretches = posted.stretches
    keys = [
        posted.phase,
        posted.slot,
        posted.turn,
        posted.sender,
        posted.receiver,
        posted.leg,
        posted.beyond,
    ]
    # Stretches with equal keys go in one message.
    first, message_of_stretch = number_alike(keys)
    parts, message_of_part = _put_large_first(prog, stretches, message_of_stretch)
    is_relayed = find_relayed(posted.leg)
    transfers, by_part = spell_parts(prog.plan, prog.legs.lines, stretches, parts, is_relayed)
    numbers = np.arange(len(first) + 1)
    first_parts = np.searchsorted(message_of_part, numbers)
    by_message = Offsets(by_part.first[first_parts])
    *columns, _ = [key[first].tolist() for key in keys]
    messages = _make_messages(list(transfers), by_message, columns)
    return list(messages)


def _put_large_first(
    prog: Program, stretches: Stretches, message: Ints
) -> tuple[StretchParts, Ints]:
    """The parts of stretches, given the message of each stretch: message by message; and the message of each part."""
    demands = prog.legs.lines
    parts = list_parts(demands, stretches)
    itemsize = make_grid(demands, prog.plan.batches).item[parts.row]
    message_of_part = message[parts.stretch]
    # Large elements first, so that a message needs no padding; otherwise in the order of stretches.
    order = np.lexsort((-itemsize, message_of_part))
    return parts.take(order), message_of_part[order]


def _make_messages(
    transfers: list[Transfer], by_message: Offsets, columns: list[list[int]]
) -> Iterator[Message]:
    """Messages of these transfers, given the columns of steps, senders, receivers and legs."""
    sizes = [t.nbytes for t in transfers]
    nbytes = np.array(sizes, np.int64)
    starts = by_message.begin(nbytes).tolist()
    totals = by_message.sums(nbytes).tolist()
    places = itertools.pairwise(by_message.first.tolist())
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
    """Pieces of streams (bytes between two ranks): bytes lo[i]..hi[i]-1 of `stream[i]` go in time slot `slot[i]`."""

    stream: Ints
    slot: Ints
    lo: Ints
    hi: Ints


def list_slices(prog: Program, streams: Streams) -> Slices:
    """Cut `streams` (bytes from rank to rank) into nonempty Slices, each with the time slot in which it is sent."""
    slices = cut_streams(prog, streams)
    line = prog.legs.lines.blocks.owners_of(streams.block)
    slot = rotate_slots(prog, slices.slot, line[slices.stream])
    lag = find_lags(prog.legs, streams.leg)
    return slices._replace(slot=slot + lag[slices.stream])


def rotate_slots(prog: Program, slot: Ints, by: Ints | int) -> Ints:
    """Return the time slots that are `by` places after `slot`, in a circle of the heaviest slots: all slots if they are
    even. Lighter slots are returned as they are.

    Streams that are too small to be cut go whole in one slot, and not all of them should go in the same one.
    """
    order, lighter = _order_slots(prog)
    place = np.argsort(order)[slot]
    heavy = prog.slots - lighter
    rotated = lighter + (place - lighter + by) % heavy
    return order[np.where(place < lighter, place, rotated)]


def _order_slots(prog: Program) -> tuple[Ints, int]:
    """The slots in the order of a stream's slices, lightest first, and the number of slots that are not the heaviest.

    Cuts move back to the begin of a row, so the first slice is shorter than planned, and the last one longer. A stream
    that is not cut is all last slice. In this order, the lightest slot has the first slice, and a heavy one the last.
    """
    weights = _list_weights(prog)
    # Equally heavy slots stay in their order.
    order: Ints = np.argsort(weights, kind="stable")
    return order, int(np.count_nonzero(weights < weights.max()))


def _list_weights(prog: Program) -> Ints:
    """The weight of each slot."""
    return np.array(prog.weights or [1] * prog.slots, np.int64)


def cut_streams(prog: Program, streams: Streams) -> Slices:
    """Cut `streams` (bytes from one rank to another) into Slices (ranges of bytes), and number the time slot of each as
    if nothing were forwarded. The caller must add a slot for each earlier hop, so that bytes are forwarded only after
    they arrive."""
    # A relayed stream is cut as it arrived, so the streams of one root of a line are cut once.
    line = prog.legs.lines.blocks.owners_of(streams.block)
    roots_per_line = streams.root.max(initial=0) + 1
    roots = line * roots_per_line + streams.root
    _, first, root = np.unique(roots, return_index=True, return_inverse=True)
    borders = _find_borders(prog, streams.block[first], streams.lo[first], streams.hi[first])
    size = np.diff(borders, axis=1)
    # Slice i is number `at[i]` of the slices of root `cut_root[i]`; empty ones are left out.
    cut_root, at = size.nonzero()
    lo = borders[cut_root, at]
    hi = borders[cut_root, at + 1]
    counts = np.bincount(cut_root, minlength=len(first))
    slice_index, stream = _give_to_streams(counts, root)
    order, _ = _order_slots(prog)
    slot = order[at[slice_index]]
    # Roots begin at different slots; all streams of one root begin at the same.
    slot = rotate_slots(prog, slot, streams.root[stream])
    return Slices(stream, slot, lo[slice_index], hi[slice_index])


def _give_to_streams(counts: Ints, root: Ints) -> tuple[Ints, Ints]:
    """(slice, stream) for every slice of each stream's root, given how many slices each root has."""
    by_root = Offsets.of_counts(counts)
    first = by_root.first[root]
    end = by_root.first[root + 1]
    return ranges(first, end)


def _find_borders(prog: Program, block: Ints, lo: Ints, hi: Ints) -> Ints:
    """The borders of the slices of bytes lo..hi-1 of blocks: by block a row of slots + 1 borders.

    Each slice has its slot's share of the bytes; then borders are snapped to rows of boxes.
    """
    lo = lo[:, None]
    hi = hi[:, None]
    order, _ = _order_slots(prog)
    ends = _list_weights(prog)[order].cumsum()
    inner, total = ends[:-1], ends[-1]
    length = hi - lo
    # length * inner // total, in two parts: the product may exceed 64 bits.
    planned = lo + length // total * inner + length % total * inner // total
    grid = make_grid(prog.legs.lines, prog.plan.batches)
    snapped = grid.snapped(block.repeat(len(inner)), planned.ravel())
    snapped = snapped.reshape(planned.shape)
    # A row may begin before its stream does: the first slices are then empty.
    snapped = np.maximum(snapped, lo)
    return np.hstack((lo, snapped, hi))


def _list_posted(prog: Program, rank: int) -> _Posted:
    """Everything that the rank keeps, then everything that it sends and receives, line by line."""
    kept = _list_kept_blocks(prog.legs.lines, rank)
    streams = _list_streams_of(prog.legs, rank)
    slices = list_slices(prog, streams)
    stream = slices.stream
    has_tensors = np.where(streams.leg == HANDED, streams.beyond, streams.sender)
    needs_them = np.where(streams.leg == HANDING, streams.beyond, streams.receiver)
    moved = Stretches(
        block=streams.block[stream],
        sender=has_tensors[stream],
        receiver=needs_them[stream],
        lo=slices.lo,
        hi=slices.hi,
    )
    stretches = Stretches(*map(np.append, kept, moved))
    turn = _find_turns(prog, streams)
    # Bytes that stay on the rank are not staged, so neither slots nor turns divide them.
    zero = np.zeros_like(kept.block)
    return _Posted(
        phase=prog.legs.lines.addend[stretches.block],
        slot=np.append(zero, slices.slot),
        turn=np.append(zero, turn[stream]),
        sender=np.append(kept.sender, streams.sender[stream]),
        receiver=np.append(kept.receiver, streams.receiver[stream]),
        leg=np.append(zero + 1, streams.leg[stream]),
        beyond=np.append(zero, streams.beyond[stream]),
        stretches=stretches,
    )


def _list_kept_blocks(demands: Demands, rank: int) -> Stretches:
    """All blocks that stay on the rank."""
    kept = list(list_kept(demands, rank))
    table = np.array(kept, np.int64)
    rows = table.reshape(-1, len(Stretches._fields))
    return Stretches(*rows.T)


def _list_streams_of(legs: Legs, rank: int) -> Streams:
    """All streams that the rank sends or receives, line by line."""
    empty = np.zeros((len(Streams._fields), 0), np.int64)
    tables = [empty]
    lines = _find_lines(legs, rank)
    for bundle in list_bundles(legs, lines):
        streams = bundle.streams
        is_posted = (streams.sender == rank) | (streams.receiver == rank)
        tables.append(np.stack(streams)[:, is_posted])
    columns = np.hstack(tables)
    return Streams(*columns)


def _find_turns(prog: Program, streams: Streams) -> Ints:
    """The turn in which each stream goes."""
    ranks = np.array(prog.ranks, np.int64)
    sender = np.searchsorted(ranks, streams.sender)
    receiver = np.searchsorted(ranks, streams.receiver)
    index_sums = sender + receiver
    turn = turn_of(index_sums, streams.leg, len(ranks))
    return turn % prog.turns


Places = TypeVar("Places", int, Ints)


def turn_of(places: Places, leg: Places, ranks: int) -> Places:
    """Return a number t for two ranks: they exchange messages in turn t % n, if there are n turns. `places` is the sum
    of their indices among `ranks` ranks; `leg` is 1 for the first hop of the bytes, 2 for the second.

    With 2 * `ranks` turns a rank has one peer in each turn; with 2 * `ranks` turns for each leg, one peer and one leg.
    """
    return places + 2 * ranks * (leg - 1)


def _find_lines(legs: Legs, rank: int) -> Ints:
    """The lines that the rank holds, of which it asks for a block, or of which it is a mate."""
    demands = legs.lines
    has_rank = np.array([rank in ranks for ranks in demands.sets], bool)
    is_listed = has_rank[demands.holders]
    is_asked = has_rank[demands.receivers]
    asked_lines = demands.blocks.owners()[is_asked]
    is_listed[asked_lines] = True
    if legs.mates is not None:
        is_listed[Offsets(legs.mates.first).owners()[legs.mates.rank == rank]] = True
    return np.flatnonzero(is_listed)
