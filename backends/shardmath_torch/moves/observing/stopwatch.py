"""Stopwatch: the timing of one call.

with ledger.time(label, progress) as watch:
    ...
    watch.lap(PREPARED)         # the time since the previous lap was preparing
    ...
    watch.lap(AGREED)

1. A lap costs a fifth of a microsecond, so seconds by phase and peer are always available (`Ledger.last`). Times of
   single messages are noted only inside of `trace`.
2. Every call is logged and traced, however it ends. `last` is the latest successful one.
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
"""Called with a lap that ended, its subject, and the time."""


class Ledger:
    """A record of one mover on this rank: what all of its calls share (its name, plan and messages), and the latest
    successful call.

    `given` is the plan or program that each call carries out, None for a call within another; `list_rounds` returns
    the rounds that its engine posts. Calls are `logged`.
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
        self._last_call: Stopwatch | None = None

    @property
    def traffic(self) -> Traffic:
        """The messages and bytes that this rank sends to each other rank, receives from each, and copies locally in a
        move of all elements.
        """
        if self._traffic is None:
            self._traffic = count_traffic(self._list_rounds())
        return self._traffic

    @property
    def last(self) -> Moved | None:
        """The report of the latest successful call; None if there is none."""
        return None if self._last_call is None else self._last_call.sum_up()

    def time(self, label: object, progress: object) -> Stopwatch:
        """Return a running Stopwatch for a new call. `label` is a text for reports (ignored if not a str), and
        `progress` a function to call with the bytes done and all bytes (ignored if not callable)."""
        return Stopwatch(self, label, progress)

    def note_last(self, call: Stopwatch) -> None:
        """Record `call` as the latest successful one."""
        self._last_call = call


class Stopwatch:
    """A context manager around one call that times each of its phases; `name` is the call's name, if it has one."""

    # Defaults for most calls are in the class, since setting them per call takes as long as a lap.
    name = ""
    _hearers: tuple[Hear, ...] = ()
    _meter: Meter | None = None
    _traced_call: Timed | None = None
    # The call's traffic if it differs from the ledger's.
    _call_traffic: Traffic | None = None

    def __init__(self, ledger: Ledger, label: object, progress: object) -> None:
        self._ledger = ledger
        # Not `str(label)`, which a subclass may override.
        self._label = str.__str__(label) if isinstance(label, str) else ""
        self._lap_seconds = [0.0] * LAPS
        # Seconds of waiting for messages, by peer.
        self._waited_s: dict[int, float] = {}
        self._call_began_s = self._lap_began_s = perf_counter()
        if callable(progress):
            self._add_meter(progress)
        tracer = find_tracer()
        if tracer is not None:
            self._add_trace(tracer)

    def _add_meter(self, progress: Progress) -> None:
        self._meter = Meter(progress, self._ledger.traffic.nbytes)
        self._hearers += (self._meter.hear,)

    def _add_trace(self, tracer: Tracer) -> None:
        timed = tracer.begin(self._ledger.given, self._ledger.rank, self._call_began_s)
        if timed is None:
            return
        marks = timed.marks

        def note(lap: int, about: object, at_s: float) -> None:
            marks.append(Mark(lap, about, at_s))

        self._traced_call = timed
        self._hearers += (note,)

    def lap(self, lap: int, about: object = None) -> None:
        """Count the seconds since the last phase ended as time of phase number `lap`, which ends now; `about` is its
        subject, such as a message.
        """
        now = perf_counter()
        self._lap_seconds[lap] += now - self._lap_began_s
        self._lap_began_s = now
        for hear in self._hearers:
            hear(lap, about, now)

    def waited(self, lap: int, message: Message, peer: int) -> None:
        """End phase number `lap` now, and add its seconds to the time that this rank has waited for rank `peer` to send
        or receive `message`.
        """
        before = self._lap_began_s
        self.lap(lap, message)
        self._waited_s[peer] = self._waited_s.get(peer, 0.0) + self._lap_began_s - before

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
        if self._traced_call is not None:
            self._end_trace(self._traced_call, error)
        if self._ledger.logged:
            log_move(self._ledger.rank, self.sum_up, error)
        meter = self._meter
        # The ledger keeps this object until the next call, so it must not hold the trace or the caller's function.
        self._hearers = ()
        self._traced_call = self._meter = None
        if meter is not None and error is None:
            meter.finish()

    def _end_trace(self, timed: Timed, error: BaseException | None) -> None:
        """Name and describe the call in the trace."""
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
        """The messages and bytes of the call by peer, as passed to `say_traffic`. If that was not called, they are
        computed from the plan, for a move of all elements.
        """
        return self._ledger.traffic if self._call_traffic is None else self._call_traffic

    def say_traffic(self, traffic: Traffic) -> None:
        """Set the messages and bytes of the call to `traffic`; without this, they are as for a move of all elements."""
        self._call_traffic = traffic
        if self._meter is not None:
            self._meter.expect(traffic.nbytes)

    @property
    def _title(self) -> str:
        return self.name or self._ledger.name

    def sum_up(self) -> Moved:
        """Return the report of the move that is being timed: messages and bytes exchanged with each other rank, seconds
        of each phase, and seconds that this rank waited for each other rank.
        """
        seconds: dict[str, float] = {}
        for name, took in zip(NAMES, self._lap_seconds, strict=True):
            if took:
                seconds[name] = seconds.get(name, 0.0) + took
        return Moved(self._title, self._label, self.traffic, seconds, dict(self._waited_s))
