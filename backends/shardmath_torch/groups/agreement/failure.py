"""Who failed first, when an exchange breaks.

1. A rank that fails writes a report into the process group's key-value store: whom it blames, and
   for which tensor. Only then does it let go of its own connections, which makes ranks that wait
   for it fail in turn, at once.
2. The first to fail is one that others blame and that has itself not reported: a survivor that
   merely could not go on has said why, and whom it blames instead.
3. If the store does not answer, a rank has only what it saw itself: a connection that ended, or
   that nothing came. A rank that had to give up looks no different from one that died. So where a
   rank served the store, which may have been the first to go or only the last to leave, who failed
   first is not known.
4. Asking takes no longer than a grace period, whatever the store does: it happens on a thread that
   nobody waits for.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from shardmath_torch.groups.agreement import notes, threads
from shardmath_torch.groups.agreement.wire import says_ended
from shardmath_torch.groups.compat import Store
from shardmath_torch.groups.stores import apart_from

__all__ = ["UNTOLD", "FailureDetector", "Report", "find_first_failed", "stop_asking"]

UNTOLD = -1
"""In place of the rank that serves the store, until ranks have told each other."""

LOOK_AGAIN_S = 0.02
"""While the store lacks a report."""

STOP_S = 1.0
"""For a thread that asks to end: the store may not answer."""


class _Asking(NamedTuple):
    """A thread that asks, the bell that ends it, and how long it is to be waited for before."""

    thread: threading.Thread
    bell: threading.Event
    patience: float


_asking: WeakKeyDictionary[Store, list[_Asking]] = WeakKeyDictionary()
"""Those that may go on, by the group's store."""


def stop_asking(store: Store) -> None:
    """Have nothing more written into the store of a group that ends here.

    Waits for threads that ask, and before for those that others ask, at most a grace period.
    """
    for one in _asking.pop(store, []):
        one.thread.join(one.patience)
        one.bell.set()
        one.thread.join(STOP_S)


@dataclass(frozen=True, slots=True)
class Report:
    """Whom a rank blames (None: it cannot tell), for which tensor (None: none was on its way), and what it saw.

    Of a goodbye, that is what it says: nobody has failed.
    """

    blames: int | None
    tensor: str | None
    cause: str
    is_goodbye: bool = False


def find_first_failed(blamed: Mapping[int, int | None], ranks: Sequence[int]) -> int | None:
    """The rank that failed first, from who blames whom; None where nothing tells.

    `blamed` has every rank that reported; `ranks` are all.

    >>> find_first_failed({0: 3, 3: 2, 1: 0}, range(4))
    2
    >>> find_first_failed({0: None, 1: None, 3: None}, range(4))
    2
    """
    times_blamed = Counter(rank for rank in blamed.values() if rank is not None)
    silent = [rank for rank in ranks if rank not in blamed]
    suspects = [rank for rank in silent if times_blamed[rank]]
    # Who saw only that something broke may mean anyone who says nothing.
    if not suspects and None in blamed.values():
        suspects = silent
    return min(suspects or times_blamed, key=lambda r: (-times_blamed[r], r), default=None)


