"""Laps: what a call's time goes into, by name.

1. A lap is named as it ends, and the next begins then: laps of a call add up to all of its time.
2. What happens in the engine, between the vote and the end of all messages, are laps of its own
   (`WORK`): a trace shows them as one phase "moving", and one by one beside it.

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
"""Of each lap; messages that arrive and messages that leave are both waited for."""

LAPS = len(NAMES)

QUEUED, PREPARED, AGREED, PACKED, POSTED, KEPT, ARRIVED, LEFT = range(8)
UNPACKED, FOLDED, FINALIZED, COMMITTED, COMPARED, FAILED = range(8, LAPS)

WORK = frozenset({"packing", "posting", "keeping", "waiting", "unpacking", "folding"})
"""What happens in the engine."""
