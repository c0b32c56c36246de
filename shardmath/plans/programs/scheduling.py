"""Schedule: Plan -> Program. It chooses the relays and the number of rounds.

1. `fanout`: "none" sends every replica its own copy; "node" sends each byte once to each node, to
   one replica of it, and spreads it there; "auto" takes the fastest of these two and a third way:
   if the sources' links are the bottleneck, nodes of the destination also relay to other nodes. A fourth
   way has other ranks of the sources' nodes send, if their links have room.
2. Rounds: the fewest slots and turns that keep every rank's bytes in a round within
   `max_inflight_bytes`, and its messages within `max_ops_per_group`, counted exactly. Slots divide
   every stream, turns the peers of a rank. If bytes are relayed, and that is faster, slots taper off.
3. `as_planned` is the program that compiling a plan runs: its own senders, all transfers straight,
   nothing divided. The plan's own topology and `fanout="none"` keep these senders.
4. Limits that no program can keep raise PlanError before any search: a piece that is not cut,
   messages between two ranks.

>>> from shardmath.layouts.layout import Layout
>>> from shardmath.layouts.algebra.mesh import Mesh
>>> from shardmath.plans.plan import plan
>>> p = plan(Layout((8,), Mesh(tp=2), "(tp n)"), Layout((8,), Mesh(dp=2, ranks=(2, 3)), "n"))
>>> [(m.src_rank, m.nbytes) for one in schedule(p).for_rank(3) for m in one.receives]
[(1, 16), (0, 16)]
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Literal, NamedTuple, TypeAlias

from shardmath.base.arguments import as_integer, known
from shardmath.base.arrays import Ints
from shardmath.base.errors import PlanError
from shardmath.base.text import plural, shown
from shardmath.layouts.holdings import label
from shardmath.plans.balance import measure_uncut
from shardmath.plans.demands import Demands, gather_lines
from shardmath.plans.flows.topology import Topology, checked
from shardmath.plans.plan import Plan
from shardmath.plans.programs.fanout import Way, find_legs
from shardmath.plans.programs.legs import Legs, count_lags, legs_as_cut
from shardmath.plans.programs.loads import (
    Loads,
    Pairs,
    count_messages,
    estimate_seconds,
    estimate_slots,
    sum_leg_loads,
    sum_pairs,
    sum_round_loads,
)
from shardmath.plans.programs.program import Program, digest_program
from shardmath.plans.programs.streams import list_bundles
from shardmath.plans.programs.tapers import find_taper

__all__ = ["MOST_ROUNDS", "MOST_SLOTS", "Fanout", "as_planned", "run_straight", "schedule"]

Fanout: TypeAlias = Literal["auto", "none", "node"]

WAYS: dict[str, tuple[Way, ...]] = {
    "none": (Way(by_node=False),),
    "node": (Way(by_node=True),),
    "auto": (
        Way(by_node=True, relays=True),
        Way(by_node=True),
        Way(by_node=False),
        Way(by_node=True, mates=True),
    ),
}
"""By fanout, the options; of equally fast ones the first is taken."""

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Options for the number of slots if there are relays. Many slots keep all legs busy for most of the time; few save
latency."""

ABOUT = 1.005
"""The fewest slots are taken whose time is at most this factor above the best."""

WORTH = 1.001
"""Slots taper off only if even ones would take this factor longer: a second program takes time to measure."""

MOST_SLOTS = 1 << 12
"""Most slots that are tried. Turns divide the bytes of a slot further, at no more cost than the messages themselves."""

MOST_SLICES = 1 << 24
"""Most slots times streams: more streams have fewer slots, but never fewer than the largest of `SLOTS`."""

GROWTH = 3
"""More slots than this factor times the best so far are not tried: a slice is whole rows, so doubling the slots takes
at least one row off each slice, until slices are single rows."""

