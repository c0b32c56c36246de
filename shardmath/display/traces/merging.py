"""Merging: traces of several ranks as one, their clocks aligned.

1. Ranks of one machine share a clock, so their times are not changed relative to each other.
2. All ranks leave a vote at about the same time, when they have received the last rank's vote. So a machine's clock is
   shifted by the median difference between the times at which its ranks and others left their common votes. The
   remaining error is about the time of a message.
3. Machines without a common vote keep their time of day.

>>> from shardmath.display.traces.spans import TraceRank, Vote
>>> def rank(number: int, machine: str, voted_s: float) -> Trace:
...     span = Span(TraceRank(number), "moves", "move 1", voted_s, 1.0)
...     return Trace((span,), Clock(number, machine, 0, (Vote("1", voted_s),)))
>>> print(*(span.begin_s for span in merge([rank(0, "a", 2.0), rank(1, "b", 500.0)]).spans))
0.0 0.0
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from shardmath.base.errors import ShardError
from shardmath.display.traces.spans import Clock, Span, Trace

__all__ = ["merge"]

_Votes: TypeAlias = Mapping[str, Sequence[int]]
"""The times at which a machine's ranks left each vote, by vote name, in nanoseconds since 1970 on its clock."""


def merge(traces: Iterable[Trace]) -> Trace:
    """Merge the traces of several ranks into one with aligned clocks. Time 0 is when the earliest span (timed
    operation) of any rank begins.

    Raises ShardError for a trace without a clock, such as a merged trace, and for two traces of one rank.
    """
    given = list(traces)
    clocks = [_find_clock(trace) for trace in given]
    _check_ranks(clocks)
    ahead_ns = _align(clocks)
    begins = [clock.began_ns - ahead_ns[clock.machine] for clock in clocks]
    # Subtract as integers: a float of seconds since 1970 has no room for nanoseconds.
    first = min(begins, default=0)
    spans: list[Span] = []
    in_order = sorted(zip(clocks, begins, given, strict=True), key=lambda item: item[0].rank)
    for _, begin, trace in in_order:
        spans += _shift(trace.spans, (begin - first) / 1e9)
    left_out = sum(trace.left_out for trace in given)
    return Trace(_begin_at_zero(spans), left_out=left_out)


def _begin_at_zero(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans shifted so that the first begins at 0 s."""
    earliest = min((span.begin_s for span in spans), default=0.0)
    return tuple(_shift(spans, -earliest))


def _shift(spans: Iterable[Span], later: float) -> Iterator[Span]:
    """The spans, `later` seconds later."""
    for span in spans:
        yield span._replace(begin_s=span.begin_s + later)


def _find_clock(trace: Trace) -> Clock:
    """The trace's clock. Raises ShardError if it has none."""
    if trace.clock is None:
        what = f"a trace without a clock ({trace}) cannot be merged"
        raise ShardError(f"{what}; pass traces that smt.trace wrote, not merged or modeled ones")
    return trace.clock


def _check_ranks(clocks: Sequence[Clock]) -> None:
    """Raise ShardError if two clocks are of one rank."""
    seen = set()
    for clock in clocks:
        if clock.rank in seen:
            what = f"two traces are of rank {clock.rank}"
            raise ShardError(f"{what}; pass one trace per rank, all of one run of smt.trace")
        seen.add(clock.rank)


def _align(clocks: Sequence[Clock]) -> dict[str, int]:
    """The nanoseconds by which each machine's clock is ahead of the first rank's clock."""
    machines = _gather_votes(clocks)
    waiting = list(machines)
    ahead: dict[str, int] = {}
    while waiting:
        # Align a machine that shares a vote with aligned ones; if none does, the first one keeps its time.
        for machine in waiting:
            aligned = [(machines[other], ahead[other]) for other in ahead]
            differences = _compare_votes(machines[machine], aligned)
            if differences:
                ahead[machine] = round(statistics.median(differences))
                break
        else:
            machine = waiting[0]
            ahead[machine] = 0
        waiting.remove(machine)
    return ahead


def _gather_votes(clocks: Sequence[Clock]) -> dict[str, _Votes]:
    """By machine and name of a vote, when each rank left the vote, in nanoseconds of the machine's clock. The first
    rank's machine comes first."""
    machines: dict[str, dict[str, list[int]]] = {}
    for clock in sorted(clocks, key=lambda clock: clock.rank):
        votes = machines.setdefault(clock.machine, {})
        for vote in clock.votes:
            left_ns = clock.began_ns + round(vote.at_s * 1e9)
            votes.setdefault(vote.name, []).append(left_ns)
    return dict(machines)


def _compare_votes(votes: _Votes, aligned: Sequence[tuple[_Votes, int]]) -> list[int]:
    """The nanoseconds by which a machine is ahead, by each vote in common with an aligned machine.

    `aligned` has the other machines' votes, and by how much their clocks are ahead.
    """
    differences = []
    for other_votes, other_ahead in aligned:
        for name in votes.keys() & other_votes.keys():
            # Medians, because several ranks may have noticed the end of a vote late.
            left_ns = statistics.median(votes[name])
            other_left_ns = statistics.median(other_votes[name])
            differences.append(round(left_ns - other_left_ns) + other_ahead)
    return differences
