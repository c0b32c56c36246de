"""Batches: messages that go as one group of NCCL's, and votes, over any process group.

As torch's own `batch_isend_irecv` and `all_gather` have them (torch 2.13), which know registered groups alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

from shardmath_torch.groups import compat

__all__ = ["WireMessage", "start_batch", "start_gather"]

NO_TAG = 0
"""NCCL has none."""


class WireMessage(NamedTuple):
    """Bytes that are sent or received; `place` is the other rank's in the group."""

    sends: bool
    memory: Tensor
    place: int


def start_batch(
    group: compat.Group, device: torch.device, messages: Sequence[WireMessage]
) -> list[dist.Work]:
    """What to wait for. All messages are one group; of a backend without groups, each is by itself."""
    channel = compat.channel_of(group)
    if not channel._get_backend(device).supports_coalescing:
        return [_post(channel, message) for message in messages]
    channel._start_coalescing(device)
    for message in messages:
        _post(channel, message)
    work: dist.Work | None = channel._end_coalescing(device)
    return [] if work is None else [work]


def _post(channel: compat.Group, message: WireMessage) -> dist.Work:
    post = channel.send if message.sends else channel.recv
    return post([message.memory], message.place, NO_TAG)


def start_gather(group: compat.Group, rows: Sequence[Tensor], mine: Tensor) -> dist.Work | None:
    """Each rank's `mine` into the row of its place; None where there is nothing to do."""
    options = AllgatherOptions()
    options.asyncOp = True
    return compat.channel_of(group).allgather([list(rows)], [mine], options)
