"""Proof that a program brings every rank what its plan promises, without deadlock.

The proof reads what `for_rank` expands: the lines (bytes with equal holders), and the streams of each
(bytes that go from one rank to another, in one hop, a **leg**). Once these have the right types (`shapes`):

1. The lines are proved as the plan's lines are (`plan_proof`): every holder has what they ask for,
   every receiver wants it.
2. **Once**: end to end, the streams to each rank that asks for a block are the block's content, and
   no stream goes to another rank.
3. **In hand**: a stream of the first leg leaves a holder, or a rank that a holder hands the same bytes one
   slot earlier, for this stream alone. No other such stream of its line has its root. A relayed stream repeats
   a stream of an earlier leg that arrived at its sender: same root and same bytes, so cut at the same places,
   each slice at least one slot later. It is not added on top of another addend.
4. Streams begin and end where pieces may be cut.
5. No rank has more in flight in a round than the program's limits allow.

There is no deadlock, since a message is in one step at both ends and every rank walks its steps in
their order.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, join, lengths, number_alike, ranges
from shardmath.base.errors import PlanError
from shardmath.layouts.holdings import label
from shardmath.plans.balance import make_grid, measure_lines
from shardmath.plans.demands import Demands
from shardmath.plans.programs.legs import (
    HANDED,
    HANDING,
    Bundle,
    Streams,
    count_legs,
    find_lags,
)
from shardmath.plans.programs.loads import count_messages, sum_pairs, sum_round_loads
from shardmath.plans.programs.program import Program
from shardmath.plans.programs.scheduling import MOST_ROUNDS, MOST_SLOTS
from shardmath.plans.programs.streams import list_bundles
from shardmath.plans.programs.tapers import HEAVIEST, HEAVIEST_SUM
from shardmath.plans.stretches import list_all_receivers, row_at
from shardmath.plans.units import is_legal_cut
from shardmath.proofs.plan_proof import prove
from shardmath.proofs.shapes import check_program_shapes
from shardmath.proofs.tables import find_misfit_of_bands

__all__ = ["prove_program"]


def prove_program(prog: Program) -> None:
    """Raise PlanError unless `prog` delivers everything that its plan has to deliver, and keeps its own limits on the
    bytes and messages of a rank in a round."""
    check_program_shapes(prog)
    # Huge numbers may overflow; the checks find the results wrong.
    with np.errstate(all="ignore"):
        _prove(prog)


def _prove(prog: Program) -> None:
    """Prove a program whose tables have the right types."""
    demands = prog.legs.lines
    _check_numbers(prog)
    _check_bands(prog)
    _check_mates(prog)
    misfit = find_misfit_of_bands(prog.legs)
    _require(not misfit, prog, misfit)
    # The plan's own cuts do not matter: the streams, checked below, say who sends what.
    prove(replace(prog.plan, lines=_send_from_first(demands)))
    for bundle in list_bundles(prog.legs):
        _check_inside(prog, bundle.streams)
        streams = _check_handed(prog, bundle)
        inbox = _list_inbox(prog, bundle.lines)
        request, known = inbox.find(streams.block, streams.receiver)
        _require_none(prog, streams, ~known, "go to a rank that does not ask for them")
        begin = inbox.base[request] + streams.lo
        _check_once(prog, inbox, streams, begin)
        _check_in_hand(prog, bundle.lines, inbox, streams, begin)
    _check_limits(prog)


def _send_from_first(demands: Demands) -> Demands:
    """The lines, each sent whole by its first holder: `prove` needs some cuts, and streams replace these."""
    holders = lengths(demands.sets)[demands.holders]
    lines = Offsets.of_counts(holders + 1)
    cuts = lines.spread(measure_lines(demands))
    cuts[lines.first[:-1]] = 0
    return replace(demands, cut_first=lines.first, cuts=cuts)


def _require(holds: object, prog: Program, what: str) -> None:
    """Raise PlanError, saying `what` is wrong, unless `holds`."""
    if not holds:
        raise PlanError(f"{prog!r}: {what}; schedule it again")


def _check_numbers(prog: Program) -> None:
    """Check that counts are positive integers, and that slots and turns are not too many."""
    counts = (
        prog.slots,
        prog.turns,
        prog.legs.sharing,
        prog.max_inflight_bytes,
        prog.max_ops_per_group,
    )
    positive = all(type(n) is int and n > 0 for n in counts)
    _require(positive, prog, f"counts {counts} are not all positive integers")
    weights = prog.weights
    is_small = all(type(n) is int and 0 < n <= HEAVIEST for n in weights)
    fit = is_small and len(weights) in (0, prog.slots) and sum(weights) < HEAVIEST_SUM
    limits = f"up to {HEAVIEST} per slot, with a sum below {HEAVIEST_SUM}"
    _require(fit, prog, f"its weights are not one integer {limits}")
    ranks = max(1, len(prog.ranks))
    # `schedule` doubles the turns until there are at least 2 * ranks per leg (see `turn_of`).
    most_turns = 4 * count_legs(prog.legs) * ranks
    rounds = prog.slots * prog.turns * ranks
    are_few = prog.slots <= MOST_SLOTS and prog.turns <= most_turns and rounds <= MOST_ROUNDS
    given = f"{prog.slots} slots and {prog.turns} turns"
    _require(are_few, prog, f"{given} are more than {MOST_SLOTS} and {most_turns}")


def _check_bands(prog: Program) -> None:
    """Check that bands are tables of 64-bit integers: no float decides anything."""
    bands = prog.legs.bands
    for field in fields(bands):
        column = getattr(bands, field.name)
        integers = column.dtype == np.int64
        _require(integers, prog, f"Bands.{field.name} is not of 64-bit integers")


def _check_mates(prog: Program) -> None:
    """Check that mates are ranks of the program, and that they keep what they are handed for one slot of one turn."""
    mates = prog.legs.mates
    if mates is None:
        return
    columns = mates.first, mates.rank, mates.feeder
    integers = all(column.dtype == np.int64 for column in columns)
    _require(integers, prog, "mates are not of 64-bit integers")
    ends = np.append(mates.first, len(mates.rank))
    fits = (
        len(mates.first) == len(prog.legs.lines.holders) + 1
        and len(mates.rank) == len(mates.feeder) == mates.first[-1]
        and mates.first[0] == 0
        and (np.diff(ends) >= 0).all()
    )
    _require(fits, prog, "tables of mates are not of one length")
    known = np.isin(np.append(mates.rank, mates.feeder), prog.ranks).all()
    _require(known, prog, "mates are not ranks of the program")
    _require(prog.turns == 1, prog, "mates would keep bytes for several turns")


# Streams


def _check_handed(prog: Program, bundle: Bundle) -> Streams:
    """Check that mates send what holders hand to them, and return the streams without those that hand bytes."""
    streams = bundle.streams
    is_handing = streams.leg == HANDING
    handing = _take(streams, is_handing)
    held = _is_held(prog.legs.lines, bundle.lines, handing)
    _require_none(prog, handing, ~held, "are handed on by a rank that does not hold them")
    handed = _take(streams, streams.leg == HANDED)
    for some in (handing, handed):
        _require_none(prog, some, some.sender == some.receiver, "go nowhere")
    # Each stream is handed alone: the same bytes, from the same rank, for the same receiver.
    by_handing = handing.block, handing.root, handing.lo, handing.hi, handing.receiver
    by_handed = handed.block, handed.root, handed.lo, handed.hi, handed.sender
    one = np.stack((*by_handing, handing.beyond, handing.sender))
    other = np.stack((*by_handed, handed.receiver, handed.beyond))
    same = np.array_equal(one[:, np.lexsort(one)], other[:, np.lexsort(other)])
    _require(same, prog, "a mate sends other bytes than it is handed, or to another rank")
    return _take(streams, ~is_handing)


def _take(streams: Streams, some: Bools) -> Streams:
    """These of the streams."""
    return Streams(*(column[some] for column in streams))


class _Inbox(NamedTuple):
    """Requests laid end to end: `rank[i]` asks for `block[i]`, at places `base[i]..base[i+1]-1`.

    Requests stand in order of block and rank.
    """

    block: Ints
    rank: Ints
    base: Ints

    def find(self, block: Ints, rank: Ints) -> tuple[Ints, Bools]:
        """Return two arrays: for each i, the index in this inbox (a list of requests) of the request of `rank[i]` for
        block number `block[i]`, and whether there is one. A block is bytes that the same ranks need."""
        # Requests stand in order of block and rank, and so do their codes.
        codes, wanted = _code_pairs((self.block, self.rank), (block, rank))
        request = np.searchsorted(codes, wanted)
        is_known = request < len(codes)
        is_known[is_known] = codes[request[is_known]] == wanted[is_known]
        return request, is_known


def _code_pairs(*pairs: tuple[Ints, Ints]) -> list[Ints]:
    """Pairs (number, rank) as one integer each, ordered by number and then by rank."""
    radix = 1 + max(int(rank.max(initial=0)) for _, rank in pairs)
    return [number * radix + rank for number, rank in pairs]


def _list_inbox(prog: Program, lines: Ints) -> _Inbox:
    """All requests for the blocks of these lines, block by block and rank by rank."""
    demands = prog.legs.lines
    blocks, _ = ranges(demands.first[lines], demands.first[lines + 1])
    asking = list_all_receivers(demands, blocks)
    rank = join(asking)
    block = blocks.repeat(lengths(asking))
    nbytes = demands.nbytes[block]
    requests = Offsets.of_counts(nbytes)
    return _Inbox(block, rank, requests.first)


def _require_none(prog: Program, streams: Streams, wrong: Bools, what: str) -> None:
    """Raise PlanError for the first stream that is wrong, if any."""
    if not wrong.any():
        return
    first = np.flatnonzero(wrong)[0]
    block = int(streams.block[first])
    sender = streams.sender[first]
    receiver = streams.receiver[first]
    name = _name_tensor(prog, block)
    where = f"bytes {streams.lo[first]}:{streams.hi[first]} of block {block}, {name}"
    _require(False, prog, f"{where}, from rank {sender} to {receiver} {what}")


def _name_tensor(prog: Program, block: int) -> str:
    """The first tensor of a block."""
    demands = prog.legs.lines
    row = demands.row_first[block]
    batch = prog.plan.batches[int(demands.batch[row])]
    return f"{label(batch.names[0])}"


def _check_inside(prog: Program, streams: Streams) -> None:
    """Check that streams are bytes of their blocks, and begin and end where pieces may be cut."""
    demands = prog.legs.lines
    nbytes = demands.nbytes[streams.block]
    is_empty = streams.lo >= streams.hi
    outside = (streams.lo < 0) | is_empty | (streams.hi > nbytes)
    _require_none(prog, streams, outside, "are not inside it")
    # The first bytes of all streams, then their ends.
    block = np.append(streams.block, streams.block)
    byte = np.append(streams.lo, streams.hi)
    wrong = np.zeros(len(byte), bool)
    inner = byte < demands.nbytes[block]
    wrong[inner] = _find_bad_cuts(prog, block[inner], byte[inner])
    for bad in np.split(wrong, 2):
        _require_none(prog, streams, bad, "begin or end inside a row")


def _find_bad_cuts(prog: Program, block: Ints, byte: Ints) -> Bools:
    """Whether each block must not be cut at its byte."""
    grid = make_grid(prog.legs.lines, prog.plan.batches)
    # Each place once and block by block: the cached boxes of a unit may be many, and a look at
    # another unit in between may evict them.
    place = grid.base[block] + byte
    _, first, which = np.unique(place, return_index=True, return_inverse=True)
    block = block[first]
    byte = byte[first]
    # The grid leaves small boxes whole, although they may be cut: bytes that it moves are checked
    # exactly.
    wrong = grid.snapped(block, byte) != byte
    for i in np.flatnonzero(wrong).tolist():
        wrong[i] = not _may_cut(prog, int(block[i]), int(byte[i]))
    is_bad: Bools = wrong[which]
    return is_bad


def _may_cut(prog: Program, block: int, byte: int) -> bool:
    """Whether a block's content may be cut at a byte, even in a box that `schedule` leaves whole."""
    demands = prog.legs.lines
    row = row_at(demands, block, byte)
    batch = prog.plan.batches[int(demands.batch[row])]
    t = batch.template
    unit = int(demands.unit[row])
    first_element = int(demands.lo[row])
    row_begin = int(demands.at[row])
    # A row has the same elements of several tensors, one tensor after the other.
    bytes_per_tensor = int(demands.each[row])
    byte_in_tensor = (byte - row_begin) % bytes_per_tensor
    element, rest = divmod(byte_in_tensor, t.src.itemsize)
    return not rest and is_legal_cut(t, unit, first_element + element)


