"""The exchange on CUDA: the same rounds, with staging that no stream may reuse too early."""

from __future__ import annotations

import torch
from torch import Tensor

from shardmath_torch.exchange.engine import Exchange
from shardmath_torch.exchange.staging import Fence
from shardmath_torch.exchange.task import Task

__all__ = ["cuda_exchange"]


def cuda_exchange(task: Task) -> Exchange:
    """The engine "exchange".

    Moves may run under different streams: a move's kernels wait for those that had its staging
    before.
    """
    fence = Fence(_record_use, _wait_for_use)
    return Exchange(task, fence)


def _record_use(memory: Tensor) -> torch.cuda.Event:
    """What ends when the current stream has done with the memory, which is not given to another before that."""
    stream = torch.cuda.current_stream()
    memory.record_stream(stream)
    event: torch.cuda.Event = stream.record_event()
    return event


def _wait_for_use(used: object) -> None:
    """Let the current stream wait for that end."""
    # A new block has not been used by anybody.
    if isinstance(used, torch.cuda.Event):
        stream = torch.cuda.current_stream()
        stream.wait_event(used)
