"""Staging: memory for messages that cannot be sent or received in place.

1. Staging belongs to a group and a device, not to a move: moves of one group follow each other, so
   one block, large enough for each of them, serves them all. Moves that overlap in time, in
   different threads, have one block each. Moves under different streams of a GPU follow each other,
   too: a move's work on its block waits for the previous move's work on it.
2. Memory is allocated before the ranks vote (`reserve`), so that a lack of memory is an objection
   and breaks nothing.
3. After a failure messages may still arrive in a block: it is never lent again, and lives as long
   as its group's staging.
4. A group that replaces another takes over its free blocks (`take_over`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from shardmath_torch.groups.compat import Group

__all__ = ["StagingBlock", "Staging", "staging_of"]


@dataclass(eq=False)
class StagingBlock:
    """A block of staging memory, with a CUDA event (None on the CPU, and before the first use) that completes when the
    block's last use ends."""

    memory: Tensor
    last_use: torch.cuda.Event | None = None


class Staging:
    """The blocks of staging memory of one group on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Blocks are taken and given back in one step each, so that threads need no lock.
        self._free_blocks: list[StagingBlock] = []
        # Blocks of moves that failed: messages may still arrive in them.
        self._abandoned_memory: list[Tensor] = []

    def reserve(self, nbytes: int) -> None:
        """Make sure that a staging block of at least `nbytes` is free, if need be by replacing a smaller one. Raises
        torch's error if memory is short."""
        self._free_blocks.append(self._take(nbytes))

    def take_over(self, other: Staging) -> None:
        """Take the free blocks of `other`, the staging of another group."""
        while other is not self:
            # Popped without a check, as in `_take`.
            try:
                self._free_blocks.append(other._free_blocks.pop())
            except IndexError:
                return

    def _take(self, nbytes: int) -> StagingBlock:
        """Take the latest free block, or replace it with a new one if it is too small."""
        # Popped without a check, between which and the pop another thread might take the block.
        with contextlib.suppress(IndexError):
            block = self._free_blocks.pop()
            if block.memory.nbytes >= nbytes:
                return block
            # Freed before the larger one is made, since both may not fit.
            del block
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return StagingBlock(memory)

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[StagingBlock]:
        """Lend staging memory of at least `nbytes` bytes to the body of a `with` statement. If the body raises, this
        memory is never lent again."""
        block = self._take(nbytes)
        try:
            if block.last_use is not None:
                torch.cuda.current_stream(self.device).wait_event(block.last_use)
            yield block
        except BaseException:
            # Kept alive, but not free.
            self._abandoned_memory.append(block.memory)
            raise
        block.last_use = _record_use(block.memory)
        self._free_blocks.append(block)


def _record_use(memory: Tensor) -> torch.cuda.Event | None:
    """An event that completes when the current stream no longer uses the memory; None on the CPU."""
    if memory.device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(memory.device)
    # If a larger block replaces this one, torch does not reuse the memory before the event.
    memory.record_stream(stream)
    event: torch.cuda.Event = stream.record_event()
    return event


_of_groups: WeakKeyDictionary[Group, dict[torch.device, Staging]] = WeakKeyDictionary()


def staging_of(group: Group, device: torch.device) -> Staging:
    """Return the group's staging memory on the device, which is freed with the group."""
    by_device = _of_groups.setdefault(group, {})
    return by_device.setdefault(device, Staging(device))
