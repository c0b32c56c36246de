"""Who failed first, when an exchange breaks.

1. A rank that fails writes a report into the process group's key-value store: whom it blames, and for which tensor.
   Only then does it let go of its own connections, which makes ranks that wait for it fail in turn, at once.
2. The first to fail is one that others blame and that has itself not reported: a survivor that merely could not go on
   has said why, and whom it blames instead.
3. If the store does not answer, a rank has only what it saw itself: a connection that ended, or that nothing came. A
   rank that had to give up looks no different from one that died. So where a rank served the store, which may have
   been the first to go or only the last to leave, who failed first is not known.
4. Asking takes no longer than a grace period, whatever the store does: it happens on a thread that nobody waits for.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from shardmath_torch.agreement import beside
from shardmath_torch.compat import Store

__all__ = ["UNTOLD", "Evidence", "Inquest", "first_failed"]

UNTOLD = -1
"""In place of the rank that serves the store, until ranks have told each other."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Whom a rank blames (None: it cannot tell), for which tensor (None: none was on its way), and what it saw."""

    blames: int | None
    tensor: str | None
    cause: str


def first_failed(reports: Mapping[int, int | None], ranks: Sequence[int]) -> int | None:
    """The rank that failed first, from who blames whom; None where nothing tells.

    `reports` has every rank that reported; `ranks` are all.

    >>> first_failed({0: 3, 3: 2, 1: 0}, range(4))
    2
    >>> first_failed({0: None, 1: None, 3: None}, range(4))
    2
    """
    votes = Counter(rank for rank in reports.values() if rank is not None)
    silent = [rank for rank in ranks if rank not in reports]
    suspects = [rank for rank in silent if votes[rank]]
    if not suspects and None in reports.values():
        suspects = silent
    return min(suspects or votes, key=lambda rank: (-votes[rank], rank), default=None)


@dataclass(slots=True)
class Inquest:
    """Asks all ranks of a group, through `store` under `key`, what they saw; takes at most `grace` seconds.

    `host` is the rank whose process serves the store, None where no rank of the group does, or UNTOLD.
    """

    store: Store | None
    host: int | None
    key: str
    rank: int
    ranks: Sequence[int]
    grace: float
    reports: dict[int, Evidence] = field(default_factory=dict)
    answered: bool = False

    def hold(self, mine: Evidence, let_go: Callable[[], None]) -> tuple[int | None, Evidence]:
        """The rank that failed first, and the evidence against it. `let_go` is called once this rank has reported."""
        deadline = time.monotonic() + self.grace
        asking = self.tell(mine, let_go)
        asking.join(max(0.0, deadline - time.monotonic()))
        return self._verdict(mine)

    def tell(self, mine: Evidence, let_go: Callable[[], None]) -> threading.Thread:
        """Reports and lets go, and waits no longer than that takes. Gives the thread that asks the others."""
        reported = threading.Event()
        asking = beside.start(lambda: self._ask(mine, reported))
        reported.wait(self.grace / 4)
        let_go()
        return asking

    def _verdict(self, mine: Evidence) -> tuple[int | None, Evidence]:
        reports = {**self.reports, self.rank: mine}
        if not self.answered:
            alone = self.host is None or mine.blames == self.rank
            found = mine.blames if alone else None
        else:
            found = first_failed({rank: e.blames for rank, e in reports.items()}, self.ranks)
        confessed = [reports[found]] if found in reports else []
        against = [e for e in (*confessed, mine, *reports.values()) if e.blames == found]
        return found, against[0] if against else mine

    def _ask(self, mine: Evidence, reported: threading.Event) -> None:
        try:
            if self.store is not None:
                self.store.set(self._name(self.rank), json.dumps(asdict(mine)))
                reported.set()
                self._listen(self.store)
                self._stay(self.store)
        except RuntimeError:
            pass  # the store's host is gone; `answered` tells whether it ever spoke
        reported.set()

    def _name(self, rank: int, what: str = "failed") -> str:
        return f"shardmath/{self.key}/{what}/{rank}"

    def _listen(self, store: Store) -> None:
        """Reads reports until all that can be expected are there."""
        start = time.monotonic()
        settled = start + self.grace / 4
        while time.monotonic() < start + self.grace * 0.8 and not beside.leaving.is_set():
            self._read(store)
            self.answered = True
            if time.monotonic() >= settled and self._enough():
                return
            time.sleep(0.02)

    def _read(self, store: Store) -> None:
        for rank in self.ranks:
            if rank not in self.reports and store.check([self._name(rank)]):
                self.reports[rank] = Evidence(**json.loads(store.get(self._name(rank))))

    def _enough(self) -> bool:
        """Whether all have reported but those who are blamed, at least one."""
        silent = {rank for rank in self.ranks if rank not in self.reports}
        return bool(silent) and silent <= {e.blames for e in self.reports.values()}

    def _stay(self, store: Store) -> None:
        """The store's host stays until all who reported have read the others' reports."""
        store.set(self._name(self.rank, "read"), "")
        deadline = time.monotonic() + self.grace / 5
        while self.host == self.rank and time.monotonic() < deadline:
            if all(store.check([self._name(rank, "read")]) for rank in self.reports):
                return
            time.sleep(0.02)
