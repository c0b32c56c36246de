"""After a call that failed on all workers, the answers to the next one are those to it."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from typing import Any

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from shardmath_vllm.workers.answers import pass_over_old_answers

DONE, FAILED = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE


class Queue:
    """Answers of a worker, in their order."""

    def __init__(self, *answers: Any) -> None:
        self._answers = deque(answers)

    def enqueue(self, said: Any) -> None:
        """Nobody is there to hear it. Some things cannot be said."""
        pickle.dumps(said)

    def dequeue(self, timeout: float | None = None) -> Any:
        return self._answers.popleft()


def test_what_could_not_be_asked_has_no_answers() -> None:
    """None is waited for in the place of that to the next call."""
    pass_over_old_answers()
    executor: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.rpc_broadcast_mq = Queue()
    executor.response_mqs = [Queue((DONE, 1), (DONE, 2))]
    executor.futures_queue = deque()
    executor.is_failed = False
    assert executor.collective_rpc("update_weights") == [1]
    with pytest.raises(TypeError, match="cannot pickle"):
        executor.collective_rpc("update_weights", args=(threading.Lock(),))
    assert executor.collective_rpc("update_weights") == [2]


def test_answers_that_were_left_are_passed_over() -> None:
    pass_over_old_answers()
    executor: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.rpc_broadcast_mq = Queue()
    executor.response_mqs = [Queue((FAILED, "no"), (DONE, worker)) for worker in range(3)]
    executor.futures_queue = deque()
    executor.is_failed = False
    with pytest.raises(RuntimeError, match="no"):
        executor.collective_rpc("update_weights")
    assert executor.collective_rpc("start_weight_update") == [0, 1, 2]
