"""Task: the interfaces of engines and transport packages.

A `Task` is a rank's part bound to a wire; an `Engine` is made for one and moves its bytes; a `Transport` opens the
wire that engines use.
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
    """A rank's part of a plan, with the group and the wire to move it on."""

    part: RankProgram
    group: compat.Group
    wire: Wire


class Engine(Protocol):
    """Moves the bytes of one plan, once all ranks agree; tensors are checked, and passed by local buffer key."""

    @property
    def posted(self) -> Sequence[Round]:
        """The part's rounds, with messages as the engine posts them."""

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory held between moves."""

    @property
    def begun(self) -> int | None:
        """Number of the part's steps that the latest move began, plus one if all are done; None if not known."""

    def prepare(
        self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], held: bool = False
    ) -> None:
        """Make memory for moving tensors of these strides and device. Sends nothing.

        If `held`, the same mappings are passed to each move, with tensors at the same addresses.
        """

    def move(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], watch: Stopwatch) -> None:
        """Move tensors like those prepared for; each phase is a lap of the watch. Raises PeerFailure."""

    def let_go(self) -> None:
        """Drop the tensors that were held; call `prepare` before the next move."""

    def keep(self, task: Task, gone: Collection[int]) -> Engine:
        """An engine for the task, which is this engine's without sends to ranks that are gone. Sends nothing."""


class Transport(Protocol):
    """A transport package: a function that opens a group, and the engines by name."""

    @property
    def ENGINES(self) -> Mapping[str, Callable[[Task], Engine]]:
        """The engines by the name that `compile` takes."""

    @property
    def open_wire(self) -> Callable[[compat.Group, float], Wire]:
        """The function that makes a group's wire, given the patience of its waits in seconds."""


def transport_of(group: compat.Group) -> Transport:
    """The package that serves the group. Raises ExchangeError if none does."""
    return cast(Transport, package_of(group))
