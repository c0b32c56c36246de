"""Failure: which rank failed first, when an exchange breaks.

1. A rank that fails writes a report into the process group's key-value store: the rank and the
   tensor that it blames. Only then does it close its connections, which makes the ranks that wait
   for it fail at once.
2. The first to fail is a rank that others blame and that has not reported: a survivor that could
   not continue has reported the cause, and blames another rank.
3. If the store does not answer, a rank has only its own observation: a closed connection, or no
   message in time. A rank that gave up then looks like one that died. So if a rank served the
   store, which may have failed first or ended last, the first failure is not known.
4. Reading reports takes at most a grace period, whatever the store does, since a background thread
   reads.
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
"""Stands for the rank that serves the store, before the first vote."""

LOOK_AGAIN_S = 0.02
"""Time between two reads while the store lacks a report."""

STOP_S = 1.0
"""Longest wait for a reporting thread to end: the store may not answer."""


class _Reporter(NamedTuple):
    """A thread that writes and reads reports, the bell that ends it, and how long to wait before ringing."""

    thread: threading.Thread
    bell: threading.Event
    patience: float


_reporters: WeakKeyDictionary[Store, list[_Reporter]] = WeakKeyDictionary()
"""Reporters that may still run, by the group's store."""


def stop_asking(store: Store) -> None:
    """End this process's threads that exchange failure reports through `store`. Call it before the process group that
    uses `store` is destroyed.

    First gives each its patience, at most a grace period, so that other ranks can read a store that is served here.
    """
    for reporter in _reporters.pop(store, []):
        reporter.thread.join(reporter.patience)
        reporter.bell.set()
        reporter.thread.join(STOP_S)


@dataclass(frozen=True, slots=True)
class Report:
    """One rank's report on a failure: the rank it blames, the tensor in flight (each None if unknown), and the cause.

    If `is_goodbye`, no rank has failed, and `cause` is the goodbye's text.
    """

    blames: int | None
    tensor: str | None
    cause: str
    is_goodbye: bool = False


def find_first_failed(blamed: Mapping[int, int | None], ranks: Sequence[int]) -> int | None:
    """Return the rank of `ranks` that failed first, judged from `blamed` (rank that reported -> rank that it blames);
    None if no rank is suspect.

    `blamed` is in the order of reports; `ranks` are all of the group. If all have reported, of ranks blamed equally
    often the one blamed first is returned: a rank that was late blames those that had stopped waiting for it.

    >>> find_first_failed({0: 3, 3: 2, 1: 0}, range(4))
    2
    >>> find_first_failed({0: None, 1: None, 3: None}, range(4))
    2
    >>> find_first_failed({0: 1, 1: 0}, range(2)), find_first_failed({1: 0, 0: 1}, range(2))
    (1, 0)
    """
    times_blamed = Counter(rank for rank in blamed.values() if rank is not None)
    silent = [rank for rank in ranks if rank not in blamed]
    suspects = [rank for rank in silent if times_blamed[rank]]
    # A rank that saw only that something broke may mean any silent rank.
    if not suspects and None in blamed.values():
        suspects = silent
    # Without a silent suspect, one of the blamed ranks failed. Of equals the first: the first of the silent, or the one
    # that was blamed first.
    return max(suspects or times_blamed, key=times_blamed.__getitem__, default=None)


