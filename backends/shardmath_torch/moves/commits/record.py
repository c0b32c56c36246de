"""Record: the ranks' decision on a commit, written once in their group's store.

1. The first proposal is written (compare-and-set), and is the decision: all ranks that propose get
   the same answer, whenever they do.
2. A proposal ends with the decision, or with LOSE if the store does not answer in time. It runs in
   a background thread.
3. Records do not accumulate: a rank that knows that all ranks have read the previous one removes it
   (`former`).

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
    """The decision of a group's ranks to commit or abort a move, written once in the group's key-value store.

    `key` names the group, `number` the vote to decide on, and `former` the vote whose record is deleted.
    """

    store: Store | None
    key: str
    number: int
    former: int | None = None

    def ask(self, proposal: Event, limit: float) -> Event:
        """Propose `proposal` (COMMIT or ABORT) in the store, and return the first proposal of any rank. Returns LOSE
        (the decision is unknown) if there is no store, or if the store does not answer within `limit` seconds."""
        answers: list[bytes] = []

        def propose() -> None:
            # After any error there is no answer.
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
        """Remove the previous record."""
        if self.former is not None:
            store.delete_key(self._name(self.former))

    def _name(self, number: int) -> str:
        """The store's key for the decision after this vote."""
        return f"shardmath/{self.key}/decided/{number}"
