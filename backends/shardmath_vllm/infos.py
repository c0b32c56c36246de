"""Infos: what a trainer says of itself, and what it has vLLM tell its workers, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardmath.base.dtypes import canonical
from shardmath_torch.agreement.party import is_time, word_bad_time

__all__ = ["BACKEND", "Joining", "TrainerInfo", "Updating"]

BACKEND = "shardmath"
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class TrainerInfo:
    """What one rank of a trainer brings to `Trainer.trainer_init`.

    `rank` is this process of `trainers`, and `workers` how many each engine has, in the order of its clients.
    `address`, "host:port", is where rank 0 serves a store that all reach. `timeout` is in seconds and ends every wait
    for a rank; `max_inflight_bytes` bounds what is under way of a layer, as in `smt.compile`. Engines get parameters as
    numbers of type `dtype`, by default the trainer's own. `own` are globs of an engine's tensors that the trainer has
    not, beside those that are vLLM's. Raises ValueError for what is none of these, LayoutError for an unknown `dtype`.
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
    rank: int = field(kw_only=True)

    def __post_init__(self) -> None:
        for name in ("rank", "trainers"):
            given: object = getattr(self, name)
            if not isinstance(given, int):
                raise ValueError(f"{name}={given!r} is no int; give int({given!r})")
        _check_address(self.address)
        if not is_time(self.timeout):
            raise ValueError(word_bad_time(self.timeout))
        if self.dtype is not None:
            # By the one name that all ranks give it, and that vLLM has.
            object.__setattr__(self, "dtype", canonical(self.dtype))
        if not 0 <= self.rank < self.trainers:
            raise ValueError(f"rank {self.rank} of {self.trainers} trainers; give one of them")
        own: object = self.own
        if isinstance(own, str):
            # Its letters would be globs, and "*" one of everything.
            raise ValueError(f"own={own!r} is a text; give a tuple of globs, ({own!r},)")
        workers: object = self.workers
        if isinstance(workers, str) or not self.engines or min(self.engines) < 1:
            raise ValueError(f"workers={self.workers}; give how many each engine has, 1 or more")

    @property
    def engines(self) -> tuple[int, ...]:
        """How many workers each engine has."""
        return (self.workers,) if isinstance(self.workers, int) else tuple(self.workers)

    @property
    def size(self) -> int:
        """All ranks of the group: trainers first, then the workers of each engine."""
        return self.trainers + sum(self.engines)

    @property
    def is_sender(self) -> bool:
        """Whether this rank speaks to the engines."""
        return self.rank == 0

    def tell(self, engine: int, meeting: str, trainer: str = "") -> dict[str, Any]:
        """What the workers of an engine are told, so that they join; `trainer` tells this one from others."""
        first = self.trainers + sum(self.engines[:engine])
        told = Joining(
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
            trainer=trainer,
        )
        return dict(vars(told))


def _check_address(address: object) -> None:
    """Raise ValueError for what is not "host:port"."""
    host, _, port = str(address).rpartition(":")
    if not isinstance(address, str) or "//" in address or not host or not port.isdigit():
        raise ValueError(
            f"address={address!r} is not 'host:port'; give one, such as '10.0.0.1:29600'"
        )


@dataclass
class Joining:
    """What a worker is told. Worker `i` of the engine has place `first + i` of `size`.

    `trainer` is a text that no other meeting has: whose updates the worker takes from then on.
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
    trainer: str = ""


@dataclass
class Updating:
    """What a worker is told of an update: its number, from 1 on, since the ranks met, and whose it is."""

    number: int
    trainer: str = ""
