"""Laps: the phases of a call, by name.

1. A lap is named as it ends, and the next begins then: the laps of a call add up to its time.
2. The engine's laps, between the vote and the end of all messages, are those in `WORK`: a trace
   shows them as one phase "moving", and one by one next to it.

>>> NAMES[PACKED], sum(NAMES[lap] in WORK for lap in range(LAPS))
('packing', 7)
"""

from __future__ import annotations

__all__ = [
    "AGREED",
    "ARRIVED",
    "COMMITTED",
    "COMPARED",
    "FAILED",
    "FINALIZED",
    "FOLDED",
    "KEPT",
    "LAPS",
    "LEFT",
    "NAMES",
    "PACKED",
    "POSTED",
    "PREPARED",
    "QUEUED",
    "UNPACKED",
    "WORK",
]

NAMES = (
    "queueing",
    "preparing",
    "agreeing",
    "packing",
    "posting",
    "keeping",
    "waiting",
    "waiting",
    "unpacking",
    "folding",
    "finalizing",
    "committing",
    "comparing",
    "failing",
)
"""Names by lap; waits for messages to arrive and to leave have the same name."""

LAPS = len(NAMES)

QUEUED, PREPARED, AGREED, PACKED, POSTED, KEPT, ARRIVED, LEFT = range(8)
UNPACKED, FOLDED, FINALIZED, COMMITTED, COMPARED, FAILED = range(8, LAPS)

WORK = frozenset({"packing", "posting", "keeping", "waiting", "unpacking", "folding"})
"""Names of the engine's laps."""
