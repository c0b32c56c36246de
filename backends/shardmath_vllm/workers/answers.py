"""Answers: what vLLM 0.32 leaves unread of its workers' answers, and would take for answers to what it asks next.

`MultiprocExecutor.collective_rpc` raises at the first worker that failed, and leaves the answers of those behind in
their queues. From then on each call gets the answers to the one before: what all workers have refused once fails the
next time, too. Here they are passed over. Workers answer in the order in which they are asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

__all__ = ["pass_over_old_answers"]

DONE = "_shardmath_passes_over_old_answers"


class _Queue:
    """A worker's queue of answers; `old` is the number of coming answers for which no call waits."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.asked = 0
        self.read = 0
        self.old = 0

    def dequeue(self, *args: Any, **named: Any) -> Any:
        """Drop the answers for which no call waits any more, and return the next one."""
        while self.old:
            self._dequeue(*args, **named)
            self.old -= 1
        return self._dequeue(*args, **named)

    def _dequeue(self, *args: Any, **named: Any) -> Any:
        answer = self._queue.dequeue(*args, **named)
        self.read += 1
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)


class _Asking:
    """The queue that sends requests to all workers; `asked` is the number of requests sent."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.asked = 0

    def enqueue(self, *args: Any, **named: Any) -> Any:
        """Send a request to all workers by `enqueue` of vLLM's queue, which this object wraps; return what `enqueue`
        returns. Add 1 to `asked`, the number of requests sent.
        """
        result = self._queue.enqueue(*args, **named)
        self.asked += 1
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
        queues = _wrap(self)
        requests = self.rpc_broadcast_mq
        asked_before = requests.asked if requests else 0
        # With `unique_reply_rank`, only the worker of this rank answers.
        rank = named.get("unique_reply_rank")
        waited_for = queues if rank is None else [queues[rank]]
        try:
            answer = ask(self, *args, **named)
        except BaseException:
            # 1 if the request was sent before the error, else 0.
            _count_asked(waited_for, requests.asked - asked_before if requests else 0)
            # No call waits any more: this one has waited for the earlier ones. So all unread answers are old.
            for queue in queues:
                queue.old = queue.asked - queue.read
            raise
        _count_asked(waited_for, 1)
        return answer

    return collective_rpc


def _count_asked(queues: list[_Queue], times: int) -> None:
    """Note that each of these workers was asked so many times, and so will answer as often."""
    for queue in queues:
        queue.asked += times


def _wrap(executor: Any) -> list[_Queue]:
    """The executor's queues of answers, replaced, with its queue of requests, by ones that count."""
    asking = executor.rpc_broadcast_mq
    if asking is not None and not isinstance(asking, _Asking):
        executor.rpc_broadcast_mq = _Asking(asking)
    queues = executor.response_mqs
    for place, queue in enumerate(queues):
        if not isinstance(queue, _Queue):
            queues[place] = _Queue(queue)
    return list(queues)
