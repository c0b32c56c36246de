"""Proof that a program brings everybody what its plan promises, without deadlock.

What is read is what `for_rank` expands: the lines, and the streams of each. Once these are tables
at all (`shapes`):

1. The lines are proved as the plan's own are (`plan_proof`): every holder has what they ask for,
   every receiver wants it.
2. **Once**: laid end to end, the streams to each rank that asks for a block are its content, and
   none goes elsewhere.
3. **In hand**: a stream of the first leg leaves a holder. One that is relayed is a stream of an
   earlier leg that came to its sender, as it came: of one root and the same bytes, so cut alike,
   each slice a slot or more after it came. It is no addend on top of another.
4. Streams begin and end where pieces may be cut.
5. No rank has more under way in a round than the program's limits allow.

There is no deadlock, since a message is in one step at both ends and every rank walks its steps in
their order.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import NamedTuple

import numpy as np

from shardmath.base.arrays import Bools, Ints, Offsets, join, lengths, ranges
from shardmath.base.errors import PlanError
from shardmath.plans.balance import make_grid, measure_lines
from shardmath.plans.demands import Demands
from shardmath.plans.pieces import is_legal_cut
from shardmath.plans.programs.legs import Streams
from shardmath.plans.programs.loads import LEGS, count_messages, sum_pairs, sum_round_loads
from shardmath.plans.programs.program import Program
from shardmath.plans.programs.scheduling import MOST_ROUNDS, MOST_SLOTS
from shardmath.plans.programs.streams import list_bundles
from shardmath.plans.stretches import find_lines, list_all_receivers, row_at
from shardmath.proofs.plan_proof import prove
from shardmath.proofs.shapes import check_program_shapes
from shardmath.proofs.tables import check_numbers_of_sets, find_misfit_of_bands

__all__ = ["prove_program"]


def prove_program(prog: Program) -> None:
    """Raise PlanError unless what the ranks of a program do brings what its plan promises, within
    its limits."""
    check_program_shapes(prog)
    # Numbers far away overflow; what comes of them is looked at.
    with np.errstate(all="ignore"):
        _prove(prog)


def _prove(prog: Program) -> None:
    """Prove a program whose tables are tables."""
    demands = prog.legs.lines
    _check_numbers(prog)
    _check_bands(prog)
    misfit = find_misfit_of_bands(prog.legs)
    _require(not misfit, prog, misfit)
    check_numbers_of_sets(demands)
    prove(replace(prog.plan, lines=_send_from_first(demands)))
    for found in list_bundles(prog.legs):
        of = found.streams
        inbox = _list_inbox(prog, found.lines)
        _check_inside(prog, of)
        at, known = inbox.find(of.block, of.receiver)
        _refuse(prog, of, ~known, "go to a rank that does not ask for them")
        begin = inbox.base[at] + of.lo
        _check_once(prog, inbox, of, begin)
        _check_in_hand(prog, found.lines, inbox, of, begin)
    _check_limits(prog)


def _send_from_first(demands: Demands) -> Demands:
    """The lines all sent by their first holders: what they ask for is what has to be proved."""
    holders = lengths(demands.sets)[demands.holders]
    lines = Offsets.of_counts(holders + 1)
    cuts = lines.spread(measure_lines(demands))
    cuts[lines.first[:-1]] = 0
    return replace(demands, cut_first=lines.first, cuts=cuts)


def _require(holds: object, prog: Program, what: str) -> None:
    """Raise PlanError, which says `what` is wrong, unless it holds."""
    if not holds:
        raise PlanError(f"{prog!r}: {what}; schedule it anew")


def _check_numbers(prog: Program) -> None:
    """Counts are counts, of which there are not too many."""
    counts = (
        prog.slots,
        prog.turns,
        prog.legs.sharing,
        prog.max_inflight_bytes,
        prog.max_ops_per_group,
    )
    positive = all(type(n) is int and n > 0 for n in counts)
    _require(positive, prog, f"counts {counts} are not all positive integers")
    ranks = max(1, len(prog.ranks))
    most_turns = 4 * LEGS * ranks
    rounds = prog.slots * prog.turns * ranks
    few = prog.slots <= MOST_SLOTS and prog.turns <= most_turns and rounds <= MOST_ROUNDS
    given = f"{prog.slots} slots and {prog.turns} turns"
    _require(few, prog, f"{given} are more than {MOST_SLOTS} and {most_turns}")


def _check_bands(prog: Program) -> None:
    """Tables are of 64-bit integers: no float decides anything."""
    bands = prog.legs.bands
    for field in fields(bands):
        column = getattr(bands, field.name)
        integers = column.dtype == np.int64
        _require(integers, prog, f"Bands.{field.name} is not of 64-bit integers")


# Streams


class _Inbox(NamedTuple):
    """Who asks for what on lines, laid end to end: `rank[i]` asks for `block[i]`, from place
    `base[i]` on.

    The last `base` is the place where all end.
    """

    block: Ints
    rank: Ints
    base: Ints

    def find(self, block: Ints, rank: Ints) -> tuple[Ints, Bools]:
        """Which of them these are, and whether they are any."""
        # Requests stand in order of block and rank.
        asked, wanted = _code_pairs((self.block, self.rank), (block, rank))
        at = np.searchsorted(asked, wanted)
        known = at < len(asked)
        known[known] = asked[at[known]] == wanted[known]
        return at, known


def _code_pairs(*pairs: tuple[Ints, Ints]) -> list[Ints]:
    """Pairs (thing, rank) as one number each, in the order of things and then of ranks."""
    most = 1 + max(int(rank.max(initial=0)) for _, rank in pairs)
    return [thing * most + rank for thing, rank in pairs]


def _list_inbox(prog: Program, lines: Ints) -> _Inbox:
    """All that is asked for on lines, block by block and rank by rank."""
    demands = prog.legs.lines
    blocks, _ = ranges(demands.first[lines], demands.first[lines + 1])
    asking = list_all_receivers(demands, blocks)
    rank = join(asking)
    block = blocks.repeat(lengths(asking))
    nbytes = demands.nbytes[block]
    requests = Offsets.of_counts(nbytes)
    return _Inbox(block, rank, requests.first)


def _refuse(prog: Program, of: Streams, wrong: Bools, what: str) -> None:
    """Raise PlanError for the first of the streams that are wrong."""
    if not wrong.any():
        return
    first = np.flatnonzero(wrong)[0]
    block = int(of.block[first])
    sender = of.sender[first]
    receiver = of.receiver[first]
    name = _name_tensor(prog, block)
    where = f"bytes {of.lo[first]}:{of.hi[first]} of block {block}, {name}"
    _require(False, prog, f"{where}, from rank {sender} to {receiver} {what}")


def _name_tensor(prog: Program, block: int) -> str:
    """The first tensor of a block."""
    demands = prog.legs.lines
    row = demands.row_first[block]
    batch = prog.plan.batches[int(demands.batch[row])]
    return f"tensor {batch.names[0]!r}"


def _check_inside(prog: Program, of: Streams) -> None:
    """Streams are some bytes of their blocks, from one place where pieces may be cut to another."""
    demands = prog.legs.lines
    nbytes = demands.nbytes[of.block]
    is_empty = of.lo >= of.hi
    outside = (of.lo < 0) | is_empty | (of.hi > nbytes)
    _refuse(prog, of, outside, "are no bytes of it")
    block = np.append(of.block, of.block)
    at = np.append(of.lo, of.hi)
    wrong = np.zeros(len(at), bool)
    inner = at < demands.nbytes[block]
    wrong[inner] = _find_bad_cuts(prog, block[inner], at[inner])
    for bad in np.split(wrong, 2):
        _refuse(prog, of, bad, "begin or end inside a row")


def _find_bad_cuts(prog: Program, block: Ints, at: Ints) -> Bools:
    """Whether bytes `at` of contents are where none may be cut."""
    where = make_grid(prog.legs.lines, prog.plan.batches)
    # Each place once, block by block: what is known of a unit of many boxes is large, and another
    # unit may take its room.
    place = where.base[block] + at
    _, one, which = np.unique(place, return_index=True, return_inverse=True)
    block = block[one]
    at = at[one]
    # The grid leaves small boxes whole, which is allowed and not necessary: what it moves is
    # looked at again.
    wrong = where.snapped(block, at) != at
    for i in np.flatnonzero(wrong).tolist():
        wrong[i] = not _may_cut(prog, int(block[i]), int(at[i]))
    found: Bools = wrong[which]
    return found


def _may_cut(prog: Program, block: int, at: int) -> bool:
    """Whether a content may be cut at a byte, be it of a box that `schedule` leaves whole."""
    demands = prog.legs.lines
    row = row_at(demands, block, at)
    batch = prog.plan.batches[int(demands.batch[row])]
    t = batch.template
    unit = int(demands.unit[row])
    lo = int(demands.lo[row])
    begin = int(demands.at[row])
    each = int(demands.each[row])
    inside = (at - begin) % each
    element, odd = divmod(inside, t.src.itemsize)
    if odd:
        return False
    return is_legal_cut(t, unit, lo + element)


def _check_once(prog: Program, inbox: _Inbox, of: Streams, begin: Ints) -> None:
    """All that is asked for comes, end to end; streams begin at these places."""
    order = np.argsort(begin, kind="stable")
    size = of.hi - of.lo
    begins = begin[order]
    ends = begins + size[order]
    before = np.append(0, ends)
    is_early = begins < before[:-1]
    twice = np.zeros(len(order), bool)
    twice[order] = is_early
    _refuse(prog, of, twice, "come twice")
    # What follows each end is the next begin, and the place where all ends after the last one.
    after = np.append(begins, inbox.base[-1])
    gaps = before[after > before]
    for place in gaps.tolist():
        _refuse_gap(prog, inbox, place)


def _refuse_gap(prog: Program, inbox: _Inbox, place: int) -> None:
    """Raise PlanError for a place to which nothing comes."""
    i = int(np.searchsorted(inbox.base, place, "right")) - 1
    block = int(inbox.block[i])
    rank = inbox.rank[i]
    at = place - inbox.base[i]
    name = _name_tensor(prog, block)
    what = f"rank {rank} never receives byte {at} of block {block}, {name}"
    _require(False, prog, what)


def _check_in_hand(prog: Program, lines: Ints, inbox: _Inbox, of: Streams, begin: Ints) -> None:
    """Every sender has what it sends: as a holder, or from a stream of an earlier leg that came to
    the same place."""
    demands = prog.legs.lines
    is_relayed = of.leg != 1
    held = _is_held(demands, lines, of)
    _refuse(prog, of, ~is_relayed & ~held, "leave a rank that does not hold them")
    is_added = demands.addend[of.block] > 0
    _refuse(prog, of, is_relayed & is_added, "are relayed where another addend is already")
    has_come = _have_come(inbox, of, begin)
    what = "are relayed by a rank that does not have them yet"
    _refuse(prog, of, is_relayed & ~has_come, what)


def _is_held(demands: Demands, lines: Ints, of: Streams) -> Bools:
    """Whether the sender of each stream is among the holders of its line."""
    holders = list(map(demands.held_by, lines.tolist()))
    held_line = lines.repeat(lengths(holders))
    held = held_line, join(holders)
    sent = find_lines(demands, of.block), of.sender
    known, asked = _code_pairs(held, sent)
    return np.isin(asked, known)


def _have_come(inbox: _Inbox, of: Streams, begin: Ints) -> Bools:
    """Whether the stream that came to the place that each one leaves is the same, of an earlier
    leg."""
    out = np.zeros(len(begin), bool)
    at, known = inbox.find(of.block, of.sender)
    some = np.flatnonzero(known)
    requests = at[some]
    place = inbox.base[requests] + of.lo[some]
    came = _find_last_at(begin, place)
    is_same = of.leg[came] < of.leg[some]
    for column in (of.root, of.lo, of.hi):
        is_same &= column[came] == column[some]
    out[some] = is_same
    return out


def _find_last_at(begin: Ints, place: Ints) -> Ints:
    """The stream that begins last before or at each place."""
    order = np.argsort(begin, kind="stable")
    at = np.searchsorted(begin[order], place, "right") - 1
    found: Ints = order[at]
    return found


def _check_limits(prog: Program) -> None:
    """No rank has more bytes or messages under way in a round than allowed."""
    loads = sum_round_loads(prog)
    by_rank = loads.sum(axis=-1)
    most_bytes = int(by_rank.max(initial=0))
    _check_limit(prog, most_bytes, prog.max_inflight_bytes, "bytes")
    pairs = sum_pairs(prog)
    ranks = len(prog.ranks)
    counts = count_messages(pairs, prog.turns, ranks)
    most_messages = int(counts.max(initial=0))
    _check_limit(prog, most_messages, prog.max_ops_per_group, "messages")


def _check_limit(prog: Program, most: int, limit: int, word: str) -> None:
    """The most that a rank has under way is allowed."""
    what = f"a rank has {most} {word} under way in a round, {limit} are allowed"
    _require(most <= limit, prog, what)
