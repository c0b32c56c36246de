"""Infos: what a trainer says of itself, and what it has vLLM tell its workers, as plain values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from shardmath.base.arguments import as_integer, known, listed, text
from shardmath.base.dtypes import canonical
from shardmath.base.errors import ExchangeError
from shardmath.base.text import show_ranks, shown
from shardmath_torch.groups.agreement.party import is_time, word_bad_time
from shardmath_torch.groups.joint.meeting import read_where
from shardmath_torch.groups.joint_group import BACKENDS

__all__ = ["BACKEND", "Joining", "TrainerInfo", "Updating"]

BACKEND = "shardmath"
TIMEOUT_S = 300.0

SAME_RUN = "none"
"""The id of every run for which torchrun neither draws nor is given one (`--rdzv-id`), as of several nodes."""


@dataclass(frozen=True)
class TrainerInfo:
    """The settings with which one rank of a trainer connects to its engines; passed to `Trainer.trainer_init`.

    `rank` is this process of `trainers`, and `workers` how many each engine has, in the order of its clients.
    `address`, "host:port", is where rank 0 serves a store that all reach. `timeout` is in seconds and ends every wait
    for a rank; `max_inflight_bytes` bounds the bytes of a layer in flight, as in `smt.compile` (None: 1 GiB). Engines
    get parameters of type `dtype`, by default the trainer's own. `own` are globs of an engine's tensors that the
    trainer does not have, besides vLLM's own tensors. `run`, a text for this start of the trainer that is equal on all
    ranks, keeps out ranks that an earlier start has left; by default torchrun's id of the run, if torchrun drew one; ""
    keeps nobody out. Raises ValueError for other values, LayoutError for an unknown `dtype`.
    """

    backend: ClassVar[str] = BACKEND

    address: str
    trainers: int
    workers: int | Sequence[int]
    dtype: str | None = None
    own: tuple[str, ...] = ()
    timeout: float = TIMEOUT_S
    max_inflight_bytes: int | None = None
    transport: str = "gloo"
    run: str | None = None
    rank: int = field(kw_only=True)

    def __post_init__(self) -> None:
        # A frozen dataclass has no assignment.
        set_field = partial(object.__setattr__, self)
        set_field("address", _read_address(self.address))
        for name in ("trainers", "rank"):
            set_field(name, as_integer(getattr(self, name), name, ValueError))
        if not 0 <= self.rank < self.trainers:
            ranks = f"rank={self.rank} is not the rank of one of trainers={self.trainers}"
            raise ValueError(f"{ranks}; pass a rank from 0 to trainers - 1")
        set_field("workers", _read_workers(self.workers))
        if self.dtype is not None:
            # In the spelling of vLLM, which all ranks then share.
            set_field("dtype", canonical(self.dtype))
        # A text is rejected: its letters would be taken for globs, and "*" for one of everything.
        globs = listed(self.own, "globs in own", ValueError)
        set_field("own", tuple(text(glob, "a glob in own", ValueError) for glob in globs))
        if not is_time(self.timeout):
            raise ValueError(word_bad_time(self.timeout))
        # JSON has no numbers of numpy.
        set_field("timeout", float(self.timeout))
        set_field("max_inflight_bytes", _read_limit(self.max_inflight_bytes))
        transport = known(self.transport, tuple(BACKENDS))
        if transport is None:
            ways = " or ".join(map(repr, BACKENDS))
            raise ValueError(f"transport={shown(self.transport)} is unknown; pass {ways}")
        set_field("transport", transport)
        run = _find_run() if self.run is None else text(self.run, "run", ValueError)
        set_field("run", run)

    @property
    def engines(self) -> tuple[int, ...]:
        """The number of workers of each engine, as a tuple in the order of the engines' clients."""
        return (self.workers,) if isinstance(self.workers, int) else tuple(self.workers)

    @property
    def size(self) -> int:
        """The number of ranks in the group: the trainer's ranks, and the workers of all engines."""
        return self.trainers + sum(self.engines)

    @property
    def is_sender(self) -> bool:
        """Whether this rank is the one rank of the trainer that calls the engines."""
        return self.rank == 0

    def word_ranks(self) -> str:
        """Words for which ranks of the group are workers, to explain why connecting failed."""
        return _word_workers(range(self.trainers, self.size))

    def tell(self, engine: int, meeting: str) -> dict[str, Any]:
        """Return the message that tells the workers of engine `engine` how to connect to the trainer. `meeting` is the
        name that the trainer and all workers give in order to find each other.
        """
        first = self.trainers + sum(self.engines[:engine])
        joining = Joining(
            address=self.address,
            meeting=meeting,
            engine=engine,
            first=first,
            workers=self.engines[engine],
            size=self.size,
            own=list(self.own),
            timeout=self.timeout,
            max_inflight_bytes=self.max_inflight_bytes,
            transport=self.transport,
        )
        return dict(vars(joining))


