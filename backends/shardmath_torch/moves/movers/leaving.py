"""Leaving: what is done to a mover between its moves. It lets go of tensors, and says goodbye when it is closed.

All of it waits for moves that go on, of other threads and beside, and is an error in the middle of one, as from a
progress callback.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, Self

from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.commits.landing import Landing
from shardmath_torch.moves.movers.bound import BoundTensors
from shardmath_torch.moves.movers.carriers import Carrier
from shardmath_torch.moves.movers.stages import Stages

__all__ = ["Leaves", "Leaving"]


class Leaves(ABC):
    """What is closed at the end of a `with` block, at the latest; where an error ends the block, the others hear it."""

    @property
    @abstractmethod
    def _name(self) -> str:
        """What ranks call it."""

    @abstractmethod
    def _part(self, why: str) -> None:
        """Close, and say why."""

    def close(self) -> None:
        """Say goodbye: this rank makes no more moves with this, and lets go of what it holds for them. Not collective.

        Calls of other ranks raise an ExchangeError that says that this one left, at once, also those that wait for it.
        The group stays whole here, and its other movers go on. If this process serves the group's store, it first
        waits at most 1 s for the others to hear; if not, as long for a store that does not answer, once. Closing twice
        does nothing. Raises ExchangeError in the middle of a move, and where what has moved waits for the end of a
        `smt.commit`.
        """
        self._part(f"it closed {self._name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        said = f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")
        self._part(f"its block of {self._name} ended by {said}")


class Leaving(Leaves):
    """What belongs to its process group on this rank, and moves there until it is closed."""

    _party: Party
    _landing: Landing
    _bound: BoundTensors
    _carrier: Carrier
    _stages: Stages
    _closed = False

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises ExchangeError: what copies would share, and not know of each other, is how tensors lie in memory."""
        what = "a mover belongs to its process group on this rank, and cannot be copied or pickled"
        raise ExchangeError(f"{what}; use this one, or compile the plan where another is needed")

    def _drop(self) -> None:
        """Keep nothing of tensors."""
        self._bound.let_go()
        self._carrier.let_go()
        for stage in self._stages:
            stage.let_go()

    def let_go(self, besides: Callable[[], None] = lambda: None) -> None:
        """Keep nothing of the tensors that were held, nor of memory beside: the next move makes its own.

        Not collective. What else is kept of them `besides` lets go. Raises ExchangeError in the middle of a move, and
        where what has moved waits for the end of a `smt.commit`.
        """
        with self._party.alone():
            self._landing.check_free(None)
            self._drop()
            besides()

    def _part(self, why: str, besides: Callable[[], None] = lambda: None) -> None:
        with self._party.alone():
            if self._closed:
                return
            self._landing.check_free(None)
            self._closed = True
            self._party.turns.part(self._party.key, why)
            self._drop()
            besides()

    def find_waiting(self) -> str:
        """Why nothing may be done to it where what has moved waits for the end of a `smt.commit`; else ""."""
        return self._landing.word_waiting(None)

    def check_open(self) -> None:
        """Raise ExchangeError for a mover that was closed."""
        if self._closed:
            raise ExchangeError(self._word_closed())

    def _word_closed(self) -> str:
        """Why a mover that was closed does nothing more; else ""."""
        return f"{self._name} was closed; compile another on all ranks" if self._closed else ""
