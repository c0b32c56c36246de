"""The exchange on CUDA: the same rounds, with staging that no stream may reuse too early."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardmath_torch.exchange import Exchange
from shardmath_torch.wire import Task

__all__ = ["CudaExchange"]


class CudaExchange:
    """The engine "exchange". Moves may run under different streams: a move's kernels wait for those of the last."""

    def __init__(self, task: Task) -> None:
        self._exchange = Exchange(task)
        self._done: torch.cuda.Event | None = None

    @property
    def staging_bytes(self) -> int:
        """Bytes of staging memory held between moves."""
        return self._exchange.staging_bytes

    def prepare(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
        """Finds where all messages lie in these tensors, and makes staging for those that need it."""
        self._exchange.prepare(src, dst)

    def move(self, src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
        """Moves, on the current stream. Raises PeerFailure."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        self._exchange.move(src, dst)
        self._done = torch.cuda.current_stream().record_event()
