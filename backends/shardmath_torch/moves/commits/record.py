"""The record: what ranks decide, written once in their group's store.

1. A proposal is written where nothing stands (compare-and-set), and what stands there then is what
   is decided: all ranks that ask get one answer, whenever they ask.
2. Asking ends: with the answer, or with LOSE where the store does not answer in time. It happens on
   a thread that nobody waits for.
3. Records do not pile up: who knows that all ranks have read the one before removes it (`former`).

>>> import torch.distributed as dist
>>> record = Record(dist.HashStore(), "group", 7)
>>> record.ask(Event.COMMIT, 5.0).value, record.ask(Event.ABORT, 5.0).value
('commit', 'commit')
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from shardmath.plans.protocol import Event
from shardmath_torch.groups.agreement import threads
from shardmath_torch.groups.compat import Store
from shardmath_torch.groups.stores import apart_from

__all__ = ["Record"]


@dataclass(frozen=True, slots=True)
class Record:
    """What ranks of the group `key` decide after their vote of this number; nobody reads the `former` one."""

    store: Store | None
    key: str
    number: int
    former: int | None = None

    def ask(self, proposal: Event, limit: float) -> Event:
        """Propose COMMIT or ABORT; gives what is decided, or LOSE after `limit` seconds."""
        answers: list[bytes] = []

        def propose() -> None:
            # Whatever goes wrong, there is no answer then.
            with suppress(Exception):
                if self.store is not None:
                    store = apart_from(self.store)
                    answer = store.compare_set(self._name(self.number), "", proposal.value)
                    answers.append(answer)
                    self._forget(store)

        threads.start(propose).join(limit)
        if not answers:
            return Event.LOSE
        return Event.COMMIT if answers[0] == Event.COMMIT.value.encode() else Event.ABORT

    def _forget(self, store: Store) -> None:
        """Remove the former record."""
        if self.former is not None:
            store.delete_key(self._name(self.former))

    def _name(self, number: int) -> str:
        """Where the store has it."""
        return f"shardmath/{self.key}/decided/{number}"
