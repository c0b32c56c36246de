"""Staging: memory in which messages lie that cannot be sent or received in place.

1. It belongs to a group and a device, not to a move: moves of one group follow each other, so one
   block, as large as the largest of them needs, serves them all. Moves that overlap in time, on
   threads of their own, have one each. Moves under different streams of a GPU follow each other,
   too: what one does with its block waits for what the one before did.
2. Room is made before the ranks agree (`reserve`), so that a lack of memory is an objection and
   breaks nothing.
3. After a failure messages may still arrive in a block: it is never lent again, and lives as long
   as its group's staging.
4. What is free goes on to another group that takes the place of one (`take_over`).
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
    """Memory, and what ends when the move that had it last has done with it: None where it has."""

    memory: Tensor
    used: torch.cuda.Event | None = None


class Staging:
    """The blocks of one group on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Blocks are taken and given back in one step each, so that threads need no lock.
        self._free: list[StagingBlock] = []
        self._lost: list[Tensor] = []

    def reserve(self, nbytes: int) -> None:
        """Have a free block of so many bytes. Raises what torch raises where memory is short."""
        self._free.append(self._take(nbytes))

    def take_over(self, former: Staging) -> None:
        """Have what was free of another group's."""
        while former is not self:
            try:
                self._free.append(former._free.pop())
            except IndexError:
                return

    def _take(self, nbytes: int) -> StagingBlock:
        """The latest free block if it is large enough, otherwise a new one in its place."""
        # Asking first whether there is one would let another thread take it in between.
        with contextlib.suppress(IndexError):
            block = self._free.pop()
            if block.memory.nbytes >= nbytes:
                return block
            # Let go of it before the larger one is made: both need not fit.
            del block
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return StagingBlock(memory)

    @contextlib.contextmanager
    def lend(self, nbytes: int) -> Iterator[StagingBlock]:
        """A block of at least so many bytes, which nobody else has meanwhile."""
        block = self._take(nbytes)
        try:
            if block.used is not None:
                torch.cuda.current_stream(self.device).wait_event(block.used)
            yield block
        except BaseException:
            # Kept alive, since messages may still arrive in it, and out of `_free`.
            self._lost.append(block.memory)
            raise
        block.used = _record_use(block.memory)
        self._free.append(block)


def _record_use(memory: Tensor) -> torch.cuda.Event | None:
    """What ends when the current stream has done with the memory; None on the CPU, where a call that returns has."""
    if memory.device.type != "cuda":
        return None
    stream = torch.cuda.current_stream(memory.device)
    # Where a larger block replaces it, nobody else is given the memory before that.
    memory.record_stream(stream)
    event: torch.cuda.Event = stream.record_event()
    return event


_of_groups: WeakKeyDictionary[Group, dict[torch.device, Staging]] = WeakKeyDictionary()


def staging_of(group: Group, device: torch.device) -> Staging:
    """The group's staging on the device; it goes when the group does."""
    by_device = _of_groups.setdefault(group, {})
    return by_device.setdefault(device, Staging(device))
