"""Tapers: weights of slots that fall, so that little is left to relay when the holders are done.

1. The last slot is relayed after all bytes have left the holders. If slots are even, that takes the time of relaying
   one slot: more slots make it shorter, and each costs a latency.
2. Let a slot take `rate` times as long to relay as to receive. If each slot has `rate` times the bytes of the slot
   before, a slot is relayed exactly while the next one arrives. Then n slots leave only rate^n of all bytes for the
   end, and a few slots suffice until that costs less than a latency.
3. If the first slot would exceed `max_inflight_bytes`, several slots of the same weight come first: a **head**. The
   slots that fall are the **tail**.
4. In the same way, if the slowest hop is not the first one, it waits until hops before it have brought the first slot:
   holders hand bytes to ranks of their node (`mates`), or bytes take longer to relay than to receive. So the slot
   before the head, the **rise**, is as much lighter as those hops are faster.
5. Weights are computed from integers, and the choice between them from sums that are rounded once, so that every
   machine finds the same.

>>> _weigh(rise=0, head=2, tail=3, rate=RATE // 2)
(1048576, 1048576, 524288, 262144, 131072)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardmath.base.arrays import Ints
from shardmath.plans.flows.topology import Topology
from shardmath.plans.programs.loads import Loads, time_links

__all__ = ["HEAVIEST", "HEAVIEST_SUM", "Taper", "find_taper"]

Floats: TypeAlias = NDArray[np.float64]

HEAVIEST = 1 << 20
"""The weight of the slots of a head. Weights are integers, so that lighter slots are rounded to a millionth of it."""

HEAVIEST_SUM = 1 << 31
"""Sums of the weights of a program are less, so that the product of two such sums fits in 64 bits."""

RATE = 1 << 16
"""Rates are integers too: at rate r, a slot is r / RATE times as heavy as the slot before."""

FASTEST = RATE // 16
SLOWEST = RATE * 9 // 10
"""Limits of rates: slots that hardly fall would be too many, and those that fall faster save nothing more."""

TAILS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24)
"""Options for the number of slots that fall."""

LONGEST_HEAD = 128
"""Most slots of a head: the last of so many even slots is short already."""

MARGIN = 1.005
"""Slices are cut at rows, which may make a slot heavier than planned by about this factor."""


class Taper(NamedTuple):
    """Weights of slots, and the seconds that a program with slots of these weights should take."""

    seconds: float
    weights: tuple[int, ...]


def find_taper(where: Topology, loads: Loads, limit: int) -> Taper | None:
    """Return the fastest Taper by estimate of those in which no rank has more than `limit` bytes in flight in a round;
    None if there is none. `loads` has the bytes by phase (partial value of a sum), lag (slots behind the first hop),
    rank and link."""
    phases, lags, *_ = loads.shape
    by_link = time_links(where, loads).reshape(phases, lags, -1)
    seconds = list(map(_pick_largest, by_link))
    nbytes = list(map(_pick_largest, loads.sum(axis=-1)))
    found = []
    for weights in _list_tapers(seconds, nbytes, limit):
        share = np.array(weights) / sum(weights)
        inflight = max(_fill_rounds(share, by_lag).max(initial=0) for by_lag in nbytes)
        if inflight * MARGIN > limit:
            continue
        time = 0.0
        for by_lag in seconds:
            by_round = _fill_rounds(share, by_lag)
            latency = where.latency_s * int(np.count_nonzero(by_round))
            # numpy's sum depends on the processor, and all ranks have to choose the same taper.
            time += math.fsum(by_round.tolist()) + latency
        found.append(Taper(time, weights))
    return min(found, default=None)


Amounts = TypeVar("Amounts", Ints, Floats)


def _pick_largest(table: Amounts) -> Amounts:
    """The columns that may be the fullest in some round, of amounts by lag and column: all but those of which another
    column has as much in every row."""
    remaining: Amounts = table[:, np.argsort(-table.sum(axis=0), kind="stable")]
    largest: list[Amounts] = []
    while remaining.size:
        # The one with the largest sum has more in some row than each of the others.
        first = remaining[:, :1]
        largest.append(first)
        remaining = remaining[:, (remaining > first).any(axis=0)]
    return np.hstack([table[:, :0], *largest])


def _fill_rounds(share: Floats, by_lag: Ints | Floats) -> Floats:
    """By round, the most that a column has of slots of these shares, of amounts by lag and column."""
    lags, columns = by_lag.shape
    rounds = np.zeros((len(share) + lags - 1, columns))
    for lag in range(lags):
        rounds[lag : lag + len(share)] += share[:, None] * by_lag[lag]
    fullest: Floats = rounds.max(axis=1, initial=0.0)
    return fullest


def _list_tapers(
    seconds: list[Floats], nbytes: list[Ints], limit: int
) -> Iterator[tuple[int, ...]]:
    """The tapers to choose from, given the seconds of links and the bytes of ranks of each phase, by lag and column."""
    rise, rate = _find_rates(seconds)
    # The most bytes of a rank: of one lag, and of all.
    alone = max(int(by_lag.max(initial=0)) for by_lag in nbytes)
    together = max(int(by_lag.sum(axis=0).max(initial=0)) for by_lag in nbytes)
    for tail in TAILS:
        lighter = sum(_weigh(rise, 1, tail, rate)) / HEAVIEST - 1
        # The most that a rank has in flight is between these, so one of these heads has room.
        heads = {max(1, math.ceil(most * MARGIN / limit - lighter)) for most in (alone, together)}
        for head in sorted(heads):
            if head <= LONGEST_HEAD:
                yield _weigh(rise, head, tail, rate)


def _find_rates(seconds: list[Floats]) -> tuple[int, int]:
    """How light the rise should be, 0 without one; and the rate at which relaying a slot takes as long as receiving the
    next one. Both are in units of 1 / RATE."""
    by_phase = [by_lag.max(axis=1, initial=0.0) for by_lag in seconds]
    fullest = np.max(by_phase, axis=0).tolist()
    slowest = fullest.index(max(fullest))
    handing = max(fullest[:slowest], default=0.0)
    relaying = max(fullest[slowest + 1 :], default=0.0)
    total = fullest[slowest] or 1.0
    rise, rate = (math.ceil(RATE * part / total) for part in (handing, relaying))
    # Rounded up: a slot that is relayed for too long costs more than one that is relayed too early.
    return rise, min(max(rate, FASTEST), SLOWEST)


def _weigh(rise: int, head: int, tail: int, rate: int) -> tuple[int, ...]:
    """The weights of a first slot that is lighter by the rate `rise`, unless that is 0; of `head` slots that are alike;
    and of `tail` slots that fall by `rate`."""
    weights = [HEAVIEST] * head
    for _ in range(tail):
        lighter = weights[-1] * rate // RATE
        weights.append(max(lighter, 1))
    first = [max(HEAVIEST * rise // RATE, 1)] if rise else []
    return (*first, *weights)
