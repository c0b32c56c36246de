"""Meeting: trainers and workers of engines join in one group, exchange descriptions, and plan the same.

1. The group is made for this purpose: trainers and engines are separate jobs, with ranks from 0. Places in the group
   are the trainer's ranks first, then the workers of each engine.
2. Trainers send how they store their tensors, and workers send how their loader stores these. Each rank plans for
   itself; compiling checks that all plans are the same.
3. An error on one rank is an error on all, and names the rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch.distributed as dist

import shardmath as sm
import shardmath_torch as smt
from shardmath.base.errors import ExchangeError, StoreError
from shardmath.base.text import message_of
from shardmath.models.storage.stored import Shapes
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.gather import gather
from shardmath_torch.groups.joint.connect import call_off
from shardmath_vllm.infos import TrainerInfo
from shardmath_vllm.link import Link, together
from shardmath_vllm.source import Told

__all__ = ["Given", "Meeting", "among_trainers", "serve_store"]

TRAINERS = "trainers"
"""The name of their group, which may be used again: ranks of two groups never meet."""


@dataclass(frozen=True)
class Given:
    """The facts that a rank brings to a connection. A trainer's rank sets `told`, a description of the trainer's
    tensors. A worker sets `engine`, its engine's number, and `record`, a function that takes this description and
    returns where the worker stores the tensors.

    `is_joint` if ranks of the engine process together what has arrived, as vLLM quantizes divided tensors.
    """

    told: Told | None = None
    engine: int = 0
    record: Callable[[Told], sm.storage.Recorded] | None = None
    is_joint: bool = False


def serve_store(host: str) -> str:
    """Serve a key-value store at a free port of `host` until this process ends, and return its address, for
    `TrainerInfo(address=)`. Further calls return the same address.
    """
    return f"{host}:{_serve(host).port}"


@cache
def _serve(host: str) -> compat.TCPStore:
    """A store that this process serves at a free port of `host`; the cache keeps it."""
    return compat.TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)


class Where(Protocol):
    """The settings for connecting, equal on all ranks that connect: the `address` of the store, the number of ranks
    (`size`), and the `timeout` for waiting on other ranks. For later moves, `transport` is the backend, and
    `max_inflight_bytes` the limit of bytes in flight.
    """

    @property
    def address(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def timeout(self) -> float: ...

    @property
    def max_inflight_bytes(self) -> int | None: ...

    @property
    def transport(self) -> str: ...

    def word_ranks(self) -> str: ...


@contextmanager
def among_trainers(info: TrainerInfo) -> Iterator[dist.ProcessGroup | None]:
    """Connect the trainer's ranks in a process group for the `with` block, and yield it; yield None if the trainer has
    one rank.

    Collective. Raises ExchangeError if a rank does not connect, as one of another run, and on all ranks if their
    settings differ.
    """
    if info.trainers == 1:
        yield None
        return
    try:
        group = smt.connect(
            info.address,
            info.rank,
            info.trainers,
            timeout=info.timeout,
            name=TRAINERS,
            run=info.run or "",
        )
    except ExchangeError as error:
        if not info.run:
            raise
        # The rank that waits does not see that another one came with another id, and was kept out.
        fix = "if several launches start the ranks, pass the same TrainerInfo(run=) in all of them"
        raise ExchangeError(
            f"{message_of(error)}\nthis rank is of run {info.run!r}: {fix}"
        ) from error
    try:
        _check_alike(gather(info, group, "say what trainers are told"))
        yield group
    finally:
        smt.disconnect(group)


ALIKE = ("workers", "dtype", "own", "timeout", "max_inflight_bytes", "transport")
"""The settings that must be equal on all ranks of a trainer. Each may reach rank 0 under another address."""


def _check_alike(infos: list[TrainerInfo]) -> None:
    """Raise ExchangeError if two ranks of the trainer have different settings."""
    for info in infos[1:]:
        for name in ALIKE:
            first, other = getattr(infos[0], name), getattr(info, name)
            if first != other:
                raise ExchangeError(
                    f"rank 0 has {name}={first!r} in its TrainerInfo, but rank {info.rank} has {name}={other!r}; "
                    f"pass the same {name}= on all ranks"
                )


class Meeting:
    """The procedure that connects this rank to all trainer and engine ranks that connect under the same `name`."""

    def __init__(self, where: Where, name: str, place: int) -> None:
        self._where = where
        self._name = name
        self._place = place
        self._group: dist.ProcessGroup | None = None
        self._is_called_off = False

    def join(self, given: Given) -> Link:
        """Connect to all other ranks, plan the moves with them, and return the connection as a Link. `given` is this
        rank's share of the facts: a description of the trainer's tensors, or where a worker's loader stores them.

        Raises ExchangeError on all ranks where one does not come, or fails.
        """
        where = self._where
        try:
            self._group = group = smt.connect(
                where.address,
                self._place,
                where.size,
                backend=where.transport,
                timeout=where.timeout,
                name=self._name,
            )
        except ExchangeError as error:
            if self._is_called_off:
                raise
            raise ExchangeError(f"{message_of(error)}\n{where.word_ranks()}") from error
        try:
            return _plan_together(group, where, given)
        except BaseException:
            smt.disconnect(group)
            raise

    def call_off(self, why: str) -> None:
        """Make `join`, running in another thread, raise the error `why` on all ranks, unless all have connected."""
        # Once all have connected, each notices if another fails.
        if self._group is None:
            self._is_called_off = True
            where = self._where
            call_off(where.address, self._place, why, name=self._name, timeout=where.timeout)


def _plan_together(group: dist.ProcessGroup, where: Where, given: Given) -> Link:
    """Exchange descriptions with all ranks of the group, plan the refit, and return this rank's Link. Collective."""
    by_place = gather(given.told, group, "say what trainers hold")
    told = _find_told(by_place)
    trainers = sum(entry is not None for entry in by_place)
    recorded = together(group, "record its loader", lambda: _record(given, told), trainers)
    text = None if recorded is None else recorded.to_json()
    stores = gather((given.engine, text, given.is_joint), group, "say what engines store")
    texts = [(engine, text) for engine, text, _ in stores]
    planned = together(group, "plan", lambda: _plan(told, texts), trainers)
    settings: dict[str, Any] = {
        "timeout": where.timeout,
        "max_inflight_bytes": where.max_inflight_bytes,
        # Ranks vote as they prepare each portion, so that moves need no further vote.
        "agree": "once",
    }
    refits = [smt.Refit(portion, group=group, **settings) for portion in sm.divide(planned)]
    return Link(
        group,
        group.rank(),
        planned,
        tuple(refits),
        recorded,
        trainers,
        where.timeout,
        acknowledges=any(is_joint for _, _, is_joint in stores),
    )


