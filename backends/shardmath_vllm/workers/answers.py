"""Answers: all workers' answers to a call are read, also where one of them is an error.

Where a call fails on several workers, vLLM 0.32 reads the answer of the first and leaves those of the others in their
queues (vllm#49972). Each later call then takes the answers to an earlier one for its own: meeting again fails with the
error of the update that was refused before. Transfers fail on all workers if they do on one, so the rest is read here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from shardmath_vllm.infos import BACKEND

__all__ = ["read_all_answers"]

_call = MultiprocExecutor.collective_rpc


class _Queue:
    """A worker's answers, and whether one was read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.was_read = False

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        self.was_read = True
        return self._queue.dequeue(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def read_all_answers() -> None:
    """Have vLLM do so, in engines that take weights from shardmath."""
    MultiprocExecutor.collective_rpc = _call_and_read


def _call_and_read(self: Any, *args: Any, **kwargs: Any) -> Any:
    """What vLLM's own call does, and the rest of the answers."""
    transfer = self.vllm_config.weight_transfer_config
    awaits_one = kwargs.get("non_block") or kwargs.get("unique_reply_rank") is not None
    if awaits_one or transfer is None or transfer.backend != BACKEND:
        return _call(self, *args, **kwargs)
    queues = self.response_mqs
    watched = [_Queue(queue) for queue in queues]
    self.response_mqs = watched
    try:
        return _call(self, *args, **kwargs)
    except RuntimeError:
        # Where none was read, the call was not even made.
        if any(queue.was_read for queue in watched):
            _read_rest(watched)
        raise
    finally:
        # Not where vLLM has put others there, as it does when a worker is gone.
        if self.response_mqs is watched:
            self.response_mqs = queues


def _read_rest(queues: Sequence[_Queue]) -> None:
    """Read the answers that were not."""
    for queue in queues:
        if not queue.was_read:
            # Of a worker that is gone there is none, and what was wrong first is known already.
            with suppress(RuntimeError):
                queue.dequeue()
