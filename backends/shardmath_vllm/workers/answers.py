"""Answers: what vLLM 0.32 leaves unread of its workers' answers, and would take for answers to what it asks next.

`MultiprocExecutor.collective_rpc` raises at the first worker that failed, and leaves the answers of those behind in
their queues. From then on each call gets the answers to the one before: what all workers have refused once fails the
next time, too. Here each call knows which answer of a worker is its own, and passes over earlier ones. Workers answer
in the order in which they are asked.

vLLM looks for an answer without a pause until it has had none for a second. While workers receive weights, they and the
trainer need that processor, where processors are few, so an engine is made to sleep until an update is answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

__all__ = ["pass_over_old_answers", "sleep_until_answered"]

DONE = "_shardmath_passes_over_old_answers"


class _Worker:
    """A worker's queue of answers; `asked` is the number of requests that the worker answers, and `read` the number of
    answers that were read.
    """

    def __init__(self, queue: Any) -> None:
        self.queue = queue
        self.asked = 0
        self.read = 0

    def dequeue(self, *args: Any, **named: Any) -> Any:
        """Return the next answer, to whatever request."""
        answer = self.queue.dequeue(*args, **named)
        self.read += 1
        return answer


class _Answers:
    """A worker's queue of answers, for the call whose request is the next one."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._earlier = worker.asked

    def dequeue(self, *args: Any, **named: Any) -> Any:
        """Drop the answers to earlier requests, for which no call waits any more: calls wait in the order in which they
        ask. Return the answer to this one.
        """
        while self._worker.read < self._earlier:
            self._worker.dequeue(*args, **named)
        return self._worker.dequeue(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._worker.queue, name)


class _Asking:
    """The queue that sends requests to all `workers`."""

    def __init__(self, queue: Any, workers: list[_Worker]) -> None:
        self._queue = queue
        self.workers = workers

    def enqueue(self, request: Any, *args: Any, **named: Any) -> Any:
        """Send a request to all workers by `enqueue` of vLLM's queue, which this object wraps; return what `enqueue`
        returns. Count it for the workers that answer it.
        """
        result = self._queue.enqueue(request, *args, **named)
        # The last item is the rank that answers, None for all.
        *_, rank = request
        for worker in self.workers if rank is None else [self.workers[rank]]:
            worker.asked += 1
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


def pass_over_old_answers() -> None:
    """Patch vLLM's executors in this process to skip unread answers to earlier calls; a second call does nothing."""
    if hasattr(MultiprocExecutor, DONE):
        return
    MultiprocExecutor.collective_rpc = _count(MultiprocExecutor.collective_rpc)
    setattr(MultiprocExecutor, DONE, True)


def _count(ask: Callable[..., Any]) -> Callable[..., Any]:
    """`collective_rpc` with counts of requests and answers, to know which answers are old."""

    def collective_rpc(self: Any, *args: Any, **named: Any) -> Any:
        requests = self.rpc_broadcast_mq
        # There are no requests on other nodes than the first, nor after the end.
        if requests is not None:
            if not isinstance(requests, _Asking):
                requests = _Asking(requests, [_Worker(queue) for queue in self.response_mqs])
                self.rpc_broadcast_mq = requests
            # A new list: the call that gets it keeps it until it has its answers.
            self.response_mqs = [_Answers(worker) for worker in requests.workers]
        return ask(self, *args, **named)

    return collective_rpc


def sleep_until_answered(executor: Any) -> None:
    """Have the executor's next call sleep until its workers answer, rather than look for their answers all the time."""
    # An executor whose one worker is in its own process has no queues.
    for queue in getattr(executor, "response_mqs", ()):
        # None where the answers come from another node, for which vLLM sleeps by itself.
        waiting = getattr(queue, "_spin_condition", None)
        if waiting is not None:
            # As if the last answer had come long ago.
            waiting.last_read = -math.inf