def _word_workers(ranks: range) -> str:
    """Words for the ranks that workers have, and what to do if engines have fewer."""
    what = f"by TrainerInfo's workers=, {show_ranks([ranks])} of the group are workers of engines"
    return f"{what}; if there are fewer (TP times PP times DP for each engine), pass their number"


def _read_address(given: object) -> str:
    """The given address as text. Raises ValueError unless it is "host:port"."""
    try:
        address = text(given, "address", ValueError)
        read_where(address)
    except (ValueError, ExchangeError):
        address = ""
    if not address or "//" in address:
        raise ValueError(
            f"address={shown(given)} is not 'host:port'; pass text such as '10.0.0.1:29600'"
        )
    return address


def _read_workers(given: object) -> int | tuple[int, ...]:
    """The number of workers of each engine, as an int for one engine. Raises ValueError for other values."""
    is_one = not isinstance(given, Iterable)
    counts = []
    # Not those: engines have an order, and the values of a mapping would be lost.
    is_unordered = isinstance(given, Mapping | Set)
    for each in [given] if is_one else listed(given, "workers", ValueError):
        counts.append(as_integer(each, "the number of an engine's workers", ValueError))
    if is_unordered or not counts or min(counts) < 1:
        raise ValueError(
            f"workers={shown(given)} is not a number of workers, 1 or more, per engine; pass an int "
            f"for one engine, or a list with an int for each"
        )
    return counts[0] if is_one else tuple(counts)


def _read_limit(given: object) -> int | None:
    """A number of bytes, or None for the default. Raises ValueError for anything else."""
    if given is None:
        return None
    limit = as_integer(given, "max_inflight_bytes", ValueError)
    if not 0 < limit < 1 << 63:
        raise ValueError(
            f"max_inflight_bytes={limit} is not a positive number of bytes; pass an integer from 1 "
            f"on, or leave it out for the default of smt.compile, 1 GiB"
        )
    return limit


def _find_run() -> str:
    """torchrun's id of the run that this process belongs to; "" without torchrun, or if all runs have the same id."""
    # Not with TORCHELASTIC_RESTART_COUNT, which each node counts for itself. Nor is it needed: torchrun ends the
    # processes of a node before it starts them again.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if run == SAME_RUN else run


@dataclass
class Joining:
    """The message that tells an engine's worker to connect to its trainer.

    Worker `i` of the engine has place `first + i` of `size`.
    `meeting` is a text that no other meeting has: the worker takes updates of this one from then on.
    """

    address: str
    meeting: str
    engine: int
    first: int
    workers: int
    size: int
    own: list[str]
    timeout: float
    max_inflight_bytes: int | None
    transport: str

    def word_ranks(self) -> str:
        """Words for which ranks of the group are workers of this engine, to explain why connecting failed."""
        return _word_workers(range(self.first, self.first + self.workers))


@dataclass
class Updating:
    """The message that tells a worker to receive an update of the weights. `meeting` is the name of the connection to
    the trainer, and `number` counts its updates from 1.
    """

    number: int
    meeting: str = ""
