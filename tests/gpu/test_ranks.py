"""Moves over NCCL between processes, which share a GPU if there are too few: the tests of moves over gloo, on NCCL, and
ranks that come late, fail and leave."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shardmath as sm
from tests.distributed.changes.test_changes import test_all_sizes_of_elements_in_one_message
from tests.distributed.changes.test_changes import test_random_plans as test_random_changes
from tests.distributed.changes.test_changes import test_told as test_changes_that_are_told
from tests.distributed.dtensors.test_dtensor import (
    test_c02_what_fsdp2_over_tensor_parallel_stores,
    test_everything_to_everything,
    test_gradients_are_those_of_dtensor,
    test_what_distribute_tensor_stores,
    test_what_torch_gets_wrong,
)
from tests.distributed.exchange.test_mover import (
    check,
    reductions,
    test_adjoints,
    test_groups_of_some_ranks,
    test_many_rounds,
    test_tensors_that_are_not_contiguous,
)
from tests.distributed.pool import Pool, free_port
from tests.distributed.refits.test_refit import test_a_module_under_fsdp
from tests.distributed.states.test_training import runs, test_goes_on
from tests.distributed.tasks import joint, refits
from tests.distributed.tasks.cases import make_case, random_plan
from tests.distributed.tasks.scenarios import move_cases
from tests.gpu import tasks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(120),
]

__all__ = [
    "runs",
    "test_a_module_under_fsdp",
    "test_adjoints",
    "test_all_sizes_of_elements_in_one_message",
    "test_c02_what_fsdp2_over_tensor_parallel_stores",
    "test_changes_that_are_told",
    "test_everything_to_everything",
    "test_goes_on",
    "test_gradients_are_those_of_dtensor",
    "test_groups_of_some_ranks",
    "test_many_rounds",
    "test_random_changes",
    "test_tensors_that_are_not_contiguous",
    "test_what_distribute_tensor_stores",
    "test_what_torch_gets_wrong",
]

POOLS: list[Pool] = []


@pytest.fixture
def pool() -> Pool:
    """Eight NCCL workers that tests leave whole; new ones after a test that failed."""
    if POOLS and POOLS[0].broken:
        POOLS.pop().close()
    if not POOLS:
        POOLS.append(Pool(8, backend="nccl"))
    return POOLS[0]


@pytest.fixture(scope="module", autouse=True)
def _closing() -> Iterator[None]:
    yield
    while POOLS:
        POOLS.pop().close()


@pytest.fixture
def four() -> Iterator[Pool]:
    """Four NCCL workers for one test, which may lose some."""
    workers = Pool(4, backend="nccl")
    yield workers
    workers.close()


def test_random_plans(pool: Pool) -> None:
    check(pool, [make_case(random_plan(seed), seed) for seed in range(100)])


@pytest.mark.parametrize("op", ["sum", "avg", "product", "max", "min"])
def test_reductions_are_bitwise(pool: Pool, op: str) -> None:
    """Reduce-scatter and all-reduce, in the order of simulate."""
    check(pool, [make_case(plan) for plan in reductions(op)])


def test_programs(pool: Pool) -> None:
    """Relayed between nodes."""
    mesh = sm.Mesh(dp=2, tp=4)
    plan = sm.plan(sm.Layout((64, 64), mesh, "(tp dp n) h"), sm.Layout((64, 64), mesh, "n (tp h)"))
    where = sm.Topology(ranks_per_node=4, latency_s=0.0)
    program: Any = sm.schedule(plan, topology=where, fanout="node")
    case, wanted = make_case(plan)
    for rank, (named,) in enumerate(
        pool.run(move_cases, [dataclasses.replace(case, plan=program)])
    ):
        assert named == wanted.get(rank, {})


def test_refits(pool: Pool) -> None:
    """From a Megatron trainer on ranks 0 to 3 into an engine on ranks 4 to 7 that computes some weights."""
    for right in pool.run(refits.move, range(4, 8), 3):
        assert not any(right), right


@pytest.fixture(scope="module")
def jobs() -> Iterator[list[Pool]]:
    """Two jobs of two NCCL workers that know nothing of each other."""
    made = [Pool(2, backend="nccl"), Pool(2, backend="nccl")]
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("find", "more", "wanted"),
    [
        (joint.moves, ("auto",), None),
        (joint.changes, (), None),
        (joint.quantizes, (), ""),
        (joint.refits, (), [3]),
    ],
)
def test_joint_groups(jobs: list[Pool], find: Any, more: tuple[Any, ...], wanted: Any) -> None:
    """Of the ranks of both jobs: moves in every way, digests, changes, quantization, refits."""
    where = f"127.0.0.1:{free_port()}"

    def ask(number: int) -> list[Any]:
        return jobs[number].run(joint.joined, where, 2 * number, 4, "jobs", find, *more)

    with ThreadPoolExecutor(2) as threads:
        found = [one for job in threads.map(ask, range(2)) for one in job]
    for one in found:
        assert not any(one) if wanted is None else one == wanted, one


def test_what_one_rank_does_wrong(four: Pool) -> None:
    """It is an error on all, and the group stays whole."""
    for dtype, *after, device, _, _, shape, _, _, other in four.run(tasks.take_wrong, (32, 16, 16)):
        assert dtype.startswith("rank 2: the source tensor has dtype float64")
        assert "rank 2: the source tensor is on device 'cpu', the process group moves" in device
        assert shape.startswith("rank 2: the source tensor has shape")
        assert after == ["", ""]
        assert other.startswith("ranks disagree on what to do")


def test_a_rank_that_comes_late(four: Pool) -> None:
    """Within the timeout it is waited for."""
    for (said, _), after in four.run(tasks.come_late, 3.0, 8.0):
        assert (said, after) == ("", ["", ""])


def test_a_rank_that_comes_too_late(four: Pool) -> None:
    """All raise in time, the late one too, and go on in another group."""
    for rank, ((said, seconds), after) in enumerate(four.run(tasks.come_late, 9.0, 4.0)):
        # NCCL does not tell the late one whom it lost.
        assert said.startswith("the exchange" if rank == 1 else "rank 1 failed while")
        assert seconds < 6.0
        assert after == ["", ""]


@pytest.mark.parametrize("at", ["", "start", "finish"])
def test_a_rank_that_dies(four: Pool, at: str) -> None:
    """The others say so, keep what they had, and go on without it; torch's watchdog lets them live."""
    told = four.attempt(tasks.die, 3, at, signal.SIGKILL, ranks=range(3))
    for (said, seconds), kept, after in told:
        assert said.startswith("rank 3 failed while")
        assert seconds < 8.0 and kept and after == ["", "", ""]


def test_ranks_live_on_after_a_failure(four: Pool) -> None:
    """Torch's watchdog would end them a minute after an error."""
    told = four.attempt(tasks.live_on, 3, 80.0, ranks=range(3), timeout=110.0)
    assert told == [["", ""]] * 3


def test_a_rank_that_stops(four: Pool) -> None:
    """As one that dies, but only time tells."""
    for (said, seconds), kept, after in four.attempt(
        tasks.die, 3, "", signal.SIGSTOP, ranks=range(3)
    ):
        assert said.startswith("rank 3 failed while")
        assert seconds < 8.0 and kept and after == ["", "", ""]


def test_ctrl_c_on_a_rank_that_waits(four: Pool) -> None:
    first, *others = four.run(tasks.interrupt)
    assert first[0].startswith("KeyboardInterrupt")
    for said, seconds in others:
        assert said.startswith("rank 0 failed while") and "KeyboardInterrupt" in said
        assert seconds < 5.0