TOLD = {
    "shapes": "shapes or dtypes",
    "served": "dtypes for the engines",
    "checkpoint": "conversions to tensors of the checkpoint",
    "side": "layouts",
}
"""The words for the facts that must be equal on all trainer ranks, by field of Told."""


def _find_told(by_place: list[Told | None]) -> Told:
    """The description that all trainer ranks share. Raises ExchangeError, on all ranks, if two ranks differ."""
    first, *others = [entry for entry in by_place if entry is not None]
    for place, other in enumerate(others, 1):
        for field, noun in TOLD.items():
            if getattr(first, field) != getattr(other, field):
                difference = _show_difference(first, other, field)
                raise ExchangeError(
                    f"trainer ranks 0 and {place} have different {noun}{difference}; pass the same model and "
                    f"dtype, or a source with the same metadata, to trainer_init on all of them"
                )
    return first


def _show_difference(one: Told, two: Told, what: str) -> str:
    """The first tensor of which two trainer ranks differ, and both values, for messages; "" if it is not one tensor."""
    first_values, other_values = getattr(one, what), getattr(two, what)
    if isinstance(first_values, Mapping) and isinstance(other_values, Mapping):
        for name in [*first_values, *other_values]:
            first, other = first_values.get(name), other_values.get(name)
            if first != other:
                # Two layouts on different ranks may have the same str; repr has the ranks.
                show = repr if str(first) == str(other) else str
                return f" of {name!r}, {show(first)} and {show(other)}"
    return ""


def _record(given: Given, told: Told) -> sm.storage.Recorded | None:
    """The recording of this rank's loader if it is a worker; None on a trainer's rank."""
    if given.record is None:
        return None
    return given.record(told)


def _plan(told: Told, texts: list[tuple[int, str | None]]) -> sm.Refit:
    """The refit to all engines, proved."""
    engines: dict[str, dict[int, sm.storage.Recorded]] = {}
    for place, (engine, text) in enumerate(texts):
        if text is not None:
            recorded = engines.setdefault(f"engine {engine}", {})
            recorded[place] = sm.storage.Recorded.from_json(text)
    sides = {name: sm.storage.RecordedSide(ranks) for name, ranks in engines.items()}
    _check_loaded(sides, told.served)
    rules = told.rules or None
    # Without rules, weights are sent as they are, so engines hold the trainer's shapes and dtypes.
    served = told.served if rules else None
    planned = sm.refit(told.side, sides, told.shapes, served=served, rules=rules)
    sm.verify(planned.plan)
    return planned


SHOWN = 5
"""The most tensors of an engine that a message names."""


def _check_loaded(engines: Mapping[str, sm.storage.RecordedSide], sent: Shapes) -> None:
    """Raise StoreError for tensors in `sent` of which an engine's loader stores nothing on any of its ranks: it skips
    what its model does not use, such as the head of a model that has tied it.
    """
    faults = []
    for engine, side in engines.items():
        loaded: set[str] = set()
        for recorded in side.ranks.values():
            for native in recorded.natives:
                loaded.update(piece.tensor for piece in native.pieces)
        skipped = [name for name in sent if name not in loaded]
        if skipped:
            more = f" and {len(skipped) - SHOWN} more" if len(skipped) > SHOWN else ""
            listed = ", ".join(map(repr, skipped[:SHOWN]))
            faults.append(f"{engine}: vLLM's loader skips {listed}{more}")
    if faults:
        listed = "\n".join(faults)
        raise StoreError(
            f"{listed}\nif the trainer's model is not the engine's, start both from one checkpoint; otherwise pass a "
            f"Source whose tensors= and shapes= leave these out"
        )
