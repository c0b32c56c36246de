"""Schedule: Plan -> Program. What is relayed, and in how many rounds.

1. `fanout`: "none" sends every replica its own copy; "node" sends each byte once to each node, to
   one replica of it, and spreads it there; "auto" takes what is faster, and where the sources'
   links bind, lets nodes of the destination relay to other nodes what goes beyond what their own
   links take in.
2. Rounds: as few slots and turns as keep every rank's messages of a round below
   `max_inflight_bytes`, and their number below `max_ops_per_group`, counted for the program as it
   is. Slots divide every stream, turns the peers of a rank.
3. `as_planned` is what compiling a plan itself does: its own senders, all transfers straight,
   nothing divided. The plan's own topology and `fanout="none"` keep these senders.
4. Limits that nothing can keep are refused before any search: a piece that is not cut, messages
   between two ranks.

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
from shardmath.plans.balance import measure_uncut
from shardmath.plans.demands import Demands, gather_lines
from shardmath.plans.flows.topology import Topology, checked
from shardmath.plans.plan import Plan
from shardmath.plans.programs.fanout import find_legs
from shardmath.plans.programs.legs import Legs, legs_as_cut
from shardmath.plans.programs.loads import (
    LEGS,
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

__all__ = ["MOST_ROUNDS", "MOST_SLOTS", "Fanout", "as_planned", "run_straight", "schedule"]

Fanout: TypeAlias = Literal["auto", "none", "node"]

WAYS: dict[str, tuple[tuple[bool, bool], ...]] = {
    "none": ((False, False),),
    "node": ((True, False),),
    "auto": ((True, True), (True, False), (False, False)),
}
"""(by node, relays between nodes) to choose from; the first of equals."""

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Slots to choose from where something is relayed: many, because the first and last are not full;
few, because each has its latency."""

ABOUT = 1.005
"""Of slots that take at most so many times as long as the best, the fewest are taken."""

MOST_SLOTS = 1 << 12
"""More are not tried: turns divide what goes in a slot further, and cost no more than the messages
they divide."""

MOST_SLICES = 1 << 24
"""Slots times streams: of more streams there are fewer slots, but never fewer than those to choose
from."""

GROWTH = 3
"""More slots than so many times the best so far are not tried: what a slot has of a stream is whole
rows, one fewer of them at last when there are twice as many slots."""

MOST_ROUNDS = 1 << 24
"""Rounds of all ranks together, so that tables of them fit in memory."""


def schedule(
    plan: Plan,
    topology: Topology | None = None,
    *,
    max_inflight_bytes: int = 1 << 30,
    max_ops_per_group: int = 2048,
    fanout: Fanout = "auto",
) -> Program:
    """The program that carries out a plan on a topology (default: the plan's own). Without either it
    assumes nodes of 8 ranks: its repr and `show` say so, and it has no certificate.

    It is the program that runs when it is compiled; a plan that is compiled itself runs as
    `as_planned` says. `max_inflight_bytes` bounds what a rank has under way in a round, both ways
    together; `max_ops_per_group` how many messages. Raises PlanError for an adjoint, and for limits
    that no cut can keep.
    """
    _check_plan(plan, "schedule what plan(src, dst) returns")
    way = known(fanout, tuple(WAYS))
    if way is None:
        raise PlanError(f"fanout={shown(fanout)} is unknown; use 'auto', 'none' or 'node'")
    room = as_integer(max_inflight_bytes, "max_inflight_bytes", PlanError)
    most = as_integer(max_ops_per_group, "max_ops_per_group", PlanError)
    _check_positive("max_inflight_bytes", room)
    _check_positive("max_ops_per_group", most)
    where = _choose_topology(plan, topology)
    demands = gather_lines(plan.batches, where)
    _check_pieces(plan, demands, room)
    every = _list_legs(plan, demands, where, way)
    assumes = _assumes_nodes(plan, topology)
    options = [Program(plan, where, legs, 1, 1, room, most, "", assumes) for legs in every]
    fastest = _find_fastest(options)
    return replace(fastest, digest=digest_program(fastest))


def _check_plan(plan: Plan, fix: str) -> None:
    """Raise PlanError unless this is a plan: an adjoint is not one."""
    if not isinstance(plan, Plan):
        raise PlanError(f"{plan!r} is not a plan of two sides' layouts; {fix}")


def _check_positive(name: str, limit: int) -> None:
    """Raise PlanError for a limit that nothing keeps."""
    if limit < 1:
        raise PlanError(f"{name}={limit} leaves no room for a message; give a positive number")


def _choose_topology(plan: Plan, topology: Topology | None) -> Topology:
    """The one given, or the plan's own, or the default."""
    if topology is not None:
        return checked(topology)
    return plan.topology or Topology()


