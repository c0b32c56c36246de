"""Stages: work at the two ends of a move, besides carrying bytes.

    bind      before ranks vote: map the given tensors to those that travel
    begin     once all ranks agree
    finish    once all bytes arrived here: compute the values to store
    end       once the values are in place

1. An error of `bind` is an objection: all ranks raise, and nothing has moved.
2. An error of `begin` or `finish` is this rank's failure; with `commit="all"`, an error of `finish` is an objection.
3. Each stage binds the result of the one before; they finish in reverse order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmath_torch.moves.commits.shadows import Pair
from shardmath_torch.moves.exchange.local import Local, Tensors

__all__ = ["Stage", "Stages", "begin", "bind", "end", "finish", "list_own", "name_torn"]


class Stage:
    """A stage that does nothing; subclasses override methods."""

    @property
    def own(self) -> frozenset[str]:
        """The plan's destinations in the stage's private memory, which need no shadows."""
        return frozenset()

    def bind(self, src: Local, out: Local) -> tuple[Local, Local]:
        """Map the given tensors to those that travel. An exception is an objection."""
        return src, out

    def begin(self) -> None:
        """Begin the move, on which all ranks agree."""

    def finish(self, arrived: Tensors) -> Iterable[Pair]:
        """The further values to store, computed from the arrived tensors by local buffer key."""
        return ()

    def unfold(self, arrived: Tensors) -> Tensors:
        """The arrived tensors for the stage before, with the values that this stage computed."""
        return arrived

    def end(self) -> None:
        """End the move, whose values are in place."""

    def let_go(self) -> None:
        """Drop the bound tensors, and memory for moves, until the next one."""

    def name_torn(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """The given destinations that are torn if these destinations of the plan are."""
        return keys


Stages = Sequence[Stage]


def bind(stages: Stages, src: Local, out: Local) -> tuple[Local, Local]:
    """Map the given tensors to those that travel, through all stages."""
    for stage in stages:
        src, out = stage.bind(src, out)
    return src, out


def begin(stages: Stages) -> None:
    """Begin all stages."""
    for stage in stages:
        stage.begin()


def finish(stages: Stages, arrived: Tensors) -> Iterable[Pair]:
    """The values of all stages to store, lazily, so that one at a time takes memory."""
    for stage in reversed(stages):
        yield from stage.finish(arrived)
        arrived = stage.unfold(arrived)


def end(stages: Stages) -> None:
    """End all stages."""
    for stage in stages:
        stage.end()


def list_own(stages: Stages) -> frozenset[str]:
    """The plan's destinations in stages' private memory."""
    return frozenset(key for stage in stages for key in stage.own)


def name_torn(stages: Stages, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Map the plan's torn destinations to the caller's, through all stages."""
    for stage in reversed(stages):
        keys = stage.name_torn(keys)
    return keys
