"""Engine: the exchange, which moves a rank's part of a plan over any wire.

A rank runs its rounds (`rounds`) in order, with results equal to `shardmath.simulate` bit for bit. A round is done
before the next round packs, so bytes that arrive in one may be relayed in the next. On a GPU "before" is the order of
its streams: the host only queues work, and waits once, at the end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Mapping
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardmath.plans.programs.messages import Round
from shardmath_torch.moves.exchange.endpoints import (
    BoundRound,
    bind,
    count_staging_bytes,
    drop_sends,
    set_apart,
)
from shardmath_torch.moves.exchange.handing import keep_handed
from shardmath_torch.moves.exchange.rounds import Rounds
from shardmath_torch.moves.exchange.staging import StagingBlock, staging_of
from shardmath_torch.moves.exchange.task import Task
from shardmath_torch.moves.exchange.views import MoveViews, Staged, divide, fill
from shardmath_torch.moves.observing.laps import FOLDED
from shardmath_torch.moves.observing.stopwatch import Stopwatch

__all__ = ["Exchange", "find_device"]

Tensors: TypeAlias = Mapping[str, Tensor]


class Exchange:
    """The engine "exchange", which moves a plan's bytes by messages between pairs of ranks.

    Pieces of at least `apart` bytes, if given, are separate messages.
    """

    def __init__(self, task: Task, apart: int | None = None) -> None:
        self._task = task
        self._apart_bytes = apart
        # (source strides, destination strides, device) for which `_rounds` are bound; None if they are not bound.
        self._bound_strides: object = None
        self._rounds: tuple[BoundRound, ...] = ()
        self._staging = staging_of(task.group, torch.device("cpu"))
        self._needed_bytes = 0
        # The mappings whose tensors keep their addresses, so that `_views` are kept; None if the caller promised none.
        self._held_tensors: tuple[Tensors, Tensors] | None = None
        self._views: MoveViews | None = None
        # Weak, so that nothing refers to a block that a larger one has replaced.
        self._staged: WeakKeyDictionary[StagingBlock, Staged] = WeakKeyDictionary()
        # The number of the part's steps that have begun; None if it is not known.
        self.begun: int | None = 0

    @functools.cached_property
    def posted(self) -> tuple[Round, ...]:
        """The rounds of messages that this rank sends and receives by the plan. If the constructor was given `apart`,
        each slice of a tensor that has at least `apart` bytes is a message by itself, while smaller slices can share
        one."""
        return set_apart(self._task.part.rounds, self._apart_bytes)

    @property
    def staging_bytes(self) -> int:
        """The bytes of the group's staging memory that a move needs; 0 before `prepare`."""
        return self._needed_bytes

    def prepare(self, src: Tensors, dst: Tensors, held: bool = False) -> None:
        """Find where each message is read or written in tensors with the strides and device of `src` and `dst`, and
        allocate staging memory for messages that need it. If `held`, views of these tensors are kept from move to
        move."""
        self._held_tensors = (src, dst) if held else None
        self._views = None
        src_strides = {key: tensor.stride() for key, tensor in src.items()}
        dst_strides = {key: tensor.stride() for key, tensor in dst.items()}
        device = find_device(src, dst)
        strides = src_strides, dst_strides, device
        if strides != self._bound_strides:
            # Bound to nothing until all is done, so that an interrupt leaves nothing half bound.
            self._bound_strides = None
            self._rounds = keep_handed(bind(self.posted, src_strides, dst_strides))
            self._staging = staging_of(self._task.group, device)
            self._needed_bytes = count_staging_bytes(self._rounds)
            self._staged.clear()
            self._bound_strides = strides
        self._staging.reserve(self._needed_bytes)

    def let_go(self) -> None:
        """Drop the engine's references to the caller's tensors and to staging memory, so that their memory can be
        freed."""
        self._held_tensors = self._views = None

    def keep(self, task: Task, gone: Collection[int]) -> Exchange:
        """Return a copy of the engine for `task`, this rank's part of another plan, with the same tensors but no sends
        to the ranks in `gone`. The copy uses the group and connections of `task`, and takes over free staging memory.

        Raises torch's error if memory is short.
        """
        narrowed = Exchange(task, self._apart_bytes)
        narrowed._rounds = drop_sends(self._rounds, gone)
        narrowed._bound_strides = self._bound_strides
        narrowed._needed_bytes = self._needed_bytes
        narrowed._held_tensors = self._held_tensors
        narrowed._views = self._views
        narrowed._staging = staging_of(task.group, self._staging.device)
        narrowed._staging.take_over(self._staging)
        narrowed._staging.reserve(self._needed_bytes)
        return narrowed

    def move(self, src: Tensors, dst: Tensors, watch: Stopwatch) -> None:
        """Move the plan's tensors from `src` to `dst`, and time each phase by `watch`. Raises PeerFailure if a rank
        fails or does not answer in time."""
        part = self._task.part
        self._note_begun(0)
        # Only in inference mode may inference tensors be written.
        with torch.inference_mode(), self._staging.lend(self._needed_bytes) as block:
            views = self._find_views(src, dst, block)
            self._note_begun(1)
            for work in part.fills:
                fill(work, dst)
                watch.lap(FOLDED)
            rounds = Rounds(self._task.wire, watch)
            for number, bound in enumerate(self._rounds):
                # Step 1 was the fills.
                self._note_begun(number + 2)
                receives = map(views.receive, bound.receives)
                sends = map(views.send, bound.sends)
                keeps = itertools.starmap(views.keep, bound.keeps)
                rounds.run(bound.step, receives, sends, keeps)
            self._note_begun(part.steps)
            for work in part.divisions:
                divide(work, dst)
                watch.lap(FOLDED)
            rounds.finish()
            # One more than the part has: all are done, and `finish` has waited for a GPU.
            self.begun = part.steps + 1

    def _note_begun(self, steps: int) -> None:
        """Note the number of steps that have begun; None on a GPU, which runs behind the host."""
        self.begun = steps if self._task.wire.device.type == "cpu" else None

    def _find_views(self, src: Tensors, dst: Tensors, block: StagingBlock) -> MoveViews:
        """Views of tensors and staging for a move; the previous move's if both are the same."""
        staged = self._staged.get(block)
        if staged is None:
            staged = self._staged[block] = Staged(block.memory)
        is_held = (
            self._held_tensors is not None
            and src is self._held_tensors[0]
            and dst is self._held_tensors[1]
        )
        if not is_held:
            return MoveViews(src, dst, staged)
        if self._views is None or self._views.staged is not staged:
            self._views = MoveViews(src, dst, staged, held=True)
        return self._views


def find_device(src: Tensors, dst: Tensors) -> torch.device:
    """Return the device of the rank's tensors, which is the same for all; the CPU if it has no tensors."""
    for tensor in (*src.values(), *dst.values()):
        return tensor.device
    return torch.device("cpu")