def _check_once(prog: Program, inbox: _Inbox, streams: Streams, begin: Ints) -> None:
    """Check that the streams, which begin at these places of the inbox, fill it end to end."""
    order = np.argsort(begin, kind="stable")
    size = streams.hi - streams.lo
    begins = begin[order]
    ends = begins + size[order]
    previous_ends = np.append(0, ends)
    overlaps = np.zeros(len(order), bool)
    overlaps[order] = begins < previous_ends[:-1]
    _require_none(prog, streams, overlaps, "come twice")
    # Each end must meet the next begin, and the last end the end of the inbox.
    next_begins = np.append(begins, inbox.base[-1])
    gaps = previous_ends[next_begins > previous_ends]
    for place in gaps.tolist():
        _raise_gap(prog, inbox, place)


def _raise_gap(prog: Program, inbox: _Inbox, place: int) -> None:
    """Raise PlanError for a place of the inbox that no stream fills."""
    row = int(np.searchsorted(inbox.base, place, "right")) - 1
    block = int(inbox.block[row])
    rank = inbox.rank[row]
    byte = place - inbox.base[row]
    name = _name_tensor(prog, block)
    what = f"rank {rank} never receives byte {byte} of block {block}, {name}"
    _require(False, prog, what)


def _check_in_hand(
    prog: Program, lines: Ints, inbox: _Inbox, streams: Streams, begin: Ints
) -> None:
    """Check that every sender has the bytes: as a holder, or from the same stream of an earlier leg."""
    demands = prog.legs.lines
    is_straight = streams.leg == 1
    is_relayed = ~is_straight & (streams.leg != HANDED)
    held = _is_held(demands, lines, streams)
    _require_none(prog, streams, is_straight & ~held, "leave a rank that does not hold them")
    # A relay has the later addends of an element only folded into the first one.
    is_added = demands.addend[streams.block] > 0
    what = "are relayed where another addend is already"
    _require_none(prog, streams, is_relayed & is_added, what)
    lags = find_lags(prog.legs, streams.leg)
    has_come = _have_come(inbox, streams, begin, lags)
    what = "are relayed by a rank that does not have them yet"
    _require_none(prog, streams, is_relayed & ~has_come, what)
    # All streams of one root are cut as one of them, so only what repeats the same bytes may have it.
    first = _take(streams, ~is_relayed)
    _, alike = number_alike((demands.blocks.owners_of(first.block), first.root))
    again = np.bincount(alike)[alike] > 1
    _require_none(prog, first, again, "have the root of other bytes")


