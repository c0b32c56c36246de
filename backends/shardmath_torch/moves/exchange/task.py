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
    """The work of one rank in a plan, with the process group and the connections (`wire`) over which messages are
    sent."""

    part: RankProgram
    group: compat.Group
    wire: Wire


class Engine(Protocol):
    """The interface of engines, which move the bytes of one plan between ranks; tensors are passed by name."""

    @property
    def posted(self) -> Sequence[Round]:
        """The rounds of messages that this rank actually sends and receives. They differ from the plan's rounds if the
        engine sends each large slice as a separate message."""

    @property
    def staging_bytes(self) -> int:
        """The bytes of staging memory that the engine holds between moves."""

    @property
    def begun(self) -> int | None:
        """Return how many steps of its latest move this rank has begun, or None if unknown; after the move, the number
        of all steps plus 1. A step is a round of messages, or the work on reductions before or after all rounds.

        Step 1 sets initial values for reductions, each later step is one round of messages, and the last divides sums
        for averages.
        """

    def prepare(
        self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], held: bool = False
    ) -> None:
        """Allocate memory for moves between tensors with the strides and device of `src` and `dst`, and send nothing;
        with `held`, the caller promises that every move will be of these same tensors."""

    def move(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor], watch: Stopwatch) -> None:
        """Move the tensors `src` into `dst`, and time each phase by `watch`. The strides and device of the tensors must
        be equal to those passed to `prepare`.

        Raises PeerFailure if a rank fails or does not answer in time.
        """

    def let_go(self) -> None:
        """Release all references to tensors; call `prepare` again before the next move."""

    def keep(self, task: Task, gone: Collection[int]) -> Engine:
        """Return an engine for `task`, which the caller made from this engine's task by omitting the messages to the
        ranks in `gone`. The new engine can reuse this engine's memory and views. This call does not communicate."""


class Transport(Protocol):
    """The interface of a transport package. It provides a function that opens a group's connections, and a dict from
    name, such as "exchange", to a function that makes an engine (an object that runs moves)."""

    @property
    def ENGINES(self) -> Mapping[str, Callable[[Task], Engine]]:
        """A dict from an engine's name, as passed to `compile` as `engine`, to the function that makes the engine for a
        Task."""

    @property
    def open_wire(self) -> Callable[[compat.Group, float], Wire]:
        """The function that makes a group's wire (its connections), given how many seconds to wait for a peer."""


def transport_of(group: compat.Group) -> Transport:
    """Return the transport package for the group's backend, such as shardmath_gloo. Raises ExchangeError for a backend
    other than gloo and NCCL."""
    return cast(Transport, package_of(group))