MOST_ROUNDS = 1 << 24
"""Most rounds of all ranks together, so that tables of them fit in memory."""


def schedule(
    plan: Plan,
    topology: Topology | None = None,
    *,
    max_inflight_bytes: int = 1 << 30,
    max_ops_per_group: int = 2048,
    fanout: Fanout = "auto",
) -> Program:
    """Return a Program: `plan` divided into rounds, in each of which a rank has at most `max_inflight_bytes` bytes and
    `max_ops_per_group` messages. `fanout` is "node" (bytes enter each node once), "none" (ranks are sent their bytes
    directly) or "auto" (the fastest by estimate).

    `topology` is the plan's own by default. Without either the program assumes nodes of 8 ranks: its repr and `show`
    say so, and it has no certificate.
    Compiling the program runs it as it is; compiling the plan itself runs `as_planned(plan)`.
    `max_inflight_bytes` bounds the bytes that a rank has in flight in a round, both directions together;
    `max_ops_per_group` bounds its messages. Raises PlanError if the plan is an adjoint, or if no cut can
    keep the limits.
    """
    _check_plan(plan, "schedule what plan(src, dst) returns")
    known_fanout = known(fanout, tuple(WAYS))
    if known_fanout is None:
        raise PlanError(f"fanout={shown(fanout)} is unknown; use 'auto', 'none' or 'node'")
    most_bytes = as_integer(max_inflight_bytes, "max_inflight_bytes", PlanError)
    most_ops = as_integer(max_ops_per_group, "max_ops_per_group", PlanError)
    _check_positive("max_inflight_bytes", most_bytes)
    _check_positive("max_ops_per_group", most_ops)
    used_topology = _choose_topology(plan, topology)
    demands = gather_lines(plan.batches, used_topology)
    _check_pieces(plan, demands, most_bytes)
    assumes_nodes = _assumes_nodes(plan, topology)
    # With one slot, one turn and no digest: `_find_fastest` sets slots and turns.
    options = [
        Program(plan, used_topology, legs, 1, 1, most_bytes, most_ops, "", assumes_nodes)
        for legs in _list_legs(plan, demands, used_topology, known_fanout)
    ]
    fastest = _find_fastest(options)
    return replace(fastest, digest=digest_program(fastest))


def _check_plan(plan: Plan, fix: str) -> None:
    """Raise PlanError unless `plan` is a Plan, and not an adjoint."""
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r} is not a Plan; {fix}")


def _check_positive(name: str, limit: int) -> None:
    """Raise PlanError for a limit below 1."""
    if limit < 1:
        raise PlanError(f"{name}={limit} leaves no room for a message; pass 1 or more")


def _choose_topology(plan: Plan, topology: Topology | None) -> Topology:
    """The topology given, or the plan's own, or the default."""
    if topology is not None:
        return checked(topology)
    return plan.topology or Topology()


def _assumes_nodes(plan: Plan, topology: Topology | None) -> bool:
    """Whether no topology was given, neither here nor for the plan."""
    return topology is None and plan.topology is None


def _list_legs(plan: Plan, demands: Demands, topology: Topology, fanout: str) -> Iterator[Legs]:
    """The legs to choose from."""
    per_node = topology.ranks_per_node
    for way in WAYS[fanout]:
        # The plan has balanced its lines for its own topology already.
        if fanout == "none" and topology == plan.topology:
            yield legs_as_cut(plan.lines)
        else:
            yield from find_legs(plan, demands, per_node, way)