def _assumes_nodes(plan: Plan, topology: Topology | None) -> bool:
    """Whether nobody said where the nodes are."""
    return topology is None and plan.topology is None


def _list_legs(plan: Plan, demands: Demands, where: Topology, fanout: str) -> Iterator[Legs]:
    """The legs to choose from."""
    per_node = where.ranks_per_node
    for by_node, relays in WAYS[fanout]:
        if fanout == "none" and where == plan.topology:
            yield legs_as_cut(plan.lines)
        else:
            yield from find_legs(plan, demands, per_node, by_node=by_node, relays=relays)


def as_planned(plan: Plan, topology: Topology | None = None) -> Program:
    """What a plan does when it is compiled itself.

    That is each of its transfers, from its own sender, in one round per addend. The topology
    (default: the plan's own, or 8 ranks per node) says where the ranks are and changes no transfer.
    Raises PlanError for an adjoint.
    """
    prog = run_straight(plan, topology)
    # Its limits are what it takes: whoever compiles a plan sets them later, by a pace.
    pairs = sum_pairs(prog)
    counts = count_messages(pairs, 1, len(prog.ranks))
    most = int(counts.max(initial=1))
    _, under_way = _measure(prog)
    room = max(under_way, 1)
    prog = replace(prog, max_inflight_bytes=room, max_ops_per_group=most)
    return replace(prog, digest=digest_program(prog))


def run_straight(plan: Plan, topology: Topology | None = None) -> Program:
    """The same before its limits are counted, which its time does not depend on."""
    _check_plan(plan, "give what plan(src, dst) returns")
    where = _choose_topology(plan, topology)
    return Program(
        plan, where, legs_as_cut(plan.lines), 1, 1, 1, 1, "", _assumes_nodes(plan, topology)
    )


def _check_pieces(plan: Plan, demands: Demands, room: int) -> None:
    """Raise PlanError where something that is not cut has no room in a round."""
    is_sent = demands.rows.spread(demands.count > 0)
    sizes = measure_uncut(demands, plan.batches) * is_sent
    size = sizes.max(initial=0)
    if size <= room:
        return
    row = sizes.argmax()
    batch = plan.batches[int(demands.batch[row])]
    what = f"a row or small box of {size} bytes of tensor {batch.names[0]!r} is not cut"
    raise PlanError(f"max_inflight_bytes={room}: {what}; pass {size} or more")


class _Way(NamedTuple):
    """A program whose rounds are to be found, and what goes from rank to rank in it."""

    prog: Program
    pairs: Pairs
    loads: Loads

    @property
    def by_rank(self) -> Ints:
        """Bytes by phase and rank: all legs and both ways."""
        total: Ints = self.loads.sum(axis=(1, 3))
        return total


def _find_fastest(options: Iterable[Program]) -> Program:
    """The fastest, divided into rounds, of the programs that can keep their limits.

    The likeliest come first; those that would not be faster with all legs in one round need not be
    divided.
    """
    found: list[tuple[float, Program]] = []
    failed: list[PlanError] = []
    for slots, way in _order_by_estimate(options):
        least = estimate_seconds(way.prog.topology, way.loads.sum(axis=1))
        if any(time <= least for time, _ in found):
            continue
        try:
            found.append(_divide(way, slots))
        except PlanError as error:
            failed.append(error)
    if not found:
        raise failed[0]
    _, fastest = min(found, key=itemgetter(0))
    return fastest


def _order_by_estimate(options: Iterable[Program]) -> list[tuple[int, _Way]]:
    """The ways with their best numbers of slots, the one that should be fastest first."""
    estimated: list[tuple[float, int, _Way]] = []
    for prog in options:
        pairs = sum_pairs(prog)
        loads = sum_leg_loads(prog, pairs)
        time, slots = _choose_slots(prog.topology, loads)
        estimated.append((time, slots, _Way(prog, pairs, loads)))
    estimated.sort(key=itemgetter(0))
    return [(slots, way) for _, slots, way in estimated]


# Rounds


def _choose_slots(where: Topology, loads: Loads) -> tuple[float, int]:
    """The least time of the legs and in how many slots, pieces being as small as one likes."""
    relays = loads[:, 1:].any()
    options = []
    for slots in SLOTS if relays else (1,):
        time = estimate_slots(where, loads, slots)
        options.append((time, slots))
    least, _ = min(options)
    # The fewest of those that are about as fast: each slot makes all lists longer.
    return next(option for option in options if option[0] <= least * ABOUT)


