"""Leaving: operations on a mover between its moves, which drop its tensors or close it with a goodbye.

All operations wait for moves of other threads and in the background. In the middle of a move, as in a progress
callback, they raise ExchangeError.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Self

from shardmath.base.errors import ExchangeError
from shardmath.base.text import message_of
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.goodbyes import LINGER_S
from shardmath_torch.groups.agreement.party import Party
from shardmath_torch.moves.commits.landing import Landing
from shardmath_torch.moves.movers.bound import BoundTensors
from shardmath_torch.moves.movers.carriers import Carrier
from shardmath_torch.moves.movers.stages import Stages

__all__ = ["Leaves", "Leaving"]


class Leaves(ABC):
    """The base class of objects that all ranks of a group use together, each rank in a `with` block. It adds `close`,
    and reports an error in the block to the other ranks."""

    @property
    @abstractmethod
    def _name(self) -> str:
        """The object's name in claims and errors."""

    @abstractmethod
    def _part(self, why: str) -> None:
        """Close, and send the reason to the others."""

    @compat.untraced
    def close(self) -> None:
        """Close this object on this rank, report that to the other ranks, and release memory. Not collective.

        Calls of other ranks, waiting ones too, raise at once an ExchangeError that names this rank. The group stays
        whole here, and its other movers continue. If this process serves the group's store, it waits at most 1 s for
        the others to read the goodbye; otherwise it waits as long, once, for a store that does not answer. Closing
        twice does nothing. Raises ExchangeError in the middle of a move, and while moved bytes wait for the end of a
        `smt.commit`.
        """
        self._part(f"it closed {self._name}")

    def __enter__(self) -> Self:
        return self

    @compat.untraced
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        # The suffix is there if the error has no message.
        cause = f"{type(error).__name__}: {message_of(error)}".removesuffix(": ")
        self._part(f"its block of {self._name} ended by {cause}")


class Leaving(Leaves):
    """The base class of movers: `close` ends this rank's use of the process group, and `let_go` frees tensors and
    memory until the next move. Copying or pickling raises ExchangeError."""

    _party: Party
    _landing: Landing
    _bound: BoundTensors
    _carrier: Carrier
    _stages: Stages
    _closed = False

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises ExchangeError: copies would share bound tensors without knowing of each other."""
        what = f"{self._name} belongs to its process group, and cannot be copied or pickled"
        raise ExchangeError(f"{what}; use this one, or compile the plan where another is needed")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Make other calls on the mover's process group wait during the `with` block, even if another thread has given
        the mover another group while this one waited."""
        while True:
            party = self._party
            with party.alone():
                if self._party is party:
                    yield
                    return

    def _drop(self) -> None:
        """Drop all tensors."""
        self._bound.let_go()
        self._carrier.let_go()
        for stage in self._stages:
            stage.let_go()

    @compat.untraced
    def let_go(self, besides: Callable[[], None] = lambda: None) -> None:
        """Release the mover's tensors and extra memory, which the next move allocates again, and call `besides`, which
        drops the caller's other references. Not collective.

        After that a mover of changes objects to all calls until one with `whole=True`. Raises ExchangeError in the
        middle of a move, and while moved bytes wait for the end of a `smt.commit`.
        """
        with self._alone():
            self._landing.check_free(None)
            self._drop()
            besides()

    def _part(self, why: str, besides: Callable[[], None] = lambda: None) -> None:
        if compat.is_inherited(self._party.group):
            # A process that was forked in a `with` block of the mover leaves the block, not the group.
            return
        with self._alone():
            if self._closed:
                return
            self._landing.check_free(None)
            self._closed = True
            try:
                self._party.turns.part(self._party.key, why)
            finally:
                # Also after a Ctrl-C: to close again does nothing.
                self._drop()
                besides()

    def find_waiting(self) -> str:
        """Return an error text if the mover has moved in a `smt.commit` block that has not ended, so that the mover
        cannot be changed now; otherwise ""."""
        return self._landing.word_waiting(None)

    @property
    def left(self) -> tuple[int, ...]:
        """The other ranks that are known to have closed this mover or left its process group, ascending. After an
        error, a rank that only receives can stop if ranks that send to it are among them. Empty again after `replan`.

        Once the group is broken, waits for its store, at most 1 s."""
        turns = self._party.turns
        if turns.goodbyes is None:
            return ()
        if turns.broken:
            # The thread that reads goodbyes has ended.
            turns.goodbyes.look(LINGER_S)
        return turns.goodbyes.list_left(self._party.key)

    def check_open(self) -> None:
        """Raise ExchangeError if the mover was closed."""
        if self._closed:
            raise ExchangeError(self._word_closed())

    def _word_closed(self) -> str:
        """The error of a closed mover; "" if it is open."""
        return f"{self._name} was closed; compile another on all ranks" if self._closed else ""