def as_planned(plan: Plan, topology: Topology | None = None) -> Program:
    """Return the Program that sends the transfers of `plan` unchanged, each straight from its sender to its receiver.
    It is the Program that runs if `plan` itself is compiled.

    It sends each of the plan's transfers from its own sender, in one round per addend. The topology
    (default: the plan's own, or 8 ranks per node) says where the ranks are and changes no transfer.
    Raises PlanError if the plan is an adjoint.
    """
    prog = run_straight(plan, topology)
    # The limits are what the program needs: compiling a plan sets its limits later, by a pace.
    pairs = sum_pairs(prog)
    counts = count_messages(pairs, 1, len(prog.ranks))
    most_ops = int(counts.max(initial=1))
    _, inflight = _measure(prog)
    prog = replace(prog, max_inflight_bytes=max(inflight, 1), max_ops_per_group=most_ops)
    return replace(prog, digest=digest_program(prog))


def run_straight(plan: Plan, topology: Topology | None = None) -> Program:
    """Return a Program that sends the transfers of `plan` unchanged, each straight from its sender to its receiver. To
    save time, its digest is left empty, and its limits on bytes and messages in flight are 1."""
    _check_plan(plan, "give what plan(src, dst) returns")
    chosen = _choose_topology(plan, topology)
    assumes = _assumes_nodes(plan, topology)
    return Program(
        plan,
        chosen,
        legs_as_cut(plan.lines),
        slots=1,
        turns=1,
        max_inflight_bytes=1,
        max_ops_per_group=1,
        digest="",
        assumes_nodes=assumes,
    )


def _check_pieces(plan: Plan, demands: Demands, room: int) -> None:
    """Raise PlanError if a piece that is never cut is larger than the limit of a round."""
    is_sent = demands.rows.spread(demands.count > 0)
    sizes = measure_uncut(demands, plan.batches) * is_sent
    size = sizes.max(initial=0)
    if size <= room:
        return
    row = sizes.argmax()
    batch = plan.batches[int(demands.batch[row])]
    what = f"{size} bytes of {label(batch.names[0])} are a row or small box, which is never cut"
    raise PlanError(f"max_inflight_bytes={room}: {what}; pass {size} or more")


class _Undivided(NamedTuple):
    """A program not divided into rounds yet, and the bytes that go from rank to rank in it."""

    prog: Program
    pairs: Pairs
    loads: Loads

    @property
    def by_rank(self) -> Ints:
        """The bytes that each rank sends plus the bytes that it receives in each phase, over all hops, as an array
        (phase, rank). Phase p has the bytes of partial value number p of each sum; all other bytes are in phase 0."""
        # Axes: phase, lag, rank, link; a link has the bytes of one direction.
        total: Ints = self.loads.sum(axis=(1, 3))
        return total


def _find_fastest(options: Iterable[Program]) -> Program:
    """The fastest of the programs that can keep their limits, divided into rounds.

    Those that should be fastest come first; a program that would not be faster even with all legs in one
    round need not be divided.
    """
    timed: list[tuple[float, Program]] = []
    failed: list[PlanError] = []
    for slots, undivided in _order_by_estimate(options):
        least = estimate_seconds(undivided.prog.topology, undivided.loads.sum(axis=1))
        if any(time <= least for time, _ in timed):
            continue
        try:
            timed.append(_find_rounds(undivided, slots))
        except PlanError as error:
            # With mates, limits are narrower than they have to be.
            if undivided.prog.legs.mates is None:
                failed.append(error)
    if not timed:
        raise failed[0]
    _, fastest = min(timed, key=itemgetter(0))
    return fastest


def _order_by_estimate(options: Iterable[Program]) -> list[tuple[int, _Undivided]]:
    """(best number of slots, program) for all programs, the one that should be fastest first."""
    estimated: list[tuple[float, int, _Undivided]] = []
    for prog in options:
        pairs = sum_pairs(prog)
        loads = sum_leg_loads(prog, pairs)
        time, slots = _choose_slots(prog.topology, loads)
        estimated.append((time, slots, _Undivided(prog, pairs, loads)))
    estimated.sort(key=itemgetter(0))
    return [(slots, undivided) for _, slots, undivided in estimated]


# Rounds