@dataclass(slots=True)
class FailureDetector:
    """The exchange of failure reports among a group's ranks, which finds out which rank failed first.

    `host` is the rank whose process serves the store, None if no rank of the group does, or
    UNTOLD. `key` names the group in the store, and `grace` is the most seconds for all of it.
    `reports` are those read so far, by rank; `answered` is whether the store ever answered.
    Ringing `bell` ends the thread that reads.
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

    def detect(self, own_report: Report, let_go: Callable[[], None]) -> tuple[int | None, Report]:
        """Exchange failure reports with the other ranks, and return (the rank that failed first, the report on it); the
        rank is None if no rank is known to have failed. `let_go` closes this rank's connections after it has
        reported."""
        deadline = time.monotonic() + self.grace
        reporting = self.report(own_report, let_go)
        reporting.join(max(0.0, deadline - time.monotonic()))
        return self._judge(own_report)

    def report(self, own_report: Report, let_go: Callable[[], None]) -> threading.Thread:
        """Start and return a thread that writes `own_report` to the store, and collects the other ranks' failure
        reports in this object. The call waits a short time for the write, and then calls `let_go` to close
        connections."""
        reported = threading.Event()
        reporting = threads.start(lambda: self._exchange_reports(own_report, reported))
        if self.store is not None:
            # Others can read a store that this process serves only while it runs.
            patience = self.grace if self.host == self.rank else 0.0
            reporter = _Reporter(reporting, self.bell, patience)
            _reporters.setdefault(self.store, []).append(reporter)
        # Others look for a report when a connection ends: it has to be written first.
        reported.wait(self.grace / 4)
        let_go()
        return reporting

    def _judge(self, own_report: Report) -> tuple[int | None, Report]:
        """The rank that failed first by the reports received, and the report that tells most about it."""
        reports = {**self.reports, self.rank: own_report}
        for report in reports.values():
            if report.is_goodbye:
                return None, report
        if self.answered:
            blamed = {rank: report.blames for rank, report in reports.items()}
            first_failed = find_first_failed(blamed, self.ranks)
        elif self.host is None or own_report.blames == self.rank:
            # Without the others' reports, only this rank's own is left.
            first_failed = own_report.blames
        else:
            # The silent host may have failed first, or only ended last.
            first_failed = None
        # The failed rank's own report tells most, then this rank's.
        of_failed = [reports[first_failed]] if first_failed in reports else []
        for report in (*of_failed, own_report, *reports.values()):
            if report.blames == first_failed:
                return first_failed, report
        return first_failed, own_report

    def _exchange_reports(self, own_report: Report, reported: threading.Event) -> None:
        """Write this rank's report, and read the others'. Runs in its own thread. Sets `reported` once the report is
        written, or cannot be written."""
        try:
            if self.store is not None:
                # A second connection: another thread may be waiting on the first, and lock it.
                store = apart_from(self.store)
                line = json.dumps([self.rank, asdict(own_report)])
                notes.add_line(store, self._key_of("failed"), line)
                reported.set()
                self._collect(store, own_report)
                self._wait_for_readers(store)
        except RuntimeError:
            # The store's host is gone; `answered` tells whether it ever answered.
            pass
        reported.set()

    def _key_of(self, topic: str) -> str:
        """The store's key for a note with one line per rank."""
        return f"shardmath/{self.key}/{topic}"

    def _collect(self, store: Store, own_report: Report) -> None:
        """Read reports until all that can be expected are there."""
        start = time.monotonic()
        # Early on, a silent rank may only be slow. But ranks report before they close connections:
        # if there is only one other rank, and its connection has ended, it is not going to report.
        is_gone = len(self.ranks) == 2 and says_ended(own_report.cause)
        earliest_end = start if is_gone else start + self.grace / 4
        # The last fifth of the grace is for `_wait_for_readers`.
        latest_end = start + self.grace * 0.8
        while time.monotonic() < latest_end and not self.bell.is_set():
            self._read_reports(store)
            self.answered = True
            if time.monotonic() >= earliest_end and self._has_enough():
                return
            self.bell.wait(LOOK_AGAIN_S)

    def _read_reports(self, store: Store) -> None:
        """Take the reports that the store has by now."""
        for line in notes.read_lines(store, self._key_of("failed")):
            rank, report = json.loads(line)
            self.reports.setdefault(rank, Report(**report))

    def _has_enough(self) -> bool:
        """Whether the reports suffice: a goodbye, or the reports of all ranks except at least one, which others blame.

        In a group of two ranks, the one without a report need not be blamed.
        """
        silent = {rank for rank in self.ranks if rank not in self.reports}
        blamed = {report.blames for report in self.reports.values()}
        is_clear = len(self.ranks) == 2 or silent <= blamed
        has_goodbye = any(report.is_goodbye for report in self.reports.values())
        return has_goodbye or (bool(silent) and is_clear)

    def _wait_for_readers(self, store: Store) -> None:
        """Note that this rank has read the reports; if it hosts the store, wait until all ranks that reported have."""
        notes.add_line(store, self._key_of("read"), str(self.rank))
        # The fifth of the grace that `_collect` leaves.
        deadline = time.monotonic() + self.grace / 5
        while self.host == self.rank and time.monotonic() < deadline:
            readers = notes.read_lines(store, self._key_of("read"))
            if set(map(str, self.reports)) <= set(readers):
                return
            time.sleep(LOOK_AGAIN_S)
