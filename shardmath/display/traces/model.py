"""Model: the timeline of a program in its cost model.

1. The cost model is `certify`'s: a round lasts one latency plus the time of its fullest link; rounds follow each other.
2. In a round, messages that share a link go one after the other at the link's full rate, in the order in which the rank
   posts them. For the rest of the round the rank waits for other ranks' links.
3. A plan is modeled as in `certify`: each transfer from its own sender, in one round per addend.

>>> from shardmath import Layout, Mesh, Topology, certify, plan
>>> p = plan(Layout((1 << 20,), Mesh(tp=2), "(tp n)"), Layout((1 << 20,), Mesh(tp=2, ranks=(2, 3)), "(tp n)"))
>>> where = Topology(ranks_per_node=1)
>>> for span in model(p, topology=where, ranks=[2]).spans:
...     print(span.place, span.track, f"{span.begin_s * 1e6:.2f} us, {span.seconds * 1e6:.2f} us")
rank 2, model rounds 0.00 us, 51.94 us
rank 2, model from 0 10.00 us, 41.94 us
>>> print(certify(p, topology=where))
51.94 us, 1 times the bound of 51.94 us: rank 2 must take in 2.097 MB at 50 GB/s, after 10 us of latency
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arguments import as_integer, listed
from shardmath.base.errors import PlanError
from shardmath.display.traces.spans import (
    Span,
    Trace,
    TraceRank,
    describe_message,
    name_step,
    name_track,
)
from shardmath.plans.flows.topology import Topology
from shardmath.plans.plan import Plan
from shardmath.plans.programs.certify import find_running
from shardmath.plans.programs.loads import sum_round_loads, time_rounds
from shardmath.plans.programs.messages import Message, Round
from shardmath.plans.programs.program import Program

__all__ = ["model"]

_Times: TypeAlias = NDArray[np.float64]
"""(begin, end) of each round in seconds, indexed by the phase, slot and turn that number it (see `name_step`)."""


def model(
    plan: Plan | Program, *, topology: Topology | None = None, ranks: Iterable[int] | None = None
) -> Trace:
    """Return a modeled Trace (timeline) of `ranks` (default: all) that run `plan` on `topology`. Times count from the
    start of the run.

    A program runs on its own topology; a plan runs on `topology`, by default its own. Raises PlanError as `certify`
    does, and for anything but ranks.
    """
    prog = find_running(plan, topology)
    times = time_rounds(prog.topology, sum_round_loads(prog))
    chosen = prog.ranks if ranks is None else _list_ranks(ranks)
    spans: list[Span] = []
    for rank in chosen:
        rounds = prog.for_rank(rank)
        spans += _draw_rounds(rank, rounds, times, prog.topology)
        spans += _sort_tracks(_draw_messages(rank, rounds, times, prog.topology))
    return Trace(tuple(spans))


def _list_ranks(given: Iterable[int]) -> list[int]:
    """The ranks, ascending and distinct. Raises PlanError for anything else."""
    chosen = set()
    for rank in listed(given, "ranks", PlanError):
        number = as_integer(rank, "a rank", PlanError)
        chosen.add(number)
    return sorted(chosen)


def _draw_rounds(
    rank: int, rounds: Sequence[Round], times: _Times, where: Topology
) -> Iterator[Span]:
    """A span for each round in which the rank sends or receives; it tells the ranks per node, since a topology may only
    assume them."""
    place = TraceRank(rank, is_model=True)
    about = {"ranks per node": where.ranks_per_node}
    for round_ in rounds:
        if round_.sends or round_.receives:
            begin, end = times[round_.step].tolist()
            yield Span(place, "rounds", name_step(round_.step), begin, end - begin, about)


def _draw_messages(
    rank: int, rounds: Sequence[Round], times: _Times, where: Topology
) -> Iterator[Span]:
    """The messages of the rank, at the rate of its links."""
    place = TraceRank(rank, is_model=True)
    for round_ in rounds:
        begin, _ = times[round_.step].tolist()
        # Seconds for which each link has been busy, by (to another node, outgoing).
        busy: dict[tuple[bool, bool], float] = {}
        for message in (*round_.sends, *round_.receives):
            is_far = where.node(message.src_rank) != where.node(message.dst_rank)
            link = is_far, message.src_rank == rank
            busy_s = busy.get(link, 0.0)
            rate = where.inter_bytes_per_s if is_far else where.intra_bytes_per_s
            seconds = message.payload / rate
            busy[link] = busy_s + seconds
            message_begin = begin + where.latency_s + busy_s
            yield _draw_message(place, message, message_begin, seconds)


def _draw_message(place: TraceRank, message: Message, begin: float, seconds: float) -> Span:
    """The span of a message on the track of its other rank."""
    track = name_track(message, place.rank)
    name = f"{message.payload} B"
    about = describe_message(message)
    return Span(place, track, name, begin, seconds, about)


def _sort_tracks(spans: Iterable[Span]) -> list[Span]:
    """The spans sorted by peer, and then by direction."""

    def find_peer(span: Span) -> tuple[int, str]:
        direction, _, peer = span.track.partition(" ")
        return int(peer), direction

    return sorted(spans, key=find_peer)