def _choose_slots(topology: Topology, loads: Loads) -> tuple[float, int]:
    """The estimated time of the legs, and the number of slots for it, if slices could have any size."""
    options = []
    # Without relays, more slots save no time.
    for slots in SLOTS if _has_relays(loads) else (1,):
        time = estimate_slots(topology, loads, slots)
        options.append((time, slots))
    least, _ = min(options)
    # The fewest slots that are about as fast: each slot makes all lists longer.
    return next(option for option in options if option[0] <= least * ABOUT)


def _has_relays(loads: Loads) -> bool:
    """Whether any bytes move in a slot after their first: they are relayed, or mates send them. Axis 1 is the lag."""
    return bool(loads[:, 1:].any())


def _find_rounds(undivided: _Undivided, slots: int) -> tuple[float, Program]:
    """The time of a program with the fewest turns and slots that keep its limits; and the program.

    If slots do not taper off, there are at least `slots` of them.
    """
    prog = replace(undivided.prog, turns=_choose_turns(undivided))
    undivided = undivided._replace(prog=prog)
    # If slices were even, the fullest rank's bytes, all legs and both directions, would need this
    # many slots.
    fullest = int(undivided.by_rank.max(initial=0))
    slots = max(slots, -(-fullest // prog.max_inflight_bytes))
    estimate = estimate_slots(prog.topology, undivided.loads, slots)
    tapered = _find_tapered(undivided, estimate / WORTH)
    if tapered is not None and tapered[0] < estimate / WORTH:
        return tapered
    even = _find_even(undivided, slots)
    return even if tapered is None else min(tapered, even, key=itemgetter(0))


def _find_tapered(undivided: _Undivided, enough: float) -> tuple[float, Program] | None:
    """The time of the program whose slots taper off, and the program; None if it would not take less than `enough`
    seconds, or has no room within its limits."""
    prog = undivided.prog
    # Turns divide the messages of a slot, so that light slots would cost several latencies.
    if prog.turns > 1 or not _has_relays(undivided.loads):
        return None
    taper = find_taper(prog.topology, undivided.loads, prog.max_inflight_bytes)
    if taper is None or taper.seconds >= enough:
        return None
    tapered = replace(prog, slots=len(taper.weights), weights=taper.weights)
    time, inflight = _measure(tapered)
    return (time, tapered) if inflight <= prog.max_inflight_bytes else None


def _find_even(undivided: _Undivided, slots: int) -> tuple[float, Program]:
    """The time of a program with at least `slots` even slots, and the program.

    More slots are tried as long as they help, then more turns.
    """
    prog = undivided.prog
    limit = prog.max_inflight_bytes
    most_slots = _count_most_slots(prog)
    _check_bytes(undivided, most_slots)
    trial = replace(prog, slots=min(slots, most_slots))
    best = trial
    best_inflight = None
    # Give up on slots if even GROWTH times as many as the best program has do not improve on it.
    while trial.slots <= GROWTH * best.slots:
        time, inflight = _measure(trial)
        if inflight <= limit:
            return time, trial
        improved = best_inflight is None or inflight < best_inflight
        if improved:
            best = trial
            best_inflight = inflight
        if trial.slots == most_slots:
            break
        grown = _grow(trial.slots, inflight, limit, improved=improved)
        trial = replace(prog, slots=min(grown, most_slots))
    return _add_turns(best, undivided.pairs)


def _grow(slots: int, inflight: int, limit: int, *, improved: bool) -> int:
    """The number of slots to try after `slots`, which leave more bytes in flight than the limit.

    It would be enough if slices were even, and is a 32nd more since they are not. If the last step did
    not improve on the best, it grows by half at least, so that few steps reach the end.
    """
    grown = slots * inflight * 33 // (32 * limit)
    if not improved:
        grown = max(grown, slots * 3 // 2)
    return grown + 1


def _measure(prog: Program) -> tuple[float, int]:
    """The time of a program's rounds, and the most bytes that a rank has in flight in a round."""
    loads = sum_round_loads(prog)
    by_rank = loads.sum(axis=-1)
    most = int(by_rank.max(initial=0))
    return estimate_seconds(prog.topology, loads), most


def _choose_turns(undivided: _Undivided) -> int:
    """The fewest turns in which no rank has more messages than allowed."""
    limit = undivided.prog.max_ops_per_group
    ranks = len(undivided.prog.ranks)
    for turns in _list_turns(undivided.prog, undivided.pairs):
        counts = count_messages(undivided.pairs, turns, ranks)
        count = int(counts.max(initial=0))
        if count <= limit:
            return turns
    what = f"even in the smallest rounds a rank has {plural(count, 'message')}"
    raise PlanError(f"max_ops_per_group={limit}: {what}; pass {count} or more")


def _list_turns(prog: Program, pairs: Pairs) -> list[int]:
    """The numbers of turns to choose from: the program's own, doubled until there are enough.

    With enough turns, no rank has two peers or two legs in one turn (`turn_of`). With mates there is one turn, since
    they keep what they are handed until the next slot.
    """
    if prog.legs.mates is not None:
        return [1]
    ranks = max(len(prog.ranks), 1)
    legs = int(pairs.leg.max(initial=0)) + 1
    # Turns double, so that the last number up to this one is 2 * legs * ranks or more.
    enough = 4 * legs * ranks - 1
    fitting = MOST_ROUNDS // (prog.slots * ranks)
    most = min(enough, fitting)
    turns = [prog.turns]
    while 2 * turns[-1] <= most:
        turns.append(2 * turns[-1])
    return turns


def _count_most_slots(prog: Program) -> int:
    """The most slots that are tried, to bound memory."""
    streams = sum(len(bundle.streams.block) for bundle in list_bundles(prog.legs))
    ranks = max(len(prog.ranks), 1)
    by_slices = MOST_SLICES // max(streams, 1)
    by_rounds = MOST_ROUNDS // (prog.turns * ranks)
    most = min(by_slices, by_rounds, MOST_SLOTS)
    return max(most, SLOTS[-1])


def _check_bytes(undivided: _Undivided, slots: int) -> None:
    """Raise PlanError if this many slots leave too many bytes in flight, whatever the turns."""
    *_, most_turns = _list_turns(undivided.prog, undivided.pairs)
    # A hop sends a slot one step after the hop before it, so the last slot takes some further steps.
    rounds = (slots + count_lags(undivided.prog.legs) - 1) * most_turns
    # All slices of a pair are in one turn; those of a rank may be spread over all rounds.
    pair = int(undivided.pairs.nbytes.max(initial=0))
    rank = int(undivided.by_rank.max(initial=0))
    least_of_pair = -(-pair // slots)
    least_of_rank = -(-rank // rounds)
    least = max(least_of_pair, least_of_rank)
    limit = undivided.prog.max_inflight_bytes
    if least > limit:
        what = f"some rank has {least} bytes in flight in a round, even with the most rounds"
        raise PlanError(f"max_inflight_bytes={limit}: {what}; pass {least} or more")


def _add_turns(prog: Program, pairs: Pairs) -> tuple[float, Program]:
    """The time of the program with the fewest turns that keep its limit of bytes; and that program."""
    options = [replace(prog, turns=turns) for turns in _list_turns(prog, pairs)]
    limit = prog.max_inflight_bytes
    _, least = _measure(options[-1])
    if least > limit:
        what = f"some rank has {least} bytes in flight in every division into rounds that was tried"
        raise PlanError(f"max_inflight_bytes={limit}: {what}; pass {least} or more")

    def fits(option: Program) -> bool:
        return _measure(option)[1] <= limit

    # The last option fits, so it need not be measured again.
    i = bisect.bisect_left(options, True, hi=len(options) - 1, key=fits)
    time, _ = _measure(options[i])
    return time, options[i]
