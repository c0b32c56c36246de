"""Stopwatch: one call, timed.

with ledger.time(label, progress) as watch:
    ...
    watch.lap(PREPARED)         # all that was done since the lap before was preparing
    ...
    watch.lap(AGREED)

1. A lap costs a fifth of a microsecond, so that seconds by phase and peer are always there (`Ledger.last`). Each
   message's times are noted only inside `trace`.
2. However the call ends, it is logged, and shown in the trace. `last` is of the latest that ended well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from types import TracebackType
from typing import TypeAlias

from shardmath.base.text import word_error
from shardmath.plans.programs.messages import Message, Round
from shardmath_torch.moves.observing.bars import Meter, Progress
from shardmath_torch.moves.observing.laps import FAILED, LAPS, NAMES
from shardmath_torch.moves.observing.logs import log_move
from shardmath_torch.moves.observing.moved import Moved
from shardmath_torch.moves.observing.spelling import Mark, Timed
from shardmath_torch.moves.observing.tracers import Given, Tracer, find_tracer
from shardmath_torch.moves.observing.traffic import Traffic, add_up, count_traffic

__all__ = ["Ledger", "Stopwatch"]

Hear: TypeAlias = Callable[[int, object, float], None]
"""Called with a lap that ended, what it is of, and when."""


class Ledger:
    """What the calls of one mover on this rank have in common, and the latest of them.

    `given` is what each call carries out, None for what is a part of it; `list_rounds` gives what its engine posts.
    Moves are `logged`.
    """

    def __init__(
        self,
        name: str,
        given: Given | None,
        rank: int,
        list_rounds: Callable[[], Sequence[Round]] = tuple,
        *,
        logged: bool = True,
    ) -> None:
        self.name = name
        self.given = given
        self.rank = rank
        self.logged = logged
        self._list_rounds = list_rounds
        self._traffic: Traffic | None = None
        self._last: Stopwatch | None = None

    @property
    def traffic(self) -> Traffic:
        """What each call sends and receives."""
        if self._traffic is None:
            self._traffic = count_traffic(self._list_rounds())
        return self._traffic

    @property
    def last(self) -> Moved | None:
        """The latest call that ended well; None where none has."""
        return None if self._last is None else self._last.sum_up()

    def time(self, label: object, progress: object) -> Stopwatch:
        """A call that now begins. What is wrong with its arguments is found elsewhere."""
        return Stopwatch(self, label, progress)

    def note_last(self, call: Stopwatch) -> None:
        """The call has ended well."""
        self._last = call


class Stopwatch:
    """One call: entered as it begins, and left as it ends; `name` says which it is."""

    # What most calls are without stands here, since setting it in each takes as long as a lap.
    name = ""
    _hearers: tuple[Hear, ...] = ()
    _meter: Meter | None = None
    _timed: Timed | None = None
    _own: Traffic | None = None

    def __init__(self, ledger: Ledger, label: object, progress: object) -> None:
        self._ledger = ledger
        # A subclass may say anything of itself.
        self._label = str.__str__(label) if isinstance(label, str) else ""
        self._seconds = [0.0] * LAPS
        self._waited: dict[int, float] = {}
        self._began = self._at = perf_counter()
        if callable(progress):
            self._add_meter(progress)
        tracer = find_tracer()
        if tracer is not None:
            self._add_trace(tracer)

    def _add_meter(self, progress: Progress) -> None:
        self._meter = Meter(progress, self._ledger.traffic.nbytes)
        self._hearers += (self._meter.hear,)

    def _add_trace(self, tracer: Tracer) -> None:
        timed = tracer.begin(self._ledger.given, self._ledger.rank, self._began)
        if timed is None:
            return
        marks = timed.marks

        def note(lap: int, about: object, at_s: float) -> None:
            marks.append(Mark(lap, about, at_s))

        self._timed = timed
        self._hearers += (note,)

    def lap(self, lap: int, about: object = None) -> None:
        """A lap ends, of a message, of the round of a step, or of a vote by its key."""
        now = perf_counter()
        self._seconds[lap] += now - self._at
        self._at = now
        for hear in self._hearers:
            hear(lap, about, now)

    def waited(self, lap: int, message: Message, peer: int) -> None:
        """A lap ends that was waiting for the peer."""
        before = self._at
        self.lap(lap, message)
        self._waited[peer] = self._waited.get(peer, 0.0) + self._at - before

    def __enter__(self) -> Stopwatch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.lap(FAILED)
        else:
            self._ledger.note_last(self)
        if self._timed is not None:
            self._end_trace(self._timed, error)
        if self._ledger.logged:
            log_move(self._ledger.rank, self.sum_up, error)
        meter = self._meter
        # The ledger keeps this until the next call, and nothing of a trace or of the caller's with it.
        self._hearers = ()
        self._timed = self._meter = None
        if meter is not None and error is None:
            meter.finish()

    def _end_trace(self, timed: Timed, error: BaseException | None) -> None:
        """Say in the trace what the call was."""
        timed.name = self._title
        sent = add_up(self.traffic.sent)
        received = add_up(self.traffic.received)
        timed.about = {
            "label": self._label,
            "sent bytes": sent.nbytes,
            "sent messages": sent.messages,
            "received bytes": received.nbytes,
            "received messages": received.messages,
        }
        if error is not None:
            timed.about["failed"] = word_error(error)
        tracer = find_tracer()
        if tracer is not None:
            tracer.end(timed)

    @property
    def traffic(self) -> Traffic:
        """What it sends and receives: what its mover does in every call, where nothing else was said."""
        return self._ledger.traffic if self._own is None else self._own

    def say_traffic(self, traffic: Traffic) -> None:
        """What it sends and receives is this."""
        self._own = traffic
        if self._meter is not None:
            self._meter.expect(traffic.nbytes)

    @property
    def _title(self) -> str:
        return self.name or self._ledger.name

    def sum_up(self) -> Moved:
        """What it did."""
        seconds: dict[str, float] = {}
        for name, took in zip(NAMES, self._seconds, strict=True):
            if took:
                seconds[name] = seconds.get(name, 0.0) + took
        return Moved(self._title, self._label, self.traffic, seconds, dict(self._waited))
