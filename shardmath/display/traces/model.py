"""Model: what a program does, in the times of its model.

1. The model is that of `certify`: a round is as long as its fullest link takes, and one latency; rounds follow each
   other.
2. In a round, messages that share a link go one after the other at the link's full rate, in the order in which the rank
   posts them. What is left of the round is waiting for other ranks' links.
3. A plan is taken as `certify` takes it: each transfer from its own sender, in one round per addend.

>>> from shardmath import Layout, Mesh, Topology, certify, plan
>>> p = plan(Layout((1 << 20,), Mesh(tp=2), "(tp n)"), Layout((1 << 20,), Mesh(tp=2, ranks=(2, 3)), "(tp n)"))
>>> where = Topology(ranks_per_node=1)
>>> for span in model(p, topology=where, ranks=[2]).spans:
...     print(span.place, span.track, f"{span.begin_s * 1e6:.2f} us, {span.seconds * 1e6:.2f} us")
rank 2, model rounds 0.00 us, 51.94 us
rank 2, model from 0 10.00 us, 41.94 us
>>> print(certify(p, topology=where))
51.94 us, 1 times the bound of 51.94 us: rank 2 must take in 2.097 MB at 50 GB/s
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arguments import as_integer, listed
from shardmath.base.errors import PlanError
from shardmath.display.traces.spans import (
    Place,
    Span,
    Trace,
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
"""By phase, slot and turn, from when to when."""


def model(
    plan: Plan | Program, *, topology: Topology | None = None, ranks: Iterable[int] | None = None
) -> Trace:
    """What the ranks (default: all) do when `plan` is compiled, and when, in seconds from where its first round begins.

    A program runs on its own topology, a plan on the one given, or its own. Raises PlanError as `certify` does, and for
    what is not a rank.
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
    """The ranks. Raises PlanError for what is none."""
    chosen = set()
    for rank in listed(given, "ranks", PlanError):
        number = as_integer(rank, "a rank", PlanError)
        chosen.add(number)
    return sorted(chosen)


def _draw_rounds(
    rank: int, rounds: Sequence[Round], times: _Times, where: Topology
) -> Iterator[Span]:
    """The rounds in which the rank sends or receives; each says the size of the nodes, which may be assumed."""
    place = Place(rank, is_model=True)
    about = {"ranks per node": where.ranks_per_node}
    for one in rounds:
        if one.sends or one.receives:
            begin, end = times[one.step].tolist()
            name = name_step(one.step)
            yield Span(place, "rounds", name, begin, end - begin, about)


def _draw_messages(
    rank: int, rounds: Sequence[Round], times: _Times, where: Topology
) -> Iterator[Span]:
    """The messages of the rank, at the rate of its links."""
    place = Place(rank, is_model=True)
    for one in rounds:
        begin, _ = times[one.step].tolist()
        # Seconds for which each link has been busy: (to another node, outgoing).
        busy: dict[tuple[bool, bool], float] = {}
        for message in (*one.sends, *one.receives):
            is_far = where.node(message.src_rank) != where.node(message.dst_rank)
            link = is_far, message.src_rank == rank
            before = busy.get(link, 0.0)
            rate = where.inter_bytes_per_s if is_far else where.intra_bytes_per_s
            lasting = message.payload / rate
            busy[link] = before + lasting
            begins = begin + where.latency_s + before
            yield _draw_message(place, message, begins, lasting)


def _draw_message(place: Place, message: Message, begin: float, lasting: float) -> Span:
    track = name_track(message, place.rank)
    name = f"{message.payload} B"
    about = describe_message(message)
    return Span(place, track, name, begin, lasting, about)


def _sort_tracks(spans: Iterable[Span]) -> list[Span]:
    """The spans, track by track: those with one peer beside each other."""

    def find_peer(span: Span) -> tuple[int, str]:
        way, _, peer = span.track.partition(" ")
        return int(peer), way

    return sorted(spans, key=find_peer)
