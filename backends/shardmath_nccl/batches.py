"""Batches: messages posted as one NCCL group, and gathers, over any process group.

They do what torch's own `batch_isend_irecv` and `all_gather` do (torch 2.13), which take registered groups only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardmath_torch.groups import compat

__all__ = ["WireMessage", "start_batch", "start_gather"]

NO_TAG = 0
"""The tag to pass: NCCL has no tags."""


class WireMessage(NamedTuple):
    """A message over NCCL to or from the rank with number `place` in the process group. The tensor `memory` is sent if
    `sends` is True; otherwise, it receives the message."""

    sends: bool
    memory: Tensor
    place: int


def start_batch(
    group: compat.Group, device: torch.device, messages: Sequence[WireMessage]
) -> list[dist.Work]:
    """Start all `messages`, together as one NCCL group if the backend can, and return torch's handles to wait for."""
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
    """Start an all-gather of all ranks' tensors `mine` into `rows`, in the group's order. Return the Work that torch's
    allgather returned, which can be None; then there is nothing to wait for."""
    options = compat.AllgatherOptions()
    options.asyncOp = True
    return compat.channel_of(group).allgather([list(rows)], [mine], options)
