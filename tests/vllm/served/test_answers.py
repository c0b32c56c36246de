"""After a call that failed, the answers to the next one are those to it."""

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


class Worker(Queue):
    """Answers what it is asked, unless another is to answer alone; refuses "no"."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def hear(self, said: Any) -> None:
        _, args, _, rank = said
        if rank in (None, self._rank):
            self._answers.append((FAILED if args == ("no",) else DONE, (*args, self._rank)))


class Workers(Queue):
    """Those who are asked."""

    def __init__(self, *workers: Worker) -> None:
        self._workers = workers

    def enqueue(self, said: Any) -> None:
        super().enqueue(said)
        for worker in self._workers:
            worker.hear(said)


class Aggregator:
    """As of a KV connector: for it all workers answer, each time."""

    def aggregate(self, outputs: list[Any], output_rank: int) -> Any:
        assert len(outputs) == 2
        return outputs[output_rank]


def start(aggregator: Aggregator | None = None) -> Any:
    """An executor of two workers, of which the first one answers steps."""
    pass_over_old_answers()
    executor: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.response_mqs = [Worker(0), Worker(1)]
    executor.rpc_broadcast_mq = Workers(*executor.response_mqs)
    executor.futures_queue = deque()
    executor.is_failed = False
    executor.output_rank = 0
    executor.kv_output_aggregator = aggregator
    executor.ec_output_aggregator = None
    return executor


@pytest.mark.parametrize("aggregator", [None, Aggregator()])
def test_steps_that_one_worker_answers_or_all_do(aggregator: Aggregator | None) -> None:
    """Whoever has answered, no worker is waited for that was not asked for more."""
    executor = start(aggregator)
    for step in range(3):
        assert executor.execute_model(step) == (step, 0)
        assert executor.sample_tokens(step, non_block=True).result() == (step, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            executor.collective_rpc("update_weights", args=("no",))
        assert executor.collective_rpc("update_weights", args=("yes",)) == [("yes", 0), ("yes", 1)]
        assert executor.execute_model("next") == ("next", 0)


def test_what_could_not_be_asked_during_a_step_leaves_its_answer() -> None:
    executor = start()
    first = executor.execute_model("first", non_block=True)
    with pytest.raises(TypeError, match="cannot pickle"):
        executor.collective_rpc("apply_model", args=(threading.Lock(),))
    second = executor.execute_model("second", non_block=True)
    assert first.result() == ("first", 0)
    assert second.result() == ("second", 0)


def test_a_step_that_fails_on_a_worker_leaves_what_others_answered() -> None:
    """As its future says, and not the call."""
    executor = start(Aggregator())
    failing = executor.execute_model("no", non_block=True)
    later = executor.execute_model("yes", non_block=True)
    with pytest.raises(RuntimeError, match="no"):
        failing.result()
    assert later.result() == ("yes", 0)
    assert executor.collective_rpc("update_weights", args=("yes",)) == [("yes", 0), ("yes", 1)]
