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
    """Extra work of a move, such as casts, before and after its transfers; this base class changes nothing."""

    @property
    def own(self) -> frozenset[str]:
        """The names of the plan's destination tensors that lie in the stage's memory, not in the caller's tensors.

        A move with `commit="all"` need not protect them from a failure.
        """
        return frozenset()

    def bind(self, src: Local, out: Local) -> tuple[Local, Local]:
        """Return the tensors that are sent and those that are received into, made from `src` and `out`. The first stage
        of a move gets the caller's tensors as `src` and `out`; each later stage gets the previous one's result.

        An exception counts as an objection in the vote.
        """
        return src, out

    def begin(self) -> None:
        """Do the stage's work before the first byte moves, once all ranks have agreed on the move."""

    def finish(self, arrived: Tensors) -> Iterable[Pair]:
        """Return pairs (tensor, values to write into it), with values that the stage computes from the `arrived`
        tensors.
        """
        return ()

    def unfold(self, arrived: Tensors) -> Tensors:
        """Return the received tensors `arrived` in the form that the stage before this one needs. After a move, stages
        process received tensors in reverse order, each using the result of the stage after it. The base class returns
        `arrived` unchanged."""
        return arrived

    def end(self) -> None:
        """Do the stage's work after the move, once its values are in place."""

    def let_go(self) -> None:
        """Drop references to the last move's tensors, and free extra memory, which the next move allocates again."""

    def name_torn(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Translate names of destination tensors that a failed move has left torn (partly overwritten). `keys` are
        names among the tensors that `bind` returned; the result has the matching names among the tensors that `bind`
        was given.
        """
        return keys


Stages = Sequence[Stage]


def bind(stages: Stages, src: Local, out: Local) -> tuple[Local, Local]:
    """Return the tensors to send and to receive into: the caller's `src` and `out`, mapped by each stage in order."""
    for stage in stages:
        src, out = stage.bind(src, out)
    return src, out


def begin(stages: Stages) -> None:
    """Run the work that all stages do before the first byte moves (`Stage.begin`)."""
    for stage in stages:
        stage.begin()


def finish(stages: Stages, arrived: Tensors) -> Iterable[Pair]:
    """Yield pairs (tensor, values to write into it), computed by `finish` of each stage, last stage first. `arrived`
    are the tensors that the move has received.

    The last stage gets the tensors `arrived`; each earlier one gets the result of `unfold` of the stage after it.
    Stages compute values one pair at a time, to save memory.
    """
    for stage in reversed(stages):
        yield from stage.finish(arrived)
        arrived = stage.unfold(arrived)


def end(stages: Stages) -> None:
    """Run the work that all stages do after all values are in place (`Stage.end`)."""
    for stage in stages:
        stage.end()


def list_own(stages: Stages) -> frozenset[str]:
    """Return the names of the plan's destinations that lie in a stage's private memory, not in the caller's tensors."""
    return frozenset(key for stage in stages for key in stage.own)


def name_torn(stages: Stages, keys: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the caller's destination tensors that a failed move has left torn (partly overwritten).
    `keys` are the plan's names of torn tensors; the `stages` translate them, the last one first.
    """
    for stage in reversed(stages):
        keys = stage.name_torn(keys)
    return keys