def _is_held(demands: Demands, lines: Ints, streams: Streams) -> Bools:
    """Whether the sender of each stream is among the holders of its line."""
    holders = list(map(demands.held_by, lines.tolist()))
    # Pairs (line, rank).
    held = lines.repeat(lengths(holders)), join(holders)
    sent = demands.blocks.owners_of(streams.block), streams.sender
    held_codes, sent_codes = _code_pairs(held, sent)
    return np.isin(sent_codes, held_codes)


def _have_come(inbox: _Inbox, streams: Streams, begin: Ints, lags: Ints) -> Bools:
    """Whether the bytes of each stream came to its sender as the same stream of an earlier leg, as `lags` say. `begin`
    has the place in the inbox at which each stream begins."""
    out = np.zeros(len(begin), bool)
    # Only a rank that asks for the block itself can relay it.
    request, known = inbox.find(streams.block, streams.sender)
    asked = np.flatnonzero(known)
    # The place of these bytes in the sender's own inbox, and the stream that brought them there.
    place = inbox.base[request[asked]] + streams.lo[asked]
    came = _find_last_at(begin, place)
    is_same = lags[came] < lags[asked]
    for column in (streams.root, streams.lo, streams.hi):
        is_same &= column[came] == column[asked]
    out[asked] = is_same
    return out


def _find_last_at(begin: Ints, place: Ints) -> Ints:
    """The stream that begins last before or at each place."""
    order = np.argsort(begin, kind="stable")
    last = np.searchsorted(begin[order], place, "right") - 1
    streams: Ints = order[last]
    return streams


def _check_limits(prog: Program) -> None:
    """Check that no rank has more bytes or messages in flight in a round than allowed."""
    loads = sum_round_loads(prog)
    # The last axis has a rank's links, out and in.
    by_rank = loads.sum(axis=-1)
    most_bytes = int(by_rank.max(initial=0))
    _check_limit(prog, most_bytes, prog.max_inflight_bytes, "bytes")
    pairs = sum_pairs(prog)
    ranks = len(prog.ranks)
    counts = count_messages(pairs, prog.turns, ranks)
    most_messages = int(counts.max(initial=0))
    _check_limit(prog, most_messages, prog.max_ops_per_group, "messages")


def _check_limit(prog: Program, most: int, limit: int, word: str) -> None:
    """Check that `most`, the most that a rank has in flight, is within the limit."""
    what = f"a rank has {most} {word} in flight in a round, {limit} are allowed"
    _require(most <= limit, prog, what)