@dataclass(slots=True)
class FailureDetector:
    """Asks all ranks of a group, through `store` under `key`, what they saw; takes at most `grace` seconds.

    `host` is the rank whose process serves the store, None where no rank of the group does, or
    UNTOLD. `answered`: whether the store ever did.
    """

    store: Store | None
    host: int | None
    key: str
    rank: int
    ranks: Sequence[int]
    grace: float
    reports: dict[int, Report] = field(default_factory=dict)
    answered: bool = False
    bell: threading.Event = field(default_factory=threads.make_bell)

    def detect(self, mine: Report, let_go: Callable[[], None]) -> tuple[int | None, Report]:
        """The rank that failed first, and the report against it; or None, and the report of a goodbye.

        `let_go` is called once this rank has reported.
        """
        deadline = time.monotonic() + self.grace
        asking = self.report(mine, let_go)
        asking.join(max(0.0, deadline - time.monotonic()))
        return self._judge(mine)

    def report(self, mine: Report, let_go: Callable[[], None]) -> threading.Thread:
        """Report and let go, and wait no longer than that takes. Gives the thread that asks the others."""
        reported = threading.Event()
        asking = threads.start(lambda: self._ask(mine, reported))
        if self.store is not None:
            # Others read what the host's process serves for as long as it does.
            patience = self.grace if self.host == self.rank else 0.0
            _asking.setdefault(self.store, []).append(_Asking(asking, self.bell, patience))
        # Others notice that connections end, and then look for a report: it has to be there first.
        reported.wait(self.grace / 4)
        let_go()
        return asking

    def _judge(self, mine: Report) -> tuple[int | None, Report]:
        """Who failed first by the reports that have come, and the report that says most of it."""
        reports = {**self.reports, self.rank: mine}
        for report in reports.values():
            if report.is_goodbye:
                return None, report
        if self.answered:
            blamed = {rank: report.blames for rank, report in reports.items()}
            first = find_first_failed(blamed, self.ranks)
        elif self.host is None or mine.blames == self.rank:
            first = mine.blames
        else:
            # The host may have been the first to go, or only the last to leave.
            first = None
        # What a rank says of itself tells most, then what this one saw.
        confessed = [reports[first]] if first in reports else []
        for report in (*confessed, mine, *reports.values()):
            if report.blames == first:
                return first, report
        return first, mine

    def _ask(self, mine: Report, reported: threading.Event) -> None:
        """Write this rank's report, and read the others'. Runs on a thread of its own."""
        try:
            if self.store is not None:
                store = apart_from(self.store)
                said = json.dumps([self.rank, asdict(mine)])
                notes.add_line(store, self._key_of("failed"), said)
                reported.set()
                self._collect(store, mine)
                self._wait_for_readers(store)
        except RuntimeError:
            # The store's host is gone; `answered` tells whether it ever spoke.
            pass
        reported.set()

    def _key_of(self, what: str) -> str:
        """Where the store has what ranks say, each in a line."""
        return f"shardmath/{self.key}/{what}"

    def _collect(self, store: Store, mine: Report) -> None:
        """Read reports until all that can be expected are there."""
        start = time.monotonic()
        # Early on, who has not reported yet may only be slow. But whoever lets go has reported before:
        # the only other rank, whose connection has ended, is not going to.
        is_gone = len(self.ranks) == 2 and says_ended(mine.cause)
        settled = start if is_gone else start + self.grace / 4
        until = start + self.grace * 0.8
        while time.monotonic() < until and not self.bell.is_set():
            self._read_reports(store)
            self.answered = True
            if time.monotonic() >= settled and self._has_enough():
                return
            self.bell.wait(LOOK_AGAIN_S)

    def _read_reports(self, store: Store) -> None:
        """Take what the store has by now."""
        for line in notes.read_lines(store, self._key_of("failed")):
            rank, report = json.loads(line)
            self.reports.setdefault(rank, Report(**report))

    def _has_enough(self) -> bool:
        """Whether all have reported but those who are blamed, at least one; of two ranks, the other one is.

        A goodbye is enough.
        """
        silent = {rank for rank in self.ranks if rank not in self.reports}
        blamed = {report.blames for report in self.reports.values()}
        is_clear = len(self.ranks) == 2 or silent <= blamed
        has_goodbye = any(report.is_goodbye for report in self.reports.values())
        return has_goodbye or (bool(silent) and is_clear)

    def _wait_for_readers(self, store: Store) -> None:
        """As the store's host, stay until all who reported have read the others' reports."""
        notes.add_line(store, self._key_of("read"), str(self.rank))
        deadline = time.monotonic() + self.grace / 5
        while self.host == self.rank and time.monotonic() < deadline:
            readers = notes.read_lines(store, self._key_of("read"))
            if set(map(str, self.reports)) <= set(readers):
                return
            time.sleep(LOOK_AGAIN_S)
