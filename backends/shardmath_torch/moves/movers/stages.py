"""Stages: what a move does at its two ends, besides carrying bytes.

    bind      before ranks vote: of the tensors that were given, those that travel
    begin     once all have agreed
    finish    once all has arrived here: what is to be stored of it
    end       once that is in place

1. What `bind` raises is an objection: an error on all ranks, and nothing has moved.
2. What `begin` and `finish` raise is this rank's failure; that of `finish` is an objection, too, where destinations
   change on all ranks or on none.
3. Stages follow one another: each binds what the one before has bound, and they finish the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmath_torch.moves.commits.shadows import Pair
from shardmath_torch.moves.exchange.local import Local, Tensors

__all__ = ["Stage", "Stages", "begin", "bind", "end", "finish", "list_own", "name_torn"]


class Stage:
    """One that does nothing, of which others differ."""

    @property
    def own(self) -> frozenset[str]:
        """The plan's destinations that are memory of the stage's, which nobody sees: they are received into at once."""
        return frozenset()

    def bind(self, src: Local, out: Local) -> tuple[Local, Local]:
        """The tensors that travel of those given. What it raises speaks against the move."""
        return src, out

    def begin(self) -> None:
        """All have agreed."""

    def finish(self, arrived: Tensors) -> Iterable[Pair]:
        """What is to be stored besides, made of what has arrived, by local buffer key."""
        return ()

    def unfold(self, arrived: Tensors) -> Tensors:
        """What has arrived, as the stage before has it: with what this one has made of it."""
        return arrived

    def end(self) -> None:
        """All is in place."""

    def let_go(self) -> None:
        """Keep nothing of the tensors that were bound, nor what a move needs, until there is another."""

    def name_torn(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """The given destinations that a failure leaves torn, where it does so with these of the plan's."""
        return keys


Stages = Sequence[Stage]


def bind(stages: Stages, src: Local, out: Local) -> tuple[Local, Local]:
    """The tensors that travel after all stages."""
    for stage in stages:
        src, out = stage.bind(src, out)
    return src, out


def begin(stages: Stages) -> None:
    """All have agreed on the move."""
    for stage in stages:
        stage.begin()


def finish(stages: Stages, arrived: Tensors) -> Iterable[Pair]:
    """What all stages store, one by one, so that one at a time takes memory."""
    for stage in reversed(stages):
        yield from stage.finish(arrived)
        arrived = stage.unfold(arrived)


def end(stages: Stages) -> None:
    """The move is over, and in place."""
    for stage in stages:
        stage.end()


def list_own(stages: Stages) -> frozenset[str]:
    """The plan's destinations that are memory of some stage."""
    return frozenset(key for stage in stages for key in stage.own)


def name_torn(stages: Stages, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The destinations as the caller gave them."""
    for stage in reversed(stages):
        keys = stage.name_torn(keys)
    return keys