def _divide(way: _Way, slots: int) -> tuple[float, Program]:
    """The program with as few turns and slots as its limits ask for, and its time.

    The number of slots is at least `slots`. More are tried until nothing is gained by them, then
    more turns.
    """
    prog = replace(way.prog, turns=_choose_turns(way))
    room = prog.max_inflight_bytes
    most = _count_most_slots(prog)
    way = way._replace(prog=prog)
    _check_bytes(way, most)
    # Even slices of what the fullest rank has under way, all legs and both ways, need at least so
    # many slots.
    fullest = int(way.by_rank.max(initial=0))
    least = -(-fullest // room)
    sized = replace(prog, slots=min(max(least, slots), most))
    best = sized
    best_under_way = None
    while sized.slots <= GROWTH * best.slots:
        time, under_way = _measure(sized)
        if under_way <= room:
            return time, sized
        improved = best_under_way is None or under_way < best_under_way
        if improved:
            best = sized
            best_under_way = under_way
        if sized.slots == most:
            break
        grown = _grow(sized.slots, under_way, room, improved=improved)
        sized = replace(prog, slots=min(grown, most))
    return _add_turns(best, way.pairs)


def _grow(slots: int, under_way: int, room: int, *, improved: bool) -> int:
    """How many slots to try next, where so many leave more bytes under way than there is room for.

    As many as would do if slices were even, and a 32nd more since they are not. Where the last step
    did not improve on the best, half as many again at least, so that few steps reach the end.
    """
    grown = slots * under_way * 33 // (32 * room)
    if not improved:
        grown = max(grown, slots * 3 // 2)
    return grown + 1


def _measure(prog: Program) -> tuple[float, int]:
    """The time of its rounds, and the most bytes that a rank has under way in one."""
    loads = sum_round_loads(prog)
    by_rank = loads.sum(axis=-1)
    most = int(by_rank.max(initial=0))
    return estimate_seconds(prog.topology, loads), most


def _choose_turns(way: _Way) -> int:
    """The fewest turns in which no rank has more messages than allowed."""
    limit = way.prog.max_ops_per_group
    ranks = len(way.prog.ranks)
    for turns in _list_turns(way.prog, way.pairs):
        counts = count_messages(way.pairs, turns, ranks)
        count = int(counts.max(initial=0))
        if count <= limit:
            return turns
    what = f"found no rounds in which no rank has more than {plural(count - 1, 'message')}"
    raise PlanError(f"max_ops_per_group={limit}: {what}; pass {count} or more")


def _list_turns(prog: Program, of: Pairs) -> list[int]:
    """The numbers of turns to choose from: the program's own, doubled until there are enough.

    With enough, no rank has two peers in one turn, nor two legs (`turn_of`).
    """
    ranks = max(len(prog.ranks), 1)
    legs = int(of.leg.max(initial=0)) + 1
    enough = 4 * legs * ranks - 1
    fitting = MOST_ROUNDS // (prog.slots * ranks)
    most = min(enough, fitting)
    turns = [prog.turns]
    while 2 * turns[-1] <= most:
        turns.append(2 * turns[-1])
    return turns


def _count_most_slots(prog: Program) -> int:
    """The most slots that are tried, for memory's sake."""
    count = 0
    for found in list_bundles(prog.legs):
        count += len(found.streams.block)
    ranks = max(len(prog.ranks), 1)
    by_slices = MOST_SLICES // max(count, 1)
    by_rounds = MOST_ROUNDS // (prog.turns * ranks)
    most = min(by_slices, by_rounds, MOST_SLOTS)
    return max(most, SLOTS[-1])


def _check_bytes(way: _Way, slots: int) -> None:
    """Raise PlanError where so many slots leave too much under way, whatever the turns."""
    turns = _list_turns(way.prog, way.pairs)[-1]
    rounds = (slots + LEGS - 1) * turns
    # All slices of a pair are in one turn; a rank's are in as many as there are.
    pair = int(way.pairs.nbytes.max(initial=0))
    rank = int(way.by_rank.max(initial=0))
    least_of_pair = -(-pair // slots)
    least_of_rank = -(-rank // rounds)
    least = max(least_of_pair, least_of_rank)
    room = way.prog.max_inflight_bytes
    if least > room:
        what = f"{slots} slots and {turns} turns leave {least} bytes under way at some rank in some round"
        raise PlanError(f"max_inflight_bytes={room}: {what}; pass {least} or more")


def _add_turns(prog: Program, of: Pairs) -> tuple[float, Program]:
    """The program with the fewest turns that leave no rank too much under way, and its time."""
    options = [replace(prog, turns=turns) for turns in _list_turns(prog, of)]
    room = prog.max_inflight_bytes
    _, least = _measure(options[-1])
    if least > room:
        what = f"found no rounds in which no rank has {least} bytes under way, both ways together"
        raise PlanError(f"max_inflight_bytes={room}: {what}; pass {least} or more")

    def fits(option: Program) -> bool:
        return _measure(option)[1] <= room

    # The last option fits, so it need not be measured again.
    at = bisect.bisect_left(options, True, hi=len(options) - 1, key=fits)
    chosen = options[at]
    time, _ = _measure(chosen)
    return time, chosen
