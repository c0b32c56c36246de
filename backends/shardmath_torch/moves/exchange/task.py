"""What an engine is told, and what a transport package gives.

A `Task` is a rank's part bound to a wire; an `Engine` is made for one and moves its bytes; a `Transport` opens the
wire that engines stand on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor

from shardmath.plans.programs.messages import Round
from shardmath.plans.programs.part import RankProgram
from shardmath_torch.groups import compat
from shardmath_torch.groups.agreement.transport import package_of
from shardmath_torch.groups.agreement.wire import Wire
from shardmath_torch.moves.observing.stopwatch import Stopwatch

__all__ = ["Engine", "Task", "Transport", "transport_of"]


@dataclass(frozen=True, slots=True)
class Task:
    """A rank's part, bound to a group and to the wire by which it reaches the others."""

    part: RankProgram
    group: compat.Group
    wire: Wire


class Engine(Protocol):
    """Moves the bytes of one plan; tensors come by local buffer key, have been checked, and all ranks agree."""

    @property
    def posted(self) -> Sequence[Round]:
        """The part's rounds, their messages as they are posted."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory held between moves."""

    @property
    def begun(self) -> int | None:
        """Steps of the part that have begun, in the latest move, and one more where all is done; None: not known."""

    def prepare(
        self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], held: bool = False
    ) -> None:
        """Makes room for moving tensors that lie in memory like these. No communication.

        `held` ones, passed as the same mappings, stay where they are from move to move.
        """

    def move(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], watch: Stopwatch) -> None:
        """Moves tensors that lie like those prepared for; each thing that it does is a lap. Raises PeerFailure."""

    def let_go(self) -> None:
        """Keeps nothing of tensors that were held; the next ones are prepared for."""

    def keep(self, task: Task, gone: Collection[int]) -> Engine:
        """One for the task, which is this one's without what goes to ranks that are gone, and the same tensors.

        No communication.
        """


class Transport(Protocol):
    """A transport package: how to open a group, and its engines by name."""

    @property
    def ENGINES(self) -> Mapping[str, Callable[[Task], Engine]]:
        """By the name that `compile` takes."""

    @property
    def open_wire(self) -> Callable[[compat.Group, float], Wire]:
        """The group as a wire on which waiting ends after so many seconds."""


def transport_of(group: compat.Group) -> Transport:
    """The package that serves the group. Raises ExchangeError if none does."""
    return cast(Transport, package_of(group))
