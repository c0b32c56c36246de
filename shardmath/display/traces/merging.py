"""Merging: traces of several ranks as one, their clocks aligned.

1. Ranks of one machine have one clock, which is left alone.
2. Ranks of several machines took part in votes, and all leave a vote at about the same time, when they have heard the
   last one. So a machine's clock is moved by the median of how much later than the others its ranks say that they left
   the votes that they had in common. That is right but for the time of a message.
3. Machines without a vote in common keep the time of day that they had.

>>> from shardmath.display.traces.spans import Place, Vote
>>> def rank(number: int, machine: str, voted_s: float) -> Trace:
...     span = Span(Place(number), "moves", "move 1", voted_s, 1.0)
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
"""Of one machine: when its ranks left each vote, in nanoseconds since 1970 as it counts them."""


def merge(traces: Iterable[Trace]) -> Trace:
    """The traces of several ranks as one, which begins with its first span.

    Raises ShardError for a trace without a clock, as one that was merged already, and for two of one rank.
    """
    given = list(traces)
    clocks = [_find_clock(trace) for trace in given]
    _check_ranks(clocks)
    ahead = _align(clocks)
    begins = [clock.began_ns - ahead[clock.machine] for clock in clocks]
    # Seconds since 1970 leave a float no room for nanoseconds.
    first = min(begins, default=0)
    spans: list[Span] = []
    in_order = sorted(zip(clocks, begins, given, strict=True), key=lambda one: one[0].rank)
    for _, begin, trace in in_order:
        spans += _shift(trace.spans, (begin - first) / 1e9)
    left_out = sum(trace.left_out for trace in given)
    return Trace(_begin_at_zero(spans), left_out=left_out)


def _begin_at_zero(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans so much later or earlier that the first begins at 0 s."""
    earliest = min((span.begin_s for span in spans), default=0.0)
    return tuple(_shift(spans, -earliest))


def _shift(spans: Iterable[Span], later: float) -> Iterator[Span]:
    """The spans so many seconds later."""
    for span in spans:
        yield span._replace(begin_s=span.begin_s + later)


def _find_clock(trace: Trace) -> Clock:
    """The trace's clock. Raises ShardError where it has none."""
    if trace.clock is None:
        what = f"a trace without a clock ({trace}) cannot be merged"
        raise ShardError(f"{what}; give those that smt.trace wrote, each once")
    return trace.clock


def _check_ranks(clocks: Sequence[Clock]) -> None:
    """Raise ShardError where two are of one rank."""
    seen = set()
    for clock in clocks:
        if clock.rank in seen:
            what = f"two traces are of rank {clock.rank}"
            raise ShardError(f"{what}; merge those of one smt.trace, one of each rank")
        seen.add(clock.rank)


def _align(clocks: Sequence[Clock]) -> dict[str, int]:
    """By machine, how many nanoseconds its clock is ahead of that of the first rank."""
    machines = _gather_votes(clocks)
    waiting = list(machines)
    ahead: dict[str, int] = {}
    while waiting:
        # One that has voted with those that are aligned; the first rank's to begin with.
        for machine in waiting:
            found = _compare(machines[machine], [(machines[one], ahead[one]) for one in ahead])
            if found:
                ahead[machine] = round(statistics.median(found))
                break
        else:
            machine = waiting[0]
            ahead[machine] = 0
        waiting.remove(machine)
    return ahead


def _gather_votes(clocks: Sequence[Clock]) -> dict[str, _Votes]:
    """The votes of each machine, that of the first rank first."""
    machines: dict[str, dict[str, list[int]]] = {}
    for clock in sorted(clocks, key=lambda clock: clock.rank):
        votes = machines.setdefault(clock.machine, {})
        for vote in clock.votes:
            left = clock.began_ns + round(vote.at_s * 1e9)
            votes.setdefault(vote.name, []).append(left)
    return dict(machines)


def _compare(mine: _Votes, others: Sequence[tuple[_Votes, int]]) -> list[int]:
    """How much later than others' ranks, of whose clocks one knows how far they are ahead, ours say that they left."""
    found = []
    for theirs, ahead in others:
        for name in mine.keys() & theirs.keys():
            # The medians of each: of ranks that were late to notice there may be several.
            here = statistics.median(mine[name])
            there = statistics.median(theirs[name])
            found.append(round(here - there) + ahead)
    return found
